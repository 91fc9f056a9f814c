"""The whole-model benchmark without a GPU: which models it makes, what it keeps and says."""

from __future__ import annotations

import json
import os
import stat
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import bench_llama
import llama_rows
import numpy as np
import pytest

import onnxfuse

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", list(llama_rows.ABLATIONS))
def test_an_ablation_switches_rules_off_that_exist(name: str) -> None:
    rules = llama_rows.rules_of(name, ROOT / "rules")
    assert rules

    def nodes(disable: list[str]) -> int:
        model = ROOT / "models" / "llama-ts17-f16-eager.onnx"
        done = onnxfuse.optimize(model, target="cuda:sm90", disable=disable, verify=False, dry_run=True)
        return int(done.report["nodes"]["after"])

    assert nodes(rules) > nodes([]), "it brings nothing to a Llama"


def test_what_no_rule_makes_is_no_ablation(tmp_path: Path) -> None:
    with pytest.raises(KeyError):
        llama_rows.rules_of("norm", tmp_path)


def test_options() -> None:
    assert bench_llama.arguments([]).ablate is None
    assert bench_llama.arguments(["--ablate"]).ablate == list(llama_rows.ABLATIONS)
    assert bench_llama.arguments(["--ablate", "norm", "gate"]).ablate == ["norm", "gate"]
    wanted = bench_llama.models(Path("/w"), ["packing"])
    assert wanted == {"onnxfuse": (Path("/w/onnxfuse.onnx"), []),
                      "onnxfuse without packing": (Path("/w/without-packing.onnx"), ["linear-pack"])}  # fmt: skip


TIMES = {"ort": 2.0, "onnxfuse": 1.0, "onnxfuse tuned": 0.9, "onnxfuse without norm": 1.2, "torch-eager": 1.5,
         "torch-compile": 1.1}  # fmt: skip


class Variant:
    def __init__(self, error: float = 0.001) -> None:
        self.error = error

    def result(self) -> np.ndarray:
        return np.ones((1, 2, 4), np.float32) + self.error


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """The GPU side as far as the script sees it; an interpreter that writes a report instead of optimizing."""
    module: Any = ModuleType("llama_gpu")
    module.build_model = lambda layers, vocab: "model"
    module.export = lambda model, path, opset: path.write_text("exported")
    module.open_session = lambda path, library, vocab: (path.stem, True)
    module.ceilings = lambda: (4e12, 7e14)
    module.versions = lambda: ["a GPU", "13.0", "2.11", "1.31.1"]
    module.results_of = lambda model, ids: (np.ones((1, 2, 4)) * 1.002, np.ones((1, 2, 4)))
    module.Bound = lambda owner, ids, vocab, graph_id: Variant(0.5 if owner == "wrong" else 0.001)
    module.eager = module.compiled = lambda model, ids: Variant()
    module.time_interleaved = lambda variants, seconds: {n: np.array([0.99, 1, 1.01]) * TIMES[n] for n in variants}
    module.floor_ms = lambda model, tokens, bandwidth, rate: 0.5
    monkeypatch.setitem(sys.modules, "llama_gpu", module)
    python = tmp_path / "python"
    python.write_text(
        "#!/bin/sh\nwhile [ $# -gt 0 ]; do\n"
        'case "$1" in --report) r=$2;; -o) o=$2;; --disable) d="$d $2";; esac; shift; done\n'
        'echo "$d" > "$o"\necho \'{"nodes": {"before": 373, "after": 48}}\' > "$r"\n'
    )
    os.chmod(python, python.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setattr(onnxfuse, "library_path", lambda: Path("/lib.so"))
    monkeypatch.delenv("ONNXFUSE_TUNING", raising=False)
    return module


def test_rows_and_verdict(gpu: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = tmp_path / "llama.csv"
    argv = ["--work", str(tmp_path / "w"), "--tokens", "1", "512", "--ablate", "norm", "--peers", "torch",
            "--results", str(results), "--commit", "abc"]  # fmt: skip
    assert bench_llama.main(argv) == 0
    assert "norm-linear-rms" in (tmp_path / "w" / "without-norm.onnx").read_text()
    assert (tmp_path / "w" / "onnxfuse.onnx").read_text() == "\n"
    rows = llama_rows.read(results)
    names = ["ort", "onnxfuse", "onnxfuse without norm", "torch-eager", "torch-compile"]
    assert [row["variant"] for row in rows] == names * 2
    assert [row["nodes"] for row in rows[:5]] == ["373", "48", "48", "", ""]
    assert rows[1]["median_ms"] == "1.0000" and rows[1]["commit"] == "abc"
    assert ("met     1 tokens: 1.000 ms, ONNX Runtime 2.000 (x2.00), floor 0.500 (+100 %); ms more without: norm +0.200"
            in capsys.readouterr().out)  # fmt: skip


def test_no_compilation_begins_that_would_end_late(gpu: ModuleType, tmp_path: Path) -> None:
    results = tmp_path / "llama.csv"
    argv = ["--work", str(tmp_path / "w"), "--tokens", "1", "--peers", "torch", "--results", str(results)]
    assert bench_llama.main([*argv, "--deadline", "10"]) == 0
    assert [row["variant"] for row in llama_rows.read(results)] == ["ort", "onnxfuse", "torch-eager"]


def test_models_are_prepared_once(gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = tmp_path / "llama.csv"
    argv = ["--work", str(tmp_path / "w"), "--tokens", "1", "--results", str(results)]
    assert bench_llama.main([*argv, "--prepare"]) == 0
    assert not results.exists()
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    monkeypatch.setenv("ONNXFUSE_TUNING", "t.json")
    gpu.export = None
    assert bench_llama.main([*argv, "--reuse"]) == 0
    assert [row["variant"] for row in llama_rows.read(results)] == ["ort", "onnxfuse tuned"]


def test_a_wrong_model_fails_the_run(gpu: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gpu.open_session = lambda path, library, vocab: ("wrong" if library else path.stem, True)
    assert bench_llama.main(["--work", str(tmp_path / "w"), "--tokens", "1"]) == 1
    assert "WRONG: onnxfuse at 1 tokens" in capsys.readouterr().out


def test_a_session_that_fails_leaves_the_others(
    gpu: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def open_session(path: Path, library: str | None, vocab: int) -> tuple[str, bool]:
        if "without" in path.stem:
            raise RuntimeError("no kernel")
        return path.stem, path.stem == "base"

    gpu.open_session = open_session
    TIMES["onnxfuse, launched"] = 1.3
    results = tmp_path / "llama.csv"
    argv = ["--work", str(tmp_path / "w"), "--tokens", "1", "--ablate", "gate", "--results", str(results)]
    assert bench_llama.main(argv) == 1
    assert "FAILED: onnxfuse without gate: no kernel" in capsys.readouterr().out
    assert [row["variant"] for row in llama_rows.read(results)] == ["ort", "onnxfuse, launched"]


def test_the_verdict_is_about_the_last_run_and_the_earlier_times() -> None:
    def row(variant: str, commit: str, ms: float, tokens: int = 1) -> llama_rows.Row:
        return {**dict.fromkeys(llama_rows.FIELDS, ""), "date": "d", "commit": commit, "tokens": str(tokens),
                "variant": variant, "median_ms": str(ms), "floor_ms": "0.5"}  # fmt: skip

    rows = [row("ort", "a", 2.0), row("onnxfuse", "a", 0.9), row("ort", "b", 2.0), row("onnxfuse", "b", 1.1)]
    assert llama_rows.verdict(rows).startswith("missed  1 tokens: 1.100 ms")  # slower than 1.038 on an earlier day
    assert llama_rows.verdict(rows[:2]).startswith("met     1 tokens: 0.900 ms")
    assert llama_rows.verdict([row("onnxfuse", "a", 1.0)]) == ""


def test_the_committed_rows_can_be_read() -> None:
    rows = llama_rows.read(llama_rows.RESULTS)
    assert set(llama_rows.latest(rows)) >= {1, 16, 512, 2048}
    assert json.dumps(rows)
