"""Reductions: axes are written in one way, and a reduced dimension that is put back is kept in the first place."""

from __future__ import annotations

from onnxfuse.graph import consts
from onnxfuse.graph.canonicalize.scope import Scope, maker_of, shape_of, static_attr
from onnxfuse.graph.ir import Constant, Node, Value
from onnxfuse.graph.shapes.table import Shape

REDUCTIONS = (
    "ReduceMean", "ReduceSum", "ReduceSumSquare", "ReduceL1", "ReduceL2", "ReduceMax", "ReduceMin", "ReduceProd",
    "ReduceLogSum", "ReduceLogSumExp",
)  # fmt: skip
#: Ops that treat each element alike; the second operand of the first ones must be a single constant.
_WITH_NUMBER = ("Add", "Sub", "Mul", "Div", "Pow", "Max", "Min")
_UNARY = ("Sqrt", "Reciprocal", "Neg", "Abs", "Exp", "Log", "Cast")


def reduction_axes(scope: Scope) -> int:
    """Axes become non-negative and sorted, defaults are left out, so that equal reductions are found equal."""
    count = 0
    for node in scope.nodes(*REDUCTIONS):
        shape, axes = shape_of(node.inputs[0]), _axes(node)
        if shape is None or not axes or not all(-len(shape) <= axis < len(shape) for axis in axes):
            continue
        if static_attr(node, "keepdims", 1) == 1 and "keepdims" in node.attrs:
            del node.attrs["keepdims"]
            count += 1
        if static_attr(node, "noop_with_empty_axes") is not None:
            del node.attrs["noop_with_empty_axes"]
            count += 1
        wanted = sorted({axis % len(shape) for axis in axes})
        if list(axes) == wanted:
            continue
        if "axes" in node.attrs:
            node.attrs["axes"] = wanted
        else:
            node.inputs[1] = scope.integers(f"{node.outputs[0].name}_axes", wanted)
        count += 1
    return count


def keep_reduced_dims(scope: Scope) -> int:
    """`Unsqueeze(f(Reduce(x, keepdims=0)))`, or a Reshape that does the same, is `f(Reduce(x, keepdims=1))`."""
    count = 0
    for node in scope.nodes("Unsqueeze", "Reshape"):
        after = shape_of(node.outputs[0])
        if after is None or not node.inputs[0].inputs:
            continue
        steps = _steps(scope, node.inputs[0])
        if steps is None or _kept(steps[0]) != after:
            continue
        value: Value = steps[0].inputs[0]
        for step in steps:
            attrs = dict(step.attrs)
            if step is steps[0]:
                attrs.pop("keepdims", None)
            inputs = [value if i == _place(step) else given for i, given in enumerate(step.inputs)]
            value = scope.insert(node, step.op, inputs, attrs, prefix=f"{step.outputs[0].name}_kept")
        if scope.replace(node.outputs[0], value):
            count += 1
    return count


def _steps(scope: Scope, value: Value) -> list[Node] | None:
    """The reduction without kept dims and the ops between it and the value, none of them read by others."""
    steps: list[Node] = []
    while scope.read_only_here(value):
        maker = maker_of(value, *REDUCTIONS, *_WITH_NUMBER, *_UNARY)
        if maker is None or len(maker.outputs) != 1:
            return None
        steps.append(maker)
        if maker.op in REDUCTIONS:
            return steps[::-1] if static_attr(maker, "keepdims", 1) == 0 else None
        if maker.op in _WITH_NUMBER and _place(maker) is None:
            return None
        value = maker.inputs[_place(maker) or 0]
    return None


def _place(step: Node) -> int | None:
    """Which operand is the one that is not a number."""
    if step.op not in _WITH_NUMBER:
        return 0
    if len(step.inputs) != 2:
        return None
    numbers = [isinstance(v, Constant) and consts.size_of(v) == 1 and len(consts.shape_of(v)) <= 1 for v in step.inputs]
    return None if numbers[0] == numbers[1] else int(numbers[0])


def _kept(reduction: Node) -> Shape | None:
    """What the result's shape would be with the reduced dims kept."""
    shape = shape_of(reduction.inputs[0])
    axes = _axes(reduction)
    if shape is None or not axes:
        return None
    reduced = {axis % len(shape) for axis in axes}
    return tuple(1 if axis in reduced else size for axis, size in enumerate(shape))


def _axes(reduction: Node) -> list[int] | None:
    axes = static_attr(reduction, "axes")
    if axes is None and len(reduction.inputs) > 1:
        axes = consts.ints(reduction.inputs[1])
    return axes
