"""Ops that repeat, pad, regroup or resample elements."""

from __future__ import annotations

from onnxfuse.graph.shapes import content as contents
from onnxfuse.graph.shapes.table import Call, of_ops


@of_ops("Tile")
def _tile(call: Call) -> None:
    call.set(0, call.dtype(0))
    shape = call.shape(0)
    found = call.content(1)
    if found is None:
        call.set(0, None, tuple(call.fresh(0, axis) for axis in range(len(shape))))
        return
    call.set(0, None, tuple(d * r for d, r in zip(shape, contents.flat(found), strict=True)))


@of_ops("Pad")
def _pad(call: Call) -> None:
    call.set(0, call.dtype(0))
    shape = list(call.shape(0))
    call.set(0, None, tuple(call.fresh(0, axis) for axis in range(len(shape))))
    pads = call.attr("pads") if call.opset >= 2 else call.attr("paddings")
    if pads is None:
        pads = call.numbers(1)
    axes = [call.axis(a, len(shape)) for a in call.constant_numbers(3)] if call.has(3) else list(range(len(shape)))
    for i, axis in enumerate(axes):
        shape[axis] = shape[axis] + pads[i] + pads[i + len(axes)]
    call.set(0, None, shape)


@of_ops("DepthToSpace")
def _depth_to_space(call: Call) -> None:
    call.set(0, call.dtype(0))
    n, c, h, w = call.shape(0)
    block = call.attr("blocksize")
    call.set(0, None, (n, c // (block * block), h * block, w * block))


@of_ops("SpaceToDepth")
def _space_to_depth(call: Call) -> None:
    call.set(0, call.dtype(0))
    n, c, h, w = call.shape(0)
    block = call.attr("blocksize")
    call.set(0, None, (n, c * block * block, h // block, w // block))


@of_ops("Resize", "Upsample")
def _resize(call: Call) -> None:
    call.set(0, call.dtype(0))
    rank = call.rank(0)
    call.set(0, None, tuple(call.fresh(0, axis) for axis in range(rank)))
    if call.has(3) and call.attr("axes") is None and call.attr("keep_aspect_ratio_policy", "stretch") == "stretch":
        sizes = call.numbers(3)
        if len(sizes) == rank:
            call.set(0, None, sizes)
