"""Where results are written: checked before the work, so that nothing is computed in vain, and nothing is overwritten
that the result is made from."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import onnx

from onnxfuse.errors import OutputError
from onnxfuse.replacement import data_of, real_path


def check_writable(out: Path) -> None:
    """Whether a file could be written there.

    Raises:
        OutputError: it could not.
    """
    if out.is_dir():
        raise OutputError(f"`{out}` is a folder", hint="name the file to write")
    if out.exists() and not out.is_file():
        # Renaming over it would take the device itself away.
        raise OutputError(f"`{out}` is no regular file", hint="name the file to write")
    folder = real_path(out).parent
    if not folder.is_dir():
        raise OutputError(f"the folder `{folder}` does not exist", hint="create it first")
    if not os.access(folder, os.W_OK) or (out.exists() and not os.access(out, os.W_OK)):
        raise OutputError(f"`{out}` cannot be written", hint=f"check the permissions of the folder `{folder}`")


def check_apart(out: Path, source: Path | None, proto: onnx.ModelProto) -> None:
    """Whether writing `out` (and its data file) leaves the source and its data files as they are.

    Raises:
        OutputError: it would not.
    """
    if source is None:
        return
    if out.exists() and out.samefile(source):
        raise OutputError(f"output and input are the same file: `{out}`", hint="choose another -o")
    for mine in (out, data_of(out)):
        if mine.exists() and any(mine.samefile(file) for file in _data_files(source, proto)):
            raise OutputError(f"`{mine}` holds the input's tensors", hint="choose another -o")


PathText = str | os.PathLike[str]


def check_files(written: Mapping[str, PathText | None], read: Mapping[str, PathText | None]) -> None:
    """Whether all files of a command can be written, each is another one, and none is among those that it reads.

    Args:
        written: files to write, by the option that names them; None where it is not given.
        read: files to read, likewise; models stand for their data file too.

    Raises:
        OutputError: one cannot be written, or would take the place of another.
    """
    taken = {name: Path(file) for name, file in read.items() if file is not None}
    for name, file in written.items():
        if file is None:
            continue
        path = Path(file)
        check_writable(path)
        for other, used in taken.items():
            if _same(path, used) or (other in read and _same(path, data_of(used))):
                raise OutputError(f"{name} and {other} are the same file: `{path}`", hint="choose another name")
        taken[name] = path


def _same(one: Path, other: Path) -> bool:
    if one.exists() and other.exists():
        return one.samefile(other)
    return one.resolve() == other.resolve()


def has_external_data(proto: onnx.ModelProto) -> bool:
    """Whether a tensor is kept outside of the model."""
    return any(t.data_location == onnx.TensorProto.EXTERNAL for t in proto.graph.initializer)


def file_bytes(path: Path, proto: onnx.ModelProto | None = None) -> int:
    """Bytes of a model file and of its data files: those that `proto` names, else the one beside it."""
    files = _data_files(path, proto) if proto is not None else {data_of(path)}
    return path.stat().st_size + sum(file.stat().st_size for file in files if file.is_file())


def _data_files(source: Path, proto: onnx.ModelProto) -> set[Path]:
    found = {
        source.resolve().parent / entry.value
        for tensor in proto.graph.initializer for entry in tensor.external_data if entry.key == "location"
    }
    return {file for file in found if file.exists()}
