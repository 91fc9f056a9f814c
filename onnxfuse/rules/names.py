"""Which names a rule defines, and where it uses them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from onnxfuse.rules import spec
from onnxfuse.rules.patterns import CAPTURE, VALUE, AnyPattern, ChainPattern, OpPattern, Pattern, parts
from onnxfuse.rules.program import Program

TYPE_VARIABLES = frozenset({"T", "U", "V"})


def captures_of(program: Program) -> set[str]:
    """All captures that some way through the pattern, or a predicate, gives a value (with their ``$``)."""
    found: set[str] = set()
    for pattern in program.makers.values():
        for part in parts(pattern):
            found |= own_captures(part)
    return found | {f"${name}" for where in program.spec.where for name in where.set}


def own_captures(part: Pattern) -> set[str]:
    """What one alternative captures itself."""
    if isinstance(part, AnyPattern):
        return set()
    found = set(part.set)
    if isinstance(part, (OpPattern, ChainPattern)):
        found |= {o.name for o in part.operands if o.kind == CAPTURE}
    if isinstance(part, OpPattern):
        found |= {a.value for a in part.attrs if a.kind == "capture"}
    return found


def certain_captures(program: Program) -> set[str]:
    """The captures that every match has."""
    found = {f"${name}" for where in program.spec.where for name in where.set}
    for output in program.outputs:
        found |= _certain(program, output, ())
    return found


def _certain(program: Program, name: str, above: tuple[str, ...]) -> set[str]:
    pattern = program.makers.get(name)
    if pattern is None or name in above:
        return set()
    above = (*above, name)
    if isinstance(pattern, AnyPattern):
        sets = [_certain_of(program, part, above) for part in pattern.alternatives]
        return set.intersection(*sets)
    return _certain_of(program, pattern, above)


def _certain_of(program: Program, part: Pattern, above: tuple[str, ...]) -> set[str]:
    found = own_captures(part)
    if isinstance(part, (OpPattern, ChainPattern)):
        for operand in part.operands:
            if operand.kind == VALUE and not operand.optional:
                found |= _certain(program, operand.name, above)
        if isinstance(part, OpPattern) and part.optional:
            return found & _certain(program, part.operands[0].name, above)
    elif not isinstance(part, AnyPattern):
        found |= _certain(program, part.other, above)
    return found


def dims_of(program: Program) -> set[str]:
    """All dims that some shape predicate binds."""
    shapes = [given.shape for given in program.spec.inputs.values()]
    for node in program.spec.nodes.values():
        shapes.append(node.shape)
        if isinstance(node, spec.AnyOf):
            shapes += [leaf.shape for leaf in node.any_of]
    return {d for shape in shapes if shape for d in shape if isinstance(d, str) and d[0].isupper()}


def new_values(rewrite: spec.Rewrite) -> set[str]:
    """The values that the rewrite's nodes and weights make."""
    nodes = [rewrite.node] if rewrite.node is not None else rewrite.nodes
    return {out.rstrip("*") for node in nodes for out in node.out} | set(rewrite.weights)


def new_nodes(rewrite: spec.Rewrite) -> list[tuple[str, spec.NewOp | spec.Extend]]:
    """The rewrite's nodes with their paths."""
    if rewrite.node is not None:
        return [("rewrite.node", rewrite.node)]
    return [(f"rewrite.nodes[{i}]", node) for i, node in enumerate(rewrite.nodes)]


def references(program: Program) -> Iterator[tuple[str, str]]:
    """(path, name) of every use of a name outside of the pattern's operands: values, ``$captures`` and dims."""
    rule = program.spec
    for i, where in enumerate(rule.where):
        for j, argument in enumerate(where.of):
            if isinstance(argument, str):
                yield f"where[{i}].of[{j}]", argument
    if rule.siblings is not None:
        for i, shared in enumerate(rule.siblings.share):
            yield f"siblings.share[{i}]", shared
    for name, weight in rule.rewrite.weights.items():
        for j, source in enumerate(weight.of):
            yield f"rewrite.weights.{name}.of[{j}]", source
        for key in ("axis", "block", "value", "layout", "if_", "before", "after", "missing"):
            yield from _parameter(f"rewrite.weights.{name}.{key.rstrip('_')}", getattr(weight, key))
        for key in ("shape", "parts"):
            yield from _parameter(f"rewrite.weights.{name}.{key}", getattr(weight, key))
    for path, node in new_nodes(rule.rewrite):
        if isinstance(node, spec.NewOp):
            for j, item in enumerate(node.in_):
                yield from _operand(f"{path}.in[{j}]", item)
        else:
            for name, given in node.inputs.items():
                yield from _operand(f"{path}.inputs.{name}", given)
        for name, attribute in node.attrs.items():
            # A text that begins with a capital may be the attribute's own value.
            if not (isinstance(attribute, str) and not attribute.startswith("$")):
                yield from _parameter(f"{path}.attrs.{name}", attribute)
    for output, other in rule.rewrite.alias.items():
        yield f"rewrite.alias.{output}", output
        yield f"rewrite.alias.{output}", other


def _operand(path: str, item: Any) -> Iterator[tuple[str, str]]:
    if isinstance(item, str) and item != "absent":
        yield path, item
    elif isinstance(item, list):
        yield from _parameter(path, item)


def _parameter(path: str, item: Any) -> Iterator[tuple[str, str]]:
    for value in item if isinstance(item, list) else [item]:
        if isinstance(value, str) and (value.startswith("$") or is_dim(value)):
            yield path, value


def is_dim(text: str) -> bool:
    """Whether a string parameter is a dim or type variable, rather than a layout."""
    name = text.rstrip("*")
    return name.isalnum() and name[0].isupper() and name not in ("NK", "KN")
