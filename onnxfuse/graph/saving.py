"""Writing models: beside the old file, then in its place, with the data file so that no moment pairs a model with the
data of another."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from google.protobuf.message import DecodeError
from onnx import TensorProto

from onnxfuse.errors import OutputError
from onnxfuse.graph import consts, files
from onnxfuse.graph.ir import Constant
from onnxfuse.replacement import Beside, alone_in, data_of, real_path, remove_stale

#: Tensors of at least this many bytes go to the external data file when a model is saved with one.
EXTERNAL_THRESHOLD = 1024
#: Protobuf cannot hold more than 2 GiB; models above this are saved with external data.
INLINE_LIMIT = 1_800_000_000



def write(
    proto: onnx.ModelProto, path: Path, base_dir: Path, external_data: bool,
    pending: Mapping[str, Constant] | None = None,
) -> None:
    """Write a ModelProto whose tensors may refer to files in `base_dir`, beside `path`, then rename into place. Where
    `path` is a link, the file that it stands for is written, and its data file beside that.

    Args:
        pending: what initializers without content are computed from, by name (`Model.to_proto`).

    Raises:
        OutputError: it cannot be written; the old files are as they were.
    """
    target = real_path(Path(path))
    if not target.parent.is_dir():
        raise OutputError(f"the folder `{target.parent}` does not exist", hint="create it first")
    link = _data_link(Path(path), target) if external_data else None
    data = real_path(data_of(target)) if external_data else data_of(target)
    made: list[Beside] = []
    _remove_stale(target, data)
    try:
        if external_data:
            _write_pair(proto, target, data, base_dir, pending or {}, made)
        else:
            _bring_inside(proto, base_dir, pending or {})
            model = _beside(made, target)
            model.fill(proto.SerializeToString())
            os.replace(model.path, target)
        if link is not None:
            link.unlink(missing_ok=True)
            link.symlink_to(os.path.relpath(data_of(target), link.parent.resolve()))
    except OSError as error:
        raise OutputError(f"cannot write `{path}`: {error.strerror or error}") from error
    finally:
        for temporary in made:
            temporary.release()
        _remove_stale(target, data)


def _write_pair(
    proto: onnx.ModelProto, target: Path, data: Path, base_dir: Path, pending: Mapping[str, Constant],
    made: list[Beside],
) -> None:
    """Write a model and its data file.

    If there is a data file of that name, the old model may read it. Then the new model first takes the old one's place
    with its data under the temporary file's name, the data gets its lasting name besides that one, and the model is
    replaced once more by one that reads it there.
    """
    tensors = _beside(made, data, name=target.name, suffix=".data")
    _move_outside(proto, tensors.path, base_dir, pending)
    for_a_moment = proto.SerializeToString()
    for tensor in proto.graph.initializer:
        if tensor.data_location == TensorProto.EXTERNAL:
            next(entry for entry in tensor.external_data if entry.key == "location").value = data_of(target).name
    model = _beside(made, target)
    model.fill(proto.SerializeToString())
    with _uninterrupted(), alone_in(target.parent):
        if data.exists():
            passing = _beside(made, target)
            passing.fill(for_a_moment)
            if data.parent != target.parent:
                (target.parent / tensors.path.name).symlink_to(tensors.path)
            os.replace(passing.path, target)
            _name_as_well(tensors.path, data)
        else:
            os.replace(tensors.path, data)
        os.replace(model.path, target)


def _beside(made: list[Beside], target: Path, name: str | None = None, suffix: str = "") -> Beside:
    made.append(Beside(target, name, suffix))
    return made[-1]


def _remove_stale(target: Path, data: Path) -> None:
    """What writers of the model that were killed have left, but for what the model reads."""
    for file in {target.parent: target, data.parent: data}.values():
        remove_stale(file, target.name, used=lambda: _data_names(target))


def _name_as_well(file: Path, name: Path) -> None:
    """Put a file in the place of another, without taking its own name away where the file system allows it."""
    second = file.with_suffix(".second")
    try:
        os.link(file, second)
    except OSError:
        os.replace(file, name)
    else:
        os.replace(second, name)


def _data_names(model: Path) -> set[str]:
    """The names of the data files that a model on the disk reads; none if it cannot be read."""
    try:
        proto = onnx.load(model, load_external_data=False)
    except (DecodeError, ValueError, OSError):
        return set()
    return {e.value for t in files.all_tensors(proto) for e in t.external_data if e.key == "location"}


def _data_link(path: Path, target: Path) -> Path | None:
    """The link by which the data file is found beside a model that is a link into another folder; None where there is
    no need of one.

    Raises:
        OutputError: there is a file in its place.
    """
    link, data = path.with_name(data_of(target).name), data_of(target)
    if not path.is_symlink() or link.parent.resolve() == data.parent:
        return None
    if link.exists() and not link.is_symlink():
        raise OutputError(f"`{link}` is no link to the data of `{target}`", hint="remove it, or name the file itself")
    return link


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


def _move_outside(proto: onnx.ModelProto, data: Path, base_dir: Path, pending: Mapping[str, Constant]) -> None:
    """Put large tensors into a file; those of subgraphs go into the model."""
    for tensor in files.nested_tensors(proto):
        if tensor.data_location == TensorProto.EXTERNAL:
            _set_raw(tensor, _raw(tensor, base_dir))
    with open(data, "wb") as file:
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
                _with_raw(tensor), location=data.name, offset=offset, length=len(raw)
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
    for tensor in files.all_tensors(proto):
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


