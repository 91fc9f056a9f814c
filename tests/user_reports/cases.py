"""The shapes of graph that users of fusion tools report: small graphs, and what is checked about each.

Every one is also optimized for the CPU, run, and compared with the graph as it was.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import onnx
import onnxruntime as ort
from onnx import helper, numpy_helper

import onnxfuse

LAYER_NORM = """
  mean = ReduceMean <axes=[-1], keepdims={keepdims}> (x)
  d = Sub (x, mean)
  sq = Pow (d, two)
  var = ReduceMean <axes=[-1], keepdims={keepdims}> (sq)
  ve = Add (var, eps)
  std = Sqrt (ve)
  n = Div (d, std)
"""
RMS = """
  sq = Pow (x, two)
  ms = ReduceMean <axes=[-1]> (sq)
  me = Add (ms, eps)
  r = Sqrt (me)
"""
SCALARS = "float two = {2}, float eps = {1e-5}, float one = {1}, float half = {0.5}"


@dataclass(frozen=True)
class Case:
    """A graph in ONNX text: inputs, outputs, body, weights; the blocks to be found, and how often ops are written."""

    name: str
    inputs: str
    outputs: str
    body: str
    weights: str = ""
    opset: int = 17
    blocks: dict[str, int] = field(default_factory=dict)
    dims: dict[str, int] = field(default_factory=lambda: {"B": 2, "S": 3})
    scale: float = 1.0
    written: dict[str, int] = field(default_factory=dict)

    def model(self) -> onnx.ModelProto:
        weights = ", ".join(w for w in (SCALARS, self.weights) if w)
        return parse(
            f"""<ir_version: 8, opset_import: ["": {self.opset}, "com.microsoft": 1]>
            g ({self.inputs}) => ({self.outputs}) <{weights}> {{ {self.body} }}"""
        )


def parse(text: str, seed: int = 0) -> onnx.ModelProto:
    """ONNX text in which typed names without data are weights, filled from the seed."""
    model = onnx.parser.parse_model(text)
    graph = model.graph
    made = {o for n in graph.node for o in n.output} | {i.name for i in graph.input}
    rng = np.random.default_rng(seed)
    for info in [v for v in graph.value_info if v.name not in made]:
        tensor = info.type.tensor_type
        shape = [d.dim_value for d in tensor.shape.dim]
        values = rng.standard_normal(shape) * (0.3 if len(shape) > 1 else 0.2) + (1.0 if "g" in info.name[:1] else 0.0)
        dtype = helper.tensor_dtype_to_np_dtype(tensor.elem_type)
        graph.initializer.append(numpy_helper.from_array(np.asarray(values).astype(dtype), info.name))
        graph.value_info.remove(info)
    inner = [a.g for n in graph.node for a in n.attribute if a.type == onnx.AttributeProto.GRAPH]
    read = {i for n in [*graph.node, *(n for g in inner for n in g.node)] for i in n.input}
    kept = [t for t in graph.initializer if t.name in read]
    del graph.initializer[:]
    graph.initializer.extend(kept)
    return model


def feeds(model: onnx.ModelProto, dims: dict[str, int], scale: float = 1.0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(7)
    result = {}
    for value in model.graph.input:
        tensor = value.type.tensor_type
        shape = [dims.get(d.dim_param, 4) if d.dim_param else d.dim_value for d in tensor.shape.dim]
        dtype = helper.tensor_dtype_to_np_dtype(tensor.elem_type)
        if np.issubdtype(dtype, np.integer):
            result[value.name] = rng.integers(0, 4, shape).astype(dtype)
        elif dtype == np.bool_:
            result[value.name] = np.ones(shape, dtype)
        else:
            result[value.name] = (scale * rng.standard_normal(shape)).astype(dtype)
    return result


def run(model: onnx.ModelProto, inputs: dict[str, np.ndarray], optimized: bool = False) -> list[np.ndarray]:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    onnxfuse.register(options)
    if not optimized:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(None, inputs)


def fused(model: onnx.ModelProto) -> onnxfuse.Result:
    return onnxfuse.optimize(model, target="cpu")


def ops(model: onnx.ModelProto) -> list[str]:
    return [n.op_type for n in model.graph.node]


def check_same(case: Case, model: onnx.ModelProto, after: onnx.ModelProto, tolerance: float = 2e-5) -> None:
    inputs = feeds(model, case.dims, case.scale)
    before, now = run(model, inputs), run(after, inputs)
    for info, a, b in zip(model.graph.output, before, now, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape, info.name
        limit = tolerance if a.dtype == np.float32 else 5e-3
        scale = max(float(np.abs(a.astype(np.float64)).max(initial=0)), 1e-6)
        assert np.abs(a.astype(np.float64) - b.astype(np.float64)).max(initial=0) <= limit * scale, info.name


def check_found(case: Case) -> None:
    """The blocks of the case are found, those and no more, and the result is right."""
    model = case.model()
    result = fused(model)
    found = {key: result.report["blocks"].get(key, 0) for key in case.blocks}
    assert found == case.blocks
    written = ops(result.model)
    assert {op: written.count(op) for op in case.written} == case.written
    check_same(case, model, result.model)
