"""Sizes are read from the graph's own inputs, not from intermediate values.

A size that an exporter reads from the middle of a layer makes that value look as if something else needed it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from onnxfuse.graph import edit, view
from onnxfuse.graph.canonicalize.scope import Scope, maker_of
from onnxfuse.graph.dims import Dim, SymInt
from onnxfuse.graph.ir import Constant, Node, Value, Variable

#: Shape arithmetic that starts from inputs' shapes and constants is left as it is.
_ARITHMETIC = (
    "Gather", "Slice", "Concat", "Unsqueeze", "Squeeze", "Reshape", "Cast", "Identity", "Add", "Sub", "Mul", "Div",
    "Min", "Max",
)  # fmt: skip


class _Roots:
    """Where each named size can be read, and the nodes that read it (made on demand)."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.places: dict[SymInt, tuple[Value, int]] = {}
        self.inputs = {id(v) for v in scope.graph.inputs}
        for value in scope.graph.inputs:
            for axis, size in enumerate(value.shape or ()):
                if isinstance(size, Dim) and size.is_symbol():
                    self.places.setdefault(size, (value, axis))
        self.made: list[Node] = []
        self._shapes: dict[int, Value] = {}
        self._sizes: dict[tuple[SymInt, bool], Value] = {}
        self._rooted: dict[Value, bool] = {}
        for node in scope.nodes("Shape", "Gather"):
            if (
                node.op == "Shape"
                and id(node.inputs[0]) in self.inputs
                and not node.attrs.get("start")
                and (node.attrs.get("end") is None)
            ):
                self._shapes.setdefault(id(node.inputs[0]), node.outputs[0])
                self._rooted[node.outputs[0]] = True

    def rooted(self, value: Value) -> bool:
        """Whether the value is computed from shapes of graph inputs and constants alone."""
        known = self._rooted.get(value)
        if known is None:
            self._rooted[value] = False
            node = view.producer(value)
            if node is None:
                known = isinstance(value, Constant) or id(value) in self.inputs
            elif node.op == "Shape":
                known = id(node.inputs[0]) in self.inputs
            else:
                known = maker_of(value, *_ARITHMETIC) is not None and all(self.rooted(v) for v in node.inputs)
            self._rooted[value] = known
        return known

    def _make(self, op: str, inputs: Sequence[Value], prefix: str, attrs: dict[str, Any] | None = None) -> Value:
        output = Variable(self.scope.names.fresh(prefix))
        node = Node(op, name=output.name, attrs=attrs or {}, inputs=list(inputs), outputs=[output])
        self.scope.engine.infer_node(node)
        self.made.append(node)
        self._rooted[output] = True
        return output

    def shape(self, value: Value) -> Value:
        found = self._shapes.get(id(value))
        if found is None:
            found = self._shapes[id(value)] = self._make("Shape", [value], f"{value.name}_sizes")
        return found

    def size(self, size: SymInt, vector: bool) -> Value | None:
        """A named size as a scalar, or as a vector of one element."""
        place = self.places.get(size)
        if place is None:
            return None
        found = self._sizes.get((size, vector))
        if found is None:
            value, axis = place
            index = self.scope.constant(f"{value.name}_axis", np.array([axis] if vector else axis, dtype=np.int64))
            found = self._make("Gather", [self.shape(value), index], f"{value.name}_size_{axis}", {"axis": 0})
            self._sizes[size, vector] = found
        return found

    def has_all(self, content: tuple[SymInt, ...]) -> bool:
        """Whether every size of a shape is a constant or can be read from an input."""
        return all(not isinstance(item, Dim) or item in self.places for item in content)

    def vector(self, content: tuple[SymInt, ...]) -> Value | None:
        """A vector of named and known sizes."""
        for value in self.scope.graph.inputs:
            if value.shape == content:
                return self.shape(value)
        parts: list[Value] = []
        for item in content:
            part = self.size(item, True) if isinstance(item, Dim) else self.scope.integers("size", [item])
            if part is None:
                return None
            parts.append(part)
        return self._make("Concat", parts, "sizes", {"axis": 0})


def root_sizes(scope: Scope) -> int:
    """Read named sizes from the shapes of graph inputs."""
    if scope.graph is not scope.engine.model.graph:
        return 0
    roots = _Roots(scope)
    count = 0
    for node in scope.nodes():
        output = node.outputs[0]
        content = output.content
        if content is None or not output.outputs or output.dtype != "int64" or roots.rooted(output):
            continue
        new: Value | None = None
        if isinstance(content, Dim):
            new = roots.size(content, False)
        elif isinstance(content, tuple) and len(content) == 1 and isinstance(content[0], Dim):
            new = roots.size(content[0], True)
        elif node.op == "Shape" and not _only_picked_from(output) and roots.has_all(content):
            new = roots.vector(content)
        if new is not None and scope.replace(output, new):
            count += 1
    if count or roots.made:
        # A shape that was read before may now be needed earlier.
        scope.graph.nodes[:0] = roots.made
        edit.sort(scope.graph)
    return count


def _only_picked_from(shape: Value) -> bool:
    """Whether all readers of a shape pick single sizes from it, which are looked at by themselves."""
    return all(reader.op in ("Gather", "Slice") and reader.outputs[0].content is not None for reader in shape.outputs)
