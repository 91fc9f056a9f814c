"""Skips the tests of this folder where there is no GPU, or no library with CUDA kernels."""

from __future__ import annotations

import functools
import json

import onnxruntime as ort
import pytest

from onnxfuse.errors import OnnxfuseError
from onnxfuse.runtime import library


@functools.lru_cache(maxsize=1)
def missing() -> str | None:
    """Why the tests cannot run, or None."""
    if "CUDAExecutionProvider" not in ort.get_available_providers():
        return "this ONNX Runtime has no CUDA provider"
    try:
        import ctypes

        build = ctypes.CDLL(str(library.library_path()))
    except (OnnxfuseError, OSError) as error:
        return f"no custom-op library: {error}"
    build.onnxfuse_build_info.restype = ctypes.c_char_p
    providers = {op["provider"] for op in json.loads(build.onnxfuse_build_info().decode())["ops"]}
    if "CUDAExecutionProvider" not in providers:
        return "the custom-op library was built without CUDA kernels"
    try:
        ort.OrtValue.ortvalue_from_shape_and_type([1], "float32", "cuda", 0)
    except Exception as error:  # ONNX Runtime raises its own kinds, and RuntimeError
        return f"no GPU: {str(error).splitlines()[0]}"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/cuda" not in item.path.as_posix():
            continue
        item.add_marker(pytest.mark.cuda)
        if (reason := missing()) is not None:
            item.add_marker(pytest.mark.skip(reason=reason))
