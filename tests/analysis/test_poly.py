"""Polynomials of sizes and indices, and what can be proved about their sign."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnxfuse.analysis.expr import Int, evaluate
from onnxfuse.analysis.poly import Index, Poly, product
from onnxfuse.analysis.reshaping import NotProvedError, reshaped
from onnxfuse.analysis.sizes import poly_of_dim
from onnxfuse.graph.dims import parse

B, S, P = (Poly.of(name) for name in ("batch", "seq", "past"))


def number(poly: Poly, **sizes: int) -> int:
    return int(evaluate(Int(poly), sizes, lambda v: np.empty(0)))


def test_declared_sums_are_the_sum_of_their_parts() -> None:
    assert poly_of_dim("past + seq") == poly_of_dim(parse("seq + past")) == P + S
    assert poly_of_dim("past + 1") == P + 1
    assert poly_of_dim("a-b") == Poly.of("a-b")
    assert poly_of_dim("2") == 2


@given(st.lists(st.tuples(st.sampled_from(["batch", "seq", "past", ""]), st.integers(-4, 4)), max_size=4))
@settings(max_examples=60, deadline=None)
def test_arithmetic_is_that_of_numbers(parts: list[tuple[str, int]]) -> None:
    sizes = {"batch": 3, "seq": 5, "past": 2}
    total, wanted = Poly.of(0), 0
    for name, factor in parts:
        total = (total + (Poly.of(name) if name else Poly.of(1)) * factor) * (S - 1)
        wanted = (wanted + (sizes[name] if name else 1) * factor) * 4
    assert number(total, **sizes) == wanted


def test_division_is_exact_or_refused() -> None:
    assert (B * S * 4).divide(S) == B * 4
    assert (B * (P + S)).divide(P + S) == B
    assert (B * 3).divide(Poly.of(2)) is None
    assert (B + S).divide(S) is None


def test_signs() -> None:
    q, k = Poly.of(Index("q", S)), Poly.of(Index("k", P + S))
    assert (q + P).never_negative()
    assert (P + S - 1 - k).never_negative()
    assert not (q - k).never_negative()
    assert not (S - 1).never_negative(), "a size may be 0"


SIZES = {"b": 2, "h": 3, "s": 4}


@pytest.mark.parametrize(
    ("inner", "outer"),
    [
        (("b", "h", "s"), ("b", "hs")),
        (("bh", "s"), ("b", "h", "s")),
        (("b", 1, "s", 1), ("b", "s")),
        (("b", "s", 8), ("b", "s", 4, 2)),
        (("b", "s", 4, 2), ("b", "s", 8)),
        (("b", "h", "s"), ("bhs",)),
    ],
)
def test_reshape_finds_the_same_element(inner: tuple, outer: tuple) -> None:
    def shape(names: tuple) -> tuple[Poly, ...]:
        return tuple(Poly.of(n) if isinstance(n, int) else product(Poly.of(c) for c in n) for n in names)

    def concrete(sizes: tuple[Poly, ...]) -> list[int]:
        return [number(s, **SIZES) for s in sizes]

    before, after = shape(inner), shape(outer)
    free = [Index(f"i{axis}", size) for axis, size in enumerate(after)]
    try:
        found = reshaped(before, after, tuple(Poly.of(i) for i in free))
    except NotProvedError:
        # A merged index is only split again where the parts can be told apart.
        assert len(after) < len(before)
        return
    data = np.arange(np.prod(concrete(after))).reshape(concrete(before))
    grids = np.indices(concrete(after))
    env = {**SIZES, **dict(zip(free, grids, strict=True))}
    picked = data[tuple(np.broadcast_to(evaluate(Int(p), env, lambda v: data), grids[0].shape) for p in found)]
    assert np.array_equal(picked, data.reshape(concrete(after)))
