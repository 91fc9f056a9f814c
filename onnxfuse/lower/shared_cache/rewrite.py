"""Puts the key/value cache of a model into buffers that past and present share.

The model takes a cache of max_sequence_length rows and gives the same buffer back, in which each step has written the
rows of its new tokens: nothing is copied, and no step costs more because the sequence is longer. Each attention becomes
GroupQueryAttention, which does this when one buffer is bound as its past and as its present.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx

from onnxfuse.graph import canonicalize, dims, edit, types
from onnxfuse.graph.ir import Graph, Node, Value
from onnxfuse.graph.model import Model
from onnxfuse.lower.emit import Emitter, dtype_of, operand, shape_of
from onnxfuse.lower.kernels import MICROSOFT, KernelTable
from onnxfuse.lower.layout import Layout
from onnxfuse.lower.shared_cache import layers as cached
from onnxfuse.lower.shared_cache.counts import Counts
from onnxfuse.lower.shared_cache.layers import Layer

#: The name of the length of the buffers.
MAX_LENGTH = "max_sequence_length"

#: Integer Max, which the counts are made with, came with this version of ONNX's own domain.
_OLDEST_OPSET = 12


@dataclass(frozen=True)
class SharedCache:
    """How the caches of a rewritten model are fed.

    Attributes:
        caches: (past input, present output) names, which one buffer is bound to.
        mask: the input [batch, total] of 0 and 1 that counts tokens, or None where that is not known.
        added_inputs: inputs that the original lacks (`seqlens_k`, `total_sequence_length`), for a model without mask.
        new_tokens: the input, and its axis, that says how many tokens are new; None where that is fixed or not known.
        length: name of the dim of the buffers.
        window: the shortest sliding window, 0 without one.
        grouped: whether the model had GroupQueryAttention already; its counts are made as they were.
    """

    caches: tuple[tuple[str, str], ...]
    mask: str | None
    added_inputs: tuple[str, ...]
    new_tokens: tuple[str, int] | None
    length: str
    window: int
    grouped: bool = False

    def to_json(self) -> dict[str, Any]:
        return {
            "caches": [{"past": past, "present": present} for past, present in self.caches], "mask": self.mask,
            "added_inputs": list(self.added_inputs), "length": self.length, "window": self.window,
            "grouped": self.grouped,
        }


def share(model: Model, kernels: KernelTable) -> SharedCache:
    """Rewrite a fused model in place.

    Args:
        model: shapes and dtypes must have been inferred.
        kernels: what the target has.

    Raises:
        KvCacheError: it cannot be done; the error names the node and says why. The model is as it was.
    """
    found = cached.find(model, kernels)
    graph = model.graph
    length = _free_dim(graph, found)
    window, mask = 0, None
    added: tuple[str, ...] = ()
    new_tokens: tuple[str, int] | None = None
    if not found[0].is_grouped:
        padding = _padding(graph, found)
        if model.opset() < _OLDEST_OPSET:
            raise cached.refuse(None, f"imports opset {model.opset()}, and opset {_OLDEST_OPSET} is needed")
        window = min((layer.visible.window for layer in found if layer.visible and layer.visible.window), default=0)
        mask = None if padding is None else padding.name
        source = cached.new_tokens(graph, found)
        new_tokens = None if isinstance(source, int) else (source[0].name, source[1])
        added = _Rewrite(model, found, padding, source, window).run()
    elif readers := list(cached.shape_readers(found)):
        raise cached.refuse(readers[0][0], f"asks for the shape of the cache `{readers[0][1].name}`")
    for layer in found:
        for value in (*layer.past, *layer.present):
            _lengthen(value, length)
    edit.remove_dead(graph)
    canonicalize.run(model)
    names = [(p.name, q.name) for layer in found for p, q in zip(layer.past, layer.present, strict=True)]
    return SharedCache(tuple(names), mask, added, new_tokens, length, window, found[0].is_grouped)


def _padding(graph: Graph, found: list[Layer]) -> Value | None:
    """The input that pads."""
    visible = found[0].visible
    if visible is None or visible.padding is None:
        return None
    if not any(visible.padding is given for given in graph.inputs):
        raise cached.refuse(found[0].node, f"is padded by `{visible.padding.name}`, which is no input of the model")
    return visible.padding


def _free_dim(graph: Graph, found: list[Layer]) -> str:
    """A name for the length of the buffers that no other size has."""
    caches = {id(value) for layer in found for value in (*layer.past, *layer.present)}
    others = [value for value in (*graph.inputs, *graph.outputs) if id(value) not in caches]
    used = {str(dim) for value in others for dim in value.shape or ()}
    name, number = MAX_LENGTH, 0
    while name in used:
        number += 1
        name = f"{MAX_LENGTH}_{number}"
    return name


def _lengthen(value: Value, length: str) -> None:
    """Declare a cache as a buffer of that length."""
    shape = shape_of(value)
    assert shape is not None
    value.shape = (*shape[:2], dims.symbol(length), *shape[3:])
    names = [dim if isinstance(dim, int) or dim is None else str(dim) for dim in value.shape]
    value.declared = onnx.helper.make_tensor_value_info(value.name, types.onnx_of(str(dtype_of(value))), names)


class _Rewrite:
    """One pass over the nodes."""

    def __init__(
        self, model: Model, found: list[Layer], padding: Value | None, new_tokens: int | tuple[Value, int], window: int
    ) -> None:
        self._graph = model.graph
        self._emitter = Emitter(model, model.graph)
        self._layout = Layout(self._emitter)
        self._layers = {layer.node: layer for layer in found}
        self._shapes = {node: (value, present) for node, value, present in cached.shape_readers(found)}
        self._counts = Counts(self._emitter, new_tokens, found[0].batch, padding)
        self._window = window
        self._poisoned = False

    def run(self) -> tuple[str, ...]:
        """Replaces the nodes; returns the names of the inputs that were added."""
        for node in list(self._graph.nodes):
            if node in self._layers:
                self._attention(self._layers[node])
            elif node in self._shapes:
                self._shape(node, *self._shapes[node])
            else:
                self._emitter.keep(node)
        self._graph.nodes[:] = self._emitter.nodes
        return tuple(value.name for value in self._counts.inputs)

    def _attention(self, layer: Layer) -> None:
        emitter, layout = self._emitter, self._layout
        factor, visible = cached.scale(layer), layer.visible
        softcap = float(layer.node.attrs.get("softcap", 0) or 0)
        sink = operand(layer.node, 7)
        inputs, outputs = emitter.replace(layer.node)
        q, k, v = (value for value in inputs[:3] if value is not None)
        if not layer.packed:
            q, k, v = layout.merge_heads(q), layout.merge_heads(k), layout.merge_heads(v)
        poison = None if self._poisoned else self._counts.poison(str(dtype_of(q)), self._window)
        self._poisoned = True  # what the first layer makes NaN stays so
        attrs: dict[str, Any] = {"num_heads": layer.heads, "kv_num_heads": layer.kv_heads, "scale": factor}
        if visible is not None and visible.window:
            attrs["local_window_size"] = visible.window
        if softcap:
            attrs["softcap"] = softcap
        shape = (layer.batch, layer.new, layer.heads * layer.head_size)
        y = outputs[0] if layer.packed and poison is None else layout.new(q, shape)
        counts = [self._counts.last_rows(), self._counts.total32()]
        extra: list[Value | None] = [None] * 4 + [sink] if sink is not None else []
        emitter.add(
            "GroupQueryAttention", [q, k, v, *layer.past, *counts, *extra], [y, *layer.present], domain=MICROSOFT,
            attrs=attrs,
        )
        if poison is not None:
            y = emitter.op("Add", [y, poison], out=outputs[0] if layer.packed else None, shape=shape)
        if not layer.packed:
            layout.split_heads(y, layer.heads, outputs[0])

    def _shape(self, node: Node, cache: Value, is_present: bool) -> None:
        """The shape that the cache has in the exported model."""
        rank, attrs = 4, dict(node.attrs)
        bounds = (int(attrs.get("start", 0)), int(attrs.get("end", rank)))
        start, end = (min(max(bound + rank if bound < 0 else bound, 0), rank) for bound in bounds)
        _, outputs = self._emitter.replace(node)
        pieces = [self._cache_size(cache, axis, is_present) for axis in range(start, end)]
        if not pieces:
            pieces = [self._emitter.constant("no_sizes", np.array([], np.int64))]
        self._emitter.op("Concat", pieces, attrs={"axis": 0}, out=outputs[0])

    def _cache_size(self, cache: Value, axis: int, is_present: bool) -> Value:
        if axis == 2:
            return self._counts.total() if is_present else self._counts.past()
        return self._counts.size(cache, axis)
