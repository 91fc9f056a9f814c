"""Ops that work element by element, with broadcasting."""

from __future__ import annotations

from collections.abc import Callable

from onnxfuse.graph import dims
from onnxfuse.graph.dims import Dim, SymInt
from onnxfuse.graph.shapes import content as contents
from onnxfuse.graph.shapes.table import Call, Shape, Unknown, of_ops
from onnxfuse.graph.types import name_of


def broadcast_shapes(*shapes: Shape) -> Shape:
    """The shape that the shapes broadcast to (NumPy rules)."""
    first, *others = shapes
    for shape in others:
        if shape == first:
            continue
        rank = max(len(first), len(shape))
        left = (1,) * (rank - len(first)) + tuple(first)
        right = (1,) * (rank - len(shape)) + tuple(shape)
        first = tuple(map(dims.broadcast, left, right))
    return tuple(first)


@of_ops(
    "Relu", "LeakyRelu", "PRelu", "Elu", "Selu", "Celu", "ThresholdedRelu",
    "Sigmoid", "HardSigmoid", "HardSwish", "Swish",
    "Tanh", "Softplus", "Softsign", "Mish", "Gelu", "Erf", "Sqrt", "Reciprocal", "Exp", "Log", "Floor", "Ceil", "Round",
    "Sign", "Sin", "Cos", "Tan", "Asin", "Acos", "Atan", "Sinh", "Cosh",
    "Asinh", "Acosh", "Atanh", "Softmax", "LogSoftmax",
    "Hardmax", "Clip", "Trilu", "CumSum", "CumProd", "Identity", "BitwiseNot", "LRN", "LpNormalization",
    "InstanceNormalization", "GroupNormalization", "MeanVarianceNormalization", "RotaryEmbedding",
    "ScatterElements", "ScatterND", "Scatter", "ReverseSequence",
    "Shrink", "TensorScatter",
)  # fmt: skip
def same_as_first(call: Call) -> None:
    call.set(0, call.dtype(0))
    call.set(0, None, call.shape(0))
    if call.node.op == "Identity":
        call.set(0, content=call.content(0))


@of_ops("RMSNormalization", "SimplifiedLayerNormalization")
def root_mean_square_norm(call: Call) -> None:
    """The result has the scale's dtype, which may differ from the input's."""
    call.set(0, call.dtype(1) or call.dtype(0))
    call.set(0, None, call.shape(0))


@of_ops("IsNaN", "IsInf")
def _test(call: Call) -> None:
    call.set(0, "bool")
    call.set(0, None, call.shape(0))


def _and(left: SymInt, right: SymInt) -> SymInt | None:
    if isinstance(left, Dim) or isinstance(right, Dim):
        if left is False or right is False:
            return False
        return right if left is True else left if right is True else left * right
    return bool(left and right)


def _or(left: SymInt, right: SymInt) -> SymInt | None:
    if isinstance(left, Dim) or isinstance(right, Dim):
        if left is True or right is True:
            return True
        return right if left is False else left if right is False else left + right - left * right
    return bool(left or right)


def _power(base: SymInt, exponent: SymInt) -> SymInt | None:
    if isinstance(exponent, Dim) or not 0 <= exponent <= 8:
        return None
    return dims.product([base] * exponent)


_BINARY: dict[str, Callable[[SymInt, SymInt], SymInt | None]] = {
    "Add": lambda a, b: a + b,
    "Sub": lambda a, b: a - b,
    "Mul": lambda a, b: a * b,
    "Div": lambda a, b: None if b == 0 else dims.truncate_divide(a, b),
    "Mod": lambda a, b: None if b == 0 else dims.modulo(a, b),
    "Pow": _power,
    "Max": dims.maximum,
    "Min": dims.minimum,
    "Equal": dims.equal,
    "Less": dims.less,
    "Greater": lambda a, b: dims.less(b, a),
    "LessOrEqual": lambda a, b: dims.negate(dims.less(b, a)),
    "GreaterOrEqual": lambda a, b: dims.negate(dims.less(a, b)),
    "And": _and,
    "Or": _or,
}
_COMPARISONS = frozenset({"Equal", "Less", "Greater", "LessOrEqual", "GreaterOrEqual", "And", "Or", "Xor"})


@of_ops(
    "Add", "Sub", "Mul", "Div", "Mod", "Pow", "Equal", "Less", "Greater",
    "LessOrEqual", "GreaterOrEqual", "And", "Or", "Xor",
    "Max", "Min", "Sum", "Mean", "BitwiseAnd", "BitwiseOr", "BitwiseXor", "BitShift",
)  # fmt: skip
def _broadcasting(call: Call) -> None:
    op = call.node.op
    dtype = "bool" if op in _COMPARISONS else call.dtype(0)
    if dtype is None and op != "Pow":
        dtype = next((d for d in map(call.dtype, range(len(call.inputs))) if d), None)
    call.set(0, dtype)
    shapes = [call.shape(i) for i in range(len(call.inputs))]
    if len(call.inputs) == 2 and call.opset < 7 and call.attr("broadcast", 0):
        shapes = shapes[:1]
    shape = broadcast_shapes(*shapes)
    call.set(0, None, shape)
    function = _BINARY.get(op)
    out = contents.static(shape)
    if function is None or out is None or len(shapes) > 2 or (op == "Mod" and call.attr("fmod", 0)):
        return
    found = [call.content(i) for i in range(len(shapes))]
    if any(f is None for f in found):
        return
    if len(found) == 1:
        call.set(0, content=found[0])
        return
    call.set(0, content=contents.elementwise(function, shapes, found, out))


@of_ops("Where")
def _where(call: Call) -> None:
    call.set(0, call.dtype(1) or call.dtype(2))
    shapes = [call.shape(i) for i in range(3)]
    shape = broadcast_shapes(*shapes)
    call.set(0, None, shape)
    out = contents.static(shape)
    found = [call.content(i) for i in range(3)]
    if out is not None and all(f is not None for f in found):
        call.set(0, content=contents.elementwise(dims.select, shapes, found, out))


@of_ops("Neg", "Abs", "Not")
def _unary(call: Call) -> None:
    call.set(0, "bool" if call.node.op == "Not" else call.dtype(0))
    shape = call.shape(0)
    call.set(0, None, shape)
    found = call.content(0)
    out = contents.static(shape)
    if found is None or out is None:
        return
    function = {"Neg": lambda x: -x, "Abs": lambda x: dims.maximum(x, -x), "Not": dims.negate}[call.node.op]
    call.set(0, content=contents.elementwise(function, [out], [found], out))


@of_ops("Cast", "CastLike", "BitCast")
def _cast(call: Call) -> None:
    dtype = call.dtype(1) if call.node.op == "CastLike" else name_of(call.attr("to"))
    call.set(0, dtype)
    shape = call.shape(0)
    call.set(0, None, shape)
    found = call.content(0)
    out = contents.static(shape)
    if found is None or out is None or dtype is None or call.node.op == "BitCast":
        return
    if dtype == "bool":
        found = contents.elementwise(lambda x: dims.negate(dims.equal(x, 0)), [out], [found], out)
    elif dtype.startswith(("int", "uint")):
        # A cast that overflows wraps around: then nothing is known (`fits` drops constants that do).
        found = contents.elementwise(lambda x: int(x) if isinstance(x, bool) else x, [out], [found], out)
        narrowing = dtype not in ("int64", "int32")
        if narrowing and not contents.is_constant(found):
            return
    call.set(0, content=found)


@of_ops("Dropout")
def _dropout(call: Call) -> None:
    call.set(0, call.dtype(0))
    call.set(1, "bool")
    shape = call.shape(0)
    call.set(0, None, shape)
    call.set(1, None, shape)


@of_ops("RandomNormalLike", "RandomUniformLike", "EyeLike", "Bernoulli")
def _like(call: Call) -> None:
    number = call.attr("dtype")
    call.set(0, name_of(number) if number is not None else call.dtype(0))
    call.set(0, None, call.shape(0))


@of_ops("QuantizeLinear")
def _quantize(call: Call) -> None:
    number = call.attr("output_dtype", 0)
    call.set(0, name_of(number) if number else (call.dtype(2) if call.has(2) else "uint8"))
    call.set(0, None, call.shape(0))


@of_ops("DequantizeLinear")
def _dequantize(call: Call) -> None:
    number = call.attr("output_dtype", 0)
    call.set(0, name_of(number) if number else call.dtype(1))
    call.set(0, None, call.shape(0))


@of_ops("DynamicQuantizeLinear")
def _dynamic_quantize(call: Call) -> None:
    call.set(0, "uint8")
    call.set(1, "float32", ())
    call.set(2, "uint8", ())
    call.set(0, None, call.shape(0))


@of_ops("RandomNormal", "RandomUniform")
def _random(call: Call) -> None:
    call.set(0, name_of(call.attr("dtype", 1)))
    shape = call.attr("shape")
    if shape is None:
        raise Unknown
    call.set(0, None, tuple(shape))
