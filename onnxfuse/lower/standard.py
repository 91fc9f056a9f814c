"""The lifted norms and activations (`onnxfuse.std`) as the target's own kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from onnxfuse.graph import view
from onnxfuse.graph.ir import Node, Value
from onnxfuse.lower.attention import lower_attention
from onnxfuse.lower.emit import Emitter, dtype_of, operand, rank_of, shape_of
from onnxfuse.lower.kernels import MICROSOFT, KernelTable
from onnxfuse.lower.rotary import lower_rotary
from onnxfuse.ops import registry
from onnxfuse.ops.opdef import STD_DOMAIN

#: ONNX Runtime's QuickGelu is x * sigmoid(alpha * x) for any alpha.
_QUICK_GELU_ALPHA = 1.702


def lower_node(emitter: Emitter, kernels: KernelTable, node: Node) -> bool:
    """Replace a node of `onnxfuse.std` by one kernel of the target, or by a kernel for float32 between two Casts.

    Returns whether there was one; if not, the node is untouched.
    """
    lowering = _LOWERINGS.get(node.op)
    return lowering is not None and lowering(emitter, kernels, node)


def _attrs(node: Node) -> dict[str, Any]:
    return registry.get(STD_DOMAIN, node.op).resolve(dict(node.attrs))


def _layer_norm(emitter: Emitter, kernels: KernelTable, node: Node) -> bool:
    attrs = _attrs(node)
    x = node.inputs[0]
    if not kernels.has("LayerNormalization", dtype_of(x), opset=emitter.opset, rank=rank_of(x)):
        return False
    if not _vectors_fit(node, attrs["axis"]):
        return False
    return _emit_norm(emitter, node, "LayerNormalization", attrs)


def _rms_norm(emitter: Emitter, kernels: KernelTable, node: Node) -> bool:
    attrs = _attrs(node)
    x = node.inputs[0]
    dtype = dtype_of(x)
    if dtype_of(node.inputs[1]) != dtype or not _vectors_fit(node, attrs["axis"]):
        return False
    for op in ("RMSNormalization", "SimplifiedLayerNormalization"):
        if kernels.has(op, dtype, opset=emitter.opset, rank=rank_of(x)):
            return _emit_norm(emitter, node, op, attrs)
    return False


def _vectors_fit(node: Node, axis: int) -> bool:
    """The kernels want scale and bias with exactly the normalized dims."""
    x = shape_of(node.inputs[0])
    if x is None:
        return False
    return all(shape_of(v) == x[axis:] for v in (operand(node, 1), operand(node, 2)) if v is not None)


def _emit_norm(emitter: Emitter, node: Node, op: str, attrs: dict[str, Any]) -> bool:
    inputs, outputs = emitter.replace(node)
    emitter.op(op, inputs, attrs={"axis": attrs["axis"], "epsilon": attrs["epsilon"]}, out=outputs[0])
    return True


def _gelu(emitter: Emitter, kernels: KernelTable, node: Node) -> bool:
    kernel = gelu_kernel(emitter, kernels, dtype_of(node.inputs[0]), _attrs(node)["approximate"])
    if kernel is not None:
        return _emit_elementwise(emitter, node, *kernel)
    wide = gelu_kernel(emitter, kernels, "float32", _attrs(node)["approximate"])
    return wide is not None and _emit_through_float32(emitter, kernels, node, *wide)


def gelu_kernel(
    emitter: Emitter, kernels: KernelTable, dtype: str | None, approximate: str
) -> tuple[str, str, dict[str, Any]] | None:
    """(domain, op, attributes) of a kernel for GELU alone."""
    if kernels.has("Gelu", dtype, opset=emitter.opset):
        return "", "Gelu", {"approximate": approximate}
    op = "Gelu" if approximate == "none" else "FastGelu"
    return (MICROSOFT, op, {}) if kernels.has(op, dtype, opset=emitter.opset, domain=MICROSOFT) else None


def _swish(emitter: Emitter, kernels: KernelTable, node: Node) -> bool:
    alpha = _attrs(node)["alpha"]
    dtype = dtype_of(node.inputs[0])
    if kernels.has("Swish", dtype, opset=emitter.opset):
        return _emit_elementwise(emitter, node, "", "Swish", {"alpha": alpha})
    if kernels.has("QuickGelu", dtype, opset=emitter.opset, domain=MICROSOFT):
        return _emit_elementwise(emitter, node, MICROSOFT, "QuickGelu", {"alpha": alpha})
    if kernels.has("QuickGelu", "float32", opset=emitter.opset, domain=MICROSOFT):
        return _emit_through_float32(emitter, kernels, node, MICROSOFT, "QuickGelu", {"alpha": alpha})
    return False


def _hard_swish(emitter: Emitter, kernels: KernelTable, node: Node) -> bool:
    if not kernels.has("HardSwish", dtype_of(node.inputs[0]), opset=emitter.opset):
        return False
    return _emit_elementwise(emitter, node, "", "HardSwish", {})


def _emit_elementwise(emitter: Emitter, node: Node, domain: str, op: str, attrs: dict[str, Any]) -> bool:
    inputs, outputs = emitter.replace(node)
    emitter.op(op, inputs, domain=domain, attrs=attrs, out=outputs[0])
    return True


def _emit_through_float32(
    emitter: Emitter, kernels: KernelTable, node: Node, domain: str, op: str, attrs: dict[str, Any]
) -> bool:
    dtype = dtype_of(node.inputs[0])
    # Only where the target computes a half type in float32 anyway; elsewhere the standard ops are what it has.
    if dtype != "float16" or kernels.target.provider != "cpu":
        return False
    inputs, outputs = emitter.replace(node)
    wide = emitter.op("Cast", inputs, attrs={"to": 1}, dtype="float32")
    emitter.op("Cast", [emitter.op(op, [wide], domain=domain, attrs=attrs)], attrs={"to": 10}, out=outputs[0])
    return True


_LOWERINGS: dict[str, Callable[[Emitter, KernelTable, Node], bool]] = {
    "LayerNormalization": _layer_norm,
    "RMSNormalization": _rms_norm,
    "Gelu": _gelu,
    "Swish": _swish,
    "HardSwish": _hard_swish,
    "Attention": lower_attention,
    "RotaryEmbedding": lower_rotary,
}


def bias_activation_kernel(
    emitter: Emitter, kernels: KernelTable, dtype: str | None, activation: str
) -> tuple[str, str] | None:
    """(domain, op) of a kernel for activation(x + bias), if the target has one."""
    op = {"gelu": "BiasGelu", "gelu_tanh": "FastGelu"}.get(activation)
    if op is None or not kernels.has(op, dtype, opset=emitter.opset, domain=MICROSOFT):
        return None
    return MICROSOFT, op


def emit_activation(emitter: Emitter, activation: str, x: Value, out: Value | None) -> Value:
    """An activation of the fused ops as a lifted op (or a plain ONNX one), to be lowered like any other."""
    if activation in ("relu", "tanh"):
        return emitter.op(activation.capitalize(), [x], out=out)
    lifted: dict[str, tuple[str, dict[str, Any]]] = {
        "gelu": ("Gelu", {"approximate": "none"}),
        "gelu_tanh": ("Gelu", {"approximate": "tanh"}),
        "silu": ("Swish", {"alpha": 1.0}),
        "quick_gelu": ("Swish", {"alpha": _QUICK_GELU_ALPHA}),
    }
    op, attrs = lifted[activation]
    return emitter.op(op, [x], domain=STD_DOMAIN, attrs=attrs, out=out)


def is_layer_norm(node: Node) -> bool:
    """Whether the node begins with a layer normalization of its first input."""
    if node.op == "LayerNormalization":
        return True
    return view.domain(node) == "onnxfuse" and node.attrs.get("norm") == "layer"
