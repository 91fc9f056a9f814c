"""What an attention mask says: causal, sliding window, padding of keys, a bias, or something that is not understood.

`analyze` writes a mask of shape [..., Q, K] as a sum of terms. A *choice* is 0 (or True) where its conditions hold and
`fill` elsewhere; everything that is not provably one is a *bias*. Nothing here changes a graph.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from onnxfuse.analysis import expr
from onnxfuse.analysis.elements import Elements
from onnxfuse.analysis.expr import Elem, Expr, Lit, Op, Sign
from onnxfuse.analysis.poly import Atom, Index, Poly
from onnxfuse.analysis.sizes import Sized, UnknownSizeError, dtype_of, present_in
from onnxfuse.graph import consts, types, view
from onnxfuse.graph.ir import Constant, Value

#: Names of the index variables, from the last axis backwards.
AXES = ("k", "q", "h", "b")


@dataclass(frozen=True)
class Causal:
    """Key k is seen by query q when k ≤ q + offset."""

    offset: Poly


@dataclass(frozen=True)
class Window:
    """Key k is seen by query q when k > q + offset - size."""

    size: int
    offset: Poly


@dataclass(frozen=True)
class Padding:
    """Key k of sequence b is seen when the condition on elements of `source` holds; it depends on b and k only."""

    source: Value
    condition: Expr


@dataclass(frozen=True)
class Other:
    """A condition that is none of the above; it depends on the named indices."""

    condition: Expr
    indices: frozenset[str]


Condition = Causal | Window | Padding | Other


@dataclass(frozen=True)
class Choice:
    """0 (for a boolean mask: True) where all conditions hold, `fill` (False) elsewhere."""

    conditions: tuple[Condition, ...]
    fill: float


@dataclass(frozen=True)
class Bias:
    """A summand that depends on the named indices."""

    value: Expr
    indices: frozenset[str]


@dataclass(frozen=True)
class MaskFacts:
    """What is proved about one mask.

    Attributes:
        sizes: of the mask, aligned to the right with [B, H, Q, K].
        boolean: whether True means "seen" (else the mask is added to the scores).
        terms: the summands; empty when the mask does nothing.
        expression: the element at (b, h, q, k).
        dtype: of the mask.
    """

    sizes: Sized
    boolean: bool
    terms: tuple[Choice | Bias, ...]
    expression: Expr
    dtype: str | None

    def conditions(self) -> tuple[Condition, ...]:
        return tuple(c for t in self.terms if isinstance(t, Choice) for c in t.conditions)

    @property
    def structural(self) -> bool:
        """Only causal and window conditions, hiding with -inf or a number so low that it cannot be told from it in a
        row with at least one visible key (which a causal row always has)."""
        kinds = all(isinstance(t, Choice) and t.fill <= lowest_fill(self.dtype) for t in self.terms)
        return kinds and bool(self.terms) and all(isinstance(c, (Causal, Window)) for c in self.conditions())

    def causal_offset(self) -> Poly | None:
        """The offset of the causal condition, if there is exactly one."""
        found = {c.offset for c in self.conditions() if isinstance(c, Causal)}
        return found.pop() if len(found) == 1 else None

    def window(self) -> Window | None:
        """The sliding window, if there is exactly one."""
        found = {c for c in self.conditions() if isinstance(c, Window)}
        return found.pop() if len(found) == 1 else None

    def implies_causal(self, offset: Poly) -> bool:
        """Whether the mask certainly hides every key after q + offset."""
        for term in self.terms:
            if isinstance(term, Choice) and term.fill <= lowest_fill(self.dtype):
                for c in term.conditions:
                    if isinstance(c, Causal) and (offset - c.offset).never_negative():
                        return True
        return False

    def finite(self) -> bool:
        """Whether no element can be -inf (so that softmax of finite scores is never NaN). Biases from data are not
        claimed to be finite."""
        if self.boolean:
            return False
        if any(isinstance(t, Bias) for t in self.terms):
            return False
        total = sum(t.fill for t in self.terms if isinstance(t, Choice))
        if self.dtype not in types.FLOATS:
            return False
        with np.errstate(all="ignore"):
            return bool(np.isfinite(np.float64(total).astype(types.numpy_of(self.dtype))))

    def sources(self) -> list[Value]:
        """The tensors whose run-time content the mask reads."""
        found = {id(e.source): e.source for e in expr.walk(self.expression) if isinstance(e, Elem)}
        return list(found.values())

    def evaluate(self, env: Mapping[Atom, Any], load: Any) -> np.ndarray:
        """The mask in numbers, of its own shape. `env` gives each size its number."""
        shape = [int(expr.evaluate(expr.Int(s), env, load)) for s in self.sizes]
        full = dict(env)
        for axis, size in enumerate(shape):
            grid = np.arange(size).reshape([-1 if i == axis else 1 for i in range(len(shape))])
            name = AXES[len(shape) - 1 - axis]
            full[Index(name, self.sizes[axis])] = grid
        found = expr.evaluate(self.expression, full, load)
        if self.dtype is not None:
            with np.errstate(over="ignore"):
                found = found.astype(types.numpy_of(self.dtype))
        return np.broadcast_to(found, shape)


def lowest_fill(dtype: str | None) -> float:
    """At and below this a hidden key has weight 0 beside any visible one, whatever scores a model can reach."""
    return -1e4 if dtype == "float16" else -1e6


def analyze(mask: Value, elements: Elements | None = None) -> MaskFacts | None:
    """The facts of a mask of rank 1 to 4; None when its sizes are unknown."""
    elements = (elements or Elements()).assuming(present_in(mask))
    try:
        sizes = elements.sizes.of(mask)
    except UnknownSizeError:
        return None
    if not 1 <= len(sizes) <= 4:
        return None
    names = AXES[len(sizes) - 1 :: -1]
    index = tuple(
        Poly.of(0) if size == 1 else Poly.of(Index(name, size)) for name, size in zip(names, sizes, strict=True)
    )
    element = elements.at(mask, index)
    boolean = dtype_of(mask) == "bool" or expr.is_bool(element)
    if boolean:
        terms = _choices(element, -math.inf)
    else:
        terms = [t for part in _summands(element) for t in _term(part)]
    return MaskFacts(sizes, boolean, tuple(terms), element, dtype_of(mask))


def zero_or_one(mask: Value, elements: Elements | None = None) -> bool:
    """Whether every element of a mask of rank 1 to 4 is 0 or 1, whatever the inputs are."""
    facts = analyze(mask, elements)
    return facts is not None and not facts.boolean and _only_zeros_and_ones(facts.expression)


def low_number_behind(value: Value) -> str | None:
    """What in the computation of a value could make it a mask: a number below -1000, a float that is only known at run
    time and comes from outside, or too much to look at. None if there is nothing of the kind, up to the next norm,
    softmax or other op with small results. Of an attention only the values that it averages count."""
    todo: list[Value] = [value]
    seen: set[int] = set()
    while todo:
        part = todo.pop()
        if id(part) in seen or not part.name:
            continue
        seen.add(id(part))
        if isinstance(part, Constant):
            if dtype_of(part) in types.FLOATS and consts.size_of(part) and not _stays_above(part):
                return f"the constant `{part.name}`"
            continue
        node = view.producer(part)
        if node is None and dtype_of(part) in types.FLOATS:
            return f"the input `{part.name}`"
        if len(seen) > _MOST_LOOKED_AT:
            return "a long computation"
        if node is not None and node.op not in _BOUNDED:
            averaged = node.op == "Attention" and view.domain(node) in ("", "onnxfuse.std")
            todo.extend([v for i, v in enumerate(node.inputs) if i in (2, 5)] if averaged else node.inputs)
    return None


def _stays_above(constant: Constant) -> bool:
    return consts.size_of(constant) <= _LARGEST_LOOKED_AT and float(consts.array(constant).min()) >= -1000


#: Ops whose results are small, whatever goes in.
_BOUNDED = frozenset({
    "Softmax", "Tanh", "Sigmoid", "Erf", "Sin", "Cos", "LayerNormalization", "RMSNormalization",
    "SimplifiedLayerNormalization",
})  # fmt: skip

#: Values and elements of one constant that are looked at for low numbers.
_MOST_LOOKED_AT, _LARGEST_LOOKED_AT = 4000, 1 << 26


def _only_zeros_and_ones(e: Expr) -> bool:
    if isinstance(e, Op) and e.name == "where":
        return all(_only_zeros_and_ones(part) for part in e.args[1:])
    if isinstance(e, Elem) and isinstance(e.source, Constant):
        content = consts.array(e.source)
        return bool(np.isin(content, (0, 1)).all())
    return expr.literal(e) in (0, 1)


def _summands(e: Expr) -> list[Expr]:
    if isinstance(e, Op) and e.name == "Add":
        return [s for a in e.args for s in _summands(a)]
    return [e]


def _term(e: Expr) -> list[Choice | Bias]:
    if expr.literal(e) == 0:
        return []
    if isinstance(e, Op) and e.name == "where":
        condition, yes, no = e.args
        if expr.literal(yes) == 0 and _hides(no):
            return list(_choices(condition, float(expr.literal(no))))  # type: ignore[arg-type]
        if expr.literal(no) == 0 and _hides(yes):
            return list(_choices(expr.not_(condition), float(expr.literal(yes))))  # type: ignore[arg-type]
        nested = _nested(e)
        if nested is not None:
            return list(_choices(*nested))
    return [Bias(e, frozenset(expr.indices_of(e)))]


def _hides(e: Expr) -> bool:
    number = expr.literal(e)
    return number is not None and number < 0


def _nested(e: Expr) -> tuple[Expr, float] | None:
    """where(c1, where(c2, 0, f), f) and its mirror images: one condition and one fill."""
    leaves: set[float] = set()

    def seen(part: Expr) -> Expr | None:
        if isinstance(part, Op) and part.name == "where":
            yes, no = seen(part.args[1]), seen(part.args[2])
            return None if yes is None or no is None else expr.where(part.args[0], yes, no)
        number = expr.literal(part)
        if number is None or number > 0:
            return None
        if number < 0:
            leaves.add(float(number))
        return Lit(number == 0)

    condition = seen(e)
    return (condition, leaves.pop()) if condition is not None and len(leaves) == 1 else None


def _choices(condition: Expr, fill: float) -> list[Choice | Bias]:
    if condition == expr.TRUE:
        return []
    parts = list(condition.args) if isinstance(condition, Op) and condition.name == "and" else [condition]
    signs = [p for p in parts if isinstance(p, Sign)]
    parts = [p if p in signs else expr.under(p, signs) for p in parts]
    return [Choice(tuple(_classify(p) for p in parts if p != expr.TRUE), fill)]


def _classify(e: Expr) -> Condition:
    names = frozenset(expr.indices_of(e))
    if isinstance(e, Sign) and e.kind == "ge" and names == {"q", "k"}:
        found = _diagonal(e.poly)
        if found is not None:
            return found
    if names <= {"b", "k"} and "k" in names:
        sources = {id(x.source): x.source for x in expr.walk(e) if isinstance(x, Elem)}
        if len(sources) == 1:
            return Padding(next(iter(sources.values())), e)
    return Other(e, names)


def _diagonal(poly: Poly) -> Causal | Window | None:
    """q - k + c ≥ 0 is causal with offset c; k - q + c ≥ 0 says k > q + offset - size, with size - offset = c + 1."""
    atoms = {a.name: a for a in poly.atoms() if isinstance(a, Index)}
    q, k = poly.split(atoms["q"]), poly.split(atoms["k"])
    if q is None or k is None:
        return None
    rest = q[1] - Poly.of(atoms["k"]) * k[0]
    if any(isinstance(a, Index) for a in rest.atoms()):
        return None
    if (q[0], k[0]) == (Poly.of(1), Poly.of(-1)):
        return Causal(rest)
    if (q[0], k[0]) == (Poly.of(-1), Poly.of(1)):
        constant = rest.terms.get((), 0)
        return Window(constant + 1, Poly.of(constant) - rest)
    return None
