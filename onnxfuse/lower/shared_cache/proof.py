"""What must be proved before an Attention may keep its cache in a buffer that past and present share.

GroupQueryAttention shows each query of sequence b the rows 0 … seqlens_k[b] of the buffer that are not after it, and
with a window none that is too far back. The mask of the graph must say that and nothing else: causal from the first new
key, perhaps a window, perhaps a padding of keys that is one [batch, total] value of 0 and 1.

The element [b, h, q, k] of the mask is a function of truth values: on which side of some diagonals (b, q, k) lies, and
whether the padding is 0 or 1. All combinations of them that can occur are tried, so it does not matter how the mask is
spelled.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from onnxfuse.analysis import expr, masks
from onnxfuse.analysis.expr import Elem, Expr, Lit, Op, Sign
from onnxfuse.analysis.poly import Index, Poly
from onnxfuse.analysis.sizes import poly_of_dim
from onnxfuse.graph import view
from onnxfuse.graph.ir import Value
from onnxfuse.lower.emit import shape_of

#: More diagonals in one mask than this are not tried.
_MOST_DIAGONALS = 6


class NotProvedError(Exception):
    """The mask says something else, or cannot be understood; the text says what, in words that follow a node's name."""


@dataclass(frozen=True)
class Visible:
    """Which keys a query sees, of those that are not after it.

    Attributes:
        window: how many keys back at most, the query's own included; 0: all.
        padding: the [batch, total] value of 0 (hidden) and 1 that hides keys, or None.
    """

    window: int
    padding: Value | None


def visible_keys(mask: Value, past: object, *, causal: bool = False) -> Visible:
    """What a mask of the scores [..., queries, keys] shows.

    Args:
        mask: boolean (True: seen) or added to the scores.
        past: the size of the sequence axis of the cache.
        causal: whether keys after the query are hidden whatever the mask says.

    Raises:
        NotProvedError: it is not provably causal, with a window and a padding at most.
    """
    facts = masks.analyze(mask)
    offset = poly_of_dim(past)
    if facts is None or offset is None:
        raise NotProvedError(f"has a mask `{mask.name}` of unknown sizes")
    parts = list(expr.walk(facts.expression))
    padding = _padding([part for part in parts if isinstance(part, Elem)], mask)
    diagonals = {part: _diagonal(part, mask) for part in parts if isinstance(part, Sign)}
    offsets = sorted({offset, *(diagonal.offset for diagonal in diagonals.values())}, key=repr)
    if len(offsets) > _MOST_DIAGONALS:
        raise NotProvedError(f"has a mask `{mask.name}` with {len(offsets)} diagonals")
    if not causal and all(diagonal.offset != offset for diagonal in diagonals.values()):
        raise NotProvedError(f"has a mask `{mask.name}` that is not provably causal from the first new key on")
    cases = [
        (sides, kept)
        for sides in _sides(offsets)
        for kept in ((False, True) if padding is not None else (True,))
        if sides[offset] or not causal
    ]
    shown = [_is_shown(facts, mask, diagonals, sides, kept) for sides, kept in cases]
    for start in [None, *offsets]:
        window = 0 if start is None else (offset - start).constant
        wanted = [sides[offset] and (start is None or not sides[start]) and kept for sides, kept in cases]
        if wanted == shown and window is not None and (start is None or window > 0):
            return Visible(window, padding)
    raise NotProvedError(f"has a mask `{mask.name}` that is more than causal with a window and a padding of keys")


@dataclass(frozen=True)
class _Diagonal:
    """A comparison of q and k: it holds where k ≤ q + offset (`below`), or just where it is not."""

    offset: Poly
    below: bool


def _diagonal(sign: Sign, mask: Value) -> _Diagonal:
    atoms = {atom.name: atom for atom in sign.poly.atoms() if isinstance(atom, Index)}
    if sign.kind == "ge" and atoms.keys() == {"q", "k"}:
        difference = Poly.of(atoms["q"]) - Poly.of(atoms["k"])
        for below, poly in ((True, sign.poly), (False, -sign.poly - 1)):
            offset = poly - difference
            if not any(isinstance(atom, Index) for atom in offset.atoms()):
                return _Diagonal(offset, below)
    raise NotProvedError(f"has a mask `{mask.name}` that depends on `{sign}`")


def _sides(offsets: list[Poly]) -> Iterator[dict[Poly, bool]]:
    """For each diagonal whether k ≤ q + offset, in all ways that can be."""
    for sides in itertools.product((False, True), repeat=len(offsets)):
        found = dict(zip(offsets, sides, strict=True))
        if all(found[b] for a in offsets for b in offsets if found[a] and (b - a).never_negative()):
            yield found


def _is_shown(
    facts: masks.MaskFacts, mask: Value, diagonals: Mapping[Sign, _Diagonal], sides: Mapping[Poly, bool], kept: bool
) -> bool:
    """Whether the mask shows a key, given its side of each diagonal and its padding."""

    def known(e: Expr) -> Expr:
        if isinstance(e, Sign):
            return Lit(sides[diagonals[e].offset] == diagonals[e].below)
        if isinstance(e, Elem):
            return Lit(kept)
        return Op(e.name, tuple(known(a) for a in e.args)) if isinstance(e, Op) else e

    try:
        element = expr.evaluate(known(facts.expression), {}, lambda value: np.empty(0)).item()
    except KeyError:  # a number that is not known before the model runs
        raise NotProvedError(f"adds a bias `{mask.name}` to the scores, which is more than a choice of keys") from None
    if facts.boolean or element == 0:
        return bool(element) if facts.boolean else True
    if element <= masks.lowest_fill(facts.dtype):
        return False
    raise NotProvedError(
        f"adds a bias `{mask.name}` to the scores: {element:g} is neither 0 nor so low that it hides a key"
    )


# Padding ------------------------------------------------------------------------------------------------------------


def _padding(elements: list[Elem], mask: Value) -> Value | None:
    """The value of rank 2 of which all elements that the mask reads are the one at [b, k]."""
    sources: dict[int, Value] = {}
    for element in elements:
        source = _source(element)
        if source is None:
            raise NotProvedError(
                f"has a mask `{mask.name}` that depends on `{element.source.name}` by more than a padding of keys"
            )
        sources[id(source)] = source
    if len(sources) > 1:
        names = ", ".join(f"`{source.name}`" for source in sources.values())
        raise NotProvedError(f"has a mask `{mask.name}` that hides keys by more than one input: {names}")
    return next(iter(sources.values()), None)


def _source(element: Elem) -> Value | None:
    """The value [batch, total] whose element [b, k] this is, behind casts, and behind a flattening to one column."""
    value, index = element.source, element.index
    columns: Poly | None = None
    while (node := view.producer(value)) is not None and view.domain(node) == "":
        if node.op == "Reshape" and columns is None:
            inner = shape_of(node.inputs[0])
            if inner is None or len(inner) != 2 or any(d != 1 for d in (shape_of(value) or (None, None))[1:]):
                return None
            columns = poly_of_dim(inner[1])
            if columns is None:
                return None
        elif node.op not in ("Cast", "Identity"):
            return None
        value = node.inputs[0]
    shape = shape_of(value)
    if shape is None or len(shape) != 2:
        return None
    names = {atom.name: atom for place in index for atom in place.atoms() if isinstance(atom, Index)}
    if "k" not in names or ("b" not in names and shape[0] != 1):
        return None
    row, key = Poly.of(names["b"]) if "b" in names else Poly.of(0), Poly.of(names["k"])
    wanted = (row, key) if columns is None else (key + columns * row, *[Poly.of(0)] * (len(index) - 1))
    return value if tuple(index) == wanted else None
