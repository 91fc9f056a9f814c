"""A rule compiled to the form that matching walks: plain records with resolved names, ids and orders.

Everything that can be decided without a graph is decided here. The ``id`` of a record is its path in the rule file.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from onnxfuse.rules import spec

DOMAINS = {"std": "onnxfuse.std", "ms": "com.microsoft", "ai.onnx": ""}
COMMUTATIVE = frozenset({"Add", "Mul", "Max", "Min", "And", "Or", "Xor", "Equal", "Sum", "Mean"})
#: Operand kinds in the order in which they are tried: what fails soonest comes first.
NUMBER, LIST, ABSENT, VALUE, CAPTURE, ANY = "number", "list", "absent", "value", "capture", "any"
_ORDER = {ABSENT: 0, NUMBER: 0, LIST: 0, VALUE: 1, CAPTURE: 2, ANY: 4}

OpKey = tuple[str, str]


@dataclass(slots=True)
class Operand:
    kind: str
    id: str
    name: str = ""
    number: Any = None
    optional: bool = False
    rank: int = 0  # order of trying; lower first


@dataclass(slots=True)
class Checks:
    """Predicates on one value."""

    path: str
    dtype: str | None = None
    dtypes: tuple[str, ...] = ()
    rank: tuple[int, int] | None = None
    rank_text: Any = None
    shape: tuple[Any, ...] | None = None
    const: bool | None = None
    same_shape: str | None = None
    broadcastable: str | None = None

    @property
    def any_now(self) -> bool:
        """Whether anything is to be checked when the value is bound."""
        return bool(self.dtype or self.dtypes or self.rank or self.const is not None) or self.shape is not None


@dataclass(slots=True)
class Attr:
    """One attribute check. ``kind``: equal, one_of, not, capture, absent."""

    name: str
    kind: str
    value: Any
    id: str


@dataclass(slots=True)
class OpPattern:
    name: str
    id: str
    op: str
    domain: str
    operands: list[Operand]
    rest: bool
    commutes: bool
    attrs: list[Attr]
    out: list[str]
    optional: bool
    set: dict[str, Any]
    checks: Checks | None
    min_inputs: int = 0


@dataclass(slots=True)
class ChainPattern:
    name: str
    id: str
    op: str
    operands: list[Operand]
    set: dict[str, Any]
    checks: Checks | None


@dataclass(slots=True)
class SamePattern:
    name: str
    id: str
    other: str
    set: dict[str, Any]
    checks: Checks | None


@dataclass(slots=True)
class AnyPattern:
    name: str
    id: str
    alternatives: list[OpPattern | ChainPattern | SamePattern]
    checks: Checks | None


Pattern = OpPattern | ChainPattern | SamePattern | AnyPattern


@dataclass(slots=True)
class Program:
    """A compiled rule.

    Attributes:
        roots: the ops that the root's producer can be.
        required: ops that every match contains.
        inputs: checks of the leaf values.
        makers: value name → the pattern node that makes it (several names for several outputs).
        late: checks that need all values (same_shape, broadcastable).
    """

    spec: spec.Rule
    source: Any
    priority: int
    roots: frozenset[OpKey]
    required: frozenset[OpKey]
    inputs: dict[str, Checks]
    makers: dict[str, Pattern]
    late: list[Checks]
    opset: list[tuple[str, int]]
    depth: int
    extra_outputs: list[tuple[str, list[tuple[str, Pattern]]]] = field(default_factory=list)

    @property
    def id(self) -> str:
        return self.spec.id

    @property
    def stage(self) -> str:
        return self.spec.stage

    @property
    def outputs(self) -> list[str]:
        return self.spec.outputs

    def line(self, check: str) -> int | None:
        """The line in the rule file of a check's id, or of the nearest key above it."""
        return self.source.line(check)

    @property
    def file(self) -> str:
        return str(self.source.path)


def domain_of(short: str) -> str:
    return DOMAINS.get(short, short)


def compile_rule(rule: spec.Rule, source: Any) -> Program:
    """Compile a validated rule. Names are not checked here; ``lint`` does that."""
    makers: dict[str, Pattern] = {}
    late: list[Checks] = []
    for name, node in rule.nodes.items():
        pattern = _pattern(name, node, f"nodes.{name}", rule.inputs)
        for value in _values_made(name, pattern):
            makers[value] = pattern
    inputs = {name: _checks(given, f"inputs.{name}") for name, given in rule.inputs.items()}
    for name, pattern in makers.items():
        _rank_operands(pattern, makers)
        for part in parts(pattern):
            if part.checks is not None and (part.checks.same_shape or part.checks.broadcastable) and part.name == name:
                late.append(part.checks)
    for checks in inputs.values():
        if checks.same_shape or checks.broadcastable:
            late.append(checks)
    root = makers.get(rule.outputs[0])
    program = Program(
        spec=rule,
        source=source,
        priority=rule.priority if rule.priority is not None else _op_count(makers),
        roots=frozenset(_roots(rule.outputs[0], makers, set())),
        required=frozenset(_required(rule.outputs[0], makers, ())),
        inputs=inputs,
        makers=makers,
        late=late,
        opset=conditions(rule.opset) if rule.opset else [],
        depth=len(makers) + 4,
    )
    if root is not None:
        reached = set(_reached([rule.outputs[0]], makers))
        for output in rule.outputs[1:]:
            if output in makers and output not in reached:
                program.extra_outputs.append((output, _path_up(output, makers, reached)))
                reached |= set(_reached([output], makers))
    return program


def conditions(text: str) -> list[tuple[str, int]]:
    """``">=13,<24"`` → ``[(">=", 13), ("<", 24)]``; a bare number means equal."""
    found = []
    for part in text.split(","):
        sign, number = re.fullmatch(r"(>=|<=|==|<|>)?(\d+)", part.strip()).groups()  # type: ignore[union-attr]
        found.append((sign or "==", int(number)))
    return found


_SIGNS = {
    ">=": lambda a, b: a >= b,
    "<=": lambda a, b: a <= b,
    "==": lambda a, b: a == b,
    "<": lambda a, b: a < b,
    ">": lambda a, b: a > b,
}


def holds(number: int, wanted: list[tuple[str, int]]) -> bool:
    return all(_SIGNS[sign](number, bound) for sign, bound in wanted)


def parts(pattern: Pattern) -> Iterator[Pattern]:
    """The pattern itself and its alternatives."""
    yield pattern
    if isinstance(pattern, AnyPattern):
        yield from pattern.alternatives


def operands_of(pattern: Pattern) -> Iterator[Operand]:
    for part in parts(pattern):
        if isinstance(part, (OpPattern, ChainPattern)):
            yield from part.operands
        elif isinstance(part, SamePattern):
            yield Operand(VALUE, f"{part.id}.is", part.other)


def operand(value: Any, path: str) -> Operand:
    if isinstance(value, str):
        if value == "_":
            return Operand(ANY, path)
        if value == "absent":
            return Operand(ABSENT, path)
        if value.startswith("$"):
            return Operand(CAPTURE, path, value)
        return Operand(VALUE, path, value.rstrip("?"), optional=value.endswith("?"))
    if isinstance(value, list):
        return Operand(LIST, path, number=value)
    return Operand(NUMBER, path, number=value)


def _pattern(name: str, node: Any, path: str, inputs: dict[str, Any]) -> Pattern:
    if isinstance(node, spec.AnyOf):
        inner = [_pattern(name, leaf, f"{path}.any_of[{i}]", inputs) for i, leaf in enumerate(node.any_of)]
        return AnyPattern(name, path, inner, _checks(node, path, only_if_any=True))  # type: ignore[arg-type]
    checks = _checks(node, path, only_if_any=True)
    sets = {f"${key}": value for key, value in getattr(node, "set", {}).items()}
    if isinstance(node, spec.Same):
        return SamePattern(name, path, node.is_, sets, checks)
    if isinstance(node, spec.Chain):
        ops = [operand(v, f"{path}.of[{i}]") for i, v in enumerate(node.of)]
        return ChainPattern(name, path, node.chain, ops, sets, checks)
    given = list(node.in_)
    rest = bool(given) and given[-1] == "..."
    if rest:
        given.pop()
    ops = [operand(v, f"{path}.in[{i}]") for i, v in enumerate(given)]
    required = max((i + 1 for i, o in enumerate(ops) if not (o.optional or o.kind in (ABSENT, ANY))), default=0)
    return OpPattern(
        name=name,
        id=path,
        op=node.op,
        domain=domain_of(node.domain),
        operands=ops,
        rest=rest,
        commutes=node.op in COMMUTATIVE and not node.domain and not node.ordered and len(ops) == 2,
        attrs=[_attr(key, value, f"{path}.attrs.{key}") for key, value in node.attrs.items()],
        out=list(node.out) if node.out else [name],
        optional=node.optional,
        set=sets,
        checks=checks,
        min_inputs=required,
    )


def _attr(name: str, value: Any, path: str) -> Attr:
    if isinstance(value, str) and value.startswith("$"):
        return Attr(name, "capture", value, path)
    if value == "absent":
        return Attr(name, "absent", None, path)
    if isinstance(value, dict):
        kind, wanted = next(iter(value.items()), ("equal", None))
        return Attr(name, "one_of" if kind == "one_of" else "not", wanted, path)
    return Attr(name, "equal", value, path)


def _checks(given: spec.Predicates, path: str, only_if_any: bool = False) -> Any:
    if only_if_any and given.model_fields_set.isdisjoint(_PREDICATES):
        return None
    dtype, dtypes = (given.dtype, ()) if not isinstance(given.dtype, list) else (None, tuple(given.dtype))
    return Checks(
        path=path,
        dtype=dtype,
        dtypes=dtypes,
        rank=_rank_range(given.rank),
        rank_text=given.rank,
        shape=tuple(given.shape) if given.shape is not None else None,
        const=getattr(given, "const", None),
        same_shape=given.same_shape,
        broadcastable=given.broadcastable,
    )


_PREDICATES = {"dtype", "rank", "shape", "same_shape", "broadcastable"}


def _rank_range(text: int | str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    if isinstance(text, int):
        return text, text
    if ".." in text:
        low, high = text.split("..")
        return int(low), int(high)
    sign, number = re.fullmatch(r"(>=|<=|==|<|>)(\d+)", text).groups()  # type: ignore[union-attr]
    n = int(number)
    return {">=": (n, 99), "<=": (0, n), "==": (n, n), "<": (0, n - 1), ">": (n + 1, 99)}[sign]


def _values_made(name: str, pattern: Pattern) -> list[str]:
    if isinstance(pattern, OpPattern):
        return [v for v in pattern.out if v != "_"]
    return [name]


def _rank_operands(pattern: Pattern, makers: dict[str, Pattern]) -> None:
    for op in operands_of(pattern):
        op.rank = 3 if op.kind == VALUE and op.name not in makers else _ORDER[op.kind]


def _op_count(makers: dict[str, Pattern]) -> int:
    """Op nodes in the pattern, a node with alternatives counted once, a chain as its number of ops."""
    count = 0
    for pattern in {id(p): p for p in makers.values()}.values():
        sizes = [len(p.operands) - 1 if isinstance(p, ChainPattern) else int(isinstance(p, OpPattern)) for p in parts(pattern)]
        count += max(sizes)
    return count


def _roots(name: str, makers: dict[str, Pattern], seen: set[str]) -> Iterable[OpKey]:
    if name in seen or name not in makers:
        return
    seen.add(name)
    for part in parts(makers[name]):
        if isinstance(part, OpPattern):
            yield part.domain, part.op
            if part.optional and part.operands:
                yield from _roots(part.operands[0].name, makers, seen)
        elif isinstance(part, ChainPattern):
            yield "", part.op
        elif isinstance(part, SamePattern):
            yield from _roots(part.other, makers, seen)


def _required(name: str, makers: dict[str, Pattern], above: tuple[str, ...]) -> set[OpKey]:
    """Ops in every match of the value (a set that is too small only costs time)."""
    if name not in makers or name in above:
        return set()
    pattern, above = makers[name], (*above, name)
    if isinstance(pattern, AnyPattern):
        sets = [_required_of(part, makers, above) for part in pattern.alternatives]
        return set.intersection(*sets) if sets else set()
    return _required_of(pattern, makers, above)


def _required_of(part: Pattern, makers: dict[str, Pattern], above: tuple[str, ...]) -> set[OpKey]:
    if isinstance(part, SamePattern):
        return _required(part.other, makers, above)
    if isinstance(part, OpPattern):
        found = {(part.domain, part.op)}
        if part.optional:
            return _required(part.operands[0].name, makers, above)
    else:
        found = {("", part.op)}  # type: ignore[union-attr]
    for op in part.operands:  # type: ignore[union-attr]
        if op.kind == VALUE and not op.optional:
            found |= _required(op.name, makers, above)
    return found


def _reached(names: Iterable[str], makers: dict[str, Pattern]) -> Iterator[str]:
    seen: set[str] = set()
    stack = list(names)
    while stack:
        name = stack.pop()
        if name in seen:
            continue
        seen.add(name)
        yield name
        if name in makers:
            pattern = makers[name]
            if isinstance(pattern, OpPattern):
                stack.extend(v for v in pattern.out if v != "_")
            stack.extend(o.name for o in operands_of(pattern) if o.kind == VALUE)


def _path_up(output: str, makers: dict[str, Pattern], reached: set[str]) -> list[tuple[str, Pattern]]:
    """From a bound value to an output that the root does not reach: ``[(bound value, its reader), (…, output's maker)]``."""
    paths: list[list[tuple[str, Pattern]]] = [[]]
    frontier: list[tuple[str, list[tuple[str, Pattern]]]] = [(output, [])]
    while frontier:
        name, path = frontier.pop(0)
        pattern = makers.get(name)
        if pattern is None or len(path) > len(makers):
            continue
        for op in operands_of(pattern):
            if op.kind != VALUE:
                continue
            longer = [(op.name, pattern), *path]
            if op.name in reached:
                return longer
            frontier.append((op.name, longer))
    return paths[0]
