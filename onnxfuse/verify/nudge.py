"""Move the last bits of a model's weights, to see how far its outputs go.

Where activations are rounded to int8, the smallest difference before may round to the next of 256 values, and with
the largest value of a tensor all of its steps change: a BERT whose weights moved by 2e-7 was seen to move by 3e-2. How
far a faithful rewrite may be from the original, only the original itself can tell.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx
from onnx import numpy_helper

from onnxfuse.runtime.oracle import FLOATS


def nudged(proto: onnx.ModelProto, seed: int) -> onnx.ModelProto:
    """A copy of the model with its float weights off by up to two units in their last place, at random.

    Scalars, tensors of whole numbers (positions, bounds) and values near the ends of the dtype (masks) stay.

    Args:
        proto: a model whose tensors are inside it.
        seed: of the random numbers.
    """
    result = onnx.ModelProto()
    result.CopyFrom(proto)
    rng = np.random.default_rng(seed)
    for tensor in result.graph.initializer:
        if tensor.data_type not in FLOATS or int(np.prod(tensor.dims)) < 2:
            continue
        values = numpy_helper.to_array(tensor)
        info = ml_dtypes.finfo(values.dtype)  # type: ignore[no-untyped-call]
        wide = values.astype(np.float64)
        moves = np.isfinite(wide) & (np.abs(wide) < float(info.max) / 2)
        if np.array_equal(wide[moves], np.round(wide[moves])):
            continue
        wide[moves] *= 1.0 + 2.0 * float(info.eps) * rng.uniform(-1.0, 1.0, int(moves.sum()))
        moved = np.where(moves, wide.astype(values.dtype), values).astype(values.dtype)
        tensor.CopyFrom(numpy_helper.from_array(moved, tensor.name))
    return result
