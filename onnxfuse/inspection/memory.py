"""Peak activation memory: the most bytes of intermediate tensors that live at once when nodes run in file order."""

from __future__ import annotations

from dataclasses import dataclass

from onnx import AttributeProto, GraphProto, NodeProto

from onnxfuse.inspection.costs import VIEWS, nbytes
from onnxfuse.inspection.sizes import Sizes


@dataclass(frozen=True)
class Peak:
    """`bytes` live at once while `node` (op and output) runs; weights and graph inputs are not activations.

    `unknown` counts values of unknown size, which are left out.
    """

    bytes: int
    node: str
    unknown: int


def peak(graph: GraphProto, sizes: Sizes) -> Peak:
    """Liveness over one graph. A buffer is born with the node that writes it and dies with its last reader (views keep
    their source alive); graph outputs live to the end. Inside If, Loop and Scan the body's own peak is added.

    An executor may do better (in-place ops) or worse (fragmentation); this is the bound that the graph's order sets.
    """
    owner = _view_owners(graph)
    last_use = _last_uses(graph, owner)
    live: dict[str, int] = {}
    total = best = unknown = 0
    best_node = ""
    given = {i.name for i in graph.input} | {t.name for t in graph.initializer}
    for index, node in enumerate(graph.node):
        for name in node.output:
            if not name or owner.get(name, name) != name or node.op_type == "Constant":
                continue
            size = nbytes(sizes.types.get(name)) if name in sizes.types else None
            if size is None:
                unknown += 1
                continue
            live[name] = size
            total += size
        inner = [peak(g, sizes) for g in _bodies(node, sizes)]
        during = total + max((p.bytes for p in inner), default=0)
        unknown += sum(p.unknown for p in inner)
        if during > best:
            best, best_node = during, f"{node.op_type} `{node.output[0] if node.output else node.name}`"
        for name in [*_names_read(node), *node.output]:
            root = owner.get(name, name)
            if last_use.get(root, -1) <= index and root in live and root not in given:
                total -= live.pop(root)
    return Peak(best, best_node, unknown)


def _view_owners(graph: GraphProto) -> dict[str, str]:
    owner: dict[str, str] = {}
    for node in graph.node:
        if node.op_type in VIEWS and node.domain in ("", "ai.onnx"):
            owner[node.output[0]] = owner.get(node.input[0], node.input[0])
    return owner


def _last_uses(graph: GraphProto, owner: dict[str, str]) -> dict[str, int]:
    last: dict[str, int] = {}
    for index, node in enumerate(graph.node):
        for name in _names_read(node):
            last[owner.get(name, name)] = index
    for value in graph.output:
        last[owner.get(value.name, value.name)] = len(graph.node)
    return last


def _names_read(node: NodeProto) -> list[str]:
    """Inputs, and what subgraphs read (their own names cannot clash with outer ones)."""
    names = [n for n in node.input if n]
    for attribute in node.attribute:
        if attribute.type == AttributeProto.GRAPH:
            names += [n for inner in attribute.g.node for n in _names_read(inner)]
            names += [v.name for v in attribute.g.output]
    return names


def _bodies(node: NodeProto, sizes: Sizes) -> list[GraphProto]:
    return [
        a.g
        for a in node.attribute
        if a.type == AttributeProto.GRAPH and (node.output[0], a.name) not in sizes.dead_branches
    ]
