"""Targets and bounds of shape ops become constants wherever ONNX has a constant spelling for them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from onnxfuse.graph import consts, dims
from onnxfuse.graph.canonicalize.scope import Scope, numbers_of, shape_of, static_attr
from onnxfuse.graph.dims import Dim, SymInt
from onnxfuse.graph.ir import Constant, Node
from onnxfuse.graph.shapes.table import Shape

#: The `ends` of a slice that goes to the end.
TO_THE_END = np.iinfo(np.int64).max


def constant_target(before: Shape, after: Shape, free: int | None = None) -> list[int] | None:
    """A constant `Reshape` target (``allowzero`` 0) that turns shape `before` into `after`, whatever the symbols are.

    0 copies a size that stays where it is. −1 needs the product of the others not to be zero, else there is no
    answer, so it serves only where that is sure; or at `free`, where the target had it already. It does not stand for a
    size that only the target says (a mask cut from a buffer that has to fit the keys), which would be lost.
    """
    target: list[int] = []
    unresolved: list[int] = []
    for axis, size in enumerate(after):
        kept = axis < len(before) and before[axis] == size
        if not isinstance(size, Dim) and (size > 0 or kept):
            target.append(size)
        elif kept:
            target.append(0)
        elif isinstance(size, Dim):
            unresolved.append(axis)
            target.append(-1)
        else:
            return None
    if len(unresolved) > 1:
        return None
    if unresolved and unresolved[0] != free:
        others = [size for axis, size in enumerate(after) if axis != unresolved[0]]
        if not all(dims.is_positive(size) for size in others) or dims.product(before) != dims.product(after):
            return None
    return target


def free_axis(node: Node) -> int | None:
    """Where a Reshape's target surely is −1."""
    numbers = numbers_of(node.inputs[1]) if len(node.inputs) > 1 else static_attr(node, "shape")
    if numbers is None:
        return None
    return next((axis for axis, n in enumerate(numbers) if not isinstance(n, Dim) and n == -1), None)


def set_target(scope: Scope, node: Node, target: Sequence[int]) -> bool:
    """Give a Reshape a constant target; False if it has just that."""
    if scope.opset < 5:
        if list(node.attrs.get("shape", ())) == list(target):
            return False
        node.attrs["shape"] = list(target)
        return True
    present = consts.ints(node.inputs[1])
    if present == list(target) and not node.attrs.get("allowzero", 0):
        return False
    node.inputs[1] = scope.integers(f"{node.outputs[0].name}_shape", target)
    node.attrs.pop("allowzero", None)
    return True


def reshape_targets(scope: Scope) -> int:
    """Reshape targets become constants: sizes that are known, 0 for those that stay in place, at most one −1."""
    count = 0
    for node in scope.nodes("Reshape"):
        before, after = shape_of(node.inputs[0]), shape_of(node.outputs[0])
        if before is None or after is None or static_attr(node, "allowzero", 0) is None:
            continue
        target = constant_target(before, after, free_axis(node))
        if target is not None:
            count += set_target(scope, node, target)
    return count


def flatten_to_reshape(scope: Scope) -> int:
    """`Flatten` becomes `Reshape` where a constant target says the same."""
    count = 0
    if scope.opset < 5:
        return 0
    for node in scope.nodes("Flatten"):
        before, after = shape_of(node.inputs[0]), shape_of(node.outputs[0])
        target = None if before is None or after is None else constant_target(before, after)
        if target is None:
            continue
        node.op = "Reshape"
        node.attrs.clear()
        node.inputs.append(scope.integers(f"{node.outputs[0].name}_shape", target))
        count += 1
    return count


def expand_targets(scope: Scope) -> int:
    """Expand targets become constants: 1 where the size stays (which `Expand` reads as "keep")."""
    count = 0
    for node in scope.nodes("Expand"):
        before, after = shape_of(node.inputs[0]), shape_of(node.outputs[0])
        if before is None or after is None:
            continue
        aligned = (1,) * (len(after) - len(before)) + tuple(before)
        target = [1 if old == new else new for old, new in zip(aligned, after, strict=True)]
        if any(isinstance(size, Dim) for size in target) or consts.ints(node.inputs[1]) == target:
            continue
        node.inputs[1] = scope.integers(f"{node.outputs[0].name}_shape", target)  # type: ignore[arg-type]
        count += 1
    return count


def slice_bounds(scope: Scope) -> int:
    """Bounds of slices with constant steps and axes become constants: clamped to a known size and not negative, or "to
    the end"; axes are not negative; steps of 1 are left out."""
    count = 0
    if scope.opset < 10:
        return 0
    for node in scope.nodes("Slice"):
        before = shape_of(node.inputs[0])
        starts, ends = numbers_of(node.inputs[1]), numbers_of(node.inputs[2])
        if before is None or starts is None or ends is None:
            continue
        axes = _constant_or(node, 3, range(len(starts)))
        steps = _constant_or(node, 4, [1] * len(starts))
        if axes is None or steps is None or any(step <= 0 for step in steps):
            continue
        if not len(starts) == len(ends) == len(axes) == len(steps):
            continue
        if len(node.inputs) > 4 and all(step == 1 for step in steps):
            del node.inputs[4]
            count += 1
        axes = [axis % len(before) for axis in axes]
        new_starts = [_bound(bound, before[axis], 0) for bound, axis in zip(starts, axes, strict=True)]
        new_ends = [_bound(bound, before[axis], before[axis]) for bound, axis in zip(ends, axes, strict=True)]
        for index, new in ((1, new_starts), (2, new_ends), (3, axes)):
            if any(isinstance(n, Dim) for n in new):
                continue
            if index < len(node.inputs) and consts.ints(node.inputs[index]) == list(new):
                continue
            if index == 3 and not (len(node.inputs) > 3 and node.inputs[3].name):
                continue
            name = f"{node.outputs[0].name}_{('starts', 'ends', 'axes')[index - 1]}"
            # The dtype stays: starts, ends, axes and steps must have one.
            dtype = (
                np.int32 if _is_int32(node) and max(abs(n) for n in new if not isinstance(n, Dim)) < 2**31 else np.int64
            )
            if _is_int32(node) and dtype is np.int64:
                continue
            node.inputs[index] = scope.constant(name, np.array(new, dtype=dtype))
            count += 1
    return count


def _is_int32(node: Node) -> bool:
    value = node.inputs[1]
    return (consts.dtype_of(value) if isinstance(value, Constant) else value.dtype) == "int32"


def _constant_or(node: Node, index: int, default: Sequence[int]) -> list[int] | None:
    if index < len(node.inputs) and node.inputs[index].name:
        return consts.ints(node.inputs[index])
    return list(default)


def _bound(bound: SymInt, size: SymInt, extreme: SymInt) -> SymInt:
    """A bound in its plainest form. `extreme` leaves this side untouched: 0 for a start, the size for an end."""
    if isinstance(bound, Dim):
        if isinstance(extreme, Dim) and dims.is_nonnegative(bound - extreme):
            return TO_THE_END
        return bound
    if isinstance(size, Dim):
        # A negative bound depends on the size; one beyond any size is "to the end".
        return TO_THE_END if bound >= 2**31 - 1 else bound
    return min(max(bound + size if bound < 0 else bound, 0), size)
