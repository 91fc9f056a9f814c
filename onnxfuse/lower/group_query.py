"""`onnxfuse.std::Attention` as com.microsoft's GroupQueryAttention: causal, with window, soft cap and sinks."""

from __future__ import annotations

from typing import Any

from onnxfuse.graph.ir import Node
from onnxfuse.lower import rotation
from onnxfuse.lower.attention_sizes import Sizes, scale_of, take
from onnxfuse.lower.emit import Emitter, operand
from onnxfuse.lower.kernels import MICROSOFT
from onnxfuse.lower.layout import Layout


def takes(node: Node, attrs: dict[str, Any], sizes: Sizes) -> bool:
    """The kernel is causal by itself and wants the same number of keys in all sequences of the batch.

    It refuses a cache together with several new tokens and a batch above 1. Without grouping MultiHeadAttention is
    faster (measured on an H200, float16: 71 against 255 µs for 16 sequences of 512, 12 heads of 64).
    """
    if not attrs["is_causal"] or operand(node, 3) is not None or operand(node, 4) is not None:
        return False
    if sizes.head_size != sizes.value_size or sizes.queries != sizes.keys:
        return False
    return sizes.group > 1 or bool(attrs["softcap"]) or bool(attrs["window"]) or operand(node, 7) is not None


def emit(emitter: Emitter, node: Node, attrs: dict[str, Any], sizes: Sizes) -> None:
    inputs, outputs = take(emitter, node)
    (q, k, v), sink = inputs[:3], inputs[7]
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
        "scale": scale_of(attrs, sizes),
    }
    if attrs["window"]:
        kernel_attrs["local_window_size"] = attrs["window"]
    if attrs["softcap"]:
        kernel_attrs["softcap"] = attrs["softcap"]
    tables = [given.cos, given.sin]
    if given.cos is not None:
        kernel_attrs |= {"do_rotary": 1, "rotary_interleaved": given.interleaved}
    emitter.add(
        "GroupQueryAttention",
        [given.query, given.key, given.value, None, None, last_key, total, *tables, None, None, sink],
        [y, *present],
        domain=MICROSOFT,
        attrs=kernel_attrs,
    )
    if not sizes.packed:
        layout.split_heads(y, sizes.heads, outputs[0])
