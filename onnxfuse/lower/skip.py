"""ONNX Runtime's Skip(Simplified)LayerNormalization: kept where its kernel is good, else an addition and a norm."""

from __future__ import annotations

from onnxfuse.graph import view
from onnxfuse.graph.ir import Node, Value, Variable, is_empty
from onnxfuse.lower import choices
from onnxfuse.lower.emit import Emitter, dtype_of, operand, rank_of
from onnxfuse.lower.kernels import MICROSOFT, KernelTable
from onnxfuse.lower.report import LoweringReport
from onnxfuse.ops.opdef import STD_DOMAIN

_NORM_OF = {"SkipLayerNormalization": "LayerNormalization", "SkipSimplifiedLayerNormalization": "RMSNormalization"}


def lower_skip(emitter: Emitter, kernels: KernelTable, report: LoweringReport, node: Node) -> bool:
    """Handle a skip norm that a rewrite made (those of the source model are the user's choice). False: it is none."""
    if view.domain(node) != MICROSOFT or node.op not in _NORM_OF or node.origin is None:
        return False
    x = node.inputs[0]
    exists = kernels.has(node.op, dtype_of(x), opset=emitter.opset, domain=MICROSOFT, rank=rank_of(x))
    choice = choices.skip_norm(kernels) if exists else choices.NO_KERNEL
    _omit_unread(emitter, node)
    if choice.keep:
        report.keep(f"{MICROSOFT}::{node.op}")
        emitter.keep(node)
        return True
    report.take_apart(f"{MICROSOFT}::{node.op}", node.outputs[0].name, choice.reason)
    _apart(emitter, kernels, node)
    return True


def _omit_unread(emitter: Emitter, node: Node) -> None:
    for index, value in enumerate(node.outputs):
        if index and not view.consumers(value) and not view.is_graph_output(emitter.graph, value):
            node.outputs[index] = Variable("")
    while is_empty(node.outputs[-1]):
        node.outputs.pop()


def _apart(emitter: Emitter, kernels: KernelTable, node: Node) -> None:
    layer = node.op == "SkipLayerNormalization"
    attrs = {"axis": -1, "epsilon": node.attrs.get("epsilon", 1e-12)}
    shift = operand(node, 3) if layer else None
    inputs, outputs = emitter.replace(node)
    total: Value | None = outputs[3] if len(outputs) > 3 else None
    alone = total is None
    as_sum = layer and alone and choices.sum_before_layer_norm(emitter, kernels, dtype_of(outputs[0]))
    total = emitter.op("Sum" if as_sum else "Add", [inputs[0], inputs[1]], out=total)
    scaled: list[Value | None] = [total, inputs[2], shift] if layer else [total, inputs[2]]
    emitter.op(_NORM_OF[node.op], scaled, domain=STD_DOMAIN, attrs=attrs, out=outputs[0])
