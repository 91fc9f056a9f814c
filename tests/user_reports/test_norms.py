"""Norms: other axes, other dtypes inside, broadcast sums before them, scales of other shapes and from other places."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import helper, numpy_helper

import onnxfuse
from tests.user_reports.cases import LAYER_NORM, RMS, Case, check_found, check_same, feeds, fused, ops, parse, run

GB = "float[8] gamma, float[8] beta"
X, Y = "float[B,S,8] x", "float[B,S,8] y"
LN = "LayerNormalization <axis=-1, epsilon=1e-5> (e, gamma, beta)"


def layer_norm(axes: str, tail: str) -> str:
    return LAYER_NORM.format(keepdims=1).replace("axes=[-1]", f"axes={axes}") + tail


CASES = [
    # Over other axes.
    Case("channels-of-an-image", "float[B,8,4,5] x", "float[B,8,4,5] y",
         layer_norm("[1]", "m = Mul (n, g) y = Add (m, b)"), "float[8,1,1] g, float[8,1,1] b",
         blocks={"layernorm": 1}, written={"ReduceMean": 0, "Transpose": 2}),
    Case("channels-of-an-image-negative-axis", "float[B,8,4,5] x", "float[B,8,4,5] y",
         layer_norm("[-3]", "m = Mul (g, n) y = Add (b, m)"), "float[1,8,1,1] g, float[1,8,1,1] b",
         blocks={"layernorm": 1}),
    Case("channels-of-a-sequence", "float[B,8,S] x", "float[B,8,S] y",
         layer_norm("[1]", "m = Mul (n, g) y = Add (m, b)"), "float[8,1] g, float[8,1] b",
         blocks={"layernorm": 1}, written={"ReduceMean": 0}),
    Case("channels-whose-transposes-cancel", "float[B,4,5,8] x0", "float[B,4,5,8] y",
         "x = Transpose <perm=[0,3,1,2]> (x0)" + layer_norm("[1]", "m = Mul (n, g) z = Add (m, b)")
         + "y = Transpose <perm=[0,2,3,1]> (z)", "float[8,1,1] g, float[8,1,1] b",
         blocks={"layernorm": 1}, written={"Transpose": 0, "LayerNormalization": 1}),
    Case("two-axes", "float[B,4,8] x", "float[B,4,8] y",
         layer_norm("[-2,-1]", "m = Mul (n, g) y = Add (m, b)"), "float[4,8] g, float[4,8] b",
         blocks={"layernorm": 1}, written={"ReduceMean": 0}),
    Case("two-axes-with-a-scale-of-one", "float[B,4,8] x", "float[B,4,8] y",
         layer_norm("[-2,-1]", "m = Mul (n, g) y = Add (m, b)"), "float[8] g, float[8] b", blocks={"layernorm": 0}),
    Case("two-axes-with-a-row-between", "float[4,S,8] x", "float[4,S,8] y",
         layer_norm("[0,2]", "m = Mul (n, g) y = Add (m, b)"), "float[8] g, float[8] b", blocks={"layernorm": 0}),
    Case("rms-over-two-axes", "float[B,4,8] x", "float[B,4,8] y",
         RMS.replace("axes=[-1]", "axes=[-2,-1]") + "n = Div (x, r) y = Mul (n, gamma)", "float[8] gamma",
         blocks={"rmsnorm": 0}),
    # Other spellings of the variance.
    Case("mean-of-squares", X, Y,
         "mean = ReduceMean <axes=[-1]> (x) sq = Mul (x, x) ms = ReduceMean <axes=[-1]> (sq) mm = Mul (mean, mean)"
         "var = Sub (ms, mm) ve = Add (var, eps) std = Sqrt (ve) d = Sub (x, mean) n = Div (d, std)"
         "m = Mul (n, gamma) y = Add (m, beta)", GB, blocks={"layernorm": 1}),
    Case("mean-of-squares-of-something-else", f"{X}, float[B,S,8] z", Y,
         "mean = ReduceMean <axes=[-1]> (x) sq = Mul (z, z) ms = ReduceMean <axes=[-1]> (sq) mm = Mul (mean, mean)"
         "var0 = Sub (ms, mm) var = Abs (var0) ve = Add (var, eps) std = Sqrt (ve) d = Sub (x, mean) n = Div (d, std)"
         "m = Mul (n, gamma) y = Add (m, beta)", GB, blocks={"layernorm": 0}),
    # Without a shift, without a scale.
    Case("no-shift", X, Y, layer_norm("[-1]", "y = Mul (n, gamma)"), GB,
         blocks={"layernorm": 1, "layernorm_no_bias": 1}),
    Case("no-scale", X, Y, layer_norm("[-1]", "y = Identity (n)"), blocks={"layernorm": 1}),
    Case("no-shift-before-a-product", X, "float[B,S,16] y",
         layer_norm("[-1]", "g = Mul (n, gamma) h = MatMul (g, w) y = Add (h, b)"), f"{GB}, float[8,16] w, float[16] b",
         blocks={"layernorm": 1, "layernorm_no_bias": 1, "matmul_bias": 1}),
    # Embeddings and their norm.
    Case("word-and-position-embeddings", "int64[B,4] ids", "float[B,4,8] y",
         f"t = Gather (table, ids) e = Add (t, positions) y = {LN}", f"float[16,8] table, float[1,4,8] positions, {GB}",
         blocks={"layernorm": 1, "bcast_add_layernorm": 1}),
    Case("positions-without-a-batch", "int64[B,S] ids, int64[S] pos", "float[B,S,8] y",
         f"t = Gather (table, ids) p = Gather (places, pos) e = Add (p, t) y = {LN}",
         f"float[16,8] table, float[16,8] places, {GB}", blocks={"layernorm": 1, "bcast_add_layernorm": 1}),
    Case("word-type-and-position-embeddings", "int64[B,S] ids, int64[B,S] kinds, int64[1,S] pos", "float[B,S,8] y",
         f"t = Gather (table, ids) k = Gather (types, kinds) p = Gather (places, pos) tk = Add (t, k) e = Add (tk, p)"
         f"y = {LN}", f"float[16,8] table, float[16,8] places, float[4,8] types, {GB}",
         blocks={"layernorm": 1, "bcast_add_layernorm": 1}),
    Case("one-row-for-every-token", "int64[B,S] ids", "float[B,S,8] y",
         f"t = Gather (table, ids) e = Add (t, row) y = {LN}", f"float[16,8] table, float[8] row, {GB}",
         blocks={"layernorm": 1, "bcast_add_layernorm": 0}),
    # Other dtypes inside.
    Case("t5-casts", "float16[B,S,8] x", "float16[B,S,8] y",
         "c = Cast <to=1> (x) sq = Pow (c, two) ms = ReduceMean <axes=[-1]> (sq) me = Add (ms, eps) r = Sqrt (me)"
         "i = Div (one, r) n = Mul (c, i) h = Cast <to=10> (n) y = Mul (gamma, h)", "float16[8] gamma",
         blocks={"rmsnorm": 1}),
    Case("sum-in-half-norm-in-float", "float16[B,S,8] x, float16[B,S,8] s", Y,
         f"a = Add (x, s) e = Cast <to=1> (a) y = {LN}", GB, blocks={"layernorm": 1}),
    Case("casts-to-double-stay", X, Y,
         "c = Cast <to=11> (x) sq = Mul (c, c) ms = ReduceMean <axes=[-1]> (sq) me = Add (ms, tiny) r = Sqrt (me)"
         "n = Div (c, r) h = Cast <to=1> (n) y = Mul (h, gamma)", "float[8] gamma, double tiny = {1e-5}", blocks={}),
    # Scales from elsewhere.
    Case("scale-behind-a-cast-of-a-constant", X, Y,
         RMS + "g1 = Constant <value = float[8] {1, 2, 3, 4, 5, 6, 7, 8}> () g2 = Cast <to=10> (g1)"
         "g3 = Cast <to=1> (g2) n = Div (x, r) y = Mul (n, g3)", blocks={"rmsnorm": 1}),
    Case("scale-of-one-element", X, Y, RMS + "n = Div (x, r) y = Mul (n, gamma)", "float[1] gamma", blocks={}),
    Case("scale-that-the-caller-gives", f"{X}, float[8] gamma", Y, RMS + "n = Div (x, r) y = Mul (n, gamma)",
         blocks={}),
    # The root of the pattern may be an input, a Mul behind a Gather, or an output of the graph.
    Case("rms-of-a-sum-that-is-also-an-output", f"{X}, float[B,S,8] s", f"{Y}, float[B,S,8] e",
         "e = Add (x, s)" + RMS.replace("(x,", "(e,") + "n = Div (e, r) y = Mul (n, gamma)", "float[8] gamma",
         blocks={"rmsnorm": 1, "skip_rmsnorm": 1}),
    Case("second-output-that-is-used", X, f"{Y}, float[B,S,1] q",
         "y, q = SimplifiedLayerNormalization <epsilon=1e-5> (x, gamma)", "float[8] gamma", blocks={"rmsnorm": 1},
         written={"SimplifiedLayerNormalization": 1}),
    Case("skip-norm-of-others-with-its-sum", f"{X}, float[B,S,8] s", f"{Y}, float[B,S,8] e",
         "y, q, v, e = com.microsoft.SkipSimplifiedLayerNormalization <epsilon=1e-5> (x, s, gamma)", "float[8] gamma",
         blocks={"rmsnorm": 1, "skip_rmsnorm": 1}),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_found_and_right(case: Case) -> None:
    check_found(case)


def test_a_scale_that_the_caller_may_override_is_no_constant() -> None:
    """An initializer that is also a graph input has a default, no more: the value given at run time counts."""
    case = Case("overridable", X, "float[B,S,16] y", RMS + "n = Div (x, r) m = Mul (n, gamma) y = MatMul (m, w)",
                "float[8] gamma, float[8,16] w")  # fmt: skip
    model = case.model()
    model.graph.input.append(helper.make_tensor_value_info("gamma", 1, [8]))
    after = fused(model).model
    given = {"x": feeds(model, case.dims)["x"]}
    for more in ({}, {"gamma": np.arange(8, dtype=np.float32)}):
        np.testing.assert_allclose(run(after, given | more)[0], run(model, given | more)[0], rtol=1e-4, atol=1e-5)


def test_no_list_of_architectures_decides() -> None:
    case = Case("unknown", X, Y, RMS + "n = Div (x, r) y = Mul (n, gamma)", "float[8] gamma")
    model = case.model()
    helper.set_model_props(model, {"model_type": "nobody-knows-it"})
    model.producer_name = "exporter of tomorrow"
    result = fused(model)
    assert result.report["blocks"]["rmsnorm"] == 1
    assert [p.value for p in result.model.metadata_props if p.key == "model_type"] == ["nobody-knows-it"]


@pytest.mark.parametrize("opset", [11, 13, 17, 18, 21, 23])
def test_axes_wherever_the_opset_puts_them(opset: int) -> None:
    """ReduceMean took its axes as attribute until opset 17, and takes them as input from 18 on."""
    mean = "ReduceMean (x, ax)" if opset >= 18 else "ReduceMean <axes=[2]> (x)"
    case = Case("axes", X, Y,
                f"mean = {mean} d = Sub (x, mean) sq = Pow (d, two) var = {mean.replace('(x', '(sq')}"
                "ve = Add (var, eps) std = Sqrt (ve) n = Div (d, std) m = Mul (n, gamma) y = Add (m, beta)",
                f"{GB}, int64[1] ax = {{-1}}", opset=opset, blocks={"layernorm": 1})  # fmt: skip
    check_found(case)


def test_float16_squares_that_vanish_or_overflow_in_a_skip_norm() -> None:
    """Rows of 2048 elements between 200 and 4000, as Qwen3-VL has them: squares summed in float16 would overflow."""
    text = """<ir_version: 8, opset_import: ["": 17]>
    g (float16[B,S,2048] x, float16[B,S,2048] s) => (float16[B,S,2048] y, float16[B,S,2048] a)
    <float two = {2}, float eps = {1e-6}, float16[2048] g16> {
      a = Add (x, s) c = Cast <to=1> (a) sq = Pow (c, two) ms = ReduceMean <axes=[-1]> (sq) me = Add (ms, eps)
      r = Sqrt (me) i = Reciprocal (r) n = Mul (c, i) h = Cast <to=10> (n) y = Mul (g16, h) }"""
    model = parse(text)
    result = onnxfuse.optimize(model, target="cpu")
    assert result.report["blocks"]["skip_rmsnorm"] == 1 and "Pow" not in ops(result.model)
    for scale in (200.0, 4000.0):
        inputs = feeds(model, {"B": 2, "S": 2}, scale)
        total = (inputs["x"] + inputs["s"]).astype(np.float64)
        gamma = next(numpy_helper.to_array(t) for t in model.graph.initializer if t.name == "g16").astype(np.float64)
        expected = total / np.sqrt((total**2).mean(-1, keepdims=True) + 1e-6) * gamma
        got = run(result.model, inputs)[0].astype(np.float64)
        assert np.abs(got - expected).max() <= 4e-3 * np.abs(expected).max()


def test_outputs_do_not_depend_on_the_optional_shift_of_a_skip_norm() -> None:
    """Broadcast rows of another length than the product's are not taken for embeddings."""
    case = Case("swapped", "float[1,S,8] x, float[B,S,8] s", Y, f"e = Add (x, s) y = {LN}", GB)
    model = case.model()
    check_same(case, model, fused(model).model)


@pytest.mark.parametrize("rows", ["float[1,S,8] s", "float[S,8] s"])
def test_the_runtime_s_skip_norm_takes_one_row_for_the_batch(rows: str) -> None:
    """What a sum of embeddings and its norm become where the target keeps skip norms."""
    model = parse(
        f"""<ir_version: 8, opset_import: ["": 17, "com.microsoft": 1]>
        g (float[B,S,8] x, {rows}) => (float[B,S,8] y, float[B,S,8] e) <{GB}> {{
          y, mean, deviation, e = com.microsoft.SkipLayerNormalization <epsilon=1e-5> (x, s, gamma, beta) }}"""
    )
    inputs = feeds(model, {"B": 3, "S": 5})
    weights = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    total = inputs["x"] + inputs["s"]
    centred = total - total.mean(-1, keepdims=True)
    expected = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * weights["gamma"] + weights["beta"]
    y, e = run(model, inputs)
    np.testing.assert_allclose(e, total, rtol=1e-6)
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)
