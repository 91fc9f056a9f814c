"""What hides keys, as one bias that is added to the scores: for kernels that know little of causal masks, windows and
sinks. What layers share is made once."""

from __future__ import annotations

import numpy as np

from onnxfuse.graph.ir import Value
from onnxfuse.lower.emit import dtype_of, shape_of
from onnxfuse.lower.layout import Counted, Layout


def with_structure(
    layout: Layout, mask: Value | None, queries: Counted, keys: Counted, past_k: Value | None, causal: bool, window: int
) -> Value:
    """A mask [·, ·, S, L] that also hides what comes after each query and what is `window` (0: none) or more before it.

    Args:
        mask: the model's own, added or boolean, which stays of its kind; None: the result is boolean.
        past_k: the cached keys, which come before the first query.
    """
    key = ("structure", queries.dim, keys.dim, None if past_k is None else _length(past_k), causal, window)
    made = layout.made
    if key not in made:
        made[key] = (_visible(layout, queries, keys, past_k, causal, window), past_k)
    visible: Value = made[key][0]
    if mask is None:
        return visible
    both = ("structured", id(mask), key)
    if both not in made:
        wide = layout.to_four_dims(mask)
        shape = (*(shape_of(wide) or (None, None))[:2], queries.dim, keys.dim)
        if dtype_of(mask) == "bool":
            joined = layout.emitter.op("And", [wide, visible], dtype="bool", shape=shape)
        else:
            dtype = dtype_of(mask)
            joined = layout.emitter.op(
                "Where", [visible, wide, layout.scalar(-np.inf, dtype)], dtype=dtype, shape=shape
            )
        made[both] = (joined, mask)
    found: Value = made[both][0]
    return found


def _length(past_k: Value) -> object:
    """What tells the lengths of two caches apart."""
    shape = shape_of(past_k)
    return id(past_k) if shape is None or shape[2] is None else shape[2]


def _visible(
    layout: Layout, queries: Counted, keys: Counted, past_k: Value | None, causal: bool, window: int
) -> Value:
    """Boolean [S, L]: the key is not after the query, and less than `window` before it."""
    op, size = layout.emitter.op, (queries.dim, keys.dim)
    position = layout.numbered(queries)
    if past_k is not None:
        position = op("Add", [position, layout.size(past_k, 2)], dtype="int64", shape=(queries.dim,))
    column = layout.unsqueeze(position, [1], (queries.dim, 1))
    distance = op("Sub", [column, layout.numbered(keys)], dtype="int64", shape=size)
    found: Value | None = None
    if causal:
        found = op("GreaterOrEqual", [distance, layout.ints(0)], dtype="bool", shape=size)
    if window:
        near = op("Less", [distance, layout.ints(window)], dtype="bool", shape=size)
        found = near if found is None else op("And", [found, near], dtype="bool", shape=size)
    assert found is not None
    return found


def with_sink(
    layout: Layout, bias: Value | None, sink: Value, heads: int, queries: Counted, keys: Counted
) -> Value:
    """A bias [B or 1, H, S, L + 1] whose last column is each head's sink.

    Args:
        bias: [B or 1, H or 1, S, L] of dtype T, or None.
        sink: [H].
    """
    op, dtype, one = layout.emitter.op, dtype_of(sink), layout.ints(1)
    rows = one if bias is None else layout.size(bias, 0)
    batch = 1 if bias is None else (shape_of(bias) or (None,))[0]
    key = ("bias of all heads", None if bias is None else id(bias), heads, queries.dim, keys.dim)
    if key not in layout.made:
        all_shape = (batch, heads, queries.dim, keys.dim)
        if bias is None:
            target = _concat(layout, [one, layout.ints(heads), queries.size(), keys.size()])
            wide = op("Expand", [layout.scalar(0.0, dtype), target], shape=all_shape)
        else:
            wide = op("Expand", [bias, layout.ints(1, heads, 1, 1)], shape=all_shape)
        target = _concat(layout, [rows, layout.ints(heads), queries.size(), one])
        layout.made[key] = (wide, target, bias)
    wide, target, _ = layout.made[key]
    column = layout.reshape(sink, [1, heads, 1, 1], (1, heads, 1, 1))
    column = op("Expand", [column, target], shape=(batch, heads, queries.dim, 1))
    more = None if keys.dim is None else keys.dim + 1
    return op("Concat", [wide, column], attrs={"axis": 3}, shape=(batch, heads, queries.dim, more))


def with_empty_key(layout: Layout, x: Value) -> Value:
    """Keys or values [B, G, L, D] with zeros after the last one."""
    shape = shape_of(x)
    assert shape is not None
    batch, heads, length, size = shape
    key = ("empty key", batch if batch is not None else id(x), heads, size, dtype_of(x))
    if key not in layout.made:
        target = _concat(layout, [layout.size(x, 0), layout.ints(heads, 1, size)])
        zeros = layout.emitter.op("Expand", [layout.scalar(0.0, dtype_of(x)), target], shape=(batch, heads, 1, size))
        layout.made[key] = (zeros, x)
    more = None if length is None else length + 1
    return layout.emitter.op(
        "Concat", [x, layout.made[key][0]], attrs={"axis": 2}, shape=(batch, heads, more, size)
    )


def _concat(layout: Layout, parts: list[Value]) -> Value:
    return layout.emitter.op("Concat", parts, attrs={"axis": 0}, dtype="int64", shape=(None,))
