"""Which ops exist, and their attributes and parameters, over all opsets."""

from __future__ import annotations

from functools import lru_cache

import onnx

from onnxfuse.ops import registry

#: Contrib ops of ONNX Runtime that rules may name; their schemas are not in the onnx package.
CONTRIB = frozenset(
    [
        "Attention",
        "BiasAdd",
        "BiasGelu",
        "BiasSoftmax",
        "BiasSplitGelu",
        "DecoderMaskedMultiHeadAttention",
        "EmbedLayerNormalization",
        "FastGelu",
        "FusedConv",
        "FusedGemm",
        "FusedMatMul",
        "Gelu",
        "GemmFastGelu",
        "GemmFloat8",
        "GroupNorm",
        "GroupQueryAttention",
        "MatMulNBits",
        "MultiHeadAttention",
        "NGramRepeatBlock",
        "PackedAttention",
        "PackedMultiHeadAttention",
        "QuickGelu",
        "RelativePositionBias",
        "RotaryEmbedding",
        "SimplifiedLayerNormalization",
        "SkipGroupNorm",
        "SkipLayerNormalization",
        "SkipSimplifiedLayerNormalization",
        "TransposeMatMul",
        "GatherBlockQuantized",
        "MoE",
        "QMoE",
        "PagedAttention",
        "SparseAttention",
        "DynamicQuantizeMatMul",
        "MatMulIntegerToFloat",
        "QAttention",
        "CausalConvWithState",
    ]
)
#: Ops that ONNX Runtime has in ONNX's own domain.
_RUNTIME_ONLY = frozenset({"SimplifiedLayerNormalization"})


@lru_cache(maxsize=1)
def _schemas() -> dict[tuple[str, str], set[str]]:
    found: dict[tuple[str, str], set[str]] = {}
    for schema in onnx.defs.get_all_schemas_with_history():
        names = found.setdefault((schema.domain, schema.name), set())
        names.update(schema.attributes)
        names.update(formal.name for formal in schema.inputs)
    return found


def is_known(domain: str, op: str) -> bool:
    """Whether the op exists: in ONNX at any opset, in our registry, or among ONNX Runtime's contrib ops."""
    if domain in registry.DOMAINS:
        return registry.find(domain, op) is not None
    if domain == "com.microsoft":
        return op in CONTRIB
    if domain == "" and op in _RUNTIME_ONLY:
        return True
    return (domain, op) in _schemas()


def attributes_of(domain: str, op: str) -> set[str] | None:
    """Names of attributes and of parameters given as inputs; None if they are not known."""
    own = registry.find(domain, op)
    if own is not None:
        return {a.name for a in own.attributes} | {i.name for i in own.inputs}
    return _schemas().get((domain, op))
