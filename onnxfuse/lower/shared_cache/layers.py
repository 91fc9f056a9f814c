"""The attention layers of a model that read a cache, and why one cannot keep it in a shared buffer."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from onnxfuse.errors import KvCacheError
from onnxfuse.graph import dims, view
from onnxfuse.graph.ir import Graph, Node, Value, Variable
from onnxfuse.graph.model import Model
from onnxfuse.lower.emit import dtype_of, operand, shape_of
from onnxfuse.lower.kernels import MICROSOFT, KernelTable
from onnxfuse.lower.shared_cache.proof import NotProvedError, Visible, visible_keys
from onnxfuse.ops import registry
from onnxfuse.ops.opdef import STD_DOMAIN

#: Where the past key and value stand among the inputs of an op that reads a cache.
_PAST = {
    (STD_DOMAIN, "Attention"): (4, 5),
    ("", "Attention"): (4, 5),
    (MICROSOFT, "GroupQueryAttention"): (3, 4),
    (MICROSOFT, "MultiHeadAttention"): (6, 7),
    (MICROSOFT, "DecoderMaskedMultiHeadAttention"): (5, 6),
    (MICROSOFT, "Attention"): (4, 4),
}
_HINT = "leave out `--kv-cache shared`; docs/guides/kv-cache.md says what it needs"


@dataclass(frozen=True)
class Layer:
    """One attention with its cache.

    Attributes:
        past, present: (key, value), graph inputs and outputs.
        visible: which keys a query sees; None where the kernel decides that already.
        heads, kv_heads, head_size: numbers.
        batch, new, length: sizes (int or symbolic) of batch, new tokens and cached tokens.
        packed: whether queries, keys and values are [batch, new, heads · size], not [batch, heads, new, size].
    """

    node: Node
    past: tuple[Variable, Variable]
    present: tuple[Variable, Variable]
    visible: Visible | None = None
    heads: int = 0
    kv_heads: int = 0
    head_size: int = 0
    batch: Any = None
    new: Any = None
    length: Any = None
    packed: bool = True

    @property
    def is_grouped(self) -> bool:
        """Whether it is a GroupQueryAttention already."""
        return self.visible is None


def refuse(node: Node | None, problem: str, hint: str = _HINT) -> KvCacheError:
    """The error for a node (None: the model), whose name comes before the text."""
    where = None if node is None else view.describe(node)
    subject = "the model" if node is None else f"`{node.op}`"
    return KvCacheError(f"the cache cannot be shared: {subject} {problem}", where=where, hint=hint)


def find(model: Model, kernels: KernelTable) -> list[Layer]:
    """All layers with a cache, in the order of the graph.

    Raises:
        KvCacheError: there is none, or one cannot keep its cache in place.
    """
    graph = model.graph
    for inner in model.graphs():
        for node in inner.nodes if inner is not graph else ():
            if _past_of(node) is not None:
                raise refuse(node, "reads its cache in a subgraph or a function")
    nodes = [node for node in graph.nodes if _past_of(node) is not None]
    if not nodes:
        raise refuse(None, f"has no attention that reads a cache{_concatenated(graph)}")
    layers = [_layer(graph, node, model, kernels) for node in nodes]
    _check_agreement(layers)
    for layer in layers:
        _check_readers(graph, layer)
    _check_lengths(graph, layers)
    return layers


def _past_of(node: Node) -> tuple[Value, Value] | None:
    """What the node is given as past key and value."""
    places = _PAST.get((view.domain(node), node.op))
    if places is None:
        return None
    key, value = (operand(node, place) for place in places)
    return None if key is None or value is None else (key, value)


def _concatenated(graph: Graph) -> str:
    """Words that name a graph input which is concatenated into a graph output, as an unfused cache is."""
    for output in graph.outputs:
        node = view.producer(output)
        if node is not None and node.op == "Concat" and any(value is i for value in node.inputs for i in graph.inputs):
            return f"; `{output.name}` is concatenated outside of any that was recognized"
    return ""


def _layer(graph: Graph, node: Node, model: Model, kernels: KernelTable) -> Layer:
    past = _past_of(node)
    assert past is not None
    for value in past:
        if not isinstance(value, Variable) or not any(value is given for given in graph.inputs):
            raise refuse(node, f"reads a cache `{value.name}` that is no input of the model")
    present = tuple(node.outputs[1:3])
    if len(present) < 2:
        raise refuse(node, "makes no cache for the next step")
    for value in present:
        if not view.is_graph_output(graph, value):
            raise refuse(node, f"makes a cache `{value.name}` that is no output of the model")
    if any(len(shape_of(value) or ()) != 4 for value in past):
        raise refuse(node, f"reads a cache `{past[0].name}` that is not [batch, heads, length, size]")
    length = shape_of(past[0])[2]  # type: ignore[index]
    if not isinstance(length, dims.Dim):
        raise refuse(node, f"reads a cache `{past[0].name}` of {'unknown' if length is None else 'the fixed'} length"
                     f"{'' if length is None else f' {length}'}")
    if (view.domain(node), node.op) == (MICROSOFT, "GroupQueryAttention"):
        if operand(node, 10) is not None:
            raise refuse(node, "adds a bias to the scores")
        return Layer(node, past, present, length=length)
    if (view.domain(node), node.op) != (STD_DOMAIN, "Attention"):
        raise refuse(node, "is an op that keeps its cache in another form")
    layer = _sizes(node, past, present, length)
    _check_kernel(layer, model, kernels)
    return layer


def _sizes(node: Node, past: Any, present: Any, length: Any) -> Layer:
    attrs = registry.get(STD_DOMAIN, node.op).resolve(dict(node.attrs))
    heads, kv_heads = attrs["q_num_heads"], attrs["kv_num_heads"]
    q, k, v = (shape_of(value) for value in node.inputs[:3])
    packed = bool(heads)
    if q is None or k is None or v is None:
        raise refuse(node, "has queries or keys of unknown shape")
    if packed and all(isinstance(shape[2], int) for shape in (q, k, v)):
        q = (q[0], heads, q[1], q[2] // heads)
        k, v = ((s[0], kv_heads, s[1], s[2] // kv_heads) for s in (k, v))
    if len(q) != 4 or not all(isinstance(d, int) for d in (q[1], k[1], q[3], k[3], v[3])):
        raise refuse(node, "has an unknown number of heads or an unknown head size")
    if k[3] != v[3]:
        raise refuse(node, f"has keys of size {k[3]} and values of size {v[3]}, which must be equal")
    if k[1] == 0 or q[1] % k[1]:
        raise refuse(node, f"has {q[1]} query heads, which are no multiple of its {k[1]} key heads")
    if operand(node, 6) is not None or (len(node.outputs) > 3 and node.outputs[3].name):
        raise refuse(node, "is given numbers of valid keys, or gives its scores")
    visible = _visible(node, attrs, q[0], q[2], length)
    return Layer(node, past, present, visible, q[1], k[1], k[3], q[0], q[2], length, packed)


def _visible(node: Node, attrs: dict[str, Any], batch: Any, new: Any, length: Any) -> Visible:
    mask, own = operand(node, 3), int(attrs["window"] or 0)
    causal = bool(attrs["is_causal"])
    if mask is None:
        if not causal and new != 1:
            raise refuse(node, "is not causal: its queries see the new keys after them")
        return Visible(own, None)
    try:
        found = visible_keys(mask, length, causal=causal)
    except NotProvedError as error:
        raise refuse(node, str(error)) from None
    rows = (shape_of(found.padding) or (None,))[0] if found.padding is not None else batch
    if rows == 1 and batch != 1:
        raise refuse(node, f"is padded by `{found.padding.name}`, which has one row for all sequences")  # type: ignore[union-attr]
    windows = [window for window in (own, found.window) if window]
    return Visible(min(windows, default=0), found.padding)


def _check_kernel(layer: Layer, model: Model, kernels: KernelTable) -> None:
    node, dtype = layer.node, dtype_of(layer.node.inputs[0])
    if layer.head_size % 8:
        raise refuse(node, f"has heads of size {layer.head_size}; GroupQueryAttention wants a multiple of 8")
    if not kernels.has(
        "GroupQueryAttention", dtype, opset=model.opset(), domain=MICROSOFT, num_heads=1, kv_num_heads=1
    ):
        raise refuse(
            node, f"is in {dtype}, for which target `{kernels.target}` has no GroupQueryAttention",
            hint="on CUDA the model must be in float16 or bfloat16, on CPU in float32 or float16",
        )


def _check_agreement(layers: list[Layer]) -> None:
    first = layers[0]
    for layer in layers[1:]:
        if layer.is_grouped != first.is_grouped:
            raise refuse(layer.node, f"is of another kind than {view.describe(first.node)}")
        for what, one, other in (
            ("cached tokens", layer.length, first.length), ("new tokens", layer.new, first.new),
            ("sequences", layer.batch, first.batch),
        ):
            if not (_is(one, other) or _is(other, one)):
                raise refuse(layer.node, f"has {one} {what}, but {view.describe(first.node)} has {other}")
        if layer.visible is not None and first.visible is not None:
            one, other = layer.visible.padding, first.visible.padding
            if one is not other:
                named = [f"`{padding.name}`" if padding is not None else "nothing" for padding in (one, other)]
                raise refuse(layer.node, f"is padded by {named[0]}, but {view.describe(first.node)} by {named[1]}")


def _is(size: Any, plain: Any) -> bool:
    """Whether two sizes are equal, if the model gets a mask with one column per token: a sum of embeddings of tokens
    and positions has as many rows as either, broadcast."""
    if size == plain:
        return True
    if not isinstance(size, dims.Dim) or len(size.terms) != 1:
        return False
    ((atoms, factor),) = size.terms
    return factor == 1 and len(atoms) == 1 and atoms[0].kind == "broadcast" and plain in atoms[0].args


def _check_readers(graph: Graph, layer: Layer) -> None:
    """Only the attention reads the content of a cache; others may ask for its shape."""
    here = set(graph.nodes)
    for value in (*layer.past, *layer.present):
        for reader in view.consumers(value):
            own = reader is layer.node and sum(given is value for given in reader.inputs) == 1
            if not own and not (is_shape(reader) and reader in here):
                raise refuse(reader, f"reads the cache `{value.name}` too, and would find it overwritten")
    for value in layer.past:
        if view.is_graph_output(graph, value):
            raise refuse(layer.node, f"reads a cache `{value.name}` that is an output of the model too")


def _check_lengths(graph: Graph, layers: list[Layer]) -> None:
    """No other input is as long as the cache."""
    length = layers[0].length
    caches = {id(value) for layer in layers for value in layer.past}
    for given in graph.inputs:
        if id(given) not in caches and any(dim == length for dim in given.shape or ()):
            readers = sorted(view.consumers(given), key=is_shape)  # those that read its content first
            raise refuse(
                readers[0] if readers else None,
                f"is given `{given.name}`, which is as long as the cache, but is not the cache of any attention that "
                "was recognized",
            )


def is_shape(node: Node) -> bool:
    return node.op == "Shape" and view.domain(node) == ""


def new_tokens(graph: Graph, layers: list[Layer]) -> int | tuple[Value, int]:
    """Where the number of new tokens can be read: a number, or a graph input and an axis of it.

    Raises:
        KvCacheError: no input tells it.
    """
    new = layers[0].new
    if isinstance(new, int):
        return new
    caches = {id(value) for layer in layers for value in layer.past}
    for given in graph.inputs:
        for axis, dim in enumerate(given.shape or ()):
            if isinstance(dim, dims.Dim) and id(given) not in caches and all(_is(one.new, dim) for one in layers):
                return given, axis
    raise refuse(layers[0].node, f"has {new} queries, a size that no input of the model has")


def scale(layer: Layer) -> float:
    """The factor on the scores."""
    given = layer.node.attrs.get("scale")
    return float(given) if given is not None else 1 / math.sqrt(layer.head_size)


def shape_readers(layers: list[Layer]) -> Iterator[tuple[Node, Value, bool]]:
    """Every Shape of a cache: the node, the cache, and whether it is a present one."""
    for layer in layers:
        for value in (*layer.past, *layer.present):
            for reader in view.consumers(value):
                if is_shape(reader):
                    yield reader, value, any(value is present for present in layer.present)
