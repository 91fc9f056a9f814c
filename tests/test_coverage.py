"""What is kept of the last coverage run still holds, on the models of this repository."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_as_much_is_found_and_right_as_was_kept() -> None:
    command = [sys.executable, str(ROOT / "benchmarks/coverage.py"), str(ROOT / "models"), "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    output = done.stdout[-3000:] + done.stderr[-2000:]
    assert done.returncode == 0 and "as good as the kept results" in done.stdout, output
