"""Makes the modules of benchmarks/ importable; last on the path, since `coverage` is also another package's name."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
