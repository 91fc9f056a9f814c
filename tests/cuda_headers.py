"""Where the CUDA toolkit's headers are, for tests that compile host code with them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def cuda_headers() -> Path | None:
    """The include folder of `CUDA_HOME`, of the nvcc in use, or of the usual place; None if none has the headers."""
    nvcc = shutil.which("nvcc")
    roots = [os.environ.get("CUDA_HOME"), nvcc and Path(nvcc).resolve().parents[1], "/usr/local/cuda"]
    found = (Path(root) / "include" for root in roots if root)
    needed = ("cuda.h", "cuda_fp16.h", "cuda_runtime_api.h")
    return next((path for path in found if all((path / name).exists() for name in needed)), None)
