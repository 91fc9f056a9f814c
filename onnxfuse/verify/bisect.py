"""Find the node of a fused model at which it first departs from the original.

Both models share the names of the values that rewriting kept. Those that fused nodes make are read out of both, all at
once where they are few, else a spread of them that narrows round by round. The first that is wrong, with right ones
before it, names the node; then that node is run alone to tell a wrong kernel from a wrong rewrite.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import ModelProto, NodeProto

from onnxfuse.errors import ModelError, OnnxfuseError, VerificationError
from onnxfuse.graph.ir import RULE_KEY
from onnxfuse.ops import registry
from onnxfuse.runtime import oracle
from onnxfuse.runtime.session import Runner
from onnxfuse.verify.check import quantizes_activations
from onnxfuse.verify.compare import Comparison, compare
from onnxfuse.verify.parts import ancestors, expose, made_values, single_node

#: At most so many inner values are read out in one run: the memory of a probe stays bounded.
PROBES_PER_ROUND = 256


@dataclass
class Divergence:
    """Where a fused model first departs from the original.

    Attributes:
        value: name of the first wrong value.
        node: the node that makes it (None when the value's maker is an op that both models share).
        op: `domain::Op`.
        rule: the rule that made the node, if the model says so.
        cause: `kernel` (the node alone departs from its op's meaning), `rewrite` (the node does what its op says, and
            that is not what the original computes) or `unknown` (the op has no reference to tell).
        comparison: error, allowed error and worst element.
        runs: session runs that the search took.
        inputs: operands of the node in the fused model, by value name.
        expected: what the node should give, by value name.
        found: what it gives.
    """

    value: str
    node: NodeProto | None
    op: str
    rule: str | None
    cause: str
    comparison: Comparison
    runs: int
    inputs: dict[str, np.ndarray] = field(default_factory=dict)
    expected: dict[str, np.ndarray] = field(default_factory=dict)
    found: dict[str, np.ndarray] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {
            "value": self.value,
            "op": self.op,
            "rule": self.rule,
            "cause": self.cause,
            "error": self.comparison.error,
            "tolerance": self.comparison.tolerance,
            "worst": self.comparison.worst,
            "problem": self.comparison.problem,
            "runs": self.runs,
        }


class _Search:
    """Session runs of both models and of the oracle, counted."""

    def __init__(
        self, base: ModelProto, fused: ModelProto, feeds: Mapping[str, np.ndarray], dtype: str, provider: str,
        base_dir: Path | None, fused_dir: Path | None, custom_ops: Iterable[str | Path],
    ) -> None:  # fmt: skip
        self.base = oracle.self_contained(base, base_dir or Path())
        self.fused, self.fused_dir = fused, fused_dir
        self.feeds, self.dtype, self.provider = feeds, dtype, provider
        self.custom_ops = tuple(custom_ops)
        self.base_types = oracle.value_types(self.base)
        self.fused_types = oracle.value_types(self.fused)
        self.wide = "float64" if dtype == "float32" else "float32"
        self.quantized = quantizes_activations(base)
        self.runs = 0
        self.values: dict[str, np.ndarray] = {}
        self.unfused: dict[str, np.ndarray] = {}

    def _count(self, runner: Runner, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        self.runs += 1
        return runner.run(feeds)

    def run_fused(self, names: Iterable[str]) -> dict[str, np.ndarray]:
        """The fused model's values. Without ONNX Runtime's own optimizations: the nodes are to run as they stand."""
        model = expose(self.fused, names, self.fused_types)
        runner = Runner(model, self.provider, level="none", base_dir=self.fused_dir, custom_ops=self.custom_ops)
        return self._count(runner, self.feeds)

    def probe(self, names: Sequence[str]) -> dict[str, Comparison]:
        """How each of the values compares, in the given order."""
        fused = self.run_fused(names)
        plain = Runner(expose(self.base, names, self.base_types), self.provider, custom_ops=self.custom_ops)
        unfused = self._count(plain, self.feeds)
        truth = self._truth(names) or unfused
        self.values.update(fused)
        self.unfused.update(unfused)
        return {n: compare(fused[n], unfused[n], truth[n], self.dtype, quantized=self.quantized) for n in names}

    def _truth(self, names: Sequence[str]) -> dict[str, np.ndarray] | None:
        if self.dtype == "float64":
            return None
        try:
            runner = oracle.runner(expose(self.base, names, self.base_types), self.wide, custom_ops=self.custom_ops)
            return self._count(runner, oracle.cast_feeds(self.feeds, self.wide))
        except ModelError:
            return None


def bisect(
    base: ModelProto,
    fused: ModelProto,
    feeds: Mapping[str, np.ndarray],
    *,
    dtype: str,
    provider: str = "cpu",
    base_dir: Path | None = None,
    fused_dir: Path | None = None,
    custom_ops: Iterable[str | Path] = (),
    rules: Mapping[str, str] | None = None,
) -> Divergence | None:
    """The first place where the fused model departs from the original on these inputs; None if it does not.

    Takes three session runs for a model of up to `PROBES_PER_ROUND` common values (fused, unfused, oracle), three more
    for each factor of `PROBES_PER_ROUND` beyond, and at most two for the node alone.

    Args:
        base, fused: the original and the rewritten model.
        feeds: inputs on which they differ.
        dtype: narrowest float dtype of the model.
        rules: rule id by value name, for models whose nodes do not say it themselves.

    Raises:
        VerificationError: no inner value is common to both, so that nothing can be told apart.
        ModelError: one of the models does not run.
    """
    search = _Search(base, fused, feeds, dtype, provider, base_dir, fused_dir, custom_ops)
    producers = {name: node for node in fused.graph.node for name in node.output if name}
    candidates = _candidates(search)
    outputs = [o.name for o in fused.graph.output if o.name in {x.name for x in base.graph.output}]
    if not candidates and not outputs:
        raise VerificationError("the models have no inner value in common", hint="bisect a file that optimize wrote")
    first = _first_wrong(search, candidates, outputs, fused)
    if first is None:
        return None
    name, comparison = first
    divergence = Divergence(
        value=name, node=producers.get(name), op=_op_name(producers.get(name)),
        rule=_rule(producers.get(name), name, rules or {}), cause="unknown", comparison=comparison, runs=search.runs,
    )  # fmt: skip
    if divergence.node is not None:
        _isolate(search, divergence)
    divergence.runs = search.runs
    return divergence


def _candidates(search: _Search) -> list[str]:
    """Float values that both main graphs compute, in the fused model's order."""
    theirs, ours = search.base_types, search.fused_types
    made = {name for name in made_values(search.base) if theirs.get(name) in oracle.FLOATS}
    return [n for n in made_values(search.fused) if n in made and ours.get(n, theirs[n]) in oracle.FLOATS]


def _first_wrong(
    search: _Search, candidates: list[str], outputs: list[str], fused: ModelProto
) -> tuple[str, Comparison] | None:
    order = {name: i for i, name in enumerate(made_values(fused))}
    left = sorted(dict.fromkeys([*candidates, *outputs]), key=lambda n: order.get(n, len(order)))
    best: tuple[str, Comparison] | None = None
    while left:
        step = max(1, -(-len(left) // PROBES_PER_ROUND))
        # The last of each stretch, so that a wrong node in a stretch shows.
        probed = [left[min(i + step - 1, len(left) - 1)] for i in range(0, len(left), step)]
        if best is None:
            probed = list(dict.fromkeys([*probed, *(o for o in outputs if o in left)]))
        compared = search.probe(probed)
        wrong = [n for n in probed if not compared[n].passed]
        if not wrong:
            return best
        best = (wrong[0], compared[wrong[0]])
        right = ancestors(fused, [n for n in probed if compared[n].passed])
        above = ancestors(fused, [wrong[0]])
        left = [n for n in left if n in above and n not in right and n != wrong[0]] if step > 1 else []
    return best


def _isolate(search: _Search, divergence: Divergence) -> None:
    """Read the node's operands out of the fused model, and hold the node alone to its op's reference."""
    node = divergence.node
    assert node is not None
    weights = {t.name: t for t in search.fused.graph.initializer}
    computed = [n for n in dict.fromkeys(node.input) if n and n not in weights]
    missing = [n for n in computed if n not in search.values and n not in search.feeds]
    if missing:
        search.values.update(search.run_fused(missing))
    known = {**search.feeds, **search.values}
    divergence.inputs = {n: known[n] for n in computed}
    own = {n: search.values[n] for n in node.output if n in search.values}
    divergence.found = own
    expected = _reference(search, node, divergence.inputs)
    if expected is None:
        divergence.expected = {n: search.unfused[n] for n in node.output if n in search.unfused}
        return
    kernel = {
        n: compare(own[n], expected[n].astype(own[n].dtype), expected[n], search.dtype) for n in own if n in expected
    }
    wrong = [n for n, c in kernel.items() if not c.passed]
    divergence.cause = "kernel" if wrong else "rewrite"
    if wrong:
        divergence.comparison = kernel[wrong[0]]
        divergence.expected = {n: v.astype(own[n].dtype) for n, v in expected.items() if n in own}
    else:
        divergence.expected = {n: search.unfused[n] for n in node.output if n in search.unfused}


def _reference(search: _Search, node: NodeProto, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray] | None:
    """What the op means on these operands, by its NumPy reference; None for ops that have none."""
    op = registry.of_node(node)
    if op is None:
        return None
    base_dir = str(search.fused_dir or "")
    weights = {t.name: onnx.numpy_helper.to_array(t, base_dir) for t in search.fused.graph.initializer
               if t.name in node.input}
    operands = [inputs.get(n, weights.get(n)) if n else None for n in node.input]
    try:
        results = op.reference(operands, op.attributes_of(node))
    except OnnxfuseError:
        return None
    return {name: r for name, r in zip(node.output, results, strict=False) if name}


def _op_name(node: NodeProto | None) -> str:
    if node is None:
        return "?"
    return f"{node.domain}::{node.op_type}" if node.domain else node.op_type


def _rule(node: NodeProto | None, value: str, rules: Mapping[str, str]) -> str | None:
    if node is not None:
        for entry in node.metadata_props:
            if entry.key == RULE_KEY:
                return entry.value
    return rules.get(value)


def node_model(fused: ModelProto, divergence: Divergence) -> ModelProto:
    """The diverging node as a model of its own."""
    assert divergence.node is not None
    return single_node(fused, divergence.node, divergence.inputs, divergence.found)
