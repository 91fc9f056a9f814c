"""The script for a GPU machine: its steps, with stand-ins for the programs that it runs."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
from pathlib import Path

import bench_llama
import bench_op
import pytest

ROOT = Path(__file__).parents[2]
PYTHON = """#!/bin/sh
echo "python3 $@ [tuning $ONNXFUSE_TUNING]" >> {log}
while [ $# -gt 0 ]; do
  case "$1" in --scan) echo '{{"entries": []}}' > "$2";; esac
  shift
done
exit ${{FAIL:-0}}
"""


def run(tmp_path: Path, steps: str, **environment: str) -> tuple[list[str], str]:
    """The commands that were run, and what was printed."""
    programs, log = tmp_path / "bin", tmp_path / "commands"
    programs.mkdir(exist_ok=True)
    (programs / "python3").write_text(PYTHON.format(log=log))
    os.chmod(programs / "python3", (programs / "python3").stat().st_mode | stat.S_IXUSR)
    log.unlink(missing_ok=True)
    script = ROOT / "benchmarks" / "gpu_all.sh"
    done = subprocess.run(
        ["sh", str(script), str(tmp_path / "out")], capture_output=True, text=True, timeout=60,
        env={**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "STEPS": steps, "COMMIT": "abc",
             "BUILD_DIR": str(tmp_path / "build"), "ONNXFUSE_LIBRARY": "/lib.so", "LLAMA_WORK": "/w", **environment},
    )  # fmt: skip
    assert done.returncode == 0 and not done.stderr, done.stderr
    return (log.read_text().splitlines() if log.exists() else []), done.stdout


pytestmark = pytest.mark.skipif(shutil.which("timeout") is None, reason="needs coreutils' timeout")


def test_the_scan_serves_the_later_steps(tmp_path: Path) -> None:
    commands, output = run(tmp_path, "scan ops tune llama")
    plans = tmp_path / "out" / "plans.json"
    assert [c.split()[1] for c in commands] == [
        "benchmarks/bench_op.py", "benchmarks/bench_op.py", "benchmarks/tune_model.py", "benchmarks/bench_llama.py",
    ]  # fmt: skip
    assert f"--tuned {plans}" in commands[1] and commands[1].endswith("[tuning ]")
    assert commands[2].endswith("[tuning ]")  # compared with the library as it is shipped
    assert commands[3].endswith(f"[tuning {plans}]")
    assert "== ops: exit 0" in output
    assert (tmp_path / "out" / "llama.csv").read_text() == (ROOT / "benchmarks/results/llama.csv").read_text()


def test_without_a_scan_nothing_is_tuned(tmp_path: Path) -> None:
    commands, _ = run(tmp_path, "ops llama")
    assert len(commands) == 2
    assert "--tuned" not in commands[0]
    assert commands[1].endswith("[tuning ]")


def test_a_failed_step_stops_nothing(tmp_path: Path) -> None:
    commands, output = run(tmp_path, "models cache variants tests ops", FAIL="3")
    assert len(commands) == 5
    assert output.count("exit 3") == 5


def test_the_options_exist(tmp_path: Path) -> None:
    commands, _ = run(tmp_path, "models cache scan ops llama")
    for command in commands:
        words = command.rsplit(" [", 1)[0].split()[2:]
        parse = bench_op.arguments if "bench_op" in command else bench_llama.arguments
        assert parse(words)
