"""Constant weights brought into the form that a kernel wants; computed when the model is written."""

from __future__ import annotations

import numpy as np

from onnxfuse.graph import consts
from onnxfuse.graph.ir import Constant, Deferred
from onnxfuse.graph.types import numpy_of
from onnxfuse.lower.emit import Emitter


def _numpy(value: Constant) -> np.dtype:
    dtype = consts.dtype_of(value)
    assert dtype is not None
    return numpy_of(dtype)


def columns(emitter: Emitter, weight: Constant, layout: str, start: int, stop: int) -> Constant:
    """Columns start…stop (of N) of a weight stored as `layout` says, in the same layout."""
    rows, cols = consts.shape_of(weight)
    shape = (stop - start, cols) if layout == "NK" else (rows, stop - start)

    def compute() -> np.ndarray:
        array = consts.array(weight)
        return array[start:stop] if layout == "NK" else array[:, start:stop]

    made = emitter.constant(f"{weight.name}_{start}_{stop}", Deferred(shape, _numpy(weight), compute))
    made.recipe = ("columns", (weight,), {"layout": layout, "start": start, "stop": stop})
    return made


def entries(emitter: Emitter, vector: Constant, start: int, stop: int) -> Constant:
    """Entries start…stop of a 1-D constant."""
    made = emitter.constant(
        f"{vector.name}_{start}_{stop}",
        Deferred((stop - start,), _numpy(vector), lambda: consts.array(vector)[start:stop]),
    )
    made.recipe = ("entries", (vector,), {"start": start, "stop": stop})
    return made


def transposed(emitter: Emitter, weight: Constant) -> Constant:
    """The transpose of a 2-D constant."""
    rows, cols = consts.shape_of(weight)
    made = emitter.constant(
        f"{weight.name}_t", Deferred((cols, rows), _numpy(weight), lambda: consts.array(weight).T)
    )
    made.recipe = ("transpose", (weight,), {})
    return made


def interleaved(emitter: Emitter, packed: Constant, width: int) -> Constant:
    """[gate | up] along the first axis, as alternating blocks of `width`: the `interleave` form of GatedLinear."""
    shape = consts.shape_of(packed)

    def compute() -> np.ndarray:
        array = consts.array(packed)
        halves = array.reshape(2, shape[0] // 2 // width, width, *shape[1:])
        return np.swapaxes(halves, 0, 1).reshape(shape)

    made = emitter.constant(f"{packed.name}_by{width}", Deferred(shape, _numpy(packed), compute))
    made.recipe = ("interleaved", (packed,), {"width": width})
    return made


def column_sums(emitter: Emitter, weight: Constant) -> Constant:
    """float32 sums over K of an NK weight as stored, which LayerNorm in the epilogue of a product needs."""
    n = consts.shape_of(weight)[0]

    def compute() -> np.ndarray:
        return consts.array(weight).astype(np.float64).sum(axis=1).astype(np.float32)

    made = emitter.constant(f"{weight.name}_colsum", Deferred((n,), np.dtype(np.float32), compute))
    made.recipe = ("column_sums", (weight,), {})
    return made
