"""Shape inference of our own ops, made known to the graph package (which knows nothing of them)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from onnxfuse.graph import shapes
from onnxfuse.graph.ir import Node, is_empty
from onnxfuse.graph.view import domain
from onnxfuse.match.typing import dtype_of, shape_of
from onnxfuse.ops import registry
from onnxfuse.ops.opdef import OpDef, TensorType

Types = tuple[str | None, tuple[Any, ...] | None]


def _typed(given: Sequence[Types | None]) -> list[TensorType | None]:
    return [TensorType(*item) if item is not None else None for item in given]


def _register(op: OpDef) -> None:
    def infer(inputs: Sequence[Types | None], attrs: Mapping[str, Any]) -> list[Types]:
        return [(found.dtype, found.shape) for found in op.infer(_typed(inputs), attrs)]

    shapes.register_types(op.name, op.domain, infer)


def check(node: Node) -> None:
    """Raises OpError if the node is one of our ops and its operands cannot be valid."""
    op = registry.find(domain(node), node.op)
    if op is not None:
        inputs = [None if is_empty(v) else (dtype_of(v), shape_of(v)) for v in node.inputs]
        op.infer(_typed(inputs), dict(node.attrs))


for _op in registry.OPS:
    _register(_op)
