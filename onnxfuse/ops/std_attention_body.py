"""The function body of ``onnxfuse.std::Attention``: standard ops, grouped keys not repeated."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from onnx import helper

from onnxfuse.ops.body import BodyBuilder
from onnxfuse.ops.opdef import HALF_DTYPES

PRECISION = {1: "float32", 10: "float16", 11: "float64", 16: "bfloat16"}


def write_body(b: BodyBuilder, inputs: Sequence[str], outputs: Sequence[str], attrs: Mapping[str, Any]) -> None:
    q, k, v, mask, past_k, past_v, seqlen, sink = inputs
    if attrs["q_num_heads"]:
        q, k, v = (
            b.op("Transpose", b.op("Reshape", a, b.ints(0, 0, h, -1)), perm=[0, 2, 1, 3])
            for a, h in ((q, attrs["q_num_heads"]), (k, attrs["kv_num_heads"]), (v, attrs["kv_num_heads"]))
        )
    if past_k:
        k, v = b.op("Concat", past_k, k, axis=2), b.op("Concat", past_v, v, axis=2)
    grouped = _is_grouped(b, attrs)
    precision = PRECISION.get(attrs["softmax_precision"] or 0, b.dtype)
    work = precision if b.dtype in HALF_DTYPES and precision not in HALF_DTYPES else b.dtype
    scaled_q, scaled_k = _scaled(b, b.cast(q, work), b.cast(k, work), attrs["scale"], work)
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
        cap = b.constant(attrs["softcap"], work)
        capped = b.op("Mul", b.op("Tanh", b.op("Div", raw, cap)), cap)

    visible, additive = _masks(b, q, k, mask, past_k, seqlen, attrs)
    masked = capped
    if additive:
        masked = b.op("Add", masked, b.cast(additive, work, b.input_dtype(3)))
    if visible:
        masked = b.op("Where", visible, masked, b.constant(-np.inf, work))
    scores = _with_sink(b, masked, b.cast(sink, work)) if sink else masked
    weights = b.op("Softmax", b.cast(scores, precision, work), axis=-1)
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
    stage = (raw, capped, masked, "")[attrs["qk_matmul_output_mode"]]
    shown = b.cast(stage, b.dtype, work) if stage and len(outputs) > 3 else weights
    for value, output in zip((y, k, v, shown), outputs, strict=False):
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


def _scaled(b: BodyBuilder, q: str, k: str, scale: float | None, dtype: str) -> tuple[str, str]:
    """q and k, scaled: q alone in float32; in half precision both, by the square root, against overflow."""
    if scale == 1.0:
        return q, k
    if scale is not None:
        if dtype not in HALF_DTYPES:
            return b.op("Mul", q, b.constant(scale, dtype)), k
        factor = b.constant(math.sqrt(scale), dtype)
    else:
        size = b.op("Cast", b.dim(q, 3), to=1)
        factor = b.op("Reciprocal", b.op("Sqrt", size))
        if dtype not in HALF_DTYPES:
            return b.op("Mul", q, b.cast(factor, dtype, "float32")), k
        factor = b.cast(b.op("Sqrt", factor), dtype, "float32")
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
    return helper.make_tensor("value", 7, [1], [0])


def _hidden_rows(b: BodyBuilder, visible: str, additive: str) -> str:
    """Boolean [..., queries, 1]: no key of the row can be seen."""
    if additive:
        bias = b.cast(additive, "float32", b.input_dtype(3))
        if visible:
            bias = b.op("Where", visible, bias, b.constant(-np.inf, "float32"))
        return b.op("Equal", b.reduce("ReduceMax", bias, [-1]), b.constant(-np.inf, "float32"))
    return b.op("Equal", b.reduce("ReduceMax", b.op("Cast", visible, to=1), [-1]), b.constant(0.0, "float32"))
