"""Finds the custom-op library, checks that it fits this package, and registers it with ONNX Runtime."""

from __future__ import annotations

import ctypes
import json
import os
import sys
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onnxfuse.errors import RuntimeMissingError

if TYPE_CHECKING:
    import onnxruntime

ABI_VERSION = 1
"""The contract between package and library; also in ``custom_ops/CMakeLists.txt``."""

ENVIRONMENT_VARIABLE = "ONNXFUSE_LIBRARY"

_PACKAGE = Path(__file__).resolve().parent.parent
_FILE_NAME = {"win32": "onnxfuse_ops.dll", "darwin": "libonnxfuse_ops.so"}.get(sys.platform, "libonnxfuse_ops.so")


def _candidates() -> Iterator[Path]:
    """Where the library may be, best first: the environment, the installed package, a source checkout's build."""
    override = os.environ.get(ENVIRONMENT_VARIABLE)
    if override:
        yield Path(override)
        return
    # With an editable install the package lies in two places; `onnxfuse.__path__` names both.
    import onnxfuse

    for root in dict.fromkeys([_PACKAGE, *map(Path, getattr(onnxfuse, "__path__", []))]):
        yield root / "lib" / _FILE_NAME
    for root in (Path(p) / "onnxfuse" for p in sys.path if p.endswith("site-packages")):
        yield root / "lib" / _FILE_NAME
    checkout = _PACKAGE.parent
    if (checkout / "custom_ops").is_dir():
        yield checkout / "build" / _FILE_NAME


def library_path() -> Path:
    """The path of the custom-op library that `register` uses.

    Raises:
        RuntimeMissingError: it is nowhere, or it was built for another version of this package.
    """
    tried: list[str] = []
    for path in _candidates():
        if path.is_file():
            _check_abi(path.resolve(), path.stat().st_mtime_ns)
            return path.resolve()
        tried.append(f"`{path}`")
    if os.environ.get(ENVIRONMENT_VARIABLE):
        hint = f"correct or unset {ENVIRONMENT_VARIABLE}"
    else:
        hint = f"reinstall onnxfuse so that it is built, or name a built library in {ENVIRONMENT_VARIABLE}"
    raise RuntimeMissingError(f"the custom-op library was not found (tried {', '.join(tried)})", hint=hint)


def build_info() -> dict[str, Any]:
    """What the library can do: `path`, `abi`, `version`, `isa`, `ort_api`, and `ops`.

    `ops` lists the kernels, each with `name`, `provider` and `dtype`.

    Raises:
        RuntimeMissingError: as `library_path`.
    """
    path = library_path()
    return {"path": str(path), "abi": ABI_VERSION, **_check_abi(path, path.stat().st_mtime_ns)}


def register(session_options: onnxruntime.SessionOptions) -> onnxruntime.SessionOptions:
    """Makes the fused ops known to sessions created with these options; returns the options.

    Raises:
        RuntimeMissingError: the library is missing, or this ONNX Runtime cannot load it.
    """
    path = library_path()
    try:
        session_options.register_custom_ops_library(str(path))
    except Exception as error:  # ONNX Runtime raises its own classes, one per status code
        raise RuntimeMissingError(
            f"ONNX Runtime cannot load the custom-op library `{path}`: {error}",
            hint="run `onnxfuse doctor`; an ONNX Runtime older than the library's API version must be updated",
        ) from error
    return session_options


@lru_cache(maxsize=8)
def _check_abi(path: Path, _modified_ns: int) -> dict[str, Any]:
    try:
        library = ctypes.CDLL(str(path))
        version = library.onnxfuse_abi_version
        info = library.onnxfuse_build_info
    except (OSError, AttributeError) as error:
        raise RuntimeMissingError(
            f"`{path}` is not a usable custom-op library of onnxfuse: {error}",
            hint="reinstall onnxfuse, or build the library again",
        ) from error
    version.restype = ctypes.c_int
    found = version()
    if found != ABI_VERSION:
        raise RuntimeMissingError(
            f"the custom-op library `{path}` has ABI version `{found}`, this onnxfuse needs `{ABI_VERSION}`",
            hint="reinstall onnxfuse, or build the library again",
        )
    info.restype = ctypes.c_char_p
    result: dict[str, Any] = json.loads(info().decode())
    return result
