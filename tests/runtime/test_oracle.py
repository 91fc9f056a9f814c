"""The wide form of a model computes the same function, more exactly."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from onnxfuse.runtime import oracle
from onnxfuse.runtime.session import Runner

HALF = """<ir_version: 8, opset_import: ["": 17]>
g (float16[n, 64] x, bool c) => (float16[n, 64] y)
<float16 eps = {1}> {
  wide = Cast <to = 1> (x)
  square = Mul (wide, wide)
  mean = ReduceMean <axes = [-1]> (square)
  narrow = Cast <to = 10> (mean)
  half = Constant <value_float = 0.5> ()
  half16 = Cast <to = 10> (half)
  z = If (c) <
    then_branch = t () => (float16[n, 1] p) { p = Add (narrow, half16) },
    else_branch = e () => (float16[n, 1] q) { q = Sub (narrow, half16) }>
  fill = ConstantOfShape <value = float16[1] {15360}> (one)
  y0 = Div (x, z)
  y = Mul (y0, fill)
}"""


def half_model() -> onnx.ModelProto:
    proto = onnx.parser.parse_model(HALF)
    proto.graph.initializer.append(numpy_helper.from_array(np.array([1]), "one"))
    return proto


def test_half_becomes_float32_in_all_graphs() -> None:
    wide = oracle.widen(half_model(), "float32")
    onnx.checker.check_model(wide)

    def types(graph: onnx.GraphProto) -> set[int]:
        found = {t.data_type for t in graph.initializer}
        found |= {v.type.tensor_type.elem_type for v in [*graph.input, *graph.output]}
        for node in graph.node:
            for attribute in node.attribute:
                if attribute.type == onnx.AttributeProto.GRAPH:
                    found |= types(attribute.g)
                elif attribute.name == "to":
                    found.add(attribute.i)
                elif attribute.name == "value":
                    found.add(attribute.t.data_type)
        return found

    assert TensorProto.FLOAT16 not in types(wide.graph)


def test_the_oracle_is_close_and_better() -> None:
    rng = np.random.default_rng(0)
    feeds = {"x": rng.standard_normal((5, 64)).astype(np.float16), "c": np.array(True)}
    ours = Runner(half_model()).run(feeds)["y"].astype(np.float64)
    wide = oracle.runner(half_model(), "float32").run(oracle.cast_feeds(feeds, "float32"))["y"]
    widest = oracle.runner(half_model(), "float64").run(oracle.cast_feeds(feeds, "float64"))["y"]
    assert wide.dtype == np.float32 and widest.dtype == np.float64
    x = feeds["x"].astype(np.float64)
    exact = x / ((x * x).mean(axis=1, keepdims=True) + 0.5)
    assert np.abs(widest - exact).max() < 1e-12
    assert np.abs(wide - exact).max() < 1e-5
    assert np.abs(ours - exact).max() > 10 * np.abs(wide - exact).max()


@pytest.mark.parametrize("op", ["Erf", "Softplus", "HardSigmoid"])
def test_ops_without_a_wide_kernel_run_between_casts(op: str) -> None:
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [3])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [3])
    nodes = [helper.make_node(op, ["x"], ["h"]), helper.make_node("Sqrt", ["h"], ["y"])]
    model = helper.make_model(helper.make_graph(nodes, "g", [x], [y]), opset_imports=[helper.make_opsetid("", 17)],
                              ir_version=8)
    feeds = {"x": np.array([0.5, 1.0, 2.0], np.float32)}
    narrow = Runner(model).run(feeds)["y"]
    wide = oracle.runner(model, "float64").run(oracle.cast_feeds(feeds, "float64"))["y"]
    assert wide.dtype == np.float64
    assert np.abs(wide - narrow).max() < 1e-6


def test_model_local_functions_are_inlined() -> None:
    proto = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 17, "local": 1]>
        g (float16[3] x) => (float16[3] y) { y = local.twice (x) }
        <opset_import: ["": 17], domain: "local"> twice (a) => (b) { b = Add (a, a) }"""
    )
    wide = oracle.runner(proto, "float32").run({"x": np.ones(3, np.float32)})
    assert wide["y"].tolist() == [2.0, 2.0, 2.0]


@pytest.mark.parametrize("as_node", [False, True])
def test_constants_of_ops_that_keep_their_dtype_stay_constants(as_node: bool) -> None:
    """ONNX Runtime's MatMulNBits packs its scales when the session is made, and gives zeros if they come later."""
    rng = np.random.default_rng(0)
    packed = rng.integers(0, 256, (16, 1, 16), dtype=np.uint8)
    scales = rng.uniform(0.1, 0.2, (16, 1)).astype(np.float32)
    given = numpy_helper.from_array(scales, "s")
    nodes = [helper.make_node("MatMulNBits", ["x", "q", "s"], ["y"], domain="com.microsoft", K=32, N=16, bits=4,
                              block_size=32, accuracy_level=4)]  # fmt: skip
    if as_node:
        nodes.insert(0, helper.make_node("Constant", [], ["s"], value=given))
    graph = helper.make_graph(
        nodes, "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 32])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 16])],
        [numpy_helper.from_array(packed, "q"), *([] if as_node else [given])],
    )  # fmt: skip
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    x = rng.standard_normal((3, 32))
    found = oracle.runner(helper.make_model(graph, opset_imports=opsets, ir_version=9), "float64").run({"x": x})["y"]
    nibbles = np.stack([packed & 15, packed >> 4], axis=-1).reshape(16, 32).astype(np.float64)
    np.testing.assert_allclose(found, x @ ((nibbles - 8) * scales).T, atol=0.1)
    assert np.abs(found).max() > 1
