"""ONNX's own Attention, as exporters write it from opset 23 on, for the rules that take in its cache.

Otherwise such a node is left as it is; it knows no buffer that past and present share.
"""

from __future__ import annotations

from onnxfuse.graph import view
from onnxfuse.graph.model import Model
from onnxfuse.ops.opdef import STD_DOMAIN


def lift_attention(model: Model) -> int:
    """Make every Attention of ONNX's own domain the lifted op, which means the same, in place; returns how many."""
    found = [node for node in model.graph.nodes if node.op == "Attention" and view.domain(node) == ""]
    for node in found:
        node.domain = STD_DOMAIN
        node.attrs["nan_guard"] = 1  # a query that sees no key gives zeros
    if found:
        model.opsets.setdefault(STD_DOMAIN, 1)
    return len(found)
