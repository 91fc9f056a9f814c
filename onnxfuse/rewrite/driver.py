"""The rewrite driver: passes over every graph until no rule applies.

In each pass all matches are found first. Where they overlap, the higher priority wins, then the rule's id, then the
earlier root; a match that was found before another one changed its surroundings is looked for again. Later passes only
look at roots that a change can have reached.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from onnxfuse.errors import RewriteError
from onnxfuse.graph import edit, shapes, view
from onnxfuse.graph.ir import Graph, Node, Value
from onnxfuse.graph.model import Model
from onnxfuse.match import checks
from onnxfuse.match.find import Match, find, is_hopeless
from onnxfuse.match.scope import Scope, Target
from onnxfuse.match.search import Search
from onnxfuse.match.trace import Attempt, Failure, Phase, Tracer
from onnxfuse.rewrite.apply import Refused, build, commit
from onnxfuse.rewrite.vocabulary import vocabulary
from onnxfuse.rules.lint import require_functions
from onnxfuse.rules.loading import RuleSet
from onnxfuse.rules.patterns import OpKey
from onnxfuse.rules.program import Program

#: Rules that keep undoing each other are a defect; no real graph comes near this many applications per node.
APPLICATIONS_PER_NODE = 20


@dataclass(frozen=True)
class Applied:
    """One application of a rule. `root` is the name of the first output value."""

    rule: str
    stage: str
    root: str
    removed: tuple[str, ...]
    added: tuple[str, ...]


@dataclass
class Report:
    """What a run did.

    Attributes:
        refused: matches that would have been wrong or wasteful to apply (a shared big weight, a changed shape).
        passes: passes over all graphs together.
    """

    applied: list[Applied] = field(default_factory=list)
    refused: list[Attempt] = field(default_factory=list)
    passes: int = 0

    def counts(self) -> dict[str, int]:
        """Applications by rule id."""
        found: dict[str, int] = {}
        for item in self.applied:
            found[item.rule] = found.get(item.rule, 0) + 1
        return found


def run(
    model: Model,
    ruleset: RuleSet,
    stage: str,
    target: Target | str = "cpu",
    *,
    disable: Iterable[str] = (),
    exclude_nodes: Iterable[str] = (),
    exclude_sites: Iterable[tuple[str, str]] = (),
    tracer: Tracer | None = None,
    inference: shapes.Inference | None = None,
) -> Report:
    """Apply the rules of a stage to every graph of a model (main graph, subgraphs, function bodies), in place.

    Args:
        model: a canonical model whose shapes are inferred (see `inference`).
        disable: ids of rules to leave out.
        exclude_nodes: names of nodes (or of their outputs) that no match may contain.
        exclude_sites: (rule, name of the first output) of single applications to leave out.
        tracer: records why rules did not apply.
        inference: the engine that inferred the model's shapes; made (and run) here if not given.

    Raises:
        RuleError: an id in `disable` is unknown.
        RewriteError: the rules do not come to an end.
    """
    off = {ruleset.get(rule_id).id for rule_id in disable}
    programs = [p for p in ruleset.stage(stage) if p.id not in off]
    known = vocabulary()
    for program in programs:
        require_functions(program, known)
    if isinstance(target, str):
        target = Target.parse(target)
    if inference is None:
        inference = shapes.infer(model)
    report = Report()
    for graph in list(model.graphs()):
        _Pass(
            model,
            graph,
            programs,
            target,
            frozenset(exclude_nodes),
            frozenset(exclude_sites),
            tracer,
            inference,
            report,
        ).run()
    return report


class _Pass:
    """The passes over one graph."""

    def __init__(
        self,
        model: Model,
        graph: Graph,
        programs: list[Program],
        target: Target,
        exclude_nodes: frozenset[str],
        exclude_sites: frozenset[tuple[str, str]],
        tracer: Tracer | None,
        inference: shapes.Inference,
        report: Report,
    ) -> None:
        self.scope = Scope.of(model, graph, target, exclude_nodes)
        self.graph = graph
        self.exclude_sites = exclude_sites
        self.programs = programs
        self.tracer = tracer
        self.inference = inference
        self.report = report
        self.searches: dict[str, Search] = {}
        self.refused: dict[tuple[str, Node], Attempt] = {}
        self.limit = APPLICATIONS_PER_NODE * len(graph.nodes) + 100

    def run(self) -> None:
        self.passes()
        # A refusal stands if it was not overcome later (the other reader of a weight may have gone).
        self.scope.refresh()
        self.report.refused += [a for a in self.refused.values() if a.root in self.scope.position]

    def passes(self) -> None:
        dirty: set[Node] | None = None
        applied_at_start = len(self.report.applied)
        while True:
            self.report.passes += 1
            index = self.index()
            if not index:
                return
            matches = self.matches(index, dirty)
            before = len(self.report.applied)
            touched = self.apply(matches)
            if len(self.report.applied) == before:
                return
            if len(self.report.applied) - applied_at_start > self.limit:
                last = sorted({a.rule for a in self.report.applied[-20:]})
                raise RewriteError(
                    f"the rules {', '.join(f'`{r}`' for r in last)} keep undoing each other",
                    hint="disable one of them with --disable",
                )
            self.scope.refresh()
            # What was refused is tried again: a reason may go far away, as with readers of one weight.
            dirty = self.reached(touched) | {root for _, root in self.refused}

    def index(self) -> dict[OpKey, list[Program]]:
        """Rules that may match in this graph, by root op, best first."""
        found: dict[OpKey, list[Program]] = {}
        for program in self.programs:
            closed = checks.gate(program, self.scope)
            if closed is not None:
                if self.tracer is not None:
                    check, kind, expected, saw = closed
                    self.tracer.gate(program.id, Failure(check, kind, expected, saw, phase=Phase.GATE))
                # A missing op is better explained by the place where it was looked for.
                if self.tracer is None or check != "nodes":
                    continue
            for key in program.roots:
                if key in self.scope.ops:
                    found.setdefault(key, []).append(program)
        for programs in found.values():
            programs.sort(key=lambda p: (-p.priority, p.id))
        return found

    def search(self, program: Program) -> Search:
        search = self.searches.get(program.id)
        if search is None:
            search = self.searches[program.id] = Search(program, self.scope, self.tracer)
        return search

    def matches(self, index: dict[OpKey, list[Program]], dirty: set[Node] | None) -> list[Match]:
        """All matches of this pass, in the order in which they are to be applied."""
        found: list[tuple[int, str, int, Match]] = []
        grouped: set[tuple[str, Node]] = set()
        for position, node in enumerate(self.graph.nodes):
            key = (view.domain(node), node.op)
            programs = index.get(key)
            if programs is None:
                continue
            made_by = {(view.domain(v.inputs[0]), v.inputs[0].op) for v in node.inputs if v.inputs}
            for program in programs:
                if dirty is not None and node not in dirty and not program.extra_outputs:
                    continue
                if self.tracer is None and is_hopeless(program, key, made_by):
                    continue
                if (program.id, node) in grouped:
                    continue
                match = find(program, self.scope, node, self.tracer, self.search(program))
                if match is None or (match.rule, match.output_values()[0].name) in self.exclude_sites:
                    continue
                found.append((-program.priority, program.id, position, match))
                if match.members:
                    for member in match.members:
                        grouped.add((program.id, member[program.outputs[0]].inputs[0]))
        found.sort(key=lambda item: item[:3])
        return [item[3] for item in found]

    def apply(self, matches: list[Match]) -> set[Node]:
        """Apply what still holds; returns the nodes that are new or whose readers changed."""
        touched: set[Node] = set()
        taken: dict[Node, str] = {}
        changed: set[int] = set()
        inserted: dict[Node, list[Node]] = {}
        gone: set[Node] = set()
        several = False
        deferred: set[Node] = set()
        top = matches[0].program.priority if matches else 0
        for match in matches:
            by = next((taken[n] for n in match.nodes if n in taken), None)
            if by is not None or match.root in gone:
                if self.tracer is not None:
                    self.tracer.preempted(match.rule, match.root, by or "another rule", match.nodes)
                continue
            if changed and not changed.isdisjoint(self.surroundings(match)):
                if match.program.priority < top:
                    # A better rule may match what the change has made: in the next pass it is asked first.
                    deferred.add(match.root)
                    changed |= self.surroundings(match)
                    continue
                again = find(match.program, self.scope, match.root, self.tracer, self.search(match.program))
                if again is None or any(n in taken for n in again.nodes):
                    continue
                if (again.rule, again.output_values()[0].name) in self.exclude_sites:
                    continue
                match = again
            try:
                built = build(match, self.scope, self.inference)
            except Refused as refusal:
                self.refuse(match, refusal.failure)
                continue
            outputs = match.output_values()
            before = {id(v) for node in match.nodes for v in (*node.inputs, *node.outputs)}
            sources: list[Value] = [v for node in match.nodes for v in node.inputs]
            removed_names = tuple(view.describe(n) for n in match.nodes)
            self.refused.pop((match.rule, match.root), None)
            dead = commit(built, self.scope)
            self.report.applied.append(
                Applied(
                    match.rule,
                    match.program.stage,
                    outputs[0].name,
                    tuple(name for node, name in zip(match.nodes, removed_names, strict=True) if node in set(dead)),
                    tuple(view.describe(n) for n in built.nodes),
                )
            )
            if self.tracer is not None:
                self.tracer.applied.append((match.rule, match.root))
            for node in match.nodes:
                taken[node] = match.rule
            gone.update(dead)
            inserted.setdefault(match.root, []).extend(built.nodes)
            several = several or len(outputs) > 1
            changed |= before | {id(v) for node in built.nodes for v in (*node.inputs, *node.outputs)}
            touched.update(built.nodes)
            touched.update(v.inputs[0] for v in sources if v.inputs)
            for output in outputs:
                touched.update(view.consumers(output))
        if gone or inserted:
            self.rebuild(inserted, gone, several)
        return (touched | deferred) - gone

    @staticmethod
    def surroundings(match: Match) -> set[int]:
        return {id(v) for node in match.nodes for v in (*node.inputs, *node.outputs)}

    def rebuild(self, inserted: dict[Node, list[Node]], gone: set[Node], several: bool) -> None:
        ordered: list[Node] = []
        present = set(self.graph.nodes)
        for node in self.graph.nodes:
            ordered.extend(inserted.pop(node, ()))
            if node not in gone:
                ordered.append(node)
        for nodes in inserted.values():
            ordered.extend(n for n in nodes if n not in present)
        self.graph.nodes[:] = ordered
        if several:
            edit.sort(self.graph)

    def refuse(self, match: Match, failure: Failure) -> None:
        attempt = Attempt(match.rule, match.root, failure)
        self.refused[match.rule, match.root] = attempt
        if self.tracer is not None:
            self.tracer.attempts[match.rule, match.root] = attempt

    def reached(self, touched: set[Node]) -> set[Node]:
        """The nodes that are downstream of a change, as far as a pattern can reach."""
        depth = max((p.depth for p in self.programs), default=0)
        seen = {n for n in touched if n in self.scope.position}
        frontier = seen
        for _ in range(depth):
            frontier = {r for n in frontier for v in n.outputs for r in v.outputs if r in self.scope.position} - seen
            if not frontier:
                break
            seen |= frontier
        return seen
