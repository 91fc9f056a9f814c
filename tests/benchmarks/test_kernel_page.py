"""The measured part of the page about the kernels is made from the committed rows."""

from __future__ import annotations

import kernel_page
import llama_rows
import op_rows
import pytest
from op_suites import GOALS, Cell, cells


def row(cell: Cell, **changes: object) -> op_rows.Row:
    common = {"date": "2026-01-02", "gpu": "NVIDIA H200", "cuda": "13.0", "cublas": "13.1.0", "copy_tb_s": 4.2}
    measured = {"us": 10.0, "cublas_us": 8.0, "cublas_layout": "NN", "ratio": 1.25, "compile_us": 12.5,
                "eager_graph_us": 30.0, "eager_us": 150.0, "launched_us": 12.0}  # fmt: skip
    return op_rows.of_cell(cell, common, {**measured, **changes})


def llama_row(variant: str, ms: float, tokens: int = 16, nodes: str = "") -> llama_rows.Row:
    return {**dict.fromkeys(llama_rows.FIELDS, ""), "date": "d", "commit": "c", "torch": "2.11.0+cu130", "nodes": nodes,
            "tokens": str(tokens), "variant": variant, "median_ms": str(ms), "floor_ms": "0.5", "max_error": "0.001"}


def test_the_page_is_current() -> None:
    text = kernel_page.PAGE.read_text(encoding="utf-8")
    assert kernel_page.page(text) == text, "run python benchmarks/kernel_page.py"


def test_a_page_without_marks_is_refused() -> None:
    with pytest.raises(ValueError, match="0 marked parts"):
        kernel_page.page("# The CUDA kernels\n")


def test_cells_of_one_weight_are_one_line() -> None:
    todo = cells(("norm-linear",), ("bfloat16",))
    rows = [row(cell, us=100.4 if cell.shape.rows == 1024 else 10.04) for cell in todo]
    lines = kernel_page.op_table("norm-linear", rows)
    head = "| K → N | dtype | rows | fused | bare | ratio | torch.compile | eager | eager, launched | "
    assert lines[2] == head + "gain, both launched (LLMBoost's) |"
    assert [part.strip() for part in lines[4].strip("|").split("|")] == [
        "1024 → 1024", "bfloat16", "1 / 32 / 128 / 512 / 1024", "10.0 / 10.0 / 10.0 / 10.0 / 100",
        *(" / ".join([value] * 5) for value in ("8.00", "1.25", "12.5", "30.0", "150")),
        "12.5 (6.31) / 12.5 (5.68) / 12.5 (4.95) / 12.5 (2.64) / 12.5 (2.73)",
    ]  # fmt: skip
    assert len(lines) == 4 + 3 + 1


def test_what_was_not_measured_is_not_shown() -> None:
    done, not_run = cells(("swiglu",), ("float16",))[:2]
    rows = [row(done), op_rows.of_cell(not_run, {}, {"us": op_rows.NOT_RUN})]
    text = kernel_page.measured(rows, [], [])
    assert "| 4096 → 14336 | float16 | 1 | 10.0 | 8.00 | 1.25 |" in text
    assert "Tuning" not in text and "whole model" not in text and "BERT" not in text
    assert "| swiglu | float16 | at most 1.06 x cuBLAS' bare product | missed |" in text
    assert kernel_page.measured([], [], []) == ""


def test_a_failed_cell_says_so() -> None:
    cell = cells(("swiglu",), ("float16",))[0]
    text = kernel_page.measured([op_rows.of_cell(cell, {"copy_tb_s": 4.2}, {"us": op_rows.FAILED})], [], [])
    assert "| 4096 → 14336 | float16 | 1 | failed |" in text


def test_every_claimed_suite_has_a_table() -> None:
    assert set(kernel_page.TITLES) == set(kernel_page.COLUMNS) == set(GOALS)


def test_the_whole_model_and_what_each_fusion_brings() -> None:
    rows = [llama_row("ort", 1.0, nodes="373"), llama_row("onnxfuse", 0.6, nodes="48"), llama_row("torch-eager", 0.9),
            llama_row("onnxfuse without norm", 0.75)]  # fmt: skip
    text = "\n".join(kernel_page.llama(rows))
    assert "| 16 | 1.000 | 0.900 | 0.600 | 1.67 | 0.500 | 1.0e-03 | 1.0e-03 |" in text
    assert "373 nodes became 48." in text
    assert "| without | 16 |\n|---|---|\n| norm | +0.150 |" in text


def test_the_last_tuning_is_summed_up() -> None:
    def tuned(commit: str, ratio: float) -> dict[str, str]:
        return {"date": "d", "commit": commit, "ratio": str(ratio), "tune_seconds": "61.4"}

    text = "\n".join(kernel_page.tuning([tuned("a", 1.5), tuned("b", 0.8), tuned("b", 1.0)]))
    assert "measured 2 shapes in 61 s" in text
    assert "1 became faster" in text and "0 slower; the best take 0.80 and the worst 1.00" in text
