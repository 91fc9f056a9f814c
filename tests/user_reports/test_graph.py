"""What a rewriter breaks around a fused pattern: names, readers, subgraphs, shared weights, shapes."""

from __future__ import annotations

import numpy as np
from onnx import TensorProto, helper

from tests.user_reports.cases import RMS, Case, check_same, feeds, fused, run


def test_residual_sum_keeps_its_second_reader() -> None:
    """Pre-norm: the sum feeds the norm and the next sum (GPT-2, Llama)."""
    case = Case("pre-norm", "float[B,S,8] x, float[B,S,8] s", "float[B,S,8] y",
                "a = Add (x, s) n = LayerNormalization <axis=-1> (a, gamma, beta) h = MatMul (n, w) y = Add (a, h)",
                "float[8] gamma, float[8] beta, float[8,8] w")  # fmt: skip
    model = case.model()
    result = fused(model)
    assert {k: result.report["blocks"][k] for k in ("layernorm", "matmul")} == {"layernorm": 1, "matmul": 1}
    check_same(case, model, result.model)


def test_one_shared_weight_in_two_linears_is_stored_once() -> None:
    case = Case("shared", "float[B,S,8] x, float[B,S,8] z", "float[B,S,512] y, float[B,S,512] u",
                "y = MatMul (x, w) u = MatMul (z, w)", "float[8,512] w")  # fmt: skip
    model = case.model()
    after = fused(model).model
    assert after.ByteSize() <= 1.05 * model.ByteSize() + 512
    check_same(case, model, after)


def test_tied_embedding_is_not_duplicated() -> None:
    case = Case("tied", "int64[B,S] ids", "float[B,S,1024] y",
                "x = Gather (table, ids)" + RMS + "n = Div (x, r) m = Mul (n, gamma) t = Transpose <perm=[1,0]> (table)"
                "y = MatMul (m, t)", "float[1024,64] table, float[64] gamma")  # fmt: skip
    model = case.model()
    after = fused(model).model
    assert after.ByteSize() <= 1.05 * model.ByteSize()
    check_same(case, model, after)


def test_two_hits_do_not_share_a_new_name() -> None:
    """Two chains that share one shape tensor, and two norms that share one gamma."""
    body = " ".join(
        f"f{i} = Reshape (x{i}, shape) g{i} = Reshape (f{i}, shape2)"
        + RMS.replace("(x", f"(g{i}")
        .replace("sq", f"sq{i}")
        .replace("ms", f"ms{i}")
        .replace("me", f"me{i}")
        .replace("r =", f"r{i} =")
        + f"n{i} = Div (g{i}, r{i}) y{i} = Mul (n{i}, gamma)"
        for i in (1, 2)
    )
    case = Case("two-hits", "float[B,S,8] x1, float[B,S,8] x2", "float[B,S,8] y1, float[B,S,8] y2", body,
                "float[8] gamma, int64[2] shape = {-1,8}, int64[3] shape2 = {2,-1,8}")  # fmt: skip
    model = case.model()
    after = fused(model).model
    names = [o for n in after.graph.node for o in n.output] + [t.name for t in after.graph.initializer]
    assert len(names) == len(set(names))
    check_same(case, model, after)


def test_a_branch_that_reads_a_value_inside_a_pattern_keeps_it() -> None:
    case = Case("captured", "float[B,S,8] x, bool c", "float[B,S,8] y, float[B,S,8] z",
                "s = Sigmoid (x) y = Mul (x, s) z = If (c) <then_branch = t () => (float[B,S,8] p) { p = Neg (s) },"
                " else_branch = e () => (float[B,S,8] q) { q = Identity (x) }>")  # fmt: skip
    case.dims.update(B=2, S=3)
    model = case.model()
    result = fused(model)
    inputs = {"x": feeds(model, case.dims)["x"]}
    for condition in (True, False):
        before = run(model, {**inputs, "c": np.array(condition)})
        now = run(result.model, {**inputs, "c": np.array(condition)})
        for a, b in zip(before, now, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_patterns_inside_branches_are_fused() -> None:
    gelu = "s = Div (a, r2) e = Erf (s) k = Add (e, one) m = Mul (a, k) p = Mul (m, half)"
    case = Case("inside", "float[B,S,8] x, bool c", "float[B,S,8] y",
                "a = Neg (x) y = If (c) <then_branch = t () => (float[B,S,8] p) { " + gelu + " },"
                " else_branch = e () => (float[B,S,8] q) { q = Identity (a) }>", "float r2 = {1.4142135}")  # fmt: skip
    model = case.model()
    result = fused(model)
    assert result.report["blocks"]["act_gelu_erf"] == 1
    x = feeds(model, case.dims)["x"]
    for condition in (True, False):
        inputs = {"x": x, "c": np.array(condition)}
        np.testing.assert_allclose(run(result.model, inputs)[0], run(model, inputs)[0], rtol=1e-5, atol=1e-6)


def test_node_and_value_names_may_be_the_same() -> None:
    case = Case("names", "float[B,S,8] x", "float[B,S,8] y", "a = Sigmoid (x) y = Mul (a, x)")
    model = case.model()
    model.graph.node[0].name, model.graph.node[1].name = "y", "a"
    check_same(case, model, fused(model).model)


def test_stale_shapes_do_not_come_back() -> None:
    case = Case("value-info", "float[B,S,8] x", "float[B,S,16] y", "h = MatMul (x, w) y = Add (h, b)",
                "float[8,16] w, float[16] b")  # fmt: skip
    model = case.model()
    model.graph.value_info.append(helper.make_tensor_value_info("h", TensorProto.FLOAT, ["B", "S", 16]))
    after = fused(model).model
    made = {o for n in after.graph.node for o in n.output}
    assert all(v.name in made for v in after.graph.value_info)
    check_same(case, model, after)
