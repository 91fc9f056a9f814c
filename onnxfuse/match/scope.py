"""Where matching happens: one graph of a model, a target, and the nodes that the user keeps out of it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from onnxfuse.errors import UsageError
from onnxfuse.graph import view
from onnxfuse.graph.ir import Graph, Node, Value
from onnxfuse.graph.model import Model
from onnxfuse.match import op_types  # noqa: F401  (registers the shapes of our ops)
from onnxfuse.rules.patterns import OpKey

#: The CUDA architectures that can be named, from Volta on, the oldest that ONNX Runtime is built for.
CUDA_ARCHITECTURES = (70, 75, 80, 86, 87, 89, 90, 100, 103, 110, 120, 121)


@dataclass(frozen=True)
class Target:
    """What a model is optimized for: an execution provider and, for CUDA, the architecture (90 for sm_90)."""

    provider: str = "cpu"
    sm: int | None = None

    @classmethod
    def parse(cls, text: str) -> Target:
        """``cpu``, ``cuda``, ``cuda:sm90``. UsageError for anything else."""
        targets = [cls(), cls("cuda"), *(cls("cuda", sm) for sm in CUDA_ARCHITECTURES)]
        known = {str(target): target for target in targets}
        if text not in known:
            architectures = ", ".join(f"sm{sm}" for sm in CUDA_ARCHITECTURES)
            raise UsageError(
                f"unknown target `{text}`", hint=f"write cpu, cuda, or cuda:smNN with one of {architectures}"
            )
        return known[text]

    def __str__(self) -> str:
        return self.provider + (f":sm{self.sm}" if self.sm else "")


@dataclass
class Scope:
    """One graph with what every match in it needs to know. Made anew for each pass over the graph."""

    model: Model
    graph: Graph
    opset: int
    target: Target
    exclude_nodes: frozenset[str] = frozenset()
    position: dict[Node, int] = field(default_factory=dict)
    outputs: set[int] = field(default_factory=set)
    ops: Counter[OpKey] = field(default_factory=Counter)

    @classmethod
    def of(cls, model: Model, graph: Graph, target: Target, exclude_nodes: frozenset[str] = frozenset()) -> Scope:
        scope = cls(model, graph, opset_of(model, graph), target, exclude_nodes)
        scope.refresh()
        return scope

    def refresh(self) -> None:
        """Read the graph again."""
        self.position = {node: i for i, node in enumerate(self.graph.nodes)}
        self.outputs = {id(v) for v in self.graph.outputs}
        self.ops = Counter((view.domain(n), n.op) for n in self.graph.nodes)

    def is_output(self, value: Value) -> bool:
        return id(value) in self.outputs


def opset_of(model: Model, graph: Graph) -> int:
    """The opset of ONNX's own domain in this graph; functions may import another one than the model."""
    imported = getattr(graph, "import_domains", None)
    if imported:
        for item in imported:
            if item.domain in ("", "ai.onnx"):
                return int(item.version)
    return model.opset()
