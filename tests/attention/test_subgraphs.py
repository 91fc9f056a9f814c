"""Attention inside the branches of an If, as in merged decoders, with everything outside captured."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from onnxfuse import pipeline
from onnxfuse.lower.kernels import Target

ort = pytest.importorskip("onnxruntime")

MODEL = Path(__file__).parents[2] / "models" / "gpt2-past-dyn18-f32-sdpa.onnx"


def branch(graph: onnx.GraphProto, prefix: str) -> onnx.GraphProto:
    """The graph as a branch: its inputs are captured, all its own names are new."""
    copy = onnx.GraphProto()
    copy.CopyFrom(graph)
    names = {o: prefix + o for n in copy.node for o in n.output} | {t.name: prefix + t.name for t in copy.initializer}
    for node in copy.node:
        node.name = prefix + node.name
        node.input[:] = [names.get(name, name) for name in node.input]
        node.output[:] = [names[name] for name in node.output]
    for tensor in copy.initializer:
        tensor.name = names[tensor.name]
    for output in copy.output:
        output.name = names[output.name]
    del copy.input[:]
    del copy.value_info[:]
    return copy


@pytest.fixture(scope="module")
def merged() -> onnx.ModelProto:
    model = onnx.load(MODEL)
    flag = helper.make_tensor_value_info("flag", TensorProto.BOOL, [1])
    nodes = [
        helper.make_node("Squeeze", ["flag"], ["condition"]),
        helper.make_node(
            "If", ["condition"], [o.name for o in model.graph.output],
            then_branch=branch(model.graph, "then_"), else_branch=branch(model.graph, "else_"),
        ),
    ]  # fmt: skip
    graph = helper.make_graph(nodes, "merged", [flag, *model.graph.input], list(model.graph.output))
    return helper.make_model(graph, opset_imports=model.opset_import, ir_version=model.ir_version)


def run(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"]).run(None, feeds)


def feeds_of(model: onnx.ModelProto, sizes: dict[str, int], flag: bool) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    feeds: dict[str, Any] = {}
    for value in model.graph.input:
        kind = value.type.tensor_type
        shape = [d.dim_value or sizes[d.dim_param] for d in kind.shape.dim]
        if kind.elem_type == TensorProto.INT64:
            feeds[value.name] = np.ones(shape, np.int64) if "mask" in value.name else random.integers(0, 250, shape)
        else:
            feeds[value.name] = random.standard_normal(shape).astype(np.float32)
    feeds["flag"] = np.array([flag])
    return feeds


def test_both_branches_are_fused_and_mean_the_same(merged: onnx.ModelProto) -> None:
    build = pipeline.build(merged, pipeline.Options(target=Target("cpu")))
    fused = build.model.to_proto()
    (chosen,) = [n for n in fused.graph.node if n.op_type == "If"]
    for attribute in chosen.attribute:
        ops = Counter(n.op_type for n in attribute.g.node)
        assert ops["MultiHeadAttention"] == 2 and not ops["Softmax"]
    assert fused.ByteSize() <= merged.ByteSize() * 1.02
    names = {d.dim_param for v in merged.graph.input for d in v.type.tensor_type.shape.dim if d.dim_param}
    for batch, new, past in ((1, 1, 0), (2, 5, 3)):
        sizes = {
            n: batch if "batch" in n else past + new if "+" in n or "total" in n else past if "past" in n else new
            for n in names
        }
        for flag in (True, False):
            feeds = feeds_of(merged, sizes, flag)
            for found, wanted in zip(run(fused, feeds), run(merged, feeds), strict=True):
                np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)
