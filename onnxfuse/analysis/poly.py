"""Integer polynomials over named sizes and index variables, and what can be proved about their sign."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Index:
    """An index variable: runs from 0 to `size` - 1."""

    name: str
    size: Poly = field(compare=False, repr=False, hash=False)

    def __str__(self) -> str:
        return self.name


Atom = str | Index
"""A named size (never negative) or an index variable."""


def _key(atom: Atom) -> tuple[int, str]:
    return (1, atom.name) if isinstance(atom, Index) else (0, atom)


class Poly:
    """An immutable polynomial with integer coefficients. `terms` maps a sorted tuple of atoms to its coefficient."""

    __slots__ = ("_hash", "terms")

    def __init__(self, terms: Mapping[tuple[Atom, ...], int]) -> None:
        self.terms = {m: c for m, c in terms.items() if c}
        self._hash: int | None = None

    # Construction ---------------------------------------------------------------------------------------------------

    @staticmethod
    def of(value: Poly | int | Atom) -> Poly:
        if isinstance(value, Poly):
            return value
        known = _SMALL.get(value) if isinstance(value, int) else None
        return known or Poly({(): value} if isinstance(value, int) else {(value,): 1})

    # Arithmetic -----------------------------------------------------------------------------------------------------

    def __add__(self, other: Poly | int) -> Poly:
        terms = dict(self.terms)
        for monomial, coefficient in Poly.of(other).terms.items():
            terms[monomial] = terms.get(monomial, 0) + coefficient
        return Poly(terms)

    def __neg__(self) -> Poly:
        return Poly({m: -c for m, c in self.terms.items()})

    def __sub__(self, other: Poly | int) -> Poly:
        return self + (-Poly.of(other))

    def __mul__(self, other: Poly | int) -> Poly:
        terms: dict[tuple[Atom, ...], int] = {}
        for m1, c1 in self.terms.items():
            for m2, c2 in Poly.of(other).terms.items():
                monomial = tuple(sorted(m1 + m2, key=_key))
                terms[monomial] = terms.get(monomial, 0) + c1 * c2
        return Poly(terms)

    __radd__ = __add__
    __rmul__ = __mul__

    def __rsub__(self, other: int) -> Poly:
        return -self + other

    def __eq__(self, other: object) -> bool:
        if isinstance(other, int):
            return self.constant == other
        return isinstance(other, Poly) and self.terms == other.terms

    def __hash__(self) -> int:
        if self._hash is None:
            self._hash = hash(frozenset(self.terms.items()))
        return self._hash

    def __repr__(self) -> str:
        if not self.terms:
            return "0"
        parts = []
        for monomial, c in sorted(self.terms.items(), key=lambda t: [_key(a) for a in t[0]], reverse=True):
            name = "*".join(str(a) for a in monomial)
            parts.append(str(c) if not name else name if c == 1 else f"-{name}" if c == -1 else f"{c}*{name}")
        return "+".join(parts).replace("+-", "-")

    # Questions ------------------------------------------------------------------------------------------------------

    @property
    def constant(self) -> int | None:
        """The value, if no atom occurs."""
        if not self.terms:
            return 0
        return self.terms.get(()) if len(self.terms) == 1 else None

    def atoms(self) -> set[Atom]:
        return {atom for monomial in self.terms for atom in monomial}

    def substitute(self, values: Mapping[Atom, Poly]) -> Poly:
        total = Poly({})
        for monomial, coefficient in self.terms.items():
            product = Poly.of(coefficient)
            for atom in monomial:
                product = product * values.get(atom, Poly.of(atom))
            total = total + product
        return total

    def split(self, atom: Atom) -> tuple[Poly, Poly] | None:
        """(a, b) such that self = a·atom + b and neither contains the atom; None if it occurs in a higher power."""
        linear: dict[tuple[Atom, ...], int] = {}
        rest: dict[tuple[Atom, ...], int] = {}
        for monomial, coefficient in self.terms.items():
            count = monomial.count(atom)
            if count > 1:
                return None
            if count:
                linear[tuple(a for a in monomial if a != atom)] = coefficient
            else:
                rest[monomial] = coefficient
        return Poly(linear), Poly(rest)

    def divide(self, divisor: Poly) -> Poly | None:
        """The exact quotient; None if the division leaves a remainder or is not by a single term or an equal factor."""
        if self == divisor:
            return Poly.of(1)
        if len(divisor.terms) != 1:
            # A sum divides a polynomial here only when a product of it and a remaining factor was formed before.
            lead = max(divisor.terms, key=lambda m: (len(m), [_key(a) for a in m]))
            return self._long_division(divisor, lead)
        ((monomial, coefficient),) = divisor.terms.items()
        terms: dict[tuple[Atom, ...], int] = {}
        for own, c in self.terms.items():
            left = list(own)
            for atom in monomial:
                if atom not in left:
                    return None
                left.remove(atom)
            if c % coefficient:
                return None
            terms[tuple(left)] = c // coefficient
        return Poly(terms)

    def _long_division(self, divisor: Poly, lead: tuple[Atom, ...]) -> Poly | None:
        head = Poly({lead: divisor.terms[lead]})
        remainder, quotient = self, Poly({})
        for _ in range(16):
            if not remainder.terms:
                return quotient
            step = None
            for monomial, c in remainder.terms.items():
                step = Poly({monomial: c}).divide(head)
                if step is not None:
                    break
            if step is None:
                return None
            quotient = quotient + step
            remainder = remainder - step * divisor
        return None

    # Signs ----------------------------------------------------------------------------------------------------------

    def lower_bound(self) -> Poly | None:
        """A polynomial in sizes only that is never above this one; None if it cannot be found."""
        bound = self
        for _ in range(8):
            indices = sorted((a for a in bound.atoms() if isinstance(a, Index)), key=_key, reverse=True)
            if not indices:
                return bound
            parts = bound.split(indices[0])
            if parts is None:
                return None
            slope, rest = parts
            if slope.never_negative():
                bound = rest
            elif (-slope).never_negative():
                bound = rest + slope * (indices[0].size - 1)
            else:
                return None
        return None

    def never_negative(self) -> bool:
        """Whether it is provably ≥ 0 for all sizes ≥ 0 and all indices in range."""
        bound = self.lower_bound()
        return bound is not None and all(c >= 0 for c in bound.terms.values())


_SMALL: dict[Atom | int, Poly] = {number: Poly({(): number}) for number in range(-64, 257)}


def product(factors: Iterable[Poly]) -> Poly:
    result = Poly.of(1)
    for factor in factors:
        result = result * factor
    return result
