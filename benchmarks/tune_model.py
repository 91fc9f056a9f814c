"""Tunes a fused model on this GPU as a user does, says how long it took, and whether a shape became slower by it.

    python benchmarks/tune_model.py model.fused.onnx -o tuning.json --results benchmarks/results/tune_h200.csv

Runs `onnxfuse tune`, then times each product of the model with the plan of the new file and with the plan used without
it, in turns. Exits with 1 if tuning took longer than --limit or a shape became slower.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import result_rows

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from onnxfuse import tune
from onnxfuse.runtime import gpu
from onnxfuse.runtime.kernels import Kernels, Plan, Shape

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "tune_h200.csv"
FIELDS = (
    "date", "commit", "gpu", "driver", "tune_seconds", "dtype", "rows", "n", "k", "norm", "activation", "gated",
    "bias", "residual", "plan", "us", "default_plan", "default_us", "ratio",
)  # fmt: skip
SLOWER = 1.02  # of the time without the file: more than two measurements of one kernel differ
ROUNDS, MORE_ROUNDS = 5, 15
ROUND_SECONDS = 0.01


@dataclass(frozen=True)
class Compared:
    """One shape with and without a tuning file; `ratio` is the median over the rounds of us / default_us."""

    shape: Shape
    plan: Plan
    default: Plan
    us: float
    default_us: float
    ratio: float

    @property
    def slower(self) -> bool:
        return self.ratio > SLOWER


def compare(kernels: Kernels, shapes: Iterable[Shape], find: Callable[[Shape], Plan | None],
            report: Callable[[Compared], None] = lambda compared: None) -> list[Compared]:  # fmt: skip
    """Every shape with the plan that `find` gives and with that used without; one that seems slower is timed longer."""
    found = []
    for shape in shapes:
        default = kernels.chosen(shape)
        plan = find(shape) or default
        with kernels.bench(shape) as bench:
            compared = _compare(bench, shape, plan, default, 1 if plan == default else ROUNDS)
            if compared.slower:
                compared = _compare(bench, shape, plan, default, MORE_ROUNDS)
        found.append(compared)
        report(compared)
    return found


def _compare(bench: object, shape: Shape, plan: Plan, default: Plan, rounds: int) -> Compared:
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds):
        for kept, tried in zip(times, (plan, default), strict=True):
            if kept is times[1] and plan == default:
                kept.append(times[0][-1])
                continue
            measured = bench.measure(tried, ROUND_SECONDS)  # type: ignore[attr-defined]
            if measured is None or not measured[1] <= tune.DIFFERENCE_LIMIT[shape.dtype]:
                kept.append(float("inf"))  # the library passes over a plan that it refuses, but tuning must not keep it
            else:
                kept.append(measured[0])
    ratio = statistics.median(a / b if b < float("inf") else 0.0 for a, b in zip(*times, strict=True))
    return Compared(shape, plan, default, statistics.median(times[0]), statistics.median(times[1]), ratio)


def summary(found: Sequence[Compared], seconds: float | None, limit: float) -> tuple[str, bool]:
    """What came of it, and whether it is as it should be."""
    lines = [f"slower: {c.shape} {c.default_us:.2f} -> {c.us:.2f} us with {c.plan}" for c in found if c.slower]
    slower, faster = len(lines), sum(c.ratio < 1 / SLOWER for c in found)
    good = slower == 0
    if seconds is not None:
        good = good and seconds < limit
        lines.append(f"{'met' if seconds < limit else 'missed':7s} tuning took {seconds:.0f} s (limit {limit:.0f} s)")
    worst = max((c.ratio for c in found), default=1.0)
    word = "met" if slower == 0 else "missed"
    lines.append(
        f"{word:7s} of {len(found)} shapes {faster} are faster, {slower} slower; worst {worst:.3f} of the time without"
    )
    return "\n".join(lines), good


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("-o", "--output", type=Path, required=True, help="tuning file to write, or to continue")
    parser.add_argument("--rows", default="1,16,128,512,2048")
    parser.add_argument("--limit", type=float, default=240.0, metavar="SECONDS", help="that tuning may take")
    parser.add_argument("--results", type=Path, metavar="CSV", help="file to append the rows to")
    parser.add_argument("--commit", help="commit to record, where git is not at hand")
    parser.add_argument("--compare-only", action="store_true", help="the file is there: do not tune")
    options = parser.parse_args(argv)
    os.environ.pop(tune.ENVIRONMENT_VARIABLE, None)  # what is compared with is the library as it is shipped
    seconds = None
    if not options.compare_only:
        command = [sys.executable, "-m", "onnxfuse", "tune", options.model, "-o", str(options.output)]
        command += ["--rows", options.rows]
        started = time.monotonic()
        subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": _path()})
        seconds = time.monotonic() - started
        print(f"onnxfuse tune: {seconds:.1f} s", flush=True)
    kernels = Kernels()
    find = tune.stored_plans(options.output, kernels.architecture)
    shapes = tune.shapes_of(options.model, [int(part) for part in options.rows.split(",")])

    def show(c: Compared) -> None:
        call = f"{c.shape.rows:5d}x{c.shape.k}->{c.shape.n}"
        print(f"{call}: {c.default_us:.2f} -> {c.us:.2f} us, x{c.ratio:.3f}  {c.plan}", flush=True)

    found = compare(kernels, shapes, find, show)
    if options.results:
        append(options.results, found, seconds, options.commit)
    text, good = summary(found, seconds, options.limit)
    print(text)
    return 0 if good else 1


def _path() -> str:
    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))


def append(path: Path, found: Sequence[Compared], seconds: float | None, commit: str | None) -> None:
    """Adds a row for each shape."""
    devices = gpu.devices()
    head = {
        **result_rows.provenance(commit, devices[0].name if devices else "unknown"),
        "tune_seconds": "" if seconds is None else f"{seconds:.1f}",
    }
    rows = [{
        **head, "dtype": c.shape.dtype, "rows": str(c.shape.rows), "n": str(c.shape.n), "k": str(c.shape.k),
        "norm": c.shape.norm, "activation": c.shape.activation, "gated": str(int(c.shape.gated)),
        "bias": str(int(c.shape.bias)), "residual": str(int(c.shape.residual)), "plan": str(c.plan),
        "us": f"{c.us:.3f}", "default_plan": str(c.default), "default_us": f"{c.default_us:.3f}",
        "ratio": f"{c.ratio:.3f}",
    } for c in found]  # fmt: skip
    result_rows.append(path, FIELDS, rows)


if __name__ == "__main__":
    sys.exit(main())
