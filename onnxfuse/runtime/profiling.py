"""Per-node times from ONNX Runtime's own profiler."""

from __future__ import annotations

import json
import math
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from onnxfuse.runtime.binding import BoundSession


@dataclass(frozen=True)
class NodeTime:
    """One node of the graph that ONNX Runtime executed, after its own optimizations.

    Times are means over the runs, the slowest fifth left out.
    """

    node: str
    op: str
    provider: str
    milliseconds: float
    output: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class OpTime:
    """All nodes of one op: how many run, and their summed milliseconds per run of the model."""

    op: str
    count: int
    milliseconds: float


def profile(
    proto: onnx.ModelProto,
    feeds: Mapping[str, np.ndarray],
    *,
    provider: str = "cpu",
    level: str = "all",
    base_dir: Path | None = None,
    custom_ops: Iterable[str | Path] = (),
    runs: int = 20,
    warmup: int = 3,
) -> list[NodeTime]:
    """Run a model under the profiler and return its nodes, slowest first.

    On CUDA the host's view is measured: nodes are launched without waiting for each other, so a node's time is that of
    its launch, and the sum is not the time on the device.

    Args:
        proto: the model.
        feeds: arrays by input name.
        provider: `cpu` or `cuda`.
        level: graph optimizations of ONNX Runtime.
        base_dir: folder of the model's external data.
        custom_ops: further custom-op libraries.

    Raises:
        ModelError: ONNX Runtime cannot load or run the model.
    """
    with tempfile.TemporaryDirectory(prefix="onnxfuse-profile-") as folder:
        bound = BoundSession(
            proto, feeds, provider=provider, level=level, base_dir=base_dir, custom_ops=custom_ops,
            enable_profiling=True, profile_file_prefix=str(Path(folder) / "ort"),
        )  # fmt: skip
        for _ in range(warmup + runs):
            bound.run()
        events = json.loads(Path(bound.session.end_profiling()).read_text())
    return nodes_of(events, warmup)


def nodes_of(events: list[dict[str, Any]], warmup: int = 0) -> list[NodeTime]:
    """The nodes in a profile, slowest first; the first `warmup` runs do not count."""
    taken: dict[tuple[str, str], list[float]] = defaultdict(list)
    details: dict[tuple[str, str], tuple[str, str, str]] = {}
    for event in events:
        if event.get("cat") != "Node" or not str(event.get("name", "")).endswith("_kernel_time"):
            continue
        args = event.get("args", {})
        key = (str(args.get("node_index", "")), event["name"].removesuffix("_kernel_time"))
        taken[key].append(event["dur"] / 1e3)
        details[key] = (args.get("op_name", "?"), args.get("provider", ""), _shapes(args.get("output_type_shape", [])))
    rows = []
    for key, times in taken.items():
        kept = times[warmup:] if len(times) > warmup else times
        op, provider, output = details[key]
        rows.append(NodeTime(key[1], op, provider, _typical(kept), output))
    return sorted(rows, key=lambda r: -r.milliseconds)


def _typical(times: list[float]) -> float:
    """The mean of all but the slowest fifth.

    The profiler counts whole microseconds, so a mean says more of a short node than a median; a run in which the
    machine did something else would spoil it.
    """
    kept = sorted(times)[: max(1, math.ceil(0.8 * len(times)))]
    return float(np.mean(kept))


def _shapes(types: list[dict[str, list[int]]]) -> str:
    return ", ".join(f"{dtype}{dims}" for entry in types for dtype, dims in entry.items())


def by_op(nodes: list[NodeTime]) -> list[OpTime]:
    """Summed over the nodes of each op, slowest first."""
    rows: dict[str, list[float]] = defaultdict(list)
    for node in nodes:
        rows[node.op].append(node.milliseconds)
    found = [OpTime(op, len(times), float(sum(times))) for op, times in rows.items()]
    return sorted(found, key=lambda r: -r.milliseconds)
