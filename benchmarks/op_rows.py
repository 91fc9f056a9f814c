"""Rows of benchmarks/results/op_h200.csv: one measured cell each."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import result_rows
from op_suites import Cell
from result_rows import Row

RESULTS = Path(__file__).resolve().parent / "results" / "op_h200.csv"
NOT_RUN = "not run"  # there was no time; an empty field means that there is no such thing
FAILED = "failed"  # it gave an error, or a wrong result

SHAPE_FIELDS = ("suite", "dtype", "rows", "n", "k", "norm", "activation", "gated", "bias", "residual")
MACHINE_FIELDS = ("date", "commit", "gpu", "driver", "cuda", "cublas", "torch", "onnxruntime")
FIELDS = (
    *MACHINE_FIELDS, *SHAPE_FIELDS, "plan", "error", "us", "cublas_us", "cublas_layout", "ratio", "cublaslt_us",
    "compile_us", "eager_graph_us", "eager_us", "launched_us", "weight_tb_s", "copy_tb_s", "bandwidth_share",
)  # fmt: skip
"""Microseconds a call; `_us` by replaying a CUDA graph, but `eager_us` and `launched_us` (ours), called from Python.
`ratio` is the median over the rounds of us / cublas_us; `bandwidth_share` weight bytes per second over copy_tb_s."""

PEERS = ("cublaslt_us", "compile_us", "eager_graph_us", "eager_us")


def of_cell(cell: Cell, common: Mapping[str, object], measured: Mapping[str, object]) -> Row:
    """The row of a cell: what identifies it, the machine, and what was measured."""
    s = cell.shape
    shape = {
        "suite": cell.suite, "dtype": s.dtype, "rows": s.rows, "n": s.n, "k": s.k, "norm": s.norm,
        "activation": s.activation, "gated": int(s.gated), "bias": int(s.bias), "residual": int(s.residual),
    }  # fmt: skip
    values = {**common, **shape, **measured}
    us, copy = number(str(values.get("us", ""))), number(str(values.get("copy_tb_s", "")))
    if us is not None:
        values["weight_tb_s"] = f"{cell.weight_bytes / us / 1e6:.3f}"
        if copy:
            values["bandwidth_share"] = f"{cell.weight_bytes / us / 1e6 / copy:.3f}"
    return {name: _text(values.get(name, "")) for name in FIELDS}


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.1f}" if value >= 1000 else f"{value:.4g}"
    return str(value)


def key(row: Mapping[str, str]) -> tuple[str, ...]:
    """What two measurements of one cell have in common."""
    return tuple(row[name] for name in SHAPE_FIELDS)


def number(text: str) -> float | None:
    """A field as a number; None if it was not measured."""
    try:
        return float(text)
    except ValueError:
        return None


def read(path: Path) -> list[Row]:
    """All rows; none if there is no file."""
    return result_rows.read(path, FIELDS)


def write(path: Path, rows: Iterable[Mapping[str, str]]) -> None:
    """The whole file, beside and then renamed, so that a run that is killed leaves what it had."""
    beside = path.with_name(path.name + ".part")
    path.parent.mkdir(parents=True, exist_ok=True)
    with beside.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    os.replace(beside, path)


def latest(rows: Iterable[Row]) -> list[Row]:
    """The last row of each cell that was measured, in the order of their first ones."""
    found: dict[tuple[str, ...], Row] = {}
    for row in rows:
        if number(row["us"]) is not None or row["us"] == FAILED or key(row) not in found:
            found[key(row)] = row
    return list(found.values())
