"""Concrete sizes of every value of a model, once its named dims are given numbers.

Works node by node with ONNX's own inference, and follows the numbers that shape arithmetic computes (Shape, Gather,
Concat, Range … on small integer tensors) by evaluating them, so that what depends on sizes only is always known. What
depends on data (NonZero, a Loop's trip count) stays unknown and is reported as such.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, numpy_helper
from onnx.reference import ReferenceEvaluator

from onnxfuse.errors import InputDataError, OnnxfuseError, UsageError
from onnxfuse.graph.types import name_of, onnx_of
from onnxfuse.inspection.contrib_types import contrib_types
from onnxfuse.ops import registry
from onnxfuse.ops.opdef import FUSED_DOMAIN, STD_DOMAIN, TensorType

#: Integer tensors of at most this many elements are followed by value.
_TRACKED_ELEMENTS = 256
_REFUSALS = (RuntimeError, TypeError, ValueError, IndexError, AttributeError, KeyError, AssertionError)
_TRACKED_DTYPES = frozenset({"int64", "int32", "bool", "float32"})


@dataclass
class Sizes:
    """Types by value name (`types`), the numbers behind small tensors (`values`), and the branches of If that these
    sizes never take, as (first output of the If, attribute) pairs."""

    types: dict[str, TensorType] = field(default_factory=dict)
    values: dict[str, np.ndarray] = field(default_factory=dict)
    dead_branches: set[tuple[str, str]] = field(default_factory=set)


_ENTRY = re.compile(r"\s*(?:([^=:,]+)=(\d+)|([^=,]+):\[?(\d+(?:x\d+)*)\]?)\s*(?:,|$)")


def parse_sizes(text: str) -> tuple[dict[str, int], dict[str, tuple[int, ...]]]:
    """`batch=2,seq=16,pixels:1x3x224x224` as sizes by dim name and shapes by input name.

    Raises:
        UsageError: the text has another form.
    """
    dims: dict[str, int] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    position = 0
    while position < len(text):
        match = _ENTRY.match(text, position)
        if match is None:
            raise UsageError(
                f"`{text}` does not say sizes", hint="write dims as batch=1,seq=128 and inputs as input_ids:1x128"
            )
        if match[1] is not None:
            dims[match[1].strip()] = int(match[2])
        else:
            shapes[match[3].strip()] = tuple(int(n) for n in match[4].split("x"))
        position = match.end()
    return dims, shapes


def default_size(dim: str) -> int:
    """The size that a named dim gets when the user gives none: batch 1, no past, sequences of 128."""
    name = dim.lower()
    if "past" in name and "+" not in name and "total" not in name:
        return 128
    if "batch" in name or name in ("b", "n", "bs"):
        return 1
    return 128


def bind(model: ModelProto, shapes: Mapping[str, Sequence[int]], dims: Mapping[str, int]) -> dict[str, int]:
    """The size of every named dim of the model's inputs.

    Args:
        shapes: whole shapes by input name; they win over `dims` and defaults.
        dims: sizes by dim name.

    Raises:
        InputDataError: an input or dim that the model has not, another rank, or sizes that contradict.
    """
    bound: dict[str, int] = {}
    inputs = {i.name: i for i in model.graph.input}
    for name, shape in shapes.items():
        if name not in inputs:
            raise InputDataError(f"the model has no input `{name}`", hint=f"its inputs are {', '.join(inputs)}")
        declared = inputs[name].type.tensor_type.shape.dim
        if len(declared) != len(shape):
            raise InputDataError(f"input `{name}` has rank {len(declared)}, not `{len(shape)}`")
        for dim, size in zip(declared, shape, strict=True):
            if dim.HasField("dim_value") and dim.dim_value not in (size, 0):
                raise InputDataError(
                    f"input `{name}`: `{list(shape)}` does not fit, one size is fixed to {dim.dim_value}"
                )
            if dim.dim_param and bound.setdefault(dim.dim_param, int(size)) != size:
                raise InputDataError(f"dim `{dim.dim_param}` is given as both `{bound[dim.dim_param]}` and `{size}`")
    known = [d.dim_param for i in inputs.values() for d in i.type.tensor_type.shape.dim if d.dim_param]
    for name, size in dims.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean `{near[0]}`?" if near else f"its dims are {', '.join(dict.fromkeys(known))}"
            raise InputDataError(f"the model has no dim `{name}`", hint=hint)
        bound.setdefault(name, int(size))
    for name in known:
        if name not in bound and "+" not in name:
            bound[name] = default_size(name)
    for name in known:
        if name not in bound:  # sums such as `past_sequence_length + 1`, as exporters write them
            bound[name] = sum(
                int(p) if p.isdigit() else bound.get(p, default_size(p)) for p in map(str.strip, name.split("+"))
            )
    return bound


def infer(model: ModelProto, bound: Mapping[str, int], shapes: Mapping[str, Sequence[int]] | None = None) -> Sizes:
    """The sizes of all values, with every named input dim replaced by its size in `bound`."""
    opsets = {("" if o.domain == "ai.onnx" else o.domain): o.version for o in model.opset_import}
    sizes = Sizes()
    for value in model.graph.input:
        tensor = _declared(value, bound)
        if shapes and value.name in shapes:
            tensor = TensorType(tensor.dtype, tuple(int(d) for d in shapes[value.name]))
        sizes.types[value.name] = tensor
    _Inference(opsets, bound).graph(model.graph, sizes)
    return sizes


def _declared(value: onnx.ValueInfoProto, bound: Mapping[str, int]) -> TensorType:
    tensor = value.type.tensor_type
    if not value.type.HasField("tensor_type"):
        return TensorType()
    shape = None
    if tensor.HasField("shape"):
        shape = tuple(d.dim_value if d.HasField("dim_value") else bound.get(d.dim_param) for d in tensor.shape.dim)
    return TensorType(name_of(tensor.elem_type), shape)


class _Inference:
    def __init__(self, opsets: Mapping[str, int], bound: Mapping[str, int]) -> None:
        self.opsets = opsets
        self.bound = bound
        self.imports = [onnx.helper.make_opsetid(d, v) for d, v in opsets.items()]

    def graph(self, graph: GraphProto, sizes: Sizes) -> None:
        for tensor in graph.initializer:
            sizes.types[tensor.name] = TensorType(name_of(tensor.data_type), tuple(tensor.dims))
            self._keep_tensor(sizes, tensor.name, tensor)
        for sparse in graph.sparse_initializer:
            sizes.types[sparse.values.name] = TensorType(name_of(sparse.values.data_type), tuple(sparse.dims))
        declared = {v.name: v for v in graph.value_info}
        for node in graph.node:
            for name, tensor in zip(node.output, self._outputs(node, sizes), strict=False):
                if not name:
                    continue
                if tensor.shape is None or None in tensor.shape or tensor.dtype is None:
                    tensor = _merge(tensor, _declared(declared[name], self.bound) if name in declared else TensorType())
                sizes.types[name] = tensor

    def _keep_tensor(self, sizes: Sizes, name: str, tensor: TensorProto) -> None:
        small = math.prod(tensor.dims) <= _TRACKED_ELEMENTS and tensor.data_location != TensorProto.EXTERNAL
        if small and name_of(tensor.data_type) in _TRACKED_DTYPES:
            sizes.values[name] = numpy_helper.to_array(tensor)

    def _outputs(self, node: NodeProto, sizes: Sizes) -> list[TensorType]:
        domain = "" if node.domain == "ai.onnx" else node.domain
        attributes = {a.name: a for a in node.attribute}
        inputs = [sizes.types.get(n, TensorType()) if n else None for n in node.input]
        op = registry.find(domain, node.op_type)
        if op is not None:
            try:
                return op.infer(inputs, op.attributes_of(node))
            except OnnxfuseError:
                return [TensorType() for _ in node.output]
        if any(a.type in (AttributeProto.GRAPH, AttributeProto.GRAPHS) for a in attributes.values()):
            return self._control_flow(node, attributes, sizes)
        if domain == "com.microsoft":
            plain = {name: onnx.helper.get_attribute_value(a) for name, a in attributes.items()}
            total = sizes.values.get(node.input[6]) if node.op_type == "GroupQueryAttention" else None
            tokens = None if total is None else int(total.reshape(-1)[0])
            return contrib_types(node.op_type, inputs, plain, len(node.output), tokens)
        if domain:
            return [TensorType() for _ in node.output]
        if self._evaluate(node, sizes):
            return [_type_of(sizes.values[n]) if n else TensorType() for n in node.output]
        return self._infer_node(node, sizes)

    def _evaluate(self, node: NodeProto, sizes: Sizes) -> bool:
        """Compute a node on numbers that are known; remember the results if they are small."""
        if node.op_type in ("Shape", "Size"):
            tensor = sizes.types.get(node.input[0], TensorType())
            if tensor.shape is None or not all(isinstance(d, int) for d in tensor.shape):
                return False
            dims = np.array(tensor.shape, np.int64)
            if node.op_type == "Size":
                sizes.values[node.output[0]] = np.array(dims.prod(), np.int64)
            else:
                limits = {a.name: a.i for a in node.attribute}
                sizes.values[node.output[0]] = dims[limits.get("start", 0) : limits.get("end", len(dims))]
            return True
        if node.op_type == "Constant":
            return self._constant(node, sizes)
        if not node.input or not all(n in sizes.values for n in node.input if n):
            return False
        if node.op_type == "ConstantOfShape" and sizes.values[node.input[0]].prod() > _TRACKED_ELEMENTS:
            return False
        if node.op_type == "Range" and _range_length(node, sizes) > _TRACKED_ELEMENTS:
            return False
        if node.op_type in ("Expand", "Tile", "Pad", "OneHot") or node.op_type.startswith("Random"):
            return False  # may be far larger than what they are computed from, or differ at each run
        try:
            evaluator = ReferenceEvaluator(_as_model(node, sizes, self.imports))
            results = evaluator.run(None, {n: sizes.values[n] for n in dict.fromkeys(node.input) if n})
        except _REFUSALS:  # the reference implementation of an op may be missing: then only types are known
            return False
        if any(not isinstance(r, (np.ndarray, np.generic)) or r.size > _TRACKED_ELEMENTS for r in results):
            return False
        names = [n for n in node.output if n]
        sizes.values.update({name: np.asarray(r) for name, r in zip(names, results, strict=True)})
        return True

    def _constant(self, node: NodeProto, sizes: Sizes) -> bool:
        attribute = node.attribute[0]
        if attribute.type == AttributeProto.TENSOR:
            if math.prod(attribute.t.dims) > _TRACKED_ELEMENTS or name_of(attribute.t.data_type) == "string":
                return False
            value = numpy_helper.to_array(attribute.t)
        else:
            value = np.array(onnx.helper.get_attribute_value(attribute))
            if attribute.name in ("value_float", "value_floats"):
                value = value.astype(np.float32)
        sizes.values[node.output[0]] = value
        return True

    def _infer_node(self, node: NodeProto, sizes: Sizes) -> list[TensorType]:
        unknown = [TensorType() for _ in node.output]
        try:
            opset = self.opsets.get("", 1)
            if node.op_type in ("LessOrEqual", "GreaterOrEqual"):
                opset = max(opset, 16)  # the first version whose inference gives shapes
            schema = onnx.defs.get_schema(node.op_type, opset, "")
        except onnx.defs.SchemaError:
            # ONNX Runtime registers some of its ops in ONNX's domain, LayerNormalization before opset 17 among them.
            plain = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
            inputs = [sizes.types.get(n, TensorType()) if n else None for n in node.input]
            return contrib_types(node.op_type, inputs, plain, len(node.output))
        types, data = {}, {}
        for name in node.input:
            if name and sizes.types.get(name, TensorType()).dtype is None:
                return unknown
            if name:
                types[name] = _type_proto(sizes.types[name])
                if name in sizes.values:
                    data[name] = numpy_helper.from_array(np.ascontiguousarray(sizes.values[name]), name)
        try:
            result = onnx.shape_inference.infer_node_outputs(
                schema, node, types, data, {}, opset_imports=self.imports, ir_version=10
            )
        except onnx.shape_inference.InferenceError:  # what can be said then is what value_info says
            return unknown
        return [_from_proto(result[n]) if n in result else TensorType() for n in node.output]

    def _control_flow(
        self, node: NodeProto, attributes: Mapping[str, AttributeProto], sizes: Sizes
    ) -> list[TensorType]:
        """Sizes inside the branches and bodies (values share one table: names are unique in a model's scopes), and
        the outputs as the first subgraph gives them."""
        outputs: list[TensorType] = []
        if node.op_type == "If" and node.input[0] in sizes.values:
            taken = bool(sizes.values[node.input[0]].reshape(-1)[0])
            sizes.dead_branches.add((node.output[0], "else_branch" if taken else "then_branch"))
        for name, attribute in attributes.items():
            if attribute.type != AttributeProto.GRAPH or (node.output[0], name) in sizes.dead_branches:
                continue
            body = attribute.g
            carried = self._body_inputs(node, sizes)
            for value, tensor in zip(body.input, carried, strict=False):
                sizes.types[value.name] = _merge(_declared(value, self.bound), tensor)
            for value in body.input[len(carried) :]:
                sizes.types[value.name] = _declared(value, self.bound)
            self.graph(body, sizes)
            found = [sizes.types.get(v.name, TensorType()) for v in body.output]
            if node.op_type == "Loop":
                states = len(node.input) - 2
                found = found[1 : 1 + states] + [_stacked(t) for t in found[1 + states :]]
            elif node.op_type == "Scan":
                found = [TensorType(t.dtype) for t in found]
            outputs = [_merge(a, b) for a, b in zip(outputs, found, strict=False)] if outputs else found
        return outputs or [TensorType() for _ in node.output]

    def _body_inputs(self, node: NodeProto, sizes: Sizes) -> list[TensorType]:
        if node.op_type != "Loop":
            return []
        states = [sizes.types.get(n, TensorType()) for n in node.input[2:]]
        return [TensorType("int64", ()), TensorType("bool", ()), *states]


def _stacked(tensor: TensorType) -> TensorType:
    return TensorType(tensor.dtype, None if tensor.shape is None else (None, *tensor.shape))


def _range_length(node: NodeProto, sizes: Sizes) -> int:
    start, limit, delta = (float(sizes.values[n].reshape(-1)[0]) for n in node.input)
    return max(0, math.ceil((limit - start) / delta)) if delta else 0


def _as_model(node: NodeProto, sizes: Sizes, imports: list[Any]) -> ModelProto:
    inputs = []
    for name in dict.fromkeys(node.input):
        if name:
            array = sizes.values[name]
            inputs.append(
                onnx.helper.make_tensor_value_info(name, onnx_of(name_of(array.dtype) or "int64"), array.shape)
            )
    outputs = [onnx.ValueInfoProto(name=n) for n in node.output if n]
    return onnx.helper.make_model(onnx.helper.make_graph([node], "one", inputs, outputs), opset_imports=imports)


def _type_of(array: np.ndarray) -> TensorType:
    return TensorType(name_of(array.dtype), array.shape)


def _type_proto(tensor: TensorType) -> onnx.TypeProto:
    shape = None
    if tensor.shape is not None:
        shape = [d if isinstance(d, int) else None for d in tensor.shape]
    return onnx.helper.make_tensor_type_proto(onnx_of(tensor.dtype or "float32"), shape)


def _from_proto(proto: onnx.TypeProto) -> TensorType:
    tensor = proto.tensor_type
    shape = None
    if tensor.HasField("shape"):
        shape = tuple(d.dim_value if d.HasField("dim_value") else None for d in tensor.shape.dim)
    return TensorType(name_of(tensor.elem_type), shape)


def _merge(a: TensorType, b: TensorType) -> TensorType:
    """What either knows; sizes beat unknowns."""
    if a.shape is None or b.shape is None or len(a.shape) != len(b.shape):
        return TensorType(a.dtype or b.dtype, a.shape if a.shape is not None else b.shape)
    return TensorType(a.dtype or b.dtype, tuple(y if x is None else x for x, y in zip(a.shape, b.shape, strict=True)))


def inlined(model: ModelProto) -> ModelProto:
    """The model with its own functions expanded, except those that only spell out a fused op."""
    ours = [(f.domain, f.name) for f in model.functions if f.domain in (FUSED_DOMAIN, STD_DOMAIN)]
    if len(ours) == len(model.functions):
        return model
    from onnx import inliner

    return inliner.inline_selected_functions(model, ours, exclude=True)
