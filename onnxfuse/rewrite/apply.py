"""One match made into nodes and constants.

`build` makes the new nodes beside the old ones, with outputs of their own, and infers their types; a match whose result
would be wrong is refused there and leaves no trace. `commit` then hands the old output values over to the new nodes and
takes out what is no longer read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from onnxfuse.errors import OpError, RewriteError
from onnxfuse.graph import consts, edit, view
from onnxfuse.graph.ir import Constant, Node, Value, Variable, is_empty
from onnxfuse.graph.shapes import Inference
from onnxfuse.graph.types import numpy_of, onnx_of
from onnxfuse.match import op_types
from onnxfuse.match.attributes import default_of, input_position, plain, schema_of
from onnxfuse.match.find import Match
from onnxfuse.match.scope import Scope
from onnxfuse.match.trace import Failure, Kind, Phase
from onnxfuse.match.typing import dtype_of, shape_of, show, surely_differ
from onnxfuse.ops import registry
from onnxfuse.rewrite import weights as weight_functions
from onnxfuse.rewrite.twins import have_twins
from onnxfuse.rules import spec
from onnxfuse.rules.program import domain_of

_LIST = "*"


class Refused(Exception):
    """The rewrite of a match is not possible; carries the failure to report."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.id)
        self.failure = failure


@dataclass
class Built:
    """New nodes that are not yet part of the graph."""

    match: Match
    nodes: list[Node] = field(default_factory=list)
    replaced: list[tuple[Value, Value]] = field(default_factory=list)  # old output, its stand-in
    constants: list[tuple[str, Constant]] = field(default_factory=list)

    def discard(self) -> None:
        for node in reversed(self.nodes):
            node.inputs.clear()
            node.outputs.clear()


class Builder:
    """Resolves the names of one rewrite against one match."""

    def __init__(self, match: Match, scope: Scope, inference: Inference) -> None:
        self.match = match
        self.scope = scope
        self.inference = inference
        self.env = match.env
        self.made: dict[str, Any] = {}
        self.built = Built(match)
        self._matched = set(match.nodes)

    def build(self) -> Built:
        """Raises Refused; the graph is then as it was."""
        rewrite = self.match.program.spec.rewrite
        try:
            for name, given in rewrite.weights.items():
                self.made[name] = self.weight(name, given)
            for index, node in enumerate([rewrite.node] if rewrite.node is not None else rewrite.nodes):
                self.node(node, f"rewrite.nodes[{index}]" if rewrite.node is None else "rewrite.node")
            for output, source in rewrite.alias.items():
                self.replace(output, self.env[output], self.made.get(source, self.env.get(source)))
            self.check_outputs()
            self.check_acyclic()
        except BaseException:
            self.built.discard()
            raise
        return self.built

    def refuse(self, check: str, kind: Kind, expected: Any, found: Any, phase: Phase = Phase.WEIGHTS) -> Refused:
        return Refused(Failure(check, kind, expected, found, (self.match.root,), phase=phase, passed=len(self.env)))

    # -- names -----------------------------------------------------------------------------------------------------

    def get(self, reference: str) -> Any:
        """What a name stands for; ``name*`` a list over the siblings. None if it is absent."""
        if reference.endswith(_LIST):
            name = reference[:-1]
            if name in self.made:
                return self.made[name]
            return [member.get(name) for member in self.match.members or [self.env]]
        if reference in self.made:
            return self.made[reference]
        return self.env.get(reference)

    def number(self, value: Any, check: str) -> Any:
        """A parameter: a literal, ``$capture`` or dim; dims must be known sizes."""
        if isinstance(value, list):
            found: list[Any] = []
            for item in value:
                resolved = self.number(item, check)
                found.extend(resolved if isinstance(item, str) and item.endswith(_LIST) else [resolved])
            return found
        if not isinstance(value, str):
            return value
        if value.startswith("$"):
            return self.get(value)
        if value.rstrip(_LIST) not in self.env or not value[0].isupper():
            return value  # an attribute's own text
        resolved = self.get(value)
        for item in resolved if isinstance(resolved, list) else [resolved]:
            if not isinstance(item, (int, str)):
                raise self.refuse(check, Kind.WEIGHT_SHAPE, f"a known size of {value}", item)
        return resolved

    # -- weights ---------------------------------------------------------------------------------------------------

    def weight(self, name: str, given: spec.WeightFn) -> Constant | None:
        check = f"rewrite.weights.{name}"
        sources: list[Any] = []
        for reference in given.of:
            found = self.get(reference)
            sources.extend(found if reference.endswith(_LIST) else [found])
        if given.if_ is not None and not self.get(given.if_):
            return sources[0]
        function = weight_functions.REGISTRY[given.fn]
        if given.fn not in weight_functions.TAKES_ABSENT and any(s is None for s in sources):
            return None
        for reference, source in zip(_spread(given.of, self), sources, strict=True):
            if source is not None and not isinstance(source, Constant):
                raise self.refuse(check, Kind.NOT_CONST, "constants", f"`{source.name}` for {reference}")
        params = {
            key: self.number(value, check)
            for key in ("axis", "perm", "shape", "parts", "part", "block", "value", "before", "after", "layout")
            if (value := getattr(given, key)) is not None
        }
        if given.missing is not None:
            members = self.match.members or [self.env] * len(sources)
            params["sizes"] = [member.get(given.missing) for member in members]
        to = self.get(given.to) if given.to in ("T", "U", "V") else given.to
        if given.fn == "full":
            params["dtype"] = to or self.env.get("T", "float32")
        try:
            result = function(*sources, **params)
        except weight_functions.Unfit as problem:
            raise self.refuse(check, Kind.WEIGHT_SHAPE, problem.expected, problem.found) from None
        if isinstance(result, Constant) and to and dtype_of(result) != to:
            result = weight_functions.cast(result)
        if result is None or isinstance(result, Constant):
            return result
        if to:
            result.dtype = to
        self.check_duplication(check, sources, result)
        constant = Constant(f"{name}", result.deferred())
        constant.recipe = (given.fn, tuple(sources), params)
        self.built.constants.append((self.constant_name(name, sources), constant))
        return constant

    def constant_name(self, name: str, sources: Sequence[Constant | None]) -> str:
        first = next((s for s in sources if s is not None), None)
        if first is None:
            return f"{self.match.output_values()[0].name}_{name}"
        original = next((n for n, c in self.built.constants if c is first), first.name)
        return original if original.endswith(f"_{name}") else f"{original}_{name}"

    def check_duplication(self, check: str, sources: Sequence[Constant | None], result: weight_functions.Plan) -> None:
        """Refuse to store a big tensor twice: the result, and the source for its other readers."""
        size = int(np.prod(result.shape, dtype=np.int64)) * numpy_of(result.dtype).itemsize
        if size < weight_functions.SHARED_LIMIT:
            return
        for source in sources:
            if source is None or consts.nbytes_of(source) < weight_functions.SHARED_LIMIT:
                continue
            others = [r for r in view.consumers(source) if r not in self._matched]
            if others and have_twins(source, self._matched, others, self.scope.graph.nodes):
                continue
            if others or self.scope.is_output(source):
                reader = view.describe(others[0]) if others else "the graph's output"
                raise self.refuse(check, Kind.WEIGHT_SHARED, f"no other reader of `{source.name}`", reader)

    # -- nodes -----------------------------------------------------------------------------------------------------

    def node(self, given: spec.NewOp | spec.Extend, path: str) -> None:
        if isinstance(given, spec.Extend):
            node = self.extended(given, path)
        else:
            node = Node(given.op, attrs={}, domain=domain_of(given.domain) or None)
            node.inputs = [*self.operands(given.in_, path)]
            for name, value in given.attrs.items():
                self.set_attribute(node, name, value, path)
        node.origin = self.match.rule
        while node.inputs and is_empty(node.inputs[-1]):
            node.inputs.pop()
        self.built.nodes.append(node)
        for out in given.out:
            self.output(node, out)
        try:
            op_types.check(node)
        except OpError as error:
            raise self.refuse(path, Kind.OUTPUT_TYPE, "valid operands", error.message) from error
        self.inference.infer_node(node)

    def operands(self, given: Sequence[Any], path: str) -> list[Value]:
        found: list[Value] = []
        for index, item in enumerate(given):
            if item == "absent":
                found.append(_nothing())
            elif isinstance(item, str) and not item.startswith("$"):
                values = self.get(item)
                for value in values if isinstance(values, list) else [values]:
                    found.append(_nothing() if value is None else value)
            else:
                found.append(self.constant(item, f"{path}.in[{index}]"))
        return found

    def constant(self, item: Any, check: str) -> Constant:
        """A new constant for a literal or capture."""
        content = self.number(item, check)
        if isinstance(content, (list, tuple)) or (
            isinstance(content, int) and not isinstance(content, bool) and isinstance(item, str)
        ):
            array = np.asarray(
                content, dtype=np.int64 if all(isinstance(v, int) for v in np.ravel(content).tolist()) else np.float32
            )
        elif isinstance(content, np.ndarray):
            array = content
        else:
            array = np.asarray(content).astype(numpy_of(self.env.get("T", "float32")))
        constant = Constant("constant", array)
        self.built.constants.append((f"{self.match.output_values()[0].name}_const", constant))
        return constant

    def extended(self, given: spec.Extend, path: str) -> Node:
        old = self.match.node_of(given.extend)
        if old is None:
            raise self.refuse(path, Kind.OP_MISMATCH, f"a node `{given.extend}` in the match", "none")
        domain = view.domain(old)
        node = Node(old.op, attrs=dict(old.attrs), domain=old.domain)
        inputs = list(old.inputs)
        for name, item in given.inputs.items():
            position = input_position(old.op, domain, name, self.scope.opset)
            if position is None:
                raise RewriteError(f"{old.op} has no input `{name}`", where=f"{self.match.program.file}: {path}")
            while len(inputs) <= position:
                inputs.append(_nothing())
            inputs[position] = self.operands([item], path)[0]
        node.inputs = inputs
        for name, value in given.attrs.items():
            self.set_attribute(node, name, value, path)
        return node

    def set_attribute(self, node: Node, name: str, given: Any, path: str) -> None:
        """Write a parameter as attribute or constant input, whichever the op has at this opset."""
        domain = view.domain(node)
        value = self.number(given, f"{path}.attrs.{name}") if isinstance(given, (str, list)) else given
        if name in ("to", "dtype", "output_dtype") and isinstance(value, str):
            value = onnx_of(value)
        if value is None:
            return
        own = registry.find(domain, node.op)
        if own is None:
            schema = schema_of(node.op, domain, self.scope.opset)
            if schema is not None and name not in schema.attributes:
                position = input_position(node.op, domain, name, self.scope.opset)
                if position is not None:
                    inputs = list(node.inputs)
                    while len(inputs) <= position:
                        inputs.append(_nothing())
                    inputs[position] = self.constant(
                        [int(v) for v in value] if isinstance(value, list) else [value], f"{path}.attrs.{name}"
                    )
                    node.inputs = inputs
                    return
        default = default_of(node.op, domain, name, self.scope.opset)
        if own is not None and isinstance(default, float) and isinstance(value, int):
            value = float(value)
        if own is not None and type(plain(default)) is type(value) and default == value:
            node.attrs.pop(name, None)
            return
        node.attrs[name] = value

    def output(self, node: Node, out: str) -> None:
        name = out.rstrip(_LIST)
        if out.endswith(_LIST):
            olds = [member[name] for member in self.match.members or [self.env]]
            stands = []
            for old in olds:
                stands.append(self.stand_in(node, old.name))
                self.built.replaced.append((old, stands[-1]))
            self.made[name] = stands
            return
        stand = self.stand_in(node, name)
        if name in self.match.program.outputs:
            self.built.replaced.append((self.env[name], stand))
        self.made[name] = stand

    @staticmethod
    def stand_in(node: Node, name: str) -> Variable:
        variable = Variable(name)
        node.outputs.append(variable)
        return variable

    def replace(self, output: str, old: Value, new: Value | None) -> None:
        if new is None:
            raise self.refuse(f"rewrite.alias.{output}", Kind.ARITY, "a value", "an absent one")
        self.built.replaced.append((old, new))

    # -- what must hold --------------------------------------------------------------------------------------------

    def check_outputs(self) -> None:
        for old, new in self.built.replaced:
            have, want = dtype_of(new), dtype_of(old)
            check = (
                f"rewrite.outputs.{next((n for n, v in self.env.items() if v is old and isinstance(n, str)), old.name)}"
            )
            if have is not None and want is not None and have != want:
                raise self.refuse(check, Kind.OUTPUT_TYPE, want, have, Phase.APPLY)
            a, b = shape_of(old), shape_of(new)
            if a is not None and b is not None and (len(a) != len(b) or any(map(surely_differ, a, b))):
                raise self.refuse(check, Kind.OUTPUT_TYPE, show(a), show(b), Phase.APPLY)

    def check_acyclic(self) -> None:
        """With several outputs, an input of the new nodes must not depend on one of them through other nodes."""
        olds = [old for old, _ in self.built.replaced]
        if len(olds) < 2:
            return
        position = self.scope.position
        needs = [
            position[v.inputs[0]]
            for node in self.built.nodes
            for v in node.inputs
            if v.inputs and v.inputs[0] in position and v.inputs[0] not in self._matched
        ]
        last_need = max(needs, default=-1)
        wanted = set(needs)
        stack = [r for old in olds for r in view.consumers(old) if r in position and r not in self._matched]
        seen: set[Node] = set()
        while stack:
            node = stack.pop()
            if node in seen or position[node] > last_need:
                continue
            seen.add(node)
            if position[node] in wanted:
                raise self.refuse(
                    "rewrite.outputs", Kind.CYCLE, "independent outputs", view.describe(node), Phase.APPLY
                )
            stack.extend(r for v in node.outputs for r in view.consumers(v) if r in position)


def build(match: Match, scope: Scope, inference: Inference) -> Built:
    """Make the new nodes of a match. Raises Refused if the result would not be right."""
    return Builder(match, scope, inference).build()


def commit(built: Built, scope: Scope) -> list[Node]:
    """Put the new nodes in the old ones' place; returns the old nodes that are gone.

    The caller brings the graph's list of nodes in order.
    """
    match, names, graph = built.match, scope.model.names, scope.graph
    for prefix, constant in built.constants:
        constant.name = names.fresh(prefix)
    stands = {id(new): old for old, new in built.replaced if new.inputs and new.inputs[0] in built.nodes}
    for node in built.nodes:
        for value in node.outputs:
            if id(value) not in stands and not is_empty(value):
                value.name = names.fresh(f"{match.output_values()[0].name}_{value.name}")
    for old, new in built.replaced:
        if id(new) in stands:
            _hand_over(old, new)
        else:
            maker = old.inputs[0]
            maker.outputs[_position(maker.outputs, old)] = Variable(names.fresh(f"{old.name}_old"))
            edit.replace_uses(graph, old, new)
    for node in built.nodes:
        node.name = names.fresh(node.outputs[0].name)
        domain = view.domain(node)
        if domain not in scope.model.opsets:
            scope.model.opsets[domain] = registry.VERSION
    gone: list[Node] = []
    for node in reversed(match.nodes):
        if any(v.outputs or scope.is_output(v) for v in node.outputs):
            continue
        node.inputs.clear()
        node.outputs.clear()
        gone.append(node)
    return gone


def _hand_over(old: Value, stand: Value) -> None:
    """Make the node of the stand-in produce the old value object, whose readers then need no change."""
    maker, node = old.inputs[0], stand.inputs[0]
    index = _position(maker.outputs, old)
    if len(maker.outputs) == 1:
        maker.outputs.clear()
    else:
        maker.outputs[index] = Variable("")
    for reader in list(dict.fromkeys(stand.outputs)):
        for at, value in enumerate(reader.inputs):
            if value is stand:
                reader.inputs[at] = old
    node.outputs[_position(node.outputs, stand)] = old
    if old.shape is None:
        old.shape = stand.shape
    if old.dtype is None:
        old.dtype = stand.dtype


def _position(values: Sequence[Value], value: Value) -> int:
    return next(i for i, candidate in enumerate(values) if candidate is value)


def _nothing() -> Variable:
    return Variable("")


def _spread(references: Sequence[str], builder: Builder) -> list[str]:
    spread: list[str] = []
    for reference in references:
        count = len(builder.match.members or [builder.env]) if reference.endswith(_LIST) else 1
        spread.extend([reference] * count)
    return spread
