"""What a model is: parameters, ops with their cost, activation memory, blocks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import onnx
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto

from onnxfuse.errors import OnnxfuseError
from onnxfuse.graph.types import name_of
from onnxfuse.inspection import costs, memory
from onnxfuse.inspection.sizes import Sizes, bind, infer, inlined
from onnxfuse.ops import registry
from onnxfuse.ops.opdef import Cost, TensorType

SCHEMA = 1


@dataclass(frozen=True)
class OpRow:
    """All nodes of one op. `flops` and `bytes` sum over the nodes whose sizes are known; `unknown` counts the rest."""

    op: str
    count: int
    flops: int
    bytes: int
    unknown: int

    @property
    def intensity(self) -> float:
        """Operations per byte; 0 for ops that move no bytes."""
        return self.flops / self.bytes if self.bytes else 0.0


@dataclass(frozen=True)
class Parameters:
    """Weights: how many numbers, how many bytes, by dtype. A tensor read twice counts once."""

    count: int
    bytes: int
    by_dtype: dict[str, int]
    tensors: int


@dataclass(frozen=True)
class Inspection:
    """Everything `onnxfuse inspect` shows; ``to_json`` is the documented form."""

    path: str
    producer: str
    ir_version: int
    opsets: dict[str, int]
    dims: dict[str, int]
    inputs: dict[str, TensorType]
    outputs: dict[str, TensorType]
    parameters: Parameters
    nodes: int
    ops: list[OpRow]
    peak: memory.Peak
    input_bytes: int | None
    output_bytes: int | None
    blocks: dict[str, int] | None

    @property
    def flops(self) -> int:
        return sum(row.flops for row in self.ops)

    @property
    def bytes(self) -> int:
        """Bytes read and written by all nodes, weights included."""
        return sum(row.bytes for row in self.ops)

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "model": self.path,
            "producer": self.producer,
            "ir_version": self.ir_version,
            "opsets": self.opsets,
            "dims": self.dims,
            "inputs": {n: {"dtype": t.dtype, "shape": _shape(t)} for n, t in self.inputs.items()},
            "outputs": {n: {"dtype": t.dtype, "shape": _shape(t)} for n, t in self.outputs.items()},
            "parameters": asdict(self.parameters),
            "nodes": self.nodes,
            "flops": self.flops,
            "bytes": self.bytes,
            "unknown_sizes": sum(row.unknown for row in self.ops),
            "ops": [{**asdict(row), "intensity": round(row.intensity, 3)} for row in self.ops],
            "memory": {
                "peak_activation_bytes": self.peak.bytes,
                "at": self.peak.node,
                "input_bytes": self.input_bytes,
                "output_bytes": self.output_bytes,
            },
            "blocks": self.blocks,
        }


def _shape(tensor: TensorType) -> list[int | str | None] | None:
    return None if tensor.shape is None else list(tensor.shape)


def inspect_model(
    model: ModelProto,
    path: str = "",
    *,
    shapes: Mapping[str, Sequence[int]] | None = None,
    dims: Mapping[str, int] | None = None,
    blocks: dict[str, int] | None = None,
) -> Inspection:
    """Inspect a model at given input sizes.

    Args:
        model: the model; external data need not be loaded.
        path: shown in the result.
        shapes: whole input shapes by input name.
        dims: sizes by dim name. Dims that neither binds get `sizes.default_size`.
        blocks: counts of blocks by kind, made by the caller.

    Raises:
        InputDataError: `shapes` or `dims` do not fit the model.
    """
    shapes = shapes or {}
    bound = bind(model, shapes, dims or {})
    flat = inlined(model)
    sizes = infer(flat, bound, shapes)
    initializers = {t.name for t in flat.graph.initializer}
    inputs = {i.name: sizes.types[i.name] for i in flat.graph.input if i.name not in initializers}
    outputs = {o.name: sizes.types.get(o.name, TensorType()) for o in flat.graph.output}
    return Inspection(
        path=path,
        producer=f"{model.producer_name} {model.producer_version}".strip(),
        ir_version=model.ir_version,
        opsets={(o.domain or "ai.onnx"): o.version for o in model.opset_import},
        dims=bound,
        inputs=inputs,
        outputs=outputs,
        parameters=_parameters(flat),
        nodes=sum(1 for _ in _nodes(flat.graph, None)),
        ops=_op_rows(flat.graph, sizes),
        peak=memory.peak(flat.graph, sizes),
        input_bytes=_total(inputs),
        output_bytes=_total(outputs),
        blocks=blocks,
    )


def _total(values: Mapping[str, TensorType]) -> int | None:
    each = [costs.nbytes(t) for t in values.values()]
    known = [n for n in each if n is not None]
    return sum(known) if len(known) == len(each) else None


def _nodes(graph: GraphProto, sizes: Sizes | None) -> Iterator[NodeProto]:
    """All nodes, those of subgraphs included; with `sizes`, without the branches never taken."""
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            if attribute.type != AttributeProto.GRAPH:
                continue
            if sizes is None or (node.output[0], attribute.name) not in sizes.dead_branches:
                yield from _nodes(attribute.g, sizes)


def _tensors(graph: GraphProto) -> Iterator[onnx.TensorProto]:
    yield from graph.initializer
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == AttributeProto.TENSOR and node.op_type == "Constant":
                yield attribute.t
            elif attribute.type == AttributeProto.GRAPH:
                yield from _tensors(attribute.g)


def _parameters(model: ModelProto) -> Parameters:
    by_dtype: dict[str, int] = {}
    total_bytes = tensors = 0
    for tensor in _tensors(model.graph):
        kind = TensorType(name_of(tensor.data_type), tuple(tensor.dims))
        elements = costs.count(kind) or 0
        name = kind.dtype or "other"
        by_dtype[name] = by_dtype.get(name, 0) + elements
        total_bytes += costs.nbytes(kind) or 0
        tensors += 1
    return Parameters(sum(by_dtype.values()), total_bytes, dict(sorted(by_dtype.items())), tensors)


def op_name(node: NodeProto) -> str:
    """`Op`, or `domain::Op` outside ONNX's own domain."""
    return node.op_type if node.domain in ("", "ai.onnx") else f"{node.domain}::{node.op_type}"


def node_cost(node: NodeProto, sizes: Sizes) -> Cost | None:
    """Operations and bytes of one node; None when a size is unknown. Control flow itself costs nothing."""
    if any(a.type == AttributeProto.GRAPH for a in node.attribute) or node.op_type == "Constant":
        return Cost(0, 0, 0)
    inputs = [sizes.types.get(n, TensorType()) if n else None for n in node.input]
    outputs = [sizes.types.get(n, TensorType()) if n else None for n in node.output]
    op = registry.of_node(node)
    if op is not None:
        try:
            return op.cost(inputs, op.attributes_of(node))
        except OnnxfuseError:
            return None
    attrs = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute if a.type != AttributeProto.UNDEFINED}
    domain = "" if node.domain == "ai.onnx" else node.domain
    return costs.of_standard_op(node.op_type, domain, inputs, outputs, attrs)


def _op_rows(graph: GraphProto, sizes: Sizes) -> list[OpRow]:
    rows: dict[str, list[int]] = {}
    for node in _nodes(graph, sizes):
        row = rows.setdefault(op_name(node), [0, 0, 0, 0])
        cost = node_cost(node, sizes)
        row[0] += 1
        if cost is None:
            row[3] += 1
        else:
            row[1] += cost.flops
            row[2] += cost.bytes
    found = [OpRow(op, *numbers) for op, numbers in rows.items()]
    return sorted(found, key=lambda r: (-r.flops, -r.bytes, -r.count, r.op))
