"""What every lowering of `onnxfuse.std::Attention` asks about a node."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from onnxfuse.graph.ir import Node, Value
from onnxfuse.lower.emit import Emitter, operand, shape_of


@dataclass(frozen=True)
class Sizes:
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


def sizes_of(node: Node, attrs: dict[str, Any]) -> Sizes | None:
    """None if the rank, the number of heads or their size is not known."""
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
    return Sizes(q[0], q[2], k[2], keys, q[1], k[1], q[3], v[3], packed)


def scale_of(attrs: dict[str, Any], sizes: Sizes) -> float:
    """The factor on the scores."""
    return attrs["scale"] if attrs["scale"] is not None else 1 / math.sqrt(sizes.head_size)


def mask_fits(mask: Value | None, sizes: Sizes) -> bool:
    """Whether kernels take the mask: they repeat over batch and heads only what has size 1 there; over queries and keys
    it is repeated before."""
    if mask is None:
        return True
    shape = shape_of(mask)
    if shape is None or not 2 <= len(shape) <= 4:
        return False
    return len(shape) < 3 or shape[-3] in (1, sizes.heads)


def take(emitter: Emitter, node: Node) -> tuple[list[Any], list[Any]]:
    """The node's eight inputs and three outputs (None: omitted), which new nodes must make."""
    inputs, outputs = emitter.replace(node)
    made: list[Any] = [o if o.name else None for o in outputs]
    return [*inputs, *[None] * (8 - len(inputs))], [*made, *[None] * (3 - len(made))]
