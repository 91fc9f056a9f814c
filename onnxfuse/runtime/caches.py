"""Which inputs are caches that a run appends to, read from the graph rather than from names."""

from __future__ import annotations

import onnx


def grown_dims(proto: onnx.ModelProto) -> dict[str, str]:
    """Of each input [..., sequence, size] that a Concat puts before something new and gives back as an output: the name
    of the sequence dimension, as the output declares it ("" if it has none)."""
    inputs = {value.name: value for value in proto.graph.input}
    outputs = {value.name: value for value in proto.graph.output}
    same = {node.output[0]: node.input[0] for node in proto.graph.node if node.op_type == "Identity"}
    given_back = dict(outputs)
    for name, value in outputs.items():
        while name in same:
            name = same[name]
            given_back.setdefault(name, value)
    found: dict[str, str] = {}
    for node in proto.graph.node:
        if node.op_type != "Concat" or len(node.input) < 2 or node.output[0] not in given_back:
            continue
        past = node.input[0]
        while past in same:
            past = same[past]
        if past not in inputs:
            continue
        axis = next(attribute.i for attribute in node.attribute if attribute.name == "axis")
        before, after = (value.type.tensor_type.shape.dim for value in (inputs[past], given_back[node.output[0]]))
        if len(before) < 3 or axis not in (-2, len(before) - 2) or before[axis].HasField("dim_value"):
            continue
        found[past] = after[axis].dim_param if len(after) == len(before) else ""
    return found
