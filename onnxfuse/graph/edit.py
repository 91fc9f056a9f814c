"""The only module that changes a graph: names, insertion, replacement, removal, order."""

from __future__ import annotations

from collections.abc import Iterable

from onnxfuse.errors import RewriteError
from onnxfuse.graph import view
from onnxfuse.graph.ir import Graph, Node, Value, Variable

#: Names that ONNX Runtime's optimizers give to new initializers without looking whether they are free.
_TAKEN_BY_ONNX_RUNTIME = frozenset({"squeeze_axes", "splits", "axes", "split_output"})


class Names:
    """Names that are unique over nodes and values of a model, in all of its graphs.

    One name space for both keeps clear of readers that confuse them.
    """

    def __init__(self, graphs: Iterable[Graph]) -> None:
        self._used: set[str] = {"", *_TAKEN_BY_ONNX_RUNTIME}
        self._next: dict[str, int] = {}
        for graph in graphs:
            for value in graph.inputs + graph.outputs:
                self._used.add(value.name)
            for node in graph.nodes:
                self._used.add(node.name)
                self._used.update(v.name for v in node.inputs)
                self._used.update(v.name for v in node.outputs)

    def fresh(self, prefix: str) -> str:
        """`prefix` itself if it is free, else `prefix_1`, `prefix_2`, …"""
        name = prefix
        while name in self._used:
            self._next[prefix] = number = self._next.get(prefix, 0) + 1
            name = f"{prefix}_{number}"
        self._used.add(name)
        return name


def index_of(graph: Graph, node: Node) -> int:
    for index, candidate in enumerate(graph.nodes):
        if candidate is node:
            return index
    raise RewriteError(f"{view.describe(node)} is not in the graph")


def replace_uses(graph: Graph, old: Value, new: Value) -> None:
    """Make every reader of `old` (in subgraphs too) read `new`.

    `old` may be an output of `graph`: the output keeps its name, so `new` takes the name over when it is computed by a
    node of this graph and is not itself an output; otherwise an Identity bridges the two.
    """
    if old is new:
        return
    redirect_readers(old, new)
    for index, output in enumerate(graph.outputs):
        if output is not old:
            continue
        made_here = isinstance(new, Variable) and new.inputs and not any(new is o for o in graph.outputs)
        if made_here and any(new.inputs[0] is node for node in graph.nodes):
            _take_name(old, new)
            graph.outputs[index] = new
        else:
            if old.inputs:
                old.inputs.clear()
            bridge = Node("Identity", name=old.name, inputs=[new], outputs=[old])
            graph.nodes.append(bridge)


def redirect_readers(old: Value, new: Value) -> None:
    """Make every node that reads `old` read `new`, whatever the graph outputs are."""
    for node in view.consumers(old):
        for index, value in enumerate(node.inputs):
            if value is old:
                node.inputs[index] = new


def _take_name(old: Value, new: Value) -> None:
    old.name, new.name = new.name, old.name
    new.dtype = old.dtype if new.dtype is None else new.dtype
    # The declared interface of the graph stays as it was.
    declared = getattr(old, "declared", None)
    if declared is not None:
        new.declared = declared


def remove_dead(graph: Graph) -> int:
    """Remove nodes that no output of the graph depends on; return how many.

    A value that a subgraph captures is read by the subgraph's nodes, so it lives as long as they do.
    """
    removed_inside = 0
    for node in graph.nodes:
        for attr in node.attrs.values():
            if isinstance(attr, Graph):
                removed_inside += remove_dead(attr)
    outputs = {id(v) for v in graph.outputs}
    gone: set[Node] = set()
    members: set[Node] = set()
    for last in reversed(graph.nodes):
        stack = [last]
        while stack:
            node = stack.pop()
            for value in node.outputs:
                if value.outputs or id(value) in outputs:
                    break
            else:
                if node in gone:
                    continue
                members = members or set(graph.nodes)
                makers = [value.inputs[0] for value in _reads(node) if value.inputs]
                disconnect(node)
                gone.add(node)
                stack += [maker for maker in makers if maker in members]
    if gone:
        graph.nodes[:] = [node for node in graph.nodes if node not in gone]
    return removed_inside + len(gone)


def disconnect(node: Node) -> None:
    """Clear what a node reads and makes, and what the nodes of its subgraphs do."""
    for inner in view.subgraphs(node):
        for inner_node in inner.nodes:
            disconnect(inner_node)
    node.inputs.clear()
    node.outputs.clear()


def _reads(node: Node) -> Iterable[Value]:
    """What a node needs: its inputs and what its subgraphs capture (their own values have producers elsewhere)."""
    yield from node.inputs
    for inner in view.subgraphs(node):
        yield from inner.outputs
        for inner_node in inner.nodes:
            yield from _reads(inner_node)


def sort(graph: Graph) -> None:
    """Order the nodes so that producers come first, keeping the present order where it already holds."""
    for node in graph.nodes:
        for inner in view.subgraphs(node):
            sort(inner)
    members = set(graph.nodes)
    state: dict[Node, int] = {}
    ordered: list[Node] = []
    for root in graph.nodes:
        if root in state:
            continue
        stack = [(root, iter([v.inputs[0] for v in _reads(root) if v.inputs]))]
        state[root] = 1
        while stack:
            node, needs = stack[-1]
            for need in needs:
                if need not in members:
                    continue
                if need not in state:
                    state[need] = 1
                    stack.append((need, iter([v.inputs[0] for v in _reads(need) if v.inputs])))
                    break
                if state[need] == 1 and need is not node:
                    raise RewriteError(f"the graph has a cycle through {view.describe(need)}")
            else:
                stack.pop()
                state[node] = 2
                ordered.append(node)
    graph.nodes[:] = ordered
