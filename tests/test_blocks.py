"""Counting blocks: what is one op, or part of one, and what is not."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import pytest

from onnxfuse import blocks
from onnxfuse.graph import shapes
from onnxfuse.graph.model import Model

HEADER = '<ir_version: 10, opset_import: ["" : 23, "onnxfuse" : 1, "onnxfuse.std" : 1, "com.microsoft" : 1]>\n'
VECTORS = ("g1", "g2", "b")


def counted(body, origin=None, x="float[B,S,16] x", extra="float z"):
    text = f"g ({x}, float[B,S,16] r, {extra}) => (y) {{ {body} }}"
    proto = onnx.parser.parse_model(HEADER + text)
    for name in VECTORS:
        proto.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(16, np.float32), name))
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.ones((16, 16), np.float32), "w"))
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.ones((32, 16), np.float32), "w2"))
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.ones((48, 16), np.float32), "w3"))
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.array([1, -1, 16]), "one_row"))
    model = Model(proto)
    for node in model.graph.nodes:
        node.origin = origin
    shapes.infer(model)
    found = blocks.count(model)
    groups = found.pop("shared_input_matmul_groups")
    return {k: v for k, v in found.items() if v}, groups


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("y = RMSNormalization (x, g1)", {"rmsnorm": 1}),
        ("y = SimplifiedLayerNormalization (x, g1)", {"rmsnorm": 1}),
        ("y = LayerNormalization (x, g1, b)", {"layernorm": 1}),
        ("y = com.microsoft.SkipLayerNormalization (x, r, g1, b)", {"layernorm": 1, "skip_layernorm": 1}),
        ("s = Add (x, r)  y = LayerNormalization (s, g1, b)", {"layernorm": 1}),
        ("y = LayerNormalization (x, g1)", {"layernorm": 1, "layernorm_no_bias": 1}),
        ("c = Reshape (x, one_row)  y = com.microsoft.SkipLayerNormalization (r, c, g1, b)",
         {"layernorm": 1, "bcast_add_layernorm": 1}),
        ('y = onnxfuse.Linear <norm="layer"> (x, w)', {"layernorm": 1, "layernorm_no_bias": 1, "matmul": 1}),
        ("s = onnxfuse.Linear (x, w, b, r)  y = LayerNormalization (s, g1, b)",
         {"layernorm": 1, "skip_layernorm": 1, "matmul": 1, "matmul_bias": 1}),
        ("p = Gelu (x)  y = com.microsoft.FastGelu (p)", {"act_gelu_erf": 1, "act_gelu_tanh": 1}),
        ("p = com.microsoft.QuickGelu <alpha=1.0> (x)  y = com.microsoft.QuickGelu (p)",
         {"act_silu": 1, "act_quick_gelu": 1}),
        ("y = onnxfuse.std.Swish <alpha=3.0> (x)", {}),
        ("p = Relu (x)  y = Tanh (p)", {"act_relu": 1, "act_tanh": 1}),
        ("p = MatMul (x, w)  q = Transpose (w)  s = MatMul (p, q)  y = MatMul (s, r)", {"matmul": 2}),
        ("y = com.microsoft.MultiHeadAttention <num_heads=2> (x, x, x)", {"attention": 1}),
        ('y = onnxfuse.Linear <activation="gelu", norm="layer"> (x, w, b)',
         {"matmul": 1, "matmul_bias": 1, "layernorm": 1, "act_gelu_erf": 1, "matmul_bias_act_gelu_erf": 1}),
        ('y = onnxfuse.Linear <activation="silu"> (x, w)', {"matmul": 1, "act_silu": 1, "matmul_act_silu": 1}),
    ],
)  # fmt: skip
def test_what_counts(body, expected):
    found, groups = counted(body)
    assert found == expected
    assert groups == {}


@pytest.mark.parametrize(("activation", "key"), [("silu", "swiglu"), ("gelu", "geglu"), ("relu", "reglu")])
def test_gates(activation, key):
    found, groups = counted(f'y = onnxfuse.GatedLinear <activation="{activation}", norm="rms"> (x, w2)')
    assert found["rmsnorm"] == found[key] == 1 and found["matmul"] == 2
    assert groups == {"2": 1}


def test_a_norm_that_several_products_read_counts_once_per_scale():
    product = 'onnxfuse.Linear <norm="rms"> (x, w)'
    found, _ = counted(f"p = {product}  q = {product}  y = Add (p, q)")
    assert found["rmsnorm"] == 1
    found, _ = counted("p = RMSNormalization (x, g1)  q = RMSNormalization (x, g2)  y = Add (p, q)")
    assert found["rmsnorm"] == 2


PACKED = "a = onnxfuse.Linear (x, w3)  y, k, v = Split <axis=-1, num_outputs=3> (a)"


def test_a_packed_product_counts_as_several_only_if_a_rewrite_packed_it():
    assert counted(PACKED) == ({"matmul": 1}, {})
    assert counted(PACKED, origin="linear-pack") == ({"matmul": 3, "qkv_shared_input_groups": 1}, {"3": 1})


def test_norms_of_heads_are_told_apart():
    found, _ = counted("y = RMSNormalization (x, g1)", x="float[B,S,4,16] x")
    assert found == {"rmsnorm": 1, "qk_norm_rmsnorm": 1}


def test_a_rotation_inside_of_attention_counts_for_query_and_key():
    attention = "com.microsoft.GroupQueryAttention <num_heads=2, kv_num_heads=2, do_rotary=1>"
    found, _ = counted(f"y, k, v = {attention} (x, x, x, p, p, g1, g1)", extra="float[B,2,P,8] p")
    assert found["rope"] == 2 and found["attention"] == 1
