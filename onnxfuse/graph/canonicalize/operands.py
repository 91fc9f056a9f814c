"""Operands of elementwise ops: order, rank of scalars, neutral elements, known conditions."""

from __future__ import annotations

import numpy as np

from onnxfuse.graph import consts
from onnxfuse.graph.canonicalize.scope import Scope, dtype_of, maker_of, shape_of, static_attr
from onnxfuse.graph.ir import Constant, Node, Value
from onnxfuse.graph.shapes.elementwise import broadcast_shapes
from onnxfuse.graph.shapes.matrix import matmul_shape
from onnxfuse.graph.shapes.table import Unknown
from onnxfuse.graph.types import FLOATS, numpy_of

COMMUTATIVE = ("Add", "Mul", "And", "Or", "Xor", "Equal", "Max", "Min")
_BROADCASTING = (
    "Add", "Mul", "Sub", "Div", "Pow", "And", "Or", "Xor", "Equal", "Less", "Greater", "LessOrEqual", "GreaterOrEqual",
    "Max", "Min", "Where", "Mod",
)  # fmt: skip


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
    """A one-element constant of a broadcasting op has rank 0, where the other operands' ranks make the result's."""
    count = 0
    if scope.opset < 7:
        return 0
    for node in scope.nodes(*_BROADCASTING):
        for index, value in enumerate(node.inputs):
            if not isinstance(value, Constant) or consts.size_of(value) != 1 or not consts.shape_of(value):
                continue
            if consts.dtype_of(value) in (None, "string") or not _replaceable(node, index, len(consts.shape_of(value))):
                continue
            node.inputs[index] = scope.constant(value.name, np.asarray(consts.array(value)).reshape(()))
            count += 1
    return count


def _replaceable(node: Node, index: int, rank: int) -> bool:
    """Whether the other operands alone give the result at least that rank."""
    others = [shape_of(v) for i, v in enumerate(node.inputs) if i != index]
    return bool(others) and any(shape is not None and len(shape) >= rank for shape in others)


def filled_operands(scope: Scope) -> int:
    """An operand whose elements are all one known number becomes a scalar constant, where the other operands alone give
    the result its shape."""
    count = 0
    if scope.opset < 7:
        return 0
    for node in scope.nodes(*_BROADCASTING):
        shape = shape_of(node.outputs[0])
        for index, value in enumerate(node.inputs):
            if isinstance(value, Constant) or shape is None or dtype_of(value) is None or len(node.inputs) < 2:
                continue
            number = fill_of(value)
            others = [shape_of(v) for i, v in enumerate(node.inputs) if i != index]
            if number is None or any(other is None for other in others) or broadcast_shapes(*others) != shape:  # type: ignore[arg-type]
                continue
            array = np.array(number, dtype=numpy_of(dtype_of(value)))  # type: ignore[arg-type]
            node.inputs[index] = scope.constant(f"{value.name}_fill", array)
            count += 1
    return count


#: Ops through which a tensor of equal elements stays one.
_KEEPING = (
    "Expand", "Reshape", "Unsqueeze", "Squeeze", "Transpose", "Slice", "Tile", "Flatten", "Identity", "Cast",
)  # fmt: skip


def fill_of(value: Value) -> float | int | bool | None:
    """The number that every element of the value is, whatever its shape; None if that is not known."""
    number = consts.scalar(value)
    if number is not None:
        return number
    maker = maker_of(value, "ConstantOfShape", *_KEEPING)
    if maker is None:
        return None
    if maker.op == "Cast":
        number, target = fill_of(maker.inputs[0]), dtype_of(value)
        if number is None or target not in ("bool", "int64", "int32", "float32", "float64"):
            return None
        if target == "bool":
            return bool(number)
        if target.startswith("int"):
            return int(number) if float(number).is_integer() and abs(number) < 2**31 else None
        return numpy_of(target).type(number).item()
    if maker.op != "ConstantOfShape":
        return fill_of(maker.inputs[0])
    fill = static_attr(maker, "value")
    if fill is None:
        return None if "value" in maker.attrs else 0.0
    array = consts.of_attribute(fill)[2]
    return None if array is None else array.reshape(-1)[0].item()


def _neutral(node: Node) -> Value | None:
    """The operand that the node returns unchanged, or None. Exact for every value, NaN and infinities included; adding
    a float zero is not (it turns −0 into 0)."""
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
    """`Where` with a condition that is the same everywhere, or with one value for both cases, is that value;
    `Not(Not(x))` is x."""
    count = 0
    for node in scope.nodes("Where", "Not"):
        if node.op == "Not":
            inner = node.inputs[0].inputs[0] if node.inputs[0].inputs else None
            if inner is not None and inner.op == "Not":
                count += scope.replace(node.outputs[0], inner.inputs[0])
            continue
        condition, yes, no = node.inputs
        known = fill_of(condition)
        if yes is not no and known is None:
            continue
        chosen = yes if yes is no or known else no
        shape = shape_of(chosen)
        if shape is not None and shape == shape_of(node.outputs[0]):
            count += scope.replace(node.outputs[0], chosen)
    return count


#: Ops of numbers that broadcast their operands.
_ARITHMETIC = ("Add", "Sub", "Mul", "Div", "Pow", "Max", "Min")


def unexpanded_operands(scope: Scope) -> int:
    """An operand that is expanded to a shape which the op would broadcast it to anyway is read as it was before; so is
    a constant that a product would repeat over its batch."""
    count = 0
    for node in scope.nodes(*_ARITHMETIC, "MatMul"):
        for index, value in enumerate(node.inputs):
            expand = maker_of(value, "Expand")
            if expand is None or dtype_of(value) not in FLOATS:
                continue
            source = expand.inputs[0]
            if node.op == "MatMul" and not _repeats_a_matrix(source, value):
                continue
            given = [shape_of(source if i == index else v) for i, v in enumerate(node.inputs)]
            if any(shape is None for shape in given):
                continue
            try:
                result = matmul_shape(*given) if node.op == "MatMul" else broadcast_shapes(*given)  # type: ignore[arg-type]
            except Unknown:
                continue
            if result == shape_of(node.outputs[0]):
                node.inputs[index] = source
                count += 1
    return count


def _repeats_a_matrix(source: Value, value: Value) -> bool:
    """Whether the value is a constant matrix, repeated over leading dimensions only."""
    matrix, whole = shape_of(source), shape_of(value)
    known = isinstance(source, Constant) and matrix is not None and whole is not None and len(matrix) >= 2
    return known and matrix[-2:] == whole[-2:]  # type: ignore[index]
