"""A decoder as merged exports have it: one If, a branch that continues a cache, a branch that starts one, and all
weights in the graph around them, so that each is stored once for both branches."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import onnxfuse
from onnxfuse import pipeline
from tests.user_reports.cases import parse, run

MODELS = Path(__file__).parents[2] / "models"
NAMES = ["gpt2-past-dyn18-f32-sdpa.onnx", "qwen2-past-dyn20-f16-eager.onnx"]


def branch(graph: onnx.GraphProto, prefix: str, without_cache: bool) -> onnx.GraphProto:
    """The decoder's nodes under names of their own. Inputs and weights are captured; without a cache, the past tensors
    are made here, of length 0."""
    copy = onnx.GraphProto(name=f"{prefix}branch")
    names = {o: prefix + o for node in graph.node for o in node.output if o}
    if without_cache:
        copy.node.append(helper.make_node("Shape", ["input_ids"], [f"{prefix}size"], end=1))
        for value in (v for v in graph.input if v.name.startswith("past_")):
            dims = value.type.tensor_type.shape.dim
            tail = numpy_helper.from_array(np.array([dims[1].dim_value, 0, dims[3].dim_value]), "")
            names[value.name] = prefix + value.name
            zero = numpy_helper.from_array(
                np.zeros(1, helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type))
            )
            copy.node.extend([
                helper.make_node("Constant", [], [f"{names[value.name]}_tail"], value=tail),
                helper.make_node("Concat", [f"{prefix}size", f"{names[value.name]}_tail"],
                                 [f"{names[value.name]}_shape"], axis=0),
                helper.make_node("ConstantOfShape", [f"{names[value.name]}_shape"], [names[value.name]], value=zero),
            ])  # fmt: skip
    for node in graph.node:
        mine = copy.node.add()
        mine.CopyFrom(node)
        mine.name = prefix + node.name
        mine.input[:] = [names.get(name, name) for name in node.input]
        mine.output[:] = [names.get(name, name) for name in node.output]
    for output in graph.output:
        mine = copy.output.add()
        mine.CopyFrom(output)
        mine.name = names[output.name]
        if without_cache:
            mine.type.tensor_type.ClearField("shape")
    return copy


@pytest.fixture(scope="module", params=NAMES)
def merged(request: pytest.FixtureRequest) -> onnx.ModelProto:
    model = onnx.load(MODELS / request.param)
    graph = model.graph
    outputs = [o.name for o in graph.output]
    nodes = [
        helper.make_node("Squeeze", ["use_cache_branch"], ["use_cache"]),
        helper.make_node("If", ["use_cache"], outputs, then_branch=branch(graph, "with_", False),
                         else_branch=branch(graph, "first_", True)),
    ]  # fmt: skip
    flag = helper.make_tensor_value_info("use_cache_branch", TensorProto.BOOL, [1])
    whole = helper.make_graph(nodes, "merged", [*graph.input, flag], list(graph.output), list(graph.initializer),
                              doc_string=request.param)  # fmt: skip
    made = helper.make_model(whole, opset_imports=model.opset_import, ir_version=model.ir_version)
    onnx.checker.check_model(made)
    return made


def feeds_of(model: onnx.ModelProto, batch: int, new: int, past: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(batch + new + past)
    sizes = {"batch": batch, "seq": new, "past_seq": past, "total_seq": past + new}
    feeds: dict[str, np.ndarray] = {"use_cache_branch": np.array([past > 0])}
    for value in model.graph.input:
        kind = value.type.tensor_type
        shape = [d.dim_value or sizes[d.dim_param] for d in kind.shape.dim]
        if value.name == "attention_mask":
            feeds[value.name] = np.ones(shape, np.int64)
            feeds[value.name][-1, : min(2, new - 1)] = 0
        elif kind.elem_type == TensorProto.INT64:
            feeds[value.name] = rng.integers(0, 250, shape)
        elif value.name != "use_cache_branch":
            feeds[value.name] = rng.standard_normal(shape).astype(helper.tensor_dtype_to_np_dtype(kind.elem_type))
    return feeds


def branches(model: onnx.ModelProto) -> list[onnx.GraphProto]:
    (chosen,) = [n for n in model.graph.node if n.op_type == "If"]
    return [a.g for a in chosen.attribute]


def big(tensors: list[onnx.TensorProto]) -> list[onnx.TensorProto]:
    return [t for t in tensors if np.prod(t.dims) >= 1024]


def test_both_branches_are_optimized_and_right(merged: onnx.ModelProto, tmp_path: Path) -> None:
    source, target = tmp_path / "merged.onnx", tmp_path / "fused.onnx"
    onnx.save(merged, source)
    result = onnxfuse.optimize(source, target, target="cpu")
    assert result.report["verify"]["status"] == "passed" and not result.report["reverted"]
    alone = pipeline.build(MODELS / merged.graph.doc_string, pipeline.Options())
    for key in ("attention", "rope", "rmsnorm", "layernorm", "matmul", "matmul_bias", "swiglu", "act_gelu_tanh"):
        assert result.report["blocks"].get(key, 0) == 2 * alone.blocks.get(key, 0), key
    after = onnx.load(target)
    assert target.stat().st_size <= source.stat().st_size
    assert not any(big(list(g.initializer)) for g in branches(after)), "a weight is stored in a branch"
    half = any(t.data_type == TensorProto.FLOAT16 for t in merged.graph.initializer)
    limit = 2e-2 if half else 1e-4
    for batch, new, past in ((1, 1, 4), (2, 3, 5), (1, 5, 0), (2, 4, 0)):
        feeds = feeds_of(merged, batch, new, past)
        for found, wanted in zip(run(after, feeds), run(merged, feeds), strict=True):
            assert found.shape == wanted.shape
            scale = np.abs(wanted.astype(np.float64)).max(initial=1e-6)
            assert np.abs(found.astype(np.float64) - wanted).max(initial=0) <= limit * scale


@pytest.mark.parametrize("target", ["cpu", "cuda:sm90"])
def test_each_weight_is_stored_once(merged: onnx.ModelProto, target: str) -> None:
    build = pipeline.build(merged, pipeline.Options(target=pipeline.resolve_target(target)))
    after = build.model.to_proto()
    stored = [t for g in [after.graph, *branches(after)] for t in big(list(g.initializer))]
    assert len(stored) <= len(big(list(merged.graph.initializer)))
    assert len({(tuple(t.dims), t.raw_data) for t in stored}) == len(stored)
    assert after.ByteSize() <= merged.ByteSize()


@pytest.mark.parametrize("alike", [True, False])
def test_big_weights_that_both_branches_read(alike: bool) -> None:
    """A norm is folded into a captured weight if the other branch will do the same, so that one copy serves both; else
    the weight stays as it is."""
    epilogue = {True: "MatMul ({0}n, w)", False: "Gather <axis=0> (w, ids)"}[alike]
    body = (
        "{0}n = LayerNormalization <axis=-1> (x, gamma, beta) {0}h = MatMul ({0}n, w) {0}a = Add ({0}h, b)"
        "{0}y = Relu ({0}a)"
    )
    other = body.format("e") if alike else f"ex = {epilogue} ez = Add (ex, b) ey = Neg (ez)"
    model = parse(
        f"""<ir_version: 8, opset_import: ["": 17]>
        g (float[S,128] x, int64[S] ids, bool c) => (float[S,256] y)
        <float[128] gamma, float[128] beta, float[128,256] w, float[256] b> {{
          y = If (c) <then_branch = t () => (float[S,256] ty) {{ {body.format("t")} }},
                      else_branch = e () => (float[S,256] ey) {{ {other} }}> }}"""
    )
    build = pipeline.build(model, pipeline.Options(target=pipeline.resolve_target("cuda:sm90")))
    after = build.model.to_proto()
    stored = [t for g in [after.graph, *branches(after)] for t in big(list(g.initializer))]
    assert [sorted(t.dims) for t in stored] == [[128, 256]]
    fused = [n for g in branches(after) for n in g.node if n.op_type == "Linear"]
    norms = [onnx.helper.get_node_attr_value(n, "norm") if any(a.name == "norm" for a in n.attribute) else b"none"
             for n in fused]  # fmt: skip
    assert norms == ([b"layer", b"layer"] if alike else [b"none"])
