"""Valid graphs that ONNX Runtime's own optimizations break, put so that they do not; with the release that does it."""

from __future__ import annotations

from onnxfuse.graph import view
from onnxfuse.graph.ir import Graph, Node, Variable
from onnxfuse.graph.model import Model


def settle(model: Model) -> int:
    """Apply all of them to a finished model, in place; returns how many nodes were added."""
    return sum(_split_shared_targets(model, graph) for graph in list(model.graphs()))


def _split_shared_targets(model: Model, graph: Graph) -> int:
    """One `Concat` that makes the target of several `Reshape`s: each gets its own.

    ONNX Runtime 1.31's ReshapeFusion replaces the Concat by a constant of the same name, once for each Reshape, and
    stops with "Attempt to replace the existing tensor". The copies cost nothing where it does not fuse: they join a
    handful of integers.
    """
    added: list[tuple[Node, Node]] = []
    for concat in graph.nodes:
        if concat.op != "Concat" or view.domain(concat) != "":
            continue
        target = concat.outputs[0]
        readers = [n for n in view.consumers(target) if n.op == "Reshape" and n.inputs[1] is target]
        for reader in readers[1:]:
            copy = Variable(model.names.fresh(target.name), dtype=target.dtype, shape=target.shape)
            node = Node(
                "Concat", name=model.names.fresh(concat.name or target.name), attrs=dict(concat.attrs),
                inputs=list(concat.inputs), outputs=[copy],
            )
            reader.inputs[1] = copy
            added.append((concat, node))
    if added:
        after: dict[Node, list[Node]] = {}
        for concat, node in added:
            after.setdefault(concat, []).append(node)
        graph.nodes[:] = [n for old in graph.nodes for n in (old, *after.get(old, ()))]
    return len(added)
