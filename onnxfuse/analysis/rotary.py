"""What a rotary embedding is spelled with: rotated halves, interleaved pairs, tables whose halves are equal.

Each question is answered for the elements of a pair at a free place j, so it does not matter whether halves were made
by Slice, Split, Gather or by reshaping. The size of the last axis must be known.
"""

from __future__ import annotations

from onnxfuse.analysis.elements import Elements
from onnxfuse.analysis.expr import Expr, Op
from onnxfuse.analysis.poly import Index, Poly
from onnxfuse.analysis.sizes import Sized, UnknownSizeError
from onnxfuse.graph import consts
from onnxfuse.graph.ir import Constant, Value

_LARGEST_HEAD = 1024


def rotation(x: Value, rotated: Value, elements: Elements, *, backwards: bool = False) -> int | None:
    """0 when `rotated` is [-x₂, x₁] of the halves of x, 1 when it is -x₁, x₀, -x₃, x₂, … (pairs), else None.

    `backwards`: the same with all signs changed, which turns by the negative angle.
    """
    size = _last_size(x, elements)
    if size is None or size % 2 or size != _last_size(rotated, elements):
        return None
    for interleaved in (0, 1):
        first, second = _partners(size, interleaved)
        if backwards:
            first, second = second, first
        if _element(rotated, first, elements) != _negative(_element(x, second, elements)):
            continue
        if _element(rotated, second, elements) == _element(x, first, elements):
            return interleaved
    return None


def rolled(x: Value, swapped: Value, signs: Value, elements: Elements) -> int | None:
    """As `rotation`, for halves (or pairs) that have changed places without a sign; a constant vector of the last axis
    holds -1 for the first of two and 1 for the second."""
    size = _last_size(x, elements)
    if size is None or size % 2 or size != _last_size(swapped, elements) or not isinstance(signs, Constant):
        return None
    numbers = consts.array(signs).reshape(-1)
    if numbers.size != size:
        return None
    for interleaved in (0, 1):
        pairs = numbers.reshape(-1, 2).T if interleaved else numbers.reshape(2, -1)
        first, second = _partners(size, interleaved)
        if not ((pairs[0] == -1).all() and (pairs[1] == 1).all()):
            continue
        if _element(swapped, first, elements) != _element(x, second, elements):
            continue
        if _element(swapped, second, elements) == _element(x, first, elements):
            return interleaved
    return None


def repeated(table: Value, interleaved: int, elements: Elements) -> bool:
    """Whether the two elements of each pair that is rotated together share one number of the table."""
    size = _last_size(table, elements)
    if size is None or size % 2:
        return False
    first, second = _partners(size, interleaved)
    if _element(table, first, elements) == _element(table, second, elements):
        return True
    # The numbers of a constant are only seen one by one.
    shift = second - first
    firsts = (Poly.of(i) for i in (range(0, size, 2) if interleaved else range(size // 2)))
    return all(_element(table, i, elements) == _element(table, i + shift, elements) for i in firsts)


def every_second(x: Value, even: Value, odd: Value, elements: Elements) -> bool:
    """Whether `even` and `odd` are the even and the odd elements of the last axis of x."""
    size = _last_size(x, elements)
    if size is None or size % 2 or any(_last_size(part, elements) != size // 2 for part in (even, odd)):
        return False
    first, second = _partners(size, interleaved=1)
    place = Poly.of(Index("j", Poly.of(size // 2)))
    return all(
        _element(part, place, elements) == _element(x, where, elements)
        for part, where in ((even, first), (odd, second))
    )


def parts(x: Value, first: Value, rest: Value, elements: Elements) -> int | None:
    """The size of `first`, if [first, rest] is x cut in two along the last axis."""
    size, cut, left = (_last_size(v, elements) for v in (x, first, rest))
    if size is None or cut is None or left is None or cut + left != size:
        return None
    for part, length, shift in ((first, cut, 0), (rest, left, cut)):
        place = Poly.of(Index("j", Poly.of(length)))
        if _element(part, place, elements) != _element(x, place + shift, elements):
            return None
    return cut


def _partners(size: int, interleaved: int) -> tuple[Poly, Poly]:
    """The places of the two elements of pair j along the last axis."""
    place = Poly.of(Index("j", Poly.of(size // 2)))
    return (place * 2, place * 2 + 1) if interleaved else (place, place + size // 2)


def _negative(e: Expr) -> Expr:
    return Op("Neg", (e,))


def _last_size(value: Value, elements: Elements) -> int | None:
    try:
        sizes = elements.sizes.of(value)
    except UnknownSizeError:
        return None
    last = sizes[-1].constant if sizes else None
    return last if last is not None and 0 < last <= _LARGEST_HEAD else None


def _element(value: Value, last: Poly, elements: Elements) -> Expr:
    """The element at a free position of the leading axes and at `last` of the last one."""
    sizes: Sized = elements.sizes.of(value)
    lead = tuple(
        Poly.of(0) if size == 1 else Poly.of(Index(f"i{len(sizes) - axis}", size))
        for axis, size in enumerate(sizes[:-1])
    )
    return elements.at(value, (*lead, last))
