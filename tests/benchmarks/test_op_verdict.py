"""The verdict on rows: what is met, missed, or open."""

from __future__ import annotations

from collections.abc import Callable

import op_rows
import op_verdict
import pytest
from op_rows import FAILED, Row
from op_suites import Cell, cells

GOOD = {"us": 10.0, "cublas_us": 10.0, "ratio": 1.0, "cublaslt_us": 10.5, "compile_us": 12.0, "eager_graph_us": 30.0,
        "launched_us": 12.0, "eager_us": 120.0, "copy_tb_s": 4.0}  # fmt: skip


def rows_of(suite: str, change: Callable[[Cell], dict[str, object]] = lambda cell: {}) -> list[Row]:
    rows = []
    for cell in cells((suite,), ("float16",)):
        us = cell.weight_bytes / 3.8e6 if suite == "decode" else GOOD["us"]  # 3.8 TB/s of 4
        rows.append(op_rows.of_cell(cell, {}, {**GOOD, "us": us, **change(cell)}))
    return rows


def by_claim(suite: str, rows: list[Row]) -> dict[str, op_verdict.Check]:
    return {check.claim: check for check in op_verdict.checks(rows, (suite,), ("float16",))}


@pytest.mark.parametrize("suite", op_verdict.GOALS)
def test_good_rows_meet_everything(suite: str) -> None:
    found = op_verdict.checks(rows_of(suite), (suite,), ("float16",))
    assert found
    assert [check.word for check in found] == ["met"] * len(found), op_verdict.text(found)


@pytest.mark.parametrize("suite", op_verdict.GOALS)
def test_nothing_is_met_without_rows(suite: str) -> None:
    assert {check.word for check in op_verdict.checks([], (suite,))} == {"open"}


def test_one_missing_cell_leaves_a_claim_open() -> None:
    found = by_claim("swiglu", rows_of("swiglu")[:-1])
    (check,) = found.values()
    assert check.word == "open"
    assert "1 not measured" in check.figure


def test_one_failed_cell_misses_a_claim() -> None:
    rows = rows_of("swiglu")
    rows[2] |= {"us": FAILED, "ratio": ""}
    (check,) = by_claim("swiglu", rows).values()
    assert check.word == "missed"
    assert "1 failed" in check.figure


def test_the_worst_cell_is_named() -> None:
    def change(cell: Cell) -> dict[str, object]:
        return {"ratio": 1.13 if (cell.shape.rows, cell.shape.k) == (128, 2048) else 1.0}

    found = by_claim("norm-linear", rows_of("norm-linear", change))
    assert found["no cell over 1.12 x cuBLAS"].word == "missed"
    assert "worst 1.13 at 128 x 2048 -> 2048; 1 of 15" in found["no cell over 1.12 x cuBLAS"].figure
    mean = found["geometric mean at most 1.02 x cuBLAS"]
    assert (mean.word, mean.figure) == ("met", "1.008")


def test_published_gains_are_per_cell() -> None:
    def change(cell: Cell) -> dict[str, object]:
        return {"eager_us": 12.0 * 6.0}  # six times as fast: less than the 6.31 of one row and 1024 columns alone

    check = by_claim("norm-linear", rows_of("norm-linear", change))[
        "gain over launched eager PyTorch over that which LLMBoost published"
    ]
    assert check.word == "missed"
    assert "worst 0.951 at 1 x 1024" in check.figure and "1 of 15" in check.figure


def test_cublaslt_is_compared_where_it_has_the_epilogue() -> None:
    def change(cell: Cell) -> dict[str, object]:
        return {"cublaslt_us": 9.0 if cell.shape.activation == "gelu_tanh" else ""}

    found = by_claim("activation", rows_of("activation", change))
    check = found["not slower than cuBLASLt's epilogue"]
    assert check.word == "missed"
    assert "32 of 32 cells" in check.figure
    assert found["not slower than torch.compile"].word == "met"


def test_bandwidth_is_that_of_the_run() -> None:
    rows = rows_of("decode")
    for row in rows[:1]:
        row["bandwidth_share"] = "0.9"
    (check,) = by_claim("decode", rows).values()
    assert check.word == "missed"
    assert "1 of 20" in check.figure
    assert "0 met, 1 missed, 0 open" in op_verdict.text([check])
