"""Output types of ONNX Runtime's own ops, for which ONNX has no inference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from onnxfuse.ops.opdef import Dim, TensorType

_SAME_AS_FIRST = frozenset({
    "SimplifiedLayerNormalization", "LayerNormalization", "FastGelu", "BiasGelu", "QuickGelu", "Gelu",
    "RotaryEmbedding", "BiasAdd", "GroupNorm", "BiasSplitGelu", "Silu",
})  # fmt: skip


def contrib_types(
    op: str, inputs: Sequence[TensorType | None], attrs: Mapping[str, Any], outputs: int, tokens: int | None = None
) -> list[TensorType]:
    """Types of the outputs; unknown for ops that are not listed here. `tokens` is the total_sequence_length of
    GroupQueryAttention, cached tokens and new ones, where it is known."""
    first = inputs[0] if inputs and inputs[0] is not None else TensorType()
    result = [TensorType() for _ in range(outputs)]
    if op in _SAME_AS_FIRST:
        result[0] = first
    elif op in ("SkipLayerNormalization", "SkipSimplifiedLayerNormalization"):
        result[0] = first
        if outputs > 3:
            result[3] = first
    elif op in ("FusedMatMul", "MatMulNBits") and first.shape is not None:
        result[0] = TensorType(first.dtype, _product_shape(op, first.shape, inputs[1], attrs))
    elif op in ("MultiHeadAttention", "GroupQueryAttention", "Attention") and first.shape is not None:
        _attention_types(op, inputs, attrs, result, tokens)
    return result


def _product_shape(
    op: str, a: tuple[Dim, ...], b: TensorType | None, attrs: Mapping[str, Any]
) -> tuple[Dim, ...] | None:
    if op == "MatMulNBits":
        return (*a[:-1], int(attrs["N"]))
    if b is None or b.shape is None or len(a) < 2 or len(b.shape) < 2:
        return None
    rows = a[-1] if attrs.get("transA") else a[-2]
    columns = b.shape[-2] if attrs.get("transB") else b.shape[-1]
    batch = a[:-2] if len(a) >= len(b.shape) else b.shape[:-2]
    return (*batch, rows, columns)


def _attention_types(
    op: str, inputs: Sequence[TensorType | None], attrs: Mapping[str, Any], result: list[TensorType],
    tokens: int | None,
) -> None:
    query = inputs[0]
    assert query is not None and query.shape is not None
    batch, length = query.shape[0], query.shape[1]
    key = inputs[1] if len(inputs) > 1 else None
    heads = int(attrs.get("num_heads", 0))
    if op == "Attention":
        packed = key.shape[1] if key is not None and key.shape is not None else None
        result[0] = TensorType(query.dtype, (batch, length, packed // 3 if isinstance(packed, int) else None))
        return
    if op == "MultiHeadAttention":
        _multi_head_types(inputs, heads, result)
        return
    key_heads = int(attrs.get("kv_num_heads", heads))
    if key is None:  # packed: query holds all heads of Q, K and V
        head = query.shape[-1] // (heads + 2 * key_heads) if isinstance(query.shape[-1], int) else None
    else:
        head = query.shape[-1] // heads if isinstance(query.shape[-1], int) and heads else None
    result[0] = TensorType(query.dtype, (batch, length, None if head is None else heads * head))
    past = inputs[3] if len(inputs) > 3 else None
    if len(result) > 2 and past is not None and past.shape is not None and len(past.shape) == 4:
        old = past.shape[2]
        total: Dim = old + length if isinstance(old, int) and isinstance(length, int) else None
        if tokens is not None and isinstance(old, int):
            total = max(old, tokens)  # a buffer with room for all of them keeps its size
        result[1] = result[2] = TensorType(past.dtype, (batch, key_heads, total, head))


def _multi_head_types(inputs: Sequence[TensorType | None], heads: int, result: list[TensorType]) -> None:
    """Output [B, S, hidden of V], then the present keys and values [B, heads, past + L, head]."""
    query = inputs[0]
    assert query is not None and query.shape is not None
    batch, length = query.shape[0], query.shape[1]
    key, value = (inputs[i] if len(inputs) > i else None for i in (1, 2))
    flat = value is not None and value.shape is not None and len(value.shape) == 3
    hidden = value.shape[-1] if flat else query.shape[-1]  # type: ignore[union-attr,index]
    result[0] = TensorType(query.dtype, (batch, length, hidden))
    keys = key.shape[1] if key is not None and key.shape is not None and len(key.shape) == 3 else length
    for index in (1, 2):
        if len(result) <= index:
            break
        past = inputs[5 + index] if len(inputs) > 5 + index else None
        old = past.shape[2] if past is not None and past.shape is not None and len(past.shape) == 4 else 0
        width = query.shape[-1] if index == 1 else hidden
        head = width // heads if isinstance(width, int) and heads else None
        total = old + keys if isinstance(old, int) and isinstance(keys, int) else None
        result[index] = TensorType(query.dtype, (batch, heads or None, total, head))
