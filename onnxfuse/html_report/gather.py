"""Run what the page is about: optimize, explain, inspect, and measure if asked."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from onnxfuse import pipeline
from onnxfuse import report as reports
from onnxfuse.bench import Subject, describe_machine, run_case
from onnxfuse.explanation import explain
from onnxfuse.graph import files
from onnxfuse.html_report.layers import layers
from onnxfuse.html_report.page import Content
from onnxfuse.inspection import bind, inspect_model
from onnxfuse.inspection.sizes import infer, inlined, parse_sizes
from onnxfuse.optimizer import optimize
from onnxfuse.runtime import feeds

STEPS = ("optimize", "explain", "inspect", "measure")


def gather(
    model: str | os.PathLike[str],
    *,
    target: str = "cpu",
    rules: Sequence[str] = (),
    disable: Sequence[str] = (),
    shapes: Sequence[str] = (),
    measure: bool = True,
    seconds: float = 3.0,
    verify: bool = True,
    custom_ops: Sequence[str] = (),
    version: str = "",
    progress: Callable[[str], None] = lambda step: None,
) -> Content:
    """Everything that the page shows about one model file.

    Args:
        shapes: sizes as for `bench`; the first one also serves for cost and memory. One case is measured for each.
        measure: whether to time the model before and after.

    Raises:
        OnnxfuseError: the model cannot be read, or `shapes` do not fit it.
    """
    path = Path(model)
    proto = files.read_proto(path)
    sizes = [parse_sizes(text) for text in shapes or ("",)]
    dims, whole = sizes[0]
    bound = bind(proto, whole, dims)

    progress("optimize")
    result = optimize(
        path, target=target, rules=rules, disable=disable, verify=verify, allow_unverified=True, custom_ops=custom_ops
    )
    fused = result.model

    progress("explain")
    options = pipeline.Options(pipeline.resolve_target(target), tuple(map(str, rules)), disable=frozenset(disable))
    explanation = explain(path, options)

    progress("inspect")
    before = inspect_model(proto, str(path), dims=dims, shapes=whole).to_json()
    after = inspect_model(fused, "fused", dims=dims, shapes=whole).to_json()
    flat = inlined(fused)

    bench: dict[str, Any] | None = None
    if measure:
        progress("measure")
        bench = _measure(
            proto, fused, path.resolve().parent, options.target.provider, sizes, seconds, tuple(custom_ops)
        )
    return Content(
        optimized=result.report,
        before=before,
        after=after,
        ops_before=reports.count_ops(proto),
        layers=layers(flat, infer(flat, bound, whole)),
        misses=[m.to_json() for m in explanation.misses],
        bench=bench,
        version=version,
    )


def _measure(
    proto: Any,
    fused: Any,
    folder: Path,
    provider: str,
    sizes: Sequence[tuple[dict[str, int], dict[str, tuple[int, ...]]]],
    seconds: float,
    custom_ops: tuple[str, ...],
) -> dict[str, Any]:
    subjects = [Subject("ort", proto, "all", folder, custom_ops), Subject("onnxfuse", fused, "all", None, custom_ops)]
    specs = feeds.input_specs(proto)
    cases = []
    for dims, shapes in sizes:
        scenario = feeds.Scenario("report", batch=1, seq=128, past=128, fixed=bind(proto, shapes, dims), shapes=shapes)
        values = feeds.generate(specs, scenario)
        cases.append(run_case(subjects, values, provider=provider, seconds=seconds, profile_runs=10).to_json())
    return {"machine": describe_machine(provider), "cases": cases}
