"""``onnxfuse.std::Attention``, as ai.onnx opset 24 defines it, with two more attributes and one more input.

`window` w > 0: key j is visible to query i only if i - j < w, where i counts from the first key (so it is offset by the
length of the past). `nan_guard` 1: a query with no visible key gives a row of zeros (as ai.onnx has it); 0: it gives
what a plain softmax gives, NaN.

`head_sink` [heads]: one more score in every row of a head, that of a key whose value is zero (GPT-OSS): exp(sink) is added
to the denominator of the softmax. No row is NaN then, so there is no guard beside it.

Stricter than ai.onnx: `q_num_heads` and `kv_num_heads` are given exactly when q, k and v are 3-D, and a mask's last dim
may be shorter than the keys (rather than broadcast) only together with `nonpad_kv_seqlen`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from onnxfuse.ops.body import BodyBuilder
from onnxfuse.ops.opdef import (
    FLOAT_DTYPES,
    HALF_DTYPES,
    STD_DOMAIN,
    AttrDef,
    Cost,
    Dim,
    InputDef,
    OpDef,
    TensorType,
    product,
    tensor_bytes,
    unify,
)

_PRECISION = {1: "float32", 10: "float16", 11: "float64", 16: "bfloat16"}
_Shape4 = tuple[Dim, Dim, Dim, Dim]


def _heads_view(op: OpDef, inputs: Sequence[TensorType | None], index: int, heads: int) -> _Shape4 | None:
    """The [batch, heads, length, size] shape of input q, k or v; None if its rank is unknown."""
    tensor = inputs[index]
    assert tensor is not None
    shape = tensor.shape
    if shape is None:
        return None
    if len(shape) != (3 if heads else 4):
        raise op.refuse(
            inputs, f"`{op.inputs[index].name}` must have rank 4, or rank 3 together with q_num_heads and kv_num_heads"
        )
    if not heads:
        return shape[0], shape[1], shape[2], shape[3]
    hidden = shape[2]
    if isinstance(hidden, int) and hidden % heads:
        raise op.refuse(inputs, f"the last dim of `{op.inputs[index].name}` is not divisible by `{heads}` heads")
    return shape[0], heads, shape[1], hidden // heads if isinstance(hidden, int) else None


def _infer(op: OpDef, inputs: Sequence[TensorType | None], attrs: Mapping[str, Any]) -> list[TensorType]:
    q, _, v, mask, past_k, past_v, seqlen, sink = inputs
    assert q is not None and v is not None
    hq, hkv = attrs["q_num_heads"], attrs["kv_num_heads"]
    if bool(hq) != bool(hkv):
        raise op.refuse(inputs, "q_num_heads and kv_num_heads must be given together")
    if (past_k is None) != (past_v is None):
        raise op.refuse(inputs, "`past_key` and `past_value` must be given together")
    if past_k is not None and seqlen is not None:
        raise op.refuse(inputs, "`nonpad_kv_seqlen` and the past exclude each other")
    shapes = [_heads_view(op, inputs, i, h) for i, h in ((0, hq), (1, hkv), (2, hkv))]
    if any(s is None for s in shapes):
        rank = 3 if hq else 4
        return [TensorType(q.dtype, (None,) * rank), *(TensorType(q.dtype, (None,) * 4) for _ in range(3))]
    sq, sk, sv = (s for s in shapes if s is not None)
    for name, a, b in (
        ("batch of q and k", sq[0], sk[0]),
        ("batch of k and v", sk[0], sv[0]),
        ("heads of k and v", sk[1], sv[1]),
        ("length of k and v", sk[2], sv[2]),
        ("head size of q and k", sq[3], sk[3]),
    ):
        if not unify(a, b)[0]:
            raise op.refuse(inputs, f"the {name} differ: `{a}` and `{b}`")
    if isinstance(sq[1], int) and isinstance(sk[1], int) and (sk[1] == 0 or sq[1] % sk[1]):
        raise op.refuse(inputs, f"`{sq[1]}` query heads are not a multiple of `{sk[1]}` key heads")
    total = sk[2]
    for name, past, new in (("past_key", past_k, sk), ("past_value", past_v, sv)):
        if past is None:
            continue
        if past.shape is None:
            total = None
            continue
        if len(past.shape) != 4 or not all(unify(past.shape[i], new[i])[0] for i in (0, 1, 3)):
            raise op.refuse(inputs, f"`{name}` must be [batch, kv heads, past length, head size]")
        length = past.shape[2]
        total = length + sk[2] if isinstance(length, int) and isinstance(sk[2], int) else None
    _check_mask(op, inputs, mask, (sq[0], sq[1], sq[2], total), shorter=seqlen is not None)
    if sink is not None and sink.shape is not None and (len(sink.shape) != 1 or not unify(sink.shape[0], sq[1])[0]):
        raise op.refuse(inputs, "`head_sink` must be [heads]")
    if (
        seqlen is not None
        and seqlen.shape is not None
        and (len(seqlen.shape) != 1 or not unify(seqlen.shape[0], sq[0])[0])
    ):
        raise op.refuse(inputs, "`nonpad_kv_seqlen` must be [batch]")
    y: tuple[Dim, ...] = (sq[0], sq[1], sq[2], sv[3])
    if hq:
        y = (sq[0], sq[2], hq * sv[3] if isinstance(sv[3], int) else None)
    return [
        TensorType(q.dtype, y),
        TensorType(q.dtype, (sk[0], sk[1], total, sk[3])),
        TensorType(q.dtype, (sv[0], sv[1], total, sv[3])),
        TensorType(q.dtype, (sq[0], sq[1], sq[2], total)),
    ]


def _check_mask(
    op: OpDef, inputs: Sequence[TensorType | None], mask: TensorType | None, scores: _Shape4, shorter: bool
) -> None:
    if mask is None:
        return
    if (
        mask.dtype not in (None, "bool", inputs[0].dtype if inputs[0] else None)
        and inputs[0] is not None
        and inputs[0].dtype
    ):
        raise op.refuse(inputs, "`attn_mask` must be bool or have the dtype of `q`")
    if mask.shape is None:
        return
    if not 1 <= len(mask.shape) <= 4:
        raise op.refuse(inputs, "`attn_mask` must have rank 1 to 4")
    aligned = list(zip(mask.shape, scores[4 - len(mask.shape) :], strict=True))
    for m, s in aligned[: -1 if shorter else None]:
        if m != 1 and not unify(m, s)[0]:
            raise op.refuse(inputs, "`attn_mask` does not broadcast to [batch, heads, queries, keys]")


def _softmax(scores: np.ndarray) -> np.ndarray:
    top = np.max(scores, axis=-1, keepdims=True, initial=-np.inf)
    e = np.exp(scores - top)
    return e / np.sum(e, axis=-1, keepdims=True)


def _reference(inputs: Sequence[np.ndarray | None], attrs: Mapping[str, Any]) -> list[np.ndarray]:
    q, k, v, mask, past_k, past_v, seqlen, sink = inputs
    assert q is not None and k is not None and v is not None
    packed = bool(attrs["q_num_heads"])
    if packed:
        q, k, v = (
            a.reshape(a.shape[0], a.shape[1], h, -1).transpose(0, 2, 1, 3)
            for a, h in ((q, attrs["q_num_heads"]), (k, attrs["kv_num_heads"]), (v, attrs["kv_num_heads"]))
        )
    past = 0
    if past_k is not None and past_v is not None:
        past = past_k.shape[2]
        k, v = np.concatenate([past_k, k], axis=2), np.concatenate([past_v, v], axis=2)
    batch, heads, queries, size = q.shape
    keys = k.shape[2]
    group = heads // k.shape[1]
    wide_k, wide_v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    scale = attrs["scale"] if attrs["scale"] is not None else 1 / math.sqrt(size)
    scores = (q @ wide_k.transpose(0, 1, 3, 2)) * q.dtype.type(scale)
    stages = [scores]
    if attrs["softcap"]:
        scores = attrs["softcap"] * np.tanh(scores / attrs["softcap"])
    stages.append(scores)

    bias = np.zeros((batch, 1, queries, keys), q.dtype)
    if mask is not None:
        if mask.dtype == bool:
            mask = np.where(mask, 0, -np.inf).astype(q.dtype)
        if seqlen is not None and mask.shape[-1] < keys:
            padding = [(0, 0)] * (mask.ndim - 1) + [(0, keys - mask.shape[-1])]
            mask = np.pad(mask, padding, constant_values=-np.inf)
        bias = bias + mask
    offset = np.full((batch, 1, 1, 1), past) if seqlen is None else (seqlen - queries).reshape(-1, 1, 1, 1)
    position, key = np.arange(queries)[:, None] + offset, np.arange(keys)
    visible = np.ones((batch, 1, queries, keys), bool)
    if attrs["is_causal"]:
        visible &= key <= position
    if attrs["window"]:
        visible &= position - key < attrs["window"]
    if seqlen is not None:
        visible &= key < seqlen.reshape(-1, 1, 1, 1)
    bias = np.where(visible, bias, -np.inf)
    scores = np.where(bias == -np.inf, -np.inf, scores + bias).astype(q.dtype)
    stages.append(scores)
    if sink is not None:
        column = np.broadcast_to(sink.astype(q.dtype).reshape(1, -1, 1, 1), (batch, heads, queries, 1))
        scores = np.concatenate([scores, column], axis=-1)
    weights = _softmax(scores)[..., :keys]
    if attrs["nan_guard"]:
        hidden = np.max(bias, axis=-1, keepdims=True, initial=-np.inf) == -np.inf
        weights = np.where(hidden, 0, weights)
    stages.append(weights)
    y = weights.astype(q.dtype) @ wide_v
    if packed:
        y = y.transpose(0, 2, 1, 3).reshape(batch, queries, -1)
    return [y, k, v, stages[attrs["qk_matmul_output_mode"]]]


def _body(b: BodyBuilder, inputs: Sequence[str], outputs: Sequence[str], attrs: Mapping[str, Any]) -> None:
    q, k, v, mask, past_k, past_v, seqlen, sink = inputs
    if attrs["q_num_heads"]:
        q, k, v = (
            b.op("Transpose", b.op("Reshape", a, b.ints(0, 0, h, -1)), perm=[0, 2, 1, 3])
            for a, h in ((q, attrs["q_num_heads"]), (k, attrs["kv_num_heads"]), (v, attrs["kv_num_heads"]))
        )
    if past_k:
        k, v = b.op("Concat", past_k, k, axis=2), b.op("Concat", past_v, v, axis=2)
    grouped = _is_grouped(b, attrs)
    scaled_q, scaled_k = _scaled(b, q, k, attrs["scale"])
    heads = _head_counts(b, attrs) if grouped else None
    if heads is not None:
        # Keys and values are not repeated: the query heads of one group stand one below the other.
        by_group, flat = b.ints(0, heads[1], -1, 0), b.ints(0, heads[0], -1, 0)
        scaled_q, v_operand, transposed = (
            b.op("Reshape", scaled_q, by_group), v, b.op("Transpose", scaled_k, perm=[0, 1, 3, 2]),
        )  # fmt: skip
    elif grouped:
        # The same with sizes that are only known at run time: the query heads of one group become a dim of their own.
        kv_heads, batch = b.dim(k, 1), b.dim(q, 0)
        by_group = b.op("Concat", batch, kv_heads, b.ints(-1), b.slice(b.op("Shape", q), 2, 4, 0), axis=0)
        scaled_q = b.op("Reshape", scaled_q, by_group)
        scaled_k, v_operand = b.unsqueeze(scaled_k, 2), b.unsqueeze(v, 2)
        transposed = b.op("Transpose", scaled_k, perm=[0, 1, 2, 4, 3])
    else:
        v_operand, transposed = v, b.op("Transpose", scaled_k, perm=[0, 1, 3, 2])
    raw = b.op("MatMul", scaled_q, transposed)
    if grouped:
        if heads is None:
            flat = b.op("Concat", b.slice(b.op("Shape", q), 0, 3, 0), b.dim(k, 2), axis=0)
        raw = b.op("Reshape", raw, flat)
    capped = raw
    if attrs["softcap"]:
        cap = b.scalar(attrs["softcap"])
        capped = b.op("Mul", b.op("Tanh", b.op("Div", raw, cap)), cap)

    visible, additive = _masks(b, q, k, mask, past_k, seqlen, attrs)
    masked = capped
    minus_infinity = b.scalar(-np.inf) if visible else ""
    if additive:
        masked = b.op("Add", masked, additive)
    if visible:
        masked = b.op("Where", visible, masked, minus_infinity)
    precision = _PRECISION.get(attrs["softmax_precision"] or 0, b.dtype)
    weights = b.op("Softmax", b.cast(_with_sink(b, masked, sink) if sink else masked, precision), axis=-1)
    if sink:
        weights = b.slice(weights, 0, -1, 3)
    weights = b.cast(weights, b.dtype, precision)
    if attrs["nan_guard"] and not sink and (visible or additive):
        weights = b.op("Where", _hidden_rows(b, visible, additive), b.scalar(0.0), weights)
    if grouped and heads is None:
        by_group = b.op("Concat", batch, kv_heads, b.ints(-1), b.slice(b.op("Shape", weights), 2, 4, 0), axis=0)
        flat = b.op("Concat", b.slice(b.op("Shape", q), 0, 3, 0), b.dim(v, 3), axis=0)
    y = b.op("MatMul", b.op("Reshape", weights, by_group) if grouped else weights, v_operand)
    if grouped:
        y = b.op("Reshape", y, flat)
    if attrs["q_num_heads"]:
        y = b.op("Reshape", b.op("Transpose", y, perm=[0, 2, 1, 3]), b.ints(0, 0, -1))
    stages = (raw, capped, masked, weights)
    for value, output in zip((y, k, v, stages[attrs["qk_matmul_output_mode"]]), outputs, strict=False):
        if output:
            b.finish(value, output)


def _with_sink(b: BodyBuilder, scores: str, sink: str) -> str:
    """Scores [B, H, S, L] with the sink of each head as one more column."""
    rows = b.op("Concat", b.slice(b.op("Shape", scores), 0, 3, 0), b.ints(1), axis=0)
    return b.op("Concat", scores, b.op("Expand", b.op("Reshape", sink, b.ints(1, -1, 1, 1)), rows), axis=-1)


def _is_grouped(b: BodyBuilder, attrs: Mapping[str, Any]) -> bool:
    """False only when it is certain that there are as many key heads as query heads."""
    if attrs["q_num_heads"]:
        return bool(attrs["q_num_heads"] != attrs["kv_num_heads"])
    q, k = b.types[0], b.types[1]
    if q is None or k is None or q.shape is None or k.shape is None or q.shape[1] is None:
        return True
    return q.shape[1] != k.shape[1]


def _head_counts(b: BodyBuilder, attrs: Mapping[str, Any]) -> tuple[int, int] | None:
    """Query heads and key heads, if both are known."""
    if attrs["q_num_heads"]:
        return attrs["q_num_heads"], attrs["kv_num_heads"]
    counts = [t.shape[1] if t is not None and t.shape is not None else None for t in b.types[:2]]
    return (counts[0], counts[1]) if isinstance(counts[0], int) and isinstance(counts[1], int) else None


def _scaled(b: BodyBuilder, q: str, k: str, scale: float | None) -> tuple[str, str]:
    """q and k, scaled: q alone in float32; in half precision both, by the square root, against overflow."""
    if scale == 1.0:
        return q, k
    if scale is not None:
        if b.dtype not in HALF_DTYPES:
            return b.op("Mul", q, b.scalar(scale)), k
        factor = b.scalar(math.sqrt(scale))
    else:
        size = b.op("Cast", b.dim(q, 3), to=1)
        factor = b.op("Reciprocal", b.op("Sqrt", size))
        if b.dtype not in HALF_DTYPES:
            return b.op("Mul", q, factor), k
        factor = b.cast(b.op("Sqrt", factor), b.dtype, "float32")
    return b.op("Mul", q, factor), b.op("Mul", k, factor)


def _masks(
    b: BodyBuilder, q: str, k: str, mask: str, past_k: str, seqlen: str, attrs: Mapping[str, Any]
) -> tuple[str, str]:
    """(boolean mask or "", additive mask or "") from all that hides keys."""
    conditions: list[str] = []
    additive = ""
    keys = b.dim(k, 2)
    zero, one = b.constant(0, "int64"), b.constant(1, "int64")
    if mask:
        is_bool = b.input_dtype(3) == "bool"
        if seqlen:
            missing = b.op("Sub", keys, b.dim(mask, -1))
            rank = b.op("Shape", b.op("Shape", mask))
            before = b.op("Sub", b.op("Mul", rank, b.ints(2)), b.ints(1))
            zeros = b.op("ConstantOfShape", before, value=_zero_int64())
            fill = b.constant(False, "bool") if is_bool else b.scalar(-np.inf)
            mask = b.op("Pad", mask, b.op("Concat", zeros, missing, axis=0), fill)
        if is_bool:
            conditions.append(mask)
        else:
            additive = mask
    if attrs["is_causal"] or attrs["window"] or seqlen:
        key = b.op("Range", zero, b.op("Squeeze", keys), one)
    if attrs["is_causal"] or attrs["window"]:
        queries = b.dim(q, 2)
        position = b.unsqueeze(b.op("Range", zero, b.op("Squeeze", queries), one), 1)
        if past_k:
            position = b.op("Add", position, b.dim(past_k, 2))
        elif seqlen:
            position = b.op("Add", position, b.unsqueeze(b.op("Sub", seqlen, queries), 1, 2, 3))
        if attrs["is_causal"]:
            conditions.append(b.op("LessOrEqual", key, position))
        if attrs["window"]:
            conditions.append(b.op("Less", b.op("Sub", position, key), b.constant(attrs["window"], "int64")))
    if seqlen:
        conditions.append(b.op("Less", key, b.unsqueeze(seqlen, 1, 2, 3)))
    visible = ""
    for condition in conditions:
        visible = b.op("And", visible, condition) if visible else condition
    return visible, additive


def _zero_int64() -> Any:
    from onnx import helper

    return helper.make_tensor("value", 7, [1], [0])


def _hidden_rows(b: BodyBuilder, visible: str, additive: str) -> str:
    """Boolean [..., queries, 1]: no key of the row can be seen."""
    if additive:
        bias = b.cast(additive, "float32")
        if visible:
            bias = b.op("Where", visible, bias, b.constant(-np.inf, "float32"))
        return b.op("Equal", b.reduce("ReduceMax", bias, [-1]), b.constant(-np.inf, "float32"))
    return b.op("Equal", b.reduce("ReduceMax", b.op("Cast", visible, to=1), [-1]), b.constant(0.0, "float32"))


def _cost(inputs: Sequence[TensorType | None], attrs: Mapping[str, Any]) -> Cost:
    y, key, value, scores = ATTENTION.infer(inputs, attrs)
    batch, heads, queries, keys = (d for d in scores.shape or () if isinstance(d, int))
    sizes = [t.shape[3] for t in (key, value) if t.shape is not None and isinstance(t.shape[3], int)]
    elements = product([batch, heads, queries, keys])
    flops = sum(2 * elements * d for d in sizes if isinstance(d, int)) + 5 * elements
    read = sum(map(tensor_bytes, inputs))
    return Cost(flops, read, tensor_bytes(y) + (tensor_bytes(key) + tensor_bytes(value) if inputs[4] else 0))


ATTENTION = OpDef(
    name="Attention",
    domain=STD_DOMAIN,
    summary="softmax(softcap(scale * q · kᵀ) + masks) · v, with grouped heads, a cache and sinks",
    inputs=(
        InputDef("q"),
        InputDef("k"),
        InputDef("v"),
        InputDef("attn_mask", optional=True, same_as_t=False, dtypes=FLOAT_DTYPES | {"bool"}),
        InputDef("past_key", optional=True),
        InputDef("past_value", optional=True),
        InputDef("nonpad_kv_seqlen", optional=True, same_as_t=False, dtypes=frozenset({"int64"})),
        InputDef("head_sink", optional=True),
    ),
    outputs=("y", "present_key", "present_value", "qk_matmul_output"),
    optional_outputs=3,
    attributes=(
        AttrDef("is_causal", int, 0, (0, 1)),
        AttrDef("scale", float, None, minimum=0.0),
        AttrDef("softcap", float, 0.0, minimum=0.0),
        AttrDef("softmax_precision", int, None, tuple(_PRECISION)),
        AttrDef("qk_matmul_output_mode", int, 0, (0, 1, 2, 3)),
        AttrDef("q_num_heads", int, 0, minimum=0),
        AttrDef("kv_num_heads", int, 0, minimum=0),
        AttrDef("window", int, 0, minimum=0),
        AttrDef("nan_guard", int, 0, (0, 1)),
    ),
    infer_fn=_infer,
    reference_fn=_reference,
    body_fn=_body,
    cost_fn=_cost,
    min_body_opset=13,
)
