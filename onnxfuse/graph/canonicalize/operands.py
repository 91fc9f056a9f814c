"""Operands of elementwise ops: order, rank of scalars, neutral elements, known conditions."""

from __future__ import annotations

import numpy as np

from onnxfuse.graph import consts
from onnxfuse.graph.canonicalize.scope import Scope, dtype_of, maker_of, numbers_of, shape_of, static_attr
from onnxfuse.graph.dims import Dim
from onnxfuse.graph.ir import Constant, Node, Value

COMMUTATIVE = ("Add", "Mul", "And", "Or", "Xor", "Equal", "Max", "Min")
_BINARY = ("Add", "Mul", "Sub", "Div", "Pow", "And", "Or", "Xor", "Equal", "Less", "Greater", "LessOrEqual", "GreaterOrEqual")


def constants_second(scope: Scope) -> int:
    """The constant operand of a commutative op comes second."""
    count = 0
    for node in scope.nodes(*COMMUTATIVE):
        if len(node.inputs) == 2 and isinstance(node.inputs[0], Constant) and not isinstance(node.inputs[1], Constant):
            first, second = node.inputs
            node.inputs = [second, first]
            count += 1
    return count


def scalar_constants(scope: Scope) -> int:
    """A one-element constant of a broadcasting op has rank 0, where the other operand's rank makes the result's."""
    count = 0
    if scope.opset < 7:
        return 0
    for node in scope.nodes(*_BINARY):
        if len(node.inputs) != 2:
            continue
        for index in (0, 1):
            value, other = node.inputs[index], node.inputs[1 - index]
            if not isinstance(value, Constant) or consts.size_of(value) != 1 or not consts.shape_of(value):
                continue
            shape = shape_of(other)
            if shape is None or len(shape) < len(consts.shape_of(value)) or consts.dtype_of(value) in (None, "string"):
                continue
            node.inputs[index] = scope.constant(value.name, np.asarray(consts.array(value)).reshape(()))
            count += 1
    return count


def fill_of(value: Value) -> float | int | bool | None:
    """The number that every element of the value is, whatever its shape; None if that is not known."""
    number = consts.scalar(value)
    if number is not None:
        return number
    maker = maker_of(value, "ConstantOfShape", "Expand")
    if maker is None:
        return None
    if maker.op == "Expand":
        return fill_of(maker.inputs[0])
    fill = static_attr(maker, "value")
    if fill is None:
        return None
    array = consts.of_attribute(fill)[2]
    return None if array is None else array.reshape(-1)[0].item()


def _neutral(node: Node) -> Value | None:
    """The operand that the node returns unchanged, or None. Exact for every value, NaN and infinities included; adding a
    float zero is not (it turns −0 into 0)."""
    left, right = node.inputs
    number = fill_of(right)
    if number is None and node.op in COMMUTATIVE:
        left, right = right, left
        number = fill_of(right)
    if number is not None:
        integral = (dtype_of(left) or "").startswith(("int", "uint"))
        match node.op:
            case "Mul" | "Div" | "Pow":
                return left if number == 1 else None
            case "Sub":
                return left if number == 0 and not np.signbit(float(number)) else None
            case "Add":
                return left if number == 0 and (integral or np.signbit(float(number))) else None
            case "And":
                return left if number is True else None
            case "Or" | "Xor":
                return left if number is False else None
    return None


def remove_neutral(scope: Scope) -> int:
    """Remove products with one, differences with zero and the like."""
    count = 0
    for node in scope.nodes("Mul", "Div", "Pow", "Sub", "Add", "And", "Or", "Xor"):
        if len(node.inputs) != 2:
            continue
        kept = _neutral(node)
        if kept is None or isinstance(kept, Constant):
            continue
        shape = shape_of(kept)
        if shape is None or shape != shape_of(node.outputs[0]) or dtype_of(kept) != dtype_of(node.outputs[0]):
            continue
        count += scope.replace(node.outputs[0], kept)
    return count


def known_conditions(scope: Scope) -> int:
    """`Where` with a condition that is the same everywhere, or with one value for both cases, is that value (expanded if
    need be); `Not(Not(x))` is x."""
    count = 0
    for node in scope.nodes("Where", "Not"):
        if node.op == "Not":
            inner = node.inputs[0].inputs[0] if node.inputs[0].inputs else None
            if inner is not None and inner.op == "Not":
                count += scope.replace(node.outputs[0], inner.inputs[0])
            continue
        condition, yes, no = node.inputs
        known = numbers_of(condition)
        chosen = None
        if yes is no:
            chosen = yes
        elif known and not any(isinstance(k, Dim) for k in known) and len({bool(k) for k in known}) == 1:
            chosen = yes if known[0] else no
        if chosen is None:
            continue
        shape = shape_of(chosen)
        if shape is not None and shape == shape_of(node.outputs[0]):
            count += scope.replace(node.outputs[0], chosen)
    return count
