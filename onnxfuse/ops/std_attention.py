"""``onnxfuse.std::Attention``, as ai.onnx opset 24 defines it, with two more attributes and one more input.

`window` w > 0: key j is visible to query i only if i - j < w, where i counts from the first key (so it is offset by the
length of the past). `nan_guard` 1: a query with no visible key gives a row of zeros (as ai.onnx has it); 0: it gives
what a plain softmax gives, NaN.

`head_sink` [heads]: one more score in every row of a head, that of a key whose value is zero (GPT-OSS): exp(sink) is
added to the denominator of the softmax. No row is NaN then, so there is no guard beside it.

A wider `softmax_precision` holds for the scores too: q and k are cast before their product (GPT-J in float16), and the
mask may be of that precision.

Stricter than ai.onnx: `q_num_heads` and `kv_num_heads` are given exactly when q, k and v are 3-D, and a mask's last dim
may be shorter than the keys (rather than broadcast) only together with `nonpad_kv_seqlen`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from onnxfuse.ops.opdef import (
    FLOAT_DTYPES,
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
from onnxfuse.ops.std_attention_body import PRECISION, write_body

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
    wide = PRECISION.get(attrs["softmax_precision"] or 0)
    _check_mask(op, inputs, mask, (sq[0], sq[1], sq[2], total), shorter=seqlen is not None, wide=wide)
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
    op: OpDef, inputs: Sequence[TensorType | None], mask: TensorType | None, scores: _Shape4, shorter: bool,
    wide: str | None,
) -> None:  # fmt: skip
    if mask is None:
        return
    if (
        mask.dtype not in (None, "bool", inputs[0].dtype if inputs[0] else None, wide)
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

    work = q.dtype if mask is None or mask.dtype == bool else np.result_type(q.dtype, mask.dtype)
    bias = np.zeros((batch, 1, queries, keys), work)
    if mask is not None:
        if mask.dtype == bool:
            mask = np.where(mask, 0, -np.inf).astype(work)
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
        column = np.broadcast_to(sink.astype(work).reshape(1, -1, 1, 1), (batch, heads, queries, 1))
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
        AttrDef("softmax_precision", int, None, tuple(PRECISION)),
        AttrDef("qk_matmul_output_mode", int, 0, (0, 1, 2, 3)),
        AttrDef("q_num_heads", int, 0, minimum=0),
        AttrDef("kv_num_heads", int, 0, minimum=0),
        AttrDef("window", int, 0, minimum=0),
        AttrDef("nan_guard", int, 0, (0, 1)),
    ),
    infer_fn=_infer,
    reference_fn=_reference,
    body_fn=write_body,
    cost_fn=_cost,
    min_body_opset=13,
)
