"""What a pass works with: one graph (main, subgraph or function body) and the tools to change it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs

from onnxfuse.graph import consts, edit, view
from onnxfuse.graph.dims import SymInt
from onnxfuse.graph.ir import Constant, Deferred, Graph, Node, Value, Variable
from onnxfuse.graph.shapes import Inference
from onnxfuse.graph.shapes import content as contents
from onnxfuse.graph.shapes.table import Shape


class Scope:
    """One graph under canonicalization.

    Attributes:
        graph: the graph.
        names: unused names for it.
        engine: shape inference, set to the graph's opsets.
    """

    def __init__(self, graph: Graph, names: edit.Names, engine: Inference, opsets: Mapping[str, int]) -> None:
        self.graph = graph
        self.names = names
        self.engine = engine
        self.opsets = opsets
        self._pending: dict[Node, list[Node]] = {}
        self._members: set[Node] = set()
        self._outputs = {id(v) for v in graph.outputs}
        self._by_op: dict[str, list[tuple[int, Node]]] = {}

    @property
    def opset(self) -> int:
        """The version of ONNX's own domain."""
        return self.opsets.get("", 1)

    def nodes(self, *ops: str) -> list[Node]:
        """The nodes of ONNX's own domain with one of these ops (all, without any), in order; safe to edit meanwhile."""
        if not self._by_op:
            for place in enumerate(self.graph.nodes):
                self._by_op.setdefault(place[1].op, []).append(place)
        found = [place for op in ops or self._by_op for place in self._by_op.get(op, ())]
        if len(ops) != 1:
            found.sort(key=itemgetter(0))
        return [node for _, node in found if node.outputs and node.domain in (None, "", "ai.onnx")]

    def changed(self) -> None:
        """The graph's nodes are others than when `nodes` looked at them."""
        self._by_op.clear()

    def is_output(self, value: Value) -> bool:
        return id(value) in self._outputs

    def replace(self, old: Value, new: Value) -> bool:
        """Make all readers of `old` read `new`; False, and nothing done, if the graph's interface forbids it.

        A graph output keeps its name, so it can only be replaced by a value that a node of this graph computes and
        that is not itself an output.
        """
        if self.is_output(old):
            self.place_insertions()
            maker = view.producer(new)
            if maker is None or isinstance(new, Constant) or self.is_output(new) or not self._is_mine(maker):
                return False
            edit.replace_uses(self.graph, old, new)
            self._outputs = {id(v) for v in self.graph.outputs}
        else:
            edit.redirect_readers(old, new)
        return True

    def _is_mine(self, node: Node) -> bool:
        if node not in self._members:
            self._members = set(self.graph.nodes)
        return node in self._members

    def read_only_here(self, value: Value) -> bool:
        """Whether exactly one node reads the value (once or more) and it is no graph output."""
        readers = value.outputs
        return bool(readers) and all(r is readers[0] for r in readers) and not self.is_output(value)

    def constant(self, prefix: str, values: np.ndarray | Deferred) -> Constant:
        return Constant(self.names.fresh(prefix), values)

    def integers(self, prefix: str, numbers: Sequence[int]) -> Constant:
        """A constant int64 vector."""
        return self.constant(prefix, np.array(numbers, dtype=np.int64))

    def insert(
        self,
        before: Node,
        op: str,
        inputs: Sequence[Value],
        attrs: Mapping[str, Any] | None = None,
        prefix: str | None = None,
    ) -> Variable:
        """A new node with one output, to be placed before another; its output, already inferred."""
        output = Variable(self.names.fresh(prefix or f"{before.outputs[0].name}_{op}"))
        node = Node(op, name=output.name, attrs=dict(attrs or {}), inputs=list(inputs), outputs=[output])
        self._pending.setdefault(before, []).append(node)
        self.engine.infer_node(node)
        return output

    def place_insertions(self) -> None:
        """Put what `insert` has made into the graph, at the cost of one pass."""
        if not self._pending:
            return
        placed: list[Node] = []
        for node in self.graph.nodes:
            placed.extend(self._pending.get(node, ()))
            placed.append(node)
        self.graph.nodes[:] = placed
        self._pending.clear()
        self.changed()


def shape_of(value: Value) -> Shape | None:
    return consts.shape_of(value) if isinstance(value, Constant) else value.shape


def dtype_of(value: Value) -> str | None:
    return consts.dtype_of(value) if isinstance(value, Constant) else value.dtype


def numbers_of(value: Value) -> list[SymInt] | None:
    """Symbolic content as a list, or None."""
    found = contents.of_value(value)
    return None if found is None else contents.flat(found)


def static_attr(node: Node, name: str, default: Any = None) -> Any:
    """An attribute; None if it refers to an attribute of the function around."""
    value = node.attrs.get(name, default)
    return None if isinstance(value, gs.Node.AttributeRef) else value


def maker_of(value: Value, *ops: str) -> Node | None:
    """The node that computes the value, if it is one of these ops of ONNX's domain."""
    node = view.producer(value)
    return node if node is not None and node.op in ops and node.domain in (None, "", "ai.onnx") else None
