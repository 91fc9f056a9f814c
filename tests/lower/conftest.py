"""Builds small models from ONNX text, lowers them, and runs both forms."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
import onnx.parser
import pytest

from onnxfuse.graph import shapes
from onnxfuse.graph.model import Model
from onnxfuse.lower import LoweringReport, lower
from onnxfuse.lower.emit import dtype_of, shape_of
from onnxfuse.lower.kernels import KernelTable, Target
from onnxfuse.ops import functions
from onnxfuse.ops.opdef import TensorType
from onnxfuse.runtime import session as sessions
from onnxfuse.runtime.probe import OrtProbe

HEADER = '<ir_version: 8, opset_import: ["" : {opset}, "onnxfuse" : 1, "onnxfuse.std" : 1, "com.microsoft" : 1]>\n'


class Case:
    """A model in its lifted or fused form, and what lowering makes of it."""

    def __init__(self, text: str, weights: dict[str, np.ndarray], opset: int = 17) -> None:
        self.proto = onnx.parser.parse_model(HEADER.format(opset=opset) + text)
        for name, array in weights.items():
            self.proto.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
        self.model = Model(self.proto)
        shapes.infer(self.model)
        self.before = functions.attach_functions(self.model.to_proto(), self._types())
        self.report: LoweringReport | None = None

    def _types(self) -> dict[str, TensorType]:
        types = {}
        for node in self.model.graph.nodes:
            for value in (*node.inputs, *node.outputs):
                shape = shape_of(value)
                known = None if shape is None else tuple(d if isinstance(d, int) else None for d in shape)
                types[value.name] = TensorType(dtype_of(value), known)
        return types

    def lower(self, target: str = "cpu", kernels: KernelTable | None = None, origin: str | None = None) -> Case:
        """Lower in place. `origin`: pretend that a rewrite made every node."""
        for node in self.model.graph.nodes:
            node.origin = origin
        self.report = lower(self.model, kernels or KernelTable(Target.parse(target), OrtProbe()))
        return self

    @property
    def ops(self) -> Counter[str]:
        return Counter((f"{n.domain}." if n.domain else "") + n.op for n in self.model.graph.nodes)

    def check(self, feeds: dict[str, np.ndarray], limit: float = 1e-5) -> None:
        """The lowered model gives what the function bodies of the ops give."""
        after = self.model.to_proto()
        wanted = sessions.session(self.before, level="none").run(None, feeds)
        found = sessions.session(after).run(None, feeds)
        for a, b in zip(wanted, found, strict=True):
            scale = max(float(np.abs(a.astype(np.float64)).max(initial=0)), 1e-9)
            assert a.shape == b.shape and a.dtype == b.dtype
            assert float(np.abs(a.astype(np.float64) - b.astype(np.float64)).max(initial=0)) <= limit * scale


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)


@pytest.fixture
def case() -> type[Case]:
    return Case
