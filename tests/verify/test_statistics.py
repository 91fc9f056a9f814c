import numpy as np
import pytest

from onnxfuse.verify.statistics import statistics


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, np.int64])
def test_an_output_without_dimensions_is_compared(dtype):
    found = statistics(np.array(3, dtype), np.array(5, dtype))
    assert (found.max_abs, found.worst, found.elements) == (2.0, {"index": [], "value": 3.0, "reference": 5.0}, 1)


def test_a_lost_infinity_counts_without_dimensions_too():
    found = statistics(np.array(1.0, np.float32), np.array(np.inf, np.float32))
    assert (found.max_abs, found.non_finite) == (np.inf, 1)


def test_nan_and_infinities_in_both_are_no_difference():
    both = np.array([np.nan, np.inf, -np.inf, 1.0], np.float32)
    found = statistics(both, both.copy())
    assert (found.max_abs, found.non_finite, found.cosine) == (0.0, 0, 1.0)


def test_shapes_must_agree():
    with pytest.raises(ValueError, match=r"shape \[2\] against \[3\]"):
        statistics(np.zeros(2), np.zeros(3))
