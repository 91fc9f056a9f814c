"""A model with all of its floating-point tensors in a wider dtype: the oracle that results are measured against.

The rewrite is on the ModelProto, op by op as the exporter wrote it, so that nothing of this project's own graph code
takes part in the truth. Ops without a kernel for the wide dtype get casts around them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import onnx
import onnx.inliner
from onnx import AttributeProto, TensorProto, helper, numpy_helper

from onnxfuse.errors import ModelError
from onnxfuse.runtime.session import Runner, with_subgraphs

#: What becomes what, for an oracle of that name.
WIDENINGS: dict[str, dict[int, int]] = {
    "float64": {TensorProto.FLOAT: TensorProto.DOUBLE, TensorProto.FLOAT16: TensorProto.DOUBLE,
                TensorProto.BFLOAT16: TensorProto.DOUBLE},
    "float32": {TensorProto.FLOAT16: TensorProto.FLOAT, TensorProto.BFLOAT16: TensorProto.FLOAT},
}

#: Attributes that hold a dtype number rather than a tensor.
_DTYPE_ATTRIBUTES = frozenset({"to", "dtype", "output_dtype", "softmax_precision", "stash_type"})
_UNKNOWN_OP = re.compile(
    r"(?:Could not find an implementation for|Failed to find kernel for|No Op registered for)\s+(?:[\w.]*\.)?(\w+)"
)
_TYPE_ERROR = re.compile(
    r"of input parameter \([^)]*\) of operator \(([\w.:]+)\) in node|Type Error: .*?\((\w+)\)", re.S
)
#: Ops that ONNX Runtime expands by their function bodies when it has no kernel.
_WITH_BODIES = ("Gelu", "Attention", "RotaryEmbedding", "RMSNormalization", "LayerNormalization", "Swish", "Mish")
_MAX_ATTEMPTS = 12


#: No release of ONNX Runtime has these in float64, so the first attempt is spared.
_NEVER_WIDE = {"float64": frozenset({"Erf"}), "float32": frozenset()}


def widen(proto: onnx.ModelProto, to: str, wrapped: Iterable[str] = ()) -> onnx.ModelProto:
    """A copy with every float tensor narrower than `to` retyped to it.

    Weights are converted, `Cast` nodes that made a narrow dtype make the wide one, declared types of inputs, outputs
    and inner values follow. Integer tensors stay.

    Args:
        proto: a model whose tensors are inside it and that has no model-local functions (`self_contained`).
        to: `float32` or `float64`.
        wrapped: op types that keep their dtype, between casts.
    """
    mapping = WIDENINGS[to]
    result = onnx.ModelProto()
    result.CopyFrom(proto)
    wrap = frozenset(wrapped)
    types = value_types(proto) if wrap else {}
    _graph(result.graph, mapping, wrap, types)
    _keep_constants(result.graph, _constants(proto.graph) if wrap else {})
    if wrap and all(o.domain not in ("", "ai.onnx") for o in result.opset_import):
        result.opset_import.append(helper.make_opsetid("", 17))
    return result


def self_contained(proto: onnx.ModelProto, base_dir: Path, *, inline: bool = True) -> onnx.ModelProto:
    """A copy whose tensors are all inside it, and (with `inline`) whose model-local functions are inlined."""
    result = onnx.ModelProto()
    result.CopyFrom(proto)
    if any(t.data_location == TensorProto.EXTERNAL for t in result.graph.initializer):
        onnx.external_data_helper.load_external_data_for_model(result, str(base_dir))
        for tensor in result.graph.initializer:
            tensor.data_location = TensorProto.DEFAULT
            del tensor.external_data[:]
    return onnx.inliner.inline_local_functions(result) if inline and result.functions else result


def runner(
    proto: onnx.ModelProto, to: str, provider: str = "cpu", *, base_dir: Path | None = None,
    custom_ops: Iterable[str | Path] = (), level: str = "none", exact: bool = True,
) -> Runner:
    """A `Runner` of the widened model, with casts around ops that ONNX Runtime cannot run in the wide dtype.

    Raises:
        ModelError: ONNX Runtime cannot run it at all.
    """
    inside = self_contained(proto, base_dir or Path())
    present = _op_types(inside)
    wrapped = set(_NEVER_WIDE[to] & present)
    for _ in range(_MAX_ATTEMPTS):
        wide = widen(inside, to, wrapped)
        try:
            return Runner(wide, provider, custom_ops=custom_ops, level=level, exact=exact)
        except ModelError as error:
            culprit = _culprit(str(error), present, wrapped)
            if culprit is None:
                raise
            wrapped.add(culprit)
    raise ModelError(f"no {to} form of the model runs in ONNX Runtime")


def cast_feeds(feeds: Mapping[str, np.ndarray], to: str) -> dict[str, np.ndarray]:
    """The inputs in the oracle's dtypes."""
    mapping = {helper.tensor_dtype_to_np_dtype(k): helper.tensor_dtype_to_np_dtype(v) for k, v in WIDENINGS[to].items()}
    return {name: value.astype(mapping[value.dtype]) if value.dtype in mapping else value
            for name, value in feeds.items()}


def _culprit(message: str, present: set[str], wrapped: set[str]) -> str | None:
    """The op type that a refusal is about, if wrapping it could help."""
    candidates: list[str] = []
    for pattern in (_UNKNOWN_OP, _TYPE_ERROR):
        for match in pattern.finditer(message):
            candidates += [name.rsplit(".", 1)[-1].rsplit("::", 1)[-1] for name in match.groups() if name]
    # Function bodies of ops are inlined first, so a refused Erf may come from a Gelu.
    for name in candidates:
        if name in present and name not in wrapped:
            return name
    if candidates:
        for outer in _WITH_BODIES:
            if outer in present and outer not in wrapped:
                return outer
    # Messages differ between releases: an op that is named anywhere in them will do.
    for name in sorted(present - wrapped, key=len, reverse=True):
        if re.search(rf"\b{re.escape(name)}\b", message):
            return name
    return None


def _op_types(proto: onnx.ModelProto) -> set[str]:
    return {node.op_type for node in with_subgraphs(proto.graph.node)} - {"Cast", "Constant"}


def _graph(
    graph: onnx.GraphProto, mapping: Mapping[int, int], wrap: frozenset[str], types: Mapping[str, int]
) -> None:
    for tensor in graph.initializer:
        _retype_tensor(tensor, mapping)
    del graph.value_info[:]
    for info in [*graph.input, *graph.output]:
        _retype_info(info.type, mapping)
    replaced = _nodes(list(graph.node), mapping, wrap, types)
    del graph.node[:]
    graph.node.extend(replaced)


def _retype_info(info: onnx.TypeProto, mapping: Mapping[int, int]) -> None:
    kind = info.WhichOneof("value")
    if kind == "tensor_type":
        info.tensor_type.elem_type = mapping.get(info.tensor_type.elem_type, info.tensor_type.elem_type)
    elif kind in ("sequence_type", "optional_type"):
        _retype_info(getattr(info, kind).elem_type, mapping)


def _retype_tensor(tensor: TensorProto, mapping: Mapping[int, int]) -> None:
    wide = mapping.get(tensor.data_type)
    if wide is None:
        return
    array = numpy_helper.to_array(tensor).astype(helper.tensor_dtype_to_np_dtype(wide))
    tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))


def _nodes(
    nodes: list[onnx.NodeProto], mapping: Mapping[int, int], wrap: frozenset[str], types: Mapping[str, int]
) -> list[onnx.NodeProto]:
    result: list[onnx.NodeProto] = []
    for source in nodes:
        node = onnx.NodeProto()
        node.CopyFrom(source)
        keep = node.op_type in wrap
        for attribute in list(node.attribute):
            _retype_attribute(node, attribute, mapping, wrap, types, keep)
        wide = mapping.get(TensorProto.FLOAT)
        if wide is not None and node.op_type == "ConstantOfShape" and not node.attribute:
            zero = numpy_helper.from_array(np.zeros(1, helper.tensor_dtype_to_np_dtype(wide)))
            node.attribute.append(helper.make_attribute("value", zero))
        if keep:
            result.extend(_between_casts(node, types, mapping))
        else:
            result.append(node)
    return result


def _retype_attribute(
    node: onnx.NodeProto, attribute: AttributeProto, mapping: Mapping[int, int], wrap: frozenset[str],
    types: Mapping[str, int], keep: bool,
) -> None:
    if attribute.type == AttributeProto.GRAPH:
        _graph(attribute.g, mapping, wrap, types)
    elif attribute.type == AttributeProto.TENSOR and not keep:
        _retype_tensor(attribute.t, mapping)
    elif attribute.type == AttributeProto.INT and attribute.name in _DTYPE_ATTRIBUTES and not keep:
        attribute.i = mapping.get(attribute.i, attribute.i)
    elif node.op_type == "Constant" and attribute.name in ("value_float", "value_floats"):
        wide = mapping.get(TensorProto.FLOAT)
        if wide is not None:
            scalar = attribute.name == "value_float"
            values = np.array(attribute.f if scalar else list(attribute.floats), helper.tensor_dtype_to_np_dtype(wide))
            tensor = numpy_helper.from_array(values)
            node.attribute.remove(attribute)
            node.attribute.append(helper.make_attribute("value", tensor))


def _between_casts(
    node: onnx.NodeProto, types: Mapping[str, int], mapping: Mapping[int, int]
) -> list[onnx.NodeProto]:
    """The node in its own dtypes, with casts from and to the wide ones."""
    before: dict[str, onnx.NodeProto] = {}
    for index, name in enumerate(node.input):
        own = types.get(name)
        if name and own is not None and own in mapping:
            narrow = f"{name}.{node.output[0]}{_NARROW}"
            before[narrow] = helper.make_node("Cast", [name], [narrow], to=own)
            node.input[index] = narrow
    after = []
    for index, name in enumerate(node.output):
        own = types.get(name)
        if name and own is not None and own in mapping:
            node.output[index] = f"{name}.narrow"
            after.append(helper.make_node("Cast", [node.output[index]], [name], to=mapping[own]))
    return [*before.values(), node, *after]


_NARROW = ".narrow"


def _is_narrow(name: str, wide: str) -> bool:
    """Whether `_between_casts` has given this name to the narrow form of a value."""
    return name.startswith(f"{wide}.") and name.endswith(_NARROW)


def _constants(graph: onnx.GraphProto) -> dict[str, TensorProto]:
    """Float tensors that no caller can replace, by name."""
    given = {value.name for value in graph.input}
    found = {t.name: t for t in graph.initializer if t.data_type in FLOATS and t.name not in given}
    for node in graph.node:
        for attribute in node.attribute if node.op_type == "Constant" else ():
            if attribute.type == AttributeProto.TENSOR and attribute.t.data_type in FLOATS:
                found[node.output[0]] = attribute.t
    return found


def _keep_constants(graph: onnx.GraphProto, constants: Mapping[str, TensorProto]) -> None:
    """Constants that were cast back for an op that keeps its dtype stay constants of that dtype: some kernels look at
    them when the session is made, and MatMulNBits gives zeros for scales that come later."""
    kept: dict[str, TensorProto] = {}

    def visit(inner: onnx.GraphProto) -> None:
        stays = []
        for node in inner.node:
            for attribute in node.attribute:
                if attribute.type == AttributeProto.GRAPH:
                    visit(attribute.g)
            stored = constants.get(node.input[0]) if node.op_type == "Cast" else None
            if stored is not None and _is_narrow(node.output[0], node.input[0]):
                kept[node.output[0]] = stored
            else:
                stays.append(node)
        if len(stays) < len(inner.node):
            copies = [onnx.NodeProto.FromString(node.SerializeToString()) for node in stays]
            del inner.node[:]
            inner.node.extend(copies)

    visit(graph)
    for name, stored in kept.items():
        graph.initializer.add().CopyFrom(stored)
        graph.initializer[-1].name = name


def value_types(proto: onnx.ModelProto) -> dict[str, int]:
    """The element type of every value, as far as it can be told; in all graphs, whose names ONNX keeps apart."""
    try:
        inferred = onnx.shape_inference.infer_shapes(proto)
    except Exception:  # inference refuses some models that ONNX Runtime runs
        inferred = proto
    types: dict[str, int] = {}

    def visit(graph: onnx.GraphProto) -> None:
        for tensor in graph.initializer:
            types[tensor.name] = tensor.data_type
        for info in [*graph.input, *graph.output, *graph.value_info]:
            if info.type.HasField("tensor_type") and info.type.tensor_type.elem_type:
                types[info.name] = info.type.tensor_type.elem_type
        for node in graph.node:
            for attribute in node.attribute:
                if attribute.type == AttributeProto.GRAPH:
                    visit(attribute.g)
            if node.op_type == "Cast" and node.output[0] not in types:
                types[node.output[0]] = next(a.i for a in node.attribute if a.name == "to")
            # What inference does not know (contrib and custom ops) mostly gives what it takes.
            own = next((types[name] for name in node.input if types.get(name) in FLOATS), None)
            for name in node.output:
                if name and own is not None and name not in types:
                    types[name] = own

    visit(inferred.graph)
    return types


FLOATS = frozenset({TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE})
