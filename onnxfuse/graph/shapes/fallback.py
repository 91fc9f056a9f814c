"""Ops outside of the table: ONNX's own inference of the single node, then what the file declares."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import onnx
import onnx_graphsurgeon as gs

from onnxfuse.graph import consts, view
from onnxfuse.graph.dims import Dim, SymInt
from onnxfuse.graph.ir import Constant, Value
from onnxfuse.graph.types import name_of, onnx_of

if TYPE_CHECKING:
    from onnxfuse.graph.shapes.engine import Inference
    from onnxfuse.graph.shapes.table import Call


@lru_cache(maxsize=1024)
def schema_of(op: str, domain: str, opset: int) -> onnx.defs.OpSchema | None:
    """The schema in force, or None if ONNX does not know the op."""
    try:
        return onnx.defs.get_schema(op, opset, domain)
    except onnx.defs.SchemaError:
        return None


def infer(call: Call) -> None:
    """Ask ONNX. Sizes that it returns by name are mapped back; new ones become unknown sizes."""
    node = call.node
    domain = view.domain(node)
    schema = schema_of(node.op, domain, call.opset)
    if schema is None or view.subgraphs(node):
        return
    known: dict[str, SymInt] = {}
    types: dict[str, onnx.TypeProto] = {}
    data: dict[str, onnx.TensorProto] = {}
    for index, value in enumerate(call.inputs):
        if not value.name or value.name in types:
            continue
        dtype = call.dtype(index)
        if dtype is None:
            return
        types[value.name] = _type(dtype, call.shape_or_none(index), known)
        if isinstance(value, Constant) and consts.size_of(value) <= 64 and dtype != "string":
            data[value.name] = onnx.numpy_helper.from_array(consts.array(value), value.name)
    try:
        attrs = {k: v for k, v in node.attrs.items() if not isinstance(v, (gs.Node.AttributeRef, gs.Tensor))}
        proto = onnx.helper.make_node(
            node.op, [v.name for v in call.inputs], [v.name for v in call.outputs], domain=domain, **attrs
        )
        imports = [onnx.helper.make_opsetid(domain, call.opset)]
        found = onnx.shape_inference.infer_node_outputs(schema, proto, types, data, opset_imports=imports)
    except Exception:
        # Inference fails in many ways for nodes that still run; then nothing is known.
        return
    for index, output in enumerate(call.outputs):
        info = found.get(output.name)
        if info is None or not info.HasField("tensor_type"):
            continue
        shape = None
        if info.tensor_type.HasField("shape"):
            shape = [
                d.dim_value
                if d.HasField("dim_value")
                else known.get(d.dim_param, call.fresh(index, axis))
                if d.dim_param
                else call.fresh(index, axis)
                for axis, d in enumerate(info.tensor_type.shape.dim)
            ]
        call.set(index, name_of(info.tensor_type.elem_type), shape)


def _type(dtype: str, shape: tuple[SymInt, ...] | None, known: dict[str, SymInt]) -> onnx.TypeProto:
    if shape is None:
        return onnx.helper.make_tensor_type_proto(onnx_of(dtype), None)
    sizes: list[int | str] = []
    for size in shape:
        if isinstance(size, Dim):
            known[str(size)] = size
            sizes.append(str(size))
        else:
            sizes.append(size)
    return onnx.helper.make_tensor_type_proto(onnx_of(dtype), sizes)


def use_declared(value: Value, engine: Inference) -> None:
    """Fill in what the file itself says of a value: dtype, rank and constant sizes. Its names of sizes are not trusted
    (exporters give intermediate values names that do not always agree with the inputs')."""
    info = value.__dict__.get("declared")
    if info is None or not info.type.HasField("tensor_type"):
        return
    if value.dtype is None and info.type.tensor_type.elem_type:
        value.dtype = name_of(info.type.tensor_type.elem_type)
    if value.shape is None and info.type.tensor_type.HasField("shape"):
        value.shape = tuple(
            d.dim_value if d.HasField("dim_value") and d.dim_value >= 0 else engine.fresh(value, axis)
            for axis, d in enumerate(info.type.tensor_type.shape.dim)
        )
