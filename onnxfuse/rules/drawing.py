"""A rule as a person reads it: one line a value from the output down, then the rewrite."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from onnxfuse.rules import spec
from onnxfuse.rules.program import Program

_PREDICATES = ("dtype", "rank", "shape", "const", "same_shape", "broadcastable")


def draw(program: Program) -> str:
    """The pattern and what replaces it."""
    rule = program.spec
    order = list(_from_outputs(rule))
    width = max(map(len, [*order, *rule.inputs]), default=1)
    lines = []
    for name in order:
        lines += _value(name, rule.nodes[name], width)
    for name, given in rule.inputs.items():
        lines.append(f"{name:<{width}} : {_predicates(given) or 'any value'}")
    lines.append("")
    lines += [f"where {text}" for text in guards(rule)]
    lines += ["", "becomes", *rewrite(rule)]
    return "\n".join(_squeeze(lines))


def _squeeze(lines: list[str]) -> Iterator[str]:
    previous = ""
    for line in lines:
        if line or previous:
            yield line
        previous = line


def _from_outputs(rule: spec.Rule) -> Iterator[str]:
    """Pattern nodes in the order in which a reader meets them, depth first from the outputs."""
    makers = {value: name for name, node in rule.nodes.items() for value in (getattr(node, "out", None) or [name])}
    seen: set[str] = set()

    def visit(value: str) -> Iterator[str]:
        name = makers.get(value)
        if name is None or name in seen:
            return
        seen.add(name)
        yield name
        for leaf in _leaves(rule.nodes[name]):
            for operand in _operands(leaf):
                if isinstance(operand, str):
                    yield from visit(operand.rstrip("?"))

    for output in rule.outputs:
        yield from visit(output)
    for name in rule.nodes:
        if name not in seen:
            yield from visit(name)


def _leaves(node: Any) -> list[Any]:
    return list(node.any_of) if isinstance(node, spec.AnyOf) else [node]


def _operands(leaf: Any) -> list[Any]:
    if isinstance(leaf, spec.Chain):
        return list(leaf.of)
    if isinstance(leaf, spec.Same):
        return [leaf.is_]
    return list(leaf.in_)


def _value(name: str, node: Any, width: int) -> list[str]:
    lines = []
    shared = _predicates(node) if isinstance(node, spec.AnyOf) else ""
    for index, leaf in enumerate(_leaves(node)):
        lead = f"{name:<{width}} =" if index == 0 else f"{'':<{width}} |"
        lines.append(f"{lead} {_leaf(leaf)}")
    if shared:
        lines.append(f"{'':<{width}}   ({shared})")
    return lines


def _leaf(leaf: Any) -> str:
    if isinstance(leaf, spec.Same):
        text = leaf.is_
    elif isinstance(leaf, spec.Chain):
        text = f"{leaf.chain}({', '.join(map(_operand, leaf.of))}) in any order"
    else:
        domain = f"{leaf.domain}." if leaf.domain else ""
        attrs = [f"{key}={_operand(value)}" for key, value in leaf.attrs.items()]
        text = f"{domain}{leaf.op}({', '.join([*map(_operand, leaf.in_), *attrs])})"
        if leaf.out:
            text += f" -> {', '.join(leaf.out)}"
        if leaf.optional:
            text += ", or absent"
    notes = [_predicates(leaf)] if _predicates(leaf) else []
    notes += [f"${key} := {_operand(value)}" for key, value in leaf.set.items()]
    return f"{text}   ({'; '.join(notes)})" if notes else text


def _operand(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.10g}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_operand, value)) + "]"
    if isinstance(value, dict):
        return " ".join(f"{key} {_operand(inner)}" for key, inner in value.items())
    return str(value)


def _predicates(given: Any) -> str:
    shown = []
    for key in _PREDICATES:
        value = getattr(given, key, None)
        if key == "const" and isinstance(value, bool) and "const" in given.model_fields_set:
            shown.append("constant" if value else "not constant")
        elif value is not None and key != "const":
            shown.append(f"{key.replace('_', ' ')} {_operand(value)}")
    return ", ".join(shown)


def guards(rule: spec.Rule) -> list[str]:
    """Conditions beside the pattern, each in words."""
    found = [f"the opset is {rule.opset}"] if rule.opset else []
    for name, capture in rule.captures.items():
        if capture.range is not None:
            found.append(f"${name} is from {capture.range[0]:g} to {capture.range[1]:g}")
        if capture.one_of is not None:
            found.append(f"${name} is one of {_operand(capture.one_of)}")
    for name, dim in rule.dims.items():
        limits = [f"a multiple of {dim.multiple_of}"] if dim.multiple_of else []
        limits += [f"at least {dim.min}"] if dim.min is not None else []
        limits += [f"at most {dim.max}"] if dim.max is not None else []
        found.append(f"{name} is {' and '.join(limits)}")
    for name, ops in rule.shared.items():
        found.append(f"{name} may have other readers" + ("" if ops == "any" else f" ({', '.join(ops)} only)"))
    for call in rule.where:
        result = f" -> {', '.join(f'${k}' for k in call.set)}" if call.set else ""
        found.append(f"{call.fn}({', '.join(map(str, call.of))}){result}")
    if rule.siblings is not None:
        share = ", ".join(rule.siblings.share)
        found.append(f"{rule.siblings.min} to {rule.siblings.max} such places share {share}")
    for provider, target in (rule.targets or {}).items():
        parts = [f"T is {' or '.join(target.T)}"] if target.T else []
        parts += [f"the architecture is sm{target.sm}"] if target.sm else []
        found.append(f"on {provider}: {' and '.join(parts) or 'always'}")
    return found


def rewrite(rule: spec.Rule) -> list[str]:
    """The new weights and nodes, one a line."""
    lines = []
    for name, weight in rule.rewrite.weights.items():
        extra = [
            f"{key.rstrip('_')}={_operand(value)}"
            for key, value in weight.model_dump(exclude_none=True).items()
            if key not in ("fn", "of")
        ]
        lines.append(f"  {name} = {weight.fn}({', '.join([*weight.of, *extra])})")
    nodes = [rule.rewrite.node] if rule.rewrite.node else rule.rewrite.nodes
    for node in nodes:
        if isinstance(node, spec.Extend):
            changes = [f"{k}={_operand(v)}" for k, v in [*node.inputs.items(), *node.attrs.items()]]
            lines.append(f"  {', '.join(node.out)} = {node.extend} with {', '.join(changes)}")
        else:
            domain = f"{node.domain}." if node.domain else ""
            inputs = [_operand(v) for v in node.in_]
            attrs = [f"{key}={_operand(value)}" for key, value in node.attrs.items()]
            lines.append(f"  {', '.join(node.out)} = {domain}{node.op}({', '.join([*inputs, *attrs])})")
    lines += [f"  {name} = {other}" for name, other in rule.rewrite.alias.items()]
    return lines
