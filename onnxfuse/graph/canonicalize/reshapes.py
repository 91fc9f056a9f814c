"""Neighbouring ops that only change the shape become one."""

from __future__ import annotations

from onnxfuse.graph import consts
from onnxfuse.graph.canonicalize.scope import Scope, dtype_of, maker_of, numbers_of, shape_of, static_attr
from onnxfuse.graph.canonicalize.targets import constant_target, free_axis, set_target
from onnxfuse.graph.dims import Dim
from onnxfuse.graph.ir import Constant, Node
from onnxfuse.graph.shapes.table import Shape
from onnxfuse.graph.types import FLOATS


def merge_reshapes(scope: Scope) -> int:
    """A Reshape of a Reshape (or of a Squeeze, Unsqueeze, Flatten) reads the first one's input."""
    count = 0
    for node in scope.nodes("Reshape"):
        inner = maker_of(node.inputs[0], "Reshape", "Squeeze", "Unsqueeze", "Flatten")
        if inner is None or (inner.op != "Reshape" and not scope.read_only_here(inner.outputs[0])):
            continue
        source = inner.inputs[0]
        before, after = shape_of(source), shape_of(node.outputs[0])
        target = None
        if before is not None and after is not None:
            # With a −1 in both, zero sizes fail as before.
            free = free_axis(node)
            target = constant_target(before, after, free)
        if target is not None:
            node.inputs[0] = source
            set_target(scope, node, target)
            count += 1
        elif scope.opset >= 5 and _copies_nothing(node):
            # The target says every size itself.
            node.inputs[0] = source
            count += 1
    return count


def reshape_to_unsqueeze(scope: Scope) -> int:
    """A Reshape that only inserts (or only removes) ones becomes `Unsqueeze` (`Squeeze`): for integers and bools, which
    make up masks and positions, and wherever the target cannot be a constant. One that may split heads stays."""
    count = 0
    for node in scope.nodes("Reshape"):
        before, after = shape_of(node.inputs[0]), shape_of(node.outputs[0])
        if before is None or after is None or len(before) == len(after):
            continue
        numeric = dtype_of(node.outputs[0]) in FLOATS
        if numeric and (scope.opset < 5 or isinstance(node.inputs[1], Constant)):
            continue
        op = "Unsqueeze" if len(after) > len(before) else "Squeeze"
        axes = _inserted_ones(*sorted((before, after), key=len))
        if axes is None:
            continue
        node.op = op
        node.attrs.clear()
        if scope.opset < 13:
            node.attrs["axes"] = axes
            del node.inputs[1]
        else:
            node.inputs = [node.inputs[0], scope.integers(f"{node.outputs[0].name}_axes", axes)]
        count += 1
    return count


def _inserted_ones(shorter: Shape, longer: Shape) -> list[int] | None:
    """Where ones must be inserted into the shorter shape to give the longer one; None if that does not do it."""
    axes: list[int] = []
    position = 0
    for axis, size in enumerate(longer):
        spare = len(longer) - axis > len(shorter) - position
        if position < len(shorter) and shorter[position] == size and not (size == 1 and spare):
            position += 1
        elif not isinstance(size, Dim) and size == 1:
            axes.append(axis)
        else:
            return None
    return axes if position == len(shorter) else None


def _copies_nothing(node: Node) -> bool:
    """Whether no size of the target is (or could turn out to be) a 0 that copies from the input."""
    numbers = numbers_of(node.inputs[1])
    if numbers is None or static_attr(node, "allowzero", 0) is None:
        return False
    return all((not isinstance(n, Dim) and n != 0) for n in numbers)


def _axes(node: Node, rank: int) -> list[int] | None:
    """The axes of a Squeeze or Unsqueeze, non-negative and sorted; `rank` is what they count in."""
    axes = static_attr(node, "axes")
    if axes is None and len(node.inputs) > 1 and node.inputs[1].name:
        axes = consts.ints(node.inputs[1])
    return None if axes is None else sorted(axis % rank for axis in axes)


def _set_axes(scope: Scope, node: Node, axes: list[int]) -> bool:
    if scope.opset < 13:
        if list(node.attrs.get("axes", ())) == axes:
            return False
        node.attrs["axes"] = axes
        return True
    if len(node.inputs) > 1:
        if consts.ints(node.inputs[1]) == axes and consts.shape_of(node.inputs[1]):
            return False
        node.inputs[1] = scope.integers(f"{node.outputs[0].name}_axes", axes)
    else:
        node.inputs.append(scope.integers(f"{node.outputs[0].name}_axes", axes))
    return True


def merge_unsqueezes(scope: Scope) -> int:
    """Axes of Squeeze and Unsqueeze become non-negative and sorted; two of a kind become one; one that undoes the other
    goes."""
    count = 0
    for node in scope.nodes("Unsqueeze", "Squeeze"):
        before, after = shape_of(node.inputs[0]), shape_of(node.outputs[0])
        if before is None or after is None:
            continue
        axes = _axes(node, len(after) if node.op == "Unsqueeze" else len(before))
        if axes is None:
            if node.op == "Unsqueeze" or (len(node.inputs) > 1 and node.inputs[1].name):
                continue
            axes = [axis for axis, size in enumerate(before) if not isinstance(size, Dim) and size == 1]
        count += _set_axes(scope, node, axes)
        inner = maker_of(node.inputs[0], "Unsqueeze", "Squeeze")
        if inner is None:
            continue
        source = shape_of(inner.inputs[0])
        if source is None:
            continue
        inner_axes = _axes(inner, len(before) if inner.op == "Unsqueeze" else len(source))
        if inner_axes is None:
            continue
        count += _merge(scope, node, axes, inner, inner_axes)
    return count


def _merge(scope: Scope, node: Node, axes: list[int], inner: Node, inner_axes: list[int]) -> int:
    rank = len(shape_of(node.outputs[0]) or ())
    if node.op == inner.op == "Unsqueeze":
        # Where the inner ones end up among the axes that the outer leaves free.
        free = [axis for axis in range(rank) if axis not in axes]
        merged = sorted(axes + [free[axis] for axis in inner_axes])
    elif node.op == inner.op == "Squeeze":
        source_rank = len(shape_of(inner.inputs[0]) or ())
        free = [axis for axis in range(source_rank) if axis not in inner_axes]
        merged = sorted(inner_axes + [free[axis] for axis in axes])
    else:
        if axes == inner_axes and shape_of(inner.inputs[0]) == shape_of(node.outputs[0]):
            return int(scope.replace(node.outputs[0], inner.inputs[0]))
        return 0
    node.inputs[0] = inner.inputs[0]
    _set_axes(scope, node, merged)
    return 1
