"""Which element of the tensor before a Reshape an element of the result is."""

from __future__ import annotations

from onnxfuse.analysis.poly import Poly

Position = tuple[Poly, ...]


class NotProvedError(Exception):
    """The element cannot be followed further; it is then an opaque one."""


def reshaped(inner: Position, outer: Position, index: Position) -> Position:
    """The index into the tensor before a Reshape. Raises NotProvedError unless the sizes can be paired up."""
    result: list[Poly] = []
    i = o = 0
    while i < len(inner) or o < len(outer):
        i_end, o_end = i, o
        left, right = Poly.of(1), Poly.of(1)
        # The shortest runs of axes that hold the same number of elements.
        while True:
            if (i_end > i or o_end > o) and left == right:
                break
            if i_end < len(inner) and (left == 1 or right.divide(left) is not None) and left != right:
                left = left * inner[i_end]
                i_end += 1
            elif o_end < len(outer):
                right = right * outer[o_end]
                o_end += 1
            elif i_end < len(inner):
                left = left * inner[i_end]
                i_end += 1
            else:
                raise NotProvedError
        flat = Poly.of(0)
        for axis in range(o, o_end):
            flat = flat * outer[axis] + index[axis]
        parts: list[Poly] = []
        for axis in range(i_end - 1, i, -1):
            flat, remainder = quotient_and_rest(flat, inner[axis])
            parts.append(remainder)
        if i_end > i:
            parts.append(flat)
        result.extend(reversed(parts))
        i, o = i_end, o_end
    return tuple(result)


def quotient_and_rest(number: Poly, size: Poly) -> tuple[Poly, Poly]:
    """number // size and number % size. Raises NotProvedError unless the second is provably one."""
    if size == 1:
        return number, Poly.of(0)
    quotient, remainder = Poly.of(0), Poly.of(0)
    for monomial, coefficient in number.terms.items():
        if not monomial and size.constant:
            quotient, remainder = quotient + coefficient // size.constant, remainder + coefficient % size.constant
            continue
        term = Poly({monomial: coefficient})
        whole = term.divide(size)
        if whole is None:
            remainder = remainder + term
        else:
            quotient = quotient + whole
    if len(size.terms) > 1 and not quotient.terms:
        quotient, remainder = _divide_by_sum(number, size)
    if remainder.never_negative() and (size - 1 - remainder).never_negative():
        return quotient, remainder
    raise NotProvedError


def _divide_by_sum(number: Poly, size: Poly) -> tuple[Poly, Poly]:
    """Split a·(x + y) + r, written out, for a size that is itself a sum."""
    lead = max(size.terms, key=len)
    quotient = Poly.of(0)
    for monomial, coefficient in number.terms.items():
        part = Poly({monomial: coefficient}).divide(Poly({lead: size.terms[lead]})) if lead else None
        if part is not None:
            quotient = quotient + part
    return quotient, number - quotient * size
