"""What a measurement was taken on."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from typing import Any

from onnxfuse.runtime.session import ort


def describe_machine(provider: str) -> dict[str, Any]:
    """Processor, cores, ONNX Runtime's version and, for `cuda`, the GPU, its driver and its clocks."""
    found: dict[str, Any] = {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "onnxruntime": ort().__version__,
        "provider": provider,
    }
    if provider == "cuda":
        found["gpu"] = _gpu()
    return found


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _gpu() -> str:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return "unknown (no nvidia-smi)"
    query = "name,driver_version,clocks.sm,clocks.mem"
    command = [tool, f"--query-gpu={query}", "--format=csv,noheader"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    return result.stdout.strip().splitlines()[0] if result.returncode == 0 and result.stdout.strip() else "unknown"
