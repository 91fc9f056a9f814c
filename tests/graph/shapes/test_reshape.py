"""Solving reshapes: the free size, and constant targets that say the same for every size."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from onnxfuse.graph import dims, shapes
from onnxfuse.graph.canonicalize.targets import constant_target
from onnxfuse.graph.dims import symbol
from onnxfuse.graph.shapes.structure import reshape_target
from tests.graph.soundness import load_text

NAMES = ("a", "b", "c")
UNKNOWN = symbol("unknown")


@st.composite
def regroupings(draw: st.DrawFn) -> tuple[tuple, tuple]:
    """Two shapes with equally many elements: runs of factors multiplied together in two ways, with ones strewn in."""
    names = st.sampled_from(NAMES).map(symbol)
    factors = draw(st.lists(st.one_of(names, st.sampled_from([2, 3, 16])), min_size=1, max_size=5))

    def grouped() -> tuple:
        shape: list = []
        for factor in factors:
            if shape and draw(st.booleans()):
                shape[-1] = shape[-1] * factor
            else:
                shape.append(factor)
            if draw(st.integers(0, 5)) == 0:
                shape.append(1)
        return tuple(shape)

    return grouped(), grouped()


def concrete(shape: tuple, sizes: dict[str, int]) -> tuple[int, ...]:
    return tuple(dims.evaluate(d, sizes) for d in shape)


def onnx_reshape(shape: tuple[int, ...], target: list[int]) -> tuple[int, ...] | None:
    """What ONNX makes of it (allowzero 0); None where it fails."""
    result = []
    for axis, size in enumerate(target):
        if size == 0:
            if axis >= len(shape):
                return None
            size = shape[axis]
        result.append(size)
    if -1 in target:
        free = target.index(-1)
        others = int(np.prod(result[:free] + result[free + 1 :], dtype=np.int64))
        if others == 0 or int(np.prod(shape, dtype=np.int64)) % others:
            return None
        result[free] = int(np.prod(shape, dtype=np.int64)) // others
    return tuple(result) if np.prod(result, dtype=np.int64) == np.prod(shape, dtype=np.int64) else None


SIZES = st.fixed_dictionaries({name: st.integers(0, 6) for name in NAMES})


@settings(max_examples=150, deadline=None)
@given(regroupings(), st.integers(0, 7), SIZES)
def test_the_free_size_is_solved(shapes: tuple[tuple, tuple], position: int, sizes: dict[str, int]) -> None:
    before, after = shapes
    free = position % len(after)
    target = [-1 if axis == free else size for axis, size in enumerate(after)]
    found = reshape_target(before, target, False, UNKNOWN)
    assert len(found) == len(after)
    assert all(found[axis] == size for axis, size in enumerate(after) if axis != free)
    others = dims.product(size for axis, size in enumerate(after) if axis != free)
    assume(dims.evaluate(others, sizes) != 0)
    assert concrete(found, sizes) == concrete(after, sizes)
    # As polynomials, not only for these sizes.
    assert found == after


@settings(max_examples=200, deadline=None)
@given(regroupings(), SIZES)
def test_constant_targets_hold_for_every_size(shapes: tuple[tuple, tuple], sizes: dict[str, int]) -> None:
    before, after = shapes
    target = constant_target(before, after)
    assume(target is not None)
    assert target.count(-1) <= 1
    assert onnx_reshape(concrete(before, sizes), target) == concrete(after, sizes)


@settings(max_examples=100, deadline=None)
@given(regroupings(), st.integers(0, 7), SIZES)
def test_a_target_that_had_a_free_size_may_keep_it(
    shapes: tuple[tuple, tuple], position: int, sizes: dict[str, int]
) -> None:
    before, after = shapes
    free = position % len(after)
    target = constant_target(before, after, free)
    assume(target is not None)
    original = [-1 if axis == free else size for axis, size in enumerate(concrete(after, sizes))]
    assume(0 not in original)
    assert onnx_reshape(concrete(before, sizes), target) == onnx_reshape(concrete(before, sizes), original)


def test_known_targets() -> None:
    batch, seq, past = symbol("batch"), symbol("seq"), symbol("past")
    assert constant_target((batch, seq, 64), (batch, seq, 4, 16)) == [0, 0, 4, 16]
    assert constant_target((batch, seq, 4, 16), (batch, seq, 64)) == [0, 0, 64]
    assert constant_target((batch, seq, 64), (batch * seq, 64)) == [-1, 64]
    assert constant_target((2, 3, 4), (6, 4)) == [6, 4]
    # −1 beside a size that may be zero has no answer when it is.
    assert constant_target((batch, 2, 2, past + seq, 16), (batch, 4, past + seq, 16)) is None
    assert constant_target((batch, 2, 2, past + seq, 16), (batch, 4, past + seq, 16), free=2) == [0, 4, -1, 16]
    assert constant_target((batch, seq), (seq, batch)) is None


@pytest.mark.parametrize(
    ("target", "known"),
    [
        ("t = Concat <axis=0> (one, s1)", True),
        ("s0 = Squeeze (s1, zero) s2 = Unsqueeze (s0, zero) t = Concat <axis=0> (one, s2)", True),
        ("s = Shape (c) p = Gather <axis=0> (s, three) t = Concat <axis=0> (one, p)", True),
        ("n = Sub (s1, three) t = Concat <axis=0> (one, n)", False),
        ("n0 = Sub (s1, three) n = Add (n0, three) t = Concat <axis=0> (one, n)", True),
    ],
)
def test_sizes_of_tensors_are_not_negative(target: str, known: bool) -> None:
    """A Conv's length S//2 - 1 could be -1 as a number, but not as the size of its result, however it is computed."""
    weight = f"float[4,4,4] w = {{{','.join(['0'] * 64)}}}"
    model = load_text(
        f"""<ir_version: 9, opset_import: ["": 18]> g (float[B,4,S] x) => (float[?,?] y)
        <int64[1] one = {{1}}, int64[1] zero = {{0}}, int64[1] three = {{2}}, {weight}>
        {{ c = Conv <strides=[2]> (x, w) s1 = Shape <start=2> (c) {target} y = Reshape (x, t) }}"""
    )
    shapes.infer(model)
    (y,) = model.graph.outputs
    assert (str(y.shape[1]) == "(S)//(2) - 1") is known


def test_a_size_that_could_be_minus_one_is_what_is_left() -> None:
    """2S - 1 rows (a table of relative positions that is shifted): the number is -1 for S = 0 only as a formula."""
    model = load_text(
        """<ir_version: 9, opset_import: ["": 18]> g (float[B,4,M,S] x, int64[S] i) => (float[?,?,?,?] y)
        <int64[1] four = {4}, int64[1] one = {1}, int64[1] two = {2}>
        {
          b = Shape <start=0, end=1> (x) s = Shape (i) m2 = Mul (s, two) m = Sub (m2, one)
          t0 = Concat <axis=0> (b, four, m, s) z = Reshape (x, t0)
          t = Concat <axis=0> (b, four, s, m) y = Reshape (z, t)
        }"""
    )
    shapes.infer(model)
    (y,) = model.graph.outputs
    assert [str(d) for d in y.shape[:3]] == ["B", "4", "S"]
