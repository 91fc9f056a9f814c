"""The number that a symbolic integer is, once the sizes are known."""

from __future__ import annotations

from collections.abc import Mapping

from onnxfuse.graph.dims.polynomial import Atom, Dim, SymInt


def evaluate(value: SymInt, sizes: Mapping[str, int]) -> int:
    """The number, given every symbol's size.

    Raises:
        KeyError: a symbol is not in `sizes`.
        ZeroDivisionError: the value divides by a size that is zero.
    """
    if not isinstance(value, Dim):
        return value
    total = 0
    for monomial, factor in value.terms:
        for atom in monomial:
            factor *= _evaluate_atom(atom, sizes)
        total += factor
    return total


def _evaluate_atom(atom: Atom, sizes: Mapping[str, int]) -> int:
    if atom.kind == "symbol":
        return sizes[atom.args[0]]
    args = [evaluate(arg, sizes) for arg in atom.args]
    match atom.kind:
        case "floordiv":
            return args[0] // args[1]
        case "truncdiv":
            quotient = abs(args[0]) // abs(args[1])
            return quotient if (args[0] < 0) == (args[1] < 0) else -quotient
        case "mod":
            return args[0] % args[1]
        case "min":
            return min(args)
        case "max":
            return max(args)
        case "broadcast":
            return next((size for size in args if size != 1), 1)
        case "equal":
            return int(args[0] == args[1])
        case "less":
            return int(args[0] < args[1])
        case "select":
            return args[1] if args[0] else args[2]
    raise AssertionError(atom.kind)
