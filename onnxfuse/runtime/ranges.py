"""Which values an integer input may take, read from the graph: what it indexes, and what it is compared with."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

import onnx
from onnx import AttributeProto, numpy_helper

#: Ops that hand on the values of their first input.
_PASSING = frozenset({
    "Cast", "Identity", "Reshape", "Unsqueeze", "Squeeze", "Flatten", "Transpose", "Expand", "Slice", "Tile", "Split",
    "Loop", "Dropout",
})
#: Ops behind which a constant is still the same table.
_TABLE_PASSING = frozenset({"Cast", "Identity", "DequantizeLinear", "Dropout"})
#: Index inputs and the tables that they index, by input position.
_LOOKUPS: dict[str, tuple[tuple[int, int], ...]] = {
    "Gather": ((1, 0),),
    "GatherBlockQuantized": ((1, 0),),
    "EmbedLayerNormalization": ((0, 2), (1, 4)),
}


@dataclass
class Range:
    """What the graph says about an integer input.

    Attributes:
        limit: the values must be below this; None if nothing bounds them.
        compared: constants that the input is compared with.
    """

    limit: int | None = None
    compared: set[int] = field(default_factory=set)


def of_inputs(proto: onnx.ModelProto) -> dict[str, Range]:
    """The range of each integer graph input, following it through casts, reshapes and constant offsets to the tables
    that it indexes. Linear in the nodes."""
    graph = proto.graph
    shapes: dict[str, tuple[int, ...]] = {}
    small: dict[str, list[int]] = {}
    readers: dict[str, list[onnx.NodeProto]] = defaultdict(list)
    producers: dict[str, onnx.NodeProto] = {}
    for nested, tensors in _graphs(graph):
        for tensor in tensors:
            _constant(tensor.name, tensor, shapes, small)
        for node in nested:
            if node.op_type == "Constant":
                for attribute in node.attribute:
                    if attribute.type == AttributeProto.TENSOR:
                        _constant(node.output[0], attribute.t, shapes, small)
                    elif attribute.name == "value_int":
                        small[node.output[0]] = [attribute.i]
            for name in node.input:
                readers[name].append(node)
            for name in node.output:
                producers[name] = node
    result = {}
    for value in graph.input:
        if value.name not in shapes:
            result[value.name] = _follow(value.name, shapes, small, readers, producers)
    return result


def _constant(
    name: str, tensor: onnx.TensorProto, shapes: dict[str, tuple[int, ...]], small: dict[str, list[int]]
) -> None:
    shapes[name] = tuple(tensor.dims)
    integer = tensor.data_type in (onnx.TensorProto.INT64, onnx.TensorProto.INT32)
    if integer and tuple(tensor.dims) in ((), (1,)) and tensor.data_location != onnx.TensorProto.EXTERNAL:
        small[name] = [int(v) for v in numpy_helper.to_array(tensor).reshape(-1)]


def _graphs(graph: onnx.GraphProto) -> Iterator[tuple[list[onnx.NodeProto], list[onnx.TensorProto]]]:
    yield list(graph.node), list(graph.initializer)
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == AttributeProto.GRAPH:
                yield from _graphs(attribute.g)


def _follow(
    start: str, shapes: dict[str, tuple[int, ...]], small: dict[str, list[int]],
    readers: dict[str, list[onnx.NodeProto]], producers: dict[str, onnx.NodeProto],
) -> Range:
    found = Range()
    pending = [(start, 0)]
    seen = {start}
    while pending:
        name, offset = pending.pop()
        for node in readers[name]:
            for index_at, table_at in _LOOKUPS.get(node.op_type, ()):
                if len(node.input) > max(index_at, table_at) and node.input[index_at] == name:
                    rows = _rows(node, node.input[table_at], shapes, producers)
                    if rows is not None:
                        limit = rows - offset
                        found.limit = limit if found.limit is None else min(found.limit, limit)
            moved = offset
            if node.op_type in ("Add", "Sub") and len(node.input) == 2:
                other = node.input[1] if node.input[0] == name else node.input[0]
                if other not in small or (node.op_type == "Sub" and node.input[0] != name):
                    continue
                moved += small[other][0] if node.op_type == "Add" else -small[other][0]
            elif node.op_type == "Equal":
                other = node.input[1] if node.input[0] == name else node.input[0]
                found.compared.update(small.get(other, ()))
                continue
            elif node.op_type not in _PASSING or node.input[0] != name:
                continue
            for output in node.output:
                if output not in seen:
                    seen.add(output)
                    pending.append((output, moved))
    return found


def _rows(
    node: onnx.NodeProto, table: str, shapes: dict[str, tuple[int, ...]], producers: dict[str, onnx.NodeProto]
) -> int | None:
    axis = next((a.i for a in node.attribute if a.name == "axis"), 0)
    if node.op_type == "GatherBlockQuantized":
        axis = next((a.i for a in node.attribute if a.name == "gather_axis"), 0)
    while table not in shapes:
        producer = producers.get(table)
        if producer is None or producer.op_type not in _TABLE_PASSING:
            return None
        table = producer.input[0]
    shape = shapes[table]
    return shape[axis] if -len(shape) <= axis < len(shape) else None
