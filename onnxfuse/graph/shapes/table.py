"""The table of inference functions, and what such a function sees of its node."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import onnx_graphsurgeon as gs

from onnxfuse.graph import consts, dims, view
from onnxfuse.graph.dims import Dim, SymInt
from onnxfuse.graph.ir import Constant, Node, Value
from onnxfuse.graph.shapes import content as contents
from onnxfuse.graph.shapes.content import Content

if TYPE_CHECKING:
    from onnxfuse.graph.shapes.engine import Inference

Shape = tuple[SymInt, ...]


class Unknown(Exception):
    """Something that an inference function needs is not known; what it has set already stays."""


class Call:
    """A node under inference: reads what is known of its inputs, sets what follows for its outputs."""

    __slots__ = ("engine", "inputs", "node", "outputs")

    def __init__(self, node: Node, engine: Inference) -> None:
        self.node = node
        self.engine = engine
        self.inputs: list[Value] = node.inputs
        self.outputs: list[Value] = node.outputs

    @property
    def opset(self) -> int:
        """The version of the node's own domain."""
        return self.engine.opset(view.domain(self.node))

    def has(self, index: int) -> bool:
        return index < len(self.inputs) and self.inputs[index].name != ""

    def dtype(self, index: int) -> str | None:
        """The input's dtype name; None if unknown or omitted."""
        if index >= len(self.inputs):
            return None
        value = self.inputs[index]
        return consts.dtype_of(value) if isinstance(value, Constant) else value.dtype

    def shape(self, index: int) -> Shape:
        """The input's shape. Raises Unknown if it is omitted or its rank is not known."""
        shape = self.shape_or_none(index)
        if shape is None:
            raise Unknown
        return shape

    def shape_or_none(self, index: int) -> Shape | None:
        if index >= len(self.inputs):
            return None
        value = self.inputs[index]
        if isinstance(value, Constant):
            return tuple(value._values.shape)
        return value.shape if value.name else None

    def rank(self, index: int) -> int:
        return len(self.shape(index))

    def content(self, index: int) -> Content | None:
        return contents.of_value(self.inputs[index]) if index < len(self.inputs) else None

    def numbers(self, index: int) -> list[SymInt]:
        """The content of a vector or scalar input as a list. Raises Unknown if there is none."""
        found = self.content(index)
        if found is None:
            raise Unknown
        return contents.flat(found)

    def constant_numbers(self, index: int) -> list[int]:
        """As `numbers`, but all of them plain integers."""
        found = self.numbers(index)
        if any(isinstance(n, Dim) for n in found):
            raise Unknown
        return found  # type: ignore[return-value]

    def attr(self, name: str, default: Any = None) -> Any:
        """An attribute's value. Raises Unknown for a reference to a function's attribute."""
        value = self.node.attrs.get(name, default)
        if isinstance(value, gs.Node.AttributeRef):
            raise Unknown
        return value

    def axis(self, value: int, rank: int) -> int:
        """A possibly negative axis as an index. Raises Unknown if it is out of range."""
        if not -rank <= value < rank:
            raise Unknown
        return value % rank if rank else 0

    def axes(self, index: int, rank: int) -> list[int] | None:
        """The ``axes`` of a node, from its attribute or from input `index`; None if there are none."""
        axes = self.attr("axes")
        if axes is None and self.has(index):
            axes = self.constant_numbers(index)
        return None if axes is None else [self.axis(int(a), rank) for a in axes]

    def set(
        self,
        index: int,
        dtype: str | None = None,
        shape: Sequence[SymInt] | None = None,
        content: Content | None = None,
    ) -> None:
        """What is known of an output; repeated calls add to it."""
        if index >= len(self.outputs):
            return
        known = self.outputs[index].__dict__
        if dtype is not None:
            known["dtype"] = dtype
        if shape is not None:
            known["shape"] = tuple(shape)
        if content is not None and contents.fits(content, known["dtype"]):
            known["content"] = content

    def fresh(self, index: int, axis: int | str) -> Dim:
        """An unknown size, named after an output and one of its axes: the same each time it is asked for."""
        return self.engine.fresh(self.outputs[index], axis)


InferFn = Callable[[Call], None]
TABLE: dict[tuple[str, str], InferFn] = {}


def register(op: str, function: InferFn, domain: str = "") -> None:
    """Make `function` the shape inference of an op. It may raise Unknown at any point."""
    TABLE[domain, op] = function


def of_ops(*ops: str, domain: str = "") -> Callable[[InferFn], InferFn]:
    """Decorator: `register` for several ops."""

    def add(function: InferFn) -> InferFn:
        for op in ops:
            register(op, function if domain == "" else _tolerant(function), domain)
        return function

    return add


def _tolerant(function: InferFn) -> InferFn:
    """`onnx.checker` looks at ONNX's own ops only: nodes of other domains may lack attributes or have any ranks."""

    @functools.wraps(function)
    def infer(call: Call) -> None:
        try:
            function(call)
        except (TypeError, ValueError, IndexError, ZeroDivisionError) as error:
            raise Unknown from error

    return infer


Types = tuple[str | None, tuple[Any, ...] | None]
TypesFn = Callable[[Sequence[Types | None], Mapping[str, Any]], Sequence[Types]]


def register_types(op: str, domain: str, function: TypesFn) -> None:
    """Make a plain function the shape inference of an op, for packages that know nothing of graphs.

    Args:
        function: takes (dtype, shape) of each input (None for an omitted one) and the attributes; returns (dtype,
            shape) of each output. Dimensions are passed through as objects that can only be compared and hashed; a
            None among the returned ones is an unknown size. Any exception means that nothing is known.
    """

    def adapter(call: Call) -> None:
        inputs = [(call.dtype(i), call.shape_or_none(i)) if call.has(i) else None for i in range(len(call.inputs))]
        try:
            found = function(inputs, {name: call.attr(name) for name in call.node.attrs})
        except Unknown:
            raise
        except Exception as error:
            raise Unknown from error
        for index, (dtype, shape) in enumerate(found):
            if index >= len(call.outputs):
                break
            if shape is not None:
                shape = tuple(_size(call, index, axis, size) for axis, size in enumerate(shape))
            call.set(index, dtype, shape)

    register(op, adapter, domain)


def _size(call: Call, index: int, axis: int, size: Any) -> SymInt:
    if size is None:
        return call.fresh(index, axis)
    return dims.parse(size) if isinstance(size, str) else size
