"""``onnxfuse.std``: `Gelu` (as ai.onnx opset 20), `Swish` (as opset 24) and `HardSwish` (as opset 14)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from onnxfuse.ops import activations
from onnxfuse.ops.body import BodyBuilder
from onnxfuse.ops.opdef import STD_DOMAIN, AttrDef, Cost, InputDef, OpDef, TensorType, product, tensor_bytes

_GELU_OF = {"none": "gelu", "tanh": "gelu_tanh"}
#: Two products, an addition, two bounds; no activation of the fused ops.
_HARD_SWISH_FLOPS = 5


def _same(op: OpDef, inputs: Sequence[TensorType | None], attrs: Mapping[str, Any]) -> list[TensorType]:
    assert inputs[0] is not None
    return [inputs[0]]


def _elementwise_cost(activation: str, inputs: Sequence[TensorType | None]) -> Cost:
    x = inputs[0]
    assert x is not None and x.shape is not None
    elements = product([d for d in x.shape if isinstance(d, int)])
    flops = _HARD_SWISH_FLOPS if activation == "hard_swish" else activations.FLOPS_PER_ELEMENT[activation]
    return Cost(elements * flops, tensor_bytes(x), tensor_bytes(x))


def _gelu_reference(inputs: Sequence[np.ndarray | None], attrs: Mapping[str, Any]) -> list[np.ndarray]:
    assert inputs[0] is not None
    return [activations.apply(_GELU_OF[attrs["approximate"]], inputs[0])]


def _gelu_body(b: BodyBuilder, inputs: Sequence[str], outputs: Sequence[str], attrs: Mapping[str, Any]) -> None:
    b.finish(activations.emit(b, _GELU_OF[attrs["approximate"]], inputs[0]), outputs[0])


def _swish_reference(inputs: Sequence[np.ndarray | None], attrs: Mapping[str, Any]) -> list[np.ndarray]:
    x = inputs[0]
    assert x is not None
    return [x * activations.sigmoid(x * x.dtype.type(attrs["alpha"]))]


def _swish_body(b: BodyBuilder, inputs: Sequence[str], outputs: Sequence[str], attrs: Mapping[str, Any]) -> None:
    x = inputs[0]
    inner = x if attrs["alpha"] == 1.0 else b.op("Mul", x, b.scalar(attrs["alpha"]))
    b.finish(b.op("Mul", x, b.op("Sigmoid", inner)), outputs[0])


def _hard_swish_reference(inputs: Sequence[np.ndarray | None], attrs: Mapping[str, Any]) -> list[np.ndarray]:
    x = inputs[0]
    assert x is not None
    return [x * np.clip(x / 6 + x.dtype.type(0.5), 0, 1)]


def _hard_swish_body(b: BodyBuilder, inputs: Sequence[str], outputs: Sequence[str], attrs: Mapping[str, Any]) -> None:
    b.finish(b.op("Mul", inputs[0], b.op("HardSigmoid", inputs[0], alpha=1 / 6, beta=0.5)), outputs[0])


GELU = OpDef(
    name="Gelu",
    domain=STD_DOMAIN,
    summary="x * Φ(x), exactly (by erf) or by the tanh approximation",
    inputs=(InputDef("x"),),
    outputs=("y",),
    attributes=(AttrDef("approximate", str, "none", ("none", "tanh")),),
    infer_fn=_same,
    reference_fn=_gelu_reference,
    body_fn=_gelu_body,
    cost_fn=lambda inputs, attrs: _elementwise_cost(_GELU_OF[attrs["approximate"]], inputs),
)

SWISH = OpDef(
    name="Swish",
    domain=STD_DOMAIN,
    summary="x * sigmoid(alpha * x): SiLU for alpha 1, QuickGELU for 1.702",
    inputs=(InputDef("x"),),
    outputs=("y",),
    attributes=(AttrDef("alpha", float, 1.0),),
    infer_fn=_same,
    reference_fn=_swish_reference,
    body_fn=_swish_body,
    cost_fn=lambda inputs, attrs: _elementwise_cost("silu", inputs),
)

HARD_SWISH = OpDef(
    name="HardSwish",
    domain=STD_DOMAIN,
    summary="x * clip(x / 6 + 1/2, 0, 1)",
    inputs=(InputDef("x"),),
    outputs=("y",),
    attributes=(),
    infer_fn=_same,
    reference_fn=_hard_swish_reference,
    body_fn=_hard_swish_body,
    cost_fn=lambda inputs, attrs: _elementwise_cost("hard_swish", inputs),
)
