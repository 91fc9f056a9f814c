"""The offenders are found, with few trials."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onnxfuse.verify.offenders import first_offender, offenders


@given(st.integers(1, 200).flatmap(lambda n: st.tuples(st.just(n), st.sets(st.integers(0, n - 1), min_size=1))))
def test_first_offender(case: tuple[int, set[int]]) -> None:
    count, bad = case
    trials = 0

    def breaks(prefix: Sequence[int]) -> bool:
        nonlocal trials
        trials += 1
        return bool(bad & set(prefix))

    assert first_offender(range(count), breaks) == min(bad)
    assert trials <= math.ceil(math.log2(count)) + 1


@given(st.sets(st.integers(0, 30), min_size=1, max_size=4))
def test_all_offenders(bad: set[int]) -> None:
    assert set(offenders(range(31), lambda subset: bool(bad & set(subset)), budget=200)) == bad


def test_two_that_are_wrong_only_together() -> None:
    found = offenders(list("abcde"), lambda subset: {"b", "d"} <= set(subset))
    assert found == ["d"], "without one of them the other is fine"


def test_the_budget_gives_back_what_is_in_doubt() -> None:
    calls = 0

    def breaks(subset: Sequence[int]) -> bool:
        nonlocal calls
        calls += 1
        return bool(subset)

    found = offenders(range(100), breaks, budget=10)
    assert sorted(found) == list(range(100)) and calls < 30


@pytest.mark.parametrize("items", [["x"], ["x", "y"]])
def test_short_lists(items: list[str]) -> None:
    assert offenders(items, lambda subset: "x" in subset) == ["x"]
