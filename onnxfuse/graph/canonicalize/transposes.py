"""Transposes: of transposes, of constants, and the detour over a tensor with merged leading dimensions."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from onnxfuse.graph import consts, dims
from onnxfuse.graph.canonicalize.scope import Scope, maker_of, shape_of, static_attr
from onnxfuse.graph.ir import Constant, Deferred, Node
from onnxfuse.graph.shapes.table import Shape
from onnxfuse.graph.types import numpy_of

#: A constant of at most this many bytes may be stored twice, plain and transposed.
SMALL = 4096


def permutation(node: Node) -> list[int] | None:
    """The `perm` of a Transpose, also when it is left to its default; None if the rank is not known,
    or another one."""
    perm, shape = static_attr(node, "perm"), shape_of(node.inputs[0])
    if perm is not None:
        return list(perm) if shape is None or len(shape) == len(perm) else None
    return None if shape is None or "perm" in node.attrs else list(reversed(range(len(shape))))


def merge_transposes(scope: Scope) -> int:
    """A Transpose of a Transpose is one; every Transpose says its `perm`."""
    count = 0
    for node in scope.nodes("Transpose"):
        outer = permutation(node)
        if outer is None:
            continue
        if "perm" not in node.attrs:
            node.attrs["perm"] = outer
            count += 1
        inner = maker_of(node.inputs[0], "Transpose")
        first = None if inner is None else permutation(inner)
        if inner is None or first is None or len(first) != len(outer):
            continue
        node.attrs["perm"] = [first[axis] for axis in outer]
        node.inputs[0] = inner.inputs[0]
        count += 1
    return count


def sink_equal_transposes(scope: Scope) -> int:
    """A sum (difference, product) of two tensors that are transposed alike is transposed itself."""
    count = 0
    for node in scope.nodes("Add", "Sub", "Mul", "Div"):
        makers = [maker_of(value, "Transpose") for value in node.inputs]
        if len(makers) != 2 or None in makers or makers[0] is makers[1]:
            continue
        perms = [permutation(maker) for maker in makers if maker is not None]
        if perms[0] is None or perms[0] != perms[1] or not any(map(scope.read_only_here, node.inputs)):
            continue
        # Operands of one rank are broadcast alike in any order of their axes.
        inputs = [maker.inputs[0] for maker in makers if maker is not None]
        total = scope.insert(node, node.op, inputs, node.attrs)
        count += scope.replace(node.outputs[0], scope.insert(node, "Transpose", [total], {"perm": perms[0]}))
    return count


def raise_transposes(scope: Scope) -> int:
    """A Transpose of a sum (or difference) one of whose operands another Transpose made from just that order of axes:
    the other operand is transposed instead (residuals around convolutions over a sequence). Not of products, which may
    be the end of an activation."""
    count = 0
    for node in scope.nodes("Transpose"):
        total, perm = maker_of(node.inputs[0], "Add", "Sub"), permutation(node)
        if total is None or perm is None or not scope.read_only_here(node.inputs[0]) or len(total.inputs) != 2:
            continue
        makers = [maker_of(value, "Transpose") for value in total.inputs]
        undone = [m is not None and permutation(m) == [perm.index(axis) for axis in range(len(perm))] for m in makers]
        if undone[0] == undone[1]:
            continue
        side = int(undone[0])
        other = shape_of(total.inputs[side])
        if other is None or len(other) != len(perm):
            continue
        inputs = list(total.inputs)
        inputs[side] = scope.insert(node, "Transpose", [inputs[side]], {"perm": perm})
        inputs[1 - side] = inputs[1 - side].inputs[0].inputs[0]
        count += scope.replace(node.outputs[0], scope.insert(node, total.op, inputs, total.attrs))
    return count


def fold_constant_transposes(scope: Scope) -> int:
    """A Transpose of an initializer becomes an initializer. Not when the initializer is large and has other readers:
    the file would hold it twice."""
    count = 0
    for node in scope.nodes("Transpose"):
        weight = node.inputs[0]
        perm = permutation(node)
        if not isinstance(weight, Constant) or perm is None or scope.is_output(node.outputs[0]):
            continue
        dtype = consts.dtype_of(weight)
        shared = any(reader is not node for reader in weight.outputs)
        if dtype is None or dtype == "string" or (shared and consts.nbytes_of(weight) > SMALL):
            continue
        shape = consts.shape_of(weight)
        turned = Deferred([shape[axis] for axis in perm], numpy_of(dtype), _turner(weight, perm))
        count += scope.replace(node.outputs[0], scope.constant(f"{weight.name}_T", turned))
    return count


def _turner(weight: Constant, perm: list[int]) -> Callable[[], np.ndarray]:
    return lambda: consts.array(weight).transpose(perm)


def transposes_of_flattened(scope: Scope) -> int:
    """Reshape to merged leading dimensions, Transpose behind them, Reshape back: one Transpose of the whole."""
    count = 0
    for node in scope.nodes("Reshape"):
        middle = maker_of(node.inputs[0], "Transpose")
        if middle is None:
            continue
        first = maker_of(middle.inputs[0], "Reshape")
        perm = permutation(middle)
        if first is None or perm is None or perm[0] != 0:
            continue
        before, merged = shape_of(first.inputs[0]), shape_of(first.outputs[0])
        turned, after = shape_of(middle.outputs[0]), shape_of(node.outputs[0])
        if before is None or merged is None or turned is None or after is None:
            continue
        leading = merged_leading(before, merged)
        if leading is None or after != (*before[:leading], *turned[1:]):
            continue
        whole = [*range(leading), *(axis + leading - 1 for axis in perm[1:])]
        output = scope.insert(node, "Transpose", [first.inputs[0]], {"perm": whole})
        count += scope.replace(node.outputs[0], output)
    return count


def merged_leading(before: Shape, merged: Shape) -> int | None:
    """How many leading dimensions of `before` are multiplied into the first of `merged`, the rest being equal."""
    leading = len(before) - len(merged) + 1
    if leading < 2 or not merged or before[leading:] != merged[1:]:
        return None
    return leading if dims.product(before[:leading]) == merged[0] else None
