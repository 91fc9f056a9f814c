"""Makes the nodes that take the place of one, in order, with their types."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

from onnxfuse.graph import consts, view
from onnxfuse.graph.ir import Constant, Deferred, Graph, Node, Value, Variable
from onnxfuse.graph.model import Model
from onnxfuse.graph.types import name_of, numpy_of
from onnxfuse.ops import functions, registry
from onnxfuse.ops.opdef import TensorType

Shape = tuple[Any, ...] | None


def dtype_of(value: Value) -> str | None:
    """The dtype's name, of a constant or of a computed value."""
    return consts.dtype_of(value) if isinstance(value, Constant) else name_of(value.dtype)


def shape_of(value: Value) -> Shape:
    """The shape (sizes and symbolic dims), or None if the rank is unknown."""
    if isinstance(value, Constant):
        return consts.shape_of(value)
    return None if value.shape is None else tuple(value.shape)


def rank_of(value: Value) -> int | None:
    shape = shape_of(value)
    return None if shape is None else len(shape)


def operand(node: Node, index: int) -> Value | None:
    """The node's input at `index`, or None if it is omitted."""
    if index >= len(node.inputs) or node.inputs[index].name == "":
        return None
    return node.inputs[index]


class Emitter:
    """Collects the new node list of one graph.

    Nodes are added in order; `replace` disconnects the node that they stand for and hands over its inputs and outputs.
    """

    def __init__(self, model: Model, graph: Graph) -> None:
        self.model = model
        self.graph = graph
        self.opset = model.opset()
        self.nodes: list[Node] = []
        self._ones: dict[tuple[int, str], Constant] = {}
        self._prefix = "lowered"
        self._made_for: str | None = None

    def keep(self, node: Node) -> None:
        self.nodes.append(node)

    def replace(self, node: Node) -> tuple[list[Value | None], list[Value]]:
        """Take `node` out: its inputs (None for omitted ones) and its outputs, which new nodes must make."""
        inputs = [operand(node, i) for i in range(len(node.inputs))]
        outputs = list(node.outputs)
        self._prefix = outputs[0].name
        self._made_for = node.origin or node.made_for
        node.inputs.clear()
        node.outputs.clear()
        return inputs, outputs

    def op(
        self, op: str, inputs: Sequence[Value | None], *, domain: str = "", attrs: dict[str, Any] | None = None,
        out: Value | None = None, dtype: str | None = None, shape: Shape = None,
    ) -> Value:
        """Add a node with one output: `out`, or a new value like the first input unless `dtype` or `shape` say else."""
        if out is None:
            first = inputs[0]
            assert first is not None
            out = Variable(
                self.model.names.fresh(f"{self._prefix}_{op}"),
                dtype=dtype or dtype_of(first),
                shape=shape if shape is not None else shape_of(first),
            )
        self.add(op, inputs, [out], domain=domain, attrs=attrs)
        return out

    def add(
        self, op: str, inputs: Sequence[Value | None], outputs: Sequence[Value | None], *, domain: str = "",
        attrs: dict[str, Any] | None = None,
    ) -> Node:
        """Add a node with given outputs (None: omitted)."""
        given = [Variable("") if v is None else v for v in _trimmed(inputs)]
        made = [Variable("") if v is None else v for v in _trimmed(outputs)]
        name = self.model.names.fresh(made[0].name or f"{self._prefix}_{op}")
        node = Node(op, name=name, attrs=dict(attrs or {}), inputs=given, outputs=made, domain=domain or None)
        node.made_for = self._made_for
        self.nodes.append(node)
        return node

    def constant(self, prefix: str, array: np.ndarray | Deferred) -> Constant:
        return Constant(self.model.names.fresh(prefix), array)

    def ones(self, size: int, dtype: str) -> Constant:
        """A vector of ones; one constant per size and dtype."""
        key = (size, dtype)
        if key not in self._ones:
            self._ones[key] = self.constant(f"ones_{size}_{dtype}", np.ones(size, numpy_of(dtype)))
        return self._ones[key]

    def expand(self, node: Node) -> None:
        """Replace a node of our domains by its function body in standard ops.

        Raises:
            OpError: the opset is too old for the body, or the dtype is not known.
        """
        definition = registry.get(view.domain(node), node.op)
        types = [None if v is None else tensor_type(v) for v in (operand(node, i) for i in range(len(node.inputs)))]
        attrs = dict(node.attrs)
        names = {v.name: v for v in [*node.inputs, *node.outputs] if v.name}
        prefix = self.model.names.fresh(f"{node.outputs[0].name}_x") + "_"
        bodies = functions.expand(
            definition, [v.name for v in node.inputs], [v.name for v in node.outputs], attrs, types, self.opset, prefix
        )
        self.replace(node)
        for body in bodies:
            self._add_proto(body, names)

    def _add_proto(self, proto: onnx.NodeProto, names: dict[str, Value]) -> None:
        attrs = {a.name: onnx.helper.get_attribute_value(a) for a in proto.attribute}
        if proto.op_type == "Constant":
            names[proto.output[0]] = self.constant(proto.output[0], numpy_helper.to_array(attrs["value"]))
            return
        attrs = {k: v.decode() if isinstance(v, bytes) else v for k, v in attrs.items()}
        for name in proto.output:
            if name and name not in names:
                names[name] = Variable(self.model.names.fresh(name))
        inputs = [names[n] if n else None for n in proto.input]
        self.add(proto.op_type, inputs, [names[n] if n else None for n in proto.output], attrs=attrs)


def _trimmed(values: Sequence[Value | None]) -> list[Value | None]:
    trimmed = list(values)
    while trimmed and trimmed[-1] is None:
        trimmed.pop()
    return trimmed


def tensor_type(value: Value) -> TensorType:
    """Dtype and shape, for the op registry."""
    shape = shape_of(value)
    known = None if shape is None else tuple(d if isinstance(d, int) or d is None else str(d) for d in shape)
    return TensorType(dtype_of(value), known)
