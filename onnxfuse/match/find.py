"""Matches: one rule at one root, or a group of siblings."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from onnxfuse.graph import view
from onnxfuse.graph.ir import Node, Value, is_empty
from onnxfuse.match.scope import Scope
from onnxfuse.match.search import Search
from onnxfuse.match.trace import Failure, Kind, Phase, Tracer
from onnxfuse.rules.patterns import OpKey
from onnxfuse.rules.program import Program


@dataclass(slots=True)
class Match:
    """Where a rule's pattern was found.

    Attributes:
        env: what every name stands for: values, ``$captures``, dims, element types.
        members: in a `siblings` rule, the environment of each member in topological order (`env` is the first one's).
        nodes: the matched nodes in topological order.
    """

    program: Program
    root: Node
    env: dict[Any, Any]
    nodes: list[Node]
    members: list[dict[Any, Any]] = field(default_factory=list)

    @property
    def rule(self) -> str:
        return self.program.id

    def node_of(self, name: str) -> Node | None:
        """The matched node of a pattern node, or None if it takes no part."""
        return next((key for key, bound in self.env.items() if bound == name and isinstance(key, Node)), None)

    def output_values(self) -> list[Value]:
        """The values that the rewrite makes anew."""
        envs = self.members or [self.env]
        return [env[name] for env in envs for name in self.program.outputs]


def find(
    program: Program, scope: Scope, root: Node, tracer: Tracer | None = None, search: Search | None = None
) -> Match | None:
    """Try a rule at a root; a failure goes to the tracer."""
    value = _root_value(program, root)
    if value is None:
        return None
    search = search or Search(program, scope, tracer)
    if tracer is not None:
        tracer.begin()
    matched = search.run(value)
    match: Match | None = None
    if matched:
        env = search.env
        match = Match(program, root, env, _nodes([env], scope))
        if program.spec.siblings is not None:
            match = _siblings(match, scope, search, tracer)
    if tracer is not None:
        tracer.end(program.id, root, match is not None)
        if match is not None:
            for env in match.members or [match.env]:
                tracer.choices.update((program.id, k[1]) for k in env if type(k) is tuple and k[0] == "choice")
    return match


def _root_value(program: Program, root: Node) -> Value | None:
    index = program.root_index
    return root.outputs[index] if index < len(root.outputs) and not is_empty(root.outputs[index]) else None


def is_hopeless(program: Program, key: OpKey, made_by: set[OpKey]) -> bool:
    """Whether a root of op `key`, whose operands are made by the given ops, cannot match: decided without a search."""
    for alternative in program.root_operands.get(key, ((),)):
        for wanted in alternative:
            if wanted.isdisjoint(made_by):
                break
        else:
            return False
    return True


def _nodes(envs: list[dict[Any, Any]], scope: Scope) -> list[Node]:
    found = {key for env in envs for key in env if isinstance(key, Node)}
    return sorted(found, key=scope.position.__getitem__)


def _siblings(first: Match, scope: Scope, search: Search, tracer: Tracer | None) -> Match | None:
    """Gather the group that a member belongs to."""
    program = first.program
    siblings = program.spec.siblings
    assert siblings is not None
    shared = {key: first.env[key] for key in _shared_keys(program, first.env)}
    members: list[dict[Any, Any]] = []
    taken: set[Node] = set()
    for candidate in _candidates(program, first, scope):
        value = _root_value(program, candidate)
        if value is None or candidate in taken:
            continue
        # A value that the pattern computes is compared afterwards: preset, its nodes would not be matched.
        if not search.run(value, {k: v for k, v in shared.items() if k not in program.makers}):
            continue
        env = search.env
        if any(env.get(name) is not shared[name] for name in shared if name in program.makers):
            continue
        nodes = {key for key in env if isinstance(key, Node)}
        if nodes & taken:
            continue
        taken |= nodes
        members.append(env)
        if len(members) == siblings.max:
            break
    members.sort(key=lambda env: min(scope.position[key] for key in env if isinstance(key, Node)))
    if len(members) < siblings.min:
        if tracer is not None:
            tracer.fail(
                Failure(
                    "siblings",
                    Kind.GROUP_SIZE,
                    f"at least {siblings.min} siblings",
                    len(members),
                    (first.root,),
                    phase=Phase.APPLY,
                )
            )
        return None
    root = members[0][program.outputs[0]].inputs[0]
    return Match(program, root, members[0], _nodes(members, scope), members)


def _shared_keys(program: Program, env: dict[Any, Any]) -> list[Any]:
    siblings = program.spec.siblings
    assert siblings is not None
    keys: list[Any] = [name for name in siblings.share if name in env]
    for name in siblings.share:
        given = program.inputs.get(name)
        if given is not None and given.shape is not None:
            keys += [d for d in given.shape if isinstance(d, str) and d in env]
    keys += [t for t in ("T", "U", "V") if t in env]
    return list(dict.fromkeys(keys))


def _candidates(program: Program, first: Match, scope: Scope) -> list[Node]:
    """Roots that may be members: readers of the first shared value, or what they lead to."""
    siblings = program.spec.siblings
    assert siblings is not None
    shared = next(first.env[n] for n in siblings.share if n in program.inputs and n in first.env)
    frontier = [node for node in view.consumers(shared) if node in scope.position]
    found: dict[Node, None] = {}
    for _ in range(program.depth):
        for node in frontier:
            if (view.domain(node), node.op) in program.roots:
                found[node] = None
        if len(program.makers) == 1:
            break
        frontier = list(
            dict.fromkeys(r for n in frontier for v in n.outputs for r in view.consumers(v) if r in scope.position)
        )
        if len(frontier) > 256:
            break
    return sorted(found, key=scope.position.__getitem__)
