"""`Linear` and `GatedLinear`: taken apart on the CPU, prepared for CUDA; the numbers stay."""

from __future__ import annotations

import numpy as np
import pytest

from onnxfuse.graph import consts
from onnxfuse.lower.kernels import KernelTable, Target

K, N = 16, 24


def weight(rng, *shape):
    return (rng.standard_normal(shape) / 4).astype(np.float32)


@pytest.mark.parametrize("layout", ["NK", "KN"])
@pytest.mark.parametrize("norm", ["none", "rms", "layer"])
@pytest.mark.parametrize("activation", ["none", "relu", "gelu", "gelu_tanh", "quick_gelu", "silu", "tanh"])
@pytest.mark.parametrize("extras", ["", "b", "r", "br"])
def test_linear_on_cpu(case, rng, layout, norm, activation, extras):
    inputs = ["x", "w", "b" if "b" in extras else "", "r" if "r" in extras else ""]
    attrs = f'layout="{layout}", norm="{norm}", activation="{activation}"'
    given = ", ".join(inputs).rstrip(", ")
    text = f"g (float[B,S,{K}] x, float[B,S,{N}] r) => (float[B,S,{N}] y) {{ y = onnxfuse.Linear <{attrs}> ({given}) }}"
    weights = {"w": weight(rng, *((N, K) if layout == "NK" else (K, N)))}
    if "b" in extras:
        weights["b"] = weight(rng, N)
    made = case(text, weights).lower()
    assert not any(op.startswith("onnxfuse") for op in made.ops)
    made.check({"x": weight(rng, 2, 5, K), "r": weight(rng, 2, 5, N)})


def test_two_dims_become_gemm_with_the_weight_as_it_lies(case, rng):
    text = f"g (float[M,{K}] x) => (float[M,{N}] y) {{ y = onnxfuse.Linear (x, w, b) }}"
    made = case(text, {"w": weight(rng, N, K), "b": weight(rng, N)}).lower()
    assert made.ops == {"Gemm": 1}
    made.check({"x": weight(rng, 5, K)})


def test_bias_and_gelu_are_one_kernel(case, rng):
    text = f'g (float[B,S,{K}] x) => (float[B,S,{N}] y) {{ y = onnxfuse.Linear <activation="gelu"> (x, w, b) }}'
    made = case(text, {"w": weight(rng, N, K), "b": weight(rng, N)}).lower()
    assert made.ops == {"MatMul": 1, "com.microsoft.BiasGelu": 1}
    assert made.report.to_json()["taken_apart"][0]["reason"].startswith("does-not-pay")


def test_residual_before_a_layer_norm_is_a_sum(case, rng):
    text = f"""g (float[B,S,{K}] x, float[B,S,{N}] r) => (float[B,S,{N}] y) {{
        s = onnxfuse.Linear (x, w, b, r)
        y = onnxfuse.std.LayerNormalization (s, g1, b1)
    }}"""
    values = {"w": weight(rng, N, K), "b": weight(rng, N), "g1": weight(rng, N), "b1": weight(rng, N)}
    made = case(text, values).lower()
    assert made.ops == {"MatMul": 1, "Sum": 1, "LayerNormalization": 1}
    made.check({"x": weight(rng, 2, 5, K), "r": weight(rng, 2, 5, N)})


def test_a_tied_weight_is_transposed_by_a_node(case, rng):
    text = f"""g (int64[B,S] ids, float[B,S,{K}] x) => (float[B,S,{N}] y, float[B,S,{K}] e) {{
        e = Gather (w, ids)
        y = onnxfuse.Linear (x, w)
    }}"""
    made = case(text, {"w": weight(rng, N, K)}).lower()
    assert made.ops == {"Gather": 1, "Transpose": 1, "MatMul": 1}
    assert len(made.model.to_proto().graph.initializer) == 1


def test_products_of_one_norm_share_it(case, rng):
    text = f"""g (float[B,S,{K}] x) => (float[B,S,{N}] y, float[B,S,{N}] z) {{
        y = onnxfuse.Linear <norm="rms"> (x, w)
        z = onnxfuse.Linear <norm="rms"> (x, v)
    }}"""
    made = case(text, {"w": weight(rng, N, K), "v": weight(rng, N, K)}).lower()
    assert made.ops == {"SimplifiedLayerNormalization": 1, "MatMul": 2}
    made.check({"x": weight(rng, 2, 5, K)})


@pytest.mark.parametrize("layout", ["NK", "KN"])
@pytest.mark.parametrize("bias", [False, True])
def test_packed_products_are_separate_on_cpu(case, rng, layout, bias):
    text = f"""g (float[B,S,{K}] x) => (float[B,S,16] q, float[B,S,8] k) {{
        all = onnxfuse.Linear <layout="{layout}", norm="layer"> (x, w{', b' if bias else ''})
        q, k = Split <axis=-1> (all, sizes)
    }}"""
    values = {"w": weight(rng, *((24, K) if layout == "NK" else (K, 24))), "sizes": np.array([16, 8])}
    if bias:
        values["b"] = weight(rng, 24)
    made = case(text, values).lower(origin="linear-pack")
    assert made.ops["MatMul"] == 2 and made.ops["Split"] == 0 and made.ops["LayerNormalization"] == 1
    made.check({"x": weight(rng, 2, 5, K)})


def test_a_product_that_was_exported_packed_stays_packed(case, rng):
    text = f"""g (float[B,S,{K}] x) => (float[B,S,16] q, float[B,S,8] k) {{
        all = onnxfuse.Linear (x, w)
        q, k = Split <axis=-1> (all, sizes)
    }}"""
    made = case(text, {"w": weight(rng, 24, K), "sizes": np.array([16, 8])}).lower()
    assert made.ops == {"MatMul": 1, "Split": 1}


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "quick_gelu", "relu"])
@pytest.mark.parametrize("layout", ["NK", "KN"])
def test_gated_linear_on_cpu(case, rng, activation, layout):
    attrs = f'layout="{layout}", activation="{activation}", norm="rms"'
    text = f"g (float[B,S,{K}] x) => (float[B,S,{N}] y) {{ y = onnxfuse.GatedLinear <{attrs}> (x, w, b) }}"
    values = {"w": weight(rng, *((2 * N, K) if layout == "NK" else (K, 2 * N))), "b": weight(rng, 2 * N)}
    made = case(text, values).lower()
    assert made.ops["MatMul"] == 2 and not any(op.startswith("onnxfuse") for op in made.ops)
    made.check({"x": weight(rng, 2, 5, K)})


def test_half_precision_has_no_kernel_of_its_own_on_cpu_and_stays_right(case, rng):
    body = 'y = onnxfuse.Linear <activation="silu", norm="rms"> (x, w)'
    text = f"g (float16[B,S,{K}] x) => (float16[B,S,{N}] y) {{ {body} }}"
    made = case(text, {"w": weight(rng, N, K).astype(np.float16)}).lower()
    assert made.ops["com.microsoft.QuickGelu"] == 1 and made.ops["Cast"] == 2
    made.check({"x": weight(rng, 2, 5, K).astype(np.float16)}, limit=4e-3)


def test_without_any_kernel_the_body_takes_its_place(case, rng):
    body = 'y = onnxfuse.Linear <activation="silu", norm="rms"> (x, w)'
    text = f"g (float[B,S,{K}] x) => (float[B,S,{N}] y) {{ {body} }}"
    nothing = KernelTable(Target("cpu"), lambda target, query: False, custom_ops=False)
    made = case(text, {"w": weight(rng, N, K)}).lower(kernels=nothing)
    assert {"Sigmoid", "ReduceMean", "MatMul"} <= set(made.ops)
    reasons = {e["op"]: e["reason"] for e in made.report.to_json()["taken_apart"]}
    assert reasons["onnxfuse::Linear"] == reasons["onnxfuse.std::Swish"] == "no-kernel"
    made.check({"x": weight(rng, 2, 5, K)})


class TestCuda:
    """What our CUDA kernels want, checked with the CPU kernels of the same ops."""

    def test_weights_lie_by_rows_and_have_column_sums(self, case, rng):
        body = 'y = onnxfuse.Linear <layout="KN", norm="layer"> (x, w, b)'
        text = f"g (float[B,S,{K}] x) => (float[B,S,{N}] y) {{ {body} }}"
        w = weight(rng, K, N)
        made = case(text, {"w": w, "b": weight(rng, N)}).lower("cuda:sm90")
        (node,) = made.model.graph.nodes
        assert node.attrs["layout"] == "NK" and len(node.inputs) == 5 and node.inputs[3].name == ""
        assert np.array_equal(consts.array(node.inputs[1]), w.T)
        assert np.allclose(consts.array(node.inputs[4]), w.sum(axis=0), atol=1e-6)
        made.check({"x": weight(rng, 2, 5, K)})

    def test_gate_and_up_alternate_in_blocks_of_eight(self, case, rng):
        text = f'g (float[B,S,{K}] x) => (float[B,S,{N}] y) {{ y = onnxfuse.GatedLinear <layout="KN"> (x, w, b) }}'
        made = case(text, {"w": weight(rng, K, 2 * N), "b": weight(rng, 2 * N)}).lower("cuda:sm90")
        (node,) = made.model.graph.nodes
        assert node.attrs["interleave"] == 8
        made.check({"x": weight(rng, 2, 5, K)})

    def test_features_that_eight_does_not_divide_stay_as_they_are(self, case, rng):
        text = f"g (float[B,S,{K}] x) => (float[B,S,12] y) {{ y = onnxfuse.GatedLinear (x, w) }}"
        made = case(text, {"w": weight(rng, 24, K)}).lower("cuda:sm90")
        (node,) = made.model.graph.nodes
        assert not node.attrs.get("interleave")
        made.check({"x": weight(rng, 2, 5, K)})

    def test_a_bare_product_is_left_to_cublas(self, case, rng):
        text = f"g (float[B,S,{K}] x) => (float[B,S,{N}] y) {{ y = onnxfuse.Linear (x, w) }}"
        assert case(text, {"w": weight(rng, N, K)}).lower("cuda:sm90").ops == {"MatMul": 1}

    def test_a_tied_weight_is_not_copied(self, case, rng):
        text = f"""g (int64[B,S] ids, float[B,S,{N}] x) => (float[B,S,{K}] y, float[B,S,{N}] e) {{
            e = Gather (w, ids)
            y = onnxfuse.Linear <layout="KN", activation="relu"> (x, w)
        }}"""
        made = case(text, {"w": weight(rng, N, K)[:N]}).lower("cuda:sm90")
        assert len(made.model.to_proto().graph.initializer) == 1


def test_branches_are_lowered_too(case, rng):
    text = f"""g (bool c, float[B,S,{K}] x) => (float[B,S,{N}] y) {{
        y = If (c) <
            then_branch = t () => (float[B,S,{N}] p) {{ p = onnxfuse.Linear <activation="silu"> (x, w) }},
            else_branch = e () => (float[B,S,{N}] q) {{ q = onnxfuse.Linear <norm="rms"> (x, w) }}
        >
    }}"""
    made = case(text, {"w": weight(rng, N, K)}).lower()
    inner = [[n.op for n in made.model.graph.nodes[0].attrs[b].nodes] for b in ("then_branch", "else_branch")]
    assert inner == [["Transpose", "MatMul", "QuickGelu"], ["SimplifiedLayerNormalization", "Transpose", "MatMul"]]
    for choice in (True, False):
        made.check({"c": np.array(choice), "x": weight(rng, 2, 5, K)})
