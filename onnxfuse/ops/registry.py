"""The op registry: the one contract between the rewriter, the function bodies and the custom-op library."""

from __future__ import annotations

from onnx import NodeProto

from onnxfuse.errors import OpError
from onnxfuse.ops.gated_linear import GATED_LINEAR
from onnxfuse.ops.linear import LINEAR
from onnxfuse.ops.opdef import FUSED_DOMAIN, STD_DOMAIN, OpDef
from onnxfuse.ops.std_activations import GELU, HARD_SWISH, SWISH
from onnxfuse.ops.std_attention import ATTENTION
from onnxfuse.ops.std_norms import LAYER_NORMALIZATION, RMS_NORMALIZATION
from onnxfuse.ops.std_rotary_embedding import ROTARY_EMBEDDING

VERSION = 1
"""The version of both domains."""

OPS: tuple[OpDef, ...] = (
    LINEAR,
    GATED_LINEAR,
    RMS_NORMALIZATION,
    LAYER_NORMALIZATION,
    GELU,
    SWISH,
    HARD_SWISH,
    ROTARY_EMBEDDING,
    ATTENTION,
)
DOMAINS = (FUSED_DOMAIN, STD_DOMAIN)

_BY_KEY = {(op.domain, op.name): op for op in OPS}


def fused_ops() -> tuple[OpDef, ...]:
    """The ops of the `onnxfuse` domain: those with kernels."""
    return tuple(op for op in OPS if op.domain == FUSED_DOMAIN)


def find(domain: str, name: str) -> OpDef | None:
    """The op, or None if it is none of ours."""
    return _BY_KEY.get((domain, name))


def get(domain: str, name: str) -> OpDef:
    """The op; OpError if there is none of that name."""
    op = find(domain, name)
    if op is None:
        names = sorted(o.name for o in OPS if o.domain == domain)
        raise OpError(f"no op `{domain}::{name}`", hint=f"ops of this domain: {', '.join(names)}" if names else None)
    return op


def of_node(node: NodeProto) -> OpDef | None:
    """The op that a node of a graph calls, or None if it is none of ours."""
    return find(node.domain, node.op_type)
