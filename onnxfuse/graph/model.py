"""Load and save ONNX models: external data, opset imports, node and value names, without loss.

A `Model` holds the GraphSurgeon graph together with what GraphSurgeon does not keep: node metadata, attributes of rare
types, declared types of graph inputs and outputs, overridable initializers and the model's own header.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import onnx.inliner
import onnx_graphsurgeon as gs
from onnx import TensorProto
from onnx_graphsurgeon.logger import G_LOGGER

from onnxfuse.graph import consts, edit, files, saving, view
from onnxfuse.graph.ir import RULE_KEY, Constant, Deferred, Graph, Node, Variable
from onnxfuse.graph.types import name_of, onnx_of

G_LOGGER.severity = G_LOGGER.ERROR


class Model:
    """A model being optimized.

    Attributes:
        graph: the main graph.
        functions: GraphSurgeon functions (model-local).
        opsets: version of each imported domain ("" is ONNX's own).
        names: source of unused names.
        path: the file it came from, or None.
        had_external_data: whether the file it came from kept tensors outside.
    """

    def __init__(self, proto: onnx.ModelProto, path: Path | None = None) -> None:
        self.path = path
        self.base_dir = path.parent if path is not None else Path()
        self.opsets = {("" if o.domain == "ai.onnx" else o.domain): o.version for o in proto.opset_import}
        self.header = onnx.ModelProto()
        self.header.CopyFrom(files.without_graph(proto))
        self.had_external_data = any(t.data_location == TensorProto.EXTERNAL for t in proto.graph.initializer)
        self._pending: dict[str, Constant] | None = None
        self._overridable = _split_overridable(proto)
        imported = gs.import_onnx(proto)
        self.graph: Graph = imported
        self.functions = list(imported.functions)
        self._adopt(self.graph, proto.graph)
        for function, function_proto in zip(self.functions, proto.functions, strict=True):
            self._adopt(function, function_proto)
        self.names = edit.Names(view.all_graphs(self.graph))

    def opset(self, domain: str = "") -> int:
        """The imported version of a domain; 1 if it is not imported."""
        return self.opsets.get(domain, 1)

    def graphs(self) -> Iterator[Graph]:
        """The main graph, all subgraphs, and the bodies of model-local functions with their subgraphs."""
        yield from view.all_graphs(self.graph)
        for function in self.functions:
            yield from view.all_graphs(function)

    def _adopt(self, graph: Graph, proto: onnx.GraphProto | onnx.FunctionProto) -> None:
        """Turn GraphSurgeon's objects into ours and keep what it dropped."""
        declared = {}
        if isinstance(proto, onnx.GraphProto):
            declared = {v.name: v for v in proto.value_info}
            for value, info in zip(graph.inputs, proto.input, strict=False):
                value.declared = info
            for value, info in zip(graph.outputs, proto.output, strict=True):
                value.declared = info
        for node, node_proto in zip(graph.nodes, proto.node, strict=True):
            node.__class__ = Node
            node.source = node_proto
            node.source_attrs = dict(node.attrs)
            for value in [*node.inputs, *node.outputs]:
                self._adopt_value(value, declared)
            for attr in node_proto.attribute:
                if attr.type == onnx.AttributeProto.GRAPH:
                    self._adopt(node.attrs[attr.name], attr.g)
        for value in [*graph.inputs, *graph.outputs]:
            self._adopt_value(value, declared)

    def _adopt_value(self, value: gs.Tensor, declared: dict[str, onnx.ValueInfoProto]) -> None:
        if isinstance(value, (Constant, Variable)):
            return
        if isinstance(value, gs.Constant):
            value.__class__ = Constant
            value.base_dir = self.base_dir
            return
        value.__class__ = Variable
        value.dtype = name_of(value.dtype)
        value.shape = tuple(value.shape) if value.shape is not None else None
        info = declared.get(value.name)
        if info is not None and not hasattr(value, "declared"):
            value.declared = info

    # -- writing ---------------------------------------------------------------------------------------------------

    def to_proto(self, pending: dict[str, Constant] | None = None) -> onnx.ModelProto:
        """The model as a ModelProto. Tensors of the source file are referenced, not copied, until it is saved.

        Args:
            pending: if given, large tensors that are still to be computed are left without content and put here by
                name, so that `saving.write` computes one after the other.
        """
        proto = onnx.ModelProto()
        self._pending = pending
        proto.CopyFrom(self.header)
        # Before IR 4 every initializer had to be an input too; they are not (see `_split_overridable`).
        proto.ir_version = max(proto.ir_version, 4)
        del proto.functions[:]
        self._export_graph(self.graph, proto.graph, self._homes())
        for name, (tensor, info) in self._overridable.items():
            proto.graph.initializer.append(tensor)
            if all(i.name != name for i in proto.graph.input):
                proto.graph.input.append(info)
        for function, original in zip(self.functions, self.header.functions, strict=True):
            self._export_function(function, original, proto.functions.add())
        self._set_opsets(proto)
        return proto

    def _set_opsets(self, proto: onnx.ModelProto) -> None:
        used = {view.domain(node) for graph in self.graphs() for node in graph.nodes} | {"", *self.opsets}
        del proto.opset_import[:]
        for domain in sorted(used):
            proto.opset_import.append(onnx.helper.make_opsetid(domain, self.opsets.get(domain, 1)))

    def _homes(self) -> dict[int, list[Constant]]:
        """The constants that each graph (by id) is written with: those that it alone reads, and the main graph those
        that several read (branches of one `If` do not see each other's)."""
        found: dict[Constant, Graph] = {}
        for graph in view.all_graphs(self.graph):
            for value in [*(v for node in graph.nodes for v in node.inputs), *graph.outputs]:
                if isinstance(value, Constant) and found.setdefault(value, graph) is not graph:
                    found[value] = self.graph
        homes: dict[int, list[Constant]] = {}
        for value, graph in found.items():
            homes.setdefault(id(graph), []).append(value)
        return homes

    def _export_graph(self, graph: Graph, proto: onnx.GraphProto, homes: dict[int, list[Constant]]) -> None:
        proto.name = graph.name or "graph"
        if graph.doc_string:
            proto.doc_string = graph.doc_string
        proto.input.extend(_value_info(value) for value in graph.inputs)
        proto.output.extend(_value_info(value) for value in graph.outputs)
        written = {id(v) for v in graph.inputs}
        interface = written | {id(v) for v in graph.outputs}
        for node in graph.nodes:
            proto.node.append(self._export_node(node, homes))
            for value in node.outputs:
                info = value.__dict__.get("declared")
                if info is not None and id(value) not in interface and info.name == value.name:
                    proto.value_info.append(info)
        for value in homes.get(id(graph), ()):
            if id(value) not in written:
                self._append_initializer(proto, value)

    def _append_initializer(self, proto: onnx.GraphProto, value: Constant) -> None:
        values = value._values
        if isinstance(values, gs.ir.tensor.SparseValues):
            proto.sparse_initializer.append(values.tensor)
        elif self._pending is not None and _is_large(values):
            self._pending[value.name] = value
            proto.initializer.append(
                TensorProto(name=value.name, data_type=onnx_of(str(name_of(values.dtype))), dims=values.shape)
            )
        else:
            proto.initializer.append(_tensor(value))

    def _export_node(self, node: Node, homes: dict[int, list[Constant]]) -> onnx.NodeProto:
        proto = onnx.NodeProto()
        source = node.source
        if source is not None:
            if source.HasField("doc_string"):
                proto.doc_string = source.doc_string
            proto.metadata_props.extend(source.metadata_props)
            if source.HasField("overload"):
                proto.overload = source.overload
        rule = node.origin or node.made_for
        if rule is not None and all(p.key != RULE_KEY for p in proto.metadata_props):
            proto.metadata_props.add(key=RULE_KEY, value=rule)
        proto.op_type = node.op
        if node.name:
            proto.name = node.name
        if node.domain is not None:
            proto.domain = node.domain
        proto.input.extend(v.name for v in node.inputs)
        proto.output.extend(v.name for v in node.outputs)
        originals = {a.name: a for a in source.attribute} if source is not None else {}
        parsed = node.__dict__.get("source_attrs", {})
        for name, value in node.attrs.items():
            if isinstance(value, gs.Graph):
                attribute = onnx.AttributeProto(name=name, type=onnx.AttributeProto.GRAPH)
                self._export_graph(value, attribute.g, homes)
            elif name in originals and name in parsed and (parsed[name] is value or _same(parsed[name], value)):
                attribute = originals[name]
            else:
                attribute = _attribute(name, value)
            proto.attribute.append(attribute)
        # Attribute types that GraphSurgeon does not read are written back as they were.
        for name, attribute in originals.items():
            if name not in parsed and name not in node.attrs:
                proto.attribute.append(attribute)
        return proto

    def _export_function(self, function: gs.Function, original: onnx.FunctionProto, proto: onnx.FunctionProto) -> None:
        proto.CopyFrom(original)
        del proto.node[:]
        written: set[int] = set()
        for node in (n for graph in view.all_graphs(function) for n in graph.nodes):
            for value in node.inputs:
                if isinstance(value, Constant) and id(value) not in written:
                    written.add(id(value))
                    tensor = TensorProto()
                    tensor.CopyFrom(_tensor(value))
                    proto.node.append(onnx.helper.make_node("Constant", [], [value.name], value=tensor))
        for node in function.nodes:
            proto.node.append(self._export_node(node, {}))
        imported = {("" if o.domain == "ai.onnx" else o.domain) for o in proto.opset_import}
        used = {view.domain(node) for graph in view.all_graphs(function) for node in graph.nodes}
        for domain in sorted(used - imported):
            proto.opset_import.append(onnx.helper.make_opsetid(domain, self.opsets.get(domain, 1)))

    def save(self, path: Path, external_data: bool | None = None) -> None:
        """Write the model beside `path` and rename it into place; a failure leaves an old file as it was.

        Args:
            path: the file to write. Tensors kept outside go to `<name>.data` beside it.
            external_data: whether to keep big tensors outside; by default as in the source file, or when needed.

        Raises:
            OutputError: `path` cannot be written.
        """
        pending: dict[str, Constant] = {}
        proto = self.to_proto(pending)
        size = sum(files.nbytes(t) for t in proto.graph.initializer)
        if external_data is None:
            external_data = self.had_external_data or size > saving.INLINE_LIMIT
        saving.write(proto, path, self.base_dir, external_data, pending)


#: Domains whose functions stand in for kernels that a runtime may have; all others are a way to write a graph down.
_KERNEL_DOMAINS = frozenset({"", "ai.onnx", "ai.onnx.ml", "com.microsoft", "onnxfuse", "onnxfuse.std"})


def load(source: str | os.PathLike[str] | onnx.ModelProto, *, inline: bool = False) -> Model:
    """Load a model from a file or take a ModelProto (which is copied, not changed).

    Args:
        inline: put the bodies of model-local functions where they are called. Functions of the domains of ONNX, ONNX
            Runtime and this package stay.

    Raises:
        ModelError: the file is missing, not a protobuf, or not a valid ONNX model.
        ExternalDataError: external data is missing, too short or outside of the model's folder.
    """
    if isinstance(source, onnx.ModelProto):
        proto = onnx.ModelProto()
        proto.CopyFrom(source)
        files.check_content(proto, "<model>")
        return Model(_inlined(proto) if inline else proto)
    path = Path(source)
    proto = files.read_proto(path)
    return Model(_inlined(proto) if inline else proto, path.resolve())


def _inlined(proto: onnx.ModelProto) -> onnx.ModelProto:
    kept = [(f.domain, f.name) for f in proto.functions if f.domain in _KERNEL_DOMAINS]
    if len(kept) == len(proto.functions):
        return proto
    return onnx.inliner.inline_selected_functions(proto, kept, exclude=True)


def _is_large(values: object) -> bool:
    """Whether this is still to be computed, and as large as to be worth writing straight to a file (whole bytes only:
    4-bit elements are packed by `onnx`)."""
    if not isinstance(values, Deferred) or values.nbytes < consts.KEPT_WHILE_USED:
        return False
    return "4" not in (name_of(values.dtype) or "4").removesuffix("64")


def _tensor(value: Constant) -> TensorProto:
    if consts.is_lazy(value):
        tensor = value._values.tensor
        if tensor.name != value.name:
            renamed = copy.deepcopy(tensor)
            renamed.name = value.name
            return renamed
        return tensor
    array = consts.array(value)
    return onnx.numpy_helper.from_array(np.ascontiguousarray(array).reshape(array.shape), value.name)


def _value_info(value: Variable | Constant) -> onnx.ValueInfoProto:
    info = value.__dict__.get("declared")
    if info is not None:
        if info.name != value.name:
            info = copy.deepcopy(info)
            info.name = value.name
        return info
    if isinstance(value, Constant):
        return onnx.helper.make_tensor_value_info(
            value.name, onnx_of(consts.dtype_of(value) or "float32"), list(consts.shape_of(value))
        )
    dtype = name_of(value.dtype)
    if dtype is None:
        return onnx.ValueInfoProto(name=value.name)
    shape = None if value.shape is None else [d if isinstance(d, int) else str(d) for d in value.shape]
    return onnx.helper.make_tensor_value_info(value.name, onnx_of(dtype), shape)


def _attribute(name: str, value: object) -> onnx.AttributeProto:
    if isinstance(value, gs.Node.AttributeRef):
        attribute = onnx.AttributeProto(name=name, ref_attr_name=value.name)
        attribute.type = gs.util.misc.convert_to_onnx_attr_type(value.type)
        return attribute
    if isinstance(value, gs.Tensor):
        value = _tensor(value)
    elif isinstance(value, np.ndarray):
        value = onnx.numpy_helper.from_array(value)
    elif isinstance(value, tuple):
        value = list(value)
    return onnx.helper.make_attribute(name, value)


def _same(old: object, new: object) -> bool:
    return type(old) is type(new) and not isinstance(old, gs.Tensor) and old == new


def overridable(proto: onnx.ModelProto) -> set[str]:
    """Initializers that are inputs of the graph, too: a caller may override them (from IR version 4 on)."""
    if proto.ir_version < 4:
        return set()
    return {tensor.name for tensor in proto.graph.initializer} & {value.name for value in proto.graph.input}


def _split_overridable(proto: onnx.ModelProto) -> dict[str, tuple[TensorProto, onnx.ValueInfoProto]]:
    """Take initializers that the caller may override (also graph inputs, IR ≥ 4) out of the proto, which leaves them
    as plain graph inputs: values nobody may treat as constant."""
    if proto.ir_version < 4:
        # Before IR 4 every initializer had to be listed as an input, and none could be overridden.
        names = {t.name for t in proto.graph.initializer}
        kept_inputs = [i for i in proto.graph.input if i.name not in names]
        del proto.graph.input[:]
        proto.graph.input.extend(kept_inputs)
        return {}
    inputs = {i.name: i for i in proto.graph.input}
    names = overridable(proto)
    found = {
        t.name: (copy.deepcopy(t), copy.deepcopy(inputs[t.name])) for t in proto.graph.initializer if t.name in names
    }
    if found:
        kept = [t for t in proto.graph.initializer if t.name not in found]
        del proto.graph.initializer[:]
        proto.graph.initializer.extend(kept)
    return found
