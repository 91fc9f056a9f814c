"""Runs a model of any dtype by ONNX's reference evaluator and compares with an oracle.

Our own ops are computed by their NumPy references.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import ml_dtypes
import numpy as np
import onnx
from onnx import helper
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from onnxfuse.ops import registry
from onnxfuse.ops.opdef import OpDef
from onnxfuse.runtime import oracle
from onnxfuse.runtime.session import Runner

#: A rewritten graph may be this many times as wrong as the original was, plus a few roundings of the largest value.
FACTOR = 4.0
FLOOR = {"float64": 2.0**-40, "float32": 2.0**-20, "float16": 2.0**-10, "bfloat16": 2.0**-7}
_NARROW = (np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))


def run(proto: onnx.ModelProto, feeds: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    """The model's outputs."""
    evaluator = ReferenceEvaluator(proto, new_ops=[*_own_ops(), *_contrib_ops(proto)])
    with np.errstate(all="ignore"):
        return [np.asarray(v) for v in evaluator.run(None, dict(feeds))]


def truth(proto: onnx.ModelProto, feeds: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    """The model's outputs with every float in float64."""
    return run(oracle.widen(proto, "float64"), oracle.cast_feeds(feeds, "float64"))


def compare(fused: np.ndarray, unfused: np.ndarray, wanted: np.ndarray) -> str | None:
    """What is wrong with the fused output, or None."""
    if fused.shape != unfused.shape:
        return f"shape {list(fused.shape)} instead of {list(unfused.shape)}"
    if fused.dtype != unfused.dtype:
        return f"dtype {fused.dtype} instead of {unfused.dtype}"
    if fused.dtype.kind in "iub":
        return None if np.array_equal(fused, unfused) else "other integers"
    if fused.size == 0:
        return None
    have, base, true = (np.asarray(a, dtype=np.float64) for a in (fused, unfused, wanted))
    usable = np.isfinite(true) & np.isfinite(base)
    if not np.isfinite(have[usable]).all():
        return "NaN or infinity where the original has numbers"
    if not usable.any():
        return None if np.array_equal(np.isnan(have), np.isnan(base)) else "NaN in other places"
    error = np.abs(have[usable] - true[usable]).max()
    own = np.abs(base[usable] - true[usable]).max()
    limit = FACTOR * own + FLOOR[fused.dtype.name] * max(np.abs(true[usable]).max(), 1e-30)
    return None if error <= limit else f"error {error:.3g}, at most {limit:.3g} allowed (the original's is {own:.3g})"


def _class(op_type: str, domain: str, body: Any) -> type[OpRun]:
    return type(op_type, (OpRun,), {"op_domain": domain, "_run": body, "__module__": __name__})


@lru_cache(maxsize=1)
def _own_ops() -> tuple[type[OpRun], ...]:
    return tuple(_own_op(op) for op in registry.OPS)


def _own_op(op: OpDef) -> type[OpRun]:
    def body(self: OpRun, *inputs: Any, **_: Any) -> tuple[np.ndarray, ...]:
        attrs = op.attributes_of(self.onnx_node)
        given = [None if value is None else np.asarray(value) for value in inputs]
        outputs = op.reference(given, attrs)
        types = [next(v.dtype for v in given if v is not None and _is_float(v.dtype))] * len(outputs)
        if op.name in ("RMSNormalization", "LayerNormalization") and given[1] is not None:
            types[0] = given[1].dtype  # the output has the type of the scale
        count = max(len(self.onnx_node.output), 1)
        return tuple(
            np.asarray(o).astype(t) if _is_float(np.asarray(o).dtype) else np.asarray(o)
            for o, t in zip(outputs[:count], types, strict=False)
        )

    return _class(op.name, op.domain, body)


def _is_float(dtype: np.dtype) -> bool:
    return dtype.kind == "f" or dtype in _NARROW


def _contrib_ops(proto: onnx.ModelProto) -> list[type[OpRun]]:
    """Ops that only ONNX Runtime defines are run by it, one node at a time, in float32."""
    wanted: dict[tuple[str, str], None] = {}

    def visit(graph: onnx.GraphProto) -> None:
        for node in graph.node:
            if node.domain == "com.microsoft" or (node.op_type == "SimplifiedLayerNormalization" and not node.domain):
                wanted[node.op_type, node.domain] = None
            for attribute in node.attribute:
                if attribute.type == onnx.AttributeProto.GRAPH:
                    visit(attribute.g)

    visit(proto.graph)
    opset = next((o.version for o in proto.opset_import if o.domain == ""), 17)
    return [_class(op_type, domain, _by_runtime(opset)) for op_type, domain in wanted]


def _by_runtime(opset: int) -> Any:
    def body(self: OpRun, *inputs: Any, **_: Any) -> tuple[np.ndarray, ...]:
        node = onnx.NodeProto()
        node.CopyFrom(self.onnx_node)
        # Positions decide; a name may occur twice.
        names = [f"i{i}" if value is not None else "" for i, value in enumerate(inputs)]
        del node.input[:]
        node.input.extend(names)
        own = next((np.asarray(v).dtype for v in inputs if v is not None and _is_float(np.asarray(v).dtype)), None)
        values = {
            name: np.asarray(v).astype(np.float32) if _is_float(np.asarray(v).dtype) else np.asarray(v)
            for name, v in zip(names, inputs, strict=True)
            if name
        }
        graph = helper.make_graph(
            [node],
            "one",
            [
                helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(v.dtype), v.shape)
                for n, v in values.items()
            ],
            [onnx.ValueInfoProto(name=name) for name in node.output if name],
        )
        imports = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
        results = Runner(helper.make_model(graph, opset_imports=imports, ir_version=10)).run(values)
        wanted = [results[name] for name in node.output if name]
        return tuple(r.astype(own) if own is not None and _is_float(r.dtype) else r for r in wanted)

    return body
