"""Attention and RotaryEmbedding lowered for CUDA, run there; skipped without a GPU.

Inputs are float32 and cast inside the model, so that bfloat16 needs no special feeding.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from onnxfuse.graph import shapes
from onnxfuse.graph.model import Model
from onnxfuse.graph.types import numpy_of, onnx_of
from onnxfuse.lower.kernels import KernelTable, Target
from onnxfuse.lower.lower import lower
from onnxfuse.ops import registry
from onnxfuse.ops.opdef import STD_DOMAIN
from onnxfuse.ruletest.cases import parse_graph
from onnxfuse.runtime.session import cuda_works

ort = pytest.importorskip("onnxruntime")

pytestmark = pytest.mark.skipif(not cuda_works(), reason="ONNX Runtime has no CUDA device here")

B, S, P, H, D = 2, 17, 9, 8, 64
TOLERANCE = {"float32": 2e-3, "float16": 4e-3, "bfloat16": 3e-2}
KINDS = {
    "plain": {},
    "mask": {"mask": [B, 1, S, S]},
    "mask-per-query": {"mask": [B, 1, 1, S]},
    "mask-per-head": {"mask": [1, H, S, S]},
    "causal": {"is_causal": 1},
    "causal-window": {"is_causal": 1, "window": 4},
    "past": {"past": True, "mask": [B, 1, S, P + S]},
    "causal-past": {"past": True, "is_causal": 1},
    "sinks": {"sinks": True, "is_causal": 1, "window": 4},
    "sinks-mask": {"sinks": True, "mask": [B, 1, S, S]},
    "sinks-past": {"sinks": True, "past": True, "is_causal": 1},
}


def lowered(text: str, opset: int = 18) -> Model:
    model = Model(parse_graph(text, opset))
    shapes.infer(model)
    lower(model, KernelTable(Target("cuda", 90), custom_ops=False))
    return model


def run(model: Model, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    providers = ["CUDAExecutionProvider", "CPUExecutionProvider"]
    return ort.InferenceSession(model.to_proto().SerializeToString(), options, providers=providers).run(None, feeds)


def rounded(array: np.ndarray, dtype: str) -> np.ndarray:
    return array.astype(numpy_of(dtype)).astype(np.float32)


def close(found: np.ndarray, wanted: np.ndarray, dtype: str) -> None:
    np.testing.assert_allclose(found, wanted, rtol=0, atol=TOLERANCE[dtype] * np.abs(wanted).max())


def graph_of(
    inputs: dict[str, list[int]], op: str, operands: list[str], attrs: dict[str, Any], outs: int, dtype: str
) -> str:
    """A model around one lifted op: float32 outside, `dtype` inside."""
    declared = ", ".join(f"float[{','.join(map(str, shape))}] {name}" for name, shape in inputs.items())
    casts = " ".join(f"{name}_t = Cast <to={onnx_of(dtype)}> ({name})" for name in inputs)
    results = [f"y{i}" for i in range(outs)]
    written = ", ".join(f"{name}={value}" for name, value in attrs.items())
    arguments = ", ".join(f"{name}_t" if name else "" for name in operands)
    back = " ".join(f"{name} = Cast <to=1> ({name}_t)" for name in results)
    made = ", ".join(f"{name}_t" for name in results)
    return f"""g ({declared}) => ({", ".join(results)}) {{
        {casts} {made} = onnxfuse.std.{op} <{written}> ({arguments}) {back}
    }}"""


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("kv", [H, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_attention(dtype: str, kv: int, kind: str) -> None:
    chosen = dict(KINDS[kind])
    mask, past, sinks = chosen.pop("mask", None), chosen.pop("past", False), chosen.pop("sinks", False)
    attrs = {"scale": 0.125, "q_num_heads": H, "kv_num_heads": kv, **chosen}
    inputs = {"q": [B, S, H * D], "k": [B, S, kv * D], "v": [B, S, kv * D]}
    operands = ["q", "k", "v"]
    if mask or past:
        operands.append("m" if mask else "")
    if mask:
        inputs["m"] = mask
    if past:
        inputs |= {"pk": [B, kv, P, D], "pv": [B, kv, P, D]}
        operands += ["pk", "pv"]
    if sinks:
        inputs["sinks"] = [H]
        operands += [*[""] * (7 - len(operands)), "sinks"]
    model = lowered(graph_of(inputs, "Attention", operands, attrs, 3 if past else 1, dtype))
    random = np.random.default_rng(0)
    feeds = {name: rounded(random.standard_normal(shape), dtype) for name, shape in inputs.items()}
    if mask:
        lowest = rounded(np.array(np.finfo(np.float16).min if dtype == "float16" else -3.3e38), dtype)
        feeds["m"] = np.where(random.random(mask) < 0.3, lowest, 0).astype(np.float32)
        feeds["m"][..., 0] = 0
    given = [feeds.get(name) if name else None for name in operands]
    wanted = registry.get(STD_DOMAIN, "Attention").reference(given, attrs)
    for found, w in zip(run(model, feeds), wanted, strict=False):
        close(found, w, dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("batch", [1, B])
@pytest.mark.parametrize(("size", "interleaved"), [(D, 0), (32, 0), (D, 1)])
def test_rotary(dtype: str, batch: int, size: int, interleaved: int) -> None:
    attrs = {"interleaved": interleaved, "num_heads": H, "rotary_embedding_dim": size if size < D else 0}
    inputs = {"x": [B, S, H * D], "c": [batch, S, size // 2], "s": [batch, S, size // 2]}
    model = lowered(graph_of(inputs, "RotaryEmbedding", ["x", "c", "s"], attrs, 1, dtype))
    assert "RotaryEmbedding" in [node.op for node in model.graph.nodes]
    random = np.random.default_rng(0)
    feeds = {name: rounded(random.standard_normal(shape), dtype) for name, shape in inputs.items()}
    (wanted,) = registry.get(STD_DOMAIN, "RotaryEmbedding").reference([feeds[n] for n in "xcs"], attrs)
    close(run(model, feeds)[0], wanted, dtype)
