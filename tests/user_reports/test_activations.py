"""Activations that are spelled out, and epilogues of products."""

from __future__ import annotations

import numpy as np
import pytest

from tests.user_reports.cases import Case, check_found, feeds, fused, ops, parse, run

NUMBERS = ("float three = {3}, float zero = {0}, float six = {6}, float sixth = {0.16666667}, float slope = {0.2}, "
           "float c0 = {0.044715}, float c1 = {0.7978846}, float k = {1.702}")  # fmt: skip
X, Y = "float[B,S,8] x", "float[B,S,8] y"
PRODUCT = "h = MatMul (x, w) a = Add (h, b)"
WEIGHTS = f"float[8,16] w, float[16] b, {NUMBERS}"

CASES = [
    # Hard swish and hard sigmoid: no Clip is left, and nothing divides by six.
    *[
        Case(f"hard-swish-{name}", X, Y, body, NUMBERS, opset=opset, written={"Clip": 0, "Min": 0, "Div": 0})
        for name, opset, body in [
            ("product-first", 17, "a = Add (x, three) c = Clip (a, zero, six) p = Mul (c, x) y = Div (p, six)"),
            ("gate-first", 17, "a = Add (three, x) c = Clip (a, zero, six) p = Div (c, six) y = Mul (x, p)"),
            ("times-a-sixth", 17, "a = Add (x, three) c = Clip (a, zero, six) p = Mul (x, sixth) y = Mul (p, c)"),
            ("relu6", 13, "a = Add (x, three) r = Relu (a) c = Min (r, six) p = Mul (x, c) y = Div (p, six)"),
            ("before-the-op-existed", 13, "a = Add (x, three) c = Clip (a, zero, six) p = Mul (c, x) y = Div (p, six)"),
            ("keeps-its-hard-sigmoid", 17, "s = HardSigmoid <alpha=0.16666667, beta=0.5> (x) y = Mul (x, s)"),
        ]
    ],
    Case("hard-sigmoid-keras", X, Y, "m = Mul (x, slope) a = Add (m, half) y = Clip (a, zero, one)", NUMBERS,
         written={"HardSigmoid": 1, "Clip": 0}),
    Case("relu6-alone-stays-a-clip", X, Y, "y = Clip (x, zero, six)", NUMBERS,
         blocks={"act_relu": 0}, written={"Clip": 1}),
    Case("hard-swish-that-is-clipped-elsewhere", X, Y,
         "a = Add (x, three) c = Clip (a, zero, three) p = Mul (c, x) y = Div (p, six)", NUMBERS, written={"Clip": 1}),
    # Epilogues of products.
    *[
        Case(f"linear-{name}", X, "float[B,S,16] y", f"{PRODUCT} {act}", WEIGHTS,
             blocks={f"matmul_bias_act_{key}": 1, "matmul_bias": 1, "matmul": 1})
        for name, key, act in [
            ("relu", "relu", "y = Relu (a)"),
            ("relu-by-max", "relu", "y = Max (a, zero)"),
            ("relu-by-clip", "relu", "y = Clip (a, zero)"),
            ("tanh", "tanh", "y = Tanh (a)"),
            ("silu", "silu", "s = Sigmoid (a) y = Mul (a, s)"),
            ("quick-gelu", "quick_gelu", "m = Mul (a, k) s = Sigmoid (m) y = Mul (a, s)"),
        ]
    ],
    *[
        Case(f"linear-gelu-tanh-half-{where}", X, "float[B,S,16] y",
             f"{PRODUCT} q = Mul (a, a) q3 = Mul (q, a) s = Mul (q3, c0) p = Add (a, s) u = Mul (p, c1) t = Tanh (u)"
             f" c = Add (t, one) {tail}", WEIGHTS, blocks={"matmul_bias_act_gelu_tanh": 1})
        for where, tail in [
            ("on-the-gate", "g = Mul (half, c) y = Mul (a, g)"),
            ("on-the-product", "g = Mul (a, c) y = Mul (half, g)"),
            ("on-x", "g = Mul (a, half) y = Mul (g, c)"),
        ]
    ],
    # Squared ReLU (Primer, Nemotron): the ReLU is the epilogue, the square stays.
    *[
        Case(f"squared-relu-{name}", X, "float[B,S,16] y", f"{PRODUCT} r = Relu (a) y = {square}", WEIGHTS,
             blocks={"matmul_bias_act_relu": 1}, written={op: 1})
        for name, square, op in [("pow", "Pow (r, two)", "Pow"), ("mul", "Mul (r, r)", "Mul")]
    ],
    # A gate with its own constants (GPT-OSS): clamped, steeper, and one is added to the other half.
    Case("gate-with-limits-is-no-swiglu", X, "float[B,S,16] y",
         "g0 = MatMul (x, w) u0 = MatMul (x, v) g = Min (g0, six) n = Neg (six) u = Clip (u0, n, six)"
         "m = Mul (g, k) s = Sigmoid (m) a = Mul (g, s) u1 = Add (u, one) y = Mul (a, u1)",
         f"float[8,16] w, float[8,16] v, {NUMBERS}", blocks={"swiglu": 0, "act_quick_gelu": 1}),
    Case("gate-of-another-value", X, "float[B,S,16] y",
         "g = MatMul (x, w) u = MatMul (x, v) s = Sigmoid (u) a = Mul (g, s) y = Mul (a, u)",
         f"float[8,16] w, float[8,16] v, {NUMBERS}", blocks={}),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_found_and_right(case: Case) -> None:
    check_found(case)


@pytest.mark.parametrize(
    ("dtype", "body", "found"),
    [
        ("float16", "s = Sigmoid (x) y = Mul (x, s)", {"act_silu": 1}),
        ("double", "s = Sigmoid (x) y = Mul (x, s)", {"act_silu": 0}),
        ("float16", "n = Neg (x) e = Exp (n) d = Add (e, one) y = Div (x, d)", {"act_silu": 1}),
        ("float16", "a = Add (x, three) c = Clip (a, zero, six) p = Mul (x, c) y = Div (p, six)", {}),
        ("double", "a = Add (x, three) c = Clip (a, zero, six) p = Mul (x, c) y = Div (p, six)", {}),
        ("float16", "s = Div (x, r2) e = Erf (s) c = Add (e, one) p = Mul (x, c) y = Mul (p, half)",
         {"act_gelu_erf": 1}),
        ("double", "m = Mul (x, six) s = Sigmoid (m) y = Mul (x, s)", {"act_quick_gelu": 0}),
    ],
)  # fmt: skip
def test_other_dtypes(dtype: str, body: str, found: dict[str, int]) -> None:
    """Half precision is fused and computed no worse; double precision, for which no fused kernel exists, is left."""
    numbers = {"one": 1.0, "three": 3.0, "zero": 0.0, "six": 6.0, "half": 0.5, "r2": 2**0.5}
    text = ", ".join(f"{dtype} {name} = {{{_literal(dtype, value)}}}" for name, value in numbers.items())
    model = parse(f'<ir_version: 8, opset_import: ["": 17]> g ({dtype}[B,S,8] x) => ({dtype}[B,S,8] y)'
                  f"<{text}> {{ {body} }}")  # fmt: skip
    result = fused(model)
    assert {key: result.report["blocks"].get(key, 0) for key in found} == found
    inputs = feeds(model, {"B": 2, "S": 3}, 3.0)
    limit = 5e-3 if dtype == "float16" else 1e-12
    np.testing.assert_allclose(run(result.model, inputs)[0], run(model, inputs)[0], rtol=limit, atol=limit)
    if dtype == "double":
        assert ops(result.model) == ops(model)


def _literal(dtype: str, value: float) -> float | int:
    return int(np.float16(value).view(np.uint16)) if dtype == "float16" else value
