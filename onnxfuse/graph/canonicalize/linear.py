"""Matrix products on flattened leading dimensions work on the tensor as it was before."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from onnxfuse.graph import consts, dims
from onnxfuse.graph.canonicalize.scope import Scope, maker_of, shape_of, static_attr
from onnxfuse.graph.canonicalize.targets import constant_target
from onnxfuse.graph.canonicalize.transposes import SMALL, merged_leading
from onnxfuse.graph.ir import Constant, Deferred, Node, Value
from onnxfuse.graph.shapes.table import Shape
from onnxfuse.graph.types import numpy_of


def unflatten_products(scope: Scope) -> int:
    """Reshape to two dimensions, MatMul or Gemm with one weight (then a bias), Reshape back: MatMul (and Add) of the
    tensor as it was."""
    count = 0
    if scope.opset < 5:
        return 0
    for node in scope.nodes("Reshape"):
        product = maker_of(node.inputs[0], "MatMul", "Gemm", "Add")
        bias: Value | None = None
        if product is not None and product.op == "Add":
            bias = product.inputs[1]
            if not _is_row(bias) or not scope.read_only_here(product.outputs[0]):
                continue
            product = maker_of(product.inputs[0], "MatMul")
        if product is None or not scope.read_only_here(product.outputs[0]):
            continue
        flat = maker_of(product.inputs[0], "Reshape")
        if flat is None:
            continue
        source = flat.inputs[0]
        before, flattened, after = shape_of(source), shape_of(flat.outputs[0]), shape_of(node.outputs[0])
        weight = shape_of(product.inputs[1])
        if before is None or flattened is None or after is None or weight is None:
            continue
        if len(flattened) != 2 or len(weight) != 2 or len(after) < 3:
            continue
        wanted = (*after[:-1], flattened[1])
        target = None
        if not _same_elements(before, wanted):
            if dims.product(after[:-1]) != flattened[0]:
                continue
            target = constant_target(before, wanted)
            if target is None:
                continue
        if product.op == "Gemm":
            parts = _gemm_parts(scope, product)
            if parts is None:
                continue
            matrix, bias = parts
        else:
            matrix = product.inputs[1]
        matrix_shape = shape_of(matrix)
        if matrix_shape is None or matrix_shape[1] != after[-1]:
            continue
        if target is not None:
            source = scope.insert(node, "Reshape", [source, scope.integers(f"{flat.outputs[0].name}_shape", target)])
        output = scope.insert(node, "MatMul", [source, matrix], prefix=f"{product.outputs[0].name}_MatMul")
        if bias is not None:
            output = scope.insert(node, "Add", [output, bias], prefix=f"{product.outputs[0].name}_Add")
        count += scope.replace(node.outputs[0], output)
    return count


def _same_elements(before: Shape, wanted: Shape) -> bool:
    """Whether a tensor of one shape that can be brought to the other one has it already: min(128, length) for the
    length of a sequence, beside a batch that stays, would be fewer elements if it were not equal."""
    return len(before) == len(wanted) and all(map(dims.same_when_added, before, wanted))


def _is_row(value: Value) -> bool:
    """Whether adding the value to a tensor of any rank ≥ 2 broadcasts along the rows only."""
    shape = shape_of(value)
    return isinstance(value, Constant) and shape is not None and len(shape) <= 2 and all(d == 1 for d in shape[:-1])


def _gemm_parts(scope: Scope, gemm: Node) -> tuple[Value, Value | None] | None:
    """(weight to multiply by, bias) of a Gemm that is a plain linear layer, else None."""
    if static_attr(gemm, "alpha", 1.0) != 1.0 or static_attr(gemm, "transA", 0) != 0:
        return None
    bias = gemm.inputs[2] if len(gemm.inputs) > 2 and gemm.inputs[2].name else None
    if bias is not None and (static_attr(gemm, "beta", 1.0) != 1.0 or not _is_row(bias)):
        return None
    weight = gemm.inputs[1]
    transposed = static_attr(gemm, "transB", 0)
    if transposed is None:
        return None
    if not transposed:
        return weight, bias
    if isinstance(weight, Constant):
        shared = any(reader is not gemm for reader in weight.outputs)
        dtype = consts.dtype_of(weight)
        if dtype is not None and not (shared and consts.nbytes_of(weight) > SMALL):
            rows, columns = consts.shape_of(weight)
            turned = Deferred([columns, rows], numpy_of(dtype), lambda: consts.array(weight).T)
            return scope.constant(f"{weight.name}_T", turned), bias
    return scope.insert(gemm, "Transpose", [weight], {"perm": [1, 0]}), bias


def bias_before_split(scope: Scope) -> int:
    """A constant added to a product whose columns were split (into heads) is added before: it is a bias."""
    count = 0
    for node in scope.nodes("Add"):
        split, bias = maker_of(node.inputs[0], "Reshape"), node.inputs[1]
        if split is None or not isinstance(bias, Constant) or not scope.read_only_here(split.outputs[0]):
            continue
        product = maker_of(split.inputs[0], "MatMul")
        if product is None or not isinstance(product.inputs[1], Constant):
            continue
        before, after, added = shape_of(product.outputs[0]), shape_of(split.outputs[0]), consts.shape_of(bias)
        if before is None or after is None or shape_of(node.outputs[0]) != after or len(after) != len(before) + 1:
            continue
        parts = after[-2:]
        if after[:-2] != before[:-1] or added[-2:] != parts or any(d != 1 for d in added[:-2]):
            continue
        dtype = consts.dtype_of(bias)
        if dtype is None:
            continue
        flat = scope.constant(f"{bias.name}_flat", Deferred([consts.size_of(bias)], numpy_of(dtype), _flattened(bias)))
        total = scope.insert(node, "Add", [product.outputs[0], flat], prefix=f"{product.outputs[0].name}_biased")
        count += scope.replace(node.outputs[0], scope.insert(node, "Reshape", [total, split.inputs[1]], split.attrs))
    return count


def _flattened(bias: Constant) -> Callable[[], np.ndarray]:
    return lambda: consts.array(bias).reshape(-1)


def unflatten_batched_products(scope: Scope) -> int:
    """MatMul of two tensors whose leading dimensions were merged (as torch.bmm wants them), then split again: MatMul of
    the tensors as they were."""
    count = 0
    for node in scope.nodes("Reshape"):
        product = maker_of(node.inputs[0], "MatMul")
        if product is None or not scope.read_only_here(product.outputs[0]):
            continue
        sources = [maker_of(value, "Reshape") for value in product.inputs]
        if None in sources:
            continue
        left, right = (s.inputs[0] for s in sources)  # type: ignore[union-attr]
        before = [shape_of(left), shape_of(right)]
        merged = [shape_of(value) for value in product.inputs]
        after = shape_of(node.outputs[0])
        if after is None or any(s is None for s in (*before, *merged)) or any(len(m) != 3 for m in merged):  # type: ignore[arg-type]
            continue
        leading = [merged_leading(b, m) for b, m in zip(before, merged, strict=True)]  # type: ignore[arg-type]
        if leading[0] is None or leading[0] != leading[1] or len(before[0]) != leading[0] + 2:  # type: ignore[arg-type]
            continue
        lead = before[0][: leading[0]]  # type: ignore[index]
        if before[1][: leading[0]] != lead or after != (*lead, before[0][-2], before[1][-1]):  # type: ignore[index]
            continue
        output = scope.insert(node, "MatMul", [left, right], prefix=f"{product.outputs[0].name}_MatMul")
        count += scope.replace(node.outputs[0], output)
    return count
