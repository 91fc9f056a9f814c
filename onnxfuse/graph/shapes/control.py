"""If, Loop and Scan: infer inside the bodies, merge what comes out."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_graphsurgeon as gs

from onnxfuse.graph import consts
from onnxfuse.graph.ir import Constant, Graph, Value
from onnxfuse.graph.shapes.table import Call, Shape, Unknown, of_ops


def _type_of(value: Value) -> tuple[str | None, Shape | None]:
    if isinstance(value, Constant):
        return consts.dtype_of(value), consts.shape_of(value)
    return value.dtype, value.shape


def _body(call: Call, name: str) -> Graph:
    body = call.node.attrs.get(name)
    if not isinstance(body, gs.Graph):
        raise Unknown
    return body


def _merge(call: Call, index: int, shapes: Sequence[Shape | None]) -> Shape | None:
    """A shape that covers several: sizes that differ become unknown ones."""
    if any(s is None for s in shapes) or len({len(s) for s in shapes if s is not None}) != 1:
        return None
    known = [s for s in shapes if s is not None]
    return tuple(
        sizes[0] if all(s == sizes[0] for s in sizes) else call.fresh(index, axis)
        for axis, sizes in enumerate(zip(*known, strict=True))
    )


@of_ops("If")
def _if(call: Call) -> None:
    branches = [_body(call, name) for name in ("then_branch", "else_branch")]
    for branch in branches:
        call.engine.infer_subgraph(branch)
    if any(len(branch.outputs) < len(call.outputs) for branch in branches):
        raise Unknown
    for index in range(len(call.outputs)):
        found = [_type_of(branch.outputs[index]) for branch in branches]
        call.set(index, found[0][0] or found[1][0], _merge(call, index, [shape for _, shape in found]))


def _assign(value: Value, dtype: str | None, shape: Shape | None) -> None:
    if not isinstance(value, Constant):
        value.dtype, value.shape, value.content = dtype, shape, None


def _settle(call: Call, body: Graph, inputs: Sequence[Value], outputs: Sequence[Value]) -> list[Shape | None]:
    """Shapes of loop-carried values that hold in every iteration. `inputs` have the types of the first; sizes that the
    body changes are given up, then ranks."""
    varying: set[tuple[int, int]] = set()
    for _ in range(4):
        call.engine.infer_subgraph(body)
        changed = False
        for index, (before, after) in enumerate(zip(inputs, outputs, strict=True)):
            start, end = _type_of(before)[1], _type_of(after)[1]
            if start is None:
                continue
            if end is None or len(end) != len(start):
                _assign(before, before.dtype, None)
                changed = True
                continue
            axes = [axis for axis in range(len(start)) if start[axis] != end[axis] and (index, axis) not in varying]
            if axes:
                varying.update((index, axis) for axis in axes)
                sizes = [call.engine.fresh(before, a) if a in axes else size for a, size in enumerate(start)]
                _assign(before, before.dtype, tuple(sizes))
                changed = True
        if not changed:
            break
    else:
        for before in inputs:
            _assign(before, before.dtype, None)
        call.engine.infer_subgraph(body)
    return [_type_of(value)[1] for value in inputs]


@of_ops("Loop")
def _loop(call: Call) -> None:
    body = _body(call, "body")
    count = len(call.inputs) - 2
    if len(body.inputs) != count + 2 or len(body.outputs) < count + 1:
        raise Unknown  # no valid Loop, which is for ONNX Runtime to say
    iteration, condition, *carried = body.inputs
    _assign(iteration, "int64", ())
    _assign(condition, "bool", ())
    for index, value in enumerate(carried):
        _assign(value, call.dtype(index + 2), call.shape_or_none(index + 2))
    shapes = _settle(call, body, carried, body.outputs[1 : 1 + count])
    for index in range(count):
        # A size that varies inside is one more unknown size outside (of the last iteration).
        shape, first = shapes[index], call.shape_or_none(index + 2)
        if shape is not None and shape != first:
            shape = _merge(call, index, [shape, first])
        call.set(index, call.dtype(index + 2), shape)
    trips = call.fresh(count, 0) if len(call.outputs) > count else None
    for index, output in enumerate(body.outputs[1 + count :], start=count):
        dtype, shape = _type_of(output)
        inner = _outside(call, index, body, shape)
        call.set(index, dtype, None if inner is None or trips is None else (trips, *inner))


def _outside(call: Call, index: int, body: Graph, shape: Shape | None) -> Shape | None:
    """A shape of the body as seen from outside, where sizes that vary from step to step have no meaning.

    Scan outputs of all steps must have one shape to be stacked, so each such size is one unknown size."""
    if shape is None:
        return None
    inside = {value.name for node in body.nodes for value in node.outputs} | {value.name for value in body.inputs}

    def local(size: object) -> bool:
        return any(name.partition(":")[0].partition("#")[0] in inside for name in getattr(size, "symbols", set)())

    return tuple(call.fresh(index, f"inner{axis}") if local(size) else size for axis, size in enumerate(shape))


@of_ops("Scan")
def _scan(call: Call) -> None:
    if call.opset < 9:
        raise Unknown
    body = _body(call, "body")
    scanned = call.attr("num_scan_inputs")
    states = len(call.inputs) - scanned
    if len(body.inputs) != len(call.inputs) or len(body.outputs) < len(call.outputs):
        raise Unknown
    axes = call.attr("scan_input_axes") or [0] * scanned
    steps = None
    for index, value in enumerate(body.inputs):
        shape = call.shape_or_none(index)
        if index >= states and shape is not None:
            axis = axes[index - states] % len(shape)
            steps = shape[axis] if steps is None else steps
            shape = (*shape[:axis], *shape[axis + 1 :])
        _assign(value, call.dtype(index), shape)
    shapes = _settle(call, body, body.inputs[:states], body.outputs[:states])
    for index in range(states):
        shape, first = shapes[index], call.shape_or_none(index)
        call.set(index, call.dtype(index), shape if shape == first else _merge(call, index, [shape, first]))
    out_axes = call.attr("scan_output_axes") or [0] * (len(call.outputs) - states)
    for index in range(states, len(call.outputs)):
        dtype, shape = _type_of(body.outputs[index])
        inner = _outside(call, index, body, shape)
        if inner is None or steps is None:
            call.set(index, dtype)
            continue
        axis = out_axes[index - states] % (len(inner) + 1)
        call.set(index, dtype, (*inner[:axis], steps, *inner[axis:]))
