"""The activations of the fused ops: NumPy meaning, ONNX spelling, and cost per element."""

from __future__ import annotations

import math

import numpy as np

from onnxfuse.ops.body import BodyBuilder
from onnxfuse.ops.opdef import HALF_DTYPES

ACTIVATIONS = ("none", "relu", "gelu", "gelu_tanh", "quick_gelu", "silu", "tanh")
FLOPS_PER_ELEMENT = {"none": 0, "relu": 1, "gelu": 12, "gelu_tanh": 14, "quick_gelu": 8, "silu": 7, "tanh": 8}

_ERF = np.frompyfunc(math.erf, 1, 1)
_SQRT_2_OVER_PI = math.sqrt(2.0 / math.pi)


def sigmoid(x: np.ndarray) -> np.ndarray:
    """1 / (1 + exp(-x)) without overflow; NaN stays NaN."""
    e = np.exp(-np.abs(x))
    return np.where(x >= 0, 1 / (1 + e), e / (1 + e)).astype(x.dtype)


def _times_gate(x: np.ndarray, gate: np.ndarray) -> np.ndarray:
    # x * 0 at x = -inf is NaN, as it is in the unfused graph.
    return x * gate


def apply(name: str, x: np.ndarray) -> np.ndarray:
    """The activation `name` of a float array, in the array's own precision."""
    if name == "none":
        return x
    if name == "relu":
        return np.maximum(x, x.dtype.type(0))  # np.maximum keeps NaN
    if name == "gelu":
        return x * (0.5 * (1 + np.asarray(_ERF(x.astype(np.float64) / math.sqrt(2.0)), np.float64))).astype(x.dtype)
    if name == "gelu_tanh":
        return x * (0.5 * (1 + np.tanh(_SQRT_2_OVER_PI * (x + 0.044715 * x * x * x)))).astype(x.dtype)
    if name == "quick_gelu":
        return _times_gate(x, sigmoid(1.702 * x))
    if name == "silu":
        return _times_gate(x, sigmoid(x))
    if name == "tanh":
        return np.tanh(x)
    raise ValueError(name)


def emit(b: BodyBuilder, name: str, x: str) -> str:
    """The activation in standard ONNX ops.

    The GELU forms cancel (1 + erf(x) near -1), so for half dtypes they are computed in float32.
    """
    if name == "none":
        return x
    if name == "relu":
        return b.op("Relu", x)
    if name == "tanh":
        return b.op("Tanh", x)
    if name in ("silu", "quick_gelu"):
        inner = x if name == "silu" else b.op("Mul", x, b.scalar(1.702))
        return b.op("Mul", x, b.op("Sigmoid", inner))
    wide = b.cast(x, "float32") if b.dtype in HALF_DTYPES else x
    half, one = b.constant(0.5, "float32"), b.constant(1.0, "float32")
    if name == "gelu":
        inner = b.op("Erf", b.op("Div", wide, b.constant(math.sqrt(2.0), "float32")))
    else:
        cube = b.op("Mul", wide, b.op("Mul", wide, wide))
        poly = b.op("Add", wide, b.op("Mul", cube, b.constant(0.044715, "float32")))
        inner = b.op("Tanh", b.op("Mul", poly, b.constant(_SQRT_2_OVER_PI, "float32")))
    y = b.op("Mul", b.op("Mul", wide, b.op("Add", inner, one)), half)
    return b.cast(y, b.dtype, "float32")
