"""The symbolic content of small integer tensors: nested tuples of int, bool and Dim, as deep as the rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from onnxfuse.graph import consts, view
from onnxfuse.graph.dims import Dim, SymInt
from onnxfuse.graph.ir import Constant, Value

#: Content is kept for tensors of at most this many elements.
LIMIT = 64

Content = Any  # SymInt | tuple[Content, ...]

_RANGES = {
    "bool": (0, 1),
    **{f"int{bits}": (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": (0, 2**bits - 1) for bits in (8, 16, 32, 64)},
}


def flat(content: Content) -> list[SymInt]:
    """The elements in row-major order."""
    if not isinstance(content, tuple):
        return [content]
    if content and isinstance(content[0], tuple):
        return [item for part in content for item in flat(part)]
    return list(content)


def nest(items: Sequence[SymInt], shape: Sequence[int]) -> Content:
    """The inverse of `flat`."""
    if not shape:
        return items[0]
    if len(shape) == 1:
        return tuple(items)
    step = math.prod(shape[1:])
    return tuple(nest(items[i * step : (i + 1) * step], shape[1:]) for i in range(shape[0]))


def of_array(array: np.ndarray) -> Content:
    return _freeze(array.tolist())


def _freeze(item: Any) -> Content:
    return tuple(map(_freeze, item)) if isinstance(item, list) else item


def of_value(value: Value) -> Content | None:
    """What is known of a value's content; None if nothing, or if it is not a small integer or bool tensor."""
    if not isinstance(value, Constant):
        return value.content
    if value.content is None and "_no_content" not in value.__dict__:
        if consts.dtype_of(value) in _RANGES and consts.size_of(value) <= LIMIT:
            value.content = of_array(consts.array(value))
        else:
            value.__dict__["_no_content"] = True
    return value.content


def fits(content: Content, dtype: str | None) -> bool:
    """Whether the content can be what a tensor of that dtype holds: no constant overflows."""
    limits = _RANGES.get(dtype) if dtype is not None else None
    if limits is None:
        return False
    items = flat(content)
    return len(items) <= LIMIT and all(isinstance(item, Dim) or limits[0] <= item <= limits[1] for item in items)


def is_constant(content: Content) -> bool:
    return not any(isinstance(item, Dim) for item in flat(content))


def as_objects(content: Content, shape: Sequence[int]) -> np.ndarray:
    """The content as an array of Python objects, for NumPy's own indexing."""
    array = np.empty(math.prod(shape), dtype=object)
    array[:] = flat(content)
    return array.reshape(tuple(shape))


def static(shape: Sequence[SymInt] | None) -> tuple[int, ...] | None:
    """The shape if all of its dimensions are constants and the tensor is small enough to have content."""
    if shape is None:
        return None
    sizes = tuple(d for d in shape if not isinstance(d, Dim))
    return sizes if len(sizes) == len(shape) and math.prod(sizes) <= LIMIT else None


def elementwise(
    function: Callable[..., SymInt | None],
    shapes: Sequence[tuple[SymInt, ...]],
    found: Sequence[Content],
    out: tuple[int, ...],
) -> Content | None:
    """Apply a function to broadcast contents; None as soon as it returns None for an element."""
    columns = []
    for shape, content in zip(shapes, found, strict=True):
        items = flat(content)
        if shape == out:
            columns.append(items)
        elif len(items) == 1:
            columns.append(items * math.prod(out))
        else:
            index = np.broadcast_to(
                np.arange(len(items)).reshape([int(d) for d in shape if not isinstance(d, Dim)]), out
            ).ravel()
            columns.append([items[i] for i in index])
    if any(len(column) != math.prod(out) for column in columns):
        return None  # content that contradicts its shape, after a Reshape that cannot run
    results: list[SymInt] = []
    for row in zip(*columns, strict=True):
        result = function(*row)
        if result is None:
            return None
        results.append(result)
    return nest(results, out)


#: Ops whose result holds nothing but elements of their first operand.
_PICKING = ("Unsqueeze", "Squeeze", "Reshape", "Gather", "Slice", "Cast", "Identity")


def tensor_sizes(target: Value) -> frozenset[int]:
    """Which elements of an integer vector are taken out of a `Shape`, whatever their number is."""
    node = view.producer(target)
    if node is not None and node.op == "Concat" and view.domain(node) == "":
        found: set[int] = set()
        start = 0
        for piece in node.inputs:
            shape = consts.shape_of(piece) if isinstance(piece, Constant) else piece.shape
            if shape is None or len(shape) != 1 or not isinstance(shape[0], int):
                break
            if _from_shape(piece):
                found.update(range(start, start + shape[0]))
            start += shape[0]
        return frozenset(found)
    shape = None if isinstance(target, Constant) else target.shape
    whole = shape is not None and len(shape) == 1 and isinstance(shape[0], int) and _from_shape(target)
    return frozenset(range(shape[0])) if whole and shape is not None else frozenset()


def _from_shape(value: Value) -> bool:
    for _ in range(8):
        node = view.producer(value)
        if node is None or view.domain(node) != "":
            return False
        if node.op in ("Shape", "Size"):
            return True
        if node.op not in _PICKING:
            return False
        value = node.inputs[0]
    return False
