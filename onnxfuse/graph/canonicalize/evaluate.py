"""The value of a node whose inputs are known, with ONNX's semantics (NumPy functions on the stored dtypes)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs

from onnxfuse.graph import consts
from onnxfuse.graph.ir import Constant, Value
from onnxfuse.graph.types import name_of, numpy_of

#: Operands; an omitted one is None. Functions may fail on it, which counts as "cannot be told".
Arrays = list[Any]
Attrs = Mapping[str, Any]
Function = Callable[[Arrays, Attrs, int], Any]


def evaluate(op: str, inputs: Sequence[Value], attrs: Mapping[str, Any], opset: int) -> np.ndarray | None:
    """The only output of a node of ONNX's domain; None if it cannot be told here (an unusual form, overflow, a division
    by zero)."""
    function = FUNCTIONS.get(op)
    if function is None or any(isinstance(a, gs.Node.AttributeRef) for a in attrs.values()):
        return None
    arrays = [consts.array(v) if isinstance(v, Constant) else None for v in inputs]
    if any(a is not None and a.dtype == object for a in arrays):
        return None
    try:
        with np.errstate(all="ignore"):
            result = function(arrays, attrs, opset)
    except (ValueError, IndexError, TypeError, KeyError, ZeroDivisionError):
        return None
    return None if result is None else np.ascontiguousarray(result).reshape(np.shape(result))


def _binary(function: Callable[[Any, Any], Any]) -> Function:
    def apply(arrays: Arrays, attrs: Attrs, opset: int) -> np.ndarray | None:
        if len(arrays) != 2 or arrays[0].dtype != arrays[1].dtype:
            return None
        return np.asarray(function(arrays[0], arrays[1])).astype(arrays[0].dtype, copy=False)

    return apply


def _comparison(function: Callable[..., Any]) -> Function:
    def apply(arrays: Arrays, attrs: Attrs, opset: int) -> np.ndarray | None:
        return np.asarray(function(*arrays)).astype(bool)

    return apply


def _unary(function: Callable[[Any], Any]) -> Function:
    def apply(arrays: Arrays, attrs: Attrs, opset: int) -> np.ndarray | None:
        return np.asarray(function(arrays[0])).astype(arrays[0].dtype, copy=False)

    return apply


def _divide(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    if left.dtype.kind not in "iu":
        return left / right
    if np.any(right == 0):
        raise ZeroDivisionError
    quotient = np.abs(left) // np.abs(right)
    return np.where((left < 0) == (right < 0), quotient, -quotient)


def _power(arrays: Arrays, attrs: Attrs, opset: int) -> np.ndarray | None:
    base, exponent = arrays
    if base.dtype.kind in "iu" and (exponent.dtype.kind not in "iu" or np.any(exponent < 0)):
        return None
    return np.asarray(np.power(base, exponent.astype(base.dtype))).astype(base.dtype, copy=False)


def _modulo(arrays: Arrays, attrs: Attrs, opset: int) -> np.ndarray | None:
    left, right = arrays
    if left.dtype.kind in "iu" and np.any(right == 0):
        return None
    return np.fmod(left, right) if attrs.get("fmod", 0) else np.mod(left, right)


def _cast(arrays: Arrays, attrs: Attrs, opset: int) -> np.ndarray | None:
    source = arrays[0]
    target = name_of(attrs["to"])
    if target is None or target == "string" or target.startswith(("float8", "int4", "uint4")):
        return None
    dtype = numpy_of(target)
    if source.dtype.kind not in "iub" and dtype.kind in "iu":
        # What an out-of-range float becomes is not defined.
        wide = source.astype(np.float64)
        limits = np.iinfo(dtype)
        if not np.all(np.isfinite(wide)) or np.any(wide < limits.min) or np.any(wide > limits.max):
            return None
    return source.astype(dtype)


def _axes(arrays: Arrays, attrs: Attrs, index: int = 1) -> tuple[int, ...] | None:
    if "axes" in attrs:
        return tuple(attrs["axes"])
    if len(arrays) > index and arrays[index] is not None:
        return tuple(int(a) for a in arrays[index].reshape(-1))
    return None


def _reshape(arrays: Arrays, attrs: Attrs, opset: int) -> np.ndarray | None:
    target = attrs["shape"] if opset < 5 else arrays[1].tolist()
    if not attrs.get("allowzero", 0):
        target = [arrays[0].shape[axis] if size == 0 else size for axis, size in enumerate(target)]
    return arrays[0].reshape(target)


def _slice(arrays: Arrays, attrs: Attrs, opset: int) -> np.ndarray | None:
    data = arrays[0]
    if opset < 10:
        starts, ends, axes, steps = attrs["starts"], attrs["ends"], attrs.get("axes"), None
    else:
        starts, ends, axes, steps = (a.tolist() if a is not None else None for a in (arrays[1:] + [None] * 2)[:4])
    axes = axes if axes is not None else range(len(starts))
    steps = steps if steps is not None else [1] * len(starts)
    index = [slice(None)] * data.ndim
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        stop = None if step < 0 and end <= -(2**31 - 1) else end
        index[axis] = slice(start, stop, step)
    return data[tuple(index)]


def _gather(arrays: Arrays, attrs: Attrs, opset: int) -> np.ndarray | None:
    return np.take(arrays[0], arrays[1], axis=attrs.get("axis", 0))


def _concat(arrays: Arrays, attrs: Attrs, opset: int) -> np.ndarray | None:
    return np.concatenate(arrays, axis=attrs["axis"])


def _squeeze(arrays: Arrays, attrs: Attrs, opset: int) -> np.ndarray | None:
    return np.squeeze(arrays[0], axis=_axes(arrays, attrs))


def _unsqueeze(arrays: Arrays, attrs: Attrs, opset: int) -> np.ndarray | None:
    return np.expand_dims(arrays[0], _axes(arrays, attrs) or ())


def _transpose(arrays: Arrays, attrs: Attrs, opset: int) -> np.ndarray | None:
    return np.transpose(arrays[0], attrs.get("perm"))


def _constant_of_shape(arrays: Arrays, attrs: Attrs, opset: int) -> np.ndarray | None:
    fill = attrs.get("value")
    array: Any = np.zeros(1, dtype=np.float32) if fill is None else consts.of_attribute(fill)[2]
    return np.full(arrays[0].tolist(), array.reshape(-1)[0], dtype=array.dtype)


def _range(arrays: Arrays, attrs: Attrs, opset: int) -> np.ndarray | None:
    start, limit, step = (a.reshape(-1)[0] for a in arrays)
    length = max(int(np.ceil((float(limit) - float(start)) / float(step))), 0)
    return (start + np.arange(length) * step).astype(arrays[0].dtype)


def _reduce(function: Callable[..., Any]) -> Function:
    def apply(arrays: Arrays, attrs: Attrs, opset: int) -> np.ndarray | None:
        axes = _axes(arrays, attrs)
        if not axes and attrs.get("noop_with_empty_axes", 0):
            return arrays[0]
        result = function(arrays[0], axis=axes or None, keepdims=bool(attrs.get("keepdims", 1)))
        return np.asarray(result).astype(arrays[0].dtype)

    return apply


def _trilu(arrays: Arrays, attrs: Attrs, opset: int) -> np.ndarray | None:
    diagonal = int(arrays[1].reshape(-1)[0]) if len(arrays) > 1 and arrays[1] is not None else 0
    return (np.triu if attrs.get("upper", 1) else np.tril)(arrays[0], diagonal)


def _variadic(function: Callable[[Any, Any], Any]) -> Function:
    def apply(arrays: Arrays, attrs: Attrs, opset: int) -> np.ndarray | None:
        result = arrays[0]
        for array in arrays[1:]:
            result = function(result, array)
        return np.asarray(result).astype(arrays[0].dtype, copy=False)

    return apply


def _expand(arrays: Arrays, attrs: Attrs, opset: int) -> np.ndarray | None:
    return np.broadcast_to(arrays[0], np.broadcast_shapes(arrays[0].shape, tuple(arrays[1].tolist())))


FUNCTIONS: dict[str, Function] = {
    "Add": _binary(np.add),
    "Sub": _binary(np.subtract),
    "Mul": _binary(np.multiply),
    "Div": _binary(_divide),
    "Mod": _modulo,
    "Pow": _power,
    "Max": _variadic(np.maximum),
    "Min": _variadic(np.minimum),
    "Equal": _comparison(np.equal),
    "Less": _comparison(np.less),
    "Greater": _comparison(np.greater),
    "LessOrEqual": _comparison(np.less_equal),
    "GreaterOrEqual": _comparison(np.greater_equal),
    "And": _comparison(np.logical_and),
    "Or": _comparison(np.logical_or),
    "Xor": _comparison(np.logical_xor),
    "Not": _comparison(np.logical_not),
    "IsNaN": _comparison(np.isnan),
    "Neg": _unary(np.negative),
    "Abs": _unary(np.abs),
    "Sqrt": _unary(np.sqrt),
    "Reciprocal": _unary(lambda x: np.ones((), x.dtype) / x),
    "Exp": _unary(np.exp),
    "Log": _unary(np.log),
    "Floor": _unary(np.floor),
    "Ceil": _unary(np.ceil),
    "Round": _unary(np.rint),
    "Sign": _unary(np.sign),
    "Sin": _unary(np.sin),
    "Cos": _unary(np.cos),
    "Tanh": _unary(np.tanh),
    "Cast": _cast,
    "Where": lambda arrays, attrs, opset: np.where(*arrays),
    "Reshape": _reshape,
    "Squeeze": _squeeze,
    "Unsqueeze": _unsqueeze,
    "Transpose": _transpose,
    "Slice": _slice,
    "Gather": _gather,
    "Concat": _concat,
    "ConstantOfShape": _constant_of_shape,
    "Expand": _expand,
    "Tile": lambda arrays, attrs, opset: np.tile(arrays[0], arrays[1].tolist()),
    "Range": _range,
    "Trilu": _trilu,
    "Shape": lambda arrays, attrs, opset: np.array(
        arrays[0].shape[attrs.get("start", 0) : attrs.get("end")], dtype=np.int64
    ),
    "Size": lambda arrays, attrs, opset: np.array(arrays[0].size, dtype=np.int64),
    "ReduceMean": _reduce(np.mean),
    "ReduceSum": _reduce(np.sum),
    "ReduceProd": _reduce(np.prod),
    "ReduceMax": _reduce(np.max),
    "ReduceMin": _reduce(np.min),
}
