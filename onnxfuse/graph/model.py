"""Load and save ONNX models: external data, opset imports, node and value names, without loss.

A `Model` holds the GraphSurgeon graph together with what GraphSurgeon does not keep: node metadata, attributes of rare
types, declared types of graph inputs and outputs, overridable initializers and the model's own header.
"""

from __future__ import annotations

import copy
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import onnx_graphsurgeon as gs
from google.protobuf.message import DecodeError
from onnx import TensorProto
from onnx_graphsurgeon.logger import G_LOGGER

from onnxfuse.errors import ExternalDataError, ModelError, OutputError
from onnxfuse.graph import consts, edit, view
from onnxfuse.graph.ir import Constant, Deferred, Graph, Node, Variable
from onnxfuse.graph.types import name_of, onnx_of

G_LOGGER.severity = G_LOGGER.ERROR

#: Tensors of at least this many bytes go to the external data file when a model is saved with one.
EXTERNAL_THRESHOLD = 1024
#: Protobuf cannot hold more than 2 GiB; models above this are saved with external data.
INLINE_LIMIT = 1_800_000_000


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
        self.header.CopyFrom(_without_graph(proto))
        self.had_external_data = any(t.data_location == TensorProto.EXTERNAL for t in proto.graph.initializer)
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

    def to_proto(self) -> onnx.ModelProto:
        """The model as a ModelProto. Tensors of the source file are referenced, not copied, until it is saved."""
        proto = onnx.ModelProto()
        proto.CopyFrom(self.header)
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

    def _homes(self) -> dict[int, Graph]:
        """For each constant, the graph that it is written with: the outermost one that reads it."""
        homes: dict[int, Graph] = {}
        for graph in self.graphs():
            for value in [*(v for node in graph.nodes for v in node.inputs), *graph.outputs]:
                if isinstance(value, Constant):
                    homes.setdefault(id(value), graph)
        return homes

    def _export_graph(self, graph: Graph, proto: onnx.GraphProto, homes: dict[int, Graph]) -> None:
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
        for value in [*(v for node in graph.nodes for v in node.inputs), *graph.outputs]:
            if isinstance(value, Constant) and id(value) not in written and homes.get(id(value)) is graph:
                written.add(id(value))
                _append_initializer(proto, value)

    def _export_node(self, node: Node, homes: dict[int, Graph]) -> onnx.NodeProto:
        proto = onnx.NodeProto()
        source = node.source
        if source is not None:
            if source.HasField("doc_string"):
                proto.doc_string = source.doc_string
            proto.metadata_props.extend(source.metadata_props)
            if source.HasField("overload"):
                proto.overload = source.overload
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
        for node in function.nodes:
            for value in node.inputs:
                if isinstance(value, Constant) and id(value) not in written:
                    written.add(id(value))
                    tensor = TensorProto()
                    tensor.CopyFrom(_tensor(value))
                    proto.node.append(onnx.helper.make_node("Constant", [], [value.name], value=tensor))
            proto.node.append(self._export_node(node, {}))

    def save(self, path: Path, external_data: bool | None = None) -> None:
        """Write the model beside `path` and rename it into place; a failure leaves an old file as it was.

        Args:
            path: the file to write. Tensors kept outside go to `<name>.data` beside it.
            external_data: whether to keep big tensors outside; by default as in the source file, or when needed.

        Raises:
            OutputError: `path` cannot be written.
        """
        proto = self.to_proto()
        size = sum(_nbytes(t) for t in proto.graph.initializer)
        if external_data is None:
            external_data = self.had_external_data or size > INLINE_LIMIT
        write(proto, path, self.base_dir, external_data)


def load(source: str | os.PathLike | onnx.ModelProto) -> Model:
    """Load a model from a file or take a ModelProto (which is copied, not changed).

    Raises:
        ModelError: the file is missing, not a protobuf, or not a valid ONNX model.
        ExternalDataError: external data is missing, too short or outside of the model's folder.
    """
    if isinstance(source, onnx.ModelProto):
        proto = onnx.ModelProto()
        proto.CopyFrom(source)
        _check_content(proto, "<model>")
        return Model(proto)
    path = Path(source)
    proto = read_proto(path)
    return Model(proto, path.resolve())


def read_proto(path: Path) -> onnx.ModelProto:
    """Read and check a model file; external data stays outside (and is checked to be there)."""
    if not path.exists():
        raise ModelError(f"no such file: `{path}`", hint="check the path")
    if path.is_dir():
        raise ModelError(f"`{path}` is a folder", hint="name the .onnx file in it")
    try:
        proto = onnx.load(path, load_external_data=False)
    except (DecodeError, UnicodeDecodeError, ValueError, OSError) as error:
        raise ModelError(
            f"`{path}` cannot be read as an ONNX model ({type(error).__name__}: {str(error).strip() or 'bad data'})",
            hint="the file may be truncated, or not be an ONNX protobuf at all",
        ) from error
    _check_content(proto, str(path))
    for tensor in _all_tensors(proto):
        if tensor.data_location == TensorProto.EXTERNAL:
            problem = consts.check_external(tensor, path.parent)
            if problem:
                raise ExternalDataError(problem, where=str(path), hint="keep the data file beside the .onnx file")
    return proto


def _check_content(proto: onnx.ModelProto, where: str) -> None:
    if not proto.HasField("graph") or proto.ir_version == 0:
        raise ModelError(f"`{where}` holds no ONNX graph", hint="the file may be empty or of another format")
    if not proto.opset_import:
        raise ModelError("the model imports no opset", where=where, hint="export it again with an opset_version")
    try:
        onnx.checker.check_model(_checkable(proto), full_check=False)
    except onnx.checker.ValidationError as error:
        text = str(error).strip().splitlines()[0]
        raise ModelError(f"not a valid ONNX model: {text}", where=where, hint="`onnx.checker` rejects it") from error
    except Exception as error:  # the checker raises plain exceptions for some malformed graphs
        raise ModelError(f"not a valid ONNX model: {error}", where=where) from error


#: Ops that ONNX Runtime registers in ONNX's own domain, and from which opset ONNX itself has them (0: never).
_CONTRIB_IN_DEFAULT_DOMAIN = {
    "SimplifiedLayerNormalization": 0,
    "LayerNormalization": 17,
    "Affine": 0,
    "Crop": 0,
    "ImageScaler": 0,
    "ParametricSoftplus": 0,
    "ScaledTanh": 0,
    "ThresholdedRelu": 10,
    "DynamicSlice": 0,
    "GivenTensorFill": 0,
    "Scale": 0,
}


def _checkable(proto: onnx.ModelProto) -> onnx.ModelProto:
    """The model as `onnx.checker` can judge it: without tensor data, and with the ops that ONNX Runtime has in ONNX's
    domain moved to a domain that the checker does not look into."""
    opset = next((o.version for o in proto.opset_import if o.domain in ("", "ai.onnx")), 0)
    light = onnx.ModelProto()
    light.CopyFrom(_without_data(proto))
    foreign = False
    for node in _all_nodes(light.graph):
        since = _CONTRIB_IN_DEFAULT_DOMAIN.get(node.op_type)
        if since is not None and node.domain in ("", "ai.onnx") and (since == 0 or opset < since):
            node.domain = "com.microsoft"
            foreign = True
    if foreign and all(o.domain != "com.microsoft" for o in light.opset_import):
        light.opset_import.append(onnx.helper.make_opsetid("com.microsoft", 1))
    return light


def _without_data(proto: onnx.ModelProto) -> onnx.ModelProto:
    """A copy whose big initializers are one external reference each, so that checking does not copy weights."""
    light = onnx.ModelProto()
    for field, value in proto.ListFields():
        if field.name == "graph":
            continue
        if field.is_repeated:
            getattr(light, field.name).extend(value)
        elif field.message_type is not None:
            getattr(light, field.name).CopyFrom(value)
        else:
            setattr(light, field.name, value)
    graph = light.graph
    for field, value in proto.graph.ListFields():
        if field.name == "initializer":
            for tensor in value:
                if _nbytes(tensor) <= 1024 and tensor.data_location != TensorProto.EXTERNAL:
                    graph.initializer.append(tensor)
                else:
                    # An empty tensor of the same name and type: dims are free to the checker's structural test.
                    graph.initializer.append(
                        TensorProto(name=tensor.name, data_type=tensor.data_type, dims=[0], raw_data=b"")
                    )
        elif field.is_repeated:
            getattr(graph, field.name).extend(value)
        else:
            setattr(graph, field.name, value)
    return light


def write(proto: onnx.ModelProto, path: Path, base_dir: Path, external_data: bool) -> None:
    """Write a ModelProto whose tensors may refer to files in `base_dir`, beside `path`, then rename into place."""
    path = Path(path)
    folder = path.parent
    if not folder.is_dir():
        raise OutputError(f"the folder `{folder}` does not exist", hint="create it first")
    data_name = path.name + ".data"
    try:
        descriptor, temporary = tempfile.mkstemp(dir=folder, prefix=f".{path.name}.")
    except OSError as error:
        raise OutputError(f"cannot write to `{folder}`: {error.strerror}") from error
    os.close(descriptor)
    temporary_model = Path(temporary)
    temporary_data = Path(temporary + ".data")
    try:
        if external_data:
            _move_outside(proto, temporary_data, data_name, base_dir)
        else:
            _bring_inside(proto, base_dir)
        with open(temporary_model, "wb") as file:
            file.write(proto.SerializeToString())
            file.flush()
            os.fsync(file.fileno())
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(temporary_model, 0o666 & ~mask)
        if external_data:
            os.replace(temporary_data, folder / data_name)
        os.replace(temporary_model, path)
    except OSError as error:
        raise OutputError(f"cannot write `{path}`: {error.strerror or error}") from error
    finally:
        temporary_model.unlink(missing_ok=True)
        temporary_data.unlink(missing_ok=True)


def _move_outside(proto: onnx.ModelProto, data_path: Path, data_name: str, base_dir: Path) -> None:
    with open(data_path, "wb") as file:
        for tensor in proto.graph.initializer:
            if tensor.data_type == TensorProto.STRING:
                continue
            raw = _raw(tensor, base_dir)
            if len(raw) < EXTERNAL_THRESHOLD:
                if tensor.data_location == TensorProto.EXTERNAL:
                    _set_raw(tensor, raw)
                continue
            offset = -(-file.tell() // 4096) * 4096  # pages, so that the file can be mapped
            file.seek(offset)
            file.write(raw)
            for field in ("float_data", "int32_data", "int64_data", "double_data", "uint64_data"):
                tensor.ClearField(field)
            onnx.external_data_helper.set_external_data(
                _with_raw(tensor), location=data_name, offset=offset, length=len(raw)
            )
            tensor.ClearField("raw_data")
        file.flush()
        os.fsync(file.fileno())


def _with_raw(tensor: TensorProto) -> TensorProto:
    if not tensor.HasField("raw_data"):
        tensor.raw_data = b""
    return tensor


def _bring_inside(proto: onnx.ModelProto, base_dir: Path) -> None:
    for tensor in _all_tensors(proto):
        if tensor.data_location == TensorProto.EXTERNAL:
            _set_raw(tensor, _raw(tensor, base_dir))


def _set_raw(tensor: TensorProto, raw: bytes) -> None:
    tensor.raw_data = raw
    tensor.data_location = TensorProto.DEFAULT
    del tensor.external_data[:]


def _raw(tensor: TensorProto, base_dir: Path) -> bytes:
    if tensor.data_location == TensorProto.EXTERNAL:
        info = {entry.key: entry.value for entry in tensor.external_data}
        with open(base_dir / info["location"], "rb") as file:
            file.seek(int(info.get("offset", 0)))
            return file.read(int(info["length"])) if "length" in info else file.read()
    if tensor.HasField("raw_data"):
        return tensor.raw_data
    array = onnx.numpy_helper.to_array(tensor)
    return onnx.numpy_helper.from_array(array).raw_data


def _nbytes(tensor: TensorProto) -> int:
    name = name_of(tensor.data_type)
    if name in (None, "string"):
        return tensor.ByteSize()
    count = int(np.prod(tensor.dims, dtype=np.int64)) if tensor.dims else 1
    bits = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize * 8
    return count * (4 if name in ("int4", "uint4") else bits) // 8


def _tensor(value: Constant) -> TensorProto:
    if consts.is_lazy(value):
        tensor = value._values.tensor
        if tensor.name != value.name:
            renamed = copy.deepcopy(tensor)
            renamed.name = value.name
            return renamed
        return tensor
    array = consts.array(value)
    tensor = onnx.numpy_helper.from_array(np.ascontiguousarray(array).reshape(array.shape), value.name)
    return tensor


def _append_initializer(proto: onnx.GraphProto, value: Constant) -> None:
    if isinstance(value._values, gs.ir.tensor.SparseValues):
        proto.sparse_initializer.append(value._values.tensor)
        return
    proto.initializer.append(_tensor(value))
    if isinstance(value._values, Deferred):
        value.__dict__.pop("_small", None)


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
    if value.dtype is None:
        return onnx.ValueInfoProto(name=value.name)
    shape = None if value.shape is None else [d if isinstance(d, int) else str(d) for d in value.shape]
    return onnx.helper.make_tensor_value_info(value.name, onnx_of(name_of(value.dtype)), shape)


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


def _without_graph(proto: onnx.ModelProto) -> onnx.ModelProto:
    header = onnx.ModelProto()
    for field, value in proto.ListFields():
        if field.name == "graph":
            continue
        if field.is_repeated:
            getattr(header, field.name).extend(value)
        elif field.message_type is not None:
            getattr(header, field.name).CopyFrom(value)
        else:
            setattr(header, field.name, value)
    return header


def _split_overridable(proto: onnx.ModelProto) -> dict[str, tuple[TensorProto, onnx.ValueInfoProto]]:
    """Take initializers that the caller may override (also graph inputs, IR ≥ 4) out of the proto, which leaves them
    as plain graph inputs: values nobody may treat as constant."""
    inputs = {i.name: i for i in proto.graph.input}
    if proto.ir_version < 4:
        # Before IR 4 every initializer had to be listed as an input, and none could be overridden.
        names = {t.name for t in proto.graph.initializer}
        kept_inputs = [i for i in proto.graph.input if i.name not in names]
        del proto.graph.input[:]
        proto.graph.input.extend(kept_inputs)
        return {}
    found = {t.name: (copy.deepcopy(t), copy.deepcopy(inputs[t.name])) for t in proto.graph.initializer
             if t.name in inputs}
    if found:
        kept = [t for t in proto.graph.initializer if t.name not in found]
        del proto.graph.initializer[:]
        proto.graph.initializer.extend(kept)
    return found


def _all_nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                yield from _all_nodes(attribute.g)


def _all_tensors(proto: onnx.ModelProto) -> Iterator[TensorProto]:
    def of_graph(graph: onnx.GraphProto) -> Iterator[TensorProto]:
        yield from graph.initializer
        for node in graph.node:
            for attribute in node.attribute:
                if attribute.type == onnx.AttributeProto.TENSOR:
                    yield attribute.t
                elif attribute.type == onnx.AttributeProto.GRAPH:
                    yield from of_graph(attribute.g)

    yield from of_graph(proto.graph)
