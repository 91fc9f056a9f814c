"""Scalar expressions: what one element of a tensor is, as a function of its index.

Smart constructors keep them in a normal form: booleans become numbers by a choice between 1 and 0, comparisons of
integers are signs of polynomials, negations stand at the leaves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from onnxfuse.analysis.poly import Atom, Index, Poly
from onnxfuse.graph import types
from onnxfuse.graph.ir import Value


@dataclass(frozen=True)
class Int:
    """An integer known as a polynomial of sizes and indices."""

    poly: Poly

    def __str__(self) -> str:
        return str(self.poly)


@dataclass(frozen=True, eq=False)
class Lit:
    """A number or truth value known now. Unlike Python's, 1 and True differ."""

    value: float | bool

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Lit) and type(self.value) is type(other.value) and self.value == other.value

    def __hash__(self) -> int:
        return hash((type(self.value), self.value))

    def __str__(self) -> str:
        return str(self.value)


@dataclass(frozen=True)
class Elem:
    """An element of a tensor whose content is only known at run time."""

    source: Value
    index: tuple[Poly, ...]

    def __str__(self) -> str:
        return f"{self.source.name}[{', '.join(map(str, self.index))}]"


@dataclass(frozen=True)
class Sign:
    """Whether a polynomial is ≥ 0 (`ge`) or = 0 (`eq`)."""

    kind: str
    poly: Poly

    def __str__(self) -> str:
        return f"{self.poly} {'>=' if self.kind == 'ge' else '=='} 0"


@dataclass(frozen=True)
class Op:
    """Anything else: `name` is an ONNX op or one of and, or, not, where, truthy."""

    name: str
    args: tuple[Expr, ...]

    def __str__(self) -> str:
        return f"{self.name}({', '.join(map(str, self.args))})"


Expr = Int | Lit | Elem | Sign | Op

TRUE, FALSE = Lit(True), Lit(False)


def num(value: Any) -> Expr:
    """A literal: integers become polynomials, so that index arithmetic goes on."""
    if isinstance(value, (bool, np.bool_)):
        return Lit(bool(value))
    if isinstance(value, (int, np.integer)):
        return Int(Poly.of(int(value)))
    return Lit(float(value))


def literal(e: Expr) -> float | bool | None:
    """The number that the expression is, if it is one."""
    if isinstance(e, Lit):
        return e.value
    return e.poly.constant if isinstance(e, Int) else None


# Truth values -------------------------------------------------------------------------------------------------------


def ge(poly: Poly) -> Expr:
    if poly.never_negative():
        return TRUE
    if (-poly - 1).never_negative():
        return FALSE
    return Sign("ge", poly)


def eq(poly: Poly) -> Expr:
    if poly == 0:
        return TRUE
    if (poly - 1).never_negative() or (-poly - 1).never_negative():
        return FALSE
    return Sign("eq", poly)


def not_(e: Expr) -> Expr:
    if isinstance(e, Lit):
        return Lit(not e.value)
    if isinstance(e, Sign) and e.kind == "ge":
        return ge(-e.poly - 1)
    if isinstance(e, Op) and e.name == "not":
        return e.args[0]
    if isinstance(e, Op) and e.name in ("and", "or"):
        return (or_ if e.name == "and" else and_)(*[not_(a) for a in e.args])
    return Op("not", (e,))


def and_(*args: Expr) -> Expr:
    return _junction("and", TRUE, FALSE, args)


def or_(*args: Expr) -> Expr:
    return _junction("or", FALSE, TRUE, args)


def _junction(name: str, neutral: Lit, absorbing: Lit, args: tuple[Expr, ...]) -> Expr:
    flat: list[Expr] = []
    for arg in args:
        for part in arg.args if isinstance(arg, Op) and arg.name == name else (arg,):
            if part == absorbing:
                return absorbing
            if part != neutral and part not in flat:
                flat.append(part)
    if not flat:
        return neutral
    return flat[0] if len(flat) == 1 else Op(name, tuple(flat))


def truthy(e: Expr) -> Expr:
    """e ≠ 0."""
    if isinstance(e, Int):
        return not_(eq(e.poly))
    if isinstance(e, Lit):
        return Lit(bool(e.value) or math.isnan(e.value))
    if is_bool(e):
        return e
    if isinstance(e, Op) and e.name == "where":
        return where(e.args[0], truthy(e.args[1]), truthy(e.args[2]))
    if isinstance(e, Op) and e.name == "Sub":
        known = literal(e.args[0])
        if known is not None and isinstance(e.args[1], Elem):
            return not_(equals(e.args[1], known))
    return Op("truthy", (e,))


def is_bool(e: Expr) -> bool:
    return (
        isinstance(e, Sign)
        or (isinstance(e, Lit) and isinstance(e.value, bool))
        or (isinstance(e, Op) and e.name in ("and", "or", "not", "truthy", "Less", "LessOrEqual", "Equal", "IsNaN"))
        or (isinstance(e, Elem) and types.name_of(e.source.dtype) == "bool")
    )


def equals(e: Expr, number: float) -> Expr:
    """e = number, for an expression that is not an integer polynomial."""
    if isinstance(e, Op) and e.name == "where":
        return where(e.args[0], equals(e.args[1], number), equals(e.args[2], number))
    known = literal(e)
    if known is not None:
        return Lit(known == number)
    if number == 0:
        return not_(truthy(e))
    return Op("Equal", (e, num(int(number) if float(number).is_integer() else number)))


# Choice and arithmetic ----------------------------------------------------------------------------------------------


def where(condition: Expr, yes: Expr, no: Expr) -> Expr:
    if isinstance(condition, Lit):
        return yes if condition.value else no
    if yes == no:
        return yes
    if isinstance(condition, Op) and condition.name == "not":
        return where(condition.args[0], no, yes)
    pinned = _pinned(condition)
    if pinned is not None:
        yes = substitute(yes, *pinned)
    if (yes, no) == (TRUE, FALSE):
        return condition
    if (yes, no) == (FALSE, TRUE):
        return not_(condition)
    if is_bool(yes) and is_bool(no):
        return or_(and_(condition, yes), and_(not_(condition), no))
    return Op("where", (condition, yes, no))


def _pinned(condition: Expr) -> tuple[Expr, Expr] | None:
    """The (expression, number) that a true condition fixes."""
    if isinstance(condition, Op) and condition.name == "Equal" and literal(condition.args[1]) is not None:
        return condition.args[0], condition.args[1]
    return None


def substitute(e: Expr, old: Expr, new: Expr) -> Expr:
    if e == old:
        return new
    if isinstance(e, Op) and e.name in ("Add", "Sub", "Mul"):
        return arithmetic(e.name, substitute(e.args[0], old, new), substitute(e.args[1], old, new))
    return e


def under(e: Expr, facts: Sequence[Expr]) -> Expr:
    """The expression, given that all `facts` are true."""
    if not isinstance(e, Op):
        return TRUE if e in facts else FALSE if isinstance(e, Sign) and not_(e) in facts else e
    args = [under(a, facts) for a in e.args]
    if e.name == "where":
        return where(*args)
    if e.name == "truthy":
        return truthy(args[0])
    if e.name in ("and", "or"):
        return (and_ if e.name == "and" else or_)(*args)
    if e.name == "not":
        return not_(args[0])
    if e.name in _NUMPY:
        return arithmetic(e.name, args[0], args[1])
    return Op(e.name, tuple(args))


def arithmetic(name: str, a: Expr, b: Expr) -> Expr:
    """Add, Sub, Mul, Div, Min or Max."""
    if isinstance(a, Int) and isinstance(b, Int):
        exact = _exact(name, a.poly, b.poly)
        if exact is not None:
            return exact
    x, y = literal(a), literal(b)
    if x is not None and y is not None and not (isinstance(a, Int) and isinstance(b, Int)):
        with np.errstate(all="ignore"):
            return Lit(float(_NUMPY[name](np.float64(x), np.float64(y))))
    if name == "Add" and 0 in (x, y):
        return b if x == 0 else a
    if name == "Sub" and y == 0:
        return a
    if name in ("Mul", "Div") and y == 1:
        return a
    if name == "Mul" and x == 1:
        return b
    if isinstance(a, Op) and isinstance(b, Op) and a.name == b.name == "where" and a.args[0] == b.args[0]:
        return where(a.args[0], arithmetic(name, a.args[1], b.args[1]), arithmetic(name, a.args[2], b.args[2]))
    for choice, other, left in ((a, y, True), (b, x, False)):
        if other is not None and isinstance(choice, Op) and choice.name == "where":
            pair = [arithmetic(name, c, b) if left else arithmetic(name, a, c) for c in choice.args[1:]]
            return where(choice.args[0], *pair)
    return Op(name, (a, b))


def _exact(name: str, a: Poly, b: Poly) -> Expr | None:
    if name == "Add":
        return Int(a + b)
    if name == "Sub":
        return Int(a - b)
    if name == "Mul":
        return Int(a * b)
    if name == "Div":
        quotient = a.divide(b) if b.terms else None
        return Int(quotient) if quotient is not None else None
    if (a - b).never_negative():
        return Int(a if name == "Max" else b)
    if (b - a).never_negative():
        return Int(b if name == "Max" else a)
    return None


_NUMPY: dict[str, Callable[..., Any]] = {
    "Add": np.add,
    "Sub": np.subtract,
    "Mul": np.multiply,
    "Div": np.divide,
    "Min": np.minimum,
    "Max": np.maximum,
}


def compare(name: str, a: Expr, b: Expr) -> Expr:
    """Less, LessOrEqual, Greater, GreaterOrEqual or Equal."""
    if name in ("Greater", "GreaterOrEqual"):
        return compare(name.replace("Greater", "Less"), b, a)
    if isinstance(a, Int) and isinstance(b, Int):
        if name == "Equal":
            return eq(a.poly - b.poly)
        return ge(b.poly - a.poly - (1 if name == "Less" else 0))
    if name == "Equal":
        if is_bool(a) and is_bool(b):
            return or_(and_(a, b), and_(not_(a), not_(b)))
        for one, other in ((a, b), (b, a)):
            known = literal(other)
            if known is not None and not is_bool(one):
                return equals(one, known)
    x, y = literal(a), literal(b)
    if x is not None and y is not None:
        return Lit(bool(x < y if name == "Less" else x <= y if name == "LessOrEqual" else x == y))
    return Op(name, (a, b))


# Walking and evaluating ---------------------------------------------------------------------------------------------


def walk(e: Expr) -> Iterator[Expr]:
    yield e
    if isinstance(e, Op):
        for arg in e.args:
            yield from walk(arg)


def indices_of(e: Expr) -> set[str]:
    """Names of the index variables that the expression depends on."""
    names: set[str] = set()
    for part in walk(e):
        polys = (part.poly,) if isinstance(part, (Int, Sign)) else part.index if isinstance(part, Elem) else ()
        for poly in polys:
            names |= {a.name for a in poly.atoms() if isinstance(a, Index)}
    return names


def evaluate(e: Expr, env: Mapping[Atom, Any], load: Callable[[Value], np.ndarray]) -> np.ndarray:
    """The expression in numbers: `env` gives each size a number and each index an integer array; arrays broadcast."""
    if isinstance(e, Lit):
        return np.asarray(e.value)
    if isinstance(e, Int):
        return _value(e.poly, env)
    if isinstance(e, Sign):
        number = _value(e.poly, env)
        return number >= 0 if e.kind == "ge" else number == 0
    if isinstance(e, Elem):
        return load(e.source)[tuple(_value(p, env) for p in e.index)]
    args = [evaluate(a, env, load) for a in e.args]
    with np.errstate(all="ignore"):
        return _EVALUATE[e.name](*args)


def _value(poly: Poly, env: Mapping[Atom, Any]) -> np.ndarray:
    total: Any = 0
    for monomial, coefficient in poly.terms.items():
        term: Any = coefficient
        for atom in monomial:
            term = term * env[atom]
        total = total + term
    return np.asarray(total)


_EVALUATE: dict[str, Callable[..., Any]] = {
    "and": lambda *a: np.logical_and.reduce(np.broadcast_arrays(*a)),
    "or": lambda *a: np.logical_or.reduce(np.broadcast_arrays(*a)),
    "not": np.logical_not,
    "truthy": lambda a: a != 0,
    "where": np.where,
    "Less": np.less,
    "LessOrEqual": np.less_equal,
    "Equal": np.equal,
    "IsNaN": np.isnan,
    "Neg": np.negative,
    "Abs": np.abs,
    **_NUMPY,
}
