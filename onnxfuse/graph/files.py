"""ONNX files: read and check them, keep external data where it is, write beside and rename."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from google.protobuf.message import DecodeError, Message
from onnx import TensorProto

from onnxfuse.errors import ExternalDataError, ModelError, OutputError
from onnxfuse.graph import consts
from onnxfuse.graph.ir import Constant
from onnxfuse.graph.types import name_of

#: Tensors of at least this many bytes go to the external data file when a model is saved with one.
EXTERNAL_THRESHOLD = 1024
#: Protobuf cannot hold more than 2 GiB; models above this are saved with external data.
INLINE_LIMIT = 1_800_000_000


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
    check_content(proto, str(path))
    for tensor in _all_tensors(proto):
        if tensor.data_location == TensorProto.EXTERNAL:
            problem = consts.check_external(tensor, path.parent)
            if problem:
                raise ExternalDataError(problem, where=str(path), hint="keep the data file beside the .onnx file")
    return proto


def check_content(proto: onnx.ModelProto, where: str) -> None:
    if not proto.HasField("graph") or proto.ir_version == 0:
        raise ModelError(f"`{where}` holds no ONNX graph", hint="the file may be empty or of another format")
    if not proto.opset_import:
        raise ModelError("the model imports no opset", where=where, hint="export it again with an opset_version")
    try:
        onnx.checker.check_model(_checkable(proto), full_check=False)
    except onnx.checker.ValidationError as error:
        text = " ".join(str(error).split("==>")[0].split()).removesuffix(" name: OpType:")
        raise ModelError(f"not a valid ONNX model: {text}", where=where, hint="`onnx.checker` rejects it") from error
    except Exception as error:  # the checker raises plain exceptions for some malformed graphs
        raise ModelError(f"not a valid ONNX model: {error}", where=where) from error


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
    foreign = False
    for node in _all_nodes(light.graph):
        since = _CONTRIB_IN_DEFAULT_DOMAIN.get(node.op_type)
        if since is not None and node.domain in ("", "ai.onnx") and (since == 0 or opset < since):
            node.domain = "com.microsoft"
            foreign = True
    if foreign and all(o.domain != "com.microsoft" for o in light.opset_import):
        light.opset_import.append(onnx.helper.make_opsetid("com.microsoft", 1))
    return light


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


def write(
    proto: onnx.ModelProto, path: Path, base_dir: Path, external_data: bool,
    pending: Mapping[str, Constant] | None = None,
) -> None:
    """Write a ModelProto whose tensors may refer to files in `base_dir`, beside `path`, then rename into place.

    Args:
        pending: what initializers without content are computed from, by name (`Model.to_proto`).
    """
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
            _move_outside(proto, temporary_data, data_name, base_dir, pending or {})
        else:
            _bring_inside(proto, base_dir, pending or {})
        with open(temporary_model, "wb") as file:
            file.write(proto.SerializeToString())
            file.flush()
            os.fsync(file.fileno())
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(temporary_model, 0o666 & ~mask)
        with _uninterrupted():
            if external_data:
                os.replace(temporary_data, folder / data_name)
            os.replace(temporary_model, path)
    except OSError as error:
        raise OutputError(f"cannot write `{path}`: {error.strerror or error}") from error
    finally:
        temporary_model.unlink(missing_ok=True)
        temporary_data.unlink(missing_ok=True)


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Signals wait, where the system can make them, so that a model and its data are renamed both or not at all."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _move_outside(
    proto: onnx.ModelProto, data_path: Path, data_name: str, base_dir: Path, pending: Mapping[str, Constant]
) -> None:
    with open(data_path, "wb") as file:
        for tensor in proto.graph.initializer:
            if tensor.data_type == TensorProto.STRING:
                continue
            raw = _bytes_of(pending[tensor.name]) if tensor.name in pending else _raw(tensor, base_dir)
            if len(raw) < EXTERNAL_THRESHOLD:
                if tensor.data_location == TensorProto.EXTERNAL:
                    _set_raw(tensor, bytes(raw))
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


def _bring_inside(proto: onnx.ModelProto, base_dir: Path, pending: Mapping[str, Constant]) -> None:
    for tensor in proto.graph.initializer:
        if tensor.name in pending:
            tensor.raw_data = bytes(_bytes_of(pending[tensor.name]))
    for tensor in _all_tensors(proto):
        if tensor.data_location == TensorProto.EXTERNAL:
            _set_raw(tensor, _raw(tensor, base_dir))


def _set_raw(tensor: TensorProto, raw: bytes) -> None:
    tensor.raw_data = raw
    tensor.data_location = TensorProto.DEFAULT
    del tensor.external_data[:]


def _bytes_of(value: Constant) -> memoryview:
    flat: Any = np.ascontiguousarray(consts.array(value)).reshape(-1).view(np.uint8)
    return memoryview(flat)


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
