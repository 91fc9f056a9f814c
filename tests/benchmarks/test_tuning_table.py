"""The shipped table of plans is made from the kept tuning file, and is what the library's struct expects."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import tuning_table

from onnxfuse import tune

ROOT = Path(__file__).parents[2]


def entry(dtype: int, rows: int, us: float, **changes: int) -> dict[str, Any]:
    plan = dict(zip(tune.PLAN, (2, 3, 5, 2, 1, 8, 0, 0, 0), strict=True))
    return {"architecture": 90, "dtype": dtype, "gated": 0, "norm": 1, "epilogue": 0, "columns": 4096, "k": 1024,
            "rows": rows, **plan, "us": us, **changes}  # fmt: skip


def test_the_shipped_table_is_current() -> None:
    assert tuning_table.main(["--check"]) == 0, "run python benchmarks/tuning_table.py"


def test_the_columns_are_the_members_of_the_struct() -> None:
    source = (ROOT / "custom_ops" / "cuda" / "tuning_table.cc").read_text()
    struct = re.search(r"struct Shipped \{(.*?)\};", source, re.DOTALL)
    assert struct is not None
    members = re.findall(r"\b(\w+)[,;]", re.sub(r"\bint(64_t)?\b", "", struct[1]))
    assert members == ["architecture", *tuning_table.SHAPE, *tune.PLAN]


def test_one_line_a_shape_for_both_dtypes() -> None:
    kept = tuning_table.merged({}, [{"entries": [entry(2, 16, 3.0), entry(1, 16, 2.0, lead=4), entry(2, 8, 1.5),
                                                 entry(1, 32, 9.0, architecture=80)]}])  # fmt: skip
    lines = tuning_table.table(kept).splitlines()[3:]
    assert lines == [
        "    {90, 0, 1, 0, 4096, 1024, 8,  2, 3, 5, 2, 1, 8, 0, 0, 0},  // 1.50 us",
        "    {90, 0, 1, 0, 4096, 1024, 16,  2, 3, 5, 2, 1, 8, 0, 4, 0},  // 2.00 us",
    ]


def test_a_later_file_wins_and_the_text_is_a_tuning_file(tmp_path: Path) -> None:
    first = {"version": 1, "gpu": "one", "entries": [entry(1, 16, 2.0), entry(1, 8, 1.0)]}
    second = {"version": 1, "gpu": "two", "entries": [entry(1, 16, 1.8, variant=4)]}
    kept = tuning_table.merged(first, [second])
    assert kept["gpu"] == "two"
    assert [(e["rows"], e["variant"]) for e in kept["entries"]] == [(8, 3), (16, 4)]
    path = tmp_path / "kept.json"
    path.write_text(tuning_table.text(kept))
    assert json.loads(path.read_text()) == kept
    assert len(path.read_text().splitlines()) == 2 + 2 + 4  # a plan a line
    tune.stored_plans(path, 90)


def test_plans_of_other_variants_need_a_fresh_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, table, new = tmp_path / "kept.json", tmp_path / "table.inc", tmp_path / "new.json"
    monkeypatch.setattr(tuning_table, "KEPT", kept)
    monkeypatch.setattr(tuning_table, "TABLE", table)
    kept.write_text(json.dumps({"variants": "a", "entries": [entry(1, 16, 2.0), entry(1, 8, 1.0)]}))
    new.write_text(json.dumps({"variants": "b", "entries": [entry(1, 16, 1.8)]}))
    with pytest.raises(SystemExit):
        tuning_table.main([str(new)])
    assert not table.exists()
    assert tuning_table.main(["--fresh", str(new)]) == 0
    assert len(json.loads(kept.read_text())["entries"]) == 1
    assert table.read_text().count("{90,") == 1
    assert tuning_table.main(["--check"]) == 0
    new.write_text(json.dumps({"variants": "b", "entries": [entry(1, 32, 1.8)]}))
    assert tuning_table.main([str(new)]) == 0
    assert table.read_text().count("{90,") == 2
