"""One node of a fused op on the CUDA provider, its float64 reference, and its unfused form on the same provider."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnxruntime as ort
from onnx import ModelProto

from onnxfuse.ops import functions, registry
from onnxfuse.runtime import library
from tests.ops.cases import as_feed, normal, one_node_model, through_float32

LIMIT = {"float32": 2e-5, "float16": 1.5e-3, "bfloat16": 1.2e-2}
"""Largest error over the largest value: a few roundings of the output, and sums in float32."""


def cuda_session(
    model: ModelProto, graph: bool = False, custom: bool = True, device: int = 0
) -> ort.InferenceSession:
    options = ort.SessionOptions()
    if custom:
        library.register(options)
    options.log_severity_level = 3
    options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    settings = {"device_id": str(device), "enable_cuda_graph": "1" if graph else "0", "use_tf32": "0"}
    provider = ("CUDAExecutionProvider", settings)
    return ort.InferenceSession(model.SerializeToString(), options, providers=[provider])


class GpuCase:
    """A model with any number of rows; weight, bias and column sums are initializers."""

    def __init__(
        self,
        name: str,
        dtype: str,
        k: int,
        n: int,
        attrs: Mapping[str, Any],
        *,
        bias: bool = True,
        residual: bool = False,
        colsum: bool = True,
        scale: float = 1.0,
        mean: float = 0.0,
        constant: bool = True,
    ) -> None:
        self.op = registry.get("onnxfuse", name)
        self.dtype, self.k, self.attrs, self.scale, self.mean = dtype, k, dict(attrs), scale, mean
        self.columns = 2 * n if name == "GatedLinear" else n
        rng = np.random.default_rng(11)
        shape = (self.columns, k) if attrs.get("layout", "NK") == "NK" else (k, self.columns)
        self.weight = normal(rng, shape, dtype, max(k, 1) ** -0.5)
        self.bias = normal(rng, (self.columns,), dtype) if bias else None
        self.residual = residual
        sums = self.weight.astype(np.float32).sum(1 if attrs.get("layout", "NK") == "NK" else 0)
        self.colsum = sums if colsum and attrs.get("norm") == "layer" else None
        self.constants = ("weight", "bias", "colsum") if constant else ()
        shapes: dict[str, Sequence[int | str]] = {"x": ["rows", k], "residual": ["rows", n]}
        self.n = n
        self.model = one_node_model(self.op, self.inputs(2), attrs, constants=self.constants, shapes=shapes)

    def inputs(self, rows: int, seed: int = 0) -> list[np.ndarray | None]:
        rng = np.random.default_rng(100 + seed)
        x = ((rng.standard_normal((rows, self.k)) + self.mean) * self.scale).astype(self.weight.dtype)
        given: dict[str, np.ndarray | None] = {
            "x": x, "weight": self.weight, "bias": self.bias, "colsum": self.colsum,
            "residual": normal(rng, (rows, self.n), self.dtype) if self.residual else None,
        }
        return [given[spec.name] for spec in self.op.inputs]

    def feeds(self, inputs: Sequence[np.ndarray | None]) -> dict[str, np.ndarray]:
        named = zip(self.op.inputs, inputs, strict=True)
        return {s.name: as_feed(a) for s, a in named if a is not None and s.name not in self.constants}

    def session(self, graph: bool = False, device: int = 0) -> ort.InferenceSession:
        return cuda_session(through_float32(self.model), graph, device=device)

    def reference(self, inputs: Sequence[np.ndarray | None]) -> np.ndarray:
        return np.asarray(self.op.reference(inputs, self.attrs)[0], np.float64)

    def unfused_session(self) -> ort.InferenceSession:
        return cuda_session(through_float32(functions.attach_functions(self.model)), custom=False)
