"""Keys that say what a node is, apart from every name: op, attributes, constants, and (hashed) its surroundings."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import numpy as np
import onnx

from onnxfuse.graph import consts, view
from onnxfuse.graph.ir import Constant, Graph, Node, Tensor, Value

#: Constants of more elements are weights: their content may differ while the structure is the same.
_WEIGHT_ELEMENTS = 16


def digest(*parts: object) -> str:
    """A short hash of the parts' representations."""
    return hashlib.blake2b("\x1f".join(map(str, parts)).encode(), digest_size=12).hexdigest()


def constant_of(value: Value) -> np.ndarray | Constant | None:
    """The constant behind a value: an initializer, or what a Constant node holds."""
    if isinstance(value, Constant):
        return value
    node = view.producer(value)
    if node is not None and node.op == "Constant" and view.domain(node) == "":
        held = next(iter(node.attrs.values()))
        return held if isinstance(held, Constant) else _array(held)
    return None


def _array(held: Any) -> np.ndarray:
    if isinstance(held, Tensor):
        return np.asarray(held.values)
    return np.asarray(held)


def constant_key(constant: np.ndarray | Constant, content: bool) -> str:
    """Dtype, shape and, for small tensors or with `content`, a hash of the bytes."""
    shape = consts.shape_of(constant) if isinstance(constant, Constant) else constant.shape
    dtype = consts.dtype_of(constant) if isinstance(constant, Constant) else constant.dtype.name
    size = int(np.prod(shape, dtype=np.int64))
    if size > _WEIGHT_ELEMENTS and not content:
        return f"{dtype}{list(shape)}"
    cached = constant.__dict__.get("_content_key") if isinstance(constant, Constant) else None
    if cached is None:
        array = consts.array(constant) if isinstance(constant, Constant) else constant
        raw = array.tobytes() if array.dtype != object else repr(array.tolist()).encode()
        cached = hashlib.blake2b(raw, digest_size=12).hexdigest()
        if isinstance(constant, Constant):
            constant.__dict__["_content_key"] = cached
    return f"{dtype}{list(shape)}:{cached}"


def attributes(node: Node, opset: int) -> dict[str, str]:
    """The attributes as text; those that equal the default of the op's schema are left out."""
    defaults: dict[str, Any] = {}
    if view.domain(node) == "":
        try:
            schema = onnx.defs.get_schema(node.op, opset, "")
        except onnx.defs.SchemaError:
            pass
        else:
            for name, spec in schema.attributes.items():
                if spec.default_value is not None and spec.default_value.type:
                    defaults[name] = onnx.helper.get_attribute_value(spec.default_value)
    shown = {}
    for name, value in sorted(node.attrs.items()):
        if isinstance(value, Graph):
            shown[name] = "graph " + graph_key(value, opset)
            continue
        text = attribute_text(value)
        if name not in defaults or attribute_text(defaults[name]) != text:
            shown[name] = text
    return shown


def attribute_text(value: Any) -> str:
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if isinstance(value, float):
        return f"{np.float32(value):.7g}"
    if isinstance(value, (Tensor, np.ndarray)):
        array = np.asarray(value.values if isinstance(value, Tensor) else value)
        return constant_key(array, content=True)
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(attribute_text, value)) + "]"
    return str(value)


def local_key(node: Node, opset: int, content: bool) -> str:
    """What the node is by itself: op, attributes, and which operands are constants of which value."""
    operands = []
    for value in node.inputs:
        constant = constant_of(value)
        operands.append("-" if value.name == "" else "v" if constant is None else constant_key(constant, content))
    while operands and operands[-1] == "-":
        operands.pop()
    return digest(view.domain(node), node.op, sorted(attributes(node, opset).items()), operands, len(node.outputs))


def graph_key(graph: Graph, opset: int) -> str:
    """A hash of a whole graph that names do not change. Values captured from outside count by position only."""
    known = forward_keys(graph, opset)
    return digest(*(known.get(id(v), "outer") for v in graph.outputs))


def forward_keys(graph: Graph, opset: int) -> dict[int, str]:
    """For each value (by id), a hash of everything that computes it. Graph inputs count by position, dtype and rank."""
    keys: dict[int, str] = {}
    for index, value in enumerate(graph.inputs):
        rank = None if value.shape is None else len(value.shape)
        keys[id(value)] = digest("input", index, value.dtype, rank)
    for node in graph.nodes:
        if is_constant_node(node):
            continue
        mine = digest(local_key(node, opset, True), *(keys.get(id(v), "const") for v in node.inputs))
        for index, value in enumerate(node.outputs):
            keys[id(value)] = digest(mine, index)
    return keys


def is_constant_node(node: Node) -> bool:
    return node.op == "Constant" and view.domain(node) == ""


def computing_nodes(graph: Graph) -> Iterable[Node]:
    """The nodes that a diff compares: all but Constant nodes, which are operands."""
    return (n for n in graph.nodes if not is_constant_node(n))
