"""Fuse the transformer blocks of ONNX models into few, fast ops, and prove that the result is right.

    import onnxfuse

    result = onnxfuse.optimize("model.onnx", "model.fused.onnx", target="cpu")
    session = onnxfuse.session("model.fused.onnx")

In a plain ONNX Runtime session a fused model needs one line more:

    options = onnxruntime.SessionOptions()
    onnxfuse.register(options)
    session = onnxruntime.InferenceSession("model.fused.onnx", options)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from onnxfuse.errors import OnnxfuseError

if TYPE_CHECKING:
    from pathlib import Path

    from onnxfuse.optimizer import Result, optimize, unfuse
    from onnxfuse.rules.loading import load as load_rules
    from onnxfuse.runtime.session import register, session

__version__ = "0.1.0"

__all__ = ["OnnxfuseError", "Result", "library_path", "load_rules", "optimize", "register", "session", "unfuse"]

_LAZY = {
    "Result": ("onnxfuse.optimizer", "Result"),
    "optimize": ("onnxfuse.optimizer", "optimize"),
    "unfuse": ("onnxfuse.optimizer", "unfuse"),
    "load_rules": ("onnxfuse.rules.loading", "load"),
    "register": ("onnxfuse.runtime.session", "register"),
    "session": ("onnxfuse.runtime.session", "session"),
}


def library_path() -> Path:
    """The custom-op library, for `SessionOptions.register_custom_ops_library` of a process without this package.

    Raises:
        RuntimeMissingError: it was not built.
    """
    from onnxfuse.runtime import library

    return library.library_path()


def __getattr__(name: str) -> Any:
    # Importing the package stays cheap: the command line's help must not load onnx.
    if name in _LAZY:
        module, attribute = _LAZY[name]
        value = getattr(importlib.import_module(module), attribute)
        globals()[name] = value
        return value
    raise AttributeError(f"module `onnxfuse` has no attribute `{name}`")
