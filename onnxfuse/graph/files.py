"""ONNX files: read and check them, with external data where it is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import onnx
from google.protobuf.message import DecodeError, Message
from onnx import AttributeProto, TensorProto

from onnxfuse.errors import ExternalDataError, ModelError
from onnxfuse.graph import consts
from onnxfuse.graph.types import name_of


def read_proto(path: Path) -> onnx.ModelProto:
    """Read and check a model file; external data stays outside (and is checked to be there), at locations relative to
    the folder of the file itself, where `path` is a link."""
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
    check_content(proto, str(path))
    folder = path.resolve().parent
    for tensor in all_tensors(proto):
        if tensor.data_location == TensorProto.EXTERNAL:
            if path.is_symlink():
                _find_behind_links(tensor, path.parent, folder)
            problem = consts.check_external(tensor, folder)
            if problem:
                raise ExternalDataError(problem, where=str(path), hint="keep the data file beside the .onnx file")
    return proto


def _find_behind_links(tensor: TensorProto, link_folder: Path, folder: Path) -> None:
    """Name the data of a model that is a link as it is called in the model's own folder: download caches keep both
    under other names there, with a link to each where they are used. ONNX Runtime follows them as well."""
    location = next((entry for entry in tensor.external_data if entry.key == "location"), None)
    if location is not None:
        file = link_folder / location.value
        if file.is_symlink() and file.exists() and file.resolve().is_relative_to(folder):
            location.value = file.resolve().relative_to(folder).as_posix()


def check_content(proto: onnx.ModelProto, where: str) -> None:
    if not proto.HasField("graph") or proto.ir_version == 0:
        raise ModelError(f"`{where}` holds no ONNX graph", hint="the file may be empty or of another format")
    if not proto.opset_import:
        raise ModelError("the model imports no opset", where=where, hint="export it again with an opset_version")
    _import_runtime_domains(proto)
    try:
        onnx.checker.check_model(_checkable(proto), full_check=False)
    except onnx.checker.ValidationError as error:
        text = " ".join(str(error).split("==>")[0].split()).removesuffix(" name: OpType:")
        raise ModelError(f"not a valid ONNX model: {text}", where=where, hint="`onnx.checker` rejects it") from error
    except Exception as error:  # the checker raises plain exceptions for some malformed graphs
        raise ModelError(f"not a valid ONNX model: {error}", where=where) from error


def _import_runtime_domains(proto: onnx.ModelProto) -> None:
    """ONNX Runtime knows the versions of its own domains, and its Python tools write models that do not name them."""
    used = {node.domain for node in _all_nodes(proto.graph)} & {"com.microsoft", "com.microsoft.nchwc"}
    for domain in sorted(used - {opset.domain for opset in proto.opset_import}):
        proto.opset_import.append(onnx.helper.make_opsetid(domain, 1))


def contradiction(proto: onnx.ModelProto) -> str | None:
    """Where dtypes and shapes do not fit together, in the words of ONNX's inference; None if it finds nothing."""
    try:
        onnx.shape_inference.infer_shapes(proto, strict_mode=True, data_prop=True)
    except onnx.shape_inference.InferenceError as error:
        return " ".join(str(error).removeprefix("[ShapeInferenceError] ").split())
    except Exception:  # too big to be serialized
        return None
    return None


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
    for value in [*light.graph.input, *light.graph.output]:
        _declare_shape(value.type)
    _bring_in_order(light.graph)
    foreign = False
    for node in _all_nodes(light.graph):
        since = _CONTRIB_IN_DEFAULT_DOMAIN.get(node.op_type)
        if since is not None and node.domain in ("", "ai.onnx") and (since == 0 or opset < since):
            node.domain = "com.microsoft"
            foreign = True
    if foreign and all(o.domain != "com.microsoft" for o in light.opset_import):
        light.opset_import.append(onnx.helper.make_opsetid("com.microsoft", 1))
    return light


def _bring_in_order(graph: onnx.GraphProto) -> None:
    """ONNX wants a graph's nodes in topological order. Runtimes take any, as long as what a branch reads comes before
    it, and converters to float16 write it."""
    maker = {name: index for index, node in enumerate(graph.node) for name in node.output if name}
    needs = [{maker[name] for name in node.input if name in maker} for node in graph.node]
    if all(max(needed, default=-1) < index for index, needed in enumerate(needs)):
        return
    order: list[int] = []
    placed: set[int] = set()
    waiting = list(range(len(needs)))
    while waiting:
        before = len(order)
        for index in waiting:
            if needs[index] <= placed:
                order.append(index)
                placed.add(index)
        if len(order) == before:
            return  # a cycle: the checker says so
        waiting = [index for index in waiting if index not in placed]
    nodes = [onnx.NodeProto.FromString(graph.node[index].SerializeToString()) for index in order]
    del graph.node[:]
    graph.node.extend(nodes)


def _declare_shape(declared: onnx.TypeProto) -> None:
    """A tensor of any rank has no shape in ONNX, which `onnx.checker` rejects and every runtime accepts."""
    kind = declared.WhichOneof("value")
    if kind in ("sequence_type", "optional_type"):
        _declare_shape(getattr(declared, kind).elem_type)
    elif kind == "tensor_type":
        declared.tensor_type.shape.SetInParent()


def _without_data(proto: onnx.ModelProto) -> onnx.ModelProto:
    """A copy whose big initializers are empty, so that checking does not copy weights."""
    light = without_graph(proto)
    kept = light.graph.initializer
    for tensor in proto.graph.initializer:
        if nbytes(tensor) <= 1024 and tensor.data_location != TensorProto.EXTERNAL:
            kept.append(tensor)
        else:
            # An empty tensor of the same name and type: dims are free to the checker's structural test.
            kept.append(TensorProto(name=tensor.name, data_type=tensor.data_type, dims=[0], raw_data=b""))
    _copy_fields(proto.graph, light.graph, leave="initializer")
    return light


def nbytes(tensor: TensorProto) -> int:
    name = name_of(tensor.data_type)
    if name in (None, "string"):
        return tensor.ByteSize()
    count = int(np.prod(tensor.dims, dtype=np.int64)) if tensor.dims else 1
    bits = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize * 8
    return count * (4 if name in ("int4", "uint4") else bits) // 8


def without_graph(proto: onnx.ModelProto) -> onnx.ModelProto:
    """A copy of all that stands around the graph."""
    header = onnx.ModelProto()
    _copy_fields(proto, header, leave="graph")
    return header


def _copy_fields(source: Message, target: Message, leave: str) -> None:
    """Copy all that is set, but for one field."""
    for field, value in source.ListFields():
        if field.name == leave:
            continue
        if field.is_repeated:
            getattr(target, field.name).extend(value)
        elif field.message_type is not None:
            getattr(target, field.name).CopyFrom(value)
        else:
            setattr(target, field.name, value)


def _all_nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            if attribute.type == AttributeProto.GRAPH:
                yield from _all_nodes(attribute.g)


def all_tensors(proto: onnx.ModelProto) -> Iterator[TensorProto]:
    """Initializers and tensors in attributes, those of subgraphs too."""
    yield from proto.graph.initializer
    yield from nested_tensors(proto)


def nested_tensors(proto: onnx.ModelProto) -> Iterator[TensorProto]:
    """Tensors in attributes, and all of subgraphs."""

    def of_nodes(nodes: Iterable[onnx.NodeProto]) -> Iterator[TensorProto]:
        for node in nodes:
            for attribute in node.attribute:
                if attribute.type == AttributeProto.TENSOR:
                    yield attribute.t
                elif attribute.type == AttributeProto.GRAPH:
                    yield from attribute.g.initializer
                    yield from of_nodes(attribute.g.node)

    yield from of_nodes(proto.graph.node)
