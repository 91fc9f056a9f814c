"""What the files of results share: reading and appending rows, and what a row says of the machine."""

from __future__ import annotations

import csv
import datetime
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
Row = dict[str, str]


def read(path: Path, fields: Sequence[str]) -> list[Row]:
    """All rows, with these fields; none if there is no file."""
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return [{name: row.get(name) or "" for name in fields} for row in csv.DictReader(file)]


def append(path: Path, fields: Sequence[str], rows: Iterable[Mapping[str, str]]) -> None:
    """Adds rows at the end; a new file gets its header first."""
    fresh = not path.exists()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fields, lineterminator="\n")
        if fresh:
            writer.writeheader()
        writer.writerows(rows)


def provenance(commit: str | None, gpu: str) -> Row:
    """Date, commit (that of the checkout if none is given), GPU and driver."""
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "commit": commit or _output("git", "rev-parse", "--short", "HEAD"),
        "gpu": gpu,
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
    }


def _output(*command: str) -> str:
    """The first line of what a command prints; `unknown` if it cannot say."""
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
        return found.stdout.strip().splitlines()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return "unknown"
