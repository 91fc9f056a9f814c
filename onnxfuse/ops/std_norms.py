"""``onnxfuse.std``: `RMSNormalization` (as ai.onnx opset 23) and `LayerNormalization` (as opset 17, output Y only)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from onnxfuse.ops import norms
from onnxfuse.ops.body import BodyBuilder
from onnxfuse.ops.opdef import (
    STD_DOMAIN,
    AttrDef,
    Cost,
    InputDef,
    OpDef,
    TensorType,
    product,
    tensor_bytes,
    unify,
)

_ATTRIBUTES = (
    AttrDef("axis", int, -1),
    AttrDef("epsilon", float, 1e-5, minimum=0.0),
    AttrDef("stash_type", int, 1, choices=(1,)),
)


def _infer(op: OpDef, inputs: Sequence[TensorType | None], attrs: Mapping[str, Any]) -> list[TensorType]:
    x, scale = inputs[0], inputs[1]
    assert x is not None and scale is not None
    if x.shape is not None:
        rank, axis = len(x.shape), attrs["axis"]
        if not -rank <= axis < rank:
            raise op.refuse(inputs, f"axis `{axis}` is outside of the rank of `x`")
        normalized = x.shape[axis:]
        for name in ("scale", "bias")[: len(op.inputs) - 1]:
            vector = inputs[op.input_index(name)]
            if vector is None or vector.shape is None:
                continue
            aligned = normalized[len(normalized) - len(vector.shape) :]
            if len(vector.shape) > len(normalized) or not all(
                v == 1 or unify(n, v)[0] for n, v in zip(aligned, vector.shape, strict=True)
            ):
                raise op.refuse(inputs, f"`{name}` does not broadcast to the normalized dims of `x`")
    return [TensorType(scale.dtype, x.shape)]


def _apply(norm: str, inputs: Sequence[np.ndarray | None], attrs: Mapping[str, Any]) -> list[np.ndarray]:
    x, scale = inputs[0], inputs[1]
    assert x is not None and scale is not None
    y = norms.apply(norm, x, attrs["epsilon"], tuple(range(attrs["axis"] % x.ndim, x.ndim))) * scale
    bias = inputs[2] if len(inputs) > 2 else None
    return [y if bias is None else y + bias]


def _emit(norm: str, b: BodyBuilder, inputs: Sequence[str], outputs: Sequence[str], attrs: Mapping[str, Any]) -> None:
    x, scale = inputs[0], inputs[1]
    axis = attrs["axis"]
    wide = b.cast(x, "float32")
    if axis < 0:
        normed = norms.emit(b, norm, wide, attrs["epsilon"], tuple(range(axis, 0)))
    else:
        # The rank is not known here, so the normalized dims are flattened into one.
        flat = norms.emit(b, norm, b.op("Flatten", wide, axis=axis), attrs["epsilon"])
        normed = b.op("Reshape", flat, b.op("Shape", x))
    y = b.op("Mul", b.cast(normed, b.input_dtype(1), "float32"), scale)
    bias = inputs[2] if len(inputs) > 2 else ""
    b.finish(b.op("Add", y, bias) if bias else y, outputs[0])


def _cost(norm: str, inputs: Sequence[TensorType | None]) -> Cost:
    x, scale = inputs[0], inputs[1]
    assert x is not None and x.shape is not None and scale is not None
    elements = product([d for d in x.shape if isinstance(d, int)])
    flops = elements * (norms.FLOPS_PER_ELEMENT[norm] + sum(i is not None for i in inputs[1:]))
    return Cost(flops, sum(map(tensor_bytes, inputs)), tensor_bytes(TensorType(scale.dtype, x.shape)))


RMS_NORMALIZATION = OpDef(
    name="RMSNormalization",
    domain=STD_DOMAIN,
    summary="x / sqrt(mean(x²) + epsilon) * scale over the dims from axis on; the output has the dtype of scale",
    inputs=(InputDef("x"), InputDef("scale", same_as_t=False)),
    outputs=("y",),
    attributes=_ATTRIBUTES,
    infer_fn=_infer,
    reference_fn=lambda inputs, attrs: _apply("rms", inputs, attrs),
    body_fn=lambda b, inputs, outputs, attrs: _emit("rms", b, inputs, outputs, attrs),
    cost_fn=lambda inputs, attrs: _cost("rms", inputs),
)

LAYER_NORMALIZATION = OpDef(
    name="LayerNormalization",
    domain=STD_DOMAIN,
    summary="(x - mean) / sqrt(var + epsilon) * scale + bias over the dims from axis on",
    inputs=(InputDef("x"), InputDef("scale"), InputDef("bias", optional=True)),
    outputs=("y",),
    attributes=_ATTRIBUTES,
    infer_fn=_infer,
    reference_fn=lambda inputs, attrs: _apply("layer", inputs, attrs),
    body_fn=lambda b, inputs, outputs, attrs: _emit("layer", b, inputs, outputs, attrs),
    cost_fn=lambda inputs, attrs: _cost("layer", inputs),
)
