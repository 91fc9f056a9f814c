"""Models made of parts of a model: with inner values as outputs, or one node alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, helper


def expose(model: ModelProto, names: Iterable[str], types: Mapping[str, int]) -> ModelProto:
    """A copy whose graph outputs include the inner values `names`.

    Args:
        types: element types by value name; a value of unknown type is exposed without one.
    """
    result = ModelProto()
    result.CopyFrom(model)
    present = {o.name for o in result.graph.output}
    for name in names:
        if name in present:
            continue
        present.add(name)
        if types.get(name):
            result.graph.output.append(helper.make_tensor_value_info(name, types[name], None))
        else:
            result.graph.output.append(onnx.ValueInfoProto(name=name))
    return result


def made_values(model: ModelProto) -> list[str]:
    """All values that nodes of the main graph make, in order."""
    return [name for node in model.graph.node for name in node.output if name]


def single_node(
    model: ModelProto, node: NodeProto, inputs: Mapping[str, np.ndarray], outputs: Mapping[str, np.ndarray]
) -> ModelProto:
    """The node as a model of its own. Its operands become graph inputs, but for weights, which stay initializers.

    Args:
        inputs: arrays of the computed operands.
        outputs: arrays like those that the node gives; outputs that are not among them are left out.
    """
    weights = {t.name: t for t in model.graph.initializer}
    graph_inputs = []
    initializers = []
    for name in dict.fromkeys(n for n in node.input if n):
        if name in weights and name not in inputs:
            initializers.append(weights[name])
        else:
            graph_inputs.append(_like(name, inputs[name]))
    graph_outputs = [_like(name, outputs[name]) for name in node.output if name in outputs]
    graph = helper.make_graph([node], "one_node", graph_inputs, graph_outputs, initializers)
    domains = {node.domain, ""} | {f.domain for f in model.functions}
    imports = [o for o in model.opset_import if o.domain in domains or (o.domain == "ai.onnx" and "" in domains)]
    result = helper.make_model(graph, opset_imports=imports, ir_version=model.ir_version)
    result.functions.extend(
        f for f in model.functions
        if (f.domain, f.name, f.overload) == (node.domain, node.op_type, node.overload)
    )  # fmt: skip
    return result


def _like(name: str, array: np.ndarray) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), list(array.shape))


def ancestors(model: ModelProto, names: Iterable[str]) -> set[str]:
    """All values of the main graph that `names` depend on, themselves included."""
    producer = {name: node for node in model.graph.node for name in node.output if name}
    found: set[str] = set()
    stack = list(names)
    while stack:
        name = stack.pop()
        if name in found:
            continue
        found.add(name)
        if name in producer:
            stack.extend(n for n in _read(producer[name]) if n)
    return found


def _read(node: NodeProto) -> list[str]:
    names = list(node.input)
    for attribute in node.attribute:
        if attribute.type == onnx.AttributeProto.GRAPH:
            for inner in attribute.g.node:
                names += _read(inner)
            names += [o.name for o in attribute.g.output]
    return names
