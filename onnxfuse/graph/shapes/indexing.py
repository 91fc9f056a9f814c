"""Ops that pick elements by index, and ops that return or count indices."""

from __future__ import annotations

import math

import numpy as np

from onnxfuse.graph import consts, dims
from onnxfuse.graph.dims import Dim
from onnxfuse.graph.ir import Constant
from onnxfuse.graph.shapes import content as contents
from onnxfuse.graph.shapes.table import Call, Unknown, of_ops


@of_ops("Gather")
def _gather(call: Call) -> None:
    call.set(0, call.dtype(0))
    data, indices = call.shape(0), call.shape(1)
    axis = call.axis(call.attr("axis", 0), len(data))
    shape = (*data[:axis], *indices, *data[axis + 1 :])
    call.set(0, None, shape)
    content, picks = call.content(0), call.content(1)
    sizes, picked, out = contents.static(data), contents.static(indices), contents.static(shape)
    if content is None or picks is None or sizes is None or picked is None or out is None:
        return
    size = sizes[axis]
    if any(isinstance(n, Dim) or not -size <= n < size for n in contents.flat(picks)):
        return
    if len(data) == 1:
        taken = [content[n] for n in contents.flat(picks)]
    else:
        index = contents.as_objects(picks, picked).astype(int)
        taken = list(contents.as_objects(content, sizes).take(index, axis=axis).ravel())
    call.set(0, content=contents.nest(taken, out))


@of_ops("GatherElements")
def _gather_elements(call: Call) -> None:
    call.set(0, call.dtype(0))
    call.set(0, None, call.shape(1))


@of_ops("GatherND")
def _gather_nd(call: Call) -> None:
    call.set(0, call.dtype(0))
    data, indices = call.shape(0), call.shape(1)
    depth = indices[-1]
    if isinstance(depth, Dim):
        raise Unknown
    batch = call.attr("batch_dims", 0)
    call.set(0, None, (*indices[:-1], *data[batch + depth :]))


@of_ops("OneHot")
def _one_hot(call: Call) -> None:
    call.set(0, call.dtype(2))
    indices = call.shape(0)
    depth = call.content(1)
    axis = call.axis(call.attr("axis", -1), len(indices) + 1)
    size = contents.flat(depth)[0] if depth is not None else call.fresh(0, axis)
    call.set(0, None, (*indices[:axis], size, *indices[axis:]))


@of_ops("NonZero")
def _non_zero(call: Call) -> None:
    call.set(0, "int64")
    shape = call.shape(0)
    call.set(0, None, (len(shape), call.fresh(0, 1)))
    maker = call.inputs[0].inputs[0] if call.inputs[0].inputs else None
    if maker is not None and maker.op == "ConstantOfShape":
        # An exporter's way to count up: every element of a tensor of ones is nonzero.
        fill = maker.attrs.get("value")
        array = None if fill is None else consts.of_attribute(fill)[2]
        if array is not None and array.reshape(-1)[0] != 0:
            call.set(0, None, (len(shape), dims.product(shape)))


@of_ops("TopK")
def _top_k(call: Call) -> None:
    call.set(0, call.dtype(0))
    call.set(1, "int64")
    shape = list(call.shape(0))
    axis = call.axis(call.attr("axis", -1), len(shape))
    count = call.content(1) if call.opset >= 10 else call.attr("k")
    shape[axis] = contents.flat(count)[0] if count is not None else call.fresh(0, axis)
    call.set(0, None, shape)
    call.set(1, None, shape)


@of_ops("Compress")
def _compress(call: Call) -> None:
    call.set(0, call.dtype(0))
    axis = call.attr("axis")
    if axis is None:
        call.set(0, None, (call.fresh(0, 0),))
        return
    shape = list(call.shape(0))
    axis = call.axis(axis, len(shape))
    shape[axis] = call.fresh(0, axis)
    call.set(0, None, shape)


@of_ops("Unique")
def _unique(call: Call) -> None:
    call.set(0, call.dtype(0))
    count = call.fresh(0, "count")
    axis = call.attr("axis")
    if axis is None:
        call.set(0, None, (count,))
    else:
        shape = list(call.shape(0))
        shape[call.axis(axis, len(shape))] = count
        call.set(0, None, shape)
    call.set(1, "int64", (count,))
    call.set(2, "int64", (dims.product(call.shape(0)) if axis is None else call.shape(0)[axis],))
    call.set(3, "int64", (count,))


@of_ops("NonMaxSuppression")
def _suppression(call: Call) -> None:
    call.set(0, "int64", (call.fresh(0, 0), 3))


def _fractional_range(call: Call) -> int | None:
    """How many numbers a Range of constants holds, if it is the same however the division is rounded."""
    if not all(isinstance(v, Constant) and consts.size_of(v) == 1 for v in call.inputs[:3]):
        return None
    first, last, step = (consts.array(v).reshape(-1)[0] for v in call.inputs[:3])
    with np.errstate(all="ignore"):
        shares = [(last - first) / step, (float(last) - float(first)) / float(step) if step else math.nan]
    if not all(np.isfinite(share) for share in shares):
        return None
    lengths = {max(math.ceil(share), 0) for share in shares}
    return lengths.pop() if len(lengths) == 1 else None


@of_ops("Range")
def _range(call: Call) -> None:
    call.set(0, call.dtype(0) or call.dtype(1) or call.dtype(2), (call.fresh(0, 0),))
    found = [call.content(i) for i in range(3)]
    if any(f is None for f in found):
        count = _fractional_range(call)
        if count is not None:
            call.set(0, None, (count,))
        return
    start, limit, step = (contents.flat(f)[0] for f in found)
    if isinstance(step, Dim) or step == 0:
        return
    span = limit - start if step > 0 else start - limit
    length = dims.maximum(dims.floor_divide(span + abs(step) - 1, abs(step)), 0)
    call.set(0, None, (length,))
    if isinstance(length, int) and length <= contents.LIMIT:
        call.set(0, content=tuple(start + i * step for i in range(length)))
