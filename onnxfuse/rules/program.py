"""A rule compiled to the form that matching walks. Everything that can be decided without a graph is decided here."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from onnxfuse.rules import spec
from onnxfuse.rules.patterns import (
    ABSENT,
    ANY,
    CAPTURE,
    LIST,
    NUMBER,
    VALUE,
    AnyPattern,
    Attr,
    ChainPattern,
    Checks,
    Operand,
    OpKey,
    OpPattern,
    Pattern,
    SamePattern,
    operands_of,
    parts,
)
from onnxfuse.rules.reach import Operands, path_up, reached_values, required, root_operands, roots

DOMAINS = {"std": "onnxfuse.std", "ms": "com.microsoft", "ai.onnx": ""}
COMMUTATIVE = frozenset({"Add", "Mul", "Max", "Min", "And", "Or", "Xor", "Equal", "Sum", "Mean"})
#: The order in which operands are tried: what fails soonest comes first.
_ORDER = {ABSENT: 0, NUMBER: 0, LIST: 0, VALUE: 1, CAPTURE: 2, ANY: 4}


@dataclass(slots=True)
class Program:
    """A compiled rule.

    Attributes:
        roots: the ops that the root's producer can be.
        root_operands: for each of them, what its operands must be made by.
        root_index: which output of the root node the first output is.
        required: ops that every match contains.
        inputs: checks of the leaf values.
        makers: value name → the pattern node that makes it (several names for several outputs).
        late: checks that need all values (same_shape, broadcastable).
    """

    spec: spec.Rule
    source: Any
    priority: int
    roots: frozenset[OpKey]
    root_operands: dict[OpKey, list[Operands]]
    root_index: int
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
        roots=frozenset(roots(rule.outputs[0], makers, set())),
        root_operands=root_operands(rule.outputs[0], makers),
        root_index=root.out.index(rule.outputs[0]) if isinstance(root, OpPattern) else 0,
        required=frozenset(required(rule.outputs[0], makers, ())),
        inputs=inputs,
        makers=makers,
        late=late,
        opset=conditions(rule.opset) if rule.opset else [],
        depth=len(makers) + 4,
    )
    if root is not None:
        reached = set(reached_values([rule.outputs[0]], makers))
        for output in rule.outputs[1:]:
            if output in makers and output not in reached:
                program.extra_outputs.append((output, path_up(output, makers, reached)))
                reached |= set(reached_values([output], makers))
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
        sizes = [
            len(p.operands) - 1 if isinstance(p, ChainPattern) else int(isinstance(p, OpPattern))
            for p in parts(pattern)
        ]
        count += max(sizes)
    return count
