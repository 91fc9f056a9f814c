"""Parts of a product's columns, taken by way of another shape, as Slices of the last axis; parts of a Concat."""

from __future__ import annotations

from itertools import accumulate

from onnxfuse.graph import consts, view
from onnxfuse.graph.canonicalize.scope import Scope, maker_of, shape_of, static_attr
from onnxfuse.graph.canonicalize.transposes import permutation
from onnxfuse.graph.ir import Constant, Node, Value

_PRODUCTS = ("MatMul", "Gemm", "Linear")


def slice_split_columns(scope: Scope) -> int:
    """Of a product's columns, reshaped to [..., parts, size] (or [..., size, parts]), the part that `Gather`, `Split`
    or `Slice` and `Squeeze` take is a Slice of the product, in steps of `parts` if the parts alternate."""
    count = 0
    if scope.opset < 10:
        return 0
    for node in scope.nodes("Reshape"):
        columns = node.inputs[0]
        before, after = shape_of(columns), shape_of(node.outputs[0])
        if before is None or after is None or len(after) != len(before) + 1 or after[:-2] != before[:-1]:
            continue
        rows, size = after[-2:]
        if not (isinstance(rows, int) and isinstance(size, int) and min(rows, size) > 1) or not _is_product(columns):
            continue
        for taken, axis, index in _single_places(scope, node.outputs[0], len(after)):
            if axis == len(after) - 2:
                bounds = (index * size, (index + 1) * size, 1)
            elif axis == len(after) - 1:
                bounds = (index, rows * size, size)
            else:
                continue
            if shape_of(taken) != (*before[:-1], size if axis == len(after) - 2 else rows):
                continue
            count += _replace(scope, node, taken, columns, bounds)
    return count


def operands_of_concats(scope: Scope) -> int:
    """A `Slice` of a `Concat` that is exactly one of its operands is that operand."""
    count = 0
    for node in scope.nodes("Slice"):
        joined = maker_of(node.inputs[0], "Concat")
        axis = static_attr(joined, "axis") if joined is not None else None
        shape = shape_of(node.inputs[0])
        if joined is None or axis is None or shape is None or not -len(shape) <= axis < len(shape):
            continue
        bounds = _bounds(node, len(shape))
        sizes = [(shape_of(v) or (None,) * len(shape))[axis] for v in joined.inputs]
        if bounds is None or bounds[2] != axis % len(shape) or not all(isinstance(s, int) for s in sizes):
            continue
        edges = [0, *accumulate(s for s in sizes if isinstance(s, int))]
        start, end = (min(b + edges[-1] if b < 0 else b, edges[-1]) for b in bounds[:2])
        for operand, first, last in zip(joined.inputs, edges[:-1], edges[1:], strict=True):
            if (first, last) == (start, end) and first < last:
                count += int(scope.replace(node.outputs[0], operand))
                break
    return count


def _bounds(node: Node, rank: int) -> tuple[int, int, int] | None:
    """Start, end and (non-negative) axis of a Slice of one axis in steps of 1, if they are known."""
    numbers = [consts.ints(v) for v in node.inputs[1:]]
    if len(numbers) < 3 or any(n is None or len(n) != 1 for n in numbers):
        return None
    start, end, axis, step = (*(n[0] for n in numbers if n is not None), 1)[:4]
    return (start, end, axis % rank) if step == 1 else None


def _replace(scope: Scope, node: Node, taken: Value, columns: Value, bounds: tuple[int, int, int]) -> int:
    start, end, step = bounds
    rank = len(shape_of(columns) or ())
    numbers = [[start], [end], [rank - 1], *([[step]] if step != 1 else [])]
    inputs: list[Value] = [columns]
    inputs += [scope.integers(f"{taken.name}_{name}", n) for name, n in zip(_BOUNDS, numbers, strict=False)]
    return int(scope.replace(taken, scope.insert(node, "Slice", inputs, prefix=f"{taken.name}_part")))


_BOUNDS = ("starts", "ends", "axes", "steps")


def _is_product(value: Value) -> bool:
    """Whether a matrix product with a constant makes the value, perhaps with a constant bias."""
    maker = view.producer(value)
    if maker is not None and maker.op == "Add" and any(isinstance(v, Constant) for v in maker.inputs):
        maker = next((view.producer(v) for v in maker.inputs if not isinstance(v, Constant)), None)
    return maker is not None and maker.op in _PRODUCTS and any(isinstance(v, Constant) for v in maker.inputs[1:2])


def _single_places(scope: Scope, value: Value, rank: int) -> list[tuple[Value, int, int]]:
    """Values that are one place of an axis of the value, without that axis: (value, axis, index)."""
    found: list[tuple[Value, int, int]] = []
    for reader in view.consumers(value):
        if reader.domain not in (None, "", "ai.onnx") or reader.inputs[0] is not value or not reader.outputs:
            continue
        if reader.op == "Transpose":
            perm = permutation(reader)
            for taken, axis, index in _single_places(scope, reader.outputs[0], rank):
                if perm is not None and [p for p in perm if p != perm[axis]] == sorted(set(perm) - {perm[axis]}):
                    found.append((taken, perm[axis], index))
        elif reader.op == "Gather":
            found += _gathered(reader, rank)
        elif reader.op in ("Split", "Slice"):
            found += [
                (squeezed, axis, index)
                for part, axis, index in _parts(reader, rank)
                for squeezed in _without(part, axis)
            ]
    return found


def _gathered(node: Node, rank: int) -> list[tuple[Value, int, int]]:
    axis, indices = static_attr(node, "axis", 0), node.inputs[1]
    index = consts.scalar(indices)
    if axis is None or not isinstance(index, int) or not isinstance(indices, Constant) or consts.shape_of(indices):
        return []
    return _place(node.outputs[0], axis % rank, index, shape_of(node.inputs[0]))


def _place(value: Value, axis: int, index: int, shape: object) -> list[tuple[Value, int, int]]:
    size = shape[axis] if isinstance(shape, tuple) else None
    if not isinstance(size, int) or not -size <= index < size:
        return []
    return [(value, axis, index % size)]


def _parts(node: Node, rank: int) -> list[tuple[Value, int, int]]:
    """Parts of size 1 that a Split or a Slice makes."""
    shape = shape_of(node.inputs[0])
    if node.op == "Split":
        axis = static_attr(node, "axis", 0)
        if axis is None or shape is None or len(node.outputs) != shape[axis % rank]:
            return []
        # As many parts as places: each is one (or, with sizes of 0 and 2, not of the size that is squeezed).
        parts = [(v, axis % rank, i) for i, v in enumerate(node.outputs)]
        return parts if all((shape_of(v) or (0,) * rank)[axis % rank] == 1 for v in node.outputs) else []
    bounds = _bounds(node, rank)
    if bounds is None or bounds[1] != bounds[0] + 1 or bounds[0] < 0:
        return []
    return _place(node.outputs[0], bounds[2], bounds[0], shape)


def _without(part: Value, axis: int) -> list[Value]:
    """The part without the axis of size 1."""
    shape = shape_of(part)
    goal = None if shape is None else (*shape[:axis], *shape[axis + 1 :])
    readers = [r for r in view.consumers(part) if r.op in ("Squeeze", "Reshape") and r.inputs[0] is part]
    return [r.outputs[0] for r in readers if maker_of(r.outputs[0], r.op) is r and shape_of(r.outputs[0]) == goal]
