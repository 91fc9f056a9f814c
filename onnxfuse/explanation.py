"""Why rules did not fire: the furthest constraint that each of them reached, in the terms of its file.

The stages run as in `optimize`, by the same code; only what each attempt failed at is written down. Whatever is shown
was decided by the matcher itself.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onnx

from onnxfuse import pipeline
from onnxfuse.errors import UsageError
from onnxfuse.graph import view
from onnxfuse.graph.ir import Node, Value
from onnxfuse.graph.types import FLOATS
from onnxfuse.match.trace import Attempt, Failure, Kind, Phase, Tracer
from onnxfuse.rules import RuleSet
from onnxfuse.rules.program import Program

SCHEMA = 1

#: Failures of a constraint on an op that is there say more than the absence of an op.
_ABSENCES = frozenset({Kind.OP_MISMATCH, Kind.ARITY, Kind.VALUE_CONFLICT, Kind.NOT_CONST})
#: Failures that say: this op is part of the pattern, but for one number.
_CONTRADICTIONS = frozenset({Kind.ATTR, Kind.CONST_VALUE, Kind.CAPTURE, Kind.NOT_PRIVATE, Kind.GRAPH_OUTPUT})
_CONSTRAINT_BONUS = 4
_PHASE_BONUS = 3
#: An op that is not there, after fewer checks than this, is seldom a miss: many patterns begin alike.
_FAINT = 6
_PRODUCTS = frozenset({"MatMul", "Gemm"})
#: The same for tensors of another type.
_FAINT_TYPE = 4
_TYPE_FAILURES = frozenset({Kind.DIM_CONFLICT, Kind.SHAPE, Kind.RANK, Kind.DTYPE, Kind.UNKNOWN_TYPE})
#: A rule that fires elsewhere in the model is the one that was expected here.
_FIRES_ELSEWHERE_BONUS = 4
_ANY = 1_000_000  # more ops than any pattern has
_NAMES = re.compile(r"`[^`]*`")


@dataclass(frozen=True)
class Reason:
    """One failed check, in words: its id, its line in the rule file, what was expected and what was found."""

    check: str
    line: int | None
    kind: str
    expected: str
    found: str


@dataclass
class Miss:
    """Where a rule matched almost: equal ones are one, with a count.

    Attributes:
        rule, stage, file: the rule and its file.
        reason: the furthest check that failed.
        alternatives: checks of other alternatives that got equally far.
        node: the op and output of (the first) root.
        values: outputs of all roots.
        phase: how far it got: gate, structure, predicates, privacy, weights, apply.
        passed: checks that held before.
        bound: what the pattern's names stood for at that time.
        taken_by: the rule that rewrote the root instead, if any.
        score: how near it is (see `_score`).
        in_pieces: whether the root is an op as it was exported, not a lifted or fused one.
    """

    rule: str
    stage: str
    file: str
    reason: Reason
    alternatives: list[Reason]
    node: str
    values: list[str]
    phase: str
    passed: int
    bound: dict[str, str]
    taken_by: str | None = None
    count: int = 1
    score: int = 0
    in_pieces: bool = True

    def to_json(self) -> dict[str, Any]:
        own = dict(vars(self.reason))
        keys = ("node", "values", "count", "phase", "passed", "bound", "taken_by", "in_pieces")
        rest = {k: getattr(self, k) for k in keys}
        others = [vars(a) for a in self.alternatives]
        return {"rule": self.rule, "stage": self.stage, "file": self.file, **own, **rest, "alternatives": others}


@dataclass
class RuleOutcome:
    """What became of one rule. `gate` says why it was not tried at all."""

    rule: str
    stage: str
    matches: int = 0
    sites: list[str] = field(default_factory=list)
    misses: int = 0
    taken: int = 0
    gate: Reason | None = None


@dataclass
class Explanation:
    """Attributes:
    rules: one outcome for each rule, in order of stage and id.
    misses: nearest first.
    taken_apart: ops that the target has no kernel for, or does not gain from, with the reason.
    reverted: fusions that verification took back (only if it was asked for).
    """

    model: str
    target: str
    rules: list[RuleOutcome]
    misses: list[Miss]
    taken_apart: list[dict[str, Any]]
    reverted: list[dict[str, Any]] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "model": self.model,
            "target": self.target,
            "canonicalized": True,
            "rules": [{**vars(r), "gate": vars(r.gate) if r.gate else None} for r in self.rules],
            "misses": [m.to_json() for m in self.misses],
            "taken_apart": self.taken_apart,
            "reverted": self.reverted,
        }


def explain(
    model: str | os.PathLike[str] | onnx.ModelProto,
    options: pipeline.Options | None = None,
    *,
    rule: str | None = None,
    node: str | None = None,
    ruleset: RuleSet | None = None,
    progress: pipeline.Progress | None = None,
) -> Explanation:
    """Run the stages and say what stopped each rule.

    Args:
        model: a file, or a ModelProto.
        options: target, further rules, what is disabled.
        rule: only this rule; sites that another rule took are then listed too.
        node: only attempts that end at, or failed at, the node with this name or output.
        ruleset: rules that were loaded already.

    Raises:
        RuleError: no such rule.
        UsageError: no such node.
        OnnxfuseError: the model cannot be read.
    """
    options = options or pipeline.Options()
    ruleset = ruleset or pipeline.rule_set(options)
    if rule is not None:
        rule = ruleset.get(rule).id
    tracer = _Tracer(ruleset)
    built = pipeline.build(model, options, ruleset=ruleset, tracer=tracer, progress=progress)
    taken = {(a.stage, name): a.rule for a in built.applied for name in a.removed}
    # Ops of the largest pattern that took a node: a factor taken into weights does not make up for a GELU that was not
    # found, a smaller pattern of the same stage does.
    sizes = {rule_id: len(program.makers) for rule_id, program in ruleset.programs.items()}
    later: dict[tuple[str, str], int] = {}
    for a in built.applied:
        for name in a.removed:
            for stage in pipeline.STAGES:
                size = _ANY if stage == a.stage else sizes.get(a.rule, 0)
                later[stage, name] = max(later.get((stage, name), 0), size)
    misses = []
    inner = _inner_roots(tracer.records.values())
    enclosed = _enclosed(tracer.records.values(), later) if rule is None and node is None else {}
    for record in tracer.records.values():
        if node is None and (record.miss.rule, record.miss.values[0]) in inner:
            continue
        record.miss.taken_by = record.miss.taken_by or taken.get((record.miss.stage, record.miss.node))
        if rule is not None and record.miss.rule != rule:
            continue
        if node is not None and node not in record.names:
            continue
        made_up = later.get((record.miss.stage, record.miss.node), -1) >= record.size
        if rule is None and node is None and (record.quiet or made_up):
            continue  # asked about nothing in particular: only what is worth a look
        if enclosed.get(record.miss.values[0], 0) > record.size:
            continue
        misses.append(record.miss)
    fired = {a.rule for a in built.applied}
    for miss in misses:
        miss.score += _FIRES_ELSEWHERE_BONUS * (miss.rule in fired)
    folded = sorted(
        _fold(misses), key=lambda m: (bool(m.taken_by), not m.in_pieces, -m.score, -m.count, m.rule, m.node)
    )
    outcomes = _outcomes(ruleset, options, tracer, built.applied, folded, rule)
    if node is not None and not folded:
        _known(node, model, outcomes, built.applied)
    name = "" if isinstance(model, onnx.ModelProto) else os.fspath(model)
    lowering = built.lowering.get("taken_apart", [])
    return Explanation(name, str(options.target), outcomes, folded, lowering)


def _inner_roots(records: Iterable[_Record]) -> set[tuple[str, str]]:
    """Roots (rule, value) inside the site of another root, where a number or an attribute of an op that is there was
    wrong: what the inner root lacks is beside the point."""
    passed = {(r.miss.rule, r.miss.values[0]): r.miss.passed for r in records}
    return {
        (r.miss.rule, name)
        for r in records
        for name in r.inner
        if r.miss.reason.kind in _CONTRADICTIONS and passed.get((r.miss.rule, name), 0) <= r.miss.passed + 1
    }


def _enclosed(records: Iterable[_Record], rewritten: Mapping[tuple[str, str], int]) -> dict[str, int]:
    """Values inside the site of a pattern that lacks one number, attribute or reader, with the size of that pattern.

    What smaller patterns lack there is beside the point.
    """
    found: dict[str, int] = {}
    for record in records:
        if record.quiet or rewritten.get((record.miss.stage, record.miss.node), -1) >= record.size:
            continue
        if record.miss.reason.kind in _CONTRADICTIONS:
            for name in record.inner:
                found[name] = max(found.get(name, 0), record.size)
    return found


def _private_values_above(root: Node, depth: int) -> set[str]:
    """Values above a node that nothing else reads, at most `depth` nodes up."""
    found: set[str] = set()
    frontier = [root]
    for _ in range(depth):
        values = [v for n in frontier for v in n.inputs if v.inputs and len(view.consumers(v)) == 1]
        found |= {v.name for v in values}
        frontier = [v.inputs[0] for v in values]
    return found


@dataclass
class _Record:
    """A miss, with what it is found by. `names`: nodes and values it concerns; `quiet`: not worth showing unasked;
    `inner`: values that only the root depends on, as deep as the pattern; `reached`: how far it got; `size`: ops of the
    pattern."""

    miss: Miss
    names: frozenset[str]
    quiet: bool
    inner: frozenset[str]
    reached: tuple[int, int]
    size: int


class _Attempts(dict[tuple[str, Node], Attempt]):
    """Tells when an attempt is stored: its texts are made at once, as later rewrites may take its nodes away."""

    def __init__(self, tracer: _Tracer) -> None:
        super().__init__()
        self._tracer = tracer

    def __setitem__(self, key: tuple[str, Node], attempt: Attempt) -> None:
        super().__setitem__(key, attempt)
        self._tracer.store(key, attempt)

    def pop(self, key: tuple[str, Node], *default: Any) -> Any:
        self._tracer.records.pop(key, None)
        return super().pop(key, *default)


class _Tracer(Tracer):
    """Keeps what the null tracer forgets, as text."""

    def __init__(self, ruleset: RuleSet) -> None:
        super().__init__()
        self.attempts = _Attempts(self)
        self.records: dict[tuple[str, Node], _Record] = {}
        self.ruleset = ruleset

    def store(self, key: tuple[str, Node], attempt: Attempt) -> None:
        if not attempt.root.outputs:
            return
        program = self.ruleset.programs[attempt.rule]
        failure = attempt.failure
        miss = Miss(
            rule=program.id,
            stage=program.stage,
            file=file_of(program),
            reason=_reason(program, failure),
            alternatives=[_reason(program, tie) for tie in attempt.ties[:6]],
            node=view.describe(attempt.root),
            values=[v.name for v in attempt.root.outputs],
            phase=failure.phase.name.lower(),
            passed=failure.passed,
            bound=_bound(attempt.bound),
            taken_by=str(failure.found) if failure.kind is Kind.PREEMPTED else None,
            score=_score(attempt),
            in_pieces=attempt.root.origin is None and not view.domain(attempt.root).startswith("onnxfuse"),
        )
        best = self.records.get(key)
        if best is not None and best.reached >= (failure.phase, failure.passed):
            return  # later rewrites changed the surroundings; what stopped the rule is what it got furthest with
        names = {attempt.root.name, *miss.values}
        for other in failure.nodes:
            names |= {other.name, *(v.name for v in other.outputs)}
        names |= {v.name for v in failure.values if v is not None}
        names |= {v.name for v in attempt.bound.values() if isinstance(v, Value)}
        t = attempt.bound.get("T")
        faint = failure.kind in (Kind.OP_MISMATCH, Kind.ARITY) and failure.passed < _FAINT
        faint = faint or (failure.kind in _TYPE_FAILURES and failure.passed < _FAINT_TYPE)
        # Neither is a root of another shape: the rule is for other tensors.
        root = program.outputs[0]
        faint = faint or failure.id in {f"nodes.{root}.{predicate}" for predicate in ("dtype", "rank", "shape")}
        faint = faint or failure.kind is Kind.RANK
        # Nor is a root that takes another number, when little else has been found.
        faint = faint or (
            failure.kind is Kind.CONST_VALUE and failure.passed < _FAINT and failure.id.startswith(f"nodes.{root}.")
        )
        # Nor is an operand that another op makes, where a constant is wanted: gates and sums are everywhere.
        made = any(v is not None and v.inputs for v in failure.values)
        faint = faint or (failure.kind is Kind.NOT_CONST and made and failure.passed < 2 * _FAINT)
        if attempt.root.op in _PRODUCTS and failure.kind not in _ABSENCES and failure.phase > Phase.GATE:
            faint = False  # patterns of one node: few checks, and a product that is left over is always worth a look
        else:
            faint = faint or not attempt.is_near_miss
        quiet = faint or failure.kind is Kind.GROUP_SIZE
        quiet = quiet or (t is not None and t not in FLOATS)
        inner = frozenset(_private_values_above(attempt.root, len(program.makers)))
        reached = (failure.phase, failure.passed)
        self.records[key] = _Record(miss, frozenset(names - {""}), quiet, inner, reached, len(program.makers))


def _score(attempt: Attempt) -> int:
    """How near a miss is: checks that held, more for a constraint that failed on an op that is there, and for a search
    that got past the structure."""
    failure = attempt.failure
    score = failure.passed
    if failure.kind not in _ABSENCES:
        score += _CONSTRAINT_BONUS
    if failure.phase > Phase.STRUCTURE:
        score += _PHASE_BONUS
    return score


def _reason(program: Program, failure: Failure) -> Reason:
    where = ""
    if failure.nodes:
        where = " on " + ", ".join(view.describe(n) for n in failure.nodes[:3] if n.outputs)
    elif failure.values:
        where = " for " + ", ".join(f"`{v.name}`" for v in failure.values[:3] if v is not None)
    found = "nothing" if failure.found is None else str(failure.found)
    if where.strip() and any(f"`{v.name}`" in found for v in failure.values if v is not None):
        where = ""
    expected = "" if failure.expected is None else str(failure.expected)
    return Reason(failure.id, line_of(program, failure.id), str(failure.kind), expected, found + where)


def line_of(program: Program, check: str) -> int | None:
    """The line of a check. What the format implies without a key of its own (one value a name, privacy, a dim that is
    the same everywhere) is shown where the name is introduced."""
    head, _, name = check.partition(".")
    line = program.line(check)
    if line is None and head == "dims":
        line = next((program.line(place) for place in _places_of_dim(program, name)), None)
    if line is None and head in ("values", "private", "shared"):
        name = name.split(".")[0].split("[")[0]
        line = program.line(f"nodes.{name}") or program.line(f"inputs.{name}")
    return line


def _places_of_dim(program: Program, dim: str) -> Iterator[str]:
    """Where a rule's shapes name a dim."""
    for group, members in (("inputs", program.spec.inputs), ("nodes", program.spec.nodes)):
        for name, given in members.items():
            if dim in (given.shape or ()):
                yield f"{group}.{name}.shape"


def _bound(bound: Mapping[str, Any]) -> dict[str, str]:
    return {
        name: f"`{value.name}`" if isinstance(value, Value) else str(value)
        for name, value in bound.items()
        if value is not None
    }


def file_of(program: Program) -> str:
    """The rule's file as people write it: from `rules/` on for built-in ones, else relative to the working folder."""
    path = Path(program.file)
    parts = path.parts
    if "rules" in parts[-3:-1]:
        return str(Path(*parts[len(parts) - 1 - parts[::-1].index("rules") :]))
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def _fold(misses: Iterable[Miss]) -> list[Miss]:
    """Equal reasons of one rule become one miss; names inside backticks do not make a difference."""
    groups: dict[tuple[Any, ...], Miss] = {}
    for miss in misses:
        reason = miss.reason
        words = _NAMES.sub("", f"{reason.expected} / {reason.found}")
        key = (miss.rule, reason.check, reason.kind, words, miss.taken_by)
        first = groups.get(key)
        if first is None:
            groups[key] = miss
        else:
            first.count += 1
            first.values.extend(miss.values)
            first.score = max(first.score, miss.score)
    return list(groups.values())


def _outcomes(
    ruleset: RuleSet, options: pipeline.Options, tracer: _Tracer, applied: Iterable[Any], misses: list[Miss],
    rule: str | None,
) -> list[RuleOutcome]:  # fmt: skip
    order = {stage: i for i, stage in enumerate(pipeline.STAGES)}
    found = {
        p.id: RuleOutcome(p.id, p.stage)
        for p in sorted(ruleset, key=lambda p: (order.get(p.stage, 9), p.id))
        if rule in (None, p.id)
    }
    for item in applied:
        if item.rule in found:
            found[item.rule].matches += 1
            found[item.rule].sites.append(item.root)
    for miss in misses:
        if miss.taken_by:
            found[miss.rule].taken += miss.count
        else:
            found[miss.rule].misses += miss.count
    for rule_id, failure in tracer.gates.items():
        if rule_id in found and not found[rule_id].matches and not found[rule_id].misses:
            found[rule_id].gate = _reason(ruleset.programs[rule_id], failure)
    for rule_id in options.disable:
        if rule_id in found:
            found[rule_id].gate = Reason("disabled", None, "disabled", "", "disabled by the user")
    return list(found.values())


def _known(node: str, model: Any, outcomes: list[RuleOutcome], applied: Iterable[Any]) -> None:
    """Nothing failed at this node: that is fine if a rule took it, or if it exists at all."""
    for item in applied:
        if item.root == node or any(f"`{node}`" in name for name in item.removed):
            return
    proto = model if isinstance(model, onnx.ModelProto) else onnx.load(model, load_external_data=False)
    pipeline_names = {n.name for n in proto.graph.node} | {o for n in proto.graph.node for o in n.output}
    if node not in pipeline_names:
        pipeline.check_node_names(proto, [node])
        raise UsageError(f"the model has no node `{node}`")
