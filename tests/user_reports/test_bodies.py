"""Bodies of Loop and Scan, branches, model-local functions; Casts that a conversion to half precision left."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from onnxfuse.errors import OnnxfuseError
from tests.user_reports.cases import Case, check_found, check_same, feeds, fused, ops, run

GELU = "s = Div ({0}, r2) e = Erf (s) c = Add (e, one) p = Mul ({0}, c) {1} = Mul (p, half)"
NUMBERS = "float r2 = {1.4142135}, int64 times = {3}, bool yes = {1}"


def all_ops(graph: onnx.GraphProto) -> list[str]:
    found = []
    for node in graph.node:
        found.append(node.op_type)
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                found += all_ops(attribute.g)
    return found


def test_a_loop_with_a_constant_condition() -> None:
    """The body keeps its condition and its carried value, and what it computes is fused inside."""
    case = Case("loop", "float[B,S,8] x", "float[B,S,8] y",
                "y = Loop (times, yes, x) <body = b (int64 i, bool go, float[B,S,8] a) => (bool on, float[B,S,8] z)"
                f"{{ on = Identity (go) {GELU.format('a', 'z')} }}>", NUMBERS)  # fmt: skip
    model = case.model()
    result = fused(model)
    assert result.report["blocks"]["act_gelu_erf"] == 1 and "Erf" not in all_ops(result.model.graph)
    check_same(case, model, result.model)


def test_a_loop_that_ends_by_what_it_computes() -> None:
    """The condition comes from the value that is fused: it stays an output of the body."""
    case = Case("until", "float[B,S,8] x", "float[B,S,8] y",
                "y = Loop (times, yes, x) <body = b (int64 i, bool go, float[B,S,8] a) => (bool on, float[B,S,8] z)"
                "{ s = Sigmoid (a) z = Mul (a, s) t = ReduceMax <keepdims=0> (z) on = Less (t, one) }>",
                NUMBERS)  # fmt: skip
    model = case.model()
    result = fused(model)
    assert result.report["blocks"]["act_silu"] == 1
    for scale in (0.1, 5.0):
        inputs = feeds(model, case.dims, scale)
        np.testing.assert_allclose(run(result.model, inputs)[0], run(model, inputs)[0], rtol=1e-5, atol=1e-6)


def test_a_body_that_reads_a_weight_of_the_graph_around() -> None:
    case = Case("captured", "float[B,S,8] x", "float[B,S,8] y",
                "y = Loop (times, yes, x) <body = b (int64 i, bool go, float[B,S,8] a) => (bool on, float[B,S,8] z)"
                "{ on = Identity (go) h = MatMul (a, w) k = Add (h, v) z = Relu (k) }>",
                f"float[8,8] w, float[8] v, {NUMBERS}")  # fmt: skip
    model = case.model()
    result = fused(model)
    assert result.report["blocks"]["matmul_bias_act_relu"] == 1
    check_same(case, model, result.model)


def test_a_scan() -> None:
    case = Case("scan", "float[S,2,8] x, float[2,8] first", "float[2,8] last, float[S,2,8] y",
                "last, y = Scan <num_scan_inputs=1, body = b (float[2,8] h, float[2,8] t)"
                " => (float[2,8] h2, float[2,8] z) { a = Add (h, t) s = Sigmoid (a) z = Mul (a, s) h2 = Identity (z) }>"
                " (first, x)")  # fmt: skip
    model = case.model()
    result = fused(model)
    assert result.report["blocks"]["act_silu"] == 1
    check_same(case, model, result.model)


def test_branches_that_return_what_is_around_them() -> None:
    """A branch with nothing in it but the outer value, which an optimizer must not take out with its Identity."""
    case = Case("pass", "float[B,S,8] x, bool flag", "float[B,S,8] y",
                f"{GELU.format('x', 'g')} y = If (flag) <then_branch = t () => (float[B,S,8] q) {{ q = Identity (g) }},"
                " else_branch = o () => (float[B,S,8] r) { r = Identity (x) }>", NUMBERS)  # fmt: skip
    model = case.model()
    result = fused(model)
    assert result.report["blocks"]["act_gelu_erf"] == 1
    inputs = {"x": feeds(model, case.dims)["x"]}
    for condition in (True, False):
        given = {**inputs, "flag": np.array(condition)}
        np.testing.assert_allclose(run(result.model, given)[0], run(model, given)[0], rtol=1e-5, atol=1e-6)


def test_a_function_with_its_axes_as_attribute() -> None:
    """A model-local function is written for its own opset: ReduceMean with axes as attribute in a model of opset 18."""
    body = helper.make_function(
        "local", "Norm", ["a", "g", "eps", "two"], ["z"],
        [
            helper.make_node("Pow", ["a", "two"], ["sq"]),
            helper.make_node("ReduceMean", ["sq"], ["ms"], axes=[-1], keepdims=1),
            helper.make_node("Add", ["ms", "eps"], ["me"]),
            helper.make_node("Sqrt", ["me"], ["r"]),
            helper.make_node("Div", ["a", "r"], ["n"]),
            helper.make_node("Mul", ["n", "g"], ["z"]),
        ],
        [helper.make_opsetid("", 17)],
    )  # fmt: skip
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        [helper.make_node("Norm", ["x", "gamma", "eps", "two"], ["y"], domain="local")], "g",
        [value("x", 1, ["B", "S", 8])], [value("y", 1, ["B", "S", 8])],
        [numpy_helper.from_array(np.linspace(0.5, 2, 8).astype(np.float32), "gamma"),
         numpy_helper.from_array(np.float32(1e-5), "eps"), numpy_helper.from_array(np.float32(2), "two")],
    )  # fmt: skip
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("local", 1)]
    model = helper.make_model(graph, functions=[body], opset_imports=imports, ir_version=8)
    result = fused(model)
    assert result.report["blocks"]["rmsnorm"] == 1
    check_same(Case("function", "", "", ""), model, result.model)


HALF = "float16[B,S,8] x", "float16[B,S,8] y"
CASTS = [
    Case("half-between-casts-of-each-op", *HALF,
         "a = Cast <to=1> (x) s = Sigmoid (a) t = Cast <to=10> (s) b = Cast <to=1> (x) c = Cast <to=1> (t)"
         "m = Mul (b, c) y = Cast <to=10> (m)", blocks={}),
    Case("gelu-in-float-between-casts", *HALF,
         f"a = Cast <to=1> (x) {GELU.format('a', 'g')} y = Cast <to=10> (g)", NUMBERS, blocks={"act_gelu_erf": 1}),
    Case("float-that-is-read-elsewhere", "float16[B,S,8] x", "float16[B,S,8] y, float[B,S,8] g",
         f"a = Cast <to=1> (x) {GELU.format('a', 'g')} y = Cast <to=10> (g)", NUMBERS, blocks={"act_gelu_erf": 1}),
    Case("to-another-type-than-from", "float16[B,S,8] x", "float[B,S,8] y",
         "a = Cast <to=1> (x) s = Sigmoid (a) y = Mul (a, s)", blocks={"act_silu": 1}),
    Case("a-detour-over-half-rounds", "float[B,S,8] x", "float[B,S,8] y",
         "a = Cast <to=10> (x) b = Cast <to=1> (a) s = Sigmoid (b) y = Mul (b, s)", written={"Cast": 2}),
    Case("a-detour-over-double-does-not", "float[B,S,8] x", "float[B,S,8] y",
         "a = Cast <to=11> (x) b = Cast <to=1> (a) s = Sigmoid (b) y = Mul (b, s)", blocks={"act_silu": 1},
         written={"Cast": 0}),
]  # fmt: skip


@pytest.mark.parametrize("case", CASTS, ids=lambda c: c.name)
def test_casts(case: Case) -> None:
    check_found(case)


def test_names_that_rewrites_would_take() -> None:
    """Values, nodes and weights that are called like what a rewrite makes."""
    case = Case("taken", "float[B,S,8] x, float[B,S,8] y_MatMul", "float[B,S,16] y",
                "t = Transpose <perm=[1,0]> (w) h = MatMul (x, t) g = Add (h, b) w_t = Neg (y_MatMul)"
                "k = MatMul (w_t, t) y = Add (g, k)", "float[16,8] w, float[16] b, float[1] w_t_1")  # fmt: skip
    model = case.model()
    for index, node in enumerate(model.graph.node):
        node.name = ["y", "w_t", "b", "x", "h", "h_MatMul"][index]
    result = fused(model)
    made = [o for n in result.model.graph.node for o in n.output] + [t.name for t in result.model.graph.initializer]
    assert len(made) == len(set(made)) and "Transpose" not in ops(result.model)
    check_same(case, model, result.model)


def test_a_slice_whose_bounds_do_not_fit_is_an_error_of_the_model() -> None:
    """Two ends for one start: ONNX Runtime refuses it, and so is said; no crash of shape inference."""
    case = Case("slice", "float[B,S,8] x", "float[B,S,8] y", "a = Slice (x, start, ends) y = Relu (a)",
                "int64[1] start = {0}, int64[2] ends = {1, 2}")  # fmt: skip
    with pytest.raises(OnnxfuseError, match=r"Slice|Invalid|unverified|run"):
        fused(case.model())
