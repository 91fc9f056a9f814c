"""`onnxfuse.std::Attention` as one kernel of the target.

What ONNX Runtime's kernels do where the documents are silent was measured (1.31.1, CPU): MultiHeadAttention computes
exactly what the unfused graph does, also in rows where every key is hidden (uniform for a finite mask, NaN for -inf);
ai.onnx Attention gives zeros in such rows, for the lowest finite number too. Both take a past of length 0.
"""

from __future__ import annotations

import math
from typing import Any

from onnxfuse.analysis import masks
from onnxfuse.graph import types
from onnxfuse.graph.ir import Node, Value, Variable
from onnxfuse.lower import group_query, masking
from onnxfuse.lower.attention_sizes import Sizes, mask_fits, scale_of, sizes_of, take
from onnxfuse.lower.emit import Emitter, dtype_of, operand
from onnxfuse.lower.kernels import MICROSOFT, KernelTable
from onnxfuse.lower.layout import Counted, Layout
from onnxfuse.ops import registry
from onnxfuse.ops.opdef import STD_DOMAIN


def lower_attention(emitter: Emitter, kernels: KernelTable, node: Node) -> bool:
    """Replace the node by a kernel that computes the same; False (and the node untouched) if the target has none."""
    attrs = registry.get(STD_DOMAIN, node.op).resolve(dict(node.attrs))
    sizes = sizes_of(node, attrs)
    if sizes is None or operand(node, 6) is not None or (len(node.outputs) > 3 and node.outputs[3].name):
        return False
    dtype = dtype_of(node.inputs[0])
    opset = emitter.opset
    if (
        # On CPU only for what the other kernels lack.
        (kernels.target.provider == "cuda" or attrs["softcap"])
        and kernels.has("GroupQueryAttention", dtype, opset=opset, domain=MICROSOFT, num_heads=1, kv_num_heads=1)
        and group_query.takes(node, attrs, sizes)
    ):
        group_query.emit(emitter, node, attrs, sizes)
        return True
    fits = not attrs["softcap"] and mask_fits(operand(node, 3), sizes)
    same = _mask_is_of(node, dtype)
    multi_head = fits and same and kernels.has("MultiHeadAttention", dtype, opset=opset, domain=MICROSOFT, num_heads=1)
    alone = _hides_by_itself(node, attrs, sizes)
    native = same and kernels.has("Attention", dtype, opset=opset, rank=4) and _native_takes(node, attrs, sizes)
    if native and not (multi_head and alone):
        _emit_native(emitter, node, attrs, sizes)
        return True
    if not multi_head:
        return fits and _through_float32(emitter, kernels, node)
    one_size = operand(node, 4) is None or sizes.head_size == sizes.value_size
    rows = sizes.group > 1 and one_size and operand(node, 7) is None and not (attrs["is_causal"] and alone)
    if rows and _rows_pay(node, kernels):
        _emit_grouped_rows(emitter, node, attrs, sizes)
    else:
        _emit_multi_head(emitter, node, attrs, sizes, kernels.target.provider == "cpu")
    return True


def _mask_is_of(node: Node, dtype: str | None) -> bool:
    """Whether the mask has the dtype of the queries, as kernels want it; one in float32 may hold numbers that these do
    not."""
    mask = operand(node, 3)
    return mask is None or dtype_of(mask) in (dtype, "bool")


def _through_float32(emitter: Emitter, kernels: KernelTable, node: Node) -> bool:
    """Half precision between Casts: where the target computes it in float32 anyway (a CPU), or the mask is in it."""
    dtype, wide = dtype_of(node.inputs[0]), "float32"
    has = kernels.has("MultiHeadAttention", wide, opset=emitter.opset, domain=MICROSOFT, num_heads=1)
    wanted = kernels.target.provider == "cpu" or not _mask_is_of(node, dtype)
    if dtype not in types.HALVES or not wanted or not has:
        return False
    attrs = dict(node.attrs)
    inputs, outputs = emitter.replace(node)
    layout = Layout(emitter)
    made = [Variable(emitter.model.names.fresh(f"{o.name}_wide"), dtype=wide, shape=o.shape) if o.name else o
            for o in outputs]  # fmt: skip
    given = [Variable("") if v is None else layout.cast(v, wide) if dtype_of(v) == dtype else v for v in inputs]
    lowered = lower_attention(emitter, kernels, Node("Attention", attrs=attrs, inputs=given, outputs=made))
    assert lowered, "it has the sizes and the kernel"
    for own, result in zip(made, outputs, strict=True):
        if result.name:
            emitter.op("Cast", [own], attrs={"to": types.onnx_of(str(dtype))}, out=result)
    return True


def _rows_pay(node: Node, kernels: KernelTable) -> bool:
    """Whether grouped keys are not repeated (`_emit_grouped_rows`).

    With a cache, on CPU: 0.62 to 0.80 of the exported time for one token after 128 to 512, against 0.94 to 0.98 with
    repeated keys; for 256 tokens both take the same. Without one, repeated keys give more threads something to do.
    """
    return kernels.target.provider == "cpu" and operand(node, 4) is not None


# MultiHeadAttention -------------------------------------------------------------------------------------------------


def _hides_by_itself(node: Node, attrs: dict[str, Any], sizes: Sizes) -> bool:
    """Whether what the node's attributes hide needs no mask: nothing, or keys after each query as the kernel has it."""
    if attrs["window"] or operand(node, 7) is not None:
        return False
    if not attrs["is_causal"]:
        return True
    if operand(node, 3) is not None:
        return False
    if operand(node, 4) is None:
        return bool(sizes.queries == sizes.keys)
    # With a cache it must know where the new keys begin.
    return not _joined_outside(node, sizes)


def _joined_outside(node: Node, sizes: Sizes) -> bool:
    """Whether keys are put behind those of the cache (and repeated for their group) before the kernel: its own cache
    has one size for keys and values, and one head for each of the queries."""
    return operand(node, 4) is not None and (sizes.group > 1 or sizes.value_size != sizes.head_size)


def _hiding(layout: Layout, node_inputs: list[Any], attrs: dict[str, Any], queries: Counted, keys: Counted) -> Any:
    """The bias that hides all that the node hides, where the kernel does not do it by itself."""
    q, mask, past_k = node_inputs[0], node_inputs[3], node_inputs[4]
    if attrs["is_causal"] or attrs["window"]:
        mask = masking.with_structure(layout, mask, queries, keys, past_k, attrs["is_causal"], attrs["window"])
    return None if mask is None else layout.bias(mask, queries, keys, dtype_of(q))


def _emit_multi_head(emitter: Emitter, node: Node, attrs: dict[str, Any], sizes: Sizes, repeat_as_heads: bool) -> None:
    """`repeat_as_heads`: keys and values go in as [B, H, L, D] where they were so or are repeated, else as [B, L, H·D].
    Measured: the former is 2 to 3% faster on CPU; on CUDA the latter is 8 to 15% faster, and the former took 40 ms at
    some shapes."""
    alone, outside = _hides_by_itself(node, attrs, sizes), _joined_outside(node, sizes)
    inputs, outputs = take(emitter, node)
    q, k, v, mask, past_k, past_v, _, sink = inputs
    layout = Layout(emitter)
    queries, keys = _counted(layout, sizes, q, k, past_k)
    if alone:
        bias = None if mask is None else layout.bias(mask, queries, keys, dtype_of(q))
    else:
        bias = _hiding(layout, inputs, attrs, queries, keys)
    present: list[Value | None] = [outputs[1], outputs[2]]
    as_heads = repeat_as_heads and sizes.head_size == sizes.value_size  # the kernel takes [B, H, L, D] of one size only
    if outside or sink is not None or (sizes.group > 1 and repeat_as_heads):
        k, v = _with_past(layout, sizes, k, v, past_k, past_v, present)
        past_k = past_v = None
        if sink is not None:
            k, v = masking.with_empty_key(layout, k), masking.with_empty_key(layout, v)
            bias = masking.with_sink(layout, bias, sink, sizes.heads, queries, keys)
        if sizes.group > 1:
            k, v = layout.repeat_heads(k, sizes.group), layout.repeat_heads(v, sizes.group)
        if not as_heads:
            k, v = layout.merge_heads(k), layout.merge_heads(v)
    else:
        if not sizes.packed and (past_k is not None or not as_heads):
            k, v = layout.merge_heads(k), layout.merge_heads(v)
        if sizes.group > 1:
            k, v = (layout.repeat_packed(x, sizes.kv_heads, sizes.group) for x in (k, v))
    if not sizes.packed:
        q = layout.merge_heads(q)
    y_shape = (sizes.batch, sizes.queries, sizes.heads * sizes.value_size)
    direct = sizes.packed and not attrs["nan_guard"]
    y = outputs[0] if direct else layout.new(q, y_shape)
    kernel_attrs = {"num_heads": sizes.heads, "scale": scale_of(attrs, sizes)}
    if attrs["is_causal"] and alone:
        kernel_attrs["unidirectional"] = 1
    emitter.add(
        "MultiHeadAttention",
        [q, k, v, None, None, bias, past_k, past_v],
        [y, *present] if past_k is not None else [y],
        domain=MICROSOFT,
        attrs=kernel_attrs,
    )
    _finish_output(layout, attrs, sizes, y, outputs[0])


def _counted(layout: Layout, sizes: Sizes, q: Value, k: Value, past_k: Value | None) -> tuple[Counted, Counted]:
    queries = layout.queries(q, sizes.queries, sizes.packed)
    return queries, layout.keys(k, past_k, sizes.keys, sizes.packed)


def _emit_grouped_rows(emitter: Emitter, node: Node, attrs: dict[str, Any], sizes: Sizes) -> None:
    """MultiHeadAttention over the key heads, the query heads of each group as further queries: no key is repeated."""
    inputs, outputs = take(emitter, node)
    q, k, v, _, past_k, past_v = inputs[:6]
    layout = Layout(emitter)
    queries, keys = _counted(layout, sizes, q, k, past_k)
    bias = _hiding(layout, inputs, attrs, queries, keys)
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
        attrs={"num_heads": sizes.kv_heads, "scale": scale_of(attrs, sizes)},
    )
    direct = sizes.packed and not attrs["nan_guard"]
    packed = layout.rows_to_group(y, sizes.kv_heads, sizes.group, sizes.queries, outputs[0] if direct else None)
    _finish_output(layout, attrs, sizes, packed, outputs[0])


def _finish_output(layout: Layout, attrs: dict[str, Any], sizes: Sizes, y: Value, out: Value) -> None:
    """Rows without a visible key come out as NaN; the guard makes them 0. Then back to [B, H, S, D] if wanted."""
    if y is out:
        return
    if attrs["nan_guard"]:
        y = layout.nan_to_zero(y, out if sizes.packed else None)
    if not sizes.packed:
        layout.split_heads(y, sizes.heads, out)


def _with_past(
    layout: Layout,
    sizes: Sizes,
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


# ai.onnx Attention --------------------------------------------------------------------------------------------------


def _native_takes(node: Node, attrs: dict[str, Any], sizes: Sizes) -> bool:
    """It has no window and no sinks. Rows without a visible key are zeros there: right only with the guard, or without
    a mask."""
    if attrs["window"] or operand(node, 7) is not None:
        return False
    mask = operand(node, 3)
    if mask is None:
        return True
    if not mask_fits(mask, sizes):
        return False
    if dtype_of(mask) == "bool":
        return bool(attrs["nan_guard"])
    facts = masks.analyze(mask)
    if facts is None or any(isinstance(t, masks.Bias) for t in facts.terms):
        return False
    # Zero rows are what the guard means, if the mask hides with -inf only.
    return bool(attrs["nan_guard"]) and all(t.fill == -math.inf for t in facts.terms if isinstance(t, masks.Choice))


def _emit_native(emitter: Emitter, node: Node, attrs: dict[str, Any], sizes: Sizes) -> None:
    inputs, outputs = take(emitter, node)
    q, k, v, mask, past_k, past_v = inputs[:6]
    layout = Layout(emitter)
    if mask is not None:
        mask = layout.to_scores(layout.to_four_dims(mask), *_counted(layout, sizes, q, k, past_k))
    kept = {name: attrs[name] for name in ("is_causal", "q_num_heads", "kv_num_heads", "softcap") if attrs[name]}
    kept["scale"] = scale_of(attrs, sizes)
    emitter.add("Attention", [q, k, v, mask, past_k, past_v], outputs, attrs=kept)
