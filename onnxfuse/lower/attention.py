"""`onnxfuse.std::Attention` as one kernel of the target.

What ONNX Runtime's kernels do where the documents are silent was measured (1.31.1, CPU): MultiHeadAttention computes
exactly what the unfused graph does, also in rows where every key is hidden (uniform for a finite mask, NaN for -inf);
ai.onnx Attention gives zeros in such rows, for the lowest finite number too. Both take a past of length 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from onnxfuse.analysis import masks
from onnxfuse.graph.ir import Node, Value
from onnxfuse.lower import rotation
from onnxfuse.lower.emit import Emitter, dtype_of, operand, shape_of
from onnxfuse.lower.kernels import MICROSOFT, KernelTable
from onnxfuse.lower.layout import Counted, Layout
from onnxfuse.ops import registry
from onnxfuse.ops.opdef import STD_DOMAIN


@dataclass(frozen=True)
class _Sizes:
    """Sizes of one Attention: ints, or symbolic dims (equal ones compare equal)."""

    batch: Any
    queries: Any
    new_keys: Any
    keys: Any
    heads: int
    kv_heads: int
    head_size: int
    value_size: int
    packed: bool

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads


def lower_attention(emitter: Emitter, kernels: KernelTable, node: Node) -> bool:
    """Replace the node by a kernel that computes the same; False (and the node untouched) if the target has none."""
    attrs = registry.get(STD_DOMAIN, node.op).resolve(dict(node.attrs))
    sizes = _sizes(node, attrs)
    if sizes is None or operand(node, 6) is not None or (len(node.outputs) > 3 and node.outputs[3].name):
        return False
    dtype = dtype_of(node.inputs[0])
    opset = emitter.opset
    if (
        kernels.target.provider == "cuda"
        and kernels.has("GroupQueryAttention", dtype, opset=opset, domain=MICROSOFT, num_heads=1, kv_num_heads=1)
        and _group_query_takes(node, attrs, sizes)
    ):
        _emit_group_query(emitter, node, attrs, sizes)
        return True
    multi_head = kernels.has("MultiHeadAttention", dtype, opset=opset, domain=MICROSOFT, num_heads=1)
    if multi_head and _multi_head_takes(node, attrs, sizes):
        one_size = operand(node, 4) is None or sizes.head_size == sizes.value_size
        if sizes.group > 1 and one_size and not attrs["is_causal"] and _rows_pay(node, kernels):
            _emit_grouped_rows(emitter, node, attrs, sizes)
            return True
        _emit_multi_head(emitter, node, attrs, sizes, kernels.target.provider == "cpu")
        return True
    if kernels.has("Attention", dtype, opset=emitter.opset, rank=4) and _native_takes(node, attrs, sizes):
        _emit_native(emitter, node, attrs, sizes)
        return True
    return False


def _rows_pay(node: Node, kernels: KernelTable) -> bool:
    """Whether grouped keys are not repeated (`_emit_grouped_rows`).

    With a cache, on CPU: 0.62 to 0.80 of the exported time for one token after 128 to 512, against 0.94 to 0.98 with
    repeated keys; for 256 tokens both take the same. Without one, repeated keys give more threads something to do.
    """
    return kernels.target.provider == "cpu" and operand(node, 4) is not None


def _sizes(node: Node, attrs: dict[str, Any]) -> _Sizes | None:
    shapes = [shape_of(v) for v in node.inputs[:3]]
    if any(s is None for s in shapes):
        return None
    q, k, v = (tuple(s) for s in shapes if s is not None)
    heads, kv_heads = attrs["q_num_heads"], attrs["kv_num_heads"]
    packed = bool(heads)
    if packed:
        if not all(isinstance(s[2], int) for s in (q, k, v)):
            return None
        q = (q[0], heads, q[1], q[2] // heads)
        k, v = ((s[0], kv_heads, s[1], s[2] // kv_heads) for s in (k, v))
    if not all(isinstance(d, int) for d in (q[1], k[1], q[3], v[3])) or k[1] == 0 or q[1] % k[1]:
        return None
    past = operand(node, 4)
    keys = k[2]
    if past is not None:
        past_shape = shape_of(past)
        keys = k[2] + past_shape[2] if past_shape is not None and past_shape[2] is not None else None
    return _Sizes(q[0], q[2], k[2], keys, q[1], k[1], q[3], v[3], packed)


def _scale(attrs: dict[str, Any], sizes: _Sizes) -> float:
    return attrs["scale"] if attrs["scale"] is not None else 1 / math.sqrt(sizes.head_size)


# MultiHeadAttention -------------------------------------------------------------------------------------------------


def _multi_head_takes(node: Node, attrs: dict[str, Any], sizes: _Sizes) -> bool:
    if attrs["softcap"] or attrs["window"]:
        return False
    if attrs["is_causal"] and operand(node, 3) is not None:
        return False
    if attrs["is_causal"] and operand(node, 4) is None and sizes.queries != sizes.keys:
        return False
    if operand(node, 4) is not None and sizes.group == 1 and sizes.value_size != sizes.head_size:
        return False  # its cache has one size for keys and values
    if attrs["is_causal"] and operand(node, 4) is not None and sizes.group > 1:
        return False  # the heads are repeated outside, so the kernel would not know where the new keys begin
    mask = operand(node, 3)
    return mask is None or _mask_fits(mask, sizes)


def _mask_fits(mask: Value, sizes: _Sizes) -> bool:
    shape = shape_of(mask)
    if shape is None or not 2 <= len(shape) <= 4:
        return False
    # The kernel repeats over batch and heads only what has size 1 there; over queries and keys it is repeated before.
    return len(shape) < 3 or shape[-3] in (1, sizes.heads)


def _emit_multi_head(emitter: Emitter, node: Node, attrs: dict[str, Any], sizes: _Sizes, repeat_as_heads: bool) -> None:
    """`repeat_as_heads`: keys and values go in as [B, H, L, D] where they were so or are repeated, else as [B, L, H·D].
    Measured: the former is 2 to 3% faster on CPU; on CUDA the latter is 8 to 15% faster, and the former took 40 ms at
    some shapes."""
    inputs, outputs = _take(emitter, node)
    q, k, v, mask, past_k, past_v = inputs
    layout = Layout(emitter)
    queries, keys = _counted(layout, sizes, q, k, past_k)
    present: list[Value | None] = [outputs[1], outputs[2]]
    if sizes.group > 1 and (past_k is not None or repeat_as_heads):
        k, v = _with_past(layout, sizes, k, v, past_k, past_v, present)
        k, v = layout.repeat_heads(k, sizes.group), layout.repeat_heads(v, sizes.group)
        past_k = past_v = None
        present = [None, None]
        if sizes.head_size != sizes.value_size:  # the kernel takes [B, H, L, D] only of one size
            k, v = layout.merge_heads(k), layout.merge_heads(v)
    else:
        taken_as_heads = repeat_as_heads and past_k is None and sizes.head_size == sizes.value_size
        if not sizes.packed and not taken_as_heads:
            k, v = layout.merge_heads(k), layout.merge_heads(v)
        if sizes.group > 1:
            k, v = (layout.repeat_packed(x, sizes.kv_heads, sizes.group) for x in (k, v))
    if not sizes.packed:
        q = layout.merge_heads(q)
    bias = None if mask is None else layout.bias(mask, queries, keys, dtype_of(q))
    y_shape = (sizes.batch, sizes.queries, sizes.heads * sizes.value_size)
    direct = sizes.packed and not attrs["nan_guard"]
    y = outputs[0] if direct else layout.new(q, y_shape)
    kernel_attrs = {"num_heads": sizes.heads, "scale": _scale(attrs, sizes)}
    if attrs["is_causal"]:
        kernel_attrs["unidirectional"] = 1
    emitter.add(
        "MultiHeadAttention",
        [q, k, v, None, None, bias, past_k, past_v],
        [y, *present] if past_k is not None else [y],
        domain=MICROSOFT,
        attrs=kernel_attrs,
    )
    _finish_output(layout, attrs, sizes, y, outputs[0])


def _counted(layout: Layout, sizes: _Sizes, q: Value, k: Value, past_k: Value | None) -> tuple[Counted, Counted]:
    queries = layout.queries(q, sizes.queries, sizes.packed)
    return queries, layout.keys(k, past_k, sizes.keys, sizes.packed)


def _emit_grouped_rows(emitter: Emitter, node: Node, attrs: dict[str, Any], sizes: _Sizes) -> None:
    """MultiHeadAttention over the key heads, the query heads of each group as further queries: no key is repeated."""
    inputs, outputs = _take(emitter, node)
    q, k, v, mask, past_k, past_v = inputs
    layout = Layout(emitter)
    queries, keys = _counted(layout, sizes, q, k, past_k)
    bias = None if mask is None else layout.bias(mask, queries, keys, dtype_of(q))
    if bias is not None:
        bias = layout.bias_of_rows(bias, sizes.kv_heads, sizes.group)
    if not sizes.packed:
        q, k, v = layout.merge_heads(q), layout.merge_heads(k), layout.merge_heads(v)
    rows = layout.group_to_rows(q, sizes.kv_heads, sizes.group)
    y = layout.new(q, (sizes.batch, None, sizes.kv_heads * sizes.value_size))
    emitter.add(
        "MultiHeadAttention",
        [rows, k, v, None, None, bias, past_k, past_v],
        [y, outputs[1], outputs[2]] if past_k is not None else [y],
        domain=MICROSOFT,
        attrs={"num_heads": sizes.kv_heads, "scale": _scale(attrs, sizes)},
    )
    direct = sizes.packed and not attrs["nan_guard"]
    packed = layout.rows_to_group(y, sizes.kv_heads, sizes.group, sizes.queries, outputs[0] if direct else None)
    _finish_output(layout, attrs, sizes, packed, outputs[0])


def _finish_output(layout: Layout, attrs: dict[str, Any], sizes: _Sizes, y: Value, out: Value) -> None:
    """Rows without a visible key come out as NaN; the guard makes them 0. Then back to [B, H, S, D] if wanted."""
    if y is out:
        return
    if attrs["nan_guard"]:
        y = layout.nan_to_zero(y, out if sizes.packed else None)
    if not sizes.packed:
        layout.split_heads(y, sizes.heads, out)


def _with_past(
    layout: Layout,
    sizes: _Sizes,
    k: Value,
    v: Value,
    past_k: Value | None,
    past_v: Value | None,
    present: list[Value | None],
) -> tuple[Value, Value]:
    """Keys and values as [B, H, L, D], after those of the cache."""
    if sizes.packed:
        k, v = layout.split_heads(k, sizes.kv_heads), layout.split_heads(v, sizes.kv_heads)
    if past_k is not None and past_v is not None:
        k = layout.concat(past_k, k, present[0], sizes.keys)
        v = layout.concat(past_v, v, present[1], sizes.keys)
    return k, v


def _take(emitter: Emitter, node: Node) -> tuple[list[Any], list[Any]]:
    inputs, outputs = emitter.replace(node)
    inputs = [*inputs, *[None] * (6 - len(inputs))][:6]
    made: list[Any] = [o if o.name else None for o in outputs]
    return inputs, [*made, *[None] * (3 - len(made))]


# GroupQueryAttention: causal, grouped, no mask ----------------------------------------------------------------------


def _group_query_takes(node: Node, attrs: dict[str, Any], sizes: _Sizes) -> bool:
    """The kernel is causal by itself and wants the same number of keys in all sequences of the batch.

    It refuses a cache together with several new tokens and a batch above 1. Without grouping MultiHeadAttention is
    faster (measured on an H200, float16: 71 against 255 µs for 16 sequences of 512, 12 heads of 64).
    """
    if not attrs["is_causal"] or operand(node, 3) is not None or operand(node, 4) is not None:
        return False
    if sizes.head_size != sizes.value_size or sizes.queries != sizes.keys:
        return False
    return sizes.group > 1 or bool(attrs["softcap"]) or bool(attrs["window"])


def _emit_group_query(emitter: Emitter, node: Node, attrs: dict[str, Any], sizes: _Sizes) -> None:
    inputs, outputs = _take(emitter, node)
    q, k, v = inputs[:3]
    layout = Layout(emitter)
    if not sizes.packed:
        q, k, v = layout.merge_heads(q), layout.merge_heads(k), layout.merge_heads(v)
    given = rotation.taken_in(q, k, v, sizes.head_size)
    last_key, total = layout.key_counts(given.query, given.query)
    y = outputs[0] if sizes.packed else layout.new(q, (sizes.batch, sizes.queries, sizes.heads * sizes.value_size))
    present = [
        outputs[i]
        if outputs[i] is not None
        else layout.new(k, (sizes.batch, sizes.kv_heads, sizes.keys, sizes.head_size))
        for i in (1, 2)
    ]
    kernel_attrs: dict[str, Any] = {
        "num_heads": sizes.heads,
        "kv_num_heads": sizes.kv_heads,
        "scale": _scale(attrs, sizes),
    }
    if attrs["window"]:
        kernel_attrs["local_window_size"] = attrs["window"]
    if attrs["softcap"]:
        kernel_attrs["softcap"] = attrs["softcap"]
    tables = [given.cos, given.sin] if given.cos is not None else []
    if tables:
        kernel_attrs |= {"do_rotary": 1, "rotary_interleaved": given.interleaved}
    emitter.add(
        "GroupQueryAttention",
        [given.query, given.key, given.value, None, None, last_key, total, *tables],
        [y, *present],
        domain=MICROSOFT,
        attrs=kernel_attrs,
    )
    if not sizes.packed:
        layout.split_heads(y, sizes.heads, outputs[0])


# ai.onnx Attention --------------------------------------------------------------------------------------------------


def _native_takes(node: Node, attrs: dict[str, Any], sizes: _Sizes) -> bool:
    """It has no window. Rows without a visible key are zeros there: right only with the guard, or without a mask."""
    if attrs["window"]:
        return False
    mask = operand(node, 3)
    if mask is None:
        return True
    if not _mask_fits(mask, sizes):
        return False
    if dtype_of(mask) == "bool":
        return bool(attrs["nan_guard"])
    facts = masks.analyze(mask)
    if facts is None or any(isinstance(t, masks.Bias) for t in facts.terms):
        return False
    # Zero rows are what the guard means, if the mask hides with -inf only.
    return bool(attrs["nan_guard"]) and all(t.fill == -math.inf for t in facts.terms if isinstance(t, masks.Choice))


def _emit_native(emitter: Emitter, node: Node, attrs: dict[str, Any], sizes: _Sizes) -> None:
    inputs, outputs = _take(emitter, node)
    q, k, v, mask, past_k, past_v = inputs
    layout = Layout(emitter)
    if mask is not None:
        mask = layout.to_scores(layout.to_four_dims(mask), *_counted(layout, sizes, q, k, past_k))
    kept = {name: attrs[name] for name in ("is_causal", "q_num_heads", "kv_num_heads", "softcap") if attrs[name]}
    kept["scale"] = _scale(attrs, sizes)
    emitter.add("Attention", [q, k, v, mask, past_k, past_v], outputs, attrs=kept)
