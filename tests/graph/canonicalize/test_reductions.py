"""Reductions: their axes, and dimensions that are reduced and put back."""

from __future__ import annotations

import pytest

from tests.graph.canonicalize.checking import canonical, ops, text

LAST = "int64[1] last = {-1}, int64[1] two = {2}, int64[1] one = {1}, float eps = {0.5}, int64[3] kept = {0, 0, 1}"


@pytest.mark.parametrize("back", ["Unsqueeze (m, last)", "Unsqueeze (m, two)", "Reshape (m, kept)"])
def test_a_dim_that_is_put_back_is_kept(back: str) -> None:
    source = text(f"m = ReduceMax <keepdims=0> (x, last) u = {back} y = Sub (x, u)",
                  "float[B,S,4] x", "float[B,S,4] y", LAST)  # fmt: skip
    model, counts = canonical(source)
    assert ops(model) == ["ReduceMax", "Sub"]
    assert counts["kept-dims"] == 1
    assert "keepdims" not in model.graph.nodes[0].attrs


def test_also_behind_ops_on_each_element() -> None:
    body = """m = ReduceMean <keepdims=0> (x, last) e = Add (eps, m) r = Sqrt (e) i = Reciprocal (r)
      u = Unsqueeze (i, last) y = Mul (x, u)"""
    model, _ = canonical(text(body, "float[B,S,4] x", "float[B,S,4] y", LAST), exact=False)
    assert ops(model) == ["ReduceMean", "Add", "Sqrt", "Reciprocal", "Mul"]


@pytest.mark.parametrize(
    ("body", "outputs"),
    [
        ("m = ReduceSum <keepdims=0> (x, last) y = Unsqueeze (m, one)", "float[B,1,S] y"),
        ("m = ReduceSum <keepdims=0> (x, last) y = Unsqueeze (m, last)", "float[B,S,1] y, float[B,S] m"),
        ("m = ReduceSum <keepdims=0> (x, last) e = Add (m, m) y = Unsqueeze (e, last)", "float[B,S,1] y"),
    ],
    ids=["elsewhere", "read-otherwise", "two-operands"],
)
def test_what_stays(body: str, outputs: str) -> None:
    model, _ = canonical(text(body, "float[B,S,4] x", outputs, LAST))
    assert model.graph.nodes[0].attrs["keepdims"] == 0


def test_equal_reductions_with_differently_written_axes_are_one() -> None:
    body = "m = ReduceMean <noop_with_empty_axes=0> (x, last) n = ReduceMean <keepdims=1> (x, two) y = Add (m, n)"
    model, _ = canonical(text(body, "float[B,S,4] x", "float[B,S,1] y", LAST), exact=False)
    assert ops(model) == ["ReduceMean", "Add"]


def test_axes_as_attribute() -> None:
    body = "m = ReduceMean <axes=[-1], keepdims=0> (x) u = Unsqueeze (m, two) y = Sub (x, u)"
    model, _ = canonical(text(body, "float[B,S,4] x", "float[B,S,4] y", "int64[1] two = {2}", opset=17), exact=False)
    assert ops(model) == ["ReduceMean", "Sub"]
    assert model.graph.nodes[0].attrs["axes"] == [2]
