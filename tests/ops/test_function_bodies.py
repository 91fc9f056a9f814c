"""Function bodies, run by ONNX Runtime's CPU provider, against the NumPy references."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx.reference import ReferenceEvaluator

from onnxfuse.errors import OpError
from onnxfuse.ops import functions, registry
from onnxfuse.ops.activations import ACTIVATIONS
from onnxfuse.ops.norms import NORMS
from onnxfuse.ops.opdef import OpDef, TensorType
from tests.ops.cases import NUMPY, normal, one_node_model, relative_error, type_of

# Bodies round every intermediate value to T, the references never: a few roundings of the largest value are allowed.
LIMIT = {"float32": 3e-6, "float16": 8e-3, "bfloat16": 6e-2}


def run_body(
    op: OpDef, inputs: Sequence[np.ndarray | None], attrs: dict[str, Any], opset: int, outputs: int = 1
) -> list[np.ndarray]:
    model = functions.attach_functions(one_node_model(op, inputs, attrs, opset=opset, outputs=outputs))
    onnx.checker.check_model(model)
    feeds = {s.name: a for s, a in zip(op.inputs, inputs, strict=False) if a is not None}
    if any(a.dtype == NUMPY["bfloat16"] for a in feeds.values()):  # ONNX Runtime's CPU provider has no bfloat16
        return [np.asarray(y) for y in ReferenceEvaluator(model).run(None, feeds)]
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return [np.asarray(y) for y in session.run(None, feeds)]


def check(
    op: OpDef, inputs: Sequence[np.ndarray | None], attrs: dict[str, Any], opset: int = 18, outputs: int = 1
) -> None:
    dtype = next(a for a in inputs if a is not None).dtype.name
    expected = op.reference(inputs, attrs)
    actual = run_body(op, inputs, attrs, opset, outputs)
    types = op.infer([type_of(a) for a in inputs], attrs)
    for y, reference, inferred in zip(actual, expected, types, strict=False):
        assert (y.dtype.name, y.shape) == (inferred.dtype, inferred.shape)
        assert relative_error(y, reference) <= LIMIT[dtype]


LINEAR_GRID = [
    (dtype, layout, norm, activation, optional, opset)
    for i, (dtype, norm, activation) in enumerate(itertools.product(NUMPY, NORMS, ACTIVATIONS))
    for layout, optional, opset in [(("NK", "KN")[i % 2], i % 4, (11, 13, 18, 24)[i // 2 % 4])]
    if dtype in LIMIT and (dtype != "bfloat16" or opset >= 13)
]


@pytest.mark.parametrize(("dtype", "layout", "norm", "activation", "optional", "opset"), LINEAR_GRID)
@pytest.mark.parametrize("name", ["Linear", "GatedLinear"])
def test_linear(name: str, dtype: str, layout: str, norm: str, activation: str, optional: int, opset: int) -> None:
    rng = np.random.default_rng(1)
    op = registry.get("onnxfuse", name)
    rows, k, n = (2, 3), 24, 20
    weight = normal(rng, (n, k) if layout == "NK" else (k, n), dtype, k**-0.5)
    bias = normal(rng, (n,), dtype) if optional & 1 else None
    residual = normal(rng, (*rows, n), dtype) if optional & 2 else None
    inputs = [normal(rng, (*rows, k), dtype), weight, bias]
    attrs: dict[str, Any] = {"layout": layout, "norm": norm, "activation": activation, "epsilon": 1e-6}
    if name == "Linear":
        inputs.append(residual)
    else:
        attrs["interleave"] = 5 if optional & 2 else 0
    check(op, inputs, attrs, opset)


@pytest.mark.parametrize("dtype", list(LIMIT))
@pytest.mark.parametrize("axis", [-1, -2, 1, 0])
@pytest.mark.parametrize("opset", [13, 18])
def test_norms(dtype: str, axis: int, opset: int) -> None:
    rng = np.random.default_rng(2)
    x = normal(rng, (3, 4, 8), dtype) + NUMPY[dtype].type(2)
    scale, bias = normal(rng, x.shape[axis:], dtype), normal(rng, (8,), dtype)
    check(registry.get("onnxfuse.std", "RMSNormalization"), [x, scale], {"axis": axis}, opset)
    check(registry.get("onnxfuse.std", "LayerNormalization"), [x, scale, bias], {"axis": axis}, opset)
    check(registry.get("onnxfuse.std", "LayerNormalization"), [x, scale], {"axis": axis, "epsilon": 0.1}, opset)


def test_rms_normalization_with_a_scale_of_another_dtype() -> None:
    rng = np.random.default_rng(3)
    x, scale = normal(rng, (3, 8), "float16", 30000.0 / 4), normal(rng, (8,), "float32")
    op = registry.get("onnxfuse.std", "RMSNormalization")
    assert op.infer([type_of(x), type_of(scale)])[0].dtype == "float32"
    check(op, [x, scale], {})


@pytest.mark.parametrize("dtype", list(LIMIT))
@pytest.mark.parametrize("opset", [11, 18])
def test_activations(dtype: str, opset: int) -> None:
    if dtype == "bfloat16" and opset < 13:
        pytest.skip("bfloat16 begins with opset 13")
    x = np.linspace(-12, 12, 97).astype(NUMPY[dtype])
    for approximate in ("none", "tanh"):
        check(registry.get("onnxfuse.std", "Gelu"), [x], {"approximate": approximate}, opset)
    for alpha in (1.0, 1.702):
        check(registry.get("onnxfuse.std", "Swish"), [x], {"alpha": alpha}, opset)
    if dtype != "bfloat16":  # which HardSigmoid lacks
        check(registry.get("onnxfuse.std", "HardSwish"), [x], {}, opset)


@pytest.mark.parametrize("dtype", list(LIMIT))
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("interleaved", [0, 1])
@pytest.mark.parametrize("rotary_dim", [0, 4])
@pytest.mark.parametrize("positions", ["none", "none-batch-1", "given", "batch-1"])
def test_rotary_embedding(dtype: str, packed: bool, interleaved: int, rotary_dim: int, positions: str) -> None:
    rng = np.random.default_rng(4)
    batch, heads, length, size = 2, 3, 5, 8
    x = normal(rng, (batch, length, heads * size) if packed else (batch, heads, length, size), dtype)
    half = (rotary_dim or size) // 2
    cache = (11, half) if positions in ("given", "batch-1") else (1 if "1" in positions else batch, length, half)
    angle = rng.uniform(-3, 3, cache)
    cos, sin = np.cos(angle).astype(NUMPY[dtype]), np.sin(angle).astype(NUMPY[dtype])
    ids = rng.integers(0, 11, (1 if positions == "batch-1" else batch, length)) if len(cache) == 2 else None
    attrs = {"interleaved": interleaved, "rotary_embedding_dim": rotary_dim}
    if packed:
        attrs["num_heads"] = heads
    op = registry.get("onnxfuse.std", "RotaryEmbedding")
    check(op, [x, cos, sin, ids], attrs, 13 if interleaved else 18)
    native = onnx.helper.make_node(op.name, op_inputs(op, [x, cos, sin, ids]), ["y"], **attrs)
    if dtype == "float32" and positions in ("none", "given"):
        assert (
            relative_error(
                op.reference([x, cos, sin, ids], attrs)[0], run_native(native, op, [x, cos, sin, ids], 23)[0]
            )
            < 1e-6
        )


def op_inputs(op: OpDef, inputs: Sequence[np.ndarray | None]) -> list[str]:
    names = [s.name if a is not None else "" for s, a in zip(op.inputs, inputs, strict=False)]
    while not names[-1]:
        names.pop()
    return names


def run_native(node: onnx.NodeProto, op: OpDef, inputs: Sequence[np.ndarray | None], opset: int) -> list[np.ndarray]:
    """ONNX's own reference implementation of the operator that an `onnxfuse.std` op copies."""
    types = onnx.helper.np_dtype_to_tensor_dtype
    feeds = {s.name: a for s, a in zip(op.inputs, inputs, strict=False) if a is not None}
    graph = onnx.helper.make_graph(
        [node],
        "g",
        [onnx.helper.make_tensor_value_info(n, types(a.dtype), a.shape) for n, a in feeds.items()],
        [onnx.helper.make_tensor_value_info(n, 1, None) for n in node.output],
    )
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", opset)])
    return [np.asarray(y) for y in ReferenceEvaluator(model).run(None, feeds)]


ATTENTION_CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "scaled": {"scale": 0.3},
    "unscaled": {"scale": 1.0},
    "causal": {"is_causal": 1},
    "causal-grouped-packed": {"is_causal": 1, "heads": (4, 2), "packed": True},
    "packed": {"packed": True, "heads": (2, 2)},
    "grouped": {"heads": (4, 1), "mask": "float"},
    "bool-mask": {"mask": "bool"},
    "float-mask": {"mask": "float", "is_causal": 1},
    "past": {"past": 3, "is_causal": 1, "outputs": 3},
    "empty-past": {"past": 0, "is_causal": 1, "outputs": 3, "mask": "bool"},
    "past-mask": {"past": 3, "mask": "bool", "heads": (4, 2)},
    "window": {"is_causal": 1, "window": 2},
    "window-past": {"is_causal": 1, "window": 3, "past": 4, "heads": (4, 2), "packed": True},
    "softcap": {"softcap": 2.0, "is_causal": 1},
    "guarded": {"mask": "hidden", "nan_guard": 1},
    "guarded-float": {"mask": "hidden-float", "nan_guard": 1, "is_causal": 1},
    "unguarded": {"mask": "hidden"},
    "seqlen": {"seqlen": True, "is_causal": 1, "nan_guard": 1, "mask": "short", "heads": (4, 2)},
    "cross": {"keys": 7},
    "wide-scores": {"softmax_precision": 1, "mask": "float", "scale": 0.3, "outputs": 4},
    "wide-mask": {"softmax_precision": 1, "mask": "wide", "heads": (4, 2)},
    "wide-scores-sink": {"softmax_precision": 1, "is_causal": 1, "sink": True, "heads": (4, 2)},
    "sink": {"sink": True, "is_causal": 1},
    "sink-grouped-window-past": {"sink": True, "is_causal": 1, "window": 3, "past": 4, "heads": (4, 2), "packed": True},
    "sink-hidden-rows": {"sink": True, "mask": "hidden-float", "nan_guard": 1, "softcap": 2.0},
    "mode-0": {"outputs": 4, "mask": "float", "qk_matmul_output_mode": 0},
    "mode-1": {"outputs": 4, "mask": "float", "softcap": 3.0, "qk_matmul_output_mode": 1},
    "mode-2": {"outputs": 4, "mask": "float", "softcap": 3.0, "qk_matmul_output_mode": 2, "heads": (4, 2)},
    "mode-3": {"outputs": 4, "mask": "float", "qk_matmul_output_mode": 3, "softmax_precision": 1},
}


def attention_inputs(case: dict[str, Any], dtype: str) -> tuple[list[np.ndarray | None], dict[str, Any], int]:
    rng = np.random.default_rng(5)
    attrs = dict(case)
    hq, hkv = attrs.pop("heads", (2, 2))
    packed, mask_kind, past = attrs.pop("packed", False), attrs.pop("mask", None), attrs.pop("past", None)
    outputs, seqlen, sink = attrs.pop("outputs", 1), attrs.pop("seqlen", False), attrs.pop("sink", False)
    batch, queries, size = 2, 5, 8
    new = attrs.pop("keys", 9 if seqlen else queries)
    total = new + (past or 0)

    def heads(count: int, length: int) -> np.ndarray:
        return normal(rng, (batch, length, count * size) if packed else (batch, count, length, size), dtype)

    inputs: list[np.ndarray | None] = [heads(hq, queries), heads(hkv, new), heads(hkv, new), *[None] * 5]
    if packed:
        attrs |= {"q_num_heads": hq, "kv_num_heads": hkv}
    if past is not None:
        inputs[4], inputs[5] = (normal(rng, (batch, hkv, past, size), dtype) for _ in range(2))
    if mask_kind:
        keys = total - 2 if mask_kind == "short" else total
        mask = rng.random((batch, 1, queries, keys)) < 0.6
        mask[..., 0] = True
        if mask_kind.startswith("hidden"):
            mask[1, :, 2] = False
        inputs[3] = mask
        if mask_kind == "float":
            inputs[3] = normal(rng, (hq, queries, keys), dtype)
        if mask_kind == "wide":
            inputs[3] = np.where(mask, 0, -3e38).astype(np.float32)
        if mask_kind == "hidden-float":
            inputs[3] = np.where(mask, 0, -np.inf).astype(NUMPY[dtype])
    if seqlen:
        inputs[6] = np.array([4, 7])
    if sink:
        inputs[7] = normal(rng, (hq,), dtype)
    return inputs, attrs, outputs


@pytest.mark.parametrize("dtype", list(LIMIT))
@pytest.mark.parametrize("name", list(ATTENTION_CASES))
def test_attention(name: str, dtype: str) -> None:
    inputs, attrs, outputs = attention_inputs(ATTENTION_CASES[name], dtype)
    op = registry.get("onnxfuse.std", "Attention")
    if name == "unguarded":
        assert np.isnan(op.reference(inputs, attrs)[0][1, :, 2]).all()
    check(op, inputs, attrs, 13 if dtype == "float32" else 18, outputs)


#: What ONNX's own operator has as well.
OF_ONNX = [n for n in ATTENTION_CASES if not {"unguarded", "window", "sink"} & set(n.split("-"))]


@pytest.mark.parametrize("name", OF_ONNX)
def test_attention_reference_is_that_of_onnx(name: str) -> None:
    inputs, attrs, outputs = attention_inputs(ATTENTION_CASES[name], "float32")
    op = registry.get("onnxfuse.std", "Attention")
    native_attrs = {k: v for k, v in attrs.items() if k != "nan_guard"}
    node = onnx.helper.make_node(op.name, op_inputs(op, inputs), list(op.outputs[:outputs]), **native_attrs)
    for ours, theirs in zip(op.reference(inputs, attrs), run_native(node, op, inputs, 24), strict=False):
        assert relative_error(ours, theirs) < 2e-6


def test_heads_of_unknown_number_take_the_grouped_path() -> None:
    inputs, attrs, _ = attention_inputs({"heads": (4, 2), "is_causal": 1}, "float32")
    op = registry.get("onnxfuse.std", "Attention")
    shapes = {n: ["b", f"{n}_heads", "s", 8] for n in "qkv"}
    model = functions.attach_functions(one_node_model(op, inputs, attrs, shapes=shapes))
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    feeds = dict(zip("qkv", inputs, strict=False))
    assert relative_error(session.run(None, feeds)[0], op.reference(inputs, attrs)[0]) < 3e-6


def test_equal_nodes_share_one_function_and_different_ones_do_not() -> None:
    x = TensorType("float32", (2, 4))
    nodes = [
        onnx.helper.make_node("Gelu", [a], [b], domain="onnxfuse.std", approximate=mode)
        for a, b, mode in (("x", "a", "none"), ("a", "b", "tanh"), ("b", "y", "none"))
    ]
    value = onnx.helper.make_tensor_value_info
    graph = onnx.helper.make_graph(nodes, "g", [value("x", 1, [2, 4])], [value("y", 1, [2, 4])])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8)
    with_functions = functions.attach_functions(model, {"x": x})
    assert len(with_functions.functions) == 2
    assert {n.overload for n in with_functions.graph.node} == {f.overload for f in with_functions.functions}
    assert [n.op_type for n in with_functions.graph.node] == ["Gelu"] * 3
    assert not model.functions and not model.graph.node[0].overload


def test_body_refuses_an_opset_that_is_too_old_and_an_unknown_dtype() -> None:
    op = registry.get("onnxfuse.std", "Attention")
    with pytest.raises(OpError, match="opset `12`"):
        functions.expand(op, ["q", "k", "v"], ["y"], {}, [TensorType("float32")] * 3, 12, "p")
    with pytest.raises(OpError, match="dtype of `q`"):
        functions.expand(op, ["q", "k", "v"], ["y"], {}, [None] * 3, 18, "p")
