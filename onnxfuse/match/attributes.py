"""A node's parameter by name: attribute, constant input, or the op's default."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import onnx

from onnxfuse.graph import consts, view
from onnxfuse.graph.ir import Constant, Node, is_empty
from onnxfuse.graph.types import name_of
from onnxfuse.match.typing import shape_of
from onnxfuse.ops import registry

MISSING = object()
DYNAMIC = object()
_DTYPE_ATTRIBUTES = frozenset({"to", "dtype", "stash_type", "output_dtype"})
_AXIS_ATTRIBUTES = frozenset({"axis", "axes"})


@cache
def schema_of(op: str, domain: str, opset: int) -> onnx.defs.OpSchema | None:
    try:
        return onnx.defs.get_schema(op, opset, domain)
    except onnx.defs.SchemaError:
        return None


@cache
def input_position(op: str, domain: str, name: str, opset: int) -> int | None:
    """The position of the input called `name`, or None."""
    own = registry.find(domain, op)
    if own is not None:
        return next((i for i, spec in enumerate(own.inputs) if spec.name == name), None)
    schema = schema_of(op, domain, opset)
    if schema is None:
        return None
    return next((i for i, formal in enumerate(schema.inputs) if formal.name == name), None)


@cache
def default_of(op: str, domain: str, name: str, opset: int) -> Any:
    """The default of an attribute; MISSING if it has none."""
    own = registry.find(domain, op)
    if own is not None:
        for spec in own.attributes:
            if spec.name == name:
                return MISSING if spec.default is None else spec.default
        return MISSING
    schema = schema_of(op, domain, opset)
    if schema is None or name not in schema.attributes:
        return MISSING
    proto = schema.attributes[name].default_value
    if proto.type == onnx.AttributeProto.UNDEFINED:
        return MISSING
    value = onnx.helper.get_attribute_value(proto)
    return value.decode() if isinstance(value, bytes) else value


def lookup(node: Node, name: str, opset: int) -> Any:
    """The value of a node's parameter as Python numbers, strings and lists.

    MISSING if the node has none and the op no default; DYNAMIC if it is an input that is not constant.
    """
    if name in node.attrs:
        return plain(node.attrs[name])
    domain = view.domain(node)
    position = input_position(node.op, domain, name, opset)
    if position is not None and position < len(node.inputs) and not is_empty(node.inputs[position]):
        given = node.inputs[position]
        if not isinstance(given, Constant):
            return DYNAMIC
        if consts.size_of(given) > 1024:
            return DYNAMIC
        return consts.array(given).tolist()
    implied = _IMPLIED.get((domain, node.op, name))
    if implied is not None:
        return implied(node)
    return default_of(node.op, domain, name, opset)


def _slice_axes(node: Node) -> Any:
    shape = shape_of(node.inputs[1]) if len(node.inputs) > 1 else None
    return list(range(shape[0])) if shape is not None and isinstance(shape[0], int) else MISSING


def _slice_steps(node: Node) -> Any:
    axes = _slice_axes(node)
    return axes if axes is MISSING else [1] * len(axes)


#: What an omitted optional input means, where the schema says it in prose only.
_IMPLIED: dict[tuple[str, str, str], Callable[[Node], Any]] = {
    ("", "Slice", "axes"): _slice_axes,
    ("", "Slice", "steps"): _slice_steps,
}


def plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if isinstance(value, Constant):
        return consts.array(value).tolist()
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, tuple):
        return list(value)
    return value


def normalized(name: str, value: Any, node: Node) -> Any:
    """Axes as negative numbers when the rank is known; dtype numbers as names."""
    if name in _AXIS_ATTRIBUTES:
        shape = shape_of(node.inputs[0]) if node.inputs else None
        return value if shape is None else negative_axes(value, len(shape))
    if name in _DTYPE_ATTRIBUTES and not isinstance(value, (str, bool)):
        return name_of(value) if name != "stash_type" else value
    return value


def negative_axes(value: Any, rank: int) -> Any:
    if isinstance(value, list):
        return sorted(negative_axes(v, rank) for v in value)
    return value - rank if isinstance(value, int) and value >= 0 else value


def equals(found: Any, wanted: Any) -> bool:
    """Whether an attribute is a literal of a rule; floats within 1e-4, since attributes are float32 at best."""
    if isinstance(wanted, list) != isinstance(found, list):
        return False
    if isinstance(wanted, list):
        return len(found) == len(wanted) and all(map(equals, found, wanted))
    if isinstance(wanted, (str, bool)) or isinstance(found, str):
        return found == wanted or (isinstance(wanted, bool) and found == int(wanted))
    if found is None or wanted is None:
        return found is wanted
    if isinstance(wanted, float) or isinstance(found, float):
        return consts.close(float(found), float(wanted), "float32")
    return found == wanted
