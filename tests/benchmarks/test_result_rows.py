"""Reading and appending rows of results, and what a row says of the machine."""

from __future__ import annotations

import subprocess

import pytest
import result_rows

FIELDS = ("date", "us")


def test_appended_rows_are_read_back_under_one_header(tmp_path):
    path = tmp_path / "new" / "rows.csv"
    result_rows.append(path, FIELDS, [{"date": "2026-01-01", "us": "1.5"}])
    result_rows.append(path, FIELDS, [{"date": "2026-01-02", "us": "2.5"}])
    assert path.read_text() == "date,us\n2026-01-01,1.5\n2026-01-02,2.5\n"
    assert result_rows.read(path, FIELDS) == [{"date": "2026-01-01", "us": "1.5"}, {"date": "2026-01-02", "us": "2.5"}]


def test_a_field_that_the_file_lacks_is_empty(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("us\n1.5\n")
    assert result_rows.read(path, FIELDS) == [{"date": "", "us": "1.5"}]
    assert result_rows.read(tmp_path / "none.csv", FIELDS) == []


@pytest.mark.parametrize("run, driver", [
    (lambda command: subprocess.CompletedProcess(command, 0, "1.2\n1.2\n", ""), "1.2"),  # one line for each GPU
    (lambda command: subprocess.CompletedProcess(command, 0, "", ""), "unknown"),
    (FileNotFoundError, "unknown"),
    (lambda command: subprocess.CalledProcessError(9, command), "unknown"),
])  # fmt: skip
def test_the_driver_is_unknown_where_the_tool_cannot_say(run, driver, monkeypatch):
    def fake(command, **options):
        result = run(command)
        if isinstance(result, Exception):
            raise result
        return result

    monkeypatch.setattr(subprocess, "run", fake)
    row = result_rows.provenance("abc", "H200")
    assert (row["commit"], row["gpu"], row["driver"]) == ("abc", "H200", driver)
