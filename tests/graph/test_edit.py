"""Editing keeps graphs valid: names of outputs, order, captured values."""

from __future__ import annotations

import onnx
import pytest

from onnxfuse.errors import RewriteError
from onnxfuse.graph import edit, model


def load(body: str, outputs: str = "y", opset: int = 17) -> model.Model:
    return model.load(
        onnx.parser.parse_model(
            f"""<ir_version: 8, opset_import: ["": {opset}]>
            g (float[B,4] x, bool c) => ({", ".join("float[B,4] " + o for o in outputs.split(","))}) {{ {body} }}"""
        )
    )


def test_replacing_an_output_keeps_its_name() -> None:
    loaded = load("a = Relu (x) b = Neg (a) y = Identity (b)")
    _, neg, identity = loaded.graph.nodes
    edit.replace_uses(loaded.graph, identity.outputs[0], neg.outputs[0])
    edit.remove_dead(loaded.graph)
    proto = loaded.to_proto()
    assert [n.op_type for n in proto.graph.node] == ["Relu", "Neg"]
    assert proto.graph.node[1].output[0] == "y" == proto.graph.output[0].name
    onnx.checker.check_model(proto)


def test_an_output_fed_by_an_input_needs_a_bridge() -> None:
    loaded = load("y = Dropout (x)")
    edit.replace_uses(loaded.graph, loaded.graph.nodes[0].outputs[0], loaded.graph.inputs[0])
    edit.remove_dead(loaded.graph)
    proto = loaded.to_proto()
    assert [(n.op_type, list(n.input), list(n.output)) for n in proto.graph.node] == [("Identity", ["x"], ["y"])]


def test_two_outputs_may_come_from_one_value() -> None:
    loaded = load("y = Relu (x) z = Identity (y)", outputs="y,z")
    relu, identity = loaded.graph.nodes
    edit.replace_uses(loaded.graph, identity.outputs[0], relu.outputs[0])
    edit.remove_dead(loaded.graph)
    edit.sort(loaded.graph)
    proto = loaded.to_proto()
    assert [o.name for o in proto.graph.output] == ["y", "z"]
    onnx.checker.check_model(proto)


def test_values_that_a_subgraph_captures_stay_alive() -> None:
    loaded = load(
        "a = Neg (x) y = If (c) <then_branch = t () => (float[B,4] p) { p = Relu (a) },"
        " else_branch = e () => (float[B,4] q) { q = Identity (x) }>"
    )
    assert edit.remove_dead(loaded.graph) == 0
    neg = loaded.graph.nodes[0]
    edit.replace_uses(loaded.graph, neg.outputs[0], loaded.graph.inputs[0])
    assert edit.remove_dead(loaded.graph) == 1
    onnx.checker.check_model(loaded.to_proto())


def test_dead_chains_go_in_any_order() -> None:
    loaded = load("y = Relu (x) a = Neg (x) b = Abs (a) d = Exp (b)")
    loaded.graph.nodes.reverse()
    assert edit.remove_dead(loaded.graph) == 3


def test_sort_puts_captured_values_first_and_finds_cycles() -> None:
    loaded = load(
        "a = Neg (x) y = If (c) <then_branch = t () => (float[B,4] p) { p = Relu (a) },"
        " else_branch = e () => (float[B,4] q) { q = Identity (x) }>"
    )
    loaded.graph.nodes.reverse()
    edit.sort(loaded.graph)
    assert [n.op for n in loaded.graph.nodes] == ["Neg", "If"]
    loaded = load("a = Neg (x) y = Relu (a)")
    neg, relu = loaded.graph.nodes
    neg.inputs[0] = relu.outputs[0]
    with pytest.raises(RewriteError, match="cycle"):
        edit.sort(loaded.graph)
