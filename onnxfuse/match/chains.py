"""Trees of one binary op, for chains."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from onnxfuse.graph import view
from onnxfuse.graph.ir import Node, Value
from onnxfuse.match.scope import Scope


def trees(
    op: str, root: Node, count: int, env: dict[Any, Any], scope: Scope
) -> Iterator[tuple[tuple[Node, ...], tuple[Value, ...]]]:
    """All (inner nodes, leaves) of the tree of binary `op` nodes below `root` that has `count` leaves."""
    seen: set[tuple[int, ...]] = set()
    stack: list[tuple[tuple[Node, ...], tuple[Value, ...]]] = [((root,), tuple(root.inputs))]
    while stack:
        nodes, leaves = stack.pop()
        if len(leaves) == count:
            yield nodes, leaves
            continue
        expanded = []
        for index, leaf in enumerate(leaves):
            node = leaf.inputs[0] if leaf.inputs else None
            if node is None or node.op != op or view.domain(node) != "" or node in env or node in nodes:
                continue
            if node not in scope.position or len(leaf.outputs) != 1 or scope.is_output(leaf):
                continue
            grown = ((*nodes, node), leaves[:index] + tuple(node.inputs) + leaves[index + 1 :])
            key = tuple(sorted(id(n) for n in grown[0]))
            if key not in seen:
                seen.add(key)
                expanded.append(grown)
        stack.extend(reversed(expanded))
