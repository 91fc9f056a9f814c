"""Named predicates about masks and layouts that need no graph around them; the others are tested by their rules."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from onnxfuse.graph.ir import Constant, Variable
from onnxfuse.match.predicates import REGISTRY, Refused

ANY: Any = None


def held(name: str, *given: Any) -> dict[str, Any]:
    outcome = REGISTRY[name](ANY, *given)
    assert not isinstance(outcome, Refused), outcome
    return outcome


def test_a_ratio_is_positive() -> None:
    assert held("positive_ratio", 1, 8) == {"ratio": 0.125}
    assert held("positive_ratio", 1, 8, 4) == {"ratio": 0.5}
    for wrong in ((1, 0), (-1, 2), (0, 2), (1, 2, -1)):
        assert isinstance(REGISTRY["positive_ratio"](ANY, *wrong), Refused)


def test_a_product_below_a_limit() -> None:
    below = REGISTRY["product_below"]
    assert below(ANY, 1e4, -1, limit=-1000) == {"product": -1e4}
    for wrong in ((1e4, 1), (10, -1), (0, -1)):
        assert isinstance(below(ANY, *wrong, limit=-1000), Refused)


def test_numbers_that_hide_altogether() -> None:
    for low in (-1e4, -65504.0, -3.4e38, -math.inf):
        assert held("hides_altogether", low) == {"infinity": -math.inf}
    for wrong in (-100.0, 0.0, 1e9):
        assert isinstance(REGISTRY["hides_altogether"](ANY, wrong), Refused)


def test_numbers_that_hide_in_float32() -> None:
    assert held("hides_in_float32", -65504.0, 0) == {"yes": 1.0, "no": 0.0}
    assert held("hides_in_float32", 0, -65504.0) == {"yes": 0.0, "no": 1.0}
    for wrong in ((-5.0, 0), (0, -math.inf), (-65504.0, 1)):
        assert isinstance(REGISTRY["hides_in_float32"](ANY, *wrong), Refused)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_very_low_number_becomes_the_lowest(dtype: str) -> None:
    scores = Variable("s", dtype=dtype)
    found = held("hiding_number", scores, -1e9, 0)
    assert found["no"] == 0 and found["yes"] < -3.3e38
    assert math.isfinite(found["yes"])
    if dtype == "float32":
        assert found["yes"] == float(np.finfo(np.float32).min)


def test_minus_infinity_hides_in_every_dtype_and_stays() -> None:
    for dtype in ("float32", "float16", "bfloat16"):
        assert held("hiding_number", Variable("s", dtype=dtype), 0, -math.inf) == {"yes": 0, "no": -math.inf}


@pytest.mark.parametrize(("dtype", "number"), [("float16", -65504.0), ("float32", -100.0), ("float32", 1e9)])
def test_a_number_that_does_not_absorb_scores_is_refused(dtype: str, number: float) -> None:
    assert isinstance(REGISTRY["hiding_number"](ANY, Variable("s", dtype=dtype), number, 0), Refused)


@pytest.mark.parametrize("perm", [[0, 2, 1, 3], [0, 3, 2, 1, 4]])
def test_axes_before_heads_are_transposed(perm: list[int]) -> None:
    x = np.zeros((2, 3, 4, 5, 6)[: len(perm)])
    for axis in range(-len(perm), len(perm)):
        (inner,) = held("before_heads_transposed", perm, [axis])["axes"]
        assert x.shape[inner] == x.transpose(perm).shape[axis]
        assert held("before_heads_transposed", perm, axis)["axes"] == inner
    assert isinstance(REGISTRY["before_heads_transposed"](ANY, perm[::-1], [0]), Refused)


def test_an_axis_dropped_before_a_transpose() -> None:
    x = np.arange(2 * 3 * 4 * 5).reshape(2, 3, 1, 4, 5)
    perm = [0, 3, 2, 1, 4]
    found = held("before_heads_transposed", perm, [2])
    before = x.squeeze(tuple(found["axes"])).transpose(found["kept"])
    assert np.array_equal(before, x.transpose(perm).squeeze(2))


@pytest.mark.parametrize(
    ("shape", "holds"),
    [((4, 1, 1), True), ((1, 1), True), ((), True), ((4, 1, 3), False), ((4,), False), (None, False)],
)
def test_a_number_of_each_head(shape: tuple[int, ...] | None, holds: bool) -> None:
    value = Variable("s", dtype="float32", shape=shape)
    assert (not isinstance(REGISTRY["one_per_head"](ANY, value), Refused)) is holds


def test_one_constant_number_is_left_to_the_scale() -> None:
    assert isinstance(REGISTRY["one_per_head"](ANY, Constant("c", np.ones((1, 1, 1), np.float32))), Refused)
    assert held("one_per_head", Constant("c", np.ones((4, 1, 1), np.float32))) == {}
