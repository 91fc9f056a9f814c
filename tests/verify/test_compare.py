"""When one output counts as right."""

from __future__ import annotations

import numpy as np
import pytest

from onnxfuse.verify.compare import FACTOR, FLOOR, compare

RNG = np.random.default_rng(0)
ORACLE = RNG.standard_normal((4, 64))


def noisy(relative: float, seed: int = 1) -> np.ndarray:
    return ORACLE + np.abs(ORACLE).max() * relative * np.random.default_rng(seed).uniform(-1, 1, ORACLE.shape)


@pytest.mark.parametrize(("dtype", "rounding"), [("float32", 1e-6), ("float16", 1e-3), ("bfloat16", 1e-2)])
def test_as_good_as_the_unfused(dtype: str, rounding: float) -> None:
    result = compare(noisy(rounding, 1), noisy(rounding, 2), ORACLE, dtype)
    assert result.passed and 0 < result.error <= rounding
    assert result.tolerance == pytest.approx(FACTOR * result.unfused_error + FLOOR[dtype])


@pytest.mark.parametrize(("dtype", "wrong"), [("float32", 1e-3), ("float16", 5e-2), ("bfloat16", 0.2)])
def test_worse_than_the_unfused(dtype: str, wrong: float) -> None:
    result = compare(noisy(wrong), noisy(wrong / 1000, 2), ORACLE, dtype)
    assert not result.passed
    assert result.worst is not None and len(result.worst["index"]) == 2
    assert "elements wrong" in result.problem


def test_one_wrong_element_is_enough() -> None:
    fused = ORACLE.copy()
    fused[2, 5] += 0.01
    result = compare(fused, ORACLE, ORACLE, "float32")
    assert not result.passed and result.worst is not None and result.worst["index"] == [2, 5]


def test_fusing_may_mend_an_overflow() -> None:
    unfused = ORACLE.copy()
    unfused[1] = np.inf
    assert compare(ORACLE, unfused, ORACLE, "float16").passed, "right where the unfused overflowed"
    assert compare(unfused, unfused, ORACLE, "float16").passed, "no worse than the unfused"
    wrong = ORACLE.copy()
    wrong[1] = 0.0
    assert not compare(wrong, unfused, ORACLE, "float16").passed


def test_masked_rows_keep_their_meaning() -> None:
    oracle, unfused = ORACLE.copy(), ORACLE.copy()
    oracle[0], unfused[0] = np.nan, np.nan
    assert compare(unfused, unfused, oracle, "float32").passed
    fused = ORACLE.copy()
    fused[0] = 0.0
    assert not compare(fused, unfused, oracle, "float32").passed, "NaN became a number"
    assert not compare(oracle, ORACLE, ORACLE, "float32").passed, "a number became NaN"


def test_a_disputed_row_neither_fails_a_faithful_rewrite_nor_widens_the_tolerance() -> None:
    oracle = ORACLE.copy()
    oracle[3] += 1.0  # finfo.min + finfo.min is -inf in float32 and finite in float64
    assert compare(noisy(1e-6), ORACLE, oracle, "float32").passed
    wrong = ORACLE.copy()
    wrong[0] += 0.01
    result = compare(wrong, ORACLE, oracle, "float32")
    assert not result.passed and result.disputed == pytest.approx(0.25)


def test_infinities_have_a_sign() -> None:
    oracle = np.array([np.inf, 1.0])
    assert compare(oracle, oracle, oracle, "float32").passed
    assert not compare(np.array([-np.inf, 1.0]), oracle, oracle, "float32").passed


def test_shapes_and_integers_are_exact() -> None:
    assert "shape" in compare(ORACLE[:2], ORACLE, ORACLE, "float32").problem
    ints = np.arange(6).reshape(2, 3)
    assert compare(ints, ints, ints, "float32").passed
    other = ints + (np.arange(6).reshape(2, 3) == 4)
    result = compare(other, ints, ints, "float32")
    assert not result.passed and result.worst == {"index": [1, 1]}


def test_empty_outputs_and_zeros() -> None:
    empty = np.zeros((0, 4), np.float32)
    assert compare(empty, empty, empty, "float32").passed
    zeros = np.zeros(4, np.float32)
    assert compare(zeros, zeros, zeros, "float32").passed
    assert not compare(zeros + 1e-3, zeros, zeros, "float32").passed
