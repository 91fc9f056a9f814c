"""`onnxfuse bench`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import onnx

from onnxfuse.cli import counter, options, render, sizes
from onnxfuse.errors import EXIT_FINDINGS, EXIT_OK, ModelError, UsageError


@click.command("bench")
@click.argument("models", nargs=-1, required=True, metavar="MODEL…")
@click.option(
    "--provider", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True, help="Execution provider."
)
@click.option("--target", metavar="TARGET", help="Target to fuse for when one MODEL is given; default: the provider.")
@sizes.shapes_option
@click.option("--inputs", metavar="FILE.npz", help="Input values instead of generated ones.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of generated values.")
@options.custom_ops_option
@click.option("--cuda-graph", is_flag=True, help="Replay each form as one CUDA graph.")
@click.option("--unoptimized", is_flag=True, help="Also time the first model without ONNX Runtime's optimizations.")
@click.option(
    "--seconds", type=click.FloatRange(0.01), default=5.0, show_default=True, help="Time to measure per case."
)
@click.option("--profile", is_flag=True, help="Also show time per op, from ONNX Runtime's profiler.")
@click.option(
    "--nodes",
    type=click.IntRange(0),
    default=0,
    metavar="N",
    help="With --profile: also the N slowest nodes of each form.",
)
@click.option("--rtol", type=click.FloatRange(0), help="Allowed difference over the largest value; default by dtype.")
@options.json_option
@options.verbosity_options
def bench_command(
    models: tuple[str, ...],
    provider: str,
    target: str | None,
    shape_texts: tuple[str, ...],
    inputs: str | None,
    seed: int,
    custom_ops: tuple[str, ...],
    cuda_graph: bool,
    unoptimized: bool,
    seconds: float,
    profile: bool,
    nodes: int,
    rtol: float | None,
    as_json: bool,
    quiet: bool,
    verbose: int,
) -> int:
    """Time models against each other; correctness comes first, what is wrong is not timed.

    With one MODEL, it is fused in memory and timed against itself in ONNX Runtime with all optimizations on. With
    several, the first is the baseline (all of ONNX Runtime's optimizations on) and the others are other forms of it.
    Runs are warmed up and take turns; shown are medians, the spread (20% to 80% quantile), and the time relative to
    the baseline with its 95% interval. --shapes given several times makes several cases.

    \b
    Examples:
      onnxfuse bench model.onnx --shapes batch=1,seq=128 --shapes batch=8,seq=512
      onnxfuse bench model.onnx model.fused.onnx --provider cuda --cuda-graph
      onnxfuse bench model.onnx --profile --nodes 5

    Exit codes: 0 fine; 1 a form is wrong or does not run; 2 bad input.
    """
    from onnxfuse import bench

    if cuda_graph and provider != "cuda":
        raise UsageError("`--cuda-graph` needs `--provider cuda`")
    subjects = _subjects(models, target or provider, unoptimized, custom_ops)
    cases = _cases(subjects[0].proto, shape_texts, inputs, seed)
    results = []
    runs = 20 if profile or nodes else 0
    bar = counter.Counter("measuring", enabled=not quiet)
    with bar:
        for number, feeds in enumerate(cases):

            def progress(done: int, total: int, number: int = number) -> None:
                bar(number * total + done, len(cases) * total)

            try:
                results.append(
                    bench.run_case(
                        subjects, feeds, provider=provider, seconds=seconds, cuda_graph=cuda_graph, profile_runs=runs,
                        tolerance=rtol, progress=progress,
                    )
                )  # fmt: skip
            except ModelError as error:
                given = ", ".join(f"{name} {'x'.join(map(str, value.shape))}" for name, value in feeds.items())
                hint = error.hint or f"the model was given {given}; --shapes gives other sizes, such as seq=16"
                raise ModelError(error.message, where=error.where, hint=hint) from error
    machine = bench.describe_machine(provider)
    if as_json:
        found: dict[str, Any] = {"schema": 1, "models": list(models), "machine": machine}
        render.data_json({**found, "cases": [c.to_json() for c in results]})
    else:
        gpu = f", {machine['gpu']}" if "gpu" in machine else ""
        render.data(f"{machine['processor']}, {machine['cores']} cores{gpu}, ONNX Runtime {machine['onnxruntime']}")
        for case in results:
            _print(case, bool(runs), nodes)
    return EXIT_OK if all(c.correct for c in results) else EXIT_FINDINGS


def _subjects(models: tuple[str, ...], target: str, unoptimized: bool, custom_ops: tuple[str, ...]) -> list[Any]:
    from onnxfuse.bench import Subject
    from onnxfuse.graph import files

    first = Path(models[0])
    base = files.read_proto(first)
    subjects = [Subject("ort", base, "all", first.resolve().parent, custom_ops)]
    if unoptimized:
        subjects.append(Subject("ort-unoptimized", base, "none", first.resolve().parent, custom_ops))
    if len(models) == 1:
        from onnxfuse.optimizer import optimize

        fused = optimize(first, target=target, verify=False, custom_ops=custom_ops)
        subjects.append(Subject("onnxfuse", fused.model, "all", None, custom_ops))
    for name in models[1:]:
        path = Path(name)
        label = "onnxfuse" if len(models) == 2 else path.stem
        subjects.append(Subject(label, files.read_proto(path), "all", path.resolve().parent, custom_ops))
    return subjects


def _cases(proto: onnx.ModelProto, texts: tuple[str, ...], inputs: str | None, seed: int) -> list[dict[str, Any]]:
    from onnxfuse.inspection import bind
    from onnxfuse.runtime import archive, feeds

    specs = feeds.input_specs(proto)
    if inputs is not None:
        return archive.load_npz(inputs, specs)
    cases = []
    for text in texts or ("",):
        given = sizes.parse(text)
        bound = bind(proto, given.shapes, given.dims)
        scenario = feeds.Scenario(text, batch=1, seq=128, past=128, fixed=bound, shapes=given.shapes, seed=seed)
        cases.append(feeds.generate(specs, scenario))
    return cases


def _print(case: Any, profiled: bool, nodes: int) -> None:
    from onnxfuse.runtime.profiling import by_op

    render.data("\n" + ", ".join(f"{n} {'x'.join(map(str, s))}" for n, s in case.sizes.items()))
    rows: list[tuple[Any, ...]] = []
    for s in case.subjects:
        if s.samples is None:
            rows.append((s.name, s.status, "", "", "", s.reason[:100]))
            continue
        relative = f"{s.ratio.value:.3f} ({s.ratio.low:.3f} to {s.ratio.high:.3f})" if s.ratio else "1 (baseline)"
        spread = f"{s.samples.quantile(0.2) * 1e3:.3f} to {s.samples.quantile(0.8) * 1e3:.3f}"
        rows.append(
            (s.name, f"{s.samples.median * 1e3:.3f}", spread, len(s.samples.seconds), relative, f"{s.error:.1e}")
        )
    render.data(render.table(rows, ("form", "median ms", "20% to 80%", "runs", "time / baseline", "error")))
    for s in case.subjects:
        if profiled and s.nodes:
            render.data(f"\n{s.name}: milliseconds per op")
            render.data(
                render.table([(o.op, o.count, o.milliseconds) for o in by_op(s.nodes)[:12]], ("op", "nodes", "ms"))
            )
            if nodes:
                rows = [(n.node, n.op, n.milliseconds, n.output) for n in s.nodes[:nodes]]
                render.data(render.table(rows, ("node", "op", "ms", "output")))
