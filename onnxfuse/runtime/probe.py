"""Asks the installed ONNX Runtime whether it has a kernel: builds a model of one node and tries to create a session.

Answers are kept in a file per ONNX Runtime version and provider under the user's cache folder, so that each question
costs a session (some milliseconds) only once per installation.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import onnx
from onnx import TensorProto, helper

from onnxfuse.runtime import session as sessions

log = logging.getLogger(__name__)

_D = 64
_ONNX_DTYPE = {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16, "bfloat16": TensorProto.BFLOAT16,
               "float64": TensorProto.DOUBLE}

#: Inputs of the ops that take more than one tensor like the first: x (rank as asked, last dim 64), d ([64]),
#: m ([64, 64]), i (int64 axes), t (a table of 8 positions, [8, 32]), p (int64 positions), n (int32 per sequence),
#: l (an int32 number), - (omitted). Others get one x.
_INPUTS: Mapping[tuple[str, str], str] = {
    ("", "LayerNormalization"): "xdd",
    ("", "RMSNormalization"): "xd",
    ("", "SimplifiedLayerNormalization"): "xd",
    ("com.microsoft", "SkipLayerNormalization"): "xxdd",
    ("com.microsoft", "SkipSimplifiedLayerNormalization"): "xxd",
    ("com.microsoft", "BiasGelu"): "xd",
    ("com.microsoft", "FastGelu"): "xd",
    ("com.microsoft", "FusedMatMul"): "xm",
    ("", "MatMul"): "xm",
    ("", "Gemm"): "xmd",
    ("", "Add"): "xx",
    ("", "Mul"): "xx",
    ("", "Sum"): "xdx",
    ("", "ReduceMean"): "xi",
    ("", "Attention"): "xxx",
    ("", "RotaryEmbedding"): "xttp",
    ("com.microsoft", "RotaryEmbedding"): "xptt",
    ("com.microsoft", "MultiHeadAttention"): "xxx",
    ("com.microsoft", "GroupQueryAttention"): "xxx--nl",
}


class _Question(Protocol):
    @property
    def domain(self) -> str: ...
    @property
    def op(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def opset(self) -> int: ...
    @property
    def rank(self) -> int: ...
    @property
    def attrs(self) -> tuple[tuple[str, Any], ...]: ...
    @property
    def inputs(self) -> tuple[tuple[str, int | None] | None, ...]: ...
    @property
    def outputs(self) -> int: ...
    @property
    def key(self) -> str: ...


class OrtProbe:
    """A cached probe of the installed ONNX Runtime.

    Args:
        folder: where the answers are kept; None: ``$XDG_CACHE_HOME/onnxfuse`` or ``~/.cache/onnxfuse``.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder if folder is not None else _cache_folder()
        self._known: dict[str, dict[str, bool]] = {}

    def __call__(self, target: Any, query: _Question) -> bool | None:
        """True or False as the runtime says; None if it cannot be asked about this target here."""
        provider = target.provider
        if provider == "cuda" and not sessions.cuda_works():
            return None
        known = self._load(provider)
        if query.key not in known:
            known[query.key] = _try(provider, query)
            self._save(provider)
        return known[query.key]

    def _file(self, provider: str) -> Path:
        return self._folder / f"kernels-{sessions.ort().__version__}-{provider}.json"

    def _load(self, provider: str) -> dict[str, bool]:
        if provider not in self._known:
            try:
                content = json.loads(self._file(provider).read_text())
                valid = isinstance(content, dict) and all(isinstance(v, bool) for v in content.values())
                self._known[provider] = content if valid else {}
            except (OSError, ValueError):
                self._known[provider] = {}
        return self._known[provider]

    def _save(self, provider: str) -> None:
        """Beside the file, then renamed over it, so that another process never reads half of it."""
        path = self._file(provider)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)
            with os.fdopen(descriptor, "w") as file:
                json.dump(self._known[provider], file, indent=0, sort_keys=True)
            os.replace(temporary, path)
        except OSError as error:
            log.debug("kernel answers are not kept: %s", error)


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "onnxfuse"


def _try(provider: str, query: _Question) -> bool:
    runtime = sessions.ort()
    options = runtime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_DISABLE_ALL
    if provider == "cuda":
        options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    name = sessions.provider_name(provider)
    with tempfile.TemporaryDirectory() as folder:
        # An op without a kernel but with a function body is inlined, so look at what is left of it.
        left = Path(folder) / "left.onnx"
        options.optimized_model_filepath = str(left)
        try:
            model = _whole_node(query) if query.inputs else _one_node(query)
            runtime.InferenceSession(model.SerializeToString(), options, providers=[name])
            nodes = onnx.load(left, load_external_data=False).graph.node
        except Exception as error:
            log.debug("no kernel %s on %s: %s", query.key, provider, error)
            return False
    # Casts around the node mean that there is a kernel for float32 only.
    casts = any(n.op_type == "Cast" for n in nodes) and query.op != "Cast"
    return not casts and any(n.op_type == query.op for n in nodes)


def _whole_node(query: _Question) -> onnx.ModelProto:
    """A node with all of its inputs as graph inputs of unknown sizes."""
    inputs, names = [], []
    for index, given in enumerate(query.inputs):
        names.append(f"in{index}" if given is not None else "")
        if given is not None:
            dtype, rank = given
            elem = helper.np_dtype_to_tensor_dtype(np.dtype(dtype)) if dtype != "bfloat16" else TensorProto.BFLOAT16
            inputs.append(helper.make_tensor_value_info(names[-1], elem, None if rank is None else [None] * rank))
    made = [f"out{i}" for i in range(query.outputs)]
    attrs: dict[str, Any] = {name: list(v) if isinstance(v, tuple) else v for name, v in query.attrs}
    node = helper.make_node(query.op, names, made, domain=query.domain, **attrs)
    outputs = [onnx.ValueInfoProto(name=name) for name in made]
    return _model(query, helper.make_graph([node], "probe", inputs, outputs))


def _one_node(query: _Question) -> onnx.ModelProto:
    kinds = _INPUTS.get((query.domain, query.op), "x")
    if query.op == "ReduceMean" and query.opset < 18:
        kinds = "x"
    elem = _ONNX_DTYPE[query.dtype]
    leading: Sequence[str] = [f"d{i}" for i in range(query.rank - 1)]
    inputs, names, initializers = [], [], []
    for index, kind in enumerate(kinds):
        name = f"in{index}" if kind != "-" else ""
        names.append(name)
        if kind == "x":
            inputs.append(helper.make_tensor_value_info(name, elem, [*leading, _D] if query.rank else []))
        elif kind == "i":
            initializers.append(onnx.numpy_helper.from_array(np.array([-1], np.int64), name))
        elif kind == "p":
            inputs.append(helper.make_tensor_value_info(name, TensorProto.INT64, ["p0", "p1"]))
        elif kind == "n":
            inputs.append(helper.make_tensor_value_info(name, TensorProto.INT32, ["d0"]))
        elif kind == "l":
            initializers.append(onnx.numpy_helper.from_array(np.array(8, np.int32), name))
        elif kind == "-":
            continue
        else:
            shape = {"d": [_D], "t": [8, _D // 2]}.get(kind, [_D, _D])
            raw = np.zeros(shape, np.float32 if query.dtype != "float64" else np.float64)
            content = raw.astype(helper.tensor_dtype_to_np_dtype(elem)).tobytes()
            initializers.append(helper.make_tensor(name, elem, shape, content, raw=True))
    node = helper.make_node(query.op, names, ["out"], domain=query.domain, **dict(query.attrs))
    output = helper.make_tensor_value_info("out", elem, None)
    return _model(query, helper.make_graph([node], "probe", inputs, [output], initializers))


def _model(query: _Question, graph: onnx.GraphProto) -> onnx.ModelProto:
    opsets = [helper.make_opsetid("", query.opset)]
    if query.domain:
        opsets.append(helper.make_opsetid(query.domain, 1))
    return helper.make_model(graph, opset_imports=opsets, ir_version=8 if query.opset < 20 else 10)
