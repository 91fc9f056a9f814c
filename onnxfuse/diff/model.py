"""What changed between two models: interface, ops, blocks, regions. Names never count."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from onnxfuse.diff.align import Alignment
from onnxfuse.diff.regions import Region, changed_regions, op_changes, op_name
from onnxfuse.graph import view
from onnxfuse.graph.ir import Constant, Value
from onnxfuse.graph.model import Model

SCHEMA = 1


@dataclass(frozen=True)
class ModelDiff:
    """The differences between two models.

    `ops` and `blocks` are (name, before, after); `weights` names ops of nodes that differ in weights alone, with how
    many; `interface` describes changed inputs, outputs and opsets as text.
    """

    nodes_before: int
    nodes_after: int
    unchanged: int
    interface: tuple[str, ...]
    ops: tuple[tuple[str, int, int], ...]
    blocks: tuple[tuple[str, int, int], ...]
    regions: tuple[Region, ...]
    weights: tuple[tuple[str, int], ...]

    @property
    def same(self) -> bool:
        """Whether the models are equal up to names and the order of independent nodes."""
        return not (self.interface or self.regions or self.weights)

    def to_json(self) -> dict[str, Any]:
        counts = {"before": self.nodes_before, "after": self.nodes_after, "unchanged": self.unchanged}
        return {
            "schema": SCHEMA,
            "same": self.same,
            "nodes": counts,
            "interface": list(self.interface),
            "ops": {op: {"before": a, "after": b} for op, a, b in self.ops},
            "blocks": {kind: {"before": a, "after": b} for kind, a, b in self.blocks},
            "regions": [asdict(r) for r in self.regions],
            "weights": [{"op": op, "count": n} for op, n in self.weights],
        }


def diff_models(
    before: Model,
    after: Model,
    blocks_before: Mapping[str, int] | None = None,
    blocks_after: Mapping[str, int] | None = None,
) -> ModelDiff:
    """Compare two models by structure. Counts of blocks, if wanted, are made by the caller."""
    opsets = before.opset(), after.opset()
    alignment = Alignment(before.graph, after.graph, *opsets)
    weights: dict[str, int] = {}
    for node in alignment.partner:
        if alignment.weights_differ(node):
            weights[op_name(node)] = weights.get(op_name(node), 0) + 1
    first, second = blocks_before or {}, blocks_after or {}
    block_rows = [(k, first.get(k, 0), second.get(k, 0)) for k in sorted(first.keys() | second.keys())]
    return ModelDiff(
        nodes_before=len(alignment.before),
        nodes_after=len(alignment.after),
        unchanged=len(alignment.partner),
        interface=tuple(_interface(before, after)),
        ops=tuple(op_changes(alignment.before, alignment.after)),
        blocks=tuple(r for r in block_rows if r[1] != r[2]),
        regions=tuple(changed_regions(alignment, *opsets)),
        weights=tuple(sorted(weights.items())),
    )


def _interface(before: Model, after: Model) -> list[str]:
    found = []
    used = {"", *(view.domain(node) for model in (before, after) for graph in model.graphs() for node in graph.nodes)}
    for domain in sorted(used):
        first, second = before.opsets.get(domain), after.opsets.get(domain)
        if first != second:
            found.append(f"opset {domain or 'ai.onnx'}: {first or 'not imported'} → {second or 'not imported'}")
    for kind in ("inputs", "outputs"):
        mine, theirs = getattr(before.graph, kind), getattr(after.graph, kind)
        if len(mine) != len(theirs):
            found.append(f"{kind}: {len(mine)} → {len(theirs)}")
        for index, (a, b) in enumerate(zip(mine, theirs, strict=False)):
            if _signature(a) != _signature(b):
                found.append(f"{kind[:-1]} {index}: {_signature(a)} → {_signature(b)}")
    return found


def _signature(value: Value) -> str:
    """Dtype and shape; named dims count as unknown, as their names do not matter."""
    if isinstance(value, Constant):
        return f"{value.dtype}{list(value.shape)}"
    if value.shape is None:
        return f"{value.dtype}[?]"
    return f"{value.dtype}[{', '.join(str(d) if isinstance(d, int) else '?' for d in value.shape)}]"
