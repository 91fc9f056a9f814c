"""Readers of one weight in two branches of a model, of which a rule will do the same to both."""

from __future__ import annotations

from onnxfuse.graph import view
from onnxfuse.graph.canonicalize.duplicates import constant_key
from onnxfuse.graph.ir import Constant, Node


def have_twins(source: Constant, matched: set[Node], others: list[Node], graph_nodes: list[Node]) -> bool:
    """Whether each of these other readers of a captured weight stands in another graph, where it reads the weight as
    a matched node does here.

    The branches of a merged decoder are the same network twice. What a rule makes of a weight in one of them it makes
    in the other too, and equal constants of several graphs are stored once (`graph.sharing`).
    """
    mine = [node for node in view.consumers(source) if node in matched]
    if not mine or not all(any(_alike(source, one, other) for one in mine) for other in others):
        return False
    here = set(graph_nodes)
    return not any(other in here for other in others)


def _alike(source: Constant, one: Node, other: Node) -> bool:
    """Both read the weight at the same place, and what they multiply it with comes from nodes with equal constants."""
    if (one.op, view.domain(one)) != (other.op, view.domain(other)):
        return False
    if [value is source for value in one.inputs[:2]] != [value is source for value in other.inputs[:2]]:
        return False
    first, second = (view.producer(node.inputs[0]) for node in (one, other))
    if first is None or second is None:
        return first is second
    if (first.op, view.domain(first)) != (second.op, view.domain(second)):
        return False
    return _constants(first) == _constants(second)


def _constants(node: Node) -> list[object]:
    return [constant_key(value) if isinstance(value, Constant) else None for value in node.inputs]
