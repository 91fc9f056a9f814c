"""Pair the nodes of two graphs that play the same part, in time linear in the nodes."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable

from onnxfuse.diff import keys
from onnxfuse.graph import view
from onnxfuse.graph.ir import Graph, Node, Value


class Alignment:
    """A one-to-one pairing of nodes; what is in neither direction was removed or added."""

    def __init__(self, before: Graph, after: Graph, opset_before: int, opset_after: int) -> None:
        self.before_graph, self.after_graph = before, after
        self.before = list(keys.computing_nodes(before))
        self.after = list(keys.computing_nodes(after))
        self.partner: dict[Node, Node] = {}
        self.reverse: dict[Node, Node] = {}
        self._opsets = {id(before): opset_before, id(after): opset_after}
        self._strict = self._local(self.before, opset_before, True) | self._local(self.after, opset_after, True)
        self._loose = self._local(self.before, opset_before, False) | self._local(self.after, opset_after, False)
        self._pair_by_history(before, after)
        for key in (self._strict, self._loose):
            self._spread(key, list(self.partner.items()))
            self._pair_equal_counts(key)

    @staticmethod
    def _local(nodes: Iterable[Node], opset: int, content: bool) -> dict[Node, str]:
        return {node: keys.local_key(node, opset, content) for node in nodes}

    def weights_differ(self, node: Node) -> bool:
        """Whether the pair of `node` (of the first graph) holds other weights of the same shapes."""
        return self._strict[node] != self._strict[self.partner[node]]

    def removed(self) -> list[Node]:
        return [n for n in self.before if n not in self.partner]

    def added(self) -> list[Node]:
        return [n for n in self.after if n not in self.reverse]

    def _pair(self, a: Node, b: Node) -> None:
        self.partner[a] = b
        self.reverse[b] = a

    def _pair_by_history(self, before: Graph, after: Graph) -> None:
        """Nodes whose whole computation is the same."""
        first = keys.forward_keys(before, self._opsets[id(before)])
        second = keys.forward_keys(after, self._opsets[id(after)])
        waiting: dict[str, deque[Node]] = defaultdict(deque)
        for node in self.after:
            waiting[second[id(node.outputs[0])]].append(node)
        for node in self.before:
            queue = waiting.get(first[id(node.outputs[0])])
            if queue:
                self._pair(node, queue.popleft())

    def _pair_equal_counts(self, key: dict[Node, str]) -> None:
        """Anchors: nodes that are left in equal numbers on both sides are paired in order, rarest kinds first; each
        pair then spreads to its neighbours before the next kind is looked at."""
        groups_a: dict[str, list[Node]] = defaultdict(list)
        groups_b: dict[str, list[Node]] = defaultdict(list)
        for node in self.removed():
            groups_a[key[node]].append(node)
        for node in self.added():
            groups_b[key[node]].append(node)
        for kind in sorted(groups_a, key=lambda k: (len(groups_a[k]), k)):
            mine = [n for n in groups_a[kind] if n not in self.partner]
            theirs = [n for n in groups_b.get(kind, ()) if n not in self.reverse]
            if not mine or len(mine) != len(theirs):
                continue
            fresh = list(zip(mine, theirs, strict=True))
            for a, b in fresh:
                self._pair(a, b)
            self._spread(key, fresh)

    def _spread(self, key: dict[Node, str], seeds: list[tuple[Node, Node]]) -> None:
        """Pair equal neighbours of paired nodes: producers of the same operand, readers at the same operand."""
        queue = deque(seeds)
        while queue:
            a, b = queue.popleft()
            for a_value, b_value in zip(a.inputs, b.inputs, strict=False):
                self._try(key, view.producer(a_value), view.producer(b_value), queue)
            for a_value, b_value in zip(a.outputs, b.outputs, strict=False):
                readers = _readers(b_value)
                for operand, reader in _readers(a_value):
                    for other_operand, other in readers:
                        if operand == other_operand and self._try(key, reader, other, queue):
                            break

    def _try(self, key: dict[Node, str], a: Node | None, b: Node | None, queue: deque[tuple[Node, Node]]) -> bool:
        if a is None or b is None or a in self.partner or b in self.reverse:
            return False
        if a not in key or b not in key or key[a] != key[b]:
            return False
        self._pair(a, b)
        queue.append((a, b))
        return True


def _readers(value: Value) -> list[tuple[int, Node]]:
    found = []
    for reader in view.consumers(value):
        found += [(index, reader) for index, operand in enumerate(reader.inputs) if operand is value]
    return found
