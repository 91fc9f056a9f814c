"""What is recorded when a check fails, and which failure of a search is the one to show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Any

from onnxfuse.graph import view
from onnxfuse.graph.ir import Node, Value


class Kind(StrEnum):
    """Why a check failed. Documented in ``docs/reference/rule-format.md``."""

    OP_MISMATCH = "op-mismatch"
    ARITY = "arity"
    ATTR = "attr"
    CONST_VALUE = "const-value"
    NOT_CONST = "not-const"
    VALUE_CONFLICT = "value-conflict"
    DTYPE = "dtype"
    RANK = "rank"
    SHAPE = "shape"
    DIM_CONFLICT = "dim-conflict"
    DIM_LIMIT = "dim-limit"
    CAPTURE = "capture"
    NOT_PRIVATE = "not-private"
    GRAPH_OUTPUT = "graph-output"
    CAPTURED_BY_SUBGRAPH = "captured-by-subgraph"
    TARGET = "target"
    OPSET = "opset"
    PREDICATE = "predicate"
    GROUP_SIZE = "group-size"
    CYCLE = "cycle"
    WEIGHT_SHAPE = "weight-shape"
    WEIGHT_SHARED = "weight-shared"
    OUTPUT_TYPE = "output-type"
    UNKNOWN_TYPE = "unknown-type"
    EXCLUDED = "excluded"
    PREEMPTED = "preempted"


#: What each kind means; the reference page is generated from it.
MEANING = {
    Kind.OP_MISMATCH: "the producer is another op, or the value has none",
    Kind.ARITY: "another number of inputs or outputs",
    Kind.ATTR: "an attribute (or constant parameter) has another value",
    Kind.CONST_VALUE: "a constant, but another number",
    Kind.NOT_CONST: "a constant was expected, or was not allowed",
    Kind.VALUE_CONFLICT: "one name would stand for two values, or one graph node for two pattern nodes",
    Kind.DTYPE: "another element type",
    Kind.RANK: "another rank",
    Kind.SHAPE: "another shape",
    Kind.DIM_CONFLICT: "a named dimension would have two sizes",
    Kind.DIM_LIMIT: "a named dimension is outside of its limits",
    Kind.CAPTURE: "a capture has two values or is outside of its limits",
    Kind.NOT_PRIVATE: "an interior value is read by a node outside of the match",
    Kind.GRAPH_OUTPUT: "an interior value is an output of the graph",
    Kind.CAPTURED_BY_SUBGRAPH: "an interior value is read inside a subgraph",
    Kind.TARGET: "the rule is not for this provider, dtype or architecture",
    Kind.OPSET: "the rule is not for the model's opset",
    Kind.PREDICATE: "a `where` function refused",
    Kind.GROUP_SIZE: "too few siblings",
    Kind.CYCLE: "the nodes cannot be replaced at once: one depends on another through the rest of the graph",
    Kind.WEIGHT_SHAPE: "a weight function cannot be applied to these shapes",
    Kind.WEIGHT_SHARED: "a big weight has other readers and would be stored twice",
    Kind.OUTPUT_TYPE: "the new output provably differs in shape or dtype",
    Kind.UNKNOWN_TYPE: "a shape or dtype is not known",
    Kind.EXCLUDED: "a node of the match was excluded by the user",
    Kind.PREEMPTED: "another rule took a node of the match",
}


class Phase(IntEnum):
    """How far a search got; a later phase beats more checks."""

    GATE = 0
    STRUCTURE = 1
    PREDICATES = 2
    PRIVACY = 3
    RELATIONS = 4
    WEIGHTS = 5
    APPLY = 6


@dataclass(slots=True)
class Failure:
    """One failed check. ``expected`` and ``found`` are raw; `text` words them."""

    id: str
    kind: Kind
    expected: Any = None
    found: Any = None
    nodes: tuple[Node, ...] = ()
    values: tuple[Value, ...] = ()
    phase: Phase = Phase.STRUCTURE
    passed: int = 0

    def text(self) -> str:
        """``expected …, found …`` in words, without the id."""
        found = self.found if self.found is not None else "nothing"
        # A node that a later rewrite took away has no outputs to be named by.
        nodes = [view.describe(node) for node in self.nodes[:3] if node.outputs]
        values = [f"`{value.name}`" for value in self.values[:3]]
        where = f" on {', '.join(nodes)}" if nodes else f" for {', '.join(values)}" if values else ""
        wanted = f"expected {self.expected}, " if self.expected is not None else ""
        return f"{wanted}found {found}{where}"


@dataclass(slots=True)
class Attempt:
    """The outcome of trying one rule at one root without success: its furthest failure and those that tie with it."""

    rule: str
    root: Node
    failure: Failure
    ties: list[Failure] = field(default_factory=list)
    bound: dict[str, Any] = field(default_factory=dict)

    @property
    def is_near_miss(self) -> bool:
        """Whether it got far enough to be worth showing."""
        return self.failure.phase > Phase.STRUCTURE or self.failure.passed >= 3


class Tracer:
    """Keeps, for every (rule, root), the furthest failure. Passed to the driver by `explain` and by tests."""

    def __init__(self) -> None:
        self.attempts: dict[tuple[str, Node], Attempt] = {}
        self.gates: dict[str, Failure] = {}
        self.applied: list[tuple[str, Node]] = []
        #: (rule, id of the alternative or optional node + whether it is there) of every match.
        self.choices: set[tuple[str, str]] = set()
        self._best: Failure | None = None
        self._ties: list[Failure] = []
        self._bound: dict[str, Any] = {}

    def begin(self) -> None:
        self._best, self._ties, self._bound = None, [], {}

    def fail(self, failure: Failure, bound: dict[Any, Any] | None = None) -> None:
        best = self._best
        if best is not None:
            if (failure.phase, failure.passed) < (best.phase, best.passed):
                return
            if (failure.phase, failure.passed) == (best.phase, best.passed):
                if all(failure.id != tie.id for tie in self._ties) and failure.id != best.id:
                    self._ties.append(failure)
                return
        self._best, self._ties = failure, []
        self._bound = {k: v for k, v in bound.items() if isinstance(k, str)} if bound else {}

    def end(self, rule: str, root: Node, matched: bool) -> None:
        if matched or self._best is None:
            self.attempts.pop((rule, root), None)
        else:
            self.attempts[rule, root] = Attempt(rule, root, self._best, self._ties, self._bound)
        self._best = None

    def gate(self, rule: str, failure: Failure) -> None:
        """The rule was not tried at all."""
        self.gates[rule] = failure

    def preempted(self, rule: str, root: Node, by: str, nodes: Sequence[Node]) -> None:
        failure = Failure("priority", Kind.PREEMPTED, None, by, tuple(nodes), phase=Phase.APPLY)
        self.attempts[rule, root] = Attempt(rule, root, failure)

    def near_misses(self, rule: str | None = None) -> list[Attempt]:
        """Furthest first."""
        found = [a for a in self.attempts.values() if (rule is None or a.rule == rule) and a.is_near_miss]
        return sorted(found, key=lambda a: (-a.failure.phase, -a.failure.passed))
