"""Sequences of tensors whose members are known are the tensors: exporters write `torch.split` and lists with them."""

from __future__ import annotations

from onnxfuse.graph import consts, view
from onnxfuse.graph.canonicalize.scope import Scope, maker_of, shape_of, static_attr
from onnxfuse.graph.ir import Node, Value, Variable


def members_of_sequences(scope: Scope) -> int:
    """`SequenceAt` of a `SequenceConstruct` is the member; `ConcatFromSequence` of one is `Concat`; a `SplitToSequence`
    whose members are all taken one by one is `Split`."""
    count = 0
    for node in scope.nodes("SequenceAt", "ConcatFromSequence", "SplitToSequence"):
        if node.op == "SequenceAt":
            made, index = maker_of(node.inputs[0], "SequenceConstruct"), consts.scalar(node.inputs[1])
            if made is not None and isinstance(index, int) and -len(made.inputs) <= index < len(made.inputs):
                count += scope.replace(node.outputs[0], made.inputs[index])
        elif node.op == "ConcatFromSequence":
            made = maker_of(node.inputs[0], "SequenceConstruct")
            if made is not None:
                count += _concat(scope, node, made)
        else:
            count += _split(scope, node)
    return count


def _concat(scope: Scope, node: Node, made: Node) -> int:
    axis, new = static_attr(node, "axis"), static_attr(node, "new_axis", 0)
    if axis is None or new is None:
        return 0
    parts: list[Value] = list(made.inputs)
    if new:
        rank = len(shape_of(parts[0]) or ()) if shape_of(parts[0]) is not None else None
        if axis < 0 and rank is None:
            return 0
        axis = axis + rank + 1 if axis < 0 and rank is not None else axis
        if scope.opset < 13:
            parts = [scope.insert(node, "Unsqueeze", [part], {"axes": [axis]}) for part in parts]
        else:
            parts = [
                scope.insert(node, "Unsqueeze", [part, scope.integers(f"{node.outputs[0].name}_axis", [axis])])
                for part in parts
            ]
    return int(scope.replace(node.outputs[0], scope.insert(node, "Concat", parts, {"axis": axis})))


def _split(scope: Scope, node: Node) -> int:
    """Parts of known sizes, of which each reader takes one with a known index."""
    shape, axis = shape_of(node.inputs[0]), static_attr(node, "axis", 0)
    readers = view.consumers(node.outputs[0])
    given = len(node.inputs) > 1 and bool(node.inputs[1].name)
    if shape is None or axis is None or not readers or not given or scope.is_output(node.outputs[0]):
        return 0
    size = shape[axis % len(shape)]
    sizes = _sizes(node.inputs[1], size)
    if sizes is None:
        return 0
    places = []
    for reader in readers:
        index = consts.scalar(reader.inputs[1]) if reader.op == "SequenceAt" else None
        if not isinstance(index, int) or not -len(sizes) <= index < len(sizes) or reader not in scope.graph.nodes:
            return 0
        places.append(index % len(sizes))
    if len(sizes) == 1:
        return sum(scope.replace(reader.outputs[0], node.inputs[0]) for reader in readers)
    parts = [Variable(scope.names.fresh(f"{node.outputs[0].name}_part")) for _ in sizes]
    if scope.opset < 13:
        attrs, inputs = {"axis": axis, "split": sizes}, [node.inputs[0]]
    else:
        attrs, inputs = {"axis": axis}, [node.inputs[0], scope.integers(f"{node.outputs[0].name}_sizes", sizes)]
    node.op, node.attrs, node.inputs, node.outputs = "Split", attrs, inputs, parts
    scope.engine.infer_node(node)
    return 1 + sum(
        scope.replace(reader.outputs[0], parts[place]) for reader, place in zip(readers, places, strict=True)
    )


def _sizes(split: Value, size: object) -> list[int] | None:
    """The sizes of the parts, from one size for all (the last may be smaller) or a list of them."""
    numbers = consts.ints(split)
    if numbers is None or not isinstance(size, int) or not all(n > 0 for n in numbers):
        return None
    if shape_of(split):
        return numbers if sum(numbers) == size else None
    whole, rest = divmod(size, numbers[0])
    return [numbers[0]] * whole + ([rest] if rest else [])
