"""Ops that ask for shapes, make tensors from shapes, or move elements without changing them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from onnxfuse.graph import consts, dims
from onnxfuse.graph.dims import Dim, SymInt
from onnxfuse.graph.shapes import content as contents
from onnxfuse.graph.shapes.elementwise import broadcast_shapes
from onnxfuse.graph.shapes.table import Call, Shape, Unknown, of_ops

#: A slice bound of at least this is "to the end"; no dimension is as large.
END = 2**31 - 1


@of_ops("Shape")
def _shape(call: Call) -> None:
    call.set(0, "int64")
    start, end = call.attr("start", 0), call.attr("end")
    shape = call.shape(0)[slice(start, end)]
    call.set(0, None, (len(shape),), shape)


@of_ops("Size")
def _size(call: Call) -> None:
    call.set(0, "int64", ())
    call.set(0, content=dims.product(call.shape(0)))


@of_ops("Constant")
def _constant(call: Call) -> None:
    attrs = call.node.attrs
    if "value" in attrs:
        dtype, shape, array = consts.of_attribute(call.attr("value"), contents.LIMIT)
        call.set(0, dtype, shape, None if array is None else contents.of_array(array))
    elif "value_int" in attrs:
        call.set(0, "int64", (), call.attr("value_int"))
    elif "value_ints" in attrs:
        numbers = tuple(call.attr("value_ints"))
        call.set(0, "int64", (len(numbers),), numbers)
    elif "value_float" in attrs:
        call.set(0, "float32", ())
    elif "value_floats" in attrs:
        call.set(0, "float32", (len(call.attr("value_floats")),))


def reshape_target(
    shape: Shape, target: Sequence[SymInt], allowzero: bool, unknown: Dim, sizes: frozenset[int] = frozenset()
) -> Shape:
    """The shape that `Reshape` gives.

    Args:
        shape: of the input.
        target: the requested sizes; constants may be 0 (copy) and −1 (what is left).
        unknown: stands for a size that cannot be told.
        sizes: which of the target's numbers are sizes of tensors, and so not negative.
    """
    result: list[SymInt] = []
    free: int | None = None
    # Only one size may be left open, so beside a constant −1 no other can turn out to be −1, nor can one of the input.
    open_elsewhere = any(not isinstance(size, Dim) and size == -1 for size in target)
    unsure: list[int] = []
    for axis, size in enumerate(target):
        if not isinstance(size, Dim) and size == 0 and not allowzero:
            if axis >= len(shape):
                raise Unknown
            size = shape[axis]
        elif not isinstance(size, Dim) and size == -1:
            free = axis
        elif isinstance(size, Dim) and not (
            open_elsewhere or axis in sizes or size in shape or dims.is_nonnegative(size)
        ):
            # It could be −1 when the model runs, and stand for what is left, which is its size in any case.
            unsure.append(axis)
        result.append(size)
    if unsure:
        if len(unsure) > 1:
            raise Unknown
        free = unsure[0]
    if free is not None:
        rest, taken = list(shape), [size for axis, size in enumerate(result) if axis != free]
        # What is on both sides cancels, whether or not the polynomials could be divided.
        for size in list(taken):
            if size in rest and size != 0:
                rest.remove(size)
                taken.remove(size)
        total, divisor = dims.product(rest), dims.product(taken)
        found = dims.divide_exactly(total, divisor)
        if found is None:
            found = dims.floor_divide(total, divisor) if divisor != 0 and not unsure else unknown
        result[free] = found
    return tuple(result)


@of_ops("Reshape")
def _reshape(call: Call) -> None:
    call.set(0, call.dtype(0))
    if call.opset < 5:
        target: Sequence[SymInt] = call.attr("shape")
    else:
        found = call.content(1)
        if found is None:
            # The rank may be known although the sizes are not.
            length = call.shape(1)
            if len(length) == 1 and isinstance(length[0], int):
                call.set(0, None, tuple(call.fresh(0, axis) for axis in range(length[0])))
            return
        target = contents.flat(found)
    call.set(0, None, tuple(call.fresh(0, axis) for axis in range(len(target))))
    sizes = frozenset() if call.opset < 5 else _sure_sizes(call, 1, target)
    shape = reshape_target(call.shape(0), target, bool(call.attr("allowzero", 0)), call.fresh(0, "free"), sizes)
    call.set(0, None, shape)
    _carry_content(call, shape)


def _sure_sizes(call: Call, index: int, numbers: Sequence[SymInt]) -> frozenset[int]:
    """Which elements of an integer input are sizes of some tensor, and so not negative, whatever their formula says."""
    met = {i for i, number in enumerate(numbers) if isinstance(number, Dim) and number in call.engine.met}
    return contents.tensor_sizes(call.inputs[index]) | met


def _carry_content(call: Call, shape: Shape) -> None:
    """The elements stay in their order, only the shape is another."""
    content = call.content(0)
    out = contents.static(shape)
    if content is not None and out is not None:
        call.set(0, content=contents.nest(contents.flat(content), out))


@of_ops("Flatten")
def _flatten(call: Call) -> None:
    call.set(0, call.dtype(0))
    shape = call.shape(0)
    axis = call.attr("axis", 1)
    axis = axis + len(shape) if axis < 0 else axis
    call.set(0, None, (dims.product(shape[:axis]), dims.product(shape[axis:])))


@of_ops("Unsqueeze")
def _unsqueeze(call: Call) -> None:
    call.set(0, call.dtype(0))
    shape = list(call.shape(0))
    given = call.attr("axes")
    if given is None:
        given = call.constant_numbers(1)
    rank = len(shape) + len(given)
    for axis in sorted(call.axis(int(a), rank) for a in given):
        shape.insert(axis, 1)
    call.set(0, None, shape)
    _carry_content(call, tuple(shape))


@of_ops("Squeeze")
def _squeeze(call: Call) -> None:
    call.set(0, call.dtype(0))
    shape = call.shape(0)
    axes = call.axes(1, len(shape))
    if axes is None:
        if any(isinstance(d, Dim) and dims.bounds(d)[0] <= 1 <= dims.bounds(d)[1] for d in shape):
            raise Unknown
        axes = [axis for axis, d in enumerate(shape) if not isinstance(d, Dim) and d == 1]
    shape = tuple(d for axis, d in enumerate(shape) if axis not in axes)
    call.set(0, None, shape)
    _carry_content(call, shape)


@of_ops("Transpose")
def _transpose(call: Call) -> None:
    call.set(0, call.dtype(0))
    shape = call.shape(0)
    perm = call.attr("perm")
    perm = tuple(perm) if perm is not None else tuple(reversed(range(len(shape))))
    if sorted(perm) != list(range(len(shape))):
        raise Unknown
    call.set(0, None, tuple(shape[axis] for axis in perm))
    content = call.content(0)
    if content is not None and contents.static(shape) is not None:
        turned = contents.as_objects(content, shape).transpose(perm)  # type: ignore[arg-type]
        call.set(0, content=contents.nest(list(turned.ravel()), turned.shape))


@of_ops("Concat")
def _concat(call: Call) -> None:
    call.set(0, next((d for d in map(call.dtype, range(len(call.inputs))) if d), None))
    known = [call.shape_or_none(i) for i in range(len(call.inputs))]
    rank = next((len(s) for s in known if s is not None), None)
    if rank is None:
        raise Unknown
    axis = call.axis(call.attr("axis", 1 if call.opset < 4 else 0), rank)
    shape: list[SymInt] = []
    for i in range(rank):
        sizes = [s[i] for s in known if s is not None]
        if i == axis:
            shape.append(_sum(sizes) if None not in known else call.fresh(0, axis))
        else:
            shape.append(agreed(*sizes))
    call.set(0, None, shape)
    found = [call.content(i) for i in range(len(call.inputs))]
    if rank == 1 and all(f is not None for f in found):
        call.set(0, content=tuple(item for f in found for item in contents.flat(f)))


def _sum(sizes: Sequence[SymInt]) -> SymInt:
    total: SymInt = 0
    for size in sizes:
        total = total + size
    return total


def agreed(*sizes: SymInt) -> SymInt:
    """One of several sizes that must be equal for the node to run: a constant if there is one."""
    return next((s for s in sizes if not isinstance(s, Dim)), sizes[0])


@of_ops("Split")
def _split(call: Call) -> None:
    count = len(call.outputs)
    for index in range(count):
        call.set(index, call.dtype(0))
    shape = call.shape(0)
    axis = call.axis(call.attr("axis", 0), len(shape))
    size = shape[axis]
    sizes: Sequence[SymInt] | None = call.attr("split")
    if sizes is None and call.has(1):
        found = call.content(1)
        sizes = contents.flat(found) if found is not None else [call.fresh(i, axis) for i in range(count)]
    if sizes is None:
        count = call.attr("num_outputs", count)
        chunk = -(-size // count)
        exact = dims.divide_exactly(size, count)
        sizes = [exact] * count if exact is not None else [chunk] * (count - 1) + [size - chunk * (count - 1)]
    for index, part in enumerate(sizes):
        call.set(index, None, (*shape[:axis], part, *shape[axis + 1 :]))
    content = call.content(0) if len(shape) == 1 else None
    if content is None:
        return
    start = 0
    for index, part in enumerate(sizes):
        if isinstance(part, Dim):
            return
        call.set(index, content=content[start : start + part])
        start += part


def slice_size(size: SymInt, start: SymInt, end: SymInt, step: int) -> SymInt:
    """How many elements a slice takes of a dimension (ONNX clamping rules)."""
    if step > 0:
        first = _clamped(start, size, 0, size)
        last = _clamped(end, size, 0, size)
        taken = dims.maximum(last - first, 0)
        return taken if step == 1 else dims.floor_divide(taken + step - 1, step)
    first = _clamped(start, size, 0, size - 1)
    last = _clamped(end, size, -1, size - 1)
    taken = dims.maximum(first - last, 0)
    return taken if step == -1 else dims.floor_divide(taken - step - 1, -step)


def _clamped(bound: SymInt, size: SymInt, low: SymInt, high: SymInt) -> SymInt:
    if not isinstance(bound, Dim):
        if bound >= END:
            return high
        if bound <= -END:
            return low
        bound = bound + size if bound < 0 else bound
    else:
        bound = dims.select(dims.less(bound, 0), bound + size, bound)
    return dims.minimum(dims.maximum(bound, low), high)


def slice_parameters(call: Call) -> tuple[list[SymInt], list[SymInt], list[int], list[int]]:
    """(starts, ends, axes, steps) of a Slice node. Raises Unknown if axes or steps are not constants."""
    rank = call.rank(0)
    if call.opset < 10:
        starts, ends = list(call.attr("starts")), list(call.attr("ends"))
        axes = call.attr("axes")
        steps = [1] * len(starts)
    else:
        axes = call.constant_numbers(3) if call.has(3) else None
        starts, ends = _bounds(call, 1), _bounds(call, 2)
        steps = call.constant_numbers(4) if call.has(4) else [1] * len(starts)
    axes = list(range(len(starts))) if axes is None else [call.axis(a, rank) for a in axes]
    if not len(starts) == len(ends) == len(axes) == len(steps):
        raise Unknown  # not valid, and the runtime says so
    return starts, ends, axes, steps


def _bounds(call: Call, index: int) -> list[SymInt]:
    found = call.content(index)
    if found is not None:
        return contents.flat(found)
    length = call.shape(index)
    if len(length) != 1 or isinstance(length[0], Dim):
        raise Unknown
    return [call.engine.fresh_integer(call.inputs[index], i) for i in range(length[0])]


@of_ops("Slice")
def _slice(call: Call) -> None:
    call.set(0, call.dtype(0))
    shape = list(call.shape(0))
    try:
        starts, ends, axes, steps = slice_parameters(call)
    except Unknown:
        call.set(0, None, tuple(call.fresh(0, axis) for axis in range(len(shape))))
        raise
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        if step == 0:
            raise Unknown
        shape[axis] = slice_size(shape[axis], start, end, step)
    call.set(0, None, shape)
    content = call.content(0)
    if content is None or any(isinstance(b, Dim) for b in (*starts, *ends)) or contents.static(call.shape(0)) is None:
        return
    index: list[slice] = [slice(None)] * len(shape)
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        stop = None if step < 0 and end <= -END else end  # type: ignore[operator]
        index[axis] = slice(start, stop, step)
    taken = contents.as_objects(content, call.shape(0))[tuple(index)]  # type: ignore[arg-type]
    call.set(0, content=contents.nest(list(taken.ravel()), taken.shape))


@of_ops("Expand")
def _expand(call: Call) -> None:
    call.set(0, call.dtype(0))
    found = call.content(1)
    if found is None:
        length = call.shape(1)
        if len(length) == 1 and isinstance(length[0], int):
            call.set(0, None, tuple(call.fresh(0, axis) for axis in range(max(length[0], call.rank(0)))))
        return
    target = contents.flat(found)
    sizes = _sure_sizes(call, 1, target)
    unsure = {i - len(target) for i, t in enumerate(target) if i not in sizes and not dims.is_nonnegative(t)}
    shape = broadcast_shapes(call.shape(0), tuple(target))
    shape = tuple(call.fresh(0, i) if i - len(shape) in unsure else size for i, size in enumerate(shape))
    call.set(0, None, shape)
    out = contents.static(shape)
    content = call.content(0)
    if out is not None and content is not None:
        call.set(0, content=contents.elementwise(lambda x: x, [call.shape(0)], [content], out))


@of_ops("ConstantOfShape")
def _constant_of_shape(call: Call) -> None:
    value = call.attr("value")
    fill: int | None = None
    dtype: str | None = "float32"
    if value is not None:
        dtype, _, array = consts.of_attribute(value)
        if array is not None and array.dtype.kind in "iub":
            fill = array.reshape(-1)[0].item()
    call.set(0, dtype)
    sizes = _sizes(call, 0)
    call.set(0, None, sizes)
    out = contents.static(sizes)
    if out is not None and fill is not None:
        call.set(0, content=contents.nest([fill] * int(np.prod(out, dtype=np.int64)), out))


def _sizes(call: Call, index: int) -> tuple[SymInt, ...]:
    """The shape that an input spells out; its rank with unknown sizes if only that is known."""
    found = call.content(index)
    if found is not None:
        return tuple(contents.flat(found))
    length = call.shape(index)
    if len(length) != 1 or isinstance(length[0], Dim):
        raise Unknown
    return tuple(call.fresh(0, axis) for axis in range(length[0]))
