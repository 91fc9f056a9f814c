"""Expands nodes of our domains into standard ONNX ops, in place or as model-local functions.

A body depends on attributes, dtypes and on which optional inputs are there, and an ONNX function cannot branch on
those. So one function is made per distinct combination: the node keeps its op type, and node and function carry the
same `overload`, a short hash of the combination (ONNX IR 10).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import onnx
from onnx import FunctionProto, ModelProto, NodeProto, helper

from onnxfuse.errors import OpError
from onnxfuse.ops import registry
from onnxfuse.ops.body import BodyBuilder
from onnxfuse.ops.opdef import OpDef, TensorType

_MIN_IR_VERSION = 10


def expand(
    op: OpDef,
    inputs: Sequence[str],
    outputs: Sequence[str],
    attrs: Mapping[str, Any],
    types: Sequence[TensorType | None],
    opset: int,
    prefix: str,
) -> list[NodeProto]:
    """The nodes, in topological order, that compute `outputs` from `inputs` with standard ops only.

    Args:
        inputs: value names in the op's order; "" (or missing at the end) for an absent optional input.
        outputs: value names; "" for one that is not wanted.
        attrs: the node's attributes (defaults may be left out).
        types: of the inputs, in the same order. The dtypes must be known; shapes may make the body simpler.
        opset: the version of the default domain to write for.
        prefix: of the names of new values and nodes; must not begin any other name of the graph.

    Raises:
        OpError: the opset is too old for this op, or T is not known.
    """
    if opset < op.min_body_opset:
        raise OpError(
            f"{op.full_name} cannot be expanded at opset `{opset}`",
            hint=f"convert the model to opset {op.min_body_opset} or later",
        )
    padding = [""] * (len(op.inputs) - len(inputs))
    names = [*inputs, *padding]
    padded_types = [*types, *([None] * (len(op.inputs) - len(types)))]
    first = padded_types[0]
    if first is None or first.dtype is None:
        raise OpError(f"{op.full_name}: the dtype of `{inputs[0]}` is not known", hint="run shape inference first")
    b = BodyBuilder(first.dtype, opset, prefix, padded_types)
    op.body_fn(b, names, list(outputs), op.resolve(attrs))
    return b.nodes


def function_for(node: NodeProto, types: Sequence[TensorType | None], opset: int) -> FunctionProto:
    """The model-local function that gives `node` its meaning. Its `overload` is to be set on the node."""
    op = registry.get(node.domain, node.op_type)
    attrs = op.attributes_of(node)
    inputs = [spec.name if name else "" for spec, name in zip(op.inputs, node.input, strict=False)]
    outputs = [name if wanted else "" for name, wanted in zip(op.outputs, node.output, strict=False)]
    nodes = expand(op, inputs, outputs, attrs, types, opset, "v")
    digest = hashlib.sha256(repr((op.full_name, opset)).encode())
    for body_node in nodes:
        digest.update(body_node.SerializeToString(deterministic=True))
    function = helper.make_function(
        op.domain,
        op.name,
        [spec.name for spec, _ in zip(op.inputs, node.input, strict=False)],
        [name for name, _ in zip(op.outputs, node.output, strict=False)],
        nodes,
        [helper.make_opsetid("", opset)],
        attributes=[a.name for a in node.attribute],
        doc_string=op.summary,
    )
    function.overload = digest.hexdigest()[:8]
    return function


def attach_functions(model: ModelProto, types: Mapping[str, TensorType] | None = None) -> ModelProto:
    """A copy of `model` in which every node of our domains calls a model-local function: it runs anywhere.

    Args:
        types: of values by name; those of graph inputs, initializers and value_info are known without it.

    Raises:
        OpError: the dtype of a node's input is not known, or the opset is too old.
    """
    result = ModelProto()
    result.CopyFrom(model)
    opset = next((i.version for i in result.opset_import if i.domain in ("", "ai.onnx")), 1)
    functions: dict[tuple[str, str, str], FunctionProto] = {}
    _attach(result.graph, {**_declared_types(result.graph), **(types or {})}, opset, functions)
    if functions:
        result.functions.extend(functions.values())
        result.ir_version = max(result.ir_version, _MIN_IR_VERSION)
        imported = {i.domain for i in result.opset_import}
        for domain in sorted({f.domain for f in functions.values()} - imported):
            result.opset_import.append(helper.make_opsetid(domain, registry.VERSION))
    return result


def _attach(
    graph: onnx.GraphProto,
    types: dict[str, TensorType],
    opset: int,
    functions: dict[tuple[str, str, str], FunctionProto],
) -> None:
    for node in graph.node:
        for attribute in node.attribute:
            for subgraph in (*attribute.graphs, *((attribute.g,) if attribute.HasField("g") else ())):
                _attach(subgraph, {**types, **_declared_types(subgraph)}, opset, functions)
        op = registry.of_node(node)
        if op is None:
            continue
        input_types = [types.get(name) if name else None for name in node.input]
        function = function_for(node, input_types, opset)
        node.overload = function.overload
        functions[(function.domain, function.name, function.overload)] = function
        present = [t or TensorType() if name else None for name, t in zip(node.input, input_types, strict=True)]
        for name, inferred in zip(node.output, op.infer(present, op.attributes_of(node)), strict=False):
            types.setdefault(name, inferred)


def _declared_types(graph: onnx.GraphProto) -> dict[str, TensorType]:
    known = {i.name: TensorType(_dtype_name(i.data_type), tuple(i.dims)) for i in graph.initializer}
    for value in (*graph.input, *graph.value_info, *graph.output):
        tensor = value.type.tensor_type
        if not value.type.HasField("tensor_type") or not tensor.elem_type:
            continue
        shape = None
        if tensor.HasField("shape"):
            shape = tuple(d.dim_value if d.HasField("dim_value") else (d.dim_param or None) for d in tensor.shape.dim)
        known.setdefault(value.name, TensorType(_dtype_name(tensor.elem_type), shape))
    return known


def _dtype_name(elem_type: int) -> str:
    return str(helper.tensor_dtype_to_np_dtype(elem_type).name)
