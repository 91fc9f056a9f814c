"""Buffers that stay from step to step."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx
import onnx.parser
import pytest

from onnxfuse.errors import ModelError
from onnxfuse.runtime.in_place import InPlaceRunner
from onnxfuse.runtime.session import Runner

pytest.importorskip("onnxruntime")
CACHES = [("past_a", "present_a"), ("past_b", "present_b")]
SHAPES = {"past_a": (1, 1, 3, 2), "past_b": (1, 1, 3, 2)}


def adder(dtype: str = "float") -> onnx.ModelProto:
    """Adds x to one cache and takes it from the other; outputs stand between the caches, as exporters may have them."""
    return onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["": 18]>
        g ({dtype}[b, h, n, d] past_a, {dtype} x, {dtype}[b, h, n, d] past_b)
            => ({dtype} first, {dtype}[b, h, n, d] present_a, {dtype} second, {dtype}[b, h, n, d] present_b) {{
            present_a = Add (past_a, x)
            present_b = Sub (past_b, x)
            first = Identity (x)
            second = ReduceMax <keepdims = 0> (present_a)
        }}""")


def test_each_step_goes_on_from_the_last() -> None:
    runner = InPlaceRunner(Runner(adder()), CACHES, SHAPES)
    for number, total in ((1.0, 1.0), (2.5, 3.5), (-1.0, 2.5)):
        made = runner.run({"x": np.array(number, np.float32), "unknown": np.zeros(1)})
        assert list(made) == ["first", "second"]
        assert made["first"] == number and made["second"] == total
        assert np.array_equal(runner.cache("past_a"), np.full((1, 1, 3, 2), total, np.float32))
        assert np.array_equal(runner.cache("past_b"), np.full((1, 1, 3, 2), -total, np.float32))


def test_what_was_read_from_a_buffer_does_not_change_later() -> None:
    runner = InPlaceRunner(Runner(adder()), CACHES, SHAPES)
    runner.run({"x": np.array(1, np.float32)})
    kept = runner.cache("past_a")
    runner.run({"x": np.array(1, np.float32)})
    assert (kept == 1).all() and (runner.cache("past_a") == 2).all()


def test_a_cache_that_is_given_is_not_taken() -> None:
    """The buffer is bound, whatever the feeds hold."""
    runner = InPlaceRunner(Runner(adder()), CACHES, SHAPES)
    made = runner.run({"x": np.array(1, np.float32), "past_a": np.full((1, 1, 3, 2), 9, np.float32)})
    assert made["second"] == 1


def test_dtypes() -> None:
    half = InPlaceRunner(Runner(adder("float16")), CACHES, SHAPES)
    half.run({"x": np.array(3, np.float16)})
    assert half.cache("past_b").dtype == np.float16 and (half.cache("past_b") == -3).all()
    with pytest.raises(ModelError, match=r"`past_a` is of type `tensor\(int64\)`"):
        InPlaceRunner(Runner(adder("int64")), CACHES, SHAPES)
    with pytest.raises(ModelError, match="`other` is of type `None`"):
        InPlaceRunner(Runner(adder()), [("other", "present_a")], {"other": (1, 1, 1, 1)})


def test_bfloat16() -> None:
    identity = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 18]>
        g (bfloat16[1, 1, 1, 2] past, bfloat16[1, 1, 1, 2] x) => (bfloat16[1, 1, 1, 2] present, bfloat16[1, 1, 1, 2] y)
        { present = Identity (x)  y = Identity (past) }""")
    runner = InPlaceRunner(Runner(identity), [("past", "present")], {"past": (1, 1, 1, 2)})
    x = np.array([[[[1.5, 2]]]], ml_dtypes.bfloat16)
    runner.run({"x": x})
    assert runner.cache("past").dtype == ml_dtypes.bfloat16 and np.array_equal(runner.cache("past"), x)


def test_scalars_stay_scalars() -> None:
    rank = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 18]>
        g (float[1, 1, 1, 1] past, int32 x, bfloat16 b) => (float[1, 1, 1, 1] present, int64[k] shape, int64[l] other)
        { present = Identity (past)  shape = Shape (x)  other = Shape (b) }""")
    runner = InPlaceRunner(Runner(rank), [("past", "present")], {"past": (1, 1, 1, 1)})
    made = runner.run({"x": np.array(3, np.int32), "b": np.array(3, ml_dtypes.bfloat16)})
    assert made["shape"].tolist() == [] and made["other"].tolist() == []


def test_what_onnxruntime_refuses_is_a_model_error() -> None:
    runner = InPlaceRunner(Runner(adder()), CACHES, SHAPES)
    with pytest.raises(ModelError, match="ONNX Runtime failed"):
        runner.run({"x": np.zeros((7, 5), np.float32)})
