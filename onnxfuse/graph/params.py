"""A named parameter of a node, whether the opset has it as an attribute or as a constant input."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from onnxfuse.graph import consts, view
from onnxfuse.graph.ir import Constant, Node

#: Inputs larger than this are data, not parameters.
MAX_ELEMENTS = 1024


class _Missing:
    """The parameter has no value: it is omitted and has no default, or it is computed when the model runs."""

    def __repr__(self) -> str:
        return "MISSING"

    def __bool__(self) -> bool:
        return False


MISSING = _Missing()

#: Names that one parameter had in other opsets, where they differ.
_OTHER_NAMES = {"K": "k", "k": "K", "max_output_boxes": "max_output_boxes_per_class"}

#: What an omitted optional input means, where the schema says it in words only. None: there is no limit, split or axis.
_INPUT_DEFAULTS: dict[tuple[str, str], Any] = {
    ("Dropout", "ratio"): 0.5,
    ("Dropout", "training_mode"): False,
    ("Clip", "min"): None,
    ("Clip", "max"): None,
    ("Slice", "axes"): None,
    ("Slice", "steps"): None,
    ("Squeeze", "axes"): None,
    ("Split", "split"): None,
    ("Trilu", "k"): 0,
    ("Pad", "constant_value"): 0,
    ("Pad", "axes"): None,
}


@lru_cache(maxsize=4096)
def _schema(op: str, domain: str, opset: int) -> tuple[dict[str, Any], dict[str, int], frozenset[str], bool]:
    """(defaults of optional attributes, input index by name, names of optional inputs, whether the op is known)."""
    try:
        schema = onnx.defs.get_schema(op, opset, domain)
    except onnx.defs.SchemaError:
        return {}, {}, frozenset(), False
    defaults: dict[str, Any] = {}
    for name, attribute in schema.attributes.items():
        if attribute.default_value.name or attribute.default_value.type:
            value = onnx.helper.get_attribute_value(attribute.default_value)
            defaults[name] = value.decode() if isinstance(value, bytes) else value
    inputs = {formal.name: index for index, formal in enumerate(schema.inputs)}
    optional = frozenset(
        formal.name for formal in schema.inputs if formal.option == onnx.defs.OpSchema.FormalParameterOption.Optional
    )
    return defaults, inputs, optional, True


def get(node: Node, name: str, opset: int) -> Any:
    """The value of a parameter: a number, a string, a list, or None for an optional one that is left out.

    A constant input of rank 0 gives a number, of rank 1 a list, of a higher rank an array.

    Args:
        opset: the imported version of the node's domain.

    Returns:
        The value, the schema's default, or `MISSING` if the node has no such parameter, if it has no value and no
        default, or if its value is computed when the model runs.
    """
    found = _get(node, name, opset)
    if found is MISSING and name in _OTHER_NAMES:
        return _get(node, _OTHER_NAMES[name], opset)
    return found


def _get(node: Node, name: str, opset: int) -> Any:
    if name in node.attrs:
        value = node.attrs[name]
        if isinstance(value, gs.Node.AttributeRef):
            return MISSING
        return value.decode() if isinstance(value, bytes) else value
    defaults, inputs, optional, known = _schema(node.op, view.domain(node), opset)
    if name in inputs:
        index = inputs[name]
        if index < len(node.inputs) and node.inputs[index].name:
            return _constant(node.inputs[index])
        if (node.op, name) in _INPUT_DEFAULTS:
            return _INPUT_DEFAULTS[node.op, name]
        return None if name in optional else MISSING
    if name in defaults:
        return defaults[name]
    if known and name in _attributes(node.op, view.domain(node), opset):
        return None
    return MISSING


@lru_cache(maxsize=4096)
def _attributes(op: str, domain: str, opset: int) -> frozenset[str]:
    """Names of the optional attributes."""
    schema = onnx.defs.get_schema(op, opset, domain)
    return frozenset(name for name, attribute in schema.attributes.items() if not attribute.required)


def _constant(value: object) -> Any:
    if not isinstance(value, Constant) or consts.size_of(value) > MAX_ELEMENTS:
        return MISSING
    array = consts.array(value)
    if array.ndim == 0:
        return array.item() if array.dtype.kind in "iubf" else float(array)
    if array.ndim == 1:
        return array.tolist() if array.dtype.kind in "iubf" else array.astype(np.float64).tolist()
    return array


def axes(node: Node, opset: int, rank: int | None = None, name: str = "axes") -> tuple[int, ...] | _Missing | None:
    """The axes of a node; with `rank` all non-negative, in the order given. None if they are left out."""
    found = get(node, name, opset)
    if found is MISSING or found is None:
        return found
    numbers = tuple(int(a) for a in (found if isinstance(found, (list, tuple)) else [found]))
    return numbers if rank is None else tuple(n + rank if n < 0 else n for n in numbers)
