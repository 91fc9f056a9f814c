"""Nodes that pass their input on unchanged."""

from __future__ import annotations

from onnxfuse.graph import consts
from onnxfuse.graph.canonicalize.scope import Scope, dtype_of, maker_of, numbers_of, shape_of, static_attr
from onnxfuse.graph.dims import Dim
from onnxfuse.graph.ir import Constant, Node
from onnxfuse.graph.shapes.table import Shape
from onnxfuse.graph.types import onnx_of

#: For each dtype, those that hold all of its values exactly.
_WIDER = {
    "float16": {"float32", "float64"},
    "bfloat16": {"float32", "float64"},
    "float32": {"float64"},
    "int32": {"int64", "float64"},
    "int16": {"int32", "int64", "float32", "float64"},
    "int8": {"int16", "int32", "int64", "float16", "float32", "float64"},
    "uint8": {"int16", "int32", "int64", "uint16", "uint32", "uint64", "float16", "float32", "float64"},
    "uint16": {"int32", "int64", "uint32", "uint64", "float32", "float64"},
    "uint32": {"int64", "uint64", "float64"},
    "bool": {
        "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "bfloat16", "float32",
        "float64",
    },
}  # fmt: skip


def remove_redundant(scope: Scope) -> int:
    """Remove `Identity`, `Dropout` as it is in inference, and sums, maxima and concatenations of one operand."""
    count = 0
    for node in scope.nodes("Identity", "Dropout", "Sum", "Mean", "Max", "Min", "Concat"):
        if node.op == "Dropout":
            passes = _is_inference_dropout(scope, node)
        elif node.op == "Concat":
            # An empty operand adds nothing, if its rank is that of the others.
            passes = _drop_empty_operands(scope, node)
        else:
            passes = len(node.inputs) == 1
        if passes and scope.replace(node.outputs[0], node.inputs[0]):
            count += 1
    return count


def _drop_empty_operands(scope: Scope, node: Node) -> bool:
    if len(node.inputs) > 1 and len({dtype_of(v) for v in node.inputs}) == 1:
        axis = static_attr(node, "axis")
        kept = [v for v in node.inputs if not _is_empty_along(shape_of(v), axis)]
        if 0 < len(kept) < len(node.inputs):
            node.inputs = kept
    return len(node.inputs) == 1


def _is_empty_along(shape: Shape | None, axis: int | None) -> bool:
    if shape is None or axis is None or not -len(shape) <= axis < len(shape):
        return False
    size = shape[axis]
    return not isinstance(size, Dim) and size == 0


def _is_inference_dropout(scope: Scope, node: Node) -> bool:
    if any(mask.outputs or scope.is_output(mask) for mask in node.outputs[1:]):
        return False
    opset = scope.opset
    if opset < 7:
        return bool(static_attr(node, "is_test", 0))
    if opset < 12 or len(node.inputs) < 3 or not node.inputs[2].name:
        return True
    return consts.scalar(node.inputs[2]) is False


def remove_casts(scope: Scope) -> int:
    """Remove casts to the dtype that a value has, and the first of two casts when it loses nothing."""
    count = 0
    for node in scope.nodes("Cast", "CastLike"):
        target = dtype_of(node.outputs[0])
        source = node.inputs[0]
        if target is None:
            continue
        if node.op == "CastLike":
            if not target.startswith("float8") and not static_attr(node, "round_mode"):
                node.op = "Cast"
                node.attrs.clear()
                node.attrs["to"] = onnx_of(target)
                del node.inputs[1]
                count += 1
            else:
                continue
        inner = maker_of(source, "Cast")
        if inner is not None and dtype_of(source) in _WIDER.get(dtype_of(inner.inputs[0]) or "", ()):
            source = inner.inputs[0]
            node.inputs[0] = source
            count += 1
        if dtype_of(source) == target and scope.replace(node.outputs[0], source):
            count += 1
    return count


_SHAPE_OPS = (
    "Reshape", "Expand", "Slice", "Transpose", "Flatten", "Squeeze", "Unsqueeze", "Tile", "Pad", "Split", "Clip",
)  # fmt: skip


def remove_no_op_shapes(scope: Scope) -> int:
    """Remove nodes that move or select elements, yet surely return their input as it is."""
    count = 0
    for node in scope.nodes(*_SHAPE_OPS):
        if _is_no_op(node) and scope.replace(node.outputs[0], node.inputs[0]):
            count += 1
    return count


def _is_no_op(node: Node) -> bool:
    before, after = shape_of(node.inputs[0]), shape_of(node.outputs[0])
    match node.op:
        case "Clip":
            return not any(v.name for v in node.inputs[1:]) and not {"min", "max"} & set(node.attrs)
        case "Split":
            return len(node.outputs) == 1
    if before is None or before != after:
        return False
    match node.op:
        case "Reshape" | "Expand" | "Flatten" | "Squeeze" | "Unsqueeze":
            return True
        case "Transpose":
            perm = static_attr(node, "perm")
            if "perm" in node.attrs and perm is None:
                return False
            order = list(perm) if perm is not None else list(reversed(range(len(before))))
            # Moving axes of size 1 about moves nothing.
            moved = [axis for axis in order if isinstance(before[axis], Dim) or before[axis] != 1]
            return moved == sorted(moved)
        case "Slice":
            return _takes_everything(node)
        case "Tile":
            repeats = numbers_of(node.inputs[1])
            return repeats is not None and all(r == 1 for r in repeats)
        case "Pad":
            pads = node.attrs.get("pads") if len(node.inputs) < 2 else numbers_of(node.inputs[1])
            return pads is not None and all(not isinstance(p, Dim) and p == 0 for p in pads)
    return False


def _takes_everything(node: Node) -> bool:
    """Whether a slice whose result has the input's shape keeps the order: no negative step."""
    if len(node.inputs) < 5 or not node.inputs[4].name:
        return True
    steps = node.inputs[4]
    numbers = numbers_of(steps) if isinstance(steps, Constant) else None
    return numbers is not None and all(not isinstance(s, Dim) and s == 1 for s in numbers)
