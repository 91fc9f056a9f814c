"""The walk over a model: each node in order, by the table, else by ONNX's own inference of that one node."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import onnx
import onnx_graphsurgeon as gs

from onnxfuse.errors import ModelError
from onnxfuse.graph import dims, view
from onnxfuse.graph.dims import Dim, SymInt
from onnxfuse.graph.ir import Constant, Graph, Node, Value
from onnxfuse.graph.shapes import fallback
from onnxfuse.graph.shapes.table import TABLE, Call, Unknown
from onnxfuse.graph.types import name_of

if TYPE_CHECKING:
    from onnxfuse.graph.model import Model

#: A domain whose ops have the meaning, and so the shapes, of ONNX's own ops of the same name.
_ALIASES = {"onnxfuse.std": ""}


class Inference:
    """Shape inference for one model; keep it to infer single nodes after a rewrite.

    Names of unknown sizes belong to the values they were met at, so they stay the same from run to run.
    """

    def __init__(self, model: Model) -> None:
        self.model = model
        self._opsets: Mapping[str, int] = model.opsets
        self._owners: dict[str, Value] = {}
        self._suffixes: dict[Value, str] = {}
        #: Sizes of results of the main graph, which always runs: they are not negative, whatever their formula says.
        self.met: set[Dim] = set()

    def run(self) -> None:
        """Infer everything, anew: the main graph with its subgraphs, and the bodies of model-local functions."""
        self._opsets = self.model.opsets
        self.met.clear()
        for value in self.model.graph.inputs:
            self._declare_input(value)
        for node in self.model.graph.nodes:
            self.infer_node(node)
            for output in node.outputs:
                self.met.update(d for d in output.shape or () if isinstance(d, Dim) and len(d.terms) > 1)
        for function in self.model.functions:
            with self.inside(function):
                for value in function.inputs:
                    value.dtype, value.shape, value.content = None, None, None
                self.infer_nodes(function.nodes)

    @contextmanager
    def inside(self, function: gs.Function) -> Iterator[Mapping[str, int]]:
        """Infer with the opsets of a model-local function, which may differ from the model's."""
        opsets = self._function_opsets(function)
        self._opsets = opsets
        try:
            yield opsets
        finally:
            self._opsets = self.model.opsets

    def infer_nodes(self, nodes: Iterable[Node]) -> None:
        """Infer the outputs of nodes that are given in topological order."""
        for node in nodes:
            self.infer_node(node)

    def infer_node(self, node: Node) -> None:
        """Infer a node's outputs from what is known of its inputs (and the insides of its subgraphs)."""
        for output in node.outputs:
            known = output.__dict__  # GraphSurgeon looks at every assignment to an attribute, which takes longer
            known["dtype"] = known["shape"] = known["content"] = None
        domain = view.domain(node)
        function = TABLE.get((domain, node.op))
        if function is None and domain in _ALIASES:
            function = TABLE.get((_ALIASES[domain], node.op))
        if function is not None:
            with suppress(Unknown):
                function(Call(node, self))
        else:
            fallback.infer(Call(node, self))
            for inner in view.subgraphs(node):
                self.infer_subgraph(inner)
        for output in node.outputs:
            if output.dtype is None or output.shape is None:
                fallback.use_declared(output, self)

    def infer_subgraph(self, graph: Graph) -> None:
        """Infer a body whose inputs have been given their types."""
        self.infer_nodes(graph.nodes)

    def opset(self, domain: str) -> int:
        """The version of a domain where inference is at present (functions have their own)."""
        return self._opsets.get(domain, 1)

    def fresh(self, value: Value, axis: int | str) -> Dim:
        """An unknown size ≥ 0, the same for the same value and axis."""
        return dims.symbol(f"{self._unique(value)}:{axis}")

    def fresh_integer(self, value: Value, index: int) -> Dim:
        """An unknown integer of any sign: element `index` of a value."""
        return dims.unknown_integer(f"{self._unique(value)}[{index}]")

    def _unique(self, value: Value) -> str:
        owner = self._owners.setdefault(value.name, value)
        if owner is value:
            return value.name
        # Sibling subgraphs and functions may use a name twice.
        return self._suffixes.setdefault(value, f"{value.name}#{len(self._suffixes) + 1}")

    def _declare_input(self, value: Value) -> None:
        """Give a graph input its declared type: names of dimensions are kept, nameless ones become unknown sizes."""
        if isinstance(value, Constant):
            return
        info = value.__dict__.get("declared")
        if info is None or not info.type.HasField("tensor_type"):
            value.shape = (
                None
                if value.shape is None
                else tuple(
                    dims.parse(d)
                    if isinstance(d, str) and d
                    else d
                    if isinstance(d, (int, Dim))
                    else self.fresh(value, axis)
                    for axis, d in enumerate(value.shape)
                )
            )
        else:
            value.dtype = name_of(info.type.tensor_type.elem_type)
            value.shape = self.declared_shape(value, info)
        value.content = self._opaque_content(value)

    def declared_shape(self, value: Value, info: onnx.ValueInfoProto) -> tuple[SymInt, ...] | None:
        if not info.type.tensor_type.HasField("shape"):
            return None
        return tuple(self._declared_dims(value, info))

    def _declared_dims(self, value: Value, info: onnx.ValueInfoProto) -> Iterator[SymInt]:
        for axis, dim in enumerate(info.type.tensor_type.shape.dim):
            if dim.HasField("dim_value") and dim.dim_value >= 0:
                yield dim.dim_value
            elif dim.dim_param.strip(" ?"):
                yield dims.parse(dim.dim_param)
            else:
                yield self.fresh(value, axis)

    def _opaque_content(self, value: Value) -> object:
        """A scalar or one-element integer input may be a length: its element gets a name."""
        if value.dtype in ("int64", "int32") and value.shape is not None:
            if value.shape == ():
                return self.fresh_integer(value, 0)
            if value.shape == (1,):
                return (self.fresh_integer(value, 0),)
        return None

    @staticmethod
    def _function_opsets(function: gs.Function) -> dict[str, int]:
        found = {("" if o.domain == "ai.onnx" else o.domain): o.version for o in function.import_domains or []}
        found.setdefault("", function.opset)
        return found


def infer(model: Model) -> Inference:
    """Infer all dtypes, shapes and contents of a model; returns the engine for later single nodes."""
    engine = Inference(model)
    engine.run()
    return engine


def check_outputs(model: Model, where: str) -> None:
    """Whether the model's outputs have the dtypes that it declares, after `infer`.

    Raises:
        ModelError: one has not: no runtime loads such a model.
    """
    for value in model.graph.outputs:
        info = value.__dict__.get("declared")
        declared = name_of(info.type.tensor_type.elem_type) if info is not None else None
        if declared is not None and value.dtype is not None and declared != value.dtype:
            raise ModelError(
                f"not a valid ONNX model: output `{value.name}` is declared {declared} and computed in {value.dtype}",
                where=where, hint=f"declare it {value.dtype}, or export the model again",
            )
