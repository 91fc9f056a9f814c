"""Parts of a product's columns: what takes them by way of another shape is a Slice of the last axis."""

from __future__ import annotations

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
    bounds = [consts.ints(v) for v in node.inputs[1:]]
    if len(bounds) < 3 or any(b is None or len(b) != 1 for b in bounds):
        return []
    starts, ends, axes = (b[0] for b in bounds[:3] if b is not None)
    if ends != starts + 1 or starts < 0 or (len(bounds) > 3 and bounds[3] != [1]):
        return []
    return _place(node.outputs[0], axes % rank, starts, shape)


def _without(part: Value, axis: int) -> list[Value]:
    """The part without the axis of size 1."""
    shape = shape_of(part)
    goal = None if shape is None else (*shape[:axis], *shape[axis + 1 :])
    readers = [r for r in view.consumers(part) if r.op in ("Squeeze", "Reshape") and r.inputs[0] is part]
    return [r.outputs[0] for r in readers if maker_of(r.outputs[0], r.op) is r and shape_of(r.outputs[0]) == goal]
