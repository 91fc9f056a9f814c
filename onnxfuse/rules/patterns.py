"""What a compiled pattern consists of: plain records with resolved names and ids.

The ``id`` of a record is its path in the rule file.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

#: Operand kinds.
NUMBER, LIST, ABSENT, VALUE, CAPTURE, ANY = "number", "list", "absent", "value", "capture", "any"

OpKey = tuple[str, str]


@dataclass(slots=True)
class Operand:
    kind: str
    id: str
    name: str = ""
    number: Any = None
    optional: bool = False
    rank: int = 0  # order of trying; lower first


@dataclass(slots=True)
class Checks:
    """Predicates on one value."""

    path: str
    dtype: str | None = None
    dtypes: tuple[str, ...] = ()
    rank: tuple[int, int] | None = None
    rank_text: Any = None
    shape: tuple[Any, ...] | None = None
    const: bool | None = None
    same_shape: str | None = None
    broadcastable: str | None = None


@dataclass(slots=True)
class Attr:
    """One attribute check. ``kind``: equal, one_of, not, capture, absent."""

    name: str
    kind: str
    value: Any
    id: str


@dataclass(slots=True)
class OpPattern:
    name: str
    id: str
    op: str
    domain: str
    operands: list[Operand]
    rest: bool
    commutes: bool
    attrs: list[Attr]
    out: list[str]
    optional: bool
    set: dict[str, Any]
    checks: Checks | None
    min_inputs: int = 0


@dataclass(slots=True)
class ChainPattern:
    name: str
    id: str
    op: str
    operands: list[Operand]
    set: dict[str, Any]
    checks: Checks | None


@dataclass(slots=True)
class SamePattern:
    name: str
    id: str
    other: str
    set: dict[str, Any]
    checks: Checks | None


@dataclass(slots=True)
class AnyPattern:
    name: str
    id: str
    alternatives: list[OpPattern | ChainPattern | SamePattern]
    checks: Checks | None


Pattern = OpPattern | ChainPattern | SamePattern | AnyPattern


def parts(pattern: Pattern) -> Iterator[Pattern]:
    """The pattern itself and its alternatives."""
    yield pattern
    if isinstance(pattern, AnyPattern):
        yield from pattern.alternatives


def operands_of(pattern: Pattern) -> Iterator[Operand]:
    for part in parts(pattern):
        if isinstance(part, (OpPattern, ChainPattern)):
            yield from part.operands
        elif isinstance(part, SamePattern):
            yield Operand(VALUE, f"{part.id}.is", part.other)
