"""What polynomials cannot express: extremes, broadcasting, comparison and choice."""

from __future__ import annotations

from onnxfuse.graph.dims.polynomial import Atom, Dim, SymInt, bounds, make_atom


def _extreme(kind: str, left: SymInt, right: SymInt) -> SymInt:
    low, high = bounds(left - right)
    if high <= 0:
        return left if kind == "min" else right
    if low >= 0:
        return right if kind == "min" else left
    # min(max(n, x), x) and max(min(n, x), x) are x.
    for one, other in ((left, right), (right, left)):
        atom = _only_atom(one)
        if atom is not None and atom.kind != kind and atom.kind in ("min", "max") and other in atom.args:
            return other
    members: set[SymInt] = set()
    for value in (left, right):
        atom = _only_atom(value)
        members.update(atom.args if atom is not None and atom.kind == kind else (value,))
    args = tuple(sorted(members, key=str))
    # Members that another member bounds add nothing.
    for value in args:
        others = [other for other in args if other != value]
        if any(_dominates(kind, other, value) for other in others):
            args = tuple(v for v in args if v != value)
    if len(args) == 1:
        return args[0]
    every = [bounds(value) for value in args]
    pick = min if kind == "min" else max
    return make_atom(
        kind, args, pick(b[0] for b in every), pick(b[1] for b in every), f"{kind}({', '.join(map(str, args))})"
    )


def _dominates(kind: str, winner: SymInt, value: SymInt) -> bool:
    low, high = bounds(value - winner)
    if low >= 0 if kind == "min" else high <= 0:
        return True
    # A maximum is at most n when each of its members is; and the other way round.
    atom = _only_atom(winner)
    if atom is None or atom.kind not in ("min", "max") or atom.kind == kind:
        return False
    return all(_dominates(kind, member, value) for member in atom.args)


def _only_atom(value: SymInt) -> Atom | None:
    if isinstance(value, Dim) and len(value.terms) == 1:
        monomial, factor = value.terms[0]
        if factor == 1 and len(monomial) == 1:
            return monomial[0]
    return None


def minimum(left: SymInt, right: SymInt) -> SymInt:
    return _extreme("min", left, right)


def maximum(left: SymInt, right: SymInt) -> SymInt:
    return _extreme("max", left, right)


def broadcast(left: SymInt, right: SymInt) -> SymInt:
    """The dimension that two dimensions broadcast to; the result assumes that they do broadcast."""
    if left == right or (not isinstance(right, Dim) and right == 1):
        return left
    if not isinstance(left, Dim) and left == 1:
        return right
    # A size that cannot be 1 wins, whatever the other is; of two such, the plainer one.
    for value in sorted((left, right), key=lambda v: (isinstance(v, Dim), str(v))):
        low, high = bounds(value)
        if low > 1 or high < 1:
            return value
    # x beside max(x, 0): x is a size, so the same.
    for plain, clamped in ((left, right), (right, left)):
        atom = _only_atom(clamped)
        if atom is not None and atom.kind == "max" and set(atom.args) == {plain, 0}:
            return plain
    # min(n, x) beside x: they are equal, or n < x and n must be 1; either way x is the result.
    for small, big in ((left, right), (right, left)):
        atom = _only_atom(small)
        if atom is None or atom.kind != "min" or big not in atom.args:
            continue
        if all(value == big or bounds(value)[0] >= 1 for value in atom.args):
            return big
    members: set[SymInt] = set()
    for value in (left, right):
        atom = _only_atom(value)
        members.update(atom.args if atom is not None and atom.kind == "broadcast" else (value,))
    args = tuple(sorted(members, key=str))
    if len(args) == 1:
        return args[0]
    every = [bounds(value) for value in args]
    low = min(b[0] for b in every)
    high = max(b[1] for b in every)
    return make_atom("broadcast", args, max(low, 0), high, f"broadcast({', '.join(map(str, args))})")


def parts_of_broadcast(size: SymInt) -> tuple[SymInt, ...]:
    """The sizes that a size was broadcast from; itself for any other one."""
    atom = _only_atom(size)
    return atom.args if atom is not None and atom.kind == "broadcast" else (size,)


def equal_if_broadcast(size: SymInt, whole: SymInt) -> bool:
    """Whether a size that broadcasts to `whole` must be equal to it.

    A table of n > 1 rows that is cut to the length x has min(n, x) of them: if that were not x it would be n, which
    broadcasts to nothing else.
    """
    if size == whole:
        return True
    atom = _only_atom(size)
    if atom is None or atom.kind != "min" or whole not in atom.args:
        return False
    return all(value == whole or bounds(value)[0] > 1 for value in atom.args)


def same_when_added(left: SymInt, right: SymInt) -> bool:
    """Whether the sizes of two tensors must be equal if the tensors can be added at all (and neither is repeated)."""
    if left == right:
        return True
    if not (isinstance(left, Dim) and isinstance(right, Dim)):
        return False
    if equal_if_broadcast(left, right) or equal_if_broadcast(right, left):
        return True
    # The size of a tensor is not negative.
    return maximum(left, 0) == right or maximum(right, 0) == left


def equal(left: SymInt, right: SymInt) -> bool | Dim:
    """Whether two symbolic integers are equal: True, False, or a symbolic 0 or 1."""
    difference = left - right
    if not isinstance(difference, Dim):
        return difference == 0
    low, high = bounds(difference)
    if low > 0 or high < 0:
        return False
    return _truth("equal", tuple(sorted((left, right), key=str)), f"({left}=={right})")


def less(left: SymInt, right: SymInt) -> bool | Dim:
    """Whether left < right: True, False, or a symbolic 0 or 1."""
    low, high = bounds(left - right)
    if high < 0:
        return True
    if low >= 0:
        return False
    return _truth("less", (left, right), f"({left}<{right})")


def negate(truth: bool | Dim) -> bool | Dim:
    """Not, of a truth value."""
    if not isinstance(truth, Dim):
        return not truth
    opposite = 1 - truth
    return opposite if isinstance(opposite, Dim) else bool(opposite)


def _truth(kind: str, args: tuple[SymInt, ...], key: str) -> Dim:
    return make_atom(kind, args, 0, 1, key)


def select(condition: bool | Dim, yes: SymInt, no: SymInt) -> SymInt:
    """`yes` where the condition holds, else `no`."""
    if not isinstance(condition, Dim):
        return yes if condition else no
    if yes == no and type(yes) is type(no):
        return yes
    low = min(bounds(yes)[0], bounds(no)[0])
    high = max(bounds(yes)[1], bounds(no)[1])
    return make_atom("select", (condition, yes, no), low, high, f"({condition} ? {yes} : {no})")
