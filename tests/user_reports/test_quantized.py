"""Quantized weights and activations: they survive, and nothing is fused across them."""

from __future__ import annotations

from tests.user_reports.cases import Case, check_same, fused, ops


def test_quantize_between_ops_is_respected() -> None:
    """A quantize/dequantize pair inside a pattern is part of the numerics: nothing is fused across it."""
    case = Case("qdq", "float[B,S,8] x", "float[B,S,8] y",
                "h = Add (x, b) q = QuantizeLinear (h, scale, zero) u = DequantizeLinear (q, scale, zero)"
                "s = Div (u, r2) e = Erf (s) c = Add (e, one) p = Mul (u, c) y = Mul (p, half)",
                "float[8] b, float scale = {0.1}, int8 zero = {0}, float r2 = {1.4142135}")  # fmt: skip
    model = case.model()
    result = fused(model)
    assert {"QuantizeLinear", "DequantizeLinear"} <= set(ops(result.model))
    check_same(case, model, result.model)
