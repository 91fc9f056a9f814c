"""Which blocks of the model corpus are found, and are still right, against what the manifest says is in the models.

    python benchmarks/coverage.py FOLDER [--tools ours|all|NAME] [--models llama,bert] [--missing] [--write] [--check]

Every tool goes through every file in the same run. `--write` keeps the results in benchmarks/results and makes
docs/reference/coverage.md from them; `--check` compares what onnxfuse finds in the files of FOLDER with those results.
onnxruntime.transformers needs torch: without it here, COVERAGE_TORCH names a folder that has it (site-packages).
"""

from __future__ import annotations

import argparse
import csv
import importlib.metadata
import json
import os
import platform
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(Path(__file__).resolve().parent))

import coverage_page  # noqa: E402
import coverage_tools  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "coverage.json"
TABLE = RESULTS.with_suffix(".csv")
KEPT = ("tool", "file", "state", "found")
PAGE = ROOT / "docs" / "reference" / "coverage.md"
COMMAND = "python benchmarks/coverage.py FOLDER --tools all --write"
PACKAGES = ("onnxruntime-gpu", "onnxruntime", "onnxscript", "onnx", "onnx-graphsurgeon", "numpy")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path, help="models, their stored outputs, and manifest.json")
    parser.add_argument("--tools", default="ours", help="`ours`, `all`, or names that contain one of these (a,b)")
    parser.add_argument("--models", default="", help="only files whose name contains one of these (a,b)")
    parser.add_argument("--missing", action="store_true", help="list the blocks that were not found, by file")
    parser.add_argument("--write", action="store_true", help="keep the results and make the page")
    parser.add_argument("--check", action="store_true", help="compare with the kept results; exit code 1 if worse")
    options = parser.parse_args(arguments)
    records = json.loads((options.folder / "manifest.json").read_text())["models"]
    wanted = [part for part in options.models.split(",") if part]
    records = [r for r in records if r.get("npz") and (not wanted or any(part in r["file"] for part in wanted))]
    rows = measure(options.folder.resolve(), records, chosen_tools(options.tools), options.missing)
    print_totals(rows)
    if options.write:
        write({"command": COMMAND, "versions": versions(), "rows": rows})
    if options.check:
        worse = compare(rows, json.loads(RESULTS.read_text())["rows"])
        print("\n".join(worse) or "as good as the kept results")
        return 1 if worse else 0
    return 0 if all(row["state"] in ("right", "structure") for row in rows if row["tool"] in coverage_tools.OURS) else 1


def chosen_tools(text: str) -> list[str]:
    """Tools by name; `ours` and `all` stand for several."""
    if text in ("ours", "all"):
        return list(coverage_tools.OURS if text == "ours" else coverage_tools.TOOLS)
    return [tool for tool in coverage_tools.TOOLS if any(part in tool for part in text.split(","))]


def measure(folder: Path, records: list[dict[str, Any]], tools: list[str], missing: bool) -> list[dict[str, Any]]:
    """Each tool on each file, in turn, with what was expected and found by kind of block."""
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    workers = {tool: coverage_tools.Worker() for tool in tools}
    rows = []
    for record in records:
        expected = coverage_page.expected(record)
        for tool, worker in workers.items():
            row = worker.evaluate(tool, folder, record)
            row.update(
                expected=expected, found=coverage_page.found(record, row.pop("blocks")),
                written=coverage_page.found(record, row["written"]),
            )
            rows.append(row)
            before, after = row["nodes"]
            print(f"{row['file']}: {tool}: {row['state']} ({row['error']}), {before} -> {after} nodes, "
                  f"{row['seconds']:.2f} s", flush=True)
            short = [f"{k} {row['found'].get(k, 0)}/{n}" for k, n in expected.items() if row["found"].get(k, 0) < n]
            if missing and short:
                print("    missing: " + ", ".join(short))
    for worker in workers.values():
        worker.close()
    return rows


def print_totals(rows: list[dict[str, Any]]) -> None:
    for tool in dict.fromkeys(row["tool"] for row in rows):
        print(f"\n{tool:42} {'expected':>8} {'found':>6} {'and right':>9} {'written':>8}")
        for kind, entry in coverage_page.totals(rows, tool).items():
            if entry["expected"]:
                print(f"{kind:42} {entry['expected']:8} {entry['found']:6} {entry['right']:9} {entry['written']:8}")


def write(results: dict[str, Any]) -> None:
    """Keep what `--check` compares with (one row a line), a table of totals, and the page; each beside its place, then
    renamed."""
    head = json.dumps({k: v for k, v in results.items() if k != "rows"}, indent=1)[:-2]
    ours = [row for row in results["rows"] if row["tool"] in coverage_tools.OURS]
    rows = ",\n".join(json.dumps({key: row[key] for key in KEPT}) for row in ours)
    replace(RESULTS, f'{head},\n "rows": [\n{rows}\n]}}\n')
    replace(PAGE, coverage_page.page(results))
    with tempfile.NamedTemporaryFile("w", dir=TABLE.parent, delete=False, newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(["tool", "block", "expected", "found", "found_and_right", "written_and_right"])
        for tool in dict.fromkeys(row["tool"] for row in results["rows"]):
            for kind, e in coverage_page.totals(results["rows"], tool).items():
                if e["expected"]:
                    table.writerow([tool, kind, e["expected"], e["found"], e["right"], e["written"]])
    os.chmod(file.name, 0o644)
    os.replace(file.name, TABLE)


def replace(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}")
    temporary.write_text(text)
    os.replace(temporary, path)


def compare(rows: list[dict[str, Any]], kept: list[dict[str, Any]]) -> list[str]:
    """Where onnxfuse finds less than it did, or what it writes is no longer right."""
    before = {(row["tool"], row["file"]): row for row in kept}
    worse = []
    for row in rows:
        old = before.get((row["tool"], row["file"]))
        if old is None or row["tool"] not in coverage_tools.OURS:
            continue
        if row["state"] in ("wrong", "failed") and old["state"] in ("right", "structure"):
            worse.append(f"{row['file']}: {row['tool']}: {row['state']}: {row['error']}")
        worse += [
            f"{row['file']}: {row['tool']}: {kind} {row['found'].get(kind, 0)}, was {count}"
            for kind, count in old["found"].items() if row["found"].get(kind, 0) < count
        ]
    return worse


def versions() -> list[str]:
    result = [f"Python {platform.python_version()}"]
    for package in PACKAGES:
        try:
            result.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return result


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
