"""Factors folded into weights: what float16, float32 and bfloat16 can hold afterwards."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from onnxfuse.graph.ir import Constant, Variable
from onnxfuse.match import predicates_weights
from onnxfuse.match.predicates import REGISTRY, Refused

RNG = np.random.default_rng(0)
WEIGHT = (0.02 * RNG.standard_normal((256, 8))).astype(np.float16)


def constant(content: object, dtype: object = np.float16) -> Constant:
    return Constant("c", np.asarray(content).astype(dtype))


def fits(weight: np.ndarray, factor: object, divided: int = 0, bias: object = None, layout: str = "KN") -> bool:
    given = None if bias is None else constant(bias, weight.dtype)
    outcome = REGISTRY["fits_scaled"](
        None, Constant("w", weight), constant(factor, weight.dtype), divided, given, layout
    )
    return not isinstance(outcome, Refused)


def fits_rows(weight: np.ndarray, factor: object, layout: str = "KN") -> bool:
    outcome = REGISTRY["fits_scaled_rows"](None, Constant("w", weight), constant(factor, weight.dtype), 0, layout)
    return not isinstance(outcome, Refused)


def test_ordinary_factors_fit() -> None:
    assert fits(WEIGHT, 0.22)
    assert fits(WEIGHT, 8.0, divided=1, bias=np.ones(8))
    assert fits(WEIGHT, RNG.uniform(0.1, 3, 8))
    assert fits_rows(WEIGHT, RNG.uniform(0.1, 3, 256))
    assert fits(np.ascontiguousarray(WEIGHT.T), RNG.uniform(0.1, 3, 8), layout="NK")


def test_a_column_that_becomes_subnormal_does_not_fit() -> None:
    assert not fits(WEIGHT, 1e-3)
    assert not fits(WEIGHT, [1, 1, 1, 1, 1, 1, 1, 1e-3])
    assert not fits_rows(WEIGHT, np.full(256, 1e-3))
    assert not fits(WEIGHT, 1e4, divided=1)


def test_the_error_of_what_is_refused_is_larger_and_of_what_is_accepted_is_not() -> None:
    x = RNG.standard_normal((64, 256))
    exact = WEIGHT.astype(np.float64)

    def error(factor: float) -> float:
        folded = (exact * factor).astype(np.float16).astype(np.float64)
        return float(np.abs(x @ folded - x @ exact * factor).max() / np.abs(x @ exact * factor).max())

    assert fits(WEIGHT, 0.01) and error(float(np.float16(0.01))) < 2**-11
    assert not fits(WEIGHT, 1e-4) and error(float(np.float16(1e-4))) > 2**-11


def test_a_column_of_zeros_fits_and_a_few_small_rows_do_not_matter() -> None:
    weight = WEIGHT.copy()
    weight[:, 3] = 0
    weight[:200] = 0  # what is read first says nothing: all rows are
    assert fits(weight, 0.22)
    assert fits(WEIGHT, [0, 1, 1, 1, 1, 1, 1, 1])


def test_overflow_does_not_fit() -> None:
    weight = np.full((4, 2), 300, np.float16)
    assert fits(weight, 200.0) and not fits(weight, 300.0)
    assert fits(weight, [200.0, 1.0]) and not fits(weight, [1.0, 300.0])
    assert not fits(weight, 2.0, bias=[1.0, 40000.0])
    assert not fits(weight, 0.0, divided=1)
    assert not fits(weight, np.inf)
    assert fits_rows(weight, [1, 1, 1, 200]) and not fits_rows(weight, [1, 1, 1, 300])


def test_rows_that_are_large_and_small_where_it_does_not_meet() -> None:
    """The bound of the largest weight times the largest factor is above the limit, no single product is."""
    weight = np.asarray([[6e4, 1], [1, 1]], np.float16)
    assert fits_rows(weight, [1.0, 100.0])
    assert not fits_rows(weight, [100.0, 1.0])


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_wide_exponents(dtype: type) -> None:
    weight = np.full((4, 2), 0.02, dtype)
    assert fits(weight, 1e-5) and fits(weight, 1e5)
    assert not fits(weight, 1e-37) and fits(weight, 1e37)
    assert not fits(np.full((4, 2), 100, dtype), 1e37)


def test_what_is_no_constant_is_refused() -> None:
    outcome = REGISTRY["fits_scaled"](None, Variable("w"), constant(1.0), 0)
    assert isinstance(outcome, Refused)


@pytest.mark.parametrize(
    ("shape", "goal", "holds"),
    [((), (2, 3, 4), True), ((1, 1), (2, 3, 4), True), ((4,), (2, 3, 4), True), ((1, 1, 4), (2, 3, 4), True),
     ((3, 1), (2, 3, 4), False), ((3, 4), (2, 3, 4), False), ((1,), (2, 3, 1), True), ((4, 1), (4, 4), False)],
)  # fmt: skip
def test_number_or_row(shape: tuple[int, ...], goal: tuple[int, ...], holds: bool) -> None:
    value = Variable("y", np.float32, list(goal))
    outcome = REGISTRY["number_or_row"](None, constant(np.ones(shape)), value)
    assert (not isinstance(outcome, Refused)) is holds


def outcome(name: str, *arguments: object) -> dict[str, float] | None:
    found = REGISTRY[name](None, *arguments)
    return None if isinstance(found, Refused) else found


def test_a_multiple_of_the_mean() -> None:
    x = RNG.standard_normal(16)
    for factor, divisor, summed in ((16, 15, 0), (1, 1, 1), (0.5, 4, 1), (1, 1, 0)):
        found = outcome("multiple_of_mean", factor, divisor, summed, 16, 1e-3)
        assert found is not None
        total = (x * x).sum() if summed else (x * x).mean()
        wanted = x / np.sqrt(factor * total / divisor + 1e-3)
        np.testing.assert_allclose(found["gain"] * x / np.sqrt((x * x).mean() + found["epsilon"]), wanted, rtol=1e-12)
    for refused in ((1, 0, 0, 16, 0), (-1, 1, 0, 16, 0), (0, 1, 0, 16, 0), (1, 1, 0, "B", 0), (1, 1, 0, 0, 0)):
        assert outcome("multiple_of_mean", *refused) is None


@pytest.mark.parametrize("length", [0.0, 1e-8, 1.0, 1e8])
def test_a_clamped_length(length: float) -> None:
    found = outcome("length_as_mean", 1e-12, 16)
    assert found is not None
    x = RNG.standard_normal(16)
    x *= length / np.linalg.norm(x)
    wanted = x / max(np.linalg.norm(x), 1e-12)
    np.testing.assert_allclose(found["gain"] * x / np.sqrt((x * x).mean() + found["epsilon"]), wanted, rtol=1e-7)


def test_lengths_that_a_vector_could_have_are_refused() -> None:
    assert outcome("length_as_mean", 0.0, 16) == {"gain": 0.25, "epsilon": 0.0}
    for least, dim in ((1e-6, 16), (-1.0, 16), (1e-30, 16), (1e-12, "B"), (1e-12, 0)):
        assert outcome("length_as_mean", least, dim) is None


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
def test_the_largest_absolute_value(dtype: type) -> None:
    matrix = RNG.standard_normal((5, 7)).astype(dtype)
    matrix[2, 3] = -9
    for given in (matrix, matrix.T, matrix[:, ::2], np.zeros((2, 2), dtype)):
        assert predicates_weights._magnitude(given) == np.abs(given.astype(np.float64)).max()
