"""ONNX Runtime's own ops (domain com.microsoft) that occur in transformer models."""

from __future__ import annotations

from onnxfuse.graph.dims import Dim, SymInt
from onnxfuse.graph.shapes.elementwise import same_as_first
from onnxfuse.graph.shapes.matrix import matmul_shape
from onnxfuse.graph.shapes.table import TABLE, Call, Unknown, of_ops, register

MICROSOFT = "com.microsoft"
NCHWC = "com.microsoft.nchwc"

for _op in (
    "Gelu", "FastGelu", "BiasGelu", "QuickGelu", "BiasAdd",
    "RotaryEmbedding", "GroupNorm",
    "BiasSoftmax",
):  # fmt: skip
    register(_op, same_as_first, MICROSOFT)
for _op in (
    "LayerNormalization",
    "SimplifiedLayerNormalization",
    "Trilu",
    "QuantizeLinear",
    "DequantizeLinear",
    "DynamicQuantizeLinear",
):
    if ("", _op) in TABLE:
        register(_op, TABLE["", _op], MICROSOFT)


@of_ops("SkipLayerNormalization", "SkipSimplifiedLayerNormalization", domain=MICROSOFT)
def _skip_norm(call: Call) -> None:
    call.set(0, call.dtype(0))
    for index in (1, 2):
        call.set(index, "float32")
    call.set(3, call.dtype(0))
    shape = call.shape(0)
    call.set(0, None, shape)
    for index in (1, 2):
        call.set(index, None, (*shape[:-1], 1))
    call.set(3, None, shape)


@of_ops("FusedMatMul", "TransposeMatMul", domain=MICROSOFT)
def _fused_matmul(call: Call) -> None:
    call.set(0, call.dtype(0))
    left, right = call.shape(0), call.shape(1)
    if call.attr("transBatchA", 0) or call.attr("transBatchB", 0):
        raise Unknown
    if call.attr("transA", 0) and len(left) > 1:
        left = (*left[:-2], left[-1], left[-2])
    if call.attr("transB", 0) and len(right) > 1:
        right = (*right[:-2], right[-1], right[-2])
    call.set(0, None, matmul_shape(left, right))


register("FusedGemm", TABLE["", "Gemm"], MICROSOFT)
register("FusedConv", TABLE["", "Conv"], MICROSOFT)
# On a CPU ONNX Runtime lays channels out in blocks, padded to full ones, until they are put back.
register("Conv", TABLE["", "Conv"], NCHWC)


@of_ops("ReorderOutput", domain=NCHWC)
def _reorder_output(call: Call) -> None:
    call.set(0, call.dtype(0))
    batch, _, *spatial = call.shape(0)
    channels = call.attr("channels")
    call.set(0, None, (batch, *spatial, channels) if call.attr("channels_last", 0) else (batch, channels, *spatial))


@of_ops("MatMulNBits", "MatMulBnb4", "MatMulFpQ4", domain=MICROSOFT)
def _matmul_bits(call: Call) -> None:
    call.set(0, call.dtype(0))
    columns = call.attr("N")
    if columns is None:
        raise Unknown
    call.set(0, None, (*call.shape(0)[:-1], columns))


@of_ops("MatMulIntegerToFloat", "DynamicQuantizeMatMul", domain=MICROSOFT)
def _matmul_to_float(call: Call) -> None:
    call.set(0, call.dtype(2))
    call.set(0, None, matmul_shape(call.shape(0), call.shape(1)))


def _head_sizes(call: Call) -> tuple[SymInt, SymInt, SymInt, SymInt]:
    """(batch, length, hidden, total width) of a query input, which may hold Q, K and V packed."""
    shape = call.shape(0)
    if len(shape) != 3:
        raise Unknown
    return shape[0], shape[1], shape[2], shape[2]


@of_ops("GroupQueryAttention", domain=MICROSOFT)
def _grouped_attention(call: Call) -> None:
    for index in range(3):
        call.set(index, call.dtype(0))
    batch, length, hidden, width = _head_sizes(call)
    heads, kv_heads = call.attr("num_heads"), call.attr("kv_num_heads")
    if not call.has(1):
        # Q, K and V are packed along the last axis.
        hidden = width // (heads + 2 * kv_heads) * heads
    call.set(0, None, (batch, length, hidden))
    head_size = hidden // heads
    if call.has(3):
        # In-place buffers keep their length; separate ones grow to the total length, known only when it runs.
        past = call.shape(3)
        head_size = past[3]
    for index in (1, 2):
        call.set(index, None, (batch, kv_heads, call.fresh(1, 2), head_size))


@of_ops("MultiHeadAttention", domain=MICROSOFT)
def _multi_head_attention(call: Call) -> None:
    for index in range(3):
        call.set(index, call.dtype(0))
    query = call.shape(0)
    heads = call.attr("num_heads")
    if len(query) == 5:
        batch, length, width = query[0], query[1], query[2] * query[4]
        call.set(0, None, (batch, length, width))
        return
    batch, length, hidden = query
    value_width = hidden
    if call.has(2):
        value = call.shape(2)
        value_width = value[2] if len(value) == 3 else value[1] * value[3]
    call.set(0, None, (batch, length, value_width))
    for index, width in ((1, hidden), (2, value_width)):
        if len(call.outputs) > 1:  # both share a length
            call.set(index, None, (batch, heads, call.fresh(1, 2), width // heads))


@of_ops("Attention", "QAttention", domain=MICROSOFT)
def _packed_attention(call: Call) -> None:
    call.set(0, call.dtype(0) if call.node.op == "Attention" else call.dtype(3))
    data, weight = call.shape(0), call.shape(1)
    sizes = call.attr("qkv_hidden_sizes")
    width = sizes[2] if sizes else weight[1] // 3
    call.set(0, None, (*data[:-1], width))


@of_ops("EmbedLayerNormalization", domain=MICROSOFT)
def _embed(call: Call) -> None:
    call.set(0, call.dtype(2))
    ids, table = call.shape(0), call.shape(2)
    call.set(0, None, (*ids, table[1]))
    call.set(1, "int32", (ids[0],))
    call.set(2, call.dtype(2), (*ids, table[1]))


@of_ops("DynamicQuantizeLSTM", domain=MICROSOFT)
def _quantized_lstm(call: Call) -> None:
    for index in range(3):
        call.set(index, call.dtype(0))
    steps, batch, _ = call.shape(0)
    hidden = call.attr("hidden_size")
    weight = call.shape_or_none(1)
    directions = 2 if call.attr("direction", "forward") in ("bidirectional", b"bidirectional") else 1
    if hidden is None or (weight is not None and isinstance(weight[0], Dim)):
        raise Unknown
    call.set(0, None, (steps, directions, batch, hidden))
    for index in (1, 2):
        call.set(index, None, (directions, batch, hidden))
