"""``onnxfuse.std::RotaryEmbedding``, as ai.onnx opset 23 defines it.

Stricter in one point: `num_heads` is given exactly when x is 3-D. Looser in one: `position_ids`, or 3-D caches, may
have batch 1 and are then broadcast.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from onnxfuse.ops.body import BodyBuilder
from onnxfuse.ops.opdef import STD_DOMAIN, AttrDef, Cost, InputDef, OpDef, TensorType, product, tensor_bytes, unify


def _infer(op: OpDef, inputs: Sequence[TensorType | None], attrs: Mapping[str, Any]) -> list[TensorType]:
    x, cos, sin, positions = inputs
    assert x is not None and cos is not None and sin is not None
    heads, rotary_dim = attrs["num_heads"], attrs["rotary_embedding_dim"]
    cache_rank = 3 if positions is None else 2
    for name, cache in (("cos_cache", cos), ("sin_cache", sin)):
        if cache.shape is not None and len(cache.shape) != cache_rank:
            raise op.refuse(
                inputs, f"`{name}` must have rank {cache_rank} {'without' if cache_rank == 3 else 'with'} position_ids"
            )
    if positions is not None and positions.shape is not None and len(positions.shape) != 2:
        raise op.refuse(inputs, "`position_ids` must have rank 2")
    caches = list(zip(cos.shape or (), sin.shape or (), strict=False))
    if not all(unify(a, b)[0] for a, b in caches):
        raise op.refuse(inputs, "`cos_cache` and `sin_cache` must have the same shape")
    if x.shape is None:
        return [x]
    if len(x.shape) != (3 if heads else 4):
        raise op.refuse(inputs, "`x` must have rank 4, or rank 3 together with the attribute num_heads")
    head_size = x.shape[-1]
    if heads and isinstance(head_size, int):
        if head_size % heads:
            raise op.refuse(inputs, f"the last dim of `x` is not divisible by num_heads `{heads}`")
        head_size //= heads
    if isinstance(head_size, int):
        rotated = rotary_dim or head_size
        if rotated > head_size or rotated % 2:
            raise op.refuse(
                inputs, f"rotary_embedding_dim `{rotated}` must be even and at most the head size `{head_size}`"
            )
        if cos.shape is not None and not unify(cos.shape[-1], rotated // 2)[0]:
            raise op.refuse(inputs, f"the last dim of the caches must be `{rotated // 2}`")
    batch, length = x.shape[0], x.shape[-2 if not heads else 1]
    by_position = positions if positions is not None else cos
    if by_position.shape is not None:
        if by_position.shape[0] != 1 and not unify(by_position.shape[0], batch)[0]:
            raise op.refuse(inputs, "the batch of the positions is neither 1 nor that of `x`")
        if not unify(by_position.shape[1], length)[0]:
            raise op.refuse(inputs, "the positions do not cover the sequence of `x`")
    return [x]


def _reference(inputs: Sequence[np.ndarray | None], attrs: Mapping[str, Any]) -> list[np.ndarray]:
    x, cos, sin, positions = inputs
    assert x is not None and cos is not None and sin is not None
    shape, heads = x.shape, attrs["num_heads"]
    if heads:
        x = x.reshape(shape[0], shape[1], heads, shape[2] // heads).transpose(0, 2, 1, 3)
    if positions is not None:
        cos, sin = cos[positions], sin[positions]
    cos, sin = cos[:, None], sin[:, None]
    rotary_dim = attrs["rotary_embedding_dim"] or x.shape[-1]
    rotated, kept = x[..., :rotary_dim], x[..., rotary_dim:]
    if attrs["interleaved"]:
        a, b = rotated[..., 0::2], rotated[..., 1::2]
    else:
        a, b = rotated[..., : rotary_dim // 2], rotated[..., rotary_dim // 2 :]
    real, imaginary = cos * a - sin * b, sin * a + cos * b
    if attrs["interleaved"]:
        rotated = np.stack([real, imaginary], axis=-1).reshape(rotated.shape)
    else:
        rotated = np.concatenate([real, imaginary], axis=-1)
    y = np.concatenate([rotated, kept], axis=-1)
    return [y.transpose(0, 2, 1, 3).reshape(shape) if heads else y]


def _body(b: BodyBuilder, inputs: Sequence[str], outputs: Sequence[str], attrs: Mapping[str, Any]) -> None:
    x, cos, sin, positions = inputs
    heads, rotary_dim = attrs["num_heads"], attrs["rotary_embedding_dim"]
    original = x
    if heads:
        x = b.op("Transpose", b.op("Reshape", x, b.ints(0, 0, heads, -1)), perm=[0, 2, 1, 3])
    if positions:
        cos, sin = (b.op("Gather", cache, positions, axis=0) for cache in (cos, sin))
    cos, sin = b.unsqueeze(cos, 1), b.unsqueeze(sin, 1)
    rotated, kept = x, None
    if rotary_dim:
        rotated, kept = b.slice(x, 0, rotary_dim, -1), b.slice(x, rotary_dim, _END, -1)
    if attrs["interleaved"]:
        first, second = b.slice(rotated, 0, _END, -1, 2), b.slice(rotated, 1, _END, -1, 2)
    else:
        first, second = b.split(rotated, 2)
    real = b.op("Sub", b.op("Mul", cos, first), b.op("Mul", sin, second))
    imaginary = b.op("Add", b.op("Mul", sin, first), b.op("Mul", cos, second))
    if attrs["interleaved"]:
        pairs = b.op("Concat", b.unsqueeze(real, -1), b.unsqueeze(imaginary, -1), axis=-1)
        parts = [b.op("Reshape", pairs, b.op("Shape", rotated))]
    else:
        parts = [real, imaginary]
    if kept:
        parts.append(kept)
    y = parts[0] if len(parts) == 1 else b.op("Concat", *parts, axis=-1)
    if heads:
        y = b.op("Reshape", b.op("Transpose", y, perm=[0, 2, 1, 3]), b.op("Shape", original))
    b.finish(y, outputs[0])


_END = 2**31 - 1


def _cost(inputs: Sequence[TensorType | None], attrs: Mapping[str, Any]) -> Cost:
    x = inputs[0]
    assert x is not None and x.shape is not None
    elements = product([d for d in x.shape if isinstance(d, int)])
    return Cost(3 * elements, sum(map(tensor_bytes, inputs)), tensor_bytes(x))


ROTARY_EMBEDDING = OpDef(
    name="RotaryEmbedding",
    domain=STD_DOMAIN,
    summary="rotates pairs of each head's elements by the angle of their position",
    inputs=(
        InputDef("x"),
        InputDef("cos_cache"),
        InputDef("sin_cache"),
        InputDef("position_ids", optional=True, same_as_t=False, dtypes=frozenset({"int64"})),
    ),
    outputs=("y",),
    attributes=(
        AttrDef("interleaved", int, 0, (0, 1)),
        AttrDef("num_heads", int, 0, minimum=0),
        AttrDef("rotary_embedding_dim", int, 0, minimum=0),
    ),
    infer_fn=_infer,
    reference_fn=_reference,
    body_fn=_body,
    cost_fn=_cost,
    min_body_opset=13,
)
