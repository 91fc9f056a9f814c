"""Seeded inputs and one-node models for the tests of ops."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import onnx
from onnx import ModelProto, helper

from onnxfuse.ops.opdef import OpDef, TensorType

NUMPY = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "int64": np.dtype(np.int64),
    "bool": np.dtype(bool),
}


def normal(rng: np.random.Generator, shape: Sequence[int], dtype: str, scale: float = 1.0) -> np.ndarray:
    return (rng.standard_normal(tuple(shape)) * scale).astype(NUMPY[dtype])


def type_of(array: np.ndarray | None) -> TensorType | None:
    return None if array is None else TensorType(array.dtype.name, array.shape)


def one_node_model(
    op: OpDef,
    inputs: Sequence[np.ndarray | None],
    attrs: Mapping[str, Any],
    *,
    opset: int = 18,
    constants: Sequence[str] = (),
    shapes: Mapping[str, Sequence[int | str]] | None = None,
    outputs: int = 1,
) -> ModelProto:
    """A model of one node of `op`; inputs named in `constants` are initializers, the others graph inputs."""
    names = [spec.name if array is not None else "" for spec, array in zip(op.inputs, inputs, strict=False)]
    while names and not names[-1]:
        names.pop()
    graph_inputs, initializers = [], []
    for name, array in zip(names, inputs, strict=False):
        if not name or array is None:
            continue
        if name in constants:
            initializers.append(onnx.numpy_helper.from_array(array, name))
        else:
            shape = (shapes or {}).get(name, array.shape)
            elem_type = helper.np_dtype_to_tensor_dtype(array.dtype)
            graph_inputs.append(helper.make_tensor_value_info(name, elem_type, list(shape)))
    inferred = op.infer([type_of(a) for a in inputs], attrs)[:outputs]
    graph_outputs = [
        helper.make_tensor_value_info(
            name, helper.np_dtype_to_tensor_dtype(NUMPY[t.dtype or "float32"]), [None] * len(t.shape or ())
        )
        for name, t in zip(op.outputs, inferred, strict=False)
    ]
    node = helper.make_node(op.name, names, [o.name for o in graph_outputs], name="node", domain=op.domain, **attrs)
    graph = helper.make_graph([node], "g", graph_inputs, graph_outputs, initializers)
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid(op.domain, op.version)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8 if opset < 21 else 10)


def relative_error(actual: np.ndarray, expected: np.ndarray) -> float:
    """The largest error over the largest expected value; NaN and Inf must be at the same places."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert actual.shape == expected.shape
    finite = np.isfinite(expected)
    np.testing.assert_array_equal(np.isnan(actual), np.isnan(expected))
    np.testing.assert_array_equal(actual[~finite & ~np.isnan(expected)], expected[~finite & ~np.isnan(expected)])
    if not finite.any():
        return 0.0
    scale = float(np.max(np.abs(expected[finite]))) or 1.0
    return float(np.max(np.abs(actual[finite] - expected[finite]))) / scale


def library_session(model: ModelProto, threads: int = 1) -> Any:
    """An ONNX Runtime CPU session with the custom-op library."""
    import onnxruntime as ort

    from onnxfuse.runtime import library

    options = library.register(ort.SessionOptions())
    options.intra_op_num_threads = threads
    options.log_severity_level = 4
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def through_float32(model: ModelProto) -> ModelProto:
    """The model with its bfloat16 inputs and outputs cast from and to float32, since NumPy feeds have no bfloat16."""
    result = ModelProto()
    result.CopyFrom(model)
    graph, bfloat16 = result.graph, onnx.TensorProto.BFLOAT16
    before, after = [], []
    renamed = {}
    for value in (*graph.input, *graph.output):
        if value.type.tensor_type.elem_type == bfloat16:
            renamed[value.name] = f"{value.name}_bf16"
    for node in graph.node:
        for names in (node.input, node.output):
            names[:] = [renamed.get(n, n) for n in names]
    for value in graph.input:
        if value.name in renamed:
            value.type.tensor_type.elem_type = onnx.TensorProto.FLOAT
            before.append(helper.make_node("Cast", [value.name], [renamed[value.name]], to=bfloat16))
    for value in graph.output:
        if value.name in renamed:
            value.type.tensor_type.elem_type = onnx.TensorProto.FLOAT
            after.append(helper.make_node("Cast", [renamed[value.name]], [value.name], to=onnx.TensorProto.FLOAT))
    nodes = [*before, *graph.node, *after]
    del graph.node[:]
    graph.node.extend(nodes)
    return result


def as_feed(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float32) if array.dtype == NUMPY["bfloat16"] else array
