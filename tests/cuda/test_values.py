"""Values that break careless kernels: overflowing rows, NaN and Inf, empty extents, wrong shapes."""

from __future__ import annotations

import numpy as np
import pytest
from onnxruntime.capi import onnxruntime_pybind11_state as states

from tests.cuda.gpu_case import LIMIT, GpuCase
from tests.ops.cases import relative_error

ROWS = (1, 16, 40, 130, 300)


@pytest.mark.parametrize("norm", ("rms", "layer"))
@pytest.mark.parametrize("rows", ROWS)
def test_rows_whose_squares_and_products_overflow_float16(norm: str, rows: int) -> None:
    case = GpuCase("Linear", "float16", 1024, 256, {"norm": norm}, scale=8000.0)
    inputs = case.inputs(rows)
    actual = case.session().run(None, case.feeds(inputs))[0]
    assert np.isfinite(actual).all()
    assert relative_error(actual, case.reference(inputs)) <= LIMIT["float16"]


@pytest.mark.parametrize("mean", (10.0, 50.0))
@pytest.mark.parametrize("rows", ROWS)
def test_layer_norm_of_rows_with_a_large_mean(mean: float, rows: int) -> None:
    case = GpuCase("Linear", "float16", 1024, 256, {"norm": "layer"}, mean=mean)
    inputs = case.inputs(rows)
    actual = case.session().run(None, case.feeds(inputs))[0]
    assert relative_error(actual, case.reference(inputs)) <= 2 * LIMIT["float16"]


@pytest.mark.parametrize("activation", ("none", "relu", "gelu", "gelu_tanh", "silu", "tanh"))
@pytest.mark.parametrize("rows", ROWS)
def test_nan_and_infinity_stay_in_their_rows(activation: str, rows: int) -> None:
    case = GpuCase("Linear", "float16", 128, 64, {"activation": activation})
    inputs = case.inputs(rows)
    x = inputs[0]
    assert x is not None
    clean = case.session().run(None, case.feeds(inputs))[0]
    x[0, 3] = np.nan
    if rows > 1:
        x[rows - 1, 5] = np.inf
    actual = case.session().run(None, case.feeds(inputs))[0]
    assert np.isnan(actual[0]).all()
    if rows > 2:
        np.testing.assert_array_equal(actual[1 : rows - 1], clean[1 : rows - 1])
    if rows > 1 and activation == "none":
        assert np.isinf(actual[rows - 1]).all()


@pytest.mark.parametrize("name", ("Linear", "GatedLinear"))
@pytest.mark.parametrize("norm", ("none", "rms", "layer"))
def test_empty_extents(name: str, norm: str) -> None:
    for k, n in ((0, 6), (16, 0)):
        case = GpuCase(name, "float16", k, n, {"norm": norm, "activation": "silu"}, residual=name == "Linear")
        inputs = case.inputs(3)
        actual = case.session().run(None, case.feeds(inputs))[0]
        np.testing.assert_allclose(actual, case.reference(inputs), rtol=2e-3, atol=1e-3)


def test_a_wrong_shape_is_an_error_that_names_it() -> None:
    case = GpuCase("Linear", "float16", 64, 32, {}, constant=False)
    inputs = case.inputs(4)
    feeds = case.feeds(inputs)
    feeds["weight"] = np.zeros((32, 72), np.float16)
    with pytest.raises((states.InvalidArgument, states.Fail), match=r"Linear|Got invalid dimensions"):
        case.session().run(None, feeds)


def test_same_bits_from_run_to_run() -> None:
    for rows in ROWS:
        case = GpuCase("Linear", "float16", 2048, 1024, {"norm": "rms", "activation": "gelu"})
        inputs = case.inputs(rows)
        session = case.session()
        first = session.run(None, case.feeds(inputs))[0]
        for _ in range(5):
            np.testing.assert_array_equal(session.run(None, case.feeds(inputs))[0], first)
