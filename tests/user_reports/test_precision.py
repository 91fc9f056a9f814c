"""Half and double precision: overflowing squares, ops without a kernel."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from tests.user_reports.cases import feeds, fused, parse, run


def large_rows() -> Iterator[tuple[str, onnx.ModelProto, float]]:
    """float16 chains whose squares overflow, where the unfused float16 result is the wrong one."""
    for name, body, scale in [
        ("rms", "a = Add (x, s) c = Cast <to=1> (a) sq = Pow (c, two) ms = ReduceMean <axes=[-1]> (sq)"
         "me = Add (ms, eps) r = Sqrt (me) n = Div (c, r) h = Cast <to=10> (n) y = Mul (h, g16)", 2000.0),
        ("layer", "a = Add (x, s) mean = ReduceMean <axes=[-1]> (a) d = Sub (a, mean) sq = Pow (d, two16)"
         "var = ReduceMean <axes=[-1]> (sq) ve = Add (var, eps16) st = Sqrt (ve) n = Div (d, st) y = Mul (n, g16)",
         600.0),
    ]:  # fmt: skip
        text = f"""<ir_version: 8, opset_import: ["": 17]>
        g (float16[B,S,2048] x, float16[B,S,2048] s) => (float16[B,S,2048] y)
        <float two = {{2}}, float eps = {{1e-5}}, float16[1] two16 = {{16384}}, float16[1] eps16 = {{168}},
         float16[2048] g16> {{ {body} }}"""
        yield name, parse(text), scale


@pytest.mark.parametrize(("name", "model", "scale"), list(large_rows()), ids=lambda v: v if isinstance(v, str) else "")
def test_float16_rows_with_large_values(name: str, model: onnx.ModelProto, scale: float) -> None:
    """The oracle is float64 arithmetic, not the unfused float16 graph, which overflows in the square."""
    result = fused(model)
    inputs = feeds(model, {"B": 2, "S": 3}, scale)
    a = (inputs["x"].astype(np.float64) + inputs["s"]).astype(np.float16).astype(np.float64)
    gamma = next(numpy_helper.to_array(t) for t in model.graph.initializer if t.name == "g16").astype(np.float64)
    centred = a - a.mean(-1, keepdims=True) if name == "layer" else a
    expected = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * gamma
    got = run(result.model, inputs)[0].astype(np.float64)
    assert result.report["blocks"]["layernorm" if name == "layer" else "rmsnorm"] == 1
    assert np.isfinite(got).all()
    assert np.abs(got - expected).max() <= 5e-3 * np.abs(expected).max()


@pytest.mark.parametrize("dtype", ["float16", "double"])
def test_no_op_without_a_kernel_is_written(dtype: str) -> None:
    """ONNX Runtime's fused activations lack float16 or float64 kernels on the CPU: those stay as they were."""
    bits = {"float16": (0x3E80, 0x3C00), "double": (1.702, 1.0)}[dtype]
    text = f"""<ir_version: 8, opset_import: ["": 17]>
    g ({dtype}[B,S,8] x) => ({dtype}[B,S,8] y) <{dtype} k = {{{bits[0]}}}>
    {{ a = Mul (x, k) s = Sigmoid (a) y = Mul (x, s) }}"""
    model = parse(text)
    after = fused(model).model
    inputs = feeds(model, {"B": 2, "S": 3})
    np.testing.assert_allclose(run(after, inputs)[0], run(model, inputs)[0], rtol=5e-3, atol=5e-3)


def test_a_residual_chain_with_outlier_channels() -> None:
    """Trained float16 models have channels of a thousand and more: random weights do not show what goes wrong there.
    The fused chain may be off by no more than a small multiple of what the chain as it was is off."""
    layer = """
      n{0} = LayerNormalization <axis=-1, epsilon=1e-5> (x{0}, g{0}, beta{0}) h{0} = MatMul (n{0}, w{0})
      a{0} = Add (h{0}, b{0}) s{0} = Sigmoid (a{0}) i{0} = Mul (a{0}, s{0}) o{0} = MatMul (i{0}, v{0})
      x{1} = Add (x{0}, o{0})"""
    weights = ", ".join(
        f"float16[64] g{i}, float16[64] beta{i}, float16[64,128] w{i}, float16[128] b{i}, float16[128,64] v{i}"
        for i in (0, 1, 2)
    )
    model = parse(
        f"""<ir_version: 8, opset_import: ["": 17]>
        g (float16[B,S,64] x0) => (float16[B,S,64] y) <{weights}, float16[64] gl, float16[64] bl> {{
          {"".join(layer.format(i, i + 1) for i in (0, 1, 2))}
          y = LayerNormalization <axis=-1, epsilon=1e-5> (x3, gl, bl) }}"""
    )
    result = fused(model)
    assert (result.report["blocks"]["layernorm"], result.report["blocks"]["act_silu"]) == (4, 3)
    inputs = feeds(model, {"B": 2, "S": 4})
    inputs["x0"][..., 5] = 1500.0
    inputs["x0"][..., 40] = -3000.0
    expected = _in_float64(model, inputs["x0"])
    before, after = (run(m, inputs)[0].astype(np.float64) for m in (model, result.model))
    assert np.abs(after - expected).max() <= 2 * np.abs(before - expected).max() + 1e-3 * np.abs(expected).max()


def _in_float64(model: onnx.ModelProto, x: np.ndarray) -> np.ndarray:
    w = {t.name: numpy_helper.to_array(t).astype(np.float64) for t in model.graph.initializer}

    def norm(value: np.ndarray, scale: str, shift: str) -> np.ndarray:
        centred = value - value.mean(-1, keepdims=True)
        return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * w[scale] + w[shift]

    x = x.astype(np.float64)
    for i in (0, 1, 2):
        a = norm(x, f"g{i}", f"beta{i}") @ w[f"w{i}"] + w[f"b{i}"]
        x = x + (a / (1 + np.exp(-a))) @ w[f"v{i}"]
    return norm(x, "gl", "bl")
