"""The table of plans that is shipped with the library, from tuning files of the GPU that it is for.

    python benchmarks/tuning_table.py plans.json       # adds what was tuned, writes both files
    python benchmarks/tuning_table.py --fresh plans.json
    python benchmarks/tuning_table.py --check

`benchmarks/results/tuning_h200.json` holds all plans, in the format of `onnxfuse tune`; a later file wins.
`custom_ops/cuda/tuning_sm90.inc` is made from it: one line a shape and number of rows, which holds for both 16-bit
dtypes (what was tuned in float16 counts, if both were). `--fresh` forgets the plans before: after a change of the list
of variants their numbers mean others.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from onnxfuse import tune
from onnxfuse.runtime.kernels import DTYPES

ROOT = Path(__file__).resolve().parent.parent
KEPT = ROOT / "benchmarks" / "results" / "tuning_h200.json"
TABLE = ROOT / "custom_ops" / "cuda" / "tuning_sm90.inc"
ARCHITECTURE = 90
SHAPE = ("gated", "norm", "epilogue", "columns", "k", "rows")
HEAD = """\
    // Made by benchmarks/tuning_table.py from benchmarks/results/tuning_h200.json; do not edit.
    // architecture, gated, norm, epilogue, packed columns, K, M,
    //   path, variant, stages, cluster m x n, raster, row_stats, lead, ahead
"""
Entry = dict[str, Any]


def merged(kept: dict[str, Any], files: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The plans of all files, sorted; of several for one key the last. The header is that of the last file."""
    entries: dict[tuple[int, ...], Entry] = {}
    header: dict[str, Any] = {}
    for content in (kept, *files):
        header = {**header, **{key: value for key, value in content.items() if key != "entries"}}
        for entry in content.get("entries", []):
            entries[tuple(int(entry[name]) for name in tune.KEY)] = entry
    ordered = [entries[key] for key in sorted(entries)]
    return {**header, "entries": ordered}


def table(kept: dict[str, Any]) -> str:
    """The text of the shipped table."""
    chosen: dict[tuple[int, ...], Entry] = {}
    for entry in kept["entries"]:
        if entry["architecture"] != ARCHITECTURE:
            continue
        shape = tuple(int(entry[name]) for name in SHAPE)
        if shape not in chosen or entry["dtype"] == DTYPES.index("float16"):
            chosen[shape] = entry
    lines = []
    for shape in sorted(chosen):
        entry = chosen[shape]
        key = ", ".join(map(str, (ARCHITECTURE, *shape)))
        plan = ", ".join(str(int(entry[name])) for name in tune.PLAN)
        lines.append(f"    {{{key},  {plan}}},  // {entry['us']:.2f} us\n")
    return HEAD + "".join(lines)


def text(kept: dict[str, Any]) -> str:
    """The plans as JSON, one a line."""
    entries = ",\n".join("  " + json.dumps(entry) for entry in kept["entries"])
    head = json.dumps({key: value for key, value in kept.items() if key != "entries"}, indent=1)[:-2]
    return f'{head},\n "entries": [\n{entries}\n ]\n}}\n'


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, metavar="JSON", help="tuning files to take over")
    parser.add_argument("--fresh", action="store_true", help="forget the plans before")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if the table is not current")
    options = parser.parse_args(argv)
    if options.check:
        current = TABLE.read_text(encoding="utf-8") == table(_load(KEPT))
        if not current:
            print(f"{TABLE} is not current: run python benchmarks/tuning_table.py")
        return 0 if current else 1
    if options.fresh and not options.files:
        parser.error("--fresh needs a file")
    for path in options.files:
        tune.stored_plans(path, ARCHITECTURE)  # says what is wrong with a file that is none
    kept: dict[str, Any] = {} if options.fresh else _load(KEPT)
    files = [_load(path) for path in options.files]
    for path, content in zip(options.files, files, strict=True):
        first = kept or files[0]
        if content.get("variants") != first.get("variants"):
            parser.error(f"`{path}` is of another list of variants than the plans before: add --fresh, and scan all")
    kept = merged(kept, files)
    for path, content in ((KEPT, text(kept)), (TABLE, table(kept))):
        beside = path.with_name(path.name + ".part")
        beside.write_text(content, encoding="utf-8")
        os.replace(beside, path)
    print(f"{len(kept['entries'])} plans in {KEPT.name}, {TABLE.name} written")
    return 0


def _load(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


if __name__ == "__main__":
    sys.exit(main())
