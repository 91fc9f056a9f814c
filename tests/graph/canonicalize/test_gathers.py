"""Gathers in their plainest form."""

from __future__ import annotations

import pytest

from tests.graph.canonicalize.checking import canonical, ops, text

TABLE = "float[5,2] t = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9}"


def test_positions_of_one_axis_are_those_of_rows() -> None:
    """Positions may count from the end, in both."""
    body = "m = Neg (p) u = Unsqueeze (m, last) g = GatherND (t, u) y = Relu (g)"
    model, counts = canonical(text(body, "int64[B,S] p", "float[B,S,2] y", f"{TABLE}, int64[1] last = {{-1}}"))
    assert ops(model) == ["Neg", "Gather", "Relu"] and counts["gathered-rows"] == 1


@pytest.mark.parametrize(
    "body",
    [
        "u = Unsqueeze (p, last) c = Concat <axis=-1> (u, u) g = GatherND (t, c) y = Relu (g)",
        "g = GatherND <batch_dims=1> (x, p1) y = Relu (g)",
    ],
)
def test_what_stays(body: str) -> None:
    inputs = "int64[B,S] p, int64[B,1] p1, float[B,4] x"
    result = "float[B,S] y" if "Concat" in body else "float[B] y"
    model, _ = canonical(text(body, inputs, result, f"{TABLE}, int64[1] last = {{-1}}"))
    assert "GatherND" in ops(model)
