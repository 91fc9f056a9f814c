"""Fixtures that several test packages share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent, indent

import pytest

from onnxfuse.graph import shapes
from onnxfuse.graph.model import Model
from onnxfuse.match.trace import Failure, Tracer
from onnxfuse.rewrite import driver
from onnxfuse.rules.loading import RuleSet, parse
from onnxfuse.ruletest.cases import load, parse_graph
from onnxfuse.ruletest.run import furthest

_HEAD = "schema: 1\nid: {id}\nstage: {stage}\nsummary: a rule of a test\n"
_TESTS = "tests:\n  match:\n    - {name: none, graph: none}\n"


@dataclass
class Tried:
    """What came of applying test rules to a graph."""

    model: Model
    report: driver.Report
    tracer: Tracer
    rules: RuleSet

    @property
    def count(self) -> int:
        return len(self.report.applied)

    @property
    def failure(self) -> Failure:
        """The furthest failure of the first rule."""
        return furthest(next(iter(self.rules)), self.report, self.tracer)[0]

    @property
    def ops(self) -> list[str]:
        return [node.op for node in self.model.graph.nodes]


@pytest.fixture
def rule_set() -> Callable[..., RuleSet]:
    """Rules from their bodies: everything between `summary` and `tests`."""

    def make(*bodies: str, stage: str = "fuse", ids: Iterable[str] = ("first", "second", "third")) -> RuleSet:
        programs = {}
        for body, rule_id in zip(bodies, ids, strict=False):
            programs[rule_id] = parse(
                _HEAD.format(id=rule_id, stage=stage) + dedent(body) + _TESTS, Path(f"{rule_id}.yaml")
            )
        return RuleSet(programs)

    return make


@pytest.fixture
def attempt(rule_set: Callable[..., RuleSet]) -> Callable[..., Tried]:
    """Apply rules, given by their bodies, to a graph: header, `weights`, then the nodes; outputs need no types."""

    def run(
        bodies: str | Iterable[str],
        nodes: str,
        *,
        inputs: str = "float[B,S,8] x",
        outputs: str = "y",
        weights: str = "float two = {2}",
        opset: int = 17,
        **options: object,
    ) -> Tried:
        rules = rule_set(*([bodies] if isinstance(bodies, str) else bodies))
        text = f"g ({inputs}) => ({outputs}) <{weights}>\n{{\n{indent(dedent(nodes), '  ')}\n}}"
        model = load(parse_graph(text, opset), text)
        tracer = Tracer()
        report = driver.run(model, rules, "fuse", tracer=tracer, inference=shapes.infer(model), **options)  # type: ignore[arg-type]
        return Tried(model, report, tracer, rules)

    return run
