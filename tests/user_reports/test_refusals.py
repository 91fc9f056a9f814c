"""Graphs that look like a block and are none: nothing may be fused."""

from __future__ import annotations

import pytest

from tests.user_reports.cases import LAYER_NORM, RMS, Case, check_found, fused, ops

CASES = [
    Case("keepdims-0-normalises-nothing", "float[3,3] x", "float[3,3] y",
         LAYER_NORM.format(keepdims=0) + "y = Mul (n, gamma)", "float[3] gamma", blocks={"layernorm": 0}),
    Case("another-axis-for-the-variance", "float[B,4,4] x", "float[B,4,4] y",
         LAYER_NORM.format(keepdims=1).replace("var = ReduceMean <axes=[-1]", "var = ReduceMean <axes=[1]")
         + "y = Mul (n, gamma)", "float[4] gamma", blocks={"layernorm": 0}),
    Case("rms-over-another-axis", "float[B,4,4] x", "float[B,4,4] y",
         RMS.replace("axes=[-1]", "axes=[1]") + "n = Div (x, r) y = Mul (n, gamma)", "float[4] gamma",
         blocks={"rmsnorm": 0}),
    Case("a-third-power-is-no-square", "float[B,S,8] x", "float[B,S,8] y",
         RMS.replace("(x, two)", "(x, three)") + "n = Div (x, r) y = Mul (n, gamma)",
         "float[8] gamma, float three = {4}", blocks={"rmsnorm": 0}),
    Case("another-gelu-constant", "float[B,S,8] x", "float[B,S,8] y",
         "s = Div (x, r2) e = Erf (s) c = Add (e, one) p = Mul (x, c) y = Mul (p, half)", "float r2 = {1.5}",
         blocks={"act_gelu_erf": 0}),
    Case("sigmoid-of-something-else", "float[B,S,8] x, float[B,S,8] z", "float[B,S,8] y",
         "s = Sigmoid (z) y = Mul (s, x)", blocks={"act_silu": 0}),
    Case("gamma-that-the-caller-may-override", "float[B,S,8] x, float[8] gamma", "float[B,S,16] y",
         RMS + "n = Div (x, r) m = Mul (n, gamma) y = MatMul (m, w)", "float[8,16] w", blocks={"matmul": 1}),
    Case("bias-of-one-row-each", "float[2,3,8] x", "float[2,3,16] y",
         "h = MatMul (x, w) y = Add (h, b)", "float[8,16] w, float[2,1,16] b", blocks={"matmul_bias": 0}),
    Case("bias-that-widens-the-product", "float[1,8] x", "float[4,16] y",
         "h = MatMul (x, w) y = Add (h, b)", "float[8,16] w, float[4,16] b", blocks={"matmul_bias": 0}),
    Case("bias-of-five-dimensions", "float[2,3,8] x", "float[1,1,2,3,16] y",
         "h = MatMul (x, w) y = Add (h, b)", "float[8,16] w, float[1,1,1,1,16] b", blocks={}),
    Case("intermediate-is-an-output", "float[B,S,8] x", "float[B,S,8] y, float[B,S,8] s",
         "a = Mul (x, k) s = Sigmoid (a) y = Mul (x, s)", "float k = {1.702}", blocks={"act_quick_gelu": 0}),
    Case("product-read-twice-is-not-computed-twice", "float[B,S,8] x", "float[B,S,16] y, float[B,S,16] z",
         "h = MatMul (x, w) s = Sigmoid (h) y = Mul (h, s) z = Mul (h, two)", "float[8,16] w", blocks={}),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_found_and_right(case: Case) -> None:
    check_found(case)


def test_a_product_with_two_readers_stays_one_product() -> None:
    case = next(c for c in CASES if c.name.startswith("product-read-twice"))
    after = fused(case.model()).model
    products = [o for o in ops(after) if o in ("MatMul", "Gemm", "Linear", "FusedMatMul")]
    assert len(products) == 1
