"""Whether what inference claims of a model's values is what they turn out to be when it runs."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx
import onnxruntime as ort

from onnxfuse.graph import dims, model
from onnxfuse.graph.ir import Constant
from onnxfuse.graph.model import Model
from onnxfuse.graph.shapes import content as contents

ort.set_default_logger_severity(4)


def session(proto: onnx.ModelProto) -> ort.InferenceSession:
    """A session that runs the graph as it is written."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    return ort.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])


def run(proto: onnx.ModelProto, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    running = session(proto)
    return dict(zip([o.name for o in running.get_outputs()], running.run(None, dict(feeds)), strict=True))


def with_all_values(inferred: Model) -> onnx.ModelProto:
    """The model with every value of the main graph that has a tensor type as an output."""
    proto = inferred.to_proto()
    copied = onnx.ModelProto()
    copied.CopyFrom(proto)
    present = {o.name for o in copied.graph.output}
    for node in inferred.graph.nodes:
        for value in node.outputs:
            if value.name and value.dtype is not None and value.name not in present:
                copied.graph.output.append(onnx.ValueInfoProto(name=value.name))
    del copied.graph.value_info[:]
    return copied


def sizes_of(inferred: Model, feeds: Mapping[str, np.ndarray]) -> dict[str, int]:
    """What the named sizes of the graph inputs are, given their values."""
    sizes: dict[str, int] = {}
    for value in inferred.graph.inputs:
        if isinstance(value, Constant) or value.shape is None or value.name not in feeds:
            continue
        for axis, size in enumerate(value.shape):
            if isinstance(size, dims.Dim) and size.is_symbol():
                sizes[str(size)] = feeds[value.name].shape[axis]
        if value.content is not None:
            for index, item in enumerate(contents.flat(value.content)):
                sizes[str(item)] = int(feeds[value.name].reshape(-1)[index])
    return sizes


def disagreements(inferred: Model, feeds: Mapping[str, np.ndarray]) -> tuple[list[str], int]:
    """(false claims about the values of the main graph, number of claims that could be checked)."""
    proto = with_all_values(inferred)
    values = {v.name: v for node in inferred.graph.nodes for v in node.outputs}
    sizes = sizes_of(inferred, feeds)
    wrong: list[str] = []
    checked = 0
    for name, array in run(proto, feeds).items():
        value = values.get(name)
        if value is None or not isinstance(array, np.ndarray) or isinstance(value, Constant):
            continue
        if value.dtype not in (None, "string", "bfloat16") and np.dtype(array.dtype).name != value.dtype:
            wrong.append(f"{name}: dtype {value.dtype}, really {array.dtype}")
        if value.shape is None:
            continue
        if len(value.shape) != array.ndim:
            wrong.append(f"{name}: shape {value.shape}, really {array.shape}")
            continue
        claims = list(zip(value.shape, array.shape, strict=True))
        if value.content is not None:
            claims += zip(contents.flat(value.content), array.reshape(-1).tolist(), strict=True)
        for claim, real in claims:
            try:
                found = dims.evaluate(claim, sizes)
            except KeyError:  # a size that only running can tell
                continue
            checked += 1
            if found != real:
                wrong.append(
                    f"{name}: {value.shape} = {value.content}, really {array.shape}: {claim} is {found}, not {real}"
                )
    return wrong, checked


def load_text(text: str) -> Model:
    return model.load(onnx.parser.parse_model(text))
