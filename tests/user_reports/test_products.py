"""Products: biases that fit or do not, weights from elsewhere, one product with several readers."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import onnxfuse
from tests.user_reports.cases import Case, check_found, check_same, fused, ops

WB = "float[8,16] w, float[16] b"

CASES = [
    # Biases: one vector of N fits, whatever its rank, and one number; all else is an Add.
    *[
        Case(f"bias-{name}", "float[2,3,8] x", f"float[{out}] y", "h = MatMul (x, w) y = Add (h, b)",
             f"float[8,16] w, float[{shape}] b", blocks={"matmul": 1, "matmul_bias": found})
        for name, shape, out, found in [
            ("vector", "16", "2,3,16", 1),
            ("of-rank-3", "1,1,16", "2,3,16", 1),
            ("row-of-rank-2", "1,16", "2,3,16", 1),
            ("one-element", "1", "2,3,16", 1),
            ("a-column", "3,1", "2,3,16", 0),
            ("whole-matrix", "3,16", "2,3,16", 0),
            ("whole-matrix-of-rank-3", "1,3,16", "2,3,16", 0),
            ("wider-batch", "4,1,3,16", "4,2,3,16", 0),
        ]
    ],
    Case("bias-that-the-caller-gives", "float[B,S,8] x, float[16] b", "float[B,S,16] y",
         "h = MatMul (x, w) y = Add (h, b)", "float[8,16] w", blocks={"matmul": 1}),
    Case("two-biases", "float[B,S,8] x", "float[B,S,16] y", "h = MatMul (x, w) a = Add (h, b) y = Add (a, c)",
         f"{WB}, float[16] c", blocks={"matmul": 1, "matmul_bias": 1}),
    # Gemm in all its forms, and Conv1D as GPT-2 has it.
    *[
        Case(f"gemm-{name}", "float[S,8] x", "float[S,16] y", f"h = Gemm {attrs} ({operands}) y = Relu (h)",
             f"float[{shape}] w, float[16] b", blocks=blocks)
        for name, attrs, operands, shape, blocks in [
            ("plain", "", "x, w, b", "8,16", {"matmul_bias_act_relu": 1}),
            ("transposed", "<transB=1>", "x, w, b", "16,8", {"matmul_bias_act_relu": 1}),
            ("without-bias", "", "x, w", "8,16", {"matmul": 1, "matmul_bias": 0}),
            ("scaled", "<alpha=0.5, beta=2.0>", "x, w, b", "8,16", {"matmul_bias_act_relu": 1}),
        ]
    ],
    Case("conv1d-of-gpt2", "float[B,S,8] x", "float[B,S,16] y",
         "f = Reshape (x, flat) h = Gemm (f, w, b) y = Reshape (h, back)",
         f"{WB}, int64[2] flat = {{-1, 8}}, int64[3] back = {{2, -1, 16}}", blocks={"matmul_bias": 1}),
    # Weights that come from somewhere.
    *[
        Case(f"weight-through-{name}", "float[B,S,8] x", "float[B,S,16] y", f"{how} h = MatMul (x, v) y = Add (h, b)",
             f"{dtype}[{shape}] w, float[16] b", blocks={"matmul_bias": 1}, written={op: 0})
        for name, how, dtype, shape, op in [
            ("identity", "v = Identity (w)", "float", "8,16", "Identity"),
            ("a-cast", "v = Cast <to=1> (w)", "float16", "8,16", "Cast"),
            ("a-transpose", "v = Transpose <perm=[1,0]> (w)", "float", "16,8", "Transpose"),
            ("two-transposes", "t = Transpose <perm=[1,0]> (w) v = Transpose <perm=[1,0]> (t)", "float", "8,16",
             "Transpose"),
        ]
    ],
    Case("transposed-weight-with-two-readers", "float[B,S,8] x, float[B,S,8] z", "float[B,S,16] y, float[B,S,16] u",
         "t = Transpose <perm=[1,0]> (w) y = MatMul (x, t) u = MatMul (z, t)", "float[16,8] w", blocks={"matmul": 2},
         written={"Transpose": 0}),
    # Reshapes of Reshapes, and products between them.
    Case("reshape-of-reshape", "float[B,S,8] x", "float[B,S,16] y",
         "f = Reshape (x, flat) g = Reshape (f, rows) k = Reshape (g, flat) h = MatMul (k, w) a = Add (h, b)"
         "y = Reshape (a, back)",
         f"{WB}, int64[2] flat = {{-1, 8}}, int64[3] rows = {{-1, 1, 8}}, int64[3] back = {{2, -1, 16}}",
         blocks={"matmul_bias": 1}),
    # A product with two readers is computed once.
    Case("product-read-by-a-gelu-and-a-scale", "float[B,S,8] x", "float[B,S,16] y, float[B,S,16] z",
         "h = MatMul (x, w) s = Div (h, r2) e = Erf (s) c = Add (e, one) p = Mul (h, c) y = Mul (p, half)"
         "z = Mul (h, two)", "float[8,16] w, float r2 = {1.4142135}",
         blocks={"matmul": 1, "act_gelu_erf": 1}, written={"MatMul": 1}),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_found_and_right(case: Case) -> None:
    check_found(case)


def test_the_order_of_nodes_does_not_matter() -> None:
    """Nodes of independent branches may stand in any order that respects what reads what."""
    case = Case("orders", "float[B,S,8] x", "float[B,S,8] y",
                "q = MatMul (x, w) g = MatMul (x, v) u = MatMul (x, t) k = Clip (q, low, high) l = Clip (g, low, high)"
                "m = Clip (u, low, high) s = Sigmoid (l) a = Mul (l, s) p = Mul (a, m) o = Add (p, k)"
                "y = MatMul (o, back)",
                "float[8,16] w, float[8,16] v, float[8,16] t, float[16,8] back, float low = {-6}, float high = {6}"
                )  # fmt: skip
    model = case.model()
    wanted = None
    for seed in range(6):
        shuffled = _another_order(model, seed)
        onnx.checker.check_model(shuffled)
        result = fused(shuffled)
        found = ({f["rule"]: f["count"] for f in result.report["fusions"]}, sorted(ops(result.model)))
        wanted = wanted or found
        assert found == wanted
        check_same(case, shuffled, result.model)


def _another_order(model: onnx.ModelProto, seed: int) -> onnx.ModelProto:
    rng = np.random.default_rng(seed)
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    left = list(copy.graph.node)
    known = {i.name for i in copy.graph.input} | {t.name for t in copy.graph.initializer} | {""}
    order = []
    while left:
        ready = [n for n in left if known.issuperset(n.input)]
        chosen = ready[rng.integers(len(ready))]
        left.remove(chosen)
        order.append(chosen)
        known.update(chosen.output)
    copy.graph.ClearField("node")
    copy.graph.node.extend(order)
    return copy


def test_every_domain_is_imported_and_none_in_vain() -> None:
    case = Case("domains", "float[B,S,8] x", "float[B,S,16] y", "h = MatMul (x, w) s = Sigmoid (h) y = Mul (h, s)", WB)
    model = case.model()
    for target in ("cpu", "cuda:sm90"):
        after = onnxfuse.optimize(model, target=target, verify=False).model
        imported = {o.domain for o in after.opset_import}
        used = {n.domain for n in after.graph.node}
        assert used <= imported and imported - used <= {"", "com.microsoft"}
        assert "com.microsoft" in {o.domain for o in model.opset_import}, "which the source imports itself"
