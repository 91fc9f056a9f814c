"""The fused ops on a GPU, op by op, against cuBLAS, cuBLASLt, PyTorch eager and torch.compile in the same run.

    python benchmarks/bench_op.py --peers torch --deadline 240 --results benchmarks/results/op_h200.csv

Measures the cells of op_suites.py (see op_gpu.py for how, op_run.py for the order), appends their rows to the CSV file
and ends with a verdict on what is claimed of the kernels. The plans are those that the ops choose (`ONNXFUSE_TUNING`
applies); with `--scan FILE` candidates are timed first, the winners kept in FILE as `onnxfuse tune` does, and used.
`--compile-cache N` only fills Inductor's cache, in N processes, so that the peers cost a measuring run less.
Exits with 1 if a cell failed or was wrong. Needs PyTorch, but for `--list` and `--verdict`.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import op_rows
import op_run
import op_verdict
from op_suites import DTYPES, GOALS, SUITES, Cell, cells

from onnxfuse import tune


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", nargs="+", choices=SUITES, default=list(GOALS))
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--peers", choices=("none", "torch"), default="none",
                        help="torch: also eager PyTorch and torch.compile, in a second pass")
    parser.add_argument("--deadline", type=float, metavar="SECONDS",
                        help="from the start of this script; what there is no time for is marked `not run`")
    parser.add_argument("--results", type=Path, metavar="CSV", help="file to append the rows to")
    parser.add_argument("--commit", help="commit to record, where git is not at hand")
    parser.add_argument("--scan", type=Path, metavar="JSON", help="tune the cells first, and keep the plans here")
    parser.add_argument("--scan-dtype", nargs="+", choices=DTYPES, default=["float16"],
                        help="the winners serve the other dtype too")
    parser.add_argument("--scan-seconds", type=float, metavar="SECONDS", help="begin no further scan after this time")
    parser.add_argument("--scan-only", action="store_true", help="end after the scan")
    parser.add_argument("--skip", nargs="*", default=[], type=_variant, metavar="VARIANT",
                        help="not to be tried in the scan, such as tile9")
    parser.add_argument("--tuned", type=Path, metavar="JSON", help="use the plans of this file, without a scan")
    parser.add_argument("--compile-cache", type=int, metavar="N", help="only compile the peers, in N processes")
    parser.add_argument("--compile-part", help=argparse.SUPPRESS)  # I/N: what one of those processes does
    parser.add_argument("--list", action="store_true", help="print the cells and end")
    parser.add_argument("--verdict", action="store_true", help="print the verdict on the rows of --results and end")
    found = parser.parse_args(argv)
    if found.verdict and found.results is None:
        parser.error("--verdict needs --results")
    if found.scan_only and found.scan is None:
        parser.error("--scan-only needs --scan")
    if found.scan is not None and found.tuned is not None:
        parser.error("give one of --scan and --tuned")
    return found


def _variant(name: str) -> tuple[str, int]:
    found = re.fullmatch(r"([a-z]+)(\d+)", name)
    if found is None:
        raise argparse.ArgumentTypeError(f"`{name}` is not a variant")
    return found[1], int(found[2])


def main(argv: Sequence[str] | None = None) -> int:
    started = time.monotonic()
    options = arguments(argv)
    todo = cells(tuple(options.suite), tuple(options.dtype))
    if options.list:
        print("\n".join(map(str, todo)))
        return 0
    if options.verdict:
        print(op_verdict.text(op_verdict.checks(op_rows.read(options.results), _goals(options), options.dtype)))
        return 0
    if options.compile_part:
        return _compile_part([cell for cell in todo if cell.suite in op_run.SLOW_PEERS], options.compile_part)
    if options.compile_cache:
        return _compile(options, started)
    if options.scan is not None:
        _scan(options, todo)
        print(f"scanned: {time.monotonic() - started:.0f} s", flush=True)
        if options.scan_only:
            return 0
    rows = _measure(options, todo, started)
    print(op_verdict.text(op_verdict.checks(rows, _goals(options), options.dtype)))
    return 1 if any(row["us"] == op_rows.FAILED for row in rows) else 0


def _goals(options: argparse.Namespace) -> list[str]:
    return [suite for suite in options.suite if suite in GOALS]


def _scan(options: argparse.Namespace, todo: Sequence[Cell]) -> None:
    def show(tuned: tune.Tuned) -> None:
        shape = tuned.shape
        call = f"{shape.rows:5d}x{shape.k}->{shape.n}{' gated' if shape.gated else ''}"
        print(f"{call}: {tuned.default_microseconds:.2f} -> {tuned.microseconds:.2f} us  {tuned.plan}", flush=True)

    shapes = [cell.shape for cell in todo if cell.shape.dtype in options.scan_dtype]
    tune.tune_shapes(shapes, options.scan, show, options.skip, options.scan_seconds)


def _measure(options: argparse.Namespace, todo: Sequence[Cell], started: float) -> list[op_rows.Row]:
    from op_gpu import GpuMeasurer, machine

    from onnxfuse.runtime.kernels import Kernels

    kernels, common = Kernels(), machine(options.commit)
    tuned = options.scan or options.tuned
    plans = tune.stored_plans(tuned, kernels.architecture, either_dtype=True) if tuned else lambda shape: None
    earlier = op_rows.read(options.results) if options.results else []
    print(f"{common['gpu']}, driver {common['driver']}, CUDA {common['cuda']}, cuBLAS {common['cublas']}, "
          f"copy {common['copy_tb_s']:.3f} TB/s, {len(todo)} cells", flush=True)  # fmt: skip

    def on_row(cell: Cell, row: op_rows.Row, rows: list[op_rows.Row]) -> None:
        print(f"{time.monotonic() - started:5.0f}s {op_run.line(cell, row)}", flush=True)
        if options.results:
            op_rows.write(options.results, [*earlier, *rows])

    left = None if options.deadline is None else options.deadline - (time.monotonic() - started)
    rows = op_run.run(todo, GpuMeasurer(kernels, plans), common, slow_peers=options.peers == "torch", seconds=left,
                      on_row=on_row)  # fmt: skip
    if options.results:
        op_rows.write(options.results, [*earlier, *rows])
    return rows


def _compile(options: argparse.Namespace, started: float) -> int:
    """Runs this script N times, each for a part of the cells; their order is that of the measuring."""
    count = options.compile_cache
    base = [sys.executable, __file__, "--suite", *options.suite, "--dtype", *options.dtype]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    parts = [subprocess.Popen([*base, "--compile-part", f"{i}/{count}"], env=environment) for i in range(count)]
    limit = None if options.deadline is None else options.deadline - (time.monotonic() - started)
    stop = None if limit is None else time.monotonic() + limit
    failed = 0
    for part in parts:
        try:
            failed += part.wait(None if stop is None else max(stop - time.monotonic(), 0.0)) != 0
        except subprocess.TimeoutExpired:
            part.kill()
            part.wait()
    print(f"compiled: {time.monotonic() - started:.0f} s, {failed} of {count} processes failed", flush=True)
    return 1 if failed else 0


def _compile_part(todo: Sequence[Cell], part: str) -> int:
    from op_gpu import compile_all

    index, count = map(int, part.split("/"))
    compile_all(todo[index::count])
    return 0


if __name__ == "__main__":
    sys.exit(main())
