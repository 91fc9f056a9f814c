"""Equal computations are made once."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable

import numpy as np
import onnx_graphsurgeon as gs

from onnxfuse.graph import consts, view
from onnxfuse.graph.canonicalize.scope import Scope, dtype_of, shape_of
from onnxfuse.graph.dims import Dim
from onnxfuse.graph.ir import Constant, Deferred, Node, Value
from onnxfuse.graph.shapes import content as contents

#: Constants of at most this many bytes are compared by value, larger ones by identity. It takes in masks and rotary
#: tables, which exporters store once a layer; reading all weights to compare them would cost more than it gives.
COMPARED = 2**20
#: Of constants larger than this only a digest is kept.
_DIGESTED = 256

_RANDOM = frozenset(
    {"RandomNormal", "RandomUniform", "RandomNormalLike", "RandomUniformLike", "Multinomial", "Bernoulli"}
)
_UNMERGEABLE = _RANDOM | {"Dropout"}
#: Domains whose other ops surely give the same result for the same inputs.
_PURE_DOMAINS = frozenset({"", "ai.onnx.ml", "com.microsoft", "onnxfuse", "onnxfuse.std"})


def merge_constants(scope: Scope) -> int:
    """Constants that the nodes of one graph read become one, if dtype, shape and content are equal."""
    first: dict[Hashable, Constant] = {}
    count = 0
    for node in scope.graph.nodes:
        for index, value in enumerate(node.inputs):
            if not isinstance(value, Constant):
                continue
            key = value.__dict__.get("_key")
            if key is None:
                key = value.__dict__["_key"] = constant_key(value)
            kept = first.setdefault(key, value)
            if kept is not value:
                node.inputs[index] = kept
                count += 1
    return count


def constant_key(value: Constant) -> Hashable:
    """Equal for constants of the same dtype, shape and content; those too large to compare only equal themselves."""
    dtype = consts.dtype_of(value)
    values = value._values
    if dtype in (None, "string") or isinstance(values, (Deferred, gs.ir.tensor.SparseValues)):
        return id(value)
    if consts.nbytes_of(value) > COMPARED or (consts.is_lazy(value) and consts.is_external(value)):
        return id(value)
    # Bytes, so that -0.0 and 0.0 differ and NaN equals itself.
    content = np.ascontiguousarray(consts.array(value)).tobytes()
    if len(content) > _DIGESTED:
        content = hashlib.blake2b(content, digest_size=32).digest()
    return dtype, consts.shape_of(value), content


def merge_nodes(scope: Scope) -> int:
    """A node with the op, attributes and inputs of an earlier one is replaced by it. Random nodes and nodes with
    subgraphs are left alone."""
    first: dict[Hashable, Node] = {}
    count = 0
    for node in list(scope.graph.nodes):
        if (
            node.op in _UNMERGEABLE
            or view.domain(node) not in _PURE_DOMAINS
            or view.subgraphs(node)
            or not node.outputs
        ):
            continue
        attrs = _attributes_key(node)
        if attrs is None:
            continue
        names = tuple(bool(o.name) for o in node.outputs)
        # An omitted input is a value without a name, a new object each time.
        key = (node.op, view.domain(node), attrs, tuple(id(v) if v.name else None for v in node.inputs), names)
        kept = first.setdefault(key, node)
        if kept is node:
            continue
        replaced = [scope.replace(old, new) for old, new in zip(node.outputs, kept.outputs, strict=True) if old.name]
        count += any(replaced)
    return count


def _attributes_key(node: Node) -> Hashable | None:
    key: list[Hashable] = []
    for name in sorted(node.attrs):
        value = node.attrs[name]
        if isinstance(value, gs.Tensor):
            dtype, shape, array = consts.of_attribute(value, _DIGESTED)
            if array is None or array.dtype == object:
                return None
            key.append((name, dtype, shape, array.tobytes()))
        elif isinstance(value, np.ndarray):
            key.append((name, str(value.dtype), value.shape, value.tobytes()))
        elif isinstance(value, (list, tuple)):
            key.append((name, tuple(map(_scalar_key, value))))
        elif isinstance(value, (int, float, str, bytes)):
            key.append((name, _scalar_key(value)))
        else:
            return None
    if node.source is not None and len(node.source.attribute) != len(node.__dict__.get("source_attrs") or node.attrs):
        return None  # attributes of types that the IR does not hold
    return tuple(key)


def _scalar_key(value: object) -> Hashable:
    return type(value).__name__, repr(value) if isinstance(value, float) else value


def merge_sizes(scope: Scope) -> int:
    """Of values whose symbolic content is the same, the first computed serves all: chains of shape arithmetic that end
    in the same sizes become one, wherever they read the sizes from."""
    first: dict[Hashable, Value] = {}
    for value in scope.graph.inputs:
        if value.content is not None:
            first[_content_key(value)] = value
    count = 0
    for node in list(scope.graph.nodes):
        for output in node.outputs:
            if output.content is None or not any(isinstance(i, Dim) for i in contents.flat(output.content)):
                continue
            kept = first.setdefault(_content_key(output), output)
            if kept is not output and output.outputs and scope.replace(output, kept):
                count += 1
    return count


def _content_key(value: Value) -> Hashable:
    return dtype_of(value), shape_of(value), value.content
