"""Spellings that defeat a matcher: the same block, written otherwise."""

from __future__ import annotations

import pytest

from tests.user_reports.cases import LAYER_NORM, RMS, Case, check_found

CASES = [
    Case("layernorm-axes-attribute", "float[B,S,8] x", "float[B,S,8] y",
         LAYER_NORM.format(keepdims=1) + "m = Mul (n, gamma) y = Add (m, beta)", "float[8] gamma, float[8] beta",
         blocks={"layernorm": 1}),
    Case("layernorm-axes-input", "float[B,S,8] x", "float[B,S,8] y",
         "mean = ReduceMean <keepdims=1> (x, ax) d = Sub (x, mean) sq = Mul (d, d)"
         "var = ReduceMean <keepdims=1> (sq, ax) ve = Add (eps, var) std = Sqrt (ve) n = Div (d, std)"
         "m = Mul (gamma, n) y = Add (beta, m)", "float[8] gamma, float[8] beta, int64[1] ax = {-1}", opset=18,
         blocks={"layernorm": 1}),
    Case("layernorm-axes-from-constant-node", "float[B,S,8] x", "float[B,S,8] y",
         "ax = Constant <value_ints=[2]> () mean = ReduceMean (x, ax) d = Sub (x, mean) sq = Pow (d, two)"
         "var = ReduceMean (sq, ax) ve = Add (var, eps) std = Sqrt (ve) n = Div (d, std) y = Mul (n, gamma)",
         "float[8] gamma", opset=18, blocks={"layernorm": 1}),
    Case("layernorm-rank-1-input-picks-gamma-by-connection", "float[8] x", "float[8] y",
         LAYER_NORM.format(keepdims=1) + "m = Mul (n, gamma) y = Add (m, beta)", "float[8] gamma, float[8] beta",
         blocks={"layernorm": 1}),
    Case("layernorm-3d-gamma", "float[B,S,8] x, float[B,S,8] s", "float[B,S,8] y",
         "a = Add (x, s) y = LayerNormalization <axis=-1, epsilon=1e-5> (a, gamma, beta)",
         "float[8] gamma, float[8] beta", blocks={"layernorm": 1, "skip_layernorm": 1}),
    Case("layernorm-decomposed-3d-gamma", "float[B,S,8] x", "float[B,S,8] y",
         LAYER_NORM.format(keepdims=1) + "m = Mul (n, gamma) y = Add (m, beta)",
         "float[1,1,8] gamma, float[1,1,8] beta", blocks={"layernorm": 1}),
    Case("layernorm-reciprocal", "float[B,S,8] x", "float[B,S,8] y",
         "mean = ReduceMean <axes=[-1]> (x) d = Sub (x, mean) sq = Mul (d, d) var = ReduceMean <axes=[-1]> (sq)"
         "ve = Add (var, eps) std = Sqrt (ve) i = Reciprocal (std) n = Mul (i, d) y = Mul (gamma, n)",
         "float[8] gamma", blocks={"layernorm": 1}),
    Case("layernorm-doubled-sub", "float[B,S,8] x", "float[B,S,8] y",
         "mean = ReduceMean <axes=[-1]> (x) d = Sub (x, mean) d2 = Sub (x, mean) sq = Pow (d2, two)"
         "var = ReduceMean <axes=[-1]> (sq) ve = Add (var, eps) std = Sqrt (ve) n = Div (d, std)"
         "m = Mul (n, gamma) y = Add (m, beta)", "float[8] gamma, float[8] beta", blocks={"layernorm": 1}),
    Case("layernorm-in-float16-between-casts", "float16[B,S,8] x", "float16[B,S,8] y",
         "c = Cast <to=1> (x) mean = ReduceMean <axes=[-1]> (c) d = Sub (c, mean) sq = Pow (d, two)"
         "var = ReduceMean <axes=[-1]> (sq) ve = Add (var, eps) std = Sqrt (ve) n = Div (d, std)"
         "m = Mul (n, gamma) a = Add (m, beta) y = Cast <to=10> (a)", "float[8] gamma, float[8] beta",
         blocks={"layernorm": 1}),
    *[
        Case(f"rmsnorm-{name}", "float[B,S,8] x", "float[B,S,8] y", RMS + tail, "float[8] gamma", blocks={"rmsnorm": 1})
        for name, tail in {
            "div": "n = Div (x, r) y = Mul (n, gamma)",
            "reciprocal": "i = Reciprocal (r) n = Mul (x, i) y = Mul (n, gamma)",
            "one-over": "i = Div (one, r) n = Mul (i, x) y = Mul (gamma, n)",
            "gamma-first": "i = Div (one, r) w = Mul (x, i) y = Mul (gamma, w)",
        }.items()
    ],
    Case("rmsnorm-power-minus-half", "float[B,S,8] x", "float[B,S,8] y",
         "sq = Mul (x, x) ms = ReduceMean <axes=[-1]> (sq) me = Add (eps, ms) i = Pow (me, mh) n = Mul (x, i)"
         "y = Mul (n, gamma)", "float[8] gamma, float mh = {-0.5}", blocks={"rmsnorm": 1}),
    Case("rmsnorm-reduce-sum", "float[B,S,8] x", "float[B,S,8] y",
         "sq = Mul (x, x) t = ReduceSum <keepdims=1> (sq, ax) ms = Mul (t, inv) me = Add (ms, eps) r = Sqrt (me)"
         "n = Div (x, r) y = Mul (n, gamma)", "float[8] gamma, float inv = {0.125}, int64[1] ax = {-1}",
         blocks={"rmsnorm": 1}),
    Case("rmsnorm-gamma-before-the-cast-back", "float16[B,S,8] x", "float16[B,S,8] y",
         "c = Cast <to=1> (x) sq = Pow (c, two) ms = ReduceMean <axes=[-1]> (sq) me = Add (ms, eps) r = Sqrt (me)"
         "i = Reciprocal (r) n = Mul (c, i) g32 = Cast <to=1> (gamma) m = Mul (n, g32) y = Cast <to=10> (m)",
         "float16[8] gamma", blocks={"rmsnorm": 1}),
    Case("rmsnorm-after-scaled-embedding", "int64[B,S] ids", "float[B,S,8] y",
         "e = Gather (table, ids) x = Mul (e, root)" + RMS + "i = Reciprocal (r) n = Mul (x, i) y = Mul (n, gamma)",
         "float[16,8] table, float root = {2.828427}, float[8] gamma", blocks={"rmsnorm": 1}),
    Case("rmsnorm-one-plus-gamma", "float[B,S,8] x", "float[B,S,8] y",
         RMS + "i = Reciprocal (r) n = Mul (x, i) w = Add (gamma, one) y = Mul (n, w)", "float[8] gamma",
         blocks={"rmsnorm": 1}),
    Case("rmsnorm-gamma-from-constant-identity-cast", "float[B,S,8] x", "float[B,S,8] y",
         RMS + "g1 = Identity (gamma) g2 = Cast <to=1> (g1) n = Div (x, r) y = Mul (n, g2)", "float[8] gamma",
         blocks={"rmsnorm": 1}),
    *[
        Case(f"gelu-erf-{name}", "float[B,S,8] x", "float[B,S,8] y",
             f"s = {scaled} e = Erf (s) c = Add (e, one) {tail}", "float r2 = {1.4142135}, float h2 = {0.70710677}",
             blocks={"act_gelu_erf": 1})
        for name, scaled, tail in [
            ("div-half-last", "Div (x, r2)", "p = Mul (x, c) y = Mul (p, half)"),
            ("mul-half-first", "Mul (h2, x)", "p = Mul (half, x) y = Mul (p, c)"),
            ("half-on-cdf", "Div (x, r2)", "p = Mul (c, half) y = Mul (p, x)"),
        ]
    ],
    Case("gelu-erf-sqrt-node", "float[B,S,8] x", "float[B,S,8] y",
         "r2 = Sqrt (two) s = Div (x, r2) e = Erf (s) c = Add (one, e) p = Mul (x, c) y = Mul (half, p)",
         blocks={"act_gelu_erf": 1}),
    *[
        Case(f"gelu-tanh-{name}", "float[B,S,8] x", "float[B,S,8] y", f"{cube} {tail}",
             "float three = {3}, float c0 = {0.044715}, float c1 = {0.7978846}", blocks={"act_gelu_tanh": 1})
        for name, cube, tail in [
            ("pow", "q = Pow (x, three)", "s = Mul (c0, q) p = Add (x, s) a = Mul (p, c1) t = Tanh (a)"
             "c = Add (t, one) m = Mul (x, c) y = Mul (m, half)"),
            ("cube-by-products", "x2 = Mul (x, x) q = Mul (x2, x)", "s = Mul (q, c0) p = Add (s, x) a = Mul (c1, p)"
             "t = Tanh (a) c = Add (one, t) h = Mul (half, x) y = Mul (h, c)"),
            ("factored", "x2 = Mul (x, x) s = Mul (x2, c0)", "u = Add (s, one) v = Mul (x, c1) a = Mul (v, u)"
             "t = Tanh (a) c = Add (one, t) h = Mul (c, half) y = Mul (x, h)"),
        ]
    ],
    *[
        Case(f"silu-{name}", "float[B,S,8] x", "float[B,S,8] y", body, blocks={"act_silu": 1})
        for name, body in {
            "sigmoid": "s = Sigmoid (x) y = Mul (s, x)",
            "exp": "m = Neg (x) e = Exp (m) d = Add (one, e) y = Div (x, d)",
        }.items()
    ],
    Case("quick-gelu-either-order", "float[B,S,8] x", "float[B,S,8] y",
         "a = Mul (k, x) s = Sigmoid (a) y = Mul (x, s)", "float[1] k = {1.702}", blocks={"act_quick_gelu": 1}),
    Case("bias-gelu-is-counted", "float[B,S,8] x", "float[B,S,16] y",
         "h = MatMul (x, w) a = Add (b, h) s = Div (a, r2) e = Erf (s) c = Add (e, one)"
         "p = Mul (a, c) y = Mul (p, half)", "float[8,16] w, float[16] b, float r2 = {1.4142135}",
         blocks={"matmul_bias_act_gelu_erf": 1, "act_gelu_erf": 1, "matmul_bias": 1}),
    Case("weight-behind-a-transpose", "float[B,S,8] x", "float[B,S,16] y",
         "t = Transpose <perm=[1,0]> (w) h = MatMul (x, t) y = Add (h, b)", "float[16,8] w, float[16] b",
         blocks={"matmul_bias": 1}),
    Case("two-residuals-and-a-norm", "float[B,S,8] x, float[B,S,8] s", "float[B,S,8] y, float[B,S,8] a",
         "a = Add (x, s) y = LayerNormalization <axis=-1> (a, gamma, beta)", "float[8] gamma, float[8] beta",
         blocks={"layernorm": 1, "skip_layernorm": 1}),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_found_and_right(case: Case) -> None:
    check_found(case)
