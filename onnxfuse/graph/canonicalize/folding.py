"""What can be known before the model runs becomes an initializer, as long as the file does not grow by it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_graphsurgeon as gs

from onnxfuse.graph import consts, view
from onnxfuse.graph.canonicalize.evaluate import FUNCTIONS, evaluate
from onnxfuse.graph.canonicalize.scope import Scope, dtype_of, shape_of, static_attr
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


def fold_parts(scope: Scope) -> int:
    """An initializer that is only read in parts, by Splits and constant Slices, gives way to the parts, where they are
    together no larger (the packed projections of `torch.nn.MultiheadAttention` in cross attention)."""
    count = 0
    sources = {id(n.inputs[0]): n.inputs[0] for n in scope.nodes("Split", "Slice") if isinstance(n.inputs[0], Constant)}
    members = set(scope.graph.nodes)
    for source in sources.values():
        readers = view.consumers(source)
        if consts.dtype_of(source) is None or not members.issuperset(readers):
            continue
        cuts = [_cuts(node, source) for node in readers]
        if any(cut is None for cut in cuts):
            continue
        parts = [part for cut in cuts for part in cut or ()]
        if sum(size for _, _, size in parts) > consts.nbytes_of(source):
            continue
        if scope.is_output(source) or any(scope.is_output(output) for output, _, _ in parts):
            continue
        for output, where, _ in parts:
            dtype = numpy_of(str(consts.dtype_of(source)))
            held = Deferred(shape_of(output), dtype, _part_of(source, where))  # type: ignore[arg-type]
            count += scope.replace(output, scope.constant(output.name, held))
    return count


def _part_of(source: Constant, where: tuple[slice, ...]) -> Callable[[], np.ndarray]:
    return lambda: consts.array(source)[where]


def _cuts(node: Node, source: Constant) -> list[tuple[Value, tuple[slice, ...], int]] | None:
    """(output, where it lies, bytes) of each part that a Split or Slice of a constant makes; None if unknown."""
    if node.op not in ("Split", "Slice") or node.inputs[0] is not source or node.domain not in (None, "", "ai.onnx"):
        return None
    if not all(isinstance(v, Constant) or not v.name for v in node.inputs):
        return None
    shape = consts.shape_of(source)
    sizes = [_bytes(output) for output in node.outputs]
    if any(size is None for size in sizes):
        return None
    places: list[tuple[slice, ...]]
    if node.op == "Split":
        axis = static_attr(node, "axis", 0)
        if axis is None:
            return None
        ends = np.cumsum([(shape_of(output) or shape)[axis] for output in node.outputs])
        whole: tuple[slice, ...] = (slice(None),) * (axis % len(shape))
        places = [(*whole, slice(start, end)) for start, end in zip([0, *ends[:-1]], ends, strict=True)]
    else:
        bounds = [consts.ints(v) if v.name else None for v in node.inputs[1:]]
        if len(bounds) < 2 or any(b is None for b in bounds[:2]):
            return None
        starts, ends_ = bounds[0] or [], bounds[1] or []
        axes = bounds[2] if len(bounds) > 2 and bounds[2] is not None else list(range(len(starts)))
        if len(bounds) > 3 and any(step != 1 for step in bounds[3] or [0]):
            return None
        place = [slice(None)] * len(shape)
        for start, end, at in zip(starts, ends_, axes, strict=True):
            place[at] = slice(start, end)
        places = [tuple(place)]
    made = zip(node.outputs, places, sizes, strict=True)
    return [(output, where, size or 0) for output, where, size in made if output.outputs]


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
