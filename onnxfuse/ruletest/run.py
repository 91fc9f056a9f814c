"""Runs cases and judges them."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

import onnx

from onnxfuse.errors import OnnxfuseError
from onnxfuse.graph import canonicalize, shapes, view
from onnxfuse.graph import model as models
from onnxfuse.graph.ir import Node
from onnxfuse.graph.model import Model
from onnxfuse.match.attributes import equals, lookup
from onnxfuse.match.trace import Failure, Tracer
from onnxfuse.rewrite import driver
from onnxfuse.rules.loading import RuleSet
from onnxfuse.rules.patterns import AnyPattern, OpPattern, parts
from onnxfuse.rules.program import Program
from onnxfuse.ruletest import numeric
from onnxfuse.ruletest.cases import Case, cases, feeds, load, model_of


class Outcome(StrEnum):
    MATCHED = "matched"  # as wanted
    REJECTED = "rejected"  # as wanted
    MISSING = "missing"  # should match
    NOISY = "noisy"  # should not match
    WRONG_REASON = "wrong-reason"
    WRONG_RESULT = "wrong-result"  # not the expected nodes
    INACCURATE = "inaccurate"
    BROKEN = "broken"  # the case or the rewritten graph is not a valid model


@dataclass
class Result:
    case: Case
    outcome: Outcome
    message: str = ""
    choices: set[str] = field(default_factory=set)

    @property
    def passed(self) -> bool:
        return self.outcome in (Outcome.MATCHED, Outcome.REJECTED)


@dataclass
class RuleReport:
    """The results of a rule's cases, and the alternatives that none of them uses."""

    program: Program
    results: list[Result]
    untested: list[str]

    @property
    def passed(self) -> bool:
        return not self.untested and all(r.passed for r in self.results)


def run_rule(program: Program) -> RuleReport:
    """Run all cases of a rule. RuleError if the tests are malformed."""
    results = [run_case(case) for case in cases(program)]
    used = set().union(*(r.choices for r in results if r.case.positive)) if results else set()
    return RuleReport(program, results, [choice for choice in choices(program) if choice not in used])


def choices(program: Program) -> list[str]:
    """Every alternative, and both states of every optional node."""
    found: list[str] = []
    for pattern in {id(p): p for p in program.makers.values()}.values():
        if isinstance(pattern, AnyPattern):
            found += [alternative.id for alternative in pattern.alternatives]
        for part in parts(pattern):
            if isinstance(part, OpPattern) and part.optional:
                found += [f"{part.id}.optional: present", f"{part.id}.optional: absent"]
    return found


def run_case(case: Case) -> Result:
    """Run one case: apply the rule alone, then judge what happened; a positive case is also computed."""
    try:
        proto = model_of(case)
        model = _prepare(case, proto)
        tracer = Tracer()
        report = driver.run(
            model,
            RuleSet({case.program.id: case.program}),
            case.program.stage,
            case.target,
            tracer=tracer,
            inference=shapes.infer(model),
        )
    except OnnxfuseError as error:
        return Result(case, Outcome.BROKEN, str(error))
    chosen = {choice for rule, choice in tracer.choices if rule == case.program.id}
    if not case.positive:
        return _judge_refusal(case, report, tracer)
    if not report.applied:
        return Result(case, Outcome.MISSING, _why(furthest(case.program, report, tracer), case.program))
    wrong = _unexpected(case, report, model)
    if wrong is not None:
        return Result(case, Outcome.WRONG_RESULT, wrong, chosen)
    try:
        rewritten = model.to_proto()
        models.load(rewritten)
    except OnnxfuseError as error:
        return Result(case, Outcome.BROKEN, f"the rewritten graph: {error}", chosen)
    if case.given.numeric:
        wrong = inaccuracy(case, proto, rewritten)
        if wrong is not None:
            return Result(case, Outcome.INACCURATE, wrong, chosen)
    return Result(case, Outcome.MATCHED, "", chosen)


def _prepare(case: Case, proto: onnx.ModelProto) -> Model:
    model = load(proto, case.text)
    if case.canonicalize:
        canonicalize.run(model)
    return model


def _judge_refusal(case: Case, report: driver.Report, tracer: Tracer) -> Result:
    wanted = case.given.count
    if len(report.applied) != wanted:
        return Result(case, Outcome.NOISY, f"applied {len(report.applied)} times, not {wanted}")
    failures = furthest(case.program, report, tracer)
    if any(_is_prefix(case.given.because, failure.id) for failure in failures):
        return Result(case, Outcome.REJECTED)
    return Result(case, Outcome.WRONG_REASON, f"wanted {case.given.because}; {_why(failures, case.program)}")


def _is_prefix(prefix: str, check: str) -> bool:
    prefix = prefix.removesuffix(".")
    return check == prefix or (check.startswith(prefix) and check[len(prefix)] in ".[: ")


def furthest(program: Program, report: driver.Report, tracer: Tracer) -> list[Failure]:
    """The failures that got furthest over all roots: the first is the one to show, the others tie with it."""
    refused = [a for a in report.refused if a.rule == program.id]
    if refused:
        return [refused[0].failure]
    attempts = [a for a in tracer.attempts.values() if a.rule == program.id]
    if attempts:
        best = max(attempts, key=lambda a: (a.failure.phase, a.failure.passed))
        return [best.failure, *best.ties]
    return [tracer.gates[program.id]] if program.id in tracer.gates else []


def _why(failures: list[Failure], program: Program) -> str:
    if not failures:
        return f"no {' or '.join(op for _, op in sorted(program.roots))} in the graph"
    first = failures[0]
    also = f" (also {', '.join(f.id for f in failures[1:])})" if len(failures) > 1 else ""
    return f"{first.id}: {first.text()}{also}"


def _unexpected(case: Case, report: driver.Report, model: Model) -> str | None:
    expect = case.given.expect
    if len(report.applied) != expect.count:
        return f"applied {len(report.applied)} times, not {expect.count}"
    nodes = [n for graph in model.graphs() for n in graph.nodes]
    if expect.nodes is not None and len(nodes) != expect.nodes:
        return f"{len(nodes)} nodes ({', '.join(n.op for n in nodes)}), not {expect.nodes}"
    for op, count in expect.ops.items():
        have = sum(1 for n in nodes if op in (n.op, f"{view.domain(n)}::{n.op}"))
        if have != count:
            return f"{have} {op}, not {count}"
    made = [n for n in nodes if n.origin == case.program.id]
    if expect.op is not None:
        made = [n for n in made if n.op == expect.op and expect.domain in (None, view.domain(n))]
        if not made:
            return f"no {expect.op} was made, but {', '.join(n.op for n in nodes if n.origin) or 'nothing'}"
    for name, wanted in expect.attrs.items():
        found = [_attribute(n, name, case.opset) for n in made]
        if not any(equals(f, wanted) for f in found):
            return f"attribute {name} is {found[0] if found else 'missing'}, not {wanted}"
    return None


def _attribute(node: Node, name: str, opset: int) -> object:
    return lookup(node, name, opset)


def inaccuracy(case: Case, original: onnx.ModelProto, rewritten: onnx.ModelProto) -> str | None:
    """Compute both graphs and compare with the oracle; what is wrong, or None."""
    values = feeds(original, case.sizes)
    try:
        unfused = numeric.run(original, values)
        wanted = numeric.truth(original, values)
    except Exception as error:  # the evaluator raises anything
        return f"the case itself cannot be computed: {type(error).__name__}: {error}"
    try:
        fused = numeric.run(rewritten, values)
    except Exception as error:
        return f"the rewritten graph cannot be computed: {type(error).__name__}: {error}"
    for info, have, base, true in zip(original.graph.output, fused, unfused, wanted, strict=True):
        wrong = numeric.compare(have, base, true)
        if wrong is not None:
            return f"output `{info.name}`: {wrong}"
    return None
