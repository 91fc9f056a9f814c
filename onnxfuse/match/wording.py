"""How failures name values, operands and patterns."""

from __future__ import annotations

from onnxfuse.graph.ir import Constant, Value, Variable
from onnxfuse.rules.patterns import CAPTURE, AnyPattern, ChainPattern, Operand, OpPattern, Pattern


def named(value: Value | None) -> str:
    return "absent" if value is None else f"`{value.name}`"


def origin(value: Value | None) -> str:
    if value is None:
        return "an omitted operand"
    if isinstance(value, Constant):
        return f"the constant `{value.name}`"
    if isinstance(value, Variable) and value.inputs:
        return f"`{value.name}`, made by {value.inputs[0].op}"
    return f"the graph input `{value.name}`"


def wanted_constant(operand: Operand) -> str:
    return f"a constant ({operand.name})" if operand.kind == CAPTURE else f"the constant {operand.number}"


def op_names(pattern: Pattern) -> str:
    if isinstance(pattern, OpPattern):
        return pattern.op
    if isinstance(pattern, ChainPattern):
        return pattern.op
    if isinstance(pattern, AnyPattern):
        return " or ".join(op_names(p) for p in pattern.alternatives)
    return pattern.other
