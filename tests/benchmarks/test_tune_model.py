"""Whether a tuning file made a shape slower, told from measurements that wander."""

from __future__ import annotations

import csv
import json
import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import tune_model

from onnxfuse import tune
from onnxfuse.runtime.kernels import Plan, Shape

DEFAULT, TUNED = Plan(), Plan("stream", 1)
SHAPES = [Shape(rows, 64, 64) for rows in (128, 16, 1)]


class FakeKernels:
    """The tuned plan takes `factor` of the time of the default, all of it under a clock that drifts by 10 %."""

    architecture = 90

    def __init__(self, factor: float = 0.9, wrong: bool = False) -> None:
        self.factor, self.wrong, self.measured = factor, wrong, 0

    def modelled(self, shape: Shape, plan: Plan) -> float | None:
        return None

    def chosen(self, shape: Shape) -> Plan:
        return DEFAULT

    @contextmanager
    def bench(self, shape: Shape) -> Iterator[FakeKernels]:
        yield self

    def measure(self, plan: Plan, seconds: float) -> tuple[float, float]:
        drift = 1 + 0.1 * (self.measured // 2 % 5) / 5  # the two of a round see the same clock
        self.measured += 1
        if plan == TUNED:
            return 10 * self.factor * drift, 1.0 if self.wrong else 1e-4
        return 10 * drift, 1e-4


def test_a_faster_plan_is_no_slower_shape() -> None:
    found = tune_model.compare(FakeKernels(), SHAPES, lambda shape: TUNED if shape.rows > 1 else None)
    assert [c.ratio for c in found] == pytest.approx([0.9, 0.9, 1.0])
    text, good = tune_model.summary(found, 100.0, 240.0)
    assert good
    assert "met     tuning took 100 s" in text
    assert "of 3 shapes 2 are faster, 0 slower; worst 1.000" in text


@pytest.mark.parametrize("kernels", (FakeKernels(factor=1.05), FakeKernels(wrong=True)), ids=("slow", "wrong"))
def test_a_slower_or_wrong_plan_is_told(kernels: FakeKernels) -> None:
    found = tune_model.compare(kernels, SHAPES[:1], lambda shape: TUNED)
    assert kernels.measured == 2 * (tune_model.ROUNDS + tune_model.MORE_ROUNDS)  # a second look before it is said
    text, good = tune_model.summary(found, None, 240.0)
    assert not good
    assert text.startswith("slower: Shape(rows=128,")


def test_too_long_is_told() -> None:
    text, good = tune_model.summary([], 241.0, 240.0)
    assert not good
    assert "missed  tuning took 241 s" in text


def test_the_script_tunes_compares_and_keeps_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a stand-in for the interpreter, which gets the command that a user would give."""
    output, results = tmp_path / "tuning.json", tmp_path / "tune.csv"
    monkeypatch.setattr(tune, "Kernels", FakeKernels)
    monkeypatch.setattr(tune, "candidates", lambda shape, variants: [TUNED])
    monkeypatch.setattr(FakeKernels, "variants", lambda self: [], raising=False)
    tune.tune_shapes(SHAPES, tmp_path / "made.json")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nif [ "$ONNXFUSE_TUNING" ]; then exit 9; fi\necho "$@" > {tmp_path}/arguments\n'
                      f"cp {tmp_path}/made.json {output}\n")  # fmt: skip
    os.chmod(python, python.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setattr(tune_model, "Kernels", FakeKernels)
    monkeypatch.setattr(tune, "shapes_of", lambda model, rows: [Shape(r, 64, 64) for r in rows])
    monkeypatch.setenv("ONNXFUSE_TUNING", "another.json")
    argv = ["m.onnx", "-o", str(output), "--rows", "1,16", "--results", str(results), "--commit", "abc"]
    assert tune_model.main(argv) == 0
    assert (tmp_path / "arguments").read_text().split() == [
        "-m", "onnxfuse", "tune", "m.onnx", "-o", str(output), "--rows", "1,16",
    ]  # fmt: skip
    with results.open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["rows"], row["ratio"]) for row in rows] == [("1", "0.900"), ("16", "0.900")]
    assert {row["commit"] for row in rows} == {"abc"}
    assert float(rows[0]["tune_seconds"]) < 60
    assert "met     of 2 shapes 2 are faster" in capsys.readouterr().out
    assert len(json.loads(output.read_text())["entries"]) == 3
