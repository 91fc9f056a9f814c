"""What a rotary embedding is spelled with: rotated halves, interleaved pairs, tables whose halves are equal.

Each question is answered element by element along the last axis (whose size must be known), so it does not matter
whether halves were made by Slice, Split, Gather or by reshaping.
"""

from __future__ import annotations

from onnxfuse.analysis.elements import Elements
from onnxfuse.analysis.expr import Expr, Op
from onnxfuse.analysis.poly import Index, Poly
from onnxfuse.analysis.sizes import Sized, UnknownSizeError
from onnxfuse.graph.ir import Value

_LARGEST_HEAD = 1024


def rotation(x: Value, rotated: Value, elements: Elements) -> int | None:
    """0 when `rotated` is [-x₂, x₁] of the halves of x, 1 when it is -x₁, x₀, -x₃, x₂, … (pairs), else None."""
    size = _last_size(x, elements)
    if size is None or size % 2 or size != _last_size(rotated, elements):
        return None
    for interleaved in (0, 1):
        if all(_is_partner(x, rotated, i, size, interleaved, elements) for i in range(size)):
            return interleaved
    return None


def _is_partner(x: Value, rotated: Value, i: int, size: int, interleaved: int, elements: Elements) -> bool:
    half = size // 2
    if interleaved:
        partner, negative = i ^ 1, i % 2 == 0
    else:
        partner, negative = (i + half) % size, i < half
    found, wanted = _element(rotated, i, elements), _element(x, partner, elements)
    return found == (Op("Neg", (wanted,)) if negative else wanted)


def repeated(table: Value, interleaved: int, elements: Elements) -> bool:
    """Whether the two elements of each pair that is rotated together share one number of the table."""
    size = _last_size(table, elements)
    if size is None or size % 2:
        return False
    step = 1 if interleaved else size // 2
    firsts = range(0, size, 2) if interleaved else range(size // 2)
    return all(_element(table, i, elements) == _element(table, i + step, elements) for i in firsts)


def every_second(x: Value, first: Value, second: Value, elements: Elements) -> bool:
    """Whether `first` and `second` are the even and the odd elements of the last axis of x."""
    size = _last_size(x, elements)
    if size is None or size % 2:
        return False
    for part, shift in ((first, 0), (second, 1)):
        if _last_size(part, elements) != size // 2:
            return False
        if any(_element(part, i, elements) != _element(x, 2 * i + shift, elements) for i in range(size // 2)):
            return False
    return True


def parts(x: Value, first: Value, rest: Value, elements: Elements) -> int | None:
    """The size of `first`, if [first, rest] is x cut in two along the last axis."""
    size, cut, left = (_last_size(v, elements) for v in (x, first, rest))
    if size is None or cut is None or left is None or cut + left != size:
        return None
    same = all(_element(first, i, elements) == _element(x, i, elements) for i in range(cut))
    same = same and all(_element(rest, i, elements) == _element(x, cut + i, elements) for i in range(left))
    return cut if same else None


def _last_size(value: Value, elements: Elements) -> int | None:
    try:
        sizes = elements.sizes.of(value)
    except UnknownSizeError:
        return None
    last = sizes[-1].constant if sizes else None
    return last if last is not None and 0 < last <= _LARGEST_HEAD else None


def _element(value: Value, last: int, elements: Elements) -> Expr:
    """The element at a free position of the leading axes and at `last` of the last one."""
    sizes: Sized = elements.sizes.of(value)
    lead = tuple(
        Poly.of(0) if size == 1 else Poly.of(Index(f"i{len(sizes) - axis}", size))
        for axis, size in enumerate(sizes[:-1])
    )
    return elements.at(value, (*lead, Poly.of(last)))
