"""What lowering kept, and what it took apart again and why."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class TakenApart:
    """One op that the target runs as several nodes.

    Attributes:
        op: ``domain::Op`` before lowering.
        node: the name of its first output.
        reason: ``no-kernel`` or ``does-not-pay: …`` with what was measured.
    """

    op: str
    node: str
    reason: str


@dataclass
class LoweringReport:
    """The outcome of `lower`.

    Attributes:
        kept: how many nodes of which op stayed (or became) one node: ``{"onnxfuse::Linear": 12}``.
        taken_apart: the others.
    """

    kept: Counter[str] = field(default_factory=Counter)
    taken_apart: list[TakenApart] = field(default_factory=list)

    def keep(self, op: str) -> None:
        self.kept[op] += 1

    def take_apart(self, op: str, node: str, reason: str) -> None:
        self.taken_apart.append(TakenApart(op, node, reason))

    def to_json(self) -> dict[str, Any]:
        """For the JSON report: equal reasons of one op are one entry with a count and the first node names."""
        grouped: dict[tuple[str, str], list[str]] = {}
        for entry in self.taken_apart:
            grouped.setdefault((entry.op, entry.reason), []).append(entry.node)
        return {
            "kept": dict(sorted(self.kept.items())),
            "taken_apart": [
                {"op": op, "reason": reason, "count": len(nodes), "nodes": nodes[:5]}
                for (op, reason), nodes in grouped.items()
            ],
        }
