"""The script around the measuring: its options, the scan before, the file and the verdict after."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import bench_op
import op_rows
import op_suites
import pytest
from op_suites import Cell

from onnxfuse import tune
from onnxfuse.errors import VerificationError
from onnxfuse.runtime import kernels
from onnxfuse.runtime.kernels import Plan, Shape, Variant

FAST = Plan("stream", 0, 11, 2, 1, 8, 0, 8)


class FakeKernels:
    """The plan FAST takes half the time of any other."""

    architecture = 90

    def variants(self) -> list[Variant]:
        return [Variant("stream", 0, 8, 64, False, 24, 8)]

    def modelled(self, shape: Shape, plan: Plan) -> float | None:
        return None

    def chosen(self, shape: Shape) -> Plan:
        return Plan()

    @contextmanager
    def bench(self, shape: Shape) -> Iterator[FakeKernels]:
        yield self

    def measure(self, plan: Plan, seconds: float) -> tuple[float, float]:
        return (5.0 if plan == FAST else 10.0), 2e-4


class FakeMeasurer:
    """Notes the plan of each shape; a gated one gives a wrong result."""

    used: dict[Shape, Plan]

    def __init__(self, kernels: FakeKernels, plans: Callable[[Shape], Plan | None]) -> None:
        type(self).used = {}
        self.kernels, self.plans = kernels, plans

    def measure(self, cell: Cell, peers: Sequence[str]) -> Mapping[str, object]:
        plan = self.used[cell.shape] = self.plans(cell.shape) or self.kernels.chosen(cell.shape)
        if cell.shape.gated:
            raise VerificationError("relative error 0.1")
        return {"us": 10.0, "cublas_us": 10.0, "ratio": 1.0, "plan": str(plan), **dict.fromkeys(peers, 12.0)}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU and PyTorch, as far as the script sees them."""
    module = ModuleType("op_gpu")
    module.GpuMeasurer = FakeMeasurer  # type: ignore[attr-defined]
    module.machine = lambda commit: {  # type: ignore[attr-defined]
        "date": "2026-01-02", "commit": commit, "gpu": "a GPU", "driver": "1", "cuda": "13.0", "cublas": "13.1.0",
        "copy_tb_s": 4.0,
    }  # fmt: skip
    monkeypatch.setitem(sys.modules, "op_gpu", module)
    monkeypatch.setattr(kernels, "Kernels", FakeKernels)
    monkeypatch.setattr(tune, "Kernels", FakeKernels)
    monkeypatch.setattr(tune, "candidates", lambda shape, variants: [FAST])


@pytest.mark.parametrize("argv", (
    ["--verdict"], ["--scan-only"], ["--scan", "a.json", "--tuned", "b.json"], ["--skip", "9"], ["--suite", "all"],
))  # fmt: skip
def test_options_that_make_no_sense(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        bench_op.arguments(argv)
    assert stopped.value.code == 2
    assert "error:" in capsys.readouterr().err


def test_the_defaults_are_all_claims_in_both_dtypes() -> None:
    options = bench_op.arguments([])
    assert (options.suite, options.dtype, options.peers) == (list(op_suites.GOALS), ["float16", "bfloat16"], "none")
    assert bench_op.arguments(["--skip", "tile9", "stream3"]).skip == [("tile", 9), ("stream", 3)]


def test_the_list_needs_no_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_op.main(["--list", "--suite", "swiglu", "--dtype", "float16"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "swiglu float16 1x4096->14336 rms gated silu"
    assert len(lines) == 5


@pytest.mark.usefixtures("gpu")
def test_rows_are_appended_and_judged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "op.csv"
    argv = ["--suite", "norm-linear", "--dtype", "bfloat16", "--peers", "torch", "--results", str(path)]
    assert bench_op.main([*argv, "--commit", "one"]) == 0
    assert bench_op.main([*argv, "--commit", "two"]) == 0
    rows = op_rows.read(path)
    assert [row["commit"] for row in rows] == ["one"] * 15 + ["two"] * 15
    assert {row["compile_us"] for row in rows} == {"12"}
    capsys.readouterr()
    assert bench_op.main(["--verdict", "--suite", "norm-linear", "--dtype", "bfloat16", "--results", str(path)]) == 0
    assert "met     norm-linear bfloat16 faster than torch.compile: worst 0.833" in capsys.readouterr().out


@pytest.mark.usefixtures("gpu")
def test_a_wrong_result_is_kept_and_fails_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "op.csv"
    assert bench_op.main(["--suite", "swiglu", "decode", "--dtype", "float16", "--results", str(path)]) == 1
    rows = op_rows.read(path)
    assert {row["us"] for row in rows if row["suite"] == "swiglu"} == {op_rows.FAILED}
    assert {row["us"] for row in rows if row["suite"] == "decode"} == {"10"}
    assert "missed  swiglu      float16  at most 1.06 x cuBLAS' bare product: 5 failed" in capsys.readouterr().out


@pytest.mark.usefixtures("gpu")
def test_the_scan_is_kept_and_serves_both_dtypes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plans.json"
    assert bench_op.main(["--suite", "norm-linear", "--scan", str(path)]) == 0
    assert set(FakeMeasurer.used.values()) == {FAST}
    assert {shape.dtype for shape in FakeMeasurer.used} == {"float16", "bfloat16"}
    assert "10.00 -> 5.00 us" in capsys.readouterr().out
    assert bench_op.main(["--suite", "norm-linear", "--scan", str(path), "--scan-only"]) == 0
    assert "->" not in capsys.readouterr().out  # all of it is there already
    assert bench_op.main(["--suite", "decode", "--tuned", str(path)]) == 0
    tuned = {(s.rows, s.n, s.k, s.norm != "none") for s, plan in FakeMeasurer.used.items() if plan == FAST}
    assert tuned == set()  # a norm over 4096 x 4096 was tuned, which is another op there


@pytest.mark.usefixtures("gpu")
def test_no_scan_begins_after_its_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plans.json"
    assert bench_op.main(["--suite", "decode", "--scan", str(path), "--scan-seconds", "0", "--scan-only"]) == 0
    assert "->" not in capsys.readouterr().out
    assert not path.exists()
