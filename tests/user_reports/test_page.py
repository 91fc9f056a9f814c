"""The page of kinds names tests that exist, and every case of this folder's files belongs to a kind."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "user-reports.md"


def rows() -> list[tuple[str, list[tuple[Path, list[str]]]]]:
    """(first cell, [(file, names)]) of every row."""
    found = []
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        cells = [c.strip() for c in line.strip("|").split(" | ")]
        if line.startswith("|") and "](" in cells[-1]:
            tests = []
            for link, names in re.findall(r"\]\(([^)]+)\)((?: `[^`]+`)+)", cells[-1]):
                tests.append(((PAGE.parent / link).resolve(), re.findall(r"`([^`]+)`", names)))
            found.append((cells[0], tests))
    return found


def test_every_row_names_tests_that_exist() -> None:
    table = rows()
    assert len(table) > 50
    missing = [
        f"{path.name}: {name}" for _, tests in table for path, names in tests for name in names
        if not re.search(rf"def {re.escape(name)}\b|\"{re.escape(name)}", path.read_text())
    ]  # fmt: skip
    assert not missing
    assert all(tests for _, tests in table)


def test_every_file_of_this_folder_is_on_the_page() -> None:
    named = {path for _, tests in rows() for path, _ in tests}
    assert {p for p in Path(__file__).parent.glob("test_*.py") if p != Path(__file__)} <= named
