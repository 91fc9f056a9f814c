"""An `If` whose condition is known gives way to the branch that it takes."""

from __future__ import annotations

import onnx_graphsurgeon as gs

from onnxfuse.graph import edit, view
from onnxfuse.graph.canonicalize.scope import Scope, numbers_of
from onnxfuse.graph.dims import Dim
from onnxfuse.graph.ir import Constant, Graph, Node


def inline_known_branches(scope: Scope) -> int:
    """Put the nodes of the branch that an `If` surely takes in its place."""
    count = 0
    for node in scope.nodes("If"):
        known = numbers_of(node.inputs[0])
        branches = [node.attrs.get(name) for name in ("then_branch", "else_branch")]
        if not known or isinstance(known[0], Dim) or not all(isinstance(b, gs.Graph) for b in branches):
            continue
        taken, dropped = branches if known[0] else reversed(branches)
        _inline(scope, node, taken, dropped)
        count += 1
    return count


def _inline(scope: Scope, node: Node, taken: Graph, dropped: Graph) -> None:
    graph = scope.graph
    position = edit.index_of(graph, node)
    for inner in dropped.nodes:
        edit.disconnect(inner)
    _make_names_unique(scope, node, taken)
    outputs, results = list(node.outputs), list(taken.outputs)
    moved = list(taken.nodes)
    taken.nodes.clear()
    node.attrs.clear()
    edit.disconnect(node)
    graph.nodes[position : position + 1] = moved
    for output, result in zip(outputs, results, strict=True):
        if not scope.replace(output, result):
            # The graph's output keeps its name; something else of that value goes on being read under its own.
            bridge = Node(
                "Identity", name=scope.names.fresh(f"{output.name}_Identity"), inputs=[result], outputs=[output]
            )
            graph.nodes.append(bridge)


def _make_names_unique(scope: Scope, node: Node, branch: Graph) -> None:
    """Names that the branch makes must be new to the graph around it; another branch may have the same ones."""
    model = scope.engine.model
    inside = list(view.all_graphs(branch))
    ids = {id(graph) for graph in inside}
    taken: set[str] = set()
    for graph in model.graphs():
        if id(graph) not in ids:
            taken.update(v.name for other in graph.nodes for v in other.outputs)
            taken.update(v.name for v in graph.inputs)
    for graph in inside:
        for inner in graph.nodes:
            for value in inner.outputs:
                if value.name and value.name in taken:
                    value.name = scope.names.fresh(value.name)
            for value in inner.inputs:
                if isinstance(value, Constant) and value.name in taken:
                    value.name = scope.names.fresh(value.name)
