"""Floating-point operations and bytes of one run of a node, for ONNX's ops, ONNX Runtime's and the fused ones.

Conventions: a multiply-add is 2 operations; bytes are what the node must read and write once (a perfect cache), so the
quotient is the arithmetic intensity of the roofline model. Ops that only re-label a tensor move nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from onnxfuse.ops.opdef import Cost, TensorType

#: Ops whose output can share the input's buffer: no bytes move.
VIEWS = frozenset({"Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity", "Dropout"})
#: Ops that read a tensor's shape only.
_METADATA = frozenset({"Shape", "Size"})
#: Ops that read no more of their first input than they write.
_SPARSE_READERS = frozenset({"Gather", "GatherND", "GatherElements", "Slice", "Split", "Expand", "Embedding", "Tile"})
#: Ops that move values and compute nothing.
_MOVERS = _SPARSE_READERS | {
    "Cast",
    "CastLike",
    "Concat",
    "ConstantOfShape",
    "Constant",
    "DepthToSpace",
    "EyeLike",
    "OneHot",
    "Pad",
    "Range",
    "ReverseSequence",
    "ScatterElements",
    "ScatterND",
    "SpaceToDepth",
    "Transpose",
    "Trilu",
    "NonZero",
    "Compress",
}
#: Operations per output element, counted as a vectorized library spends them.
_PER_ELEMENT = {
    "Exp": 4, "Log": 4, "Erf": 8, "Tanh": 8, "Sigmoid": 6, "Sqrt": 1, "Reciprocal": 1, "Pow": 4, "Sin": 6, "Cos": 6,
    "Softplus": 8, "Gelu": 12, "FastGelu": 14, "BiasGelu": 13, "QuickGelu": 8, "Swish": 7, "HardSwish": 4,
    "HardSigmoid": 3, "Mish": 16, "Elu": 6, "Selu": 7, "Celu": 7, "Where": 1, "Mod": 2,
    "RotaryEmbedding": 3,
}  # fmt: skip
#: Operations per input element.
_PER_INPUT_ELEMENT = {
    "Softmax": 5, "LogSoftmax": 6, "LayerNormalization": 7, "RMSNormalization": 4, "SimplifiedLayerNormalization": 4,
    "SkipLayerNormalization": 8, "SkipSimplifiedLayerNormalization": 5, "BatchNormalization": 2,
    "InstanceNormalization": 7, "GroupNormalization": 7, "LpNormalization": 4, "ReduceMean": 1, "ReduceSum": 1,
    "ReduceMax": 1, "ReduceMin": 1, "ReduceProd": 1, "ReduceL2": 2, "ReduceSumSquare": 2, "ReduceLogSumExp": 6,
    "CumSum": 1, "ArgMax": 1, "ArgMin": 1, "TopK": 2, "DynamicQuantizeLinear": 3,
}  # fmt: skip

Types = Sequence[TensorType | None]


def count(tensor: TensorType | None) -> int | None:
    """Number of elements; 0 for an absent tensor, None when a size is unknown."""
    if tensor is None:
        return 0
    if tensor.shape is None or not all(isinstance(d, int) for d in tensor.shape):
        return None
    return math.prod(d for d in tensor.shape if isinstance(d, int))


_ITEMSIZE = {
    "float64": 8, "int64": 8, "uint64": 8, "complex64": 8, "complex128": 16, "float32": 4, "int32": 4, "uint32": 4,
    "float16": 2, "bfloat16": 2, "int16": 2, "uint16": 2, "int4": 0.5, "uint4": 0.5,
}  # fmt: skip


def nbytes(tensor: TensorType | None) -> int | None:
    """Bytes of a tensor (float32 assumed when the dtype is unknown); None when a size is unknown."""
    elements = count(tensor)
    if elements is None or tensor is None:
        return elements
    return math.ceil(elements * _ITEMSIZE.get(tensor.dtype or "float32", 1))


def of_standard_op(op: str, domain: str, inputs: Types, outputs: Types, attrs: Mapping[str, Any]) -> Cost | None:
    """The cost of an op of ONNX or ONNX Runtime. None when a needed size is unknown.

    An op that is not in the tables counts one operation per output element.
    """
    written = [nbytes(t) for t in outputs]
    if any(w is None for w in written):
        return None
    bytes_written = sum(w for w in written if w is not None)
    if op in VIEWS or op in _METADATA:
        return Cost(0, 0, 0)
    bytes_read = _bytes_read(op, inputs, bytes_written)
    flops = _flops(op, domain, inputs, outputs, attrs)
    if bytes_read is None or flops is None:
        return None
    return Cost(flops, bytes_read, bytes_written)


def _bytes_read(op: str, inputs: Types, bytes_written: int) -> int | None:
    read = [nbytes(t) for t in inputs]
    if op in _SPARSE_READERS and read:
        first = bytes_written if read[0] is None else min(read[0], bytes_written)
        read = [first, *read[1:]]
    known = [r for r in read if r is not None]
    return sum(known) if len(known) == len(read) else None


def _flops(op: str, domain: str, inputs: Types, outputs: Types, attrs: Mapping[str, Any]) -> int | None:
    special = _packed_attention if (domain, op) == ("com.microsoft", "Attention") else _SPECIAL.get(op)
    if special is not None:
        try:
            return special(inputs, outputs, attrs)
        except (TypeError, IndexError, AttributeError, KeyError):
            return None  # a size that the formula needs is unknown
    if op in _MOVERS:
        return 0
    if op in _PER_INPUT_ELEMENT:
        elements = count(inputs[0]) if inputs else 0
        return None if elements is None else elements * _PER_INPUT_ELEMENT[op]
    elements = count(outputs[0]) if outputs else 0
    return None if elements is None else elements * _PER_ELEMENT.get(op, 1)


def _sizes(tensor: TensorType | None) -> tuple[int, ...]:
    """The shape as sizes; TypeError if any is unknown."""
    if tensor is None or tensor.shape is None or not all(isinstance(d, int) for d in tensor.shape):
        raise TypeError("unknown sizes")
    return tuple(d for d in tensor.shape if isinstance(d, int))


def _matmul(inputs: Types, outputs: Types, attrs: Mapping[str, Any]) -> int:
    contracted = _sizes(inputs[0])[-2 if attrs.get("transA") and len(_sizes(inputs[0])) > 1 else -1]
    return 2 * math.prod(_sizes(outputs[0])) * contracted


def _gemm(inputs: Types, outputs: Types, attrs: Mapping[str, Any]) -> int:
    rows = math.prod(_sizes(outputs[0]))
    contracted = _sizes(inputs[0])[0 if attrs.get("transA") else 1]
    return 2 * rows * contracted + (rows if len(inputs) > 2 and inputs[2] is not None else 0)


def _matmul_nbits(inputs: Types, outputs: Types, attrs: Mapping[str, Any]) -> int:
    return 2 * math.prod(_sizes(outputs[0])) * int(attrs["K"])


def _conv(inputs: Types, outputs: Types, attrs: Mapping[str, Any]) -> int:
    elements = math.prod(_sizes(outputs[0]))
    bias = elements if len(inputs) > 2 and inputs[2] is not None else 0
    return 2 * elements * math.prod(_sizes(inputs[1])[1:]) + bias


def _conv_transpose(inputs: Types, outputs: Types, attrs: Mapping[str, Any]) -> int:
    return 2 * math.prod(_sizes(inputs[0])) * math.prod(_sizes(inputs[1])[1:])


def _einsum(inputs: Types, outputs: Types, attrs: Mapping[str, Any]) -> int:
    equation = attrs["equation"]
    equation = equation.decode() if isinstance(equation, bytes) else equation
    sizes: dict[str, int] = {}
    for term, tensor in zip(equation.replace(" ", "").split("->")[0].split(","), inputs, strict=True):
        if "." in term:
            raise TypeError("an ellipsis")
        sizes.update(zip(term, _sizes(tensor), strict=True))
    return 2 * math.prod(sizes.values())


def _recurrent(gates: int) -> Callable[[Types, Types, Mapping[str, Any]], int]:
    def flops(inputs: Types, outputs: Types, attrs: Mapping[str, Any]) -> int:
        steps, batch, width = _sizes(inputs[0])
        directions = 2 if attrs.get("direction") in ("bidirectional", b"bidirectional") else 1
        hidden = int(attrs["hidden_size"])
        return 2 * steps * batch * directions * gates * hidden * (width + hidden)

    return flops


def _attention(inputs: Types, outputs: Types, attrs: Mapping[str, Any]) -> int:
    """Two products and a softmax: 4·(queries × head widths)·keys + 5·scores, from ONNX's 3-D or 4-D layout."""
    query, key = _sizes(inputs[0]), _sizes(inputs[1])
    past = _sizes(inputs[4])[2] if len(inputs) > 4 and inputs[4] is not None else 0
    if len(query) == 4:
        batch, heads, queries, head = query
        keys = key[2]
    else:
        batch, queries, hidden = query
        heads = int(attrs["q_num_heads"])
        head, keys = hidden // heads, key[1]
    return batch * heads * queries * (keys + past) * (4 * head + 5)


def _contrib_attention(heads_attr: str, past_index: int) -> Callable[[Types, Types, Mapping[str, Any]], int]:
    def flops(inputs: Types, outputs: Types, attrs: Mapping[str, Any]) -> int:
        batch, queries, hidden = _sizes(inputs[0])[:3]
        heads = int(attrs[heads_attr])
        hidden = _sizes(outputs[0])[-1]
        keys = _sizes(inputs[1])[1] if len(inputs) > 1 and inputs[1] is not None else queries
        if len(inputs) > past_index and inputs[past_index] is not None:
            keys += _sizes(inputs[past_index])[2]
        return batch * queries * keys * (4 * hidden + 5 * heads)

    return flops


def _packed_attention(inputs: Types, outputs: Types, attrs: Mapping[str, Any]) -> int:
    """com.microsoft::Attention: the Q, K and V projections by one packed weight, then attention over one input."""
    batch, queries, hidden = _sizes(inputs[0])
    packed = _sizes(inputs[1])[1]
    scores = batch * queries * queries * (4 * _sizes(outputs[0])[-1] + 5 * int(attrs["num_heads"]))
    return 2 * batch * queries * hidden * packed + scores


_SPECIAL: dict[str, Callable[[Types, Types, Mapping[str, Any]], int]] = {
    "MatMul": _matmul,
    "MatMulInteger": _matmul,
    "QLinearMatMul": _matmul,
    "FusedMatMul": _matmul,
    "TransposeMatMul": _matmul,
    "Gemm": _gemm,
    "GemmFastGelu": _gemm,
    "MatMulNBits": _matmul_nbits,
    "Conv": _conv,
    "FusedConv": _conv,
    "ConvInteger": _conv,
    "ConvTranspose": _conv_transpose,
    "Einsum": _einsum,
    "RNN": _recurrent(1),
    "GRU": _recurrent(3),
    "LSTM": _recurrent(4),
    "DynamicQuantizeLSTM": _recurrent(4),
    "Attention": _attention,
    "MultiHeadAttention": _contrib_attention("num_heads", 6),
    "GroupQueryAttention": _contrib_attention("num_heads", 3),
}
