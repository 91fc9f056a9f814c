"""Attributes, shape inference and cost of the registry's ops."""

from __future__ import annotations

from typing import Any

import onnx
import pytest

from onnxfuse.errors import OpError
from onnxfuse.ops import registry
from onnxfuse.ops.opdef import OpDef, TensorType

LINEAR = registry.get("onnxfuse", "Linear")
GATED = registry.get("onnxfuse", "GatedLinear")
ROTARY = registry.get("onnxfuse.std", "RotaryEmbedding")
ATTENTION = registry.get("onnxfuse.std", "Attention")
RMS = registry.get("onnxfuse.std", "RMSNormalization")


def f32(*shape: Any) -> TensorType:
    return TensorType("float32", shape)


def test_unknown_op_names_the_known_ones() -> None:
    with pytest.raises(OpError, match=r"no op `onnxfuse::Linera`\nhint: .*GatedLinear, Linear"):
        registry.get("onnxfuse", "Linera")
    assert registry.find("onnxfuse", "Linera") is None
    assert registry.of_node(onnx.helper.make_node("Linear", ["x"], ["y"], domain="onnxfuse")) is LINEAR
    assert registry.of_node(onnx.helper.make_node("Linear", ["x"], ["y"])) is None


def test_attributes_get_defaults_and_are_checked() -> None:
    node = onnx.helper.make_node("GatedLinear", ["x", "w"], ["y"], domain="onnxfuse", layout="KN", interleave=8)
    resolved = GATED.attributes_of(node)
    assert resolved == {"layout": "KN", "norm": "none", "epsilon": 1e-5, "activation": "silu", "interleave": 8}
    for attrs, why in (
        ({"layout": "MN"}, "attribute `layout` is `MN`"),
        ({"layuot": "NK"}, "no attribute `layuot`"),
        ({"interleave": -1}, "below 0"),
        ({"interleave": 1.5}, "not int"),
        ({"epsilon": -1.0}, "below 0"),
        ({"epsilon": float("nan")}, "below 0"),
    ):
        with pytest.raises(OpError, match=why):
            GATED.resolve(attrs)


GOOD: list[tuple[OpDef, list[TensorType | None], dict[str, Any], tuple[Any, ...] | None]] = [
    (LINEAR, [f32("b", "s", 8), f32(4, 8)], {}, ("b", "s", 4)),
    (LINEAR, [f32(3, 8), f32(8, 4)], {"layout": "KN"}, (3, 4)),
    (LINEAR, [f32(None, "k"), f32(4, 8), f32(4)], {}, (None, 4)),
    (LINEAR, [TensorType("float32"), f32(4, 8)], {}, None),
    (LINEAR, [f32("b", 8), f32(4, 8), None, f32(7, 4)], {}, (7, 4)),
    (LINEAR, [f32("b", 8), TensorType("float32"), f32(4)], {}, ("b", 4)),
    (GATED, [f32("b", 8), f32(6, 8)], {"interleave": 3}, ("b", 3)),
    (GATED, [f32("b", 8), f32("n", 8)], {}, ("b", None)),
    (RMS, [f32("b", 8), TensorType("float16", (8,))], {}, ("b", 8)),
    (ROTARY, [f32("b", 2, "s", 8), f32(9, 4), f32(9, 4), TensorType("int64", (1, "s"))], {}, ("b", 2, "s", 8)),
    (ATTENTION, [f32("b", 4, "s", 8), f32("b", 2, "t", 8), f32("b", 2, "t", 6)], {}, ("b", 4, "s", 6)),
    (
        ATTENTION,
        [f32("b", "s", 32), f32("b", "t", 16), f32("b", "t", 16)],
        {"q_num_heads": 4, "kv_num_heads": 2},
        ("b", "s", 32),
    ),
]


@pytest.mark.parametrize(("op", "inputs", "attrs", "shape"), GOOD)
def test_output_shapes(op: OpDef, inputs: list[TensorType | None], attrs: dict[str, Any], shape: Any) -> None:
    assert op.infer(inputs, attrs)[0].shape == shape


BAD: list[tuple[OpDef, list[TensorType | None], dict[str, Any], str]] = [
    (LINEAR, [f32(3, 8)], {}, "input `weight` is missing"),
    (LINEAR, [f32(3, 8), f32(4, 9)], {}, r"last dim of `x` .*x float32\[3,8\], weight float32\[4,9\]"),
    (LINEAR, [f32(3, 8), f32(4, 8, 1)], {}, "`weight` must have rank 2"),
    (LINEAR, [f32(), f32(4, 8)], {}, "rank 1 or more"),
    (LINEAR, [f32(3, 8), TensorType("float16", (4, 8))], {}, "`weight` is `float16` while `x` is `float32`"),
    (LINEAR, [TensorType("int64", (3, 8)), f32(4, 8)], {}, "`x` is `int64`"),
    (LINEAR, [f32(3, 8), f32(4, 8), f32(5)], {}, "`bias` must have one element"),
    (LINEAR, [f32(3, 8), f32(4, 8), None, f32(1, 4)], {}, "`residual` must have exactly"),
    (LINEAR, [f32(3, 8), f32(4, 8), None, None, TensorType("float16", (4,))], {}, "`colsum` is `float16`"),
    (LINEAR, [f32(3, 8)] * 6, {}, "at most 5 inputs"),
    (GATED, [f32(3, 8), f32(5, 8)], {}, "even number"),
    (GATED, [f32(3, 8), f32(6, 8)], {"interleave": 2}, "not divisible by interleave"),
    (RMS, [f32(3, 8), f32(7)], {}, "`scale` does not broadcast"),
    (RMS, [f32(3, 8), f32(8)], {"axis": 2}, "axis `2` is outside"),
    (ROTARY, [f32(1, 2, 3, 8), f32(9, 4), f32(9, 4)], {}, "`cos_cache` must have rank 3 without"),
    (ROTARY, [f32(1, 2, 3, 8), f32(1, 3, 3), f32(1, 3, 3)], {}, "last dim of the caches must be `4`"),
    (ROTARY, [f32(1, 3, 16), f32(1, 3, 4), f32(1, 3, 4)], {}, "rank 3 together with"),
    (ROTARY, [f32(1, 2, 3, 8), f32(1, 3, 6), f32(1, 3, 6)], {"rotary_embedding_dim": 12}, "at most the head size `8`"),
    (ROTARY, [f32(2, 2, 3, 8), f32(9, 4), f32(9, 4), TensorType("int64", (3, 3))], {}, "batch of the positions"),
    (ATTENTION, [f32(1, 3, 2, 8), f32(1, 2, 2, 8), f32(1, 2, 2, 8)], {}, "`3` query heads are not a multiple"),
    (ATTENTION, [f32(1, 2, 2, 8), f32(1, 2, 2, 4), f32(1, 2, 2, 8)], {}, "head size of q and k"),
    (ATTENTION, [f32(1, 2, 16)] * 3, {}, "rank 4, or rank 3"),
    (ATTENTION, [f32(1, 2, 16)] * 3, {"q_num_heads": 2}, "given together"),
    (ATTENTION, [f32(1, 2, 2, 8)] * 3 + [f32(3, 2)], {}, "`attn_mask` does not broadcast"),
    (ATTENTION, [f32(1, 2, 2, 8)] * 3 + [None, f32(1, 2, 2, 8)], {}, "`past_key` and `past_value`"),
]


@pytest.mark.parametrize(("op", "inputs", "attrs", "why"), BAD)
def test_what_cannot_be_valid_is_refused(
    op: OpDef, inputs: list[TensorType | None], attrs: dict[str, Any], why: str
) -> None:
    with pytest.raises(OpError, match=why):
        op.infer(inputs, attrs)


def test_attention_adds_the_past_to_the_keys() -> None:
    new, past = f32(1, 2, 3, 8), f32(1, 2, 5, 8)
    types = ATTENTION.infer([new, new, new, None, past, past])
    assert [t.shape for t in types[:3]] == [(1, 2, 3, 8), (1, 2, 8, 8), (1, 2, 8, 8)]


def test_cost_counts_the_product_and_every_byte_once() -> None:
    x, weight = TensorType("float16", (2, 3, 8)), TensorType("float16", (4, 8))
    bias, residual = TensorType("float16", (4,)), TensorType("float16", (2, 3, 4))
    plain = LINEAR.cost([x, weight])
    assert (plain.flops, plain.bytes_read, plain.bytes_written) == (2 * 6 * 8 * 4, 2 * (48 + 32), 2 * 24)
    full = LINEAR.cost([x, weight, bias, residual], {"norm": "rms", "activation": "gelu"})
    assert full.flops > plain.flops and full.bytes_read == plain.bytes_read + 2 * (4 + 24)
    gated = GATED.cost([x, weight])
    assert gated.bytes_written == 2 * 12
    with pytest.raises(OpError, match="needs known sizes"):
        LINEAR.cost([TensorType("float16", ("b", 8)), weight])


@pytest.mark.parametrize("op", registry.OPS, ids=lambda op: op.full_name)
def test_every_op_has_a_cost(op: OpDef) -> None:
    head = f32(1, 2, 4, 8)
    inputs = {
        "Attention": [head, head, head],
        "RotaryEmbedding": [head, f32(1, 4, 4), f32(1, 4, 4)],
        "Linear": [f32(4, 8), f32(8, 8)],
        "GatedLinear": [f32(4, 8), f32(8, 8)],
        "RMSNormalization": [f32(4, 8), f32(8)],
        "LayerNormalization": [f32(4, 8), f32(8)],
    }.get(op.name, [f32(4, 8)])
    cost = op.cost(inputs)
    assert cost.flops > 0 and cost.bytes_read >= 4 * 32 and cost.bytes_written > 0
