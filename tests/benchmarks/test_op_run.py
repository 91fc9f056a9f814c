"""What is measured when there is no time for everything, and what becomes of cells that fail."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import op_rows
import op_run
import pytest
from op_rows import FAILED, NOT_RUN, Row
from op_suites import Cell, cells

from onnxfuse.errors import RuntimeMissingError

COMMON = {"date": "2026-01-02", "commit": "abc", "gpu": "a GPU", "copy_tb_s": 4.0}


class Clock:
    """Moves only when a cell is measured."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class FakeMeasurer:
    """Ours takes 10 us, cuBLAS 8; a cell takes one second, with PyTorch five."""

    def __init__(self, clock: Clock, broken: Cell | None = None) -> None:
        self.clock, self.broken = clock, broken
        self.calls: list[tuple[Cell, tuple[str, ...]]] = []

    def measure(self, cell: Cell, peers: Sequence[str]) -> Mapping[str, object]:
        self.calls.append((cell, tuple(peers)))
        self.clock.now += 5.0 if peers else 1.0
        if cell == self.broken:
            raise RuntimeMissingError("the kernel `tile9`\nfailed")
        return {"us": 10.0, "cublas_us": 8.0, "cublas_layout": "TN", "ratio": 1.25, "plan": "p", "error": "2.0e-04",
                **dict.fromkeys(peers, 20.0)}  # fmt: skip


def run(todo: Sequence[Cell], seconds: float | None, peers: bool = True, broken: Cell | None = None
        ) -> tuple[list[Row], FakeMeasurer]:  # fmt: skip
    clock = Clock()
    measurer = FakeMeasurer(clock, broken)
    return op_run.run(todo, measurer, COMMON, slow_peers=peers, seconds=seconds, clock=clock), measurer


def test_peers_come_in_a_second_pass_and_replace_the_row() -> None:
    todo = [*cells(("norm-linear",), ("float16",))[:2], cells(("decode",), ("float16",))[0]]
    rows, measurer = run(todo, None)
    assert [bool(peers) for _, peers in measurer.calls] == [False] * 3 + [True] * 2
    assert [row["compile_us"] for row in rows] == ["20", "20", ""]
    assert rows[0]["eager_us"] == "20" and rows[0]["cublaslt_us"] == ""
    assert [row["suite"] for row in rows] == ["norm-linear", "norm-linear", "decode"]


def test_a_deadline_cuts_the_peers_first() -> None:
    todo = cells(("norm-linear",), ("float16",))
    rows, measurer = run(todo, seconds=26.0)  # 15 cells, then two with peers: a third would end at 30
    assert len(measurer.calls) == 17
    assert [row["compile_us"] for row in rows] == ["20"] * 2 + [NOT_RUN] * 13
    assert all(row["us"] == "10" for row in rows)


def test_a_deadline_leaves_the_last_cells() -> None:
    todo = cells(("activation",), ("float16",))[:6]
    rows, _ = run(todo, seconds=4.0)
    assert [row["us"] for row in rows] == ["10"] * 4 + [NOT_RUN] * 2
    assert rows[-1]["compile_us"] == NOT_RUN
    assert rows[-1]["eager_us"] == ""  # is not asked for of this suite


def test_a_failure_is_a_row_and_stops_nothing() -> None:
    todo = cells(("decode",), ("float16",))[:3]
    rows, _ = run(todo, None, broken=todo[1])
    assert [row["us"] for row in rows] == ["10", FAILED, "10"]
    assert rows[1]["error"] == "the kernel `tile9` failed"
    assert FAILED in op_run.line(todo[1], rows[1])


def test_computed_fields() -> None:
    cell = next(c for c in cells(("decode",), ("float16",)) if c.shape.n == c.shape.k == 4096)
    row = run([cell], None)[0][0]
    assert float(row["weight_tb_s"]) == pytest.approx(4096 * 4096 * 2 / 10e-6 / 1e12, abs=1e-3)
    assert float(row["bandwidth_share"]) == pytest.approx(4096 * 4096 * 2 / 10e-6 / 4e12, abs=1e-3)
    assert "x1.25" in op_run.line(cell, row)


def test_rows_are_there_after_every_measurement(tmp_path: Path) -> None:
    path = tmp_path / "results" / "op.csv"
    todo = cells(("swiglu",), ("float16",))
    clock, seen = Clock(), []

    def on_row(cell: Cell, row: Row, rows: list[Row]) -> None:
        op_rows.write(path, rows)
        seen.append(len(op_rows.read(path)))

    rows = op_run.run(todo, FakeMeasurer(clock), COMMON, slow_peers=True, on_row=on_row, clock=clock)
    assert seen == [1, 2, 3, 4, 5]
    assert op_rows.read(path) == rows
    assert not list(path.parent.glob("*.part"))


def test_the_last_measured_row_of_a_cell_counts() -> None:
    todo = cells(("swiglu",), ("float16",))[:2]
    first, _ = run(todo, None)
    second, _ = run(todo, seconds=1.0)  # the second cell was not run
    second[0]["us"] = "9"
    kept = op_rows.latest([*first, *second])
    assert [row["us"] for row in kept] == ["9", "10"]
