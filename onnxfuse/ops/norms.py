"""The row norms: NumPy meaning and ONNX spelling, shared by the norm ops and by the prologues of the fused ops."""

from __future__ import annotations

import numpy as np

from onnxfuse.ops.body import BodyBuilder

NORMS = ("none", "rms", "layer")
FLOPS_PER_ELEMENT = {"none": 0, "rms": 3, "layer": 6}


def apply(norm: str, x: np.ndarray, epsilon: float, axes: tuple[int, ...] = (-1,)) -> np.ndarray:
    """x normalised over `axes`, without scale and shift; an empty row stays empty."""
    if norm == "none":
        return x
    count = 1
    for axis in axes:
        count *= x.shape[axis]
    if count == 0:
        return x
    if norm == "layer":
        x = x - np.mean(x, axis=axes, keepdims=True)
    mean_square = np.mean(x * x, axis=axes, keepdims=True)
    return x / np.sqrt(mean_square + x.dtype.type(epsilon))


def emit(b: BodyBuilder, norm: str, x: str, epsilon: float, axes: tuple[int, ...] = (-1,)) -> str:
    """The norm of a float32 value, in standard ONNX ops, as float32."""
    if norm == "none":
        return x
    if norm == "layer":
        x = b.op("Sub", x, b.reduce("ReduceMean", x, axes))
    mean_square = b.reduce("ReduceMean", b.op("Mul", x, x), axes)
    deviation = b.op("Sqrt", b.op("Add", mean_square, b.constant(epsilon, "float32")))
    return b.op("Div", x, deviation)
