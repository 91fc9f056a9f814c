"""Shapes and dtypes of values as matching compares them: known sizes, symbolic sizes, unknown."""

from __future__ import annotations

from typing import Any

from onnxfuse.graph import consts, dims
from onnxfuse.graph.ir import Constant, Value
from onnxfuse.graph.types import name_of

Shape = tuple[Any, ...]


def shape_of(value: Value) -> Shape | None:
    """The shape, or None if the rank is unknown. An unknown dim is None."""
    if isinstance(value, Constant):
        return consts.shape_of(value)
    shape = value.shape
    return tuple(shape) if shape is not None else None


def dtype_of(value: Value) -> str | None:
    if isinstance(value, Constant):
        return consts.dtype_of(value)
    return value.dtype if isinstance(value.dtype, str) else name_of(value.dtype)


def same_dim(a: Any, b: Any) -> bool:
    """Whether two dims are provably equal."""
    return a is not None and b is not None and type(a) is type(b) and a == b


def surely_differ(a: Any, b: Any) -> bool:
    """Whether two dims can be told apart for some size: provably different, as far as is known."""
    if a is None or b is None or isinstance(a, str) or isinstance(b, str):
        return False
    return dims.equal(a, b) is False


def same_shape(a: Shape | None, b: Shape | None) -> bool:
    return a is not None and b is not None and len(a) == len(b) and all(map(same_dim, a, b))


def same_when_added(a: Shape | None, b: Shape | None) -> bool:
    """Whether two shapes are provably equal if values of these shapes can be added at all."""
    return a is not None and b is not None and len(a) == len(b) and all(map(_same_when_added, a, b))


def _same_when_added(a: Any, b: Any) -> bool:
    return same_dim(a, b) or (isinstance(a, dims.Dim) and isinstance(b, dims.Dim) and dims.same_when_added(a, b))


def broadcasts_to(a: Shape | None, b: Shape | None) -> bool:
    """Whether a value of shape `a` broadcasts to shape `b` without changing `b`."""
    if a is None or b is None or len(a) > len(b):
        return False
    return all(x == 1 or same_dim(x, y) or _takes_part(x, y) for x, y in zip(a, b[len(b) - len(a) :], strict=True))


def _takes_part(size: Any, whole: Any) -> bool:
    """Whether `whole` is what `size` and others broadcast to: then it broadcasts to it."""
    known = isinstance(size, (int, dims.Dim)) and isinstance(whole, dims.Dim)
    return known and set(dims.parts_of_broadcast(size)) <= set(dims.parts_of_broadcast(whole))


def is_multiple(dim: Any, factor: int) -> bool | None:
    """Whether a dim is a multiple of `factor`; None if that cannot be told."""
    if isinstance(dim, int):
        return dim % factor == 0
    if isinstance(dim, dims.Dim):
        rest = dims.modulo(dim, factor)
        return rest == 0 if isinstance(rest, int) else None
    return None


def show(shape: Shape | None) -> str:
    return "an unknown shape" if shape is None else "[" + ", ".join("?" if d is None else str(d) for d in shape) + "]"
