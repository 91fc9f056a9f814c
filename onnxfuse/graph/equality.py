"""Whether two models are the same but for the names of inner values and nodes, and the order of independent nodes."""

from __future__ import annotations

import numpy as np

from onnxfuse.graph import consts, view
from onnxfuse.graph.ir import Constant, Graph, Node, Tensor, Value
from onnxfuse.graph.model import Model


def same_but_for_names(one: Model, other: Model) -> bool:
    """Whether both have the same interface and compute the same with the same nodes and constants."""
    if one.opsets != other.opsets or one.functions or other.functions:
        return False
    if sum(len(g.nodes) for g in one.graphs()) != sum(len(g.nodes) for g in other.graphs()):
        return False
    pairs = _Pairs()
    return pairs.interfaces(one.graph, other.graph) and pairs.graphs(one.graph, other.graph)


class _Pairs:
    """Values of one model with those of the other that play their part. Nodes are asked for in topological order, so a
    value that a node reads has its partner already."""

    def __init__(self) -> None:
        self.partner: dict[int, Value] = {}

    def interfaces(self, one: Graph, other: Graph) -> bool:
        return all(
            [(v.name, v.dtype) for v in mine] == [(v.name, v.dtype) for v in theirs]
            for mine, theirs in ((one.inputs, other.inputs), (one.outputs, other.outputs))
        )

    def graphs(self, one: Graph, other: Graph) -> bool:
        """Whether the graphs are the same, given the partners of what they capture."""
        if (len(one.inputs), len(one.outputs)) != (len(other.inputs), len(other.outputs)):
            return False
        self.partner.update((id(a), b) for a, b in zip(one.inputs, other.inputs, strict=True))
        # A node is found in the other graph by what it reads, or, where it reads nothing, by its place.
        position = {id(node): index for index, node in enumerate(other.nodes)}
        free = set(position)
        for node in one.nodes:
            match = self._find(node, other, position, free)
            if match is None:
                return False
            free.discard(id(match))
            self.partner.update((id(a), b) for a, b in zip(node.outputs, match.outputs, strict=True))
        return not free and all(self.values(a, b) for a, b in zip(one.outputs, other.outputs, strict=True))

    def _find(self, node: Node, other: Graph, position: dict[int, int], free: set[int]) -> Node | None:
        reads = next((self.partner.get(id(v)) for v in node.inputs if v.name and not isinstance(v, Constant)), None)
        candidates = view.consumers(reads) if reads is not None else other.nodes
        for candidate in sorted((c for c in candidates if id(c) in free), key=lambda c: position[id(c)]):
            if self.nodes(node, candidate):
                return candidate
        return None

    def nodes(self, one: Node, other: Node) -> bool:
        if one.op != other.op or view.domain(one) != view.domain(other) or one.attrs.keys() != other.attrs.keys():
            return False
        if len(one.inputs) != len(other.inputs) or [bool(v.name) for v in one.outputs] != [
            bool(v.name) for v in other.outputs
        ]:
            return False
        return all(self.values(a, b) for a, b in zip(one.inputs, other.inputs, strict=True)) and all(
            self._attributes(value, other.attrs[name]) for name, value in one.attrs.items()
        )

    def values(self, one: Value, other: Value) -> bool:
        if isinstance(one, Constant) or isinstance(other, Constant):
            return isinstance(one, Constant) and isinstance(other, Constant) and same_constant(one, other)
        if not one.name or not other.name:
            return one.name == other.name
        return self.partner.get(id(one)) is other

    def _attributes(self, one: object, other: object) -> bool:
        if isinstance(one, Graph):
            return isinstance(other, Graph) and self.graphs(one, other)
        if isinstance(one, (Tensor, np.ndarray)) or isinstance(other, (Tensor, np.ndarray)):
            mine, theirs = (np.asarray(v.values if isinstance(v, Tensor) else v) for v in (one, other))
            return mine.dtype == theirs.dtype and bool(np.array_equal(mine, theirs))
        if isinstance(one, list) and isinstance(other, list):
            return len(one) == len(other) and all(map(self._attributes, one, other))
        if isinstance(one, float) and isinstance(other, float):
            return bool(np.float32(one) == np.float32(other))  # as files hold it
        return type(one) is type(other) and one == other


def same_constant(one: Constant, other: Constant) -> bool:
    """Whether dtype, shape and every bit are the same. Data outside of the models is not read if it is the same part of
    the same file."""
    if consts.dtype_of(one) != consts.dtype_of(other) or consts.shape_of(one) != consts.shape_of(other):
        return False
    if consts.is_external(one) and consts.is_external(other):
        places = [
            {(e.key, e.value) for e in constant._values.tensor.external_data} | {("folder", str(constant.base_dir))}
            for constant in (one, other)
        ]
        if places[0] == places[1]:
            return True
    mine, theirs = consts.array(one), consts.array(other)
    return mine.tolist() == theirs.tolist() if mine.dtype == object else mine.tobytes() == theirs.tobytes()
