"""What follows from a pattern's shape alone: possible roots, ops that must be there, ways to further outputs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from onnxfuse.rules.patterns import (
    VALUE,
    AnyPattern,
    ChainPattern,
    OpKey,
    OpPattern,
    Pattern,
    SamePattern,
    operands_of,
    parts,
)


def roots(name: str, makers: dict[str, Pattern], seen: set[str]) -> Iterable[OpKey]:
    """The ops that can make the value."""
    if name in seen or name not in makers:
        return
    seen.add(name)
    for part in parts(makers[name]):
        if isinstance(part, OpPattern):
            yield part.domain, part.op
            if part.optional and part.operands:
                yield from roots(part.operands[0].name, makers, seen)
        elif isinstance(part, ChainPattern):
            yield "", part.op
        elif isinstance(part, SamePattern):
            yield from roots(part.other, makers, seen)


#: What a root's operands must be made by: one set of ops for each operand that is surely computed.
Operands = tuple[frozenset[OpKey], ...]


def root_operands(name: str, makers: dict[str, Pattern], above: tuple[str, ...] = ()) -> dict[OpKey, list[Operands]]:
    """For each op that can make the value, its alternatives. Tells most roots apart without a search."""
    found: dict[OpKey, list[Operands]] = {}
    pattern = makers.get(name)
    for part in parts(pattern) if pattern is not None else ():
        if isinstance(part, OpPattern):
            sets = (_producers(o.name, makers, ()) for o in part.operands if o.kind == VALUE and not o.optional)
            found.setdefault((part.domain, part.op), []).append(tuple(s for s in sets if s is not None))
        elif isinstance(part, ChainPattern):
            found.setdefault(("", part.op), []).append(())
        other = part.other if isinstance(part, SamePattern) else None
        if isinstance(part, OpPattern) and part.optional:
            other = part.operands[0].name
        if other is not None and other not in above:
            for key, alternatives in root_operands(other, makers, (*above, name)).items():
                found.setdefault(key, []).extend(alternatives)
    return found


def _producers(name: str, makers: dict[str, Pattern], above: tuple[str, ...]) -> frozenset[OpKey] | None:
    """The ops that can make the value; None if it may be anything."""
    if name not in makers or name in above:
        return None
    found: set[OpKey] = set()
    for part in parts(makers[name]):
        if isinstance(part, AnyPattern):
            continue
        if isinstance(part, ChainPattern):
            found.add(("", part.op))
            continue
        if isinstance(part, OpPattern):
            found.add((part.domain, part.op))
        other = part.other if isinstance(part, SamePattern) else part.operands[0].name if part.optional else None
        if other is not None:
            below = _producers(other, makers, (*above, name))
            if below is None:
                return None
            found |= below
    return frozenset(found)


def required(name: str, makers: dict[str, Pattern], above: tuple[str, ...]) -> set[OpKey]:
    """Ops in every match of the value (a set that is too small only costs time)."""
    if name not in makers or name in above:
        return set()
    pattern, above = makers[name], (*above, name)
    if isinstance(pattern, AnyPattern):
        sets = [_required_of(part, makers, above) for part in pattern.alternatives]
        return set.intersection(*sets) if sets else set()
    return _required_of(pattern, makers, above)


def _required_of(part: Pattern, makers: dict[str, Pattern], above: tuple[str, ...]) -> set[OpKey]:
    if isinstance(part, SamePattern):
        return required(part.other, makers, above)
    if isinstance(part, OpPattern):
        found = {(part.domain, part.op)}
        if part.optional:
            return required(part.operands[0].name, makers, above)
    else:
        found = {("", part.op)}  # type: ignore[union-attr]
    for op in part.operands:  # type: ignore[union-attr]
        if op.kind == VALUE and not op.optional:
            found |= required(op.name, makers, above)
    return found


def reached_values(names: Iterable[str], makers: dict[str, Pattern]) -> Iterator[str]:
    """The values that the given ones are made of, and themselves."""
    seen: set[str] = set()
    stack = list(names)
    while stack:
        name = stack.pop()
        if name in seen:
            continue
        seen.add(name)
        yield name
        if name in makers:
            pattern = makers[name]
            if isinstance(pattern, OpPattern):
                stack.extend(v for v in pattern.out if v != "_")
            stack.extend(o.name for o in operands_of(pattern) if o.kind == VALUE)


def path_up(output: str, makers: dict[str, Pattern], reached: set[str]) -> list[tuple[str, Pattern]]:
    """From a bound value to an output that the root does not reach: the values on the way, each with the pattern node
    that reads it; the last one makes the output."""
    frontier: list[tuple[str, list[tuple[str, Pattern]]]] = [(output, [])]
    while frontier:
        name, path = frontier.pop(0)
        pattern = makers.get(name)
        if pattern is None or len(path) > len(makers):
            continue
        for op in operands_of(pattern):
            if op.kind != VALUE:
                continue
            longer = [(op.name, pattern), *path]
            if op.name in reached:
                return longer
            frontier.append((op.name, longer))
    return []
