"""What can be known before the model runs becomes an initializer, as long as the file does not grow by it."""

from __future__ import annotations

import numpy as np
import onnx_graphsurgeon as gs

from onnxfuse.graph import consts, view
from onnxfuse.graph.canonicalize.evaluate import FUNCTIONS, evaluate
from onnxfuse.graph.canonicalize.scope import Scope, dtype_of, shape_of
from onnxfuse.graph.ir import Constant, Deferred, Node, Value
from onnxfuse.graph.shapes import content as contents
from onnxfuse.graph.types import numpy_of

#: A folded result of at most this many bytes is always worth its place in the file.
ALWAYS = 1024
#: Nothing larger than this is computed at once; a few ops are computed when the result is saved.
LATER = 256 * 1024
#: Ops that surely succeed, so that they can be put off.
_DEFERRABLE = frozenset({"Reshape", "Unsqueeze", "Squeeze"})

#: Ops that make much of little, or that keep compressed weights compressed: folded only into a few elements or never.
_GROWING = frozenset({"ConstantOfShape", "Expand", "Tile", "Range", "Trilu", "OneHot", "Resize", "Pad", "EyeLike"})


def constant_nodes(scope: Scope) -> int:
    """`Constant` nodes become initializers."""
    count = 0
    for node in scope.nodes("Constant"):
        output = node.outputs[0]
        values = _values_of(node)
        if values is None or scope.is_output(output):
            continue
        constant = Constant(output.name, values)
        constant.base_dir = getattr(scope.engine.model, "base_dir", "")
        count += scope.replace(output, constant)
    return count


def _values_of(node: Node) -> object:
    attrs = node.attrs
    if any(isinstance(v, gs.Node.AttributeRef) for v in attrs.values()):
        return None
    if "value" in attrs:
        value = attrs["value"]
        return value._values if isinstance(value, gs.Constant) else value if isinstance(value, np.ndarray) else None
    for name, dtype in (
        ("value_int", "int64"),
        ("value_ints", "int64"),
        ("value_float", "float32"),
        ("value_floats", "float32"),
    ):
        if name in attrs:
            return np.array(attrs[name], dtype=numpy_of(dtype))
    return None


def known_content(scope: Scope) -> int:
    """Integer and bool values whose content is known become initializers: shape arithmetic on static sizes."""
    count = 0
    for node in list(scope.graph.nodes):
        for output in node.outputs:
            if output.content is None or not output.outputs or not contents.is_constant(output.content):
                continue
            shape, dtype = contents.static(shape_of(output)), dtype_of(output)
            if shape is None or dtype is None:
                continue
            array = np.array(contents.flat(output.content), dtype=numpy_of(dtype)).reshape(shape)
            count += scope.replace(output, scope.constant(output.name, array))
    return count


def fold_constants(scope: Scope) -> int:
    """Evaluate nodes whose inputs are all initializers: small results, and results that take no more room than the
    initializers that they free. Dequantization is never folded, so compressed weights stay compressed."""
    count = 0
    for node in scope.nodes():
        if not node.inputs or len(node.outputs) != 1 or scope.is_output(node.outputs[0]) or view.subgraphs(node):
            continue
        present = list(node.inputs)
        if not all(isinstance(v, Constant) or not v.name for v in present) or node.op not in FUNCTIONS:
            continue
        output = node.outputs[0]
        size = _bytes(output)
        if size is None or not _worth(node, present, size):
            continue
        result = (
            _later(node, scope.opset, output) if size > LATER else evaluate(node.op, present, node.attrs, scope.opset)
        )
        if result is None or result.nbytes > max(size, ALWAYS):
            continue
        count += scope.replace(output, scope.constant(output.name, result))
    return count


def _bytes(value: Value) -> int | None:
    shape, dtype = shape_of(value), dtype_of(value)
    if shape is None or dtype in (None, "string") or not all(isinstance(d, int) for d in shape):
        return None
    return int(np.prod(shape, dtype=np.int64)) * numpy_of(dtype).itemsize  # type: ignore[arg-type]


def _later(node: Node, opset: int, output: Value) -> Deferred | None:
    if node.op not in _DEFERRABLE:
        return None
    op, inputs, attrs = node.op, list(node.inputs), dict(node.attrs)
    shape, dtype = shape_of(output), dtype_of(output)

    def compute() -> np.ndarray:
        result = evaluate(op, inputs, attrs, opset)
        assert result is not None
        return result

    return Deferred(shape, numpy_of(dtype), compute)  # type: ignore[arg-type]


def _worth(node: Node, inputs: list[Value], size: int) -> bool:
    known = [v for v in inputs if isinstance(v, Constant)]
    total = sum(consts.nbytes_of(v) for v in known)
    if node.op in _GROWING:
        return size <= max(contents.LIMIT * 8, total)
    if size <= ALWAYS and total <= LATER:
        return True
    if node.op == "Transpose":
        return False  # has its own pass, which puts the work off
    freed = sum(consts.nbytes_of(v) for v in known if all(reader is node for reader in v.outputs))
    return size <= freed
