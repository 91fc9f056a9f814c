"""ruff and mypy find nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("arguments", [
    ("ruff", "check", "onnxfuse", "tests", "benchmarks", "custom_ops", "docs"),
    ("mypy", "--no-error-summary"),
], ids=["ruff", "mypy"])
def test_nothing_is_found(arguments: tuple[str, ...]) -> None:
    pytest.importorskip(arguments[0], reason=f"{arguments[0]} is not installed (pip install '.[test]')")
    done = subprocess.run([sys.executable, "-m", *arguments], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
