"""The checks that need no search: predicates on a value, and what must hold once everything is bound."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from onnxfuse.graph import view
from onnxfuse.graph.ir import Constant, Node, Value
from onnxfuse.match import predicates as named
from onnxfuse.match.attributes import equals
from onnxfuse.match.trace import Kind, Phase
from onnxfuse.match.typing import broadcasts_to, dtype_of, is_multiple, same_dim, same_shape, shape_of, show
from onnxfuse.rules.patterns import Checks
from onnxfuse.rules.program import conditions, holds

if TYPE_CHECKING:
    from onnxfuse.match.search import Search

TYPE_VARIABLES = ("T", "U", "V")


def predicates(search: Search, wanted: Checks, value: Value) -> bool:
    """The predicates that can be decided as soon as the value is known."""
    if wanted.const is not None and isinstance(value, Constant) is not wanted.const:
        found = f"`{value.name}`, " + ("a constant" if isinstance(value, Constant) else _maker(value))
        return search.fail(
            f"{wanted.path}.const",
            Kind.NOT_CONST,
            "an initializer" if wanted.const else "no constant",
            found,
            value=value,
        )
    if (wanted.dtype is not None or wanted.dtypes) and not _dtype(search, wanted, value):
        return False
    if wanted.rank is not None or wanted.shape is not None:
        shape = shape_of(value)
        key = f"{wanted.path}.{'rank' if wanted.rank is not None else 'shape'}"
        if shape is None:
            return search.fail(
                key, Kind.UNKNOWN_TYPE, wanted.rank_text or list(wanted.shape or ()), "an unknown rank", value=value
            )
        if wanted.rank is not None and not wanted.rank[0] <= len(shape) <= wanted.rank[1]:
            return search.fail(key, Kind.RANK, f"rank {wanted.rank_text}", len(shape), value=value)
        if wanted.shape is not None and not _shape(search, wanted, value, shape):
            return False
    search.passed += 1
    return True


def _maker(value: Value) -> str:
    if not value.inputs:
        return "a graph input"
    node = value.inputs[0]
    return f"made by {node.op}({', '.join(v.name for v in node.inputs)})"


def _dtype(search: Search, wanted: Checks, value: Value) -> bool:
    found = dtype_of(value)
    key = f"{wanted.path}.dtype"
    if found is None:
        return search.fail(
            key, Kind.UNKNOWN_TYPE, wanted.dtype or " or ".join(wanted.dtypes), "an unknown dtype", value=value
        )
    if wanted.dtypes:
        return found in wanted.dtypes or search.fail(key, Kind.DTYPE, " or ".join(wanted.dtypes), found, value=value)
    name = wanted.dtype
    if name in TYPE_VARIABLES:
        bound = search.env.get(name)
        if bound is None:
            search.bind(name, found)
        elif bound != found:
            return search.fail(key, Kind.DTYPE, f"{name} = {bound}", found, value=value)
        return True
    return found == name or search.fail(key, Kind.DTYPE, name, found, value=value)


def _shape(search: Search, wanted: Checks, value: Value, shape: tuple[Any, ...]) -> bool:
    pattern = wanted.shape
    assert pattern is not None
    key = f"{wanted.path}.shape"
    head = pattern[0] if pattern else None
    if head in ("...", "1..."):
        tail = pattern[1:]
        extra = len(shape) - len(tail)
        if extra < 0 or (head == "1..." and any(not (isinstance(d, int) and d == 1) for d in shape[:extra])):
            return search.fail(key, Kind.SHAPE, list(pattern), show(shape), value=value)
        shape = shape[extra:]
        pattern = tail
    elif len(shape) != len(pattern):
        return search.fail(key, Kind.SHAPE, list(pattern), show(shape), value=value)
    for want, found in zip(pattern, shape, strict=True):
        if want == "_":
            continue
        if isinstance(want, int):
            if not (isinstance(found, int) and found == want):
                return search.fail(key, Kind.SHAPE, list(wanted.shape or ()), show(shape_of(value)), value=value)
        elif found is None:
            return search.fail(f"dims.{want}", Kind.UNKNOWN_TYPE, want, "an unknown size", value=value)
        elif want not in search.env:
            search.bind(want, found)
            if search.tracer is not None and ("from", want) not in search.env:
                search.bind(("from", want), value.name)
        elif not same_dim(search.env[want], found):
            first = search.env.get(("from", want))
            bound = f"{want} = {search.env[want]}" + (f" (from `{first}`)" if first else "")
            return search.fail(f"dims.{want}", Kind.DIM_CONFLICT, bound, f"{found} (from `{value.name}`)", value=value)
    return True


def all_bound(search: Search) -> bool:
    """Limits, relations between shapes, target, privacy, and last (they may be costly) the named predicates."""
    search.phase = Phase.PREDICATES
    return _limits(search) and _late(search) and _element_type(search) and private(search) and _where(search)


def _limits(search: Search) -> bool:
    rule = search.program.spec
    env = search.env
    for name, limit in rule.captures.items():
        if f"${name}" not in env:
            continue
        found = env[f"${name}"]
        if limit.range is not None and not (
            isinstance(found, (int, float)) and limit.range[0] <= found <= limit.range[1]
        ):
            return search.fail(
                f"captures.{name}.range", Kind.CAPTURE, f"{limit.range[0]:g} to {limit.range[1]:g}", found
            )
        if limit.one_of is not None and not any(equals(found, option) for option in limit.one_of):
            return search.fail(f"captures.{name}.one_of", Kind.CAPTURE, limit.one_of, found)
        search.passed += 1
    for name, bound in rule.dims.items():
        if name not in env:
            continue
        size = env[name]
        if bound.multiple_of is not None and is_multiple(size, bound.multiple_of) is not True:
            return search.fail(f"dims.{name}.multiple_of", Kind.DIM_LIMIT, f"a multiple of {bound.multiple_of}", size)
        if bound.min is not None and not (isinstance(size, int) and size >= bound.min):
            return search.fail(f"dims.{name}.min", Kind.DIM_LIMIT, f"at least {bound.min}", size)
        if bound.max is not None and not (isinstance(size, int) and size <= bound.max):
            return search.fail(f"dims.{name}.max", Kind.DIM_LIMIT, f"at most {bound.max}", size)
        search.passed += 1
    return True


def _late(search: Search) -> bool:
    for wanted in search.program.late:
        name = wanted.path.split(".")[1]
        value = search.env.get(name)
        if value is None:
            continue
        for key, relation in (("same_shape", same_shape), ("broadcastable", broadcasts_to)):
            other_name = getattr(wanted, key)
            other = search.env.get(other_name) if other_name else None
            if other is None:
                continue
            shape, goal = shape_of(value), shape_of(other)
            if not relation(shape, goal):
                unknown = shape is None or goal is None
                return search.fail(
                    f"{wanted.path}.{key}",
                    Kind.UNKNOWN_TYPE if unknown else Kind.SHAPE,
                    f"{show(goal)} of `{other.name}`",
                    show(shape),
                    value=value,
                )
            search.passed += 1
    return True


def _where(search: Search) -> bool:
    search.phase = Phase.RELATIONS
    env = search.env
    for index, where in enumerate(search.program.spec.where):
        function = named.REGISTRY[where.fn]
        arguments = [env.get(item) if isinstance(item, str) else item for item in where.of]
        outcome = function(search.scope, *arguments, **where.with_)
        if isinstance(outcome, named.Refused):
            node = outcome.node
            return search.fail(f"where[{index}]", Kind.PREDICATE, outcome.expected, outcome.found, node)
        for capture, result in where.set.items():
            search.bind(f"${capture}", outcome[result])
        search.passed += 1
    return _limits(search) if any(where.set for where in search.program.spec.where) else True


def _element_type(search: Search) -> bool:
    targets = search.program.spec.targets
    if targets is None:
        return True
    provider = search.scope.target.provider
    limit = targets.get(provider)  # type: ignore[call-overload]
    dtype = search.env.get("T")
    if limit is not None and limit.T is not None and dtype is not None and dtype not in limit.T:
        return search.fail(f"targets.{provider}.T", Kind.TARGET, " or ".join(limit.T), dtype)
    search.passed += 1
    return True


def gate(search_program: Any, scope: Any) -> tuple[str, Kind, Any, Any] | None:
    """The first reason why a rule cannot match anywhere in this graph, or None: (id, kind, expected, found)."""
    rule = search_program.spec
    if search_program.opset and not holds(scope.opset, search_program.opset):
        return "opset", Kind.OPSET, rule.opset, scope.opset
    if rule.targets is not None:
        provider = scope.target.provider
        if provider not in rule.targets:
            return f"targets.{provider}", Kind.TARGET, " or ".join(rule.targets), provider
        limit = rule.targets[provider]
        if limit.sm is not None and scope.target.sm is not None and not holds(scope.target.sm, conditions(limit.sm)):
            return f"targets.{provider}.sm", Kind.TARGET, limit.sm, f"sm{scope.target.sm}"
    for domain, op in search_program.required:
        if (domain, op) not in scope.ops:
            return "nodes", Kind.OP_MISMATCH, f"{domain}::{op}" if domain else op, "none in the graph"
    return None


def private(search: Search) -> bool:
    """No interior value is visible outside of the match, unless the rule allows it; no matched node is excluded."""
    search.phase = Phase.PRIVACY
    env, scope = search.env, search.scope
    rule = search.program.spec
    kept = {id(env[name]) for name in rule.outputs if env.get(name) is not None}
    for node in [key for key in env if isinstance(key, Node)]:
        if scope.exclude_nodes and (
            node.name in scope.exclude_nodes or any(v.name in scope.exclude_nodes for v in node.outputs)
        ):
            return search.fail(f"nodes.{env[node]}", Kind.EXCLUDED, "no excluded node", view.describe(node), node)
        for value in node.outputs:
            if id(value) not in kept and not _hidden(search, value, env[node]):
                return False
    return True


def _hidden(search: Search, value: Value, pattern_name: str) -> bool:
    env, scope = search.env, search.scope
    outside = [reader for reader in value.outputs if reader not in env]
    is_output = scope.is_output(value)
    if not outside and not is_output:
        search.passed += 1
        return True
    name = pattern_name
    if env.get(name) is not value:
        name = next((n for n, bound in env.items() if bound is value and type(n) is str), pattern_name)
    # An absent optional node shares its value with its operand; the name that may be shared counts.
    allowed = next(
        (
            search.program.spec.shared[n]
            for n, bound in env.items()
            if bound is value and type(n) is str and n in search.program.spec.shared
        ),
        None,
    )
    if allowed == "any":
        return True
    if is_output:
        return search.fail(
            f"private.{name}", Kind.GRAPH_OUTPUT, "an interior value", f"graph output `{value.name}`", value=value
        )
    for reader in outside:
        if reader not in scope.position:
            return search.fail(
                f"private.{name}",
                Kind.CAPTURED_BY_SUBGRAPH,
                "no reader outside of the match",
                f"{view.describe(reader)} in a subgraph",
                reader,
                value,
            )
        if allowed is None or reader.op not in allowed:
            wanted = (
                "no reader outside of the match"
                if allowed is None
                else f"only {' or '.join(allowed)} outside of the match"
            )
            return search.fail(f"private.{name}", Kind.NOT_PRIVATE, wanted, view.describe(reader), reader, value)
    search.passed += 1
    return True
