"""`onnxfuse doctor`."""

from __future__ import annotations

import importlib.metadata
import platform
from typing import Any

import click

from onnxfuse.cli import options, render
from onnxfuse.errors import EXIT_FINDINGS, EXIT_OK, OnnxfuseError

_PACKAGES = ("onnxfuse", "onnx", "onnx-graphsurgeon", "onnxruntime", "onnxruntime-gpu", "numpy", "cupy-cuda13x")


@click.command("doctor")
@options.json_option
def doctor_command(as_json: bool) -> int:
    """Show what onnxfuse finds on this machine: versions, execution providers, custom-op library, GPU, rules.

    \b
    Example:
      onnxfuse doctor

    Exit codes: 0 all well; 1 something is missing (it says what).
    """
    facts, problems = collect()
    if as_json:
        render.data_json({"schema": 1, "facts": facts, "problems": problems})
    else:
        render.data(render.table([(k, v) for k, v in facts.items()], ("what", "found")))
        for line in problems:
            render.data(f"problem: {line}")
        if not problems:
            render.data("all well")
    return EXIT_FINDINGS if problems else EXIT_OK


def collect() -> tuple[dict[str, Any], list[str]]:
    """Facts by name, and what is wrong in words."""
    facts: dict[str, Any] = {"python": platform.python_version(), "system": platform.platform()}
    problems: list[str] = []
    for name in _PACKAGES:
        try:
            facts[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    _runtime(facts, problems)
    _library(facts, problems)
    _rules(facts, problems)
    return facts, problems


def _runtime(facts: dict[str, Any], problems: list[str]) -> None:
    from onnxfuse.runtime import gpu
    from onnxfuse.runtime.session import CUDA, cuda_works, ort

    try:
        runtime = ort()
    except OnnxfuseError as error:
        problems.append(error.message)
        return
    facts["providers"] = ", ".join(runtime.get_available_providers())
    found = gpu.devices()
    facts["gpu"] = "; ".join(f"{g.name} (sm{g.sm}, driver for CUDA {g.driver_cuda})" for g in found) or "none"
    facts["cuda provider works"] = "yes" if cuda_works() else "no"
    if found and CUDA not in runtime.get_available_providers():
        problems.append("there is a GPU, but this ONNX Runtime has no CUDA provider (pip install 'onnxfuse[cuda]')")
    elif found and not cuda_works():
        problems.append("there is a GPU, but ONNX Runtime's CUDA provider does not load (pip install 'onnxfuse[cuda]')")


def _library(facts: dict[str, Any], problems: list[str]) -> None:
    from onnxfuse.runtime import library
    from onnxfuse.runtime.session import make_options

    try:
        built = library.build_info()
        facts["library"] = built["path"]
        kernels: dict[str, list[str]] = {}
        for kernel in built.get("ops", ()):
            kernels.setdefault(f"{kernel['name']} on {kernel['provider']}", []).append(kernel["dtype"])
        facts["kernels"] = "; ".join(f"{name} ({', '.join(dtypes)})" for name, dtypes in kernels.items())
        make_options(quiet=True)
        facts["library loads"] = "yes"
    except OnnxfuseError as error:
        facts["library loads"] = "no"
        problems.append(f"{error.message} ({error.hint})" if error.hint else error.message)


def _rules(facts: dict[str, Any], problems: list[str]) -> None:
    from onnxfuse import rules

    try:
        found = rules.load()
    except OnnxfuseError as error:
        problems.append(str(error))
        return
    counts = {stage: len(found.stage(stage)) for stage in ("lift", "fuse", "lower")}
    facts["rules"] = ", ".join(f"{count} {stage}" for stage, count in counts.items())
