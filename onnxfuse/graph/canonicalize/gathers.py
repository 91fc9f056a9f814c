"""Gathers in their plainest form."""

from __future__ import annotations

from onnxfuse.graph.canonicalize.scope import Scope, shape_of, static_attr


def gather_nd_of_rows(scope: Scope) -> int:
    """`GatherND` whose positions name one axis only is a `Gather` of rows (PyTorch's `table[positions]`)."""
    count = 0
    for node in scope.nodes("GatherND"):
        positions = shape_of(node.inputs[1])
        if positions is None or not positions or positions[-1] != 1 or scope.opset < 13:
            continue
        if static_attr(node, "batch_dims", 0) != 0 or scope.is_output(node.outputs[0]):
            continue
        last = scope.integers(f"{node.outputs[0].name}_axes", [len(positions) - 1])
        rows = scope.insert(node, "Squeeze", [node.inputs[1], last])
        count += scope.replace(node.outputs[0], scope.insert(node, "Gather", [node.inputs[0], rows], {"axis": 0}))
    return count
