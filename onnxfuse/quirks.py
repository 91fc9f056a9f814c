"""Valid graphs that ONNX Runtime's own optimizations break, put so that they do not; with the release that does it."""

from __future__ import annotations

import numpy as np

from onnxfuse.graph import consts, view
from onnxfuse.graph.ir import Constant, Graph, Node, Variable
from onnxfuse.graph.model import Model


def settle(model: Model) -> int:
    """Apply all of them to a finished model, in place; returns how many nodes were added."""
    passes = (_split_shared_targets, _squeeze_apart)
    return sum(apply(model, graph) for graph in list(model.graphs()) for apply in passes)


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


def _squeeze_apart(model: Model, graph: Graph) -> int:
    """A mean without its reduced dims that looks like one of a norm: the dims go in a node of their own.

    ONNX Runtime 1.31's LayerNormFusion and SimplifiedLayerNormFusion do not look at `keepdims`, and make a norm of one
    where the shapes happen to broadcast.
    """
    made: list[Node] = []
    added = 0
    for node in graph.nodes:
        made.append(node)
        if node.op != "ReduceMean" or view.domain(node) != "" or node.attrs.get("keepdims", 1):
            continue
        axes = node.attrs.get("axes") or (consts.ints(node.inputs[1]) if len(node.inputs) > 1 else None)
        mean, maker = node.outputs[0], view.producer(node.inputs[0])
        of_squares = maker is not None and maker.op in ("Pow", "Mul")
        if not axes or not (of_squares or any(reader.op == "Sub" for reader in view.consumers(mean))):
            continue
        kept = Variable(model.names.fresh(f"{mean.name}_kept"), dtype=mean.dtype)
        node.attrs["keepdims"] = 1
        node.outputs[0] = kept
        squeeze = Node("Squeeze", name=model.names.fresh(f"{mean.name}_squeeze"), inputs=[kept], outputs=[mean])
        if model.opset() >= 13:
            squeeze.inputs.append(Constant(model.names.fresh(f"{mean.name}_axes"), np.array(axes, np.int64)))
        else:
            squeeze.attrs["axes"] = list(axes)
        made.append(squeeze)
        added += 1
    graph.nodes[:] = made
    return added
