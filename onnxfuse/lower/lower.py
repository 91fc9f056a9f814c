"""Lowers a fused model to what the target really has. Nothing of `onnxfuse.std` is left, nothing without a kernel."""

from __future__ import annotations

from collections.abc import Callable

from onnxfuse.graph import edit, view
from onnxfuse.graph.ir import Graph
from onnxfuse.graph.model import Model
from onnxfuse.lower.emit import Emitter, dtype_of
from onnxfuse.lower.kernels import MICROSOFT, KernelTable
from onnxfuse.lower.linear import LinearLowering
from onnxfuse.lower.report import LoweringReport
from onnxfuse.lower.skip import lower_skip
from onnxfuse.lower.standard import lower_node
from onnxfuse.lower.widen import widen
from onnxfuse.ops.opdef import FUSED_DOMAIN, STD_DOMAIN


def lower(model: Model, kernels: KernelTable, apply_rules: Callable[[Model], object] | None = None) -> LoweringReport:
    """Lower `model` in place.

    First the fused products are kept or taken apart, then the rules of the stage `lower` run, then each lifted op that
    is left becomes one kernel of the target or is expanded into standard ops.

    Args:
        model: shapes and dtypes must have been inferred.
        kernels: what the target has.
        apply_rules: runs the rules of the stage `lower` on the model.

    Raises:
        OpError: an op has no kernel and the model's opset is too old for its expansion.
    """
    report = LoweringReport()
    graphs = list(model.graphs())
    for graph in graphs:
        emitter = Emitter(model, graph)
        products = LinearLowering(emitter, kernels, report)
        for node in list(graph.nodes):
            if not products.lower(node) and not lower_skip(emitter, kernels, report, node):
                emitter.keep(node)
        graph.nodes[:] = emitter.nodes
    if apply_rules is not None:
        apply_rules(model)
    for graph in graphs:
        _finish(model, graph, kernels, report)
        edit.remove_dead(graph)
    widen(model, kernels, report)
    _import_domains(model)
    return report


def _finish(model: Model, graph: Graph, kernels: KernelTable, report: LoweringReport) -> None:
    emitter = Emitter(model, graph)
    for node in list(graph.nodes):
        domain, name = view.domain(node), node.outputs[0].name if node.outputs else node.name
        if domain == STD_DOMAIN:
            op = node.op
            if lower_node(emitter, kernels, node):
                report.keep(f"{domain}::{op}")
            else:
                report.take_apart(f"{domain}::{op}", name, "no-kernel")
                emitter.expand(node)
        elif domain == FUSED_DOMAIN and not kernels.has_custom(node.op, dtype_of(node.inputs[0])):
            report.take_apart(f"{domain}::{node.op}", name, "no-kernel")
            emitter.expand(node)
        else:
            emitter.keep(node)
    graph.nodes[:] = emitter.nodes


def _import_domains(model: Model) -> None:
    used = {view.domain(node) for graph in model.graphs() for node in graph.nodes}
    model.opsets.pop(STD_DOMAIN, None)
    if FUSED_DOMAIN not in used:
        model.opsets.pop(FUSED_DOMAIN, None)
    for domain in (FUSED_DOMAIN, MICROSOFT):
        if domain in used:
            model.opsets.setdefault(domain, 1)
