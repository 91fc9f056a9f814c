"""Polynomials with integer coefficients over atoms, their bounds, and division."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from typing import Any

#: No bound.
INFINITY = math.inf


class Atom:
    """An indivisible factor: `kind` says how its value follows from `args`; `low` and `high` bound it."""

    __slots__ = ("_hash", "args", "high", "key", "kind", "low")

    def __init__(self, kind: str, args: tuple[Any, ...], low: float, high: float, key: str) -> None:
        self.kind = kind
        self.args = args
        self.low = low
        self.high = high
        self.key = key
        self._hash = hash((kind, args))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, Atom) and self.kind == other.kind and self.args == other.args

    def __lt__(self, other: Atom) -> bool:
        return self.key < other.key

    def __repr__(self) -> str:
        return self.key


#: A product of atoms, sorted; a power repeats its atom. The empty product is the constant term.
Monomial = tuple[Atom, ...]


def _order(monomial: Monomial) -> tuple[int, tuple[str, ...]]:
    """A monomial order (graded, then lexicographic): sorting by it is stable under multiplication."""
    return (-len(monomial), tuple(atom.key for atom in monomial))


class Dim:
    """An immutable symbolic integer that is not a constant. Made by `symbol` and by arithmetic; `+ - * // %` follow
    Python (floor) semantics and give an ``int`` when the result is one."""

    __slots__ = ("_hash", "terms")

    def __init__(self, terms: tuple[tuple[Monomial, int], ...]) -> None:
        self.terms = terms
        self._hash = hash(terms)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, Dim) and self._hash == other._hash and self.terms == other.terms

    def __add__(self, other: SymInt) -> SymInt:
        return _sum(self, other, 1)

    __radd__ = __add__

    def __sub__(self, other: SymInt) -> SymInt:
        return _sum(self, other, -1)

    def __rsub__(self, other: SymInt) -> SymInt:
        return _sum(-self, other, 1)

    def __neg__(self) -> Dim:
        return Dim(tuple((monomial, -factor) for monomial, factor in self.terms))

    def __mul__(self, other: SymInt) -> SymInt:
        if not isinstance(other, (int, Dim)):
            return NotImplemented
        if isinstance(other, int):
            if other == 1:
                return self
            return Dim(tuple((m, f * other) for m, f in self.terms)) if other else 0
        found: dict[Monomial, int] = {}
        for left, left_factor in self.terms:
            for right, right_factor in other.terms:
                monomial = tuple(sorted(left + right)) if left and right else left + right
                found[monomial] = found.get(monomial, 0) + left_factor * right_factor
        return _from_terms(found)

    __rmul__ = __mul__

    def __floordiv__(self, other: SymInt) -> SymInt:
        return floor_divide(self, other)

    def __rfloordiv__(self, other: int) -> SymInt:
        return floor_divide(other, self)

    def __mod__(self, other: SymInt) -> SymInt:
        return modulo(self, other)

    def __rmod__(self, other: int) -> SymInt:
        return modulo(other, self)

    def __bool__(self) -> bool:
        raise TypeError("a symbolic size has no truth value; use `equal`, `is_positive` or `bounds`")

    def __repr__(self) -> str:
        parts: list[tuple[str, str]] = []
        for monomial, factor in self.terms:
            factors = [atom.key for atom in monomial]
            if not factors or factor not in (1, -1):
                factors.insert(0, str(abs(factor)))
            parts.append(("-" if factor < 0 else "+", "*".join(factors)))
        text = "".join(f" {sign} {part}" for sign, part in parts)
        return text[3:] if text.startswith(" + ") else "-" + text[3:]

    def is_symbol(self) -> bool:
        """Whether this is one named size, nothing more."""
        return len(self.terms) == 1 and self.terms[0][1] == 1 and _symbol_of(self.terms[0][0]) is not None

    def symbols(self) -> set[str]:
        """The names that the value depends on."""
        names: set[str] = set()
        for monomial, _ in self.terms:
            for atom in monomial:
                _collect(atom, names)
        return names


SymInt = int | Dim


def _symbol_of(monomial: Monomial) -> Atom | None:
    return monomial[0] if len(monomial) == 1 and monomial[0].kind == "symbol" else None


def _collect(atom: Atom, names: set[str]) -> None:
    if atom.kind == "symbol":
        names.add(atom.args[0])
        return
    for arg in atom.args:
        if isinstance(arg, Dim):
            names |= arg.symbols()


def _from_terms(found: dict[Monomial, int]) -> SymInt:
    kept = [(m, f) for m, f in found.items() if f]
    if not kept:
        return 0
    if len(kept) == 1:
        return kept[0][1] if not kept[0][0] else Dim((kept[0],))
    kept.sort(key=lambda term: _order(term[0]))
    return Dim(tuple(kept))


def _sum(left: Dim, right: SymInt, sign: int) -> SymInt:
    if isinstance(right, int):
        if right == 0:
            return left
        if left.terms[-1][0]:  # the constant term is always last
            return Dim((*left.terms, ((), sign * right)))
        constant = left.terms[-1][1] + sign * right
        return Dim((*left.terms[:-1], ((), constant))) if constant else Dim(left.terms[:-1])
    if not isinstance(right, Dim):
        return NotImplemented
    found = dict(left.terms)
    for monomial, factor in right.terms:
        found[monomial] = found.get(monomial, 0) + sign * factor
    return _from_terms(found)


def make_atom(kind: str, args: tuple[Any, ...], low: float, high: float, key: str) -> Dim:
    if len(key) > 400 and kind != "symbol":
        # Nested expressions would grow their texts without bound.
        key = f"{kind}({hashlib.blake2s(key.encode(), digest_size=8).hexdigest()})"
    return Dim((((Atom(kind, args, low, high, key),), 1),))


def symbol(name: str, low: float = 0) -> Dim:
    """A named size: any integer ≥ `low`. The same name must always be given the same `low`."""
    return make_atom("symbol", (name, low), low, INFINITY, name)


def unknown_integer(name: str) -> Dim:
    """A named integer of any sign: an element of a tensor whose content is not known."""
    return symbol(name, -INFINITY)


def bounds(value: SymInt) -> tuple[float, float]:
    """An interval that the value surely lies in."""
    if not isinstance(value, Dim):
        return value, value
    low: float = 0
    high: float = 0
    for monomial, factor in value.terms:
        least: float = 1
        most: float = 1
        for atom in monomial:
            corners = [_times(a, b) for a in (least, most) for b in (atom.low, atom.high)]
            least, most = min(corners), max(corners)
        if len(monomial) > 1 and least < 0 and len(set(monomial)) * 2 == len(monomial):
            least = 0 if _is_square(monomial) else least
        if factor < 0:
            least, most = most, least
        low += _times(least, factor)
        high += _times(most, factor)
    return low, high


def _times(a: float, b: float) -> float:
    return 0 if a == 0 or b == 0 else a * b


def _is_square(monomial: Monomial) -> bool:
    return all(monomial.count(atom) % 2 == 0 for atom in monomial)


def is_nonnegative(value: SymInt) -> bool:
    return bounds(value)[0] >= 0


def is_positive(value: SymInt) -> bool:
    return bounds(value)[0] >= 1


def product(values: Iterable[SymInt]) -> SymInt:
    result: SymInt = 1
    for value in values:
        result = result * value
    return result


def divide_exactly(value: SymInt, divisor: SymInt) -> SymInt | None:
    """The q with value = q · divisor as polynomials (so for every size that is not a zero divisor), or None."""
    if not isinstance(divisor, Dim):
        if divisor == 0:
            return None
        if not isinstance(value, Dim):
            return value // divisor if value % divisor == 0 else None
        if any(factor % divisor for _, factor in value.terms):
            return None
        return _from_terms({m: f // divisor for m, f in value.terms})
    if not isinstance(value, Dim):
        return 0 if value == 0 else None
    if value == divisor:
        return 1
    leading, leading_factor = divisor.terms[0]
    quotient: SymInt = 0
    rest: SymInt = value
    for _ in range(64):
        if not isinstance(rest, Dim):
            return quotient if rest == 0 else None
        monomial, factor = rest.terms[0]
        remaining = _without(monomial, leading)
        if remaining is None or factor % leading_factor:
            return None
        step = _from_terms({remaining: factor // leading_factor})
        quotient = quotient + step
        rest = rest - step * divisor
    return None


def _without(monomial: Monomial, factor: Monomial) -> Monomial | None:
    left = list(monomial)
    for atom in factor:
        if atom not in left:
            return None
        left.remove(atom)
    return tuple(left)


def _split_multiples(value: Dim, divisor: int) -> tuple[SymInt, SymInt]:
    """(q, r) with value = divisor · q + r, where every coefficient of r lies in [0, divisor)."""
    quotient = _from_terms({m: f // divisor for m, f in value.terms})
    return quotient, value - quotient * divisor


def _floor_plus_constant(value: SymInt) -> tuple[SymInt, int, int] | None:
    """(x, a, c) of a value x // a + c with constant a > 0 and c."""
    if not isinstance(value, Dim):
        return None
    terms = dict(value.terms)
    plus = terms.pop((), 0)
    if len(terms) != 1:
        return None
    ((monomial, factor),) = terms.items()
    if factor != 1 or len(monomial) != 1 or monomial[0].kind != "floordiv":
        return None
    dividend, by = monomial[0].args
    return (dividend, by, plus) if isinstance(by, int) and by > 0 else None


def floor_divide(value: SymInt, divisor: SymInt) -> SymInt:
    """Floor division. The result assumes that the divisor is not zero (or else there is no result)."""
    exact = divide_exactly(value, divisor)
    if exact is not None:
        return exact
    if not isinstance(value, Dim) and not isinstance(divisor, Dim) and divisor != 0:
        return value // divisor
    outside: SymInt = 0
    if isinstance(value, Dim) and not isinstance(divisor, Dim) and divisor > 0:
        outside, value = _split_multiples(value, divisor)
        low, high = bounds(value)
        if low >= 0 and high < divisor:
            return outside
        inner = _floor_plus_constant(value)
        if inner is not None:  # (x // a + c) // b is (x + a·c) // (a·b), as the sizes of stacked convolutions are
            dividend, by, plus = inner
            return outside + floor_divide(dividend + plus * by, by * divisor)
    low, high = (0, INFINITY) if is_nonnegative(value) and bounds(divisor)[0] >= 0 else (-INFINITY, INFINITY)
    return outside + make_atom("floordiv", (value, divisor), low, high, f"({value})//({divisor})")


def truncate_divide(value: SymInt, divisor: SymInt) -> SymInt:
    """Integer division as ONNX `Div` does it: towards zero."""
    exact = divide_exactly(value, divisor)
    if exact is not None:
        return exact
    if is_nonnegative(value) and is_nonnegative(divisor):
        return floor_divide(value, divisor)
    if not isinstance(value, Dim) and not isinstance(divisor, Dim) and divisor != 0:
        return int(math.copysign(1, value) * math.copysign(1, divisor)) * (abs(value) // abs(divisor))
    return make_atom("truncdiv", (value, divisor), -INFINITY, INFINITY, f"trunc(({value})/({divisor}))")


def modulo(value: SymInt, divisor: SymInt) -> SymInt:
    """The remainder with the divisor's sign, as Python and ONNX `Mod` define it."""
    if not isinstance(divisor, Dim) and divisor != 0:
        if not isinstance(value, Dim):
            return value % divisor
        if divisor > 0:
            value = _split_multiples(value, divisor)[1]
            low, high = bounds(value)
            if low >= 0 and high < divisor:
                return value
            return make_atom("mod", (value, divisor), 0, divisor - 1, f"({value})%({divisor})")
    elif divide_exactly(value, divisor) is not None:
        return 0
    low, high = (0, INFINITY) if is_nonnegative(divisor) else (-INFINITY, INFINITY)
    return make_atom("mod", (value, divisor), low, high, f"({value})%({divisor})")
