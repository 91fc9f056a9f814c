"""Batch and heads in one dimension (as torch.bmm wants them): the Reshape that merges them moves behind what does not
care, until it meets the one that splits them again."""

from __future__ import annotations

from onnxfuse.graph import consts
from onnxfuse.graph.canonicalize.scope import Scope, maker_of, shape_of, static_attr
from onnxfuse.graph.canonicalize.transposes import merged_leading, permutation
from onnxfuse.graph.ir import Constant, Node, Value
from onnxfuse.graph.shapes.table import Shape


def sink_merged_heads(scope: Scope) -> int:
    """[B, H, S, D] merged to [B·H, S, D], then scaled, masked, turned, multiplied or softmaxed: merged after that."""
    count = 0
    if scope.opset < 5:
        return 0
    for node in scope.nodes("Mul", "Div", "Add", "Softmax", "Transpose", "MatMul"):
        if scope.is_output(node.outputs[0]):
            continue
        found = _first_moved(scope, node)
        if found is None:
            continue
        merge, moved = found
        after = shape_of(node.outputs[0])
        if merge.op == "Squeeze":
            output = scope.insert(node, "Squeeze", [moved, *merge.inputs[1:]], merge.attrs)
            count += scope.replace(node.outputs[0], output)
            continue
        if after is not None and after == shape_of(merge.outputs[0]):
            target, attrs = merge.inputs[1], {k: v for k, v in merge.attrs.items() if k == "allowzero"}
        else:
            target, attrs = _merging_target(scope, node, moved), {}
        count += scope.replace(node.outputs[0], scope.insert(node, "Reshape", [moved, target], attrs))
    return count


def split_merged_heads(scope: Scope) -> int:
    """[S, B, H·D] to [S, B·H, D] and transposed (nn.MultiheadAttention, whose sequence comes first): with batch and
    heads apart, merged after the Transpose; and the way back."""
    count = 0
    if scope.opset < 5:
        return 0
    for node in scope.nodes("Transpose"):
        perm, maker = permutation(node), maker_of(node.inputs[0], "Reshape")
        if maker is None or perm not in ([1, 0, 2], [1, 2, 0]) or scope.is_output(node.outputs[0]):
            continue
        before, middle = shape_of(maker.inputs[0]), shape_of(maker.outputs[0])
        if before is None or middle is None or len(middle) != 3 or not isinstance(middle[2], int):
            continue
        if _merge_of(node.inputs[0]) is not None and perm == [1, 0, 2]:
            turned = scope.insert(node, "Transpose", [maker.inputs[0]], {"perm": [2, 0, 1, 3]})
            target = scope.integers(f"{node.outputs[0].name}_merged", [0, -1, middle[2]])
            count += scope.replace(node.outputs[0], scope.insert(node, "Reshape", [turned, target]))
            continue
        if len(before) != 3 or before[0] != middle[0] or not isinstance(before[2], int) or before[2] % middle[2]:
            continue
        heads = before[2] // middle[2]
        if heads < 2 or middle[1] != before[1] * heads:
            continue
        target = scope.integers(f"{maker.outputs[0].name}_heads", [0, 0, heads, middle[2]])
        apart = scope.insert(node, "Reshape", [maker.inputs[0], target])
        order = [1, 2, 0, 3] if perm == [1, 0, 2] else [1, 2, 3, 0]
        turned = scope.insert(node, "Transpose", [apart], {"perm": order})
        merged = scope.insert(node, "Reshape", [turned, _merging_target(scope, node, turned)])
        count += scope.replace(node.outputs[0], merged)
    return count


def _first_moved(scope: Scope, node: Node) -> tuple[Node, Value] | None:
    """The Reshape that moves behind the node, and the node's result before it. Operands come in either order."""
    for side in (0, 1) if node.op in ("Add", "Mul") else (0,):
        merge = _merge_of(node.inputs[side])
        if merge is not None:
            moved = _moved(scope, node, merge, [*node.inputs[:side], *node.inputs[side + 1 :]])
            if moved is not None:
                return merge, moved
    return None


def _moved(scope: Scope, node: Node, merge: Node, rest: list[Value]) -> Value | None:
    """The node's result on the tensor with separate batch and heads, or None."""
    source = merge.inputs[0]
    merged, after = shape_of(merge.outputs[0]), shape_of(node.outputs[0])
    if merged is None or after is None:
        return None
    if node.op == "Softmax":
        axis = static_attr(node, "axis", -1 if scope.opset >= 13 else 1)
        if axis not in (-1, 2):
            return None
        return scope.insert(node, "Softmax", [source], {"axis": -1 if scope.opset >= 13 else 3})
    if node.op == "Transpose":
        if permutation(node) != [0, 2, 1]:
            return None
        return scope.insert(node, "Transpose", [source], {"perm": [0, 1, 3, 2]})
    other = rest[0]
    if node.op == "MatMul":
        theirs = _merge_of(other)
        if theirs is None or not _same_lead(source, theirs.inputs[0]):
            return None
        return scope.insert(node, "MatMul", [source, theirs.inputs[0]])
    if node.op == "Add":
        return _masked(scope, node, merge, other)
    if after == merged and isinstance(other, Constant) and consts.size_of(other) == 1:
        return scope.insert(node, node.op, [source, other]) if len(consts.shape_of(other)) <= 3 else None
    return None


def _masked(scope: Scope, node: Node, merge: Node, mask: Value) -> Value | None:
    """Scores [B, H, S, L] with a mask added that was made for [B·H, S, L]."""
    source = merge.inputs[0]
    lead, shape = shape_of(source), shape_of(mask)
    merged, after = shape_of(merge.outputs[0]), shape_of(node.outputs[0])
    if lead is None or shape is None or merged is None or after is None or after[:2] != merged[:2]:
        return None
    theirs = _merge_of(mask)
    if theirs is not None and _same_lead(source, theirs.inputs[0]):
        mask = theirs.inputs[0]
    elif len(shape) == 3 and shape[0] == merged[0] and isinstance(lead[1], int) and _may_be_scores(source):
        sizes = scope.insert(node, "Shape", [mask])
        tail = scope.insert(node, "Gather", [sizes, scope.integers(f"{mask.name}_last", [1, 2])], {"axis": 0})
        heads = scope.integers(f"{mask.name}_heads", [-1, lead[1]])
        target = scope.insert(node, "Concat", [heads, tail], {"axis": 0})
        mask = scope.insert(node, "Reshape", [mask, target])
    elif not (2 <= len(shape) <= 3 and all(d == 1 for d in shape[:-2])):
        return None
    return scope.insert(node, "Add", [source, mask])


def _may_be_scores(value: Value) -> bool:
    """Whether the value is computed from products: a residual with merged dimensions (windows of an image) is not."""
    return maker_of(value, "MatMul", "Mul", "Div", "Add", "Where") is not None


def _merge_of(value: Value) -> Node | None:
    """The Reshape of four dimensions that merges the first two, if one made the value; the Squeeze of a batch of 1."""
    maker = maker_of(value, "Reshape", "Squeeze")
    if maker is None:
        return None
    before, after = shape_of(maker.inputs[0]), shape_of(value)
    if before is None or after is None or len(before) != 4 or len(after) != 3:
        return None
    if maker.op == "Squeeze":
        return maker if before[0] == 1 and before[1] != 1 and after == before[1:] else None
    if len(maker.inputs) < 2:
        return None
    # One head is no matter of merging; taking its dimension away is left to other passes.
    return None if before[1] == 1 or merged_leading(before, after) is None else maker


def _same_lead(first: Value, second: Value) -> bool:
    a, b = shape_of(first), shape_of(second)
    return a is not None and b is not None and a[:2] == b[:2]


def _merging_target(scope: Scope, node: Node, moved: Value) -> Value:
    """[-1, S, L] for a value [B, H, S, L]."""
    shape = shape_of(moved)
    assert shape is not None
    if all(isinstance(size, int) for size in shape[2:]):
        return scope.integers(f"{node.outputs[0].name}_merged", [-1, *_ints(shape[2:])])
    sizes = scope.insert(node, "Shape", [moved])
    tail = scope.insert(node, "Gather", [sizes, scope.integers(f"{moved.name}_last", [2, 3])], {"axis": 0})
    free = scope.integers(f"{moved.name}_free", [-1])
    return scope.insert(node, "Concat", [free, tail], {"axis": 0})


def _ints(sizes: Shape) -> list[int]:
    return [int(size) for size in sizes if isinstance(size, int)]
