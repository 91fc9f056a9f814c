"""``onnxfuse::GatedLinear``: [g, u] = norm(x) · W + bias; y = activation(g) * u (SwiGLU, GeGLU, ReGLU)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from onnxfuse.ops import activations, norms
from onnxfuse.ops.body import BodyBuilder
from onnxfuse.ops.linear import PROLOGUE_ATTRIBUTES, check_vector, emit_product, weight_dims
from onnxfuse.ops.opdef import (
    FLOAT_DTYPES,
    FUSED_DOMAIN,
    AttrDef,
    Cost,
    Dim,
    InputDef,
    OpDef,
    TensorType,
    product,
    tensor_bytes,
)


def _infer(op: OpDef, inputs: Sequence[TensorType | None], attrs: Mapping[str, Any]) -> list[TensorType]:
    x = inputs[0]
    assert x is not None
    leading, _, columns = weight_dims(op, inputs, attrs)
    columns = check_vector(op, inputs, "bias", columns)
    columns = check_vector(op, inputs, "colsum", columns)
    features: Dim = None
    if isinstance(columns, int):
        if columns % 2:
            raise op.refuse(inputs, f"`weight` must have an even number of columns, not `{columns}`")
        features = columns // 2
        if attrs["interleave"] and features % attrs["interleave"]:
            raise op.refuse(inputs, f"`{features}` features are not divisible by interleave `{attrs['interleave']}`")
    return [TensorType(x.dtype, None if leading is None else (*leading, features))]


def unpack(packed: np.ndarray, interleave: int) -> tuple[np.ndarray, np.ndarray]:
    """(gate, up) from an array whose last axis is packed as the `interleave` attribute says."""
    features = packed.shape[-1] // 2
    if not interleave:
        return packed[..., :features], packed[..., features:]
    blocks = packed.reshape(*packed.shape[:-1], features // interleave, 2, interleave)
    shape = (*packed.shape[:-1], features)
    return blocks[..., 0, :].reshape(shape), blocks[..., 1, :].reshape(shape)


def _reference(inputs: Sequence[np.ndarray | None], attrs: Mapping[str, Any]) -> list[np.ndarray]:
    x, weight, bias, _ = inputs
    assert x is not None and weight is not None
    packed = norms.apply(attrs["norm"], x, attrs["epsilon"]) @ (weight if attrs["layout"] == "KN" else weight.T)
    if bias is not None:
        packed = packed + bias
    gate, up = unpack(packed, attrs["interleave"])
    return [activations.apply(attrs["activation"], gate) * up]


def _body(b: BodyBuilder, inputs: Sequence[str], outputs: Sequence[str], attrs: Mapping[str, Any]) -> None:
    x, weight, bias, _ = inputs
    packed = emit_product(b, x, weight, bias, attrs)
    n = attrs["interleave"]
    if not n:
        gate, up = b.split(packed, 2)
    else:
        # [.., 2F] -> [rows.., F/n, 2, n]; Reshape's 0 would copy an axis by position, so the leading dims are spelled.
        leading = b.slice(b.op("Shape", packed), 0, -1, 0)
        blocks = b.op("Reshape", packed, b.op("Concat", leading, b.ints(-1, 2, n), axis=0))
        pair = b.split(blocks, 2, axis=-2)
        flat = b.op("Concat", leading, b.ints(-1), axis=0)
        gate, up = (b.op("Reshape", half, flat) for half in pair)
    b.finish(b.op("Mul", activations.emit(b, attrs["activation"], gate), up), outputs[0])


def _cost(inputs: Sequence[TensorType | None], attrs: Mapping[str, Any]) -> Cost:
    x, weight = inputs[0], inputs[1]
    assert x is not None and x.shape is not None and weight is not None and weight.shape is not None
    sizes = [d for d in x.shape if isinstance(d, int)]
    rows, k = product(sizes[:-1]), sizes[-1]
    columns = next(d for d in (weight.shape[0 if attrs["layout"] == "NK" else 1],) if isinstance(d, int))
    flops = 2 * rows * k * columns + rows * k * norms.FLOPS_PER_ELEMENT[attrs["norm"]]
    flops += rows * columns * (inputs[2] is not None)
    flops += rows * columns // 2 * (activations.FLOPS_PER_ELEMENT[attrs["activation"]] + 1)
    return Cost(flops, sum(map(tensor_bytes, inputs)), tensor_bytes(TensorType(x.dtype, (rows, columns // 2))))


GATED_LINEAR = OpDef(
    name="GatedLinear",
    domain=FUSED_DOMAIN,
    summary="activation(gate) * up, both from one product norm(x) · W + bias",
    inputs=(
        InputDef("x"),
        InputDef("weight"),
        InputDef("bias", optional=True),
        InputDef("colsum", optional=True, same_as_t=False, dtypes=frozenset({"float32"})),
    ),
    outputs=("y",),
    attributes=(
        *PROLOGUE_ATTRIBUTES,
        AttrDef("activation", str, "silu", activations.ACTIVATIONS),
        AttrDef("interleave", int, 0, minimum=0),
    ),
    infer_fn=_infer,
    reference_fn=_reference,
    body_fn=_body,
    cost_fn=_cost,
    kernels={"cpu": FLOAT_DTYPES, "cuda": FLOAT_DTYPES},
)
