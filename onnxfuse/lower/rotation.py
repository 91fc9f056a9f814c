"""Rotary embeddings and packed projections that GroupQueryAttention takes in itself.

The kernel rotates queries and new keys by the rows 0, 1, 2, … of its tables (without a cache), and reads query, key and
value from one tensor [B, S, (H + 2·G)·D]. Both save a pass over the projections.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from onnxfuse.graph import consts, view
from onnxfuse.graph.ir import Node, Value
from onnxfuse.lower.emit import dtype_of, operand, shape_of
from onnxfuse.lower.kernels import MICROSOFT


@dataclass(frozen=True)
class Projections:
    """What the kernel is given: `key` and `value` are None when `query` holds all three."""

    query: Value
    key: Value | None
    value: Value | None
    cos: Value | None = None
    sin: Value | None = None
    interleaved: int = 0


def taken_in(q: Value, k: Value, v: Value, head_size: int) -> Projections:
    """The inputs behind the rotary embeddings and the Split that make q, k and v, as far as the kernel can do them.

    Args:
        q, k, v: [B, S, heads·D], with no cache before them.
        head_size: D.
    """
    of_q, of_k = _rotation(q), _rotation(k)
    found = Projections(q, k, v)
    if of_q is not None and of_k is not None and _same_tables(of_q, of_k):
        cos, sin = of_q.inputs[2], of_q.inputs[3]
        if _tables_fit(cos, sin, head_size, dtype_of(q)):
            interleaved = int(of_q.attrs.get("interleaved", 0))
            found = Projections(of_q.inputs[0], of_k.inputs[0], v, cos, sin, interleaved)
    assert found.key is not None and found.value is not None
    packed = _packed(found.query, found.key, found.value)
    if packed is None:
        return found
    return Projections(packed, None, None, found.cos, found.sin, found.interleaved)


def _rotation(value: Value) -> Node | None:
    """The kernel that rotates by rows 0, 1, 2, … of its tables, if the value comes from one."""
    node = view.producer(value)
    if node is None or node.op != "RotaryEmbedding" or view.domain(node) != MICROSOFT:
        return None
    positions = operand(node, 1)
    if positions is None or consts.ints(positions) != [0] or len(shape_of(positions) or ()) != 1:
        return None
    return node


def _same_tables(one: Node, other: Node) -> bool:
    names: tuple[tuple[str, Any], ...] = (("interleaved", 0), ("rotary_embedding_dim", 0), ("scale", 1.0))
    same_attrs = all(one.attrs.get(name, default) == other.attrs.get(name, default) for name, default in names)
    plain = one.attrs.get("scale", 1.0) == 1.0 and not one.attrs.get("is_packed_batching", 0)
    return same_attrs and plain and one.inputs[2] is other.inputs[2] and one.inputs[3] is other.inputs[3]


def _tables_fit(cos: Value, sin: Value, head_size: int, dtype: str | None) -> bool:
    shape = shape_of(cos)
    if shape is None or len(shape) != 2 or shape != shape_of(sin) or dtype_of(cos) != dtype:
        return False
    half = shape[1]
    return isinstance(half, int) and half % 8 == 0 and 0 < half <= head_size // 2 and head_size % 16 == 0


def _packed(q: Value, k: Value, v: Value) -> Value | None:
    """The tensor that one Split cuts into q, k and v, in this order and for nobody else."""
    split = view.producer(q)
    if split is None or split.op != "Split" or view.domain(split) != "":
        return None
    outputs = list(split.outputs)
    shape = shape_of(split.inputs[0])
    if len(outputs) != 3 or any(a is not b for a, b in zip(outputs, (q, k, v), strict=True)) or shape is None:
        return None
    if int(split.attrs.get("axis", 0)) % len(shape) != len(shape) - 1:
        return None
    return split.inputs[0]
