"""Static checks of rules, each with an id that ``docs/reference/lint.md`` explains.

`structural` finds what would make a rule meaningless; rules with such findings do not load. `lint` finds everything.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from onnxfuse.errors import RuleError
from onnxfuse.ops import registry
from onnxfuse.rules import names, spec
from onnxfuse.rules.alternatives import alternative_findings
from onnxfuse.rules.case_lint import case_findings
from onnxfuse.rules.findings import Diagnostic, Findings, distinct
from onnxfuse.rules.known_ops import attributes_of, is_known
from onnxfuse.rules.overlap import may_overlap
from onnxfuse.rules.patterns import NUMBER, VALUE, OpPattern, operands_of, parts
from onnxfuse.rules.program import Program, domain_of


@dataclass(frozen=True)
class Vocabulary:
    """The names that rules may use and that this package does not know itself: predicates, and weight functions with
    their parameters."""

    predicates: frozenset[str] = frozenset()
    weights: Mapping[str, frozenset[str]] = field(default_factory=dict)


#: Every lint id and what it rejects; the reference page is checked against it.
MEANING = {
    "undefined-value": "a value that is used and never defined",
    "undefined-capture": "a `$capture` that is used and never captured",
    "undefined-dim": "a dim that is used and that no shape binds, or one called T, U or V",
    "undefined-function": "a predicate or weight function that does not exist, or has no such parameter",
    "cycle": "a node that needs itself",
    "unreachable-node": "a pattern node that no output reaches",
    "unreachable-alternative": "an alternative that an earlier one always matches instead",
    "unused-input": "an input that no pattern node reads",
    "maybe-unset-capture": "a capture that the rewrite needs and that some alternative does not define",
    "rewrite-uses-interior": "a rewrite input that is an interior value and not `shared`",
    "output-not-made": "an output that the rewrite does not make",
    "unknown-op": "an op of the pattern that its domain does not have at any opset",
    "unknown-attr": "an attribute (or constant parameter) that the op does not have",
    "unknown-fused-op": "an op or attribute of the rewrite that does not exist",
    "no-kernel": "an op of the `onnxfuse` domain without a kernel for a listed target and dtype",
    "weight-shape": "a weight function of a value that is not declared `const: true`",
    "short-constant": "a literal with fewer than 7 digits near a known irrational number",
    "alternative-not-tested": "an alternative, or a state of an optional node, that no positive case uses",
    "guard-not-tested": "a guard (limits, targets, `where`, `shared`, privacy) without a `no_match` case",
    "replace-not-once": "an edit of a case whose text does not occur exactly once",
    "same-priority": "two rules of a stage that can match at one root, with equal priority",
    "file-name": "an id that differs from the file name",
    "duplicate-id": "an id used twice",
}


def structural(program: Program) -> list[Diagnostic]:
    """What must hold for the rule to mean anything."""
    out = Findings(program)
    _undefined(program, out)
    _cycles(program, out)
    return out.found


def require(program: Program) -> None:
    """Raises RuleError for the first structural finding."""
    for finding in structural(program):
        raise RuleError(finding.message, where=f"{finding.file}:{finding.line or 1}", hint=finding.hint)


def require_functions(program: Program, vocabulary: Vocabulary) -> None:
    """Raises RuleError if the rule calls a predicate or weight function that does not exist."""
    out = Findings(program)
    _functions(program, vocabulary, out)
    for finding in out.found:
        raise RuleError(finding.message, where=f"{finding.file}:{finding.line or 1}", hint=finding.hint)


def lint(programs: Iterable[Program], vocabulary: Vocabulary) -> list[Diagnostic]:
    """All findings of all rules, in the order of files and lines. The rules' cases are parsed, not run."""
    programs = list(programs)
    found: list[Diagnostic] = []
    for program in programs:
        out = Findings(program)
        _undefined(program, out)
        _cycles(program, out)
        if not out.found:
            _functions(program, vocabulary, out)
            for check in _CHECKS:
                check(program, out)
        found += out.found
    found += _same_priority(programs)
    return sorted(found, key=lambda d: (d.file, d.line or 0, d.id))


# -- names -------------------------------------------------------------------------------------------------------------


def _undefined(program: Program, out: Findings) -> None:
    rule = program.spec
    values = {*rule.inputs, *program.makers}
    for pattern in distinct(program):
        for operand in operands_of(pattern):
            if operand.kind == VALUE and operand.name not in values:
                out.undefined("undefined-value", operand.id, operand.name, values, "value")
    for name in rule.outputs:
        if name not in program.makers:
            out.undefined("undefined-value", "outputs", name, program.makers, "output")
    for name in rule.shared:
        if name not in program.makers:
            out.undefined("undefined-value", f"shared.{name}", name, program.makers, "interior value")
    for checks in [*program.inputs.values(), *(p.checks for pattern in distinct(program) for p in parts(pattern))]:
        if checks is None:
            continue
        for key, other in (("same_shape", checks.same_shape), ("broadcastable", checks.broadcastable)):
            if other and other not in values:
                out.undefined("undefined-value", f"{checks.path}.{key}", other, values, "value")
    captures, dims = names.captures_of(program), names.dims_of(program)
    for name in rule.captures:
        if f"${name}" not in captures:
            out.undefined("undefined-capture", f"captures.{name}", f"${name}", captures, "capture")
    for name in [*rule.dims, *sorted(dims & names.TYPE_VARIABLES)]:
        if name not in dims or name in names.TYPE_VARIABLES:
            out.undefined("undefined-dim", f"dims.{name}", name, dims, "dim")
    made = names.new_values(rule.rewrite)
    for path, reference in names.references(program):
        name = reference.rstrip("*")
        if name.startswith("$"):
            if name not in captures:
                out.undefined("undefined-capture", path, name, captures, "capture")
        elif name[0].isupper():
            if name not in dims and name not in names.TYPE_VARIABLES:
                out.undefined("undefined-dim", path, name, dims, "dim")
        elif name not in values and name not in made:
            out.undefined("undefined-value", path, name, values | made, "value")
    keys = {p.name for p in distinct(program)}
    for path, node in names.new_nodes(rule.rewrite):
        if isinstance(node, spec.Extend) and node.extend not in keys:
            out.undefined("undefined-value", f"{path}.extend", node.extend, keys, "pattern node")


def _cycles(program: Program, out: Findings) -> None:
    done: set[str] = set()

    def visit(name: str, above: tuple[str, ...]) -> None:
        if name in above:
            out.add(
                "cycle",
                f"nodes.{name}",
                f"node `{name}` needs itself: {' → '.join((*above[above.index(name) :], name))}",
            )
            done.add(name)
            return
        pattern = program.makers.get(name)
        if pattern is None or name in done:
            return
        for operand in operands_of(pattern):
            if operand.kind == VALUE:
                visit(operand.name, (*above, name))
        done.add(name)

    for name in program.makers:
        visit(name, ())


def _functions(program: Program, vocabulary: Vocabulary, out: Findings) -> None:
    for index, where in enumerate(program.spec.where):
        if where.fn not in vocabulary.predicates:
            out.undefined("undefined-function", f"where[{index}].fn", where.fn, vocabulary.predicates, "predicate")
    for name, weight in program.spec.rewrite.weights.items():
        path = f"rewrite.weights.{name}"
        if weight.fn not in vocabulary.weights:
            out.undefined("undefined-function", f"{path}.fn", weight.fn, vocabulary.weights, "weight function")
            continue
        allowed = vocabulary.weights[weight.fn] | {"fn", "of", "to", "if", "missing"}
        for key in sorted(weight.model_fields_set):
            if key.rstrip("_") not in allowed:
                out.add(
                    "undefined-function",
                    f"{path}.{key.rstrip('_')}",
                    f"`{weight.fn}` has no parameter `{key}`",
                    f"it has {', '.join(sorted(vocabulary.weights[weight.fn])) or 'none'}",
                )


# -- the pattern -------------------------------------------------------------------------------------------------------


def _reachability(program: Program, out: Findings) -> None:
    reached: set[str] = set()
    stack = list(program.outputs)
    while stack:
        name = stack.pop()
        if name in reached:
            continue
        reached.add(name)
        if name in program.makers:
            pattern = program.makers[name]
            if isinstance(pattern, OpPattern):
                stack.extend(pattern.out)
            stack.extend(o.name for o in operands_of(pattern) if o.kind == VALUE)
    for pattern in distinct(program):
        if pattern.name not in reached and not (isinstance(pattern, OpPattern) and reached & set(pattern.out)):
            out.add(
                "unreachable-node", pattern.id, f"no output needs the node `{pattern.name}`", "remove it, or use it"
            )
    for name in program.spec.inputs:
        if name not in reached:
            out.add("unused-input", f"inputs.{name}", f"no pattern node reads the input `{name}`")


def _captures(program: Program, out: Findings) -> None:
    certain = names.certain_captures(program)
    for path, reference in names.references(program):
        name = reference.rstrip("*")
        if name.startswith("$") and path.startswith("rewrite") and name not in certain:
            out.add(
                "maybe-unset-capture",
                path,
                f"some alternative leaves `{name}` without a value",
                "give it one there with `set`",
            )


def _rewrite_inputs(program: Program, out: Findings) -> None:
    rule = program.spec
    made = names.new_values(rule.rewrite)
    for path, reference in names.references(program):
        name = reference.rstrip("*")
        if not path.startswith(("rewrite.node", "rewrite.alias")) or name in made or name not in program.makers:
            continue
        if name not in rule.shared and name not in rule.outputs:
            out.add(
                "rewrite-uses-interior",
                path,
                f"`{name}` is computed inside of the match, and the rewrite removes it",
                f"use an input, or list `{name}` under `shared`",
            )
    replaced = {o.rstrip("*") for _, node in names.new_nodes(rule.rewrite) for o in node.out} | set(rule.rewrite.alias)
    for name in rule.outputs:
        if name not in replaced:
            out.add("output-not-made", "rewrite", f"the rewrite does not make the output `{name}`")


def _ops(program: Program, out: Findings) -> None:
    for pattern in distinct(program):
        for part in parts(pattern):
            if not isinstance(part, OpPattern):
                continue
            if not is_known(part.domain, part.op):
                out.add("unknown-op", f"{part.id}.op", f"there is no op `{part.domain or 'ai.onnx'}::{part.op}`")
                continue
            known = attributes_of(part.domain, part.op)
            for attr in part.attrs:
                if known is not None and attr.name not in known:
                    out.undefined("unknown-attr", attr.id, attr.name, known, f"the attribute of {part.op}")


def _new_ops(program: Program, out: Findings) -> None:
    rule = program.spec
    for path, node in names.new_nodes(rule.rewrite):
        if isinstance(node, spec.Extend):
            pattern = next((p for p in distinct(program) if p.name == node.extend), None)
            ops = {(p.domain, p.op) for p in parts(pattern) if isinstance(p, OpPattern)} if pattern else set()
        else:
            ops = {(domain_of(node.domain), node.op)}
        for domain, op in ops:
            if not is_known(domain, op):
                out.add("unknown-fused-op", path, f"there is no op `{domain or 'ai.onnx'}::{op}`")
                continue
            known = attributes_of(domain, op)
            for name in node.attrs:
                if known is not None and name not in known:
                    out.undefined("unknown-fused-op", f"{path}.attrs.{name}", name, known, f"the attribute of {op}")
            own = registry.find(domain, op)
            if own is not None and isinstance(node, spec.Extend):
                inputs = [i.name for i in own.inputs]
                for name in node.inputs:
                    if name not in inputs:
                        out.undefined("unknown-fused-op", f"{path}.inputs.{name}", name, inputs, f"the input of {op}")
            if own is not None and own.kernels and rule.targets:
                for provider, limit in rule.targets.items():
                    missing = set(limit.T or ()) - own.kernels.get(provider, frozenset())
                    if missing:
                        out.add(
                            "no-kernel",
                            f"targets.{provider}.T",
                            f"{op} has no {provider} kernel for {', '.join(sorted(missing))}",
                        )


def _weights(program: Program, out: Findings) -> None:
    rule = program.spec
    for name, weight in rule.rewrite.weights.items():
        for index, reference in enumerate(weight.of):
            source = reference.rstrip("*")
            given = rule.inputs.get(source)
            if source in rule.rewrite.weights or source.startswith("$") or source[0].isupper():
                continue
            if given is None or not given.const:
                out.add(
                    "weight-shape", f"rewrite.weights.{name}.of[{index}]", f"`{source}` is not declared `const: true`"
                )


_IRRATIONAL = (
    math.sqrt(2),
    math.sqrt(0.5),
    math.sqrt(2 / math.pi),
    math.pi,
    math.e,
    math.sqrt(math.pi),
    2 / math.sqrt(math.pi),
)


def _constants(program: Program, out: Findings) -> None:
    for pattern in distinct(program):
        for operand in operands_of(pattern):
            if operand.kind == NUMBER and isinstance(operand.number, float):
                for exact in _IRRATIONAL:
                    off = abs(operand.number - exact) / exact
                    if 1e-7 < off < 2e-3:
                        out.add(
                            "short-constant",
                            operand.id,
                            f"`{operand.number}` has too few digits",
                            f"write {exact:.10g}",
                        )


# -- several rules -----------------------------------------------------------------------------------------------------


def _same_priority(programs: list[Program]) -> list[Diagnostic]:
    found: list[Diagnostic] = []
    for index, first in enumerate(programs):
        for second in programs[index + 1 :]:
            if first.stage != second.stage or first.priority != second.priority or not first.roots & second.roots:
                continue
            if first.spec.priority is not None and second.spec.priority is not None:
                continue  # both were given: the author knows of the other
            if may_overlap(first, second):
                out = Findings(second)
                out.add(
                    "same-priority",
                    "priority",
                    f"can match where `{first.id}` does, with the same priority {first.priority}",
                    "give one of them another `priority`",
                )
                found += out.found
    return found


_CHECKS: tuple[Callable[[Program, Findings], None], ...] = (
    _reachability,
    alternative_findings,
    _captures,
    _rewrite_inputs,
    _ops,
    _new_ops,
    _weights,
    _constants,
    case_findings,
)
