"""Reductions and the norms with more than one output."""

from __future__ import annotations

from onnxfuse.graph import dims
from onnxfuse.graph.shapes import content as contents
from onnxfuse.graph.shapes.table import Call, Unknown, of_ops

#: From this opset on the axes are an input.
_AXES_INPUT_SINCE = {"ReduceSum": 13}


@of_ops(
    "ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceL1", "ReduceL2", "ReduceLogSum",
    "ReduceLogSumExp", "ReduceSumSquare",
)  # fmt: skip
def _reduce(call: Call) -> None:
    call.set(0, call.dtype(0))
    shape = call.shape(0)
    keep = call.attr("keepdims", 1)
    try:
        axes = call.axes(1, len(shape))
    except Unknown:
        if keep:
            call.set(0, None, tuple(call.fresh(0, axis) for axis in range(len(shape))))
        raise
    if not axes:
        if axes is not None or call.has(1):
            # An empty list: all axes, or none at all.
            axes = [] if call.attr("noop_with_empty_axes", 0) else None
        elif call.attr("noop_with_empty_axes", 0) and call.opset >= _AXES_INPUT_SINCE.get(call.node.op, 18):
            axes = []
    axes = list(range(len(shape))) if axes is None else axes
    if keep:
        out = tuple(1 if axis in axes else d for axis, d in enumerate(shape))
    else:
        out = tuple(d for axis, d in enumerate(shape) if axis not in axes)
    call.set(0, None, out)
    content = call.content(0)
    if content is None or len(axes) != len(shape) or call.node.op not in _FOLDS:
        return
    items = contents.flat(content)
    if items:
        total = items[0]
        for item in items[1:]:
            total = _FOLDS[call.node.op](total, item)
        call.set(0, content=contents.nest([total], out))  # type: ignore[arg-type]


_FOLDS = {
    "ReduceSum": lambda a, b: a + b,
    "ReduceProd": lambda a, b: a * b,
    "ReduceMax": dims.maximum,
    "ReduceMin": dims.minimum,
}


@of_ops("ArgMax", "ArgMin")
def _argument(call: Call) -> None:
    call.set(0, "int64")
    shape = list(call.shape(0))
    axis = call.axis(call.attr("axis", 0), len(shape))
    if call.attr("keepdims", 1):
        shape[axis] = 1
    else:
        del shape[axis]
    call.set(0, None, shape)


@of_ops("LayerNormalization")
def _layer_norm(call: Call) -> None:
    call.set(0, call.dtype(0))
    for index in (1, 2):
        # The statistics are computed in float32 unless told otherwise (`stash_type` names a dtype by its number).
        call.set(index, "float32" if call.attr("stash_type", 1) == 1 else call.dtype(0))
    shape = call.shape(0)
    call.set(0, None, shape)
    axis = call.axis(call.attr("axis", -1), len(shape))
    rows = (*shape[:axis], *[1] * (len(shape) - axis))
    call.set(1, None, rows)
    call.set(2, None, rows)


@of_ops("BatchNormalization")
def _batch_norm(call: Call) -> None:
    call.set(0, call.dtype(0))
    call.set(0, None, call.shape(0))
    for index in (1, 2):
        call.set(index, call.dtype(3))
        if call.shape_or_none(3) is not None:
            call.set(index, None, call.shape(3))
