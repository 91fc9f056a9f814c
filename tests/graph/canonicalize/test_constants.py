"""Constants: what is folded, and what must not be."""

from __future__ import annotations

import numpy as np
import pytest

from onnxfuse.graph import consts
from onnxfuse.graph.canonicalize import canonicalize
from onnxfuse.graph.ir import Constant
from tests.graph.canonicalize.checking import canonical, ints, ops, text, weights
from tests.graph.soundness import load_text


def test_constant_nodes_become_initializers() -> None:
    model, counts = canonical(
        text("c = Constant <value_floats = [1.0, 2.0]> () y = Add (x, c)", "float[B,2] x", "float[B,2] y")
    )
    assert ops(model) == ["Add"]
    assert isinstance(model.graph.nodes[0].inputs[1], Constant)
    assert counts["constant-nodes"] == 1


def test_a_constant_that_is_an_output_stays() -> None:
    model, _ = canonical(
        text("y = Constant <value_float = 2.0> () z = Mul (x, y)", "float[B] x", "float y, float[B] z")
    )
    assert sorted(ops(model)) == ["Constant", "Mul"]


def test_a_constant_captured_by_two_branches_reaches_both() -> None:
    body = """c = Constant <value_float = 3.0> ()
      y = If (b) <then_branch = t () => (float[B] p) { p = Add (x, c) },
                  else_branch = e () => (float[B] q) { q = Sub (x, c) }>"""
    model, _ = canonical(text(body, "float[B] x, bool b", "float[B] y"))
    assert ops(model) == ["If"]


def test_shape_arithmetic_of_static_sizes_is_folded() -> None:
    body = """s = Shape (x) d = Gather (s, two) h = Div (d, n) u = Unsqueeze (h, zero)
      t = Concat <axis=0> (keep, n1, u) y = Reshape (x, t)"""
    model, counts = canonical(
        text(
            body,
            "float[B,S,64] x",
            "float[B,S,4,16] y",
            "int64 two = {2}, int64 n = {4}, int64[1] n1 = {4}, int64[1] zero = {0}, int64[2] keep = {0, 0}",
        )
    )
    assert ops(model) == ["Reshape"]
    assert ints(model.graph.nodes[0], 1) == [0, 0, 4, 16]
    assert counts["known-content"] >= 1


def test_small_constant_expressions_are_folded() -> None:
    body = "g = Add (w, one) h = Sqrt (g) i = Cast <to=1> (n) k = Mul (h, i) y = Mul (x, k)"
    model, _ = canonical(
        text(body, "float[B,4] x", "float[B,4] y", "float[4] w = {1,2,3,4}, float one = {1}, int64 n = {3}"),
        exact=False,
    )
    assert ops(model) == ["Mul"]
    np.testing.assert_allclose(
        consts.array(model.graph.nodes[0].inputs[1]), 3 * np.sqrt(np.arange(2.0, 6.0)), rtol=1e-6
    )


def test_dequantized_weights_stay_compressed() -> None:
    body = "d = DequantizeLinear (w, scale, zero) t = Transpose <perm=[1,0]> (d) y = MatMul (x, t)"
    model, _ = canonical(
        text(body, "float[B,16] x", "float[B,16] y", weights(16, 16, "int8") + ", float scale = {0.5}, int8 zero = {1}")
    )
    assert ops(model) == ["DequantizeLinear", "Transpose", "MatMul"]


def test_nothing_that_grows_is_folded() -> None:
    body = "e = Expand (w, u) n = Exp (e) y = Add (x, n) c = ConstantOfShape (t) z = MatMul (c, x)"
    constants = "int64[2] u = {64, 32}, int64[2] t = {64, 64}, float[1,32] w = {" + ",".join(["2"] * 32) + "}"
    model, _ = canonical(text(body, "float[64,32] x", "float[64,32] y, float[64,32] z", constants))
    assert "ConstantOfShape" in ops(model)
    assert "Expand" in ops(model)
    size = sum(
        len(i.raw_data) + 8 * len(i.int64_data) + 4 * len(i.float_data) for i in model.to_proto().graph.initializer
    )
    assert size < 600


@pytest.mark.parametrize(
    "cut",
    ["a, b = Split <axis=0> (w, sizes)", "a = Slice (w, zero, four, zero) b = Slice (w, four, far, zero)"],
    ids=["split", "slices"],
)
def test_a_weight_that_is_read_in_parts_is_stored_in_parts(cut: str) -> None:
    constants = weights(40, 32) + ", int64[2] sizes = {12, 28}, int64[1] zero = {0}, int64[1] four = {12}"
    body = f"{cut} s = Transpose (a) t = Transpose (b) y = MatMul (x, s) z = MatMul (x, t)"
    source = text(body, "float[B,S,32] x", "float[B,S,12] y, float[B,S,28] z", constants + ", int64[1] far = {100}")
    model, counts = canonical(source, exact=False)
    assert ops(model) == ["MatMul", "MatMul"]
    assert counts["fold-parts"] == 2
    held = sum(np.prod(t.dims) for t in model.to_proto().graph.initializer)
    assert held == 40 * 32


@pytest.mark.parametrize(
    "body",
    [
        "a = Slice (w, zero, most, zero) b = Slice (w, few, far, zero)",
        "a = Slice (w, zero, few, zero) b = Relu (w)",
    ],
    ids=["overlapping", "read-whole"],
)
def test_a_weight_whose_parts_are_larger_stays(body: str) -> None:
    constants = weights(40, 32) + ", int64[1] zero = {0}, int64[1] most = {36}, int64[1] few = {16}"
    constants += ", int64[1] far = {100}"
    outputs = "float[B,S,32] y, float[B,S,32] z"
    model = load_text(text(f"{body} y = MatMul (x, a) z = MatMul (x, b)", "float[B,S,K] x", outputs, constants))
    assert canonicalize(model)["fold-parts"] == 0
    assert "Slice" in ops(model)
