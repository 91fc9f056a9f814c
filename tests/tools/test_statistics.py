"""Statistics of differences, against numbers worked out by hand."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from onnxfuse.verify.statistics import statistics


def test_by_hand() -> None:
    reference = np.array([[1.0, 2.0], [4.0, -8.0]], np.float32)
    found = np.array([[1.0, 2.5], [4.0, -8.0]], np.float32)
    s = statistics(found, reference)
    assert (s.max_abs, s.mean_abs, s.max_rel, s.elements) == (0.5, 0.125, 0.25, 4)
    assert s.worst == {"index": [0, 1], "value": 2.5, "reference": 2.0}
    assert s.cosine == pytest.approx(86 / np.sqrt(85 * 87.25))
    assert s.max_ulp == round(0.5 / 2**-22)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.float64, ml_dtypes.bfloat16])
def test_one_ulp_across_zero_and_up(dtype: type) -> None:
    one = np.array([1.0], dtype)
    up = np.nextafter(one, np.array([2.0], dtype))
    assert statistics(up, one).max_ulp == 1
    tiny = np.nextafter(np.array([0.0], dtype), one)
    assert statistics(tiny, -tiny).max_ulp == 2
    assert statistics(np.array([-0.0], dtype), np.array([0.0], dtype)).max_ulp == 0


def test_small_reference_values_do_not_count_as_relative_error() -> None:
    s = statistics(np.array([1000.0, 1e-3]), np.array([1000.0, 1e-6]))
    assert s.max_rel == 0 and s.max_abs == pytest.approx(9.99e-4)


def test_non_finite() -> None:
    reference = np.array([np.nan, np.inf, 1.0, 2.0])
    assert statistics(reference, reference).non_finite == 0
    s = statistics(np.array([np.nan, 3.0, 1.0, np.nan]), reference)
    assert s.non_finite == 2 and s.max_abs == float("inf") and s.worst is not None and s.worst["index"] == [1]


def test_empty_and_integers() -> None:
    assert statistics(np.empty((0, 2)), np.empty((0, 2))).elements == 0
    s = statistics(np.array([1, 2, 3]), np.array([1, 2, 5]))
    assert s.max_abs == 2 and s.max_ulp is None


def test_p99_is_not_the_maximum() -> None:
    reference = np.ones(1000)
    found = reference.copy()
    found[0] = 2
    s = statistics(found, reference)
    assert s.max_abs == 1 and s.p99_abs == 0 and s.p99_rel == 0


def test_shapes_must_agree() -> None:
    with pytest.raises(ValueError, match="shape"):
        statistics(np.ones(2), np.ones(3))


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, np.int64])
def test_an_output_without_dimensions(dtype: type) -> None:
    found = statistics(np.array(3, dtype), np.array(5, dtype))
    assert (found.max_abs, found.worst, found.elements) == (2.0, {"index": [], "value": 3.0, "reference": 5.0}, 1)
    lost = statistics(np.array(1, dtype), np.array(np.inf))
    assert (lost.max_abs, lost.non_finite) == (np.inf, 1)
