"""The lifted norms and activations become one kernel each, or what the target has instead."""

from __future__ import annotations

import numpy as np
import pytest

from onnxfuse.errors import OpError
from onnxfuse.lower.kernels import KernelTable, Target

K = 16
X = f"g (float[B,S,{K}] x) => (float[B,S,{K}] y)"


def vector(rng, dtype=np.float32):
    return rng.standard_normal(K).astype(dtype)


@pytest.mark.parametrize(
    ("node", "opset", "op"),
    [
        ("RMSNormalization <epsilon=1e-6> (x, s)", 17, "SimplifiedLayerNormalization"),
        ("RMSNormalization <epsilon=1e-6> (x, s)", 23, "RMSNormalization"),
        ("LayerNormalization <epsilon=1e-6> (x, s, b)", 13, "LayerNormalization"),
        ("LayerNormalization <epsilon=1e-6> (x, s)", 17, "LayerNormalization"),
        ("Gelu (x)", 17, "com.microsoft.Gelu"),
        ("Gelu (x)", 20, "Gelu"),
        ('Gelu <approximate="tanh"> (x)', 17, "com.microsoft.FastGelu"),
        ("Swish <alpha=1.702> (x)", 17, "com.microsoft.QuickGelu"),
    ],
)
def test_one_kernel(case, rng, node, opset, op):
    made = case(f"{X} {{ y = onnxfuse.std.{node} }}", {"s": vector(rng), "b": vector(rng)}, opset).lower()
    assert made.ops == {op: 1}
    assert made.report.taken_apart == []
    made.check({"x": rng.standard_normal((2, 5, K)).astype(np.float32)})


@pytest.mark.parametrize("node", ["Gelu (x)", 'Gelu <approximate="tanh"> (x)', "Swish (x)"])
def test_half_activations_go_through_float32(case, rng, node):
    text = X.replace("float[", "float16[")
    made = case(f"{text} {{ y = onnxfuse.std.{node} }}", {}).lower()
    assert made.ops["Cast"] == 2 and sum(made.ops.values()) == 3
    made.check({"x": rng.standard_normal((2, 5, K)).astype(np.float16)}, limit=2e-3)


def test_a_scale_that_the_kernel_does_not_take_is_spelled_out(case, rng):
    made = case(f"{X} {{ y = onnxfuse.std.RMSNormalization (x, s) }}", {"s": np.array([2.0], np.float32)}).lower()
    assert "ReduceMean" in made.ops
    assert made.report.taken_apart[0].reason == "no-kernel"
    made.check({"x": rng.standard_normal((2, 5, K)).astype(np.float32)})


def test_a_body_that_the_opset_cannot_spell_is_an_error(case, rng):
    made = case(f"{X} {{ y = onnxfuse.std.Swish (x) }}", {}, 17)
    made.model.opsets[""] = 9
    with pytest.raises(OpError, match="opset `9`"):
        made.lower(kernels=KernelTable(Target("cpu"), lambda target, query: False))


SKIP = """g (float[B,S,16] x, float[B,S,16] r) => (float[B,S,16] y{also}) {{
    y, m, v, s = com.microsoft.{op} <epsilon=1e-6> (x, r, g1{shift})
}}"""


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("layer", [False, True])
def test_skip_norms_of_rewrites(case, rng, layer, again):
    text = SKIP.format(
        op="SkipLayerNormalization" if layer else "SkipSimplifiedLayerNormalization", shift=", b1" if layer else "",
        also=", float[B,S,16] s" if again else "",
    )
    values = {"g1": vector(rng), "b1": vector(rng)} if layer else {"g1": vector(rng)}
    feeds = {n: rng.standard_normal((2, 5, K)).astype(np.float32) for n in ("x", "r")}
    on_cpu = case(text, values).lower(origin="skip-norm")
    norm = "LayerNormalization" if layer else "SimplifiedLayerNormalization"
    assert on_cpu.ops == {"Sum" if layer and not again else "Add": 1, norm: 1}
    on_cpu.check(feeds)
    on_cuda = case(text, values).lower("cuda:sm90", origin="skip-norm")
    assert sum(on_cuda.ops.values()) == 1
    (node,) = on_cuda.model.graph.nodes
    assert [bool(v.name) for v in node.outputs] == ([True, False, False, True] if again else [True])
    on_cuda.check(feeds)
    assert case(text, values).lower().ops["Add"] == 0  # the source model's own choice is kept
