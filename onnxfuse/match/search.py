"""Backtracking search for one rule at one root.

The search keeps an *agenda*, a linked list of steps still to be done. A step either fails, or succeeds and gives the
rest of the agenda, or (where there is a choice) solves the rest itself once per choice. Bindings are undone from a
trail. One environment holds everything bound: values by name, captures by ``$name``, dims and element types by their
upper-case names, and graph nodes (node → name of the pattern node).
"""

from __future__ import annotations

from typing import Any

from onnxfuse.graph import consts, view
from onnxfuse.graph.ir import Constant, Node, Value, is_empty
from onnxfuse.match import checks
from onnxfuse.match.attributes import DYNAMIC, MISSING, equals, lookup, normalized
from onnxfuse.match.chains import trees
from onnxfuse.match.scope import Scope
from onnxfuse.match.trace import Failure, Kind, Phase, Tracer
from onnxfuse.match.wording import named, op_names, origin, wanted_constant
from onnxfuse.rules.patterns import (
    ABSENT,
    ANY,
    LIST,
    NUMBER,
    VALUE,
    AnyPattern,
    Attr,
    ChainPattern,
    Operand,
    OpPattern,
    Pattern,
    SamePattern,
)
from onnxfuse.rules.program import Program

#: A search that takes more steps is given up: no real pattern needs a tenth of it.
STEP_LIMIT = 50_000

_UNBOUND = object()

#: (step, first argument, second argument, rest); None is the empty agenda.
Agenda = tuple[Any, Any, Any, Any] | None


class Search:
    """One attempt; reuse for many roots by calling `run` again."""

    def __init__(self, program: Program, scope: Scope, tracer: Tracer | None) -> None:
        self.program = program
        self.scope = scope
        self.tracer = tracer
        self.makers = program.makers
        self.env: dict[Any, Any] = {}
        self.trail: list[tuple[Any, Any]] = []
        self.passed = 0
        self.steps = 0
        self.phase = Phase.STRUCTURE

    def run(self, root: Value, preset: dict[Any, Any] | None = None) -> bool:
        """Whether the rule's pattern matches with its first output at `root`; the bindings are then in `env`."""
        self.env = dict(preset) if preset else {}
        self.trail = []
        self.passed = self.steps = 0
        self.phase = Phase.STRUCTURE
        agenda: Agenda = (Search.finish, None, None, None)
        for index in range(len(self.program.extra_outputs) - 1, -1, -1):
            agenda = (Search.find_output, self.program.extra_outputs[index], 0, agenda)
        return self.solve((Search.value, self.program.outputs[0], root, agenda))

    def solve(self, agenda: Any) -> bool:
        while agenda is not None:
            self.steps += 1
            if self.steps > STEP_LIMIT:
                return False
            agenda = agenda[0](self, agenda[1], agenda[2], agenda[3])
            if agenda is True:
                return True
            if agenda is False:
                return False
        return True

    # -- bookkeeping -----------------------------------------------------------------------------------------------

    def bind(self, key: Any, value: Any) -> None:
        self.trail.append((key, self.env.get(key, _UNBOUND)))  # results of functions may replace a capture
        self.env[key] = value

    def mark(self) -> tuple[int, int, Phase]:
        return len(self.trail), self.passed, self.phase

    def undo(self, mark: tuple[int, int, Phase]) -> None:
        length, self.passed, self.phase = mark
        while len(self.trail) > length:
            key, before = self.trail.pop()
            if before is _UNBOUND:
                del self.env[key]
            else:
                self.env[key] = before

    def fail(
        self,
        check: str,
        kind: Kind,
        expected: Any = None,
        found: Any = None,
        node: Node | None = None,
        value: Any = None,
    ) -> bool:
        if self.tracer is not None:
            nodes = (node,) if node is not None else ()
            values = (value,) if value is not None else ()
            failure = Failure(check, kind, expected, found, nodes, values, self.phase, self.passed)
            self.tracer.fail(failure, self.env)
        return False

    # -- values ----------------------------------------------------------------------------------------------------

    def value(self, name: str, value: Value, rest: Agenda) -> Any:
        """Match the pattern value `name` against a value of the graph."""
        env = self.env
        if name in env:
            if env[name] is value:
                return rest
            return self.fail(f"values.{name}", Kind.VALUE_CONFLICT, named(env[name]), named(value), value=value)
        pattern = self.makers.get(name)
        if pattern is None:
            given = self.program.inputs.get(name)
            if given is not None and not checks.predicates(self, given, value):
                return False
            self.bind(name, value)
            return rest
        return self.produce(pattern, name, value, rest)

    def produce(self, pattern: Pattern, name: str, value: Value, rest: Agenda) -> Any:
        if type(pattern) is OpPattern:
            return self.op(pattern, name, value, rest)
        if type(pattern) is AnyPattern:
            return self.any_of(pattern, name, value, rest)
        if type(pattern) is ChainPattern:
            return self.chain(pattern, name, value, rest)
        return self.same(pattern, name, value, rest)  # type: ignore[arg-type]

    def any_of(self, pattern: AnyPattern, name: str, value: Value, rest: Agenda) -> Any:
        if pattern.checks is not None and not checks.predicates(self, pattern.checks, value):
            return False
        mark = self.mark()
        for alternative in pattern.alternatives[:-1]:
            self.choose(alternative.id)
            step = self.produce(alternative, name, value, rest)
            if step is True or (step is not False and self.solve(step)):
                return True
            self.undo(mark)
        self.choose(pattern.alternatives[-1].id)
        return self.produce(pattern.alternatives[-1], name, value, rest)

    def choose(self, choice: str) -> None:
        """Note which alternative was taken; only where somebody looks."""
        if self.tracer is not None:
            self.bind(("choice", choice), None)

    def same(self, pattern: SamePattern, name: str, value: Value, rest: Agenda) -> Any:
        if not self.settle(pattern, value):
            return False
        self.bind(name, value)
        return (Search.value, pattern.other, value, rest)

    def settle(self, pattern: OpPattern | ChainPattern | SamePattern, value: Value) -> bool:
        """The checks of an alternative itself, and the captures that it sets."""
        if pattern.checks is not None and not checks.predicates(self, pattern.checks, value):
            return False
        return all(self.capture(key, given, pattern.id) for key, given in pattern.set.items())

    def capture(self, key: str, found: Any, check: str, node: Node | None = None) -> bool:
        if key in self.env:
            if not same_capture(self.env[key], found):
                return self.fail(f"captures.{key[1:]}", Kind.CAPTURE, self.env[key], found, node)
        else:
            self.bind(key, found)
        self.passed += 1
        return True

    # -- op nodes --------------------------------------------------------------------------------------------------

    def op(self, pattern: OpPattern, name: str, value: Value, rest: Agenda) -> Any:
        node = value.inputs[0] if value.inputs else None
        matches = node is not None and node.op == pattern.op and view.domain(node) == pattern.domain
        if not pattern.optional:
            if not matches:
                found = node.op if node is not None else origin(value)
                return self.fail(f"{pattern.id}.op", Kind.OP_MISMATCH, pattern.op, found, node, value)
            return self.node(pattern, name, value, rest)
        if matches:
            mark = self.mark()
            self.choose(f"{pattern.id}.optional: present")
            step = self.node(pattern, name, value, rest)
            if step is True or (step is not False and self.solve(step)):
                return True
            self.undo(mark)
        self.choose(f"{pattern.id}.optional: absent")
        if pattern.checks is not None and not checks.predicates(self, pattern.checks, value):
            return False
        self.bind(name, value)
        first = pattern.operands[0]
        return (Search.operand, first, value, rest)

    def node(self, pattern: OpPattern, name: str, value: Value, rest: Agenda) -> Any:
        node: Node = value.inputs[0]
        env = self.env
        if node in env:
            return self.fail(
                f"values.{name}",
                Kind.VALUE_CONFLICT,
                f"a node of its own, not that of `{env[node]}`",
                view.describe(node),
                node,
            )
        if node not in self.scope.position:
            return self.fail(f"{pattern.id}.op", Kind.OP_MISMATCH, pattern.op, "a value of an outer graph", node, value)
        self.passed += 1
        if not self.outputs(pattern, name, node, value):
            return False
        self.bind(node, pattern.name)
        inputs = node.inputs
        count = len(inputs)
        while count and is_empty(inputs[count - 1]):
            count -= 1
        if count < pattern.min_inputs or (count > len(pattern.operands) and not pattern.rest):
            return self.fail(f"{pattern.id}.in", Kind.ARITY, f"{len(pattern.operands)} operands", count, node)
        for attr in pattern.attrs:
            if not self.attribute(attr, node):
                return False
        if not self.settle(pattern, value):
            return False
        if pattern.commutes and count == 2 and inputs[0] is not inputs[1]:
            first, second = pattern.operands
            mark = self.mark()
            if self.solve(self.ordered(((first, inputs[0]), (second, inputs[1])), rest)):
                return True
            self.undo(mark)
            return self.ordered(((first, inputs[1]), (second, inputs[0])), rest)
        pairs = [
            (operand, inputs[i] if i < count and not is_empty(inputs[i]) else None)
            for i, operand in enumerate(pattern.operands)
        ]
        return self.ordered(pairs, rest)

    @staticmethod
    def ordered(pairs: Any, rest: Agenda) -> Agenda:
        """An agenda of operands: those that fail soonest first."""
        by_rank = sorted(pairs, key=_rank)
        for operand, value in reversed(by_rank):
            rest = (Search.operand, operand, value, rest)
        return rest

    def outputs(self, pattern: OpPattern, name: str, node: Node, value: Value) -> bool:
        listed = pattern.out
        if len(node.outputs) == 1 and len(listed) == 1:
            self.bind(listed[0], value)
            return True
        for index, output in enumerate(node.outputs):
            wanted = listed[index] if index < len(listed) else None
            if wanted is None or wanted == "_":
                used = wanted is None and (output.outputs or self.scope.is_output(output))
                if used and not is_empty(output):
                    return self.fail(f"{pattern.id}.out", Kind.ARITY, f"{len(listed)} outputs", len(node.outputs), node)
                if output is value and wanted is None:
                    return self.fail(f"{pattern.id}.out", Kind.ARITY, name, output.name, node)
                continue
            if (wanted == name) != (output is value):
                return self.fail(
                    f"{pattern.id}.out",
                    Kind.VALUE_CONFLICT,
                    f"output {listed.index(name)}",
                    f"output {_index(node, value)}",
                    node,
                )
            if wanted in self.env and self.env[wanted] is not output:
                return self.fail(f"values.{wanted}", Kind.VALUE_CONFLICT, named(self.env[wanted]), output.name, node)
            if wanted not in self.env:
                self.bind(wanted, output)
        if len(node.outputs) < len(listed):
            return self.fail(f"{pattern.id}.out", Kind.ARITY, f"{len(listed)} outputs", len(node.outputs), node)
        return True

    def operand(self, operand: Operand, value: Value | None, rest: Agenda) -> Any:
        kind = operand.kind
        if kind is VALUE:
            if value is None:
                if not operand.optional:
                    return self.fail(operand.id, Kind.ARITY, operand.name, "an omitted operand")
                name = operand.name
                if name in self.env:
                    return (
                        rest
                        if self.env[name] is None
                        else self.fail(f"values.{name}", Kind.VALUE_CONFLICT, named(self.env[name]), "absent")
                    )
                self.bind(name, None)
                return rest
            return self.value(operand.name, value, rest)
        if kind is ANY:
            return rest
        if kind is ABSENT:
            return rest if value is None else self.fail(operand.id, Kind.ARITY, "absent", named(value), value=value)
        if value is None or not isinstance(value, Constant):
            return self.fail(operand.id, Kind.NOT_CONST, wanted_constant(operand), origin(value), value=value)
        if kind is LIST:
            return rest if self.constant_list(operand, value) else False
        found = consts.scalar(value)
        if found is None:
            return self.fail(
                operand.id,
                Kind.NOT_CONST,
                wanted_constant(operand),
                f"a constant with {consts.size_of(value)} elements",
                value=value,
            )
        self.passed += 1
        if kind is NUMBER:
            wanted = operand.number
            if not consts.close(found, wanted, consts.dtype_of(value)):
                return self.fail(operand.id, Kind.CONST_VALUE, wanted, found, value=value)
            self.passed += 1
            return rest
        return rest if self.capture(operand.name, found, operand.id) else False

    def constant_list(self, operand: Operand, value: Constant) -> bool:
        wanted = operand.number
        if consts.size_of(value) != len(wanted):
            return self.fail(operand.id, Kind.CONST_VALUE, wanted, f"{consts.size_of(value)} elements", value=value)
        dtype = consts.dtype_of(value)
        found = [float(v) if dtype and "float" in dtype else v for v in consts.array(value).reshape(-1).tolist()]
        if not all(consts.close(f, w, dtype) for f, w in zip(found, wanted, strict=True)):
            return self.fail(operand.id, Kind.CONST_VALUE, wanted, found, value=value)
        self.passed += 1
        return True

    def attribute(self, attr: Attr, node: Node) -> bool:
        found = lookup(node, attr.name, self.scope.opset)
        if attr.kind == "absent":
            if found is not MISSING:
                return self.fail(attr.id, Kind.ATTR, "absent", found, node)
            self.passed += 1
            return True
        if found is MISSING or found is DYNAMIC:
            shown = "nothing" if found is MISSING else "a value computed at run time"
            return self.fail(attr.id, Kind.ATTR, attr.value, shown, node)
        raw, found = found, normalized(attr.name, found, node)
        if attr.kind == "capture":
            return self.capture(attr.value, found, attr.id, node)
        many = attr.kind == "one_of"
        wanted = [normalized(attr.name, w, node) for w in (attr.value if many else [attr.value])]
        if attr.name in ("to", "dtype", "output_dtype"):
            wanted = [self.element_type(w, found) for w in wanted]
        holds = any(equals(found, w) or (equals(raw, w) and found == raw) for w in wanted)
        if holds is (attr.kind == "not"):
            return self.fail(attr.id, Kind.ATTR, attr.value if attr.kind != "not" else f"not {attr.value}", raw, node)
        self.passed += 1
        return True

    def element_type(self, name: Any, found: Any) -> Any:
        """What a dtype attribute should be; a type variable that is not yet bound takes what is there."""
        if name in ("T", "U", "V"):
            if name not in self.env:
                self.bind(name, found)
            return self.env[name]
        return name

    # -- chains ----------------------------------------------------------------------------------------------------

    def chain(self, pattern: ChainPattern, name: str, value: Value, rest: Agenda) -> Any:
        root = value.inputs[0] if value.inputs else None
        if root is None or root.op != pattern.op or view.domain(root) != "" or root not in self.scope.position:
            found = root.op if root is not None else origin(value)
            return self.fail(f"{pattern.id}.chain", Kind.OP_MISMATCH, pattern.op, found, root, value)
        if root in self.env:
            return self.fail(f"values.{name}", Kind.VALUE_CONFLICT, "a node of its own", view.describe(root), root)
        self.passed += 1
        if not self.settle(pattern, value):
            return False
        self.bind(name, value)
        operands = sorted(pattern.operands, key=lambda o: o.rank)
        mark = self.mark()
        shapes = list(trees(pattern.op, root, len(operands), self.env, self.scope))
        if not shapes:
            return self.fail(f"{pattern.id}.of", Kind.ARITY, f"{len(operands)} factors or terms", "fewer", root)
        for nodes, leaves in shapes:
            for node in nodes:
                self.bind(node, name)
            if self.solve((Search.factors, operands, leaves, rest)):
                return True
            self.undo(mark)
        return False

    def factors(self, operands: list[Operand], leaves: tuple[Value, ...], rest: Agenda) -> Any:
        """Give every operand one leaf."""
        if not operands:
            return rest
        first, others = operands[0], operands[1:]
        mark = self.mark()
        tried: list[Value] = []
        for index, leaf in enumerate(leaves):
            if any(leaf is t for t in tried):
                continue
            tried.append(leaf)
            left = leaves[:index] + leaves[index + 1 :]
            if self.solve((Search.operand, first, leaf, (Search.factors, others, left, rest))):
                return True
            self.undo(mark)
        return False

    # -- further outputs -------------------------------------------------------------------------------------------

    def find_output(self, extra: tuple[str, list[tuple[str, Pattern]]], depth: int, rest: Agenda) -> Any:
        """Bind an output that the root does not reach: upwards through the readers of a bound value."""
        output, path = extra
        if output in self.env or depth >= len(path):
            return rest
        below, pattern = path[depth]
        value = self.env.get(below)
        if value is None:
            return self.fail(f"nodes.{output}", Kind.ARITY, output, f"`{below}` is absent")
        name = output if depth == len(path) - 1 else path[depth + 1][0]
        mark = self.mark()
        for reader in view.consumers(value):
            if reader in self.env or reader not in self.scope.position:
                continue
            for candidate in reader.outputs:
                if is_empty(candidate):
                    continue
                if self.solve((Search.value, name, candidate, (Search.find_output, extra, depth + 1, rest))):
                    return True
                self.undo(mark)
        return self.fail(f"nodes.{output}", Kind.OP_MISMATCH, op_names(pattern), "no such reader", value=value)

    def finish(self, _a: None, _b: None, _rest: None) -> bool:
        return checks.all_bound(self)


def _rank(pair: tuple[Operand, Any]) -> int:
    return pair[0].rank


def same_capture(a: Any, b: Any) -> bool:
    if isinstance(a, float) or isinstance(b, float):
        return (
            isinstance(a, (int, float)) and isinstance(b, (int, float)) and consts.close(float(a), float(b), "float32")
        )
    return bool(a == b)


def _index(node: Node, value: Value) -> int:
    return next(i for i, output in enumerate(node.outputs) if output is value)
