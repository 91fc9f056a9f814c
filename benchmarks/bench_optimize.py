"""How long optimizing takes, from loading to saving, against onnxruntime.transformers on the same files.

    python benchmarks/bench_optimize.py FOLDER [--models bert,llama] [--repeats 3] [--scaling] [--csv FILE]

Both tools take turns on each file in one process, after a first call of each that is not counted (imports); medians of
the repeats. `--scaling` takes a spelled-out decoder instead and repeats its last layer until it has 32 and 64 of them.
onnxruntime.transformers needs torch: without it here, COVERAGE_TORCH names a folder that has it (site-packages).
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import io
import json
import logging
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path += filter(None, [os.environ.get("COVERAGE_TORCH")])

from coverage_tools import PEERS

PEER = "onnxruntime.transformers"
#: A decoder as TorchScript spells it out, and where the names of its last layer's nodes start.
SCALING_MODEL, LAST_LAYER = "llama-ts14-f32-eager.onnx", "/layers.1/"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--models", default="", help="only files whose name contains one of these (a,b)")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--scaling", action="store_true", help="32 and 64 layers instead of the corpus")
    parser.add_argument("--csv", type=Path)
    options = parser.parse_args(arguments)
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory(prefix="bench") as temporary:
        if options.scaling:
            base = onnx.load(options.folder / SCALING_MODEL)
            files = [Path(temporary) / f"{layers}-layers.onnx" for layers in (32, 64)]
            for file, layers in zip(files, (32, 64), strict=True):
                onnx.save(deeper(base, layers), file)
        else:
            wanted = [part for part in options.models.split(",") if part]
            names = [r["file"] for r in json.loads((options.folder / "manifest.json").read_text())["models"]]
            files = [options.folder / n for n in names if not wanted or any(part in n for part in wanted)]
        rows = measure(files, Path(temporary) / "out.onnx", options.repeats)
    if options.csv:
        with open(options.csv, "w", newline="") as file:
            table = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
            table.writeheader()
            table.writerows(rows)
    return summary_of_scaling(rows) if options.scaling else summary(rows)


def measure(files: list[Path], out: Path, repeats: int) -> list[dict[str, Any]]:
    """Median seconds of both tools by file; `peer_s` is empty where the other tool fails."""
    import onnxfuse

    def ours(source: Path) -> None:
        onnxfuse.optimize(source, out, target="cpu", verify=False)

    def peer(source: Path) -> None:
        PEERS[PEER](source, out)

    for call in (ours, peer):
        seconds(call, files[0])
    rows = []
    for file in files:
        times = [(seconds(ours, file), seconds(peer, file)) for _ in range(repeats)]
        mine = statistics.median(t[0] for t in times if t[0] is not None)
        others = [t[1] for t in times if t[1] is not None]
        row: dict[str, Any] = {"file": file.name, "onnxfuse_s": round(mine, 4), "peer_s": "", "ratio": ""}
        if others:
            row["peer_s"] = round(statistics.median(others), 4)
            row["ratio"] = round(mine / statistics.median(others), 3)
        rows.append(row)
        print(f"{file.name:48} {mine:7.3f} s  {PEER} {row['peer_s'] or 'fails':>7}  ratio {row['ratio']}", flush=True)
    return rows


def seconds(call: Callable[[Path], None], source: Path) -> float | None:
    """Wall time of one call, or None if it raises. What it prints is dropped."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        started = time.perf_counter()
        try:
            call(source)
        except Exception:
            return None
        return time.perf_counter() - started


def summary(rows: list[dict[str, Any]]) -> int:
    ratios = [row["ratio"] for row in rows if row["ratio"] != ""]
    print("\nslowest:")
    for row in sorted(rows, key=lambda r: -r["onnxfuse_s"])[:8]:
        print(f"  {row['file']:48} {row['onnxfuse_s']:.3f} s, ratio {row['ratio']}")
    print(f"median of {len(rows)} files: {statistics.median(r['onnxfuse_s'] for r in rows):.3f} s")
    if not ratios:
        return 1
    print(f"median ratio over the {len(ratios)} files that both optimize: {statistics.median(ratios):.3f}")
    return 0 if statistics.median(ratios) <= 1.0 else 1


def summary_of_scaling(rows: list[dict[str, Any]]) -> int:
    growth = rows[1]["onnxfuse_s"] / rows[0]["onnxfuse_s"]
    print(f"\n64 layers take {growth:.2f} times as long as 32", end="")
    if rows[0]["peer_s"] and rows[1]["peer_s"]:
        print(f" ({PEER}: {rows[1]['peer_s'] / rows[0]['peer_s']:.2f})", end="")
    print()
    return 0 if growth <= 2.2 else 1


def deeper(proto: onnx.ModelProto, layers: int, last: str = LAST_LAYER) -> onnx.ModelProto:
    """The model with its last layer repeated, each with weights of its own, until it has so many layers (it has two).

    Args:
        proto: a model whose layer hands one value on.
        layers: at least 2.
        last: what the names of the last layer's nodes contain.
    """
    result = onnx.ModelProto()
    result.CopyFrom(proto)
    graph = result.graph
    body = [node for node in graph.node if last in node.name]
    made = {name for node in body for name in node.output}
    exits = {n for node in graph.node if last not in node.name for n in node.input if n in made}
    exit_name = next(iter(exits), "")
    entry = exit_name.replace(last, last.replace("1", "0"))  # other values of the layer before are shared by all
    if len(exits) != 1 or all(entry not in node.input for node in body):
        raise ValueError(f"the layer hands on {sorted(exits)}: not one value that it takes from the layer before")
    weights = {t.name: t for t in graph.initializer}
    own = {n for node in body for n in node.input if n in weights} - {
        n for node in graph.node if last not in node.name for n in node.input
    }
    end = max(i for i, node in enumerate(graph.node) if last in node.name) + 1
    nodes, tail, current = list(graph.node[:end]), list(graph.node[end:]), exit_name
    for index in range(2, layers):
        def renamed(name: str, index: int = index, current: str = current) -> str:
            return current if name == entry else f"{name}.{index}" if name in made or name in own else name

        for node in body:
            copy = onnx.NodeProto()
            copy.CopyFrom(node)
            copy.name = node.name.replace(last, last.replace("1", str(index)))
            copy.input[:] = [renamed(n) for n in node.input]
            copy.output[:] = [renamed(n) for n in node.output]
            nodes.append(copy)
        for name in own:
            tensor = onnx.TensorProto()
            tensor.CopyFrom(weights[name])
            tensor.name = f"{name}.{index}"
            graph.initializer.append(tensor)
        current = f"{exit_name}.{index}"
    for node in tail:
        node.input[:] = [current if n == exit_name else n for n in node.input]
    kept = [onnx.NodeProto.FromString(node.SerializeToString()) for node in (*nodes, *tail)]
    del graph.node[:]
    graph.node.extend(kept)
    return result


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
