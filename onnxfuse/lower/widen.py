"""bfloat16 where the target has no arithmetic for it (ONNX Runtime's CPU provider): through float32, node by node.

A model in bfloat16 does not even load there. Each node that has no bfloat16 kernel, but one for float32, gets Casts
around it: it computes in float32 and rounds once, which is what bfloat16 hardware does.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from onnxfuse.graph import shapes, view
from onnxfuse.graph.ir import Graph, Node, Value, Variable, is_empty
from onnxfuse.graph.model import Model
from onnxfuse.graph.types import onnx_of
from onnxfuse.lower.emit import Emitter, dtype_of, operand, rank_of, shape_of
from onnxfuse.lower.kernels import MICROSOFT, KernelTable, Query
from onnxfuse.lower.report import LoweringReport

_NARROW, _WIDE = "bfloat16", "float32"
_ASKED_DOMAINS = ("", MICROSOFT)
_PLAIN = (int, float, str, bool, np.integer, np.floating)


def widen(model: Model, kernels: KernelTable, report: LoweringReport) -> None:
    """Put Casts around the nodes that the target cannot run in bfloat16."""
    graphs = list(model.graphs())
    if not any(_is_narrow(node) for graph in graphs for node in graph.nodes):
        return
    shapes.infer(model)  # lowering made values whose dtypes are not known yet
    for graph in graphs:
        _widen_graph(model, graph, kernels, report)


def _widen_graph(model: Model, graph: Graph, kernels: KernelTable, report: LoweringReport) -> None:
    emitter = Emitter(model, graph)
    wide: dict[int, Value] = {}
    for node in list(graph.nodes):
        query = _question(emitter, node)
        if query is None or kernels.runs(query):
            emitter.keep(node)
            continue
        other = _question(emitter, node, as_wide=True)
        if other is None or not kernels.runs(other):
            report.take_apart(_name(node), node.outputs[0].name, "no-kernel: neither in bfloat16 nor in float32")
            emitter.keep(node)
            continue
        report.take_apart(_name(node), node.outputs[0].name, "no-kernel: in float32 between Casts")
        _surround(emitter, node, wide)
    graph.nodes[:] = emitter.nodes


def _name(node: Node) -> str:
    return f"{view.domain(node)}::{node.op}" if view.domain(node) else node.op


def _is_narrow(node: Node) -> bool:
    return any(not is_empty(v) and dtype_of(v) == _NARROW for v in (*node.inputs, *node.outputs))


def _question(emitter: Emitter, node: Node, as_wide: bool = False) -> Query | None:
    """The question whether the target runs this node; None for one that cannot be asked or that has no bfloat16."""
    if view.domain(node) not in _ASKED_DOMAINS or not _is_narrow(node) or view.subgraphs(node):
        return None
    attrs = _plain_attributes(node)
    if attrs is None:
        return None
    given: list[tuple[str, int | None] | None] = []
    for index in range(len(node.inputs)):
        value = operand(node, index)
        dtype = dtype_of(value) if value is not None else None
        if value is not None and dtype is None:
            return None
        given.append(None if value is None else (_WIDE if as_wide and dtype == _NARROW else str(dtype), rank_of(value)))
    if as_wide and node.op in ("Cast", "CastLike"):
        return None
    narrow = _WIDE if as_wide else _NARROW
    return Query(view.domain(node), node.op, narrow, emitter.opset, 0, attrs, tuple(given), len(node.outputs))


def _plain_attributes(node: Node) -> tuple[tuple[str, Any], ...] | None:
    found: list[tuple[str, Any]] = []
    for name, value in sorted(node.attrs.items()):
        if isinstance(value, (list, tuple)) and all(isinstance(v, _PLAIN) for v in value):
            found.append((name, tuple(value)))
        elif isinstance(value, _PLAIN):
            found.append((name, value))
        else:
            return None
    return tuple(found)


def _surround(emitter: Emitter, node: Node, wide: dict[int, Value]) -> None:
    op, domain, attrs = node.op, view.domain(node), dict(node.attrs)
    inputs, outputs = emitter.replace(node)
    given = [v if v is None or dtype_of(v) != _NARROW else _widened(emitter, v, wide) for v in inputs]
    made: list[Value | None] = []
    casts: list[tuple[Value, Value]] = []
    for output in outputs:
        if is_empty(output) or dtype_of(output) != _NARROW:
            made.append(None if is_empty(output) else output)
            continue
        inner = Variable(emitter.model.names.fresh(f"{output.name}_wide"), dtype=_WIDE, shape=shape_of(output))
        made.append(inner)
        casts.append((inner, output))
    emitter.add(op, given, made, domain=domain, attrs=attrs)
    for inner, output in casts:
        emitter.op("Cast", [inner], attrs={"to": onnx_of(_NARROW)}, out=output)


def _widened(emitter: Emitter, value: Value, wide: dict[int, Value]) -> Value:
    if id(value) not in wide:
        wide[id(value)] = emitter.op("Cast", [value], attrs={"to": onnx_of(_WIDE)}, dtype=_WIDE)
    return wide[id(value)]
