"""Last bits of weights move; what is no weight stays."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from onnx import helper, numpy_helper

from onnxfuse.verify.nudge import nudged


def holding(**tensors: np.ndarray) -> onnx.ModelProto:
    graph = helper.make_graph([], "g", [], [], [numpy_helper.from_array(v, n) for n, v in tensors.items()])
    return helper.make_model(graph)


def values(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    return {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, ml_dtypes.bfloat16])
def test_weights_move_by_a_unit_or_two(dtype: type) -> None:
    weight = np.random.default_rng(0).standard_normal((64, 8)).astype(dtype)
    model = holding(w=weight)
    moved = values(nudged(model, 1))["w"]
    apart = np.abs(moved.astype(np.float64) - weight.astype(np.float64)) / np.abs(weight.astype(np.float64))
    eps = float(ml_dtypes.finfo(dtype).eps)
    assert 0.5 * eps < apart.max() <= 2.6 * eps and (apart > 0).mean() > 0.3
    assert np.array_equal(values(model)["w"], weight)  # the model given is as it was
    assert np.array_equal(moved, values(nudged(model, 1))["w"])
    assert not np.array_equal(moved, values(nudged(model, 2))["w"])


def test_what_is_no_weight_stays() -> None:
    given = {
        "scalar": np.array(0.3, np.float32), "one": np.array([0.3], np.float32),
        "positions": np.arange(9, dtype=np.float32), "index": np.arange(9), "empty": np.zeros((0, 4), np.float32),
        "mask": np.array([np.finfo(np.float32).min, -np.inf, np.nan, 0.0], np.float32),
    }  # fmt: skip
    moved = values(nudged(holding(**given), 0))
    for name, value in given.items():
        assert np.array_equal(moved[name], value, equal_nan=value.dtype.kind == "f"), name


@settings(deadline=None, max_examples=50)
@given(arrays(np.float16, st.tuples(st.integers(2, 20)), elements=st.floats(width=16)), st.integers(0, 99))
def test_nothing_becomes_infinite(weight: np.ndarray, seed: int) -> None:
    moved = values(nudged(holding(w=weight), seed))["w"]
    assert np.array_equal(np.isfinite(moved), np.isfinite(weight))
    assert np.array_equal(moved[~np.isfinite(weight)], weight[~np.isfinite(weight)], equal_nan=True)
