"""`onnxfuse.std::RotaryEmbedding` as one kernel of the target.

com.microsoft's kernel reads rows of 2-D tables. Tables made for the positions at hand ([A, S, F], A = 1 or the batch)
become such rows: with A = 1 position i is row i (an offset of 0, for any batch), otherwise row b·S + i.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from onnxfuse.graph.ir import Node, Value
from onnxfuse.lower.emit import Emitter, dtype_of, operand, shape_of
from onnxfuse.lower.kernels import MICROSOFT, KernelTable
from onnxfuse.lower.layout import Layout
from onnxfuse.ops import registry
from onnxfuse.ops.opdef import STD_DOMAIN


def lower_rotary(emitter: Emitter, kernels: KernelTable, node: Node) -> bool:
    """Replace the node by a kernel; False (and the node untouched) if the target has none or a shape is not known."""
    attrs = registry.get(STD_DOMAIN, node.op).resolve(dict(node.attrs))
    x, cos, sin = node.inputs[:3]
    shape, table = shape_of(x), shape_of(cos)
    if shape is None or table is None or shape_of(sin) != table or not isinstance(table[-1], int):
        return False
    heads = attrs["num_heads"] or (shape[1] if len(shape) == 4 else 0)
    if not isinstance(heads, int) or not heads:
        return False
    length = shape[1 if attrs["num_heads"] else 2]
    if operand(node, 3) is None and isinstance(table[1], int) and table[1] != length:
        return False  # one row for all positions, say: kernels do not broadcast
    dtype = dtype_of(x)
    if kernels.has("RotaryEmbedding", dtype, opset=emitter.opset, domain=MICROSOFT, rank=3):
        _emit_contrib(emitter, node, attrs, heads)
        return True
    if kernels.has("RotaryEmbedding", dtype, opset=emitter.opset, rank=4):
        _emit_native(emitter, node, attrs)
        return True
    return False


def _emit_contrib(emitter: Emitter, node: Node, attrs: dict[str, Any], heads: int) -> None:
    inputs, outputs = emitter.replace(node)
    x, cos, sin, positions = [*inputs, None][:4]
    assert x is not None and cos is not None and sin is not None
    tables = _Tables(emitter, x, bool(attrs["num_heads"]))
    if positions is None:
        cos_rows, positions = tables.rows(cos)
        sin_rows, _ = tables.rows(sin)
    else:
        cos_rows, sin_rows, positions = cos, sin, tables.for_batch(positions)
    kernel_attrs = {"interleaved": attrs["interleaved"], "num_heads": heads}
    if attrs["rotary_embedding_dim"]:
        kernel_attrs["rotary_embedding_dim"] = attrs["rotary_embedding_dim"]
    emitter.op(
        "RotaryEmbedding", [x, positions, cos_rows, sin_rows], domain=MICROSOFT, attrs=kernel_attrs, out=outputs[0]
    )


def _emit_native(emitter: Emitter, node: Node, attrs: dict[str, Any]) -> None:
    inputs, outputs = emitter.replace(node)
    x, cos, sin, positions = [*inputs, None][:4]
    assert x is not None and cos is not None and sin is not None
    tables = _Tables(emitter, x, bool(attrs["num_heads"]))
    if positions is None:
        cos, sin = tables.for_batch(cos), tables.for_batch(sin)
    else:
        positions = tables.for_batch(positions)
    kept = {name: value for name, value in attrs.items() if value}
    emitter.op("RotaryEmbedding", [x, cos, sin, positions], attrs=kept, out=outputs[0])


class _Tables:
    """Tables and positions in the form that a kernel wants, made once for all layers."""

    def __init__(self, emitter: Emitter, x: Value, packed: bool) -> None:
        self.layout = Layout(emitter)
        self.emitter = emitter
        self.x = x
        shape = shape_of(x)
        assert shape is not None
        self.batch, self.length = shape[0], shape[1 if packed else 2]

    def rows(self, table: Value) -> tuple[Value, Value]:
        """A table [A, S, F] as rows [·, F] and the positions that read them."""
        made = self.layout.made
        key = ("rows", id(table), self.batch)
        if key not in made:
            shape = shape_of(table)
            assert shape is not None
            size = shape[-1]
            if shape[0] == 1:
                rows = self.layout.squeeze(table, [0], (shape[1], size))
                positions: Value = self.layout.ints(0)
            else:
                rows = self.layout.reshape(table, [-1, size], (None, size))
                positions = self._numbered(table, shape)
            made[key] = (rows, positions, table)
        rows, positions, _ = made[key]
        return rows, positions

    def _numbered(self, table: Value, shape: tuple[Any, ...]) -> Value:
        """0, 1, 2, … as [B, S]."""
        key = ("numbered", shape[0], shape[1], self.batch)
        made = self.layout.made
        if key not in made:
            op = self.emitter.op
            batch, length = self.layout.size(table, 0), self.layout.size(table, 1)
            count = op("Mul", [batch, length], dtype="int64", shape=(1,))
            number = op(
                "Squeeze", [count, *self.layout.axes([0])], attrs=self.layout.axes_attr([0]), dtype="int64", shape=()
            )
            zero = self.emitter.constant("zero", np.array(0, np.int64))
            one = self.emitter.constant("one", np.array(1, np.int64))
            line = op("Range", [zero, number, one], dtype="int64", shape=(None,))
            both = op("Concat", [batch, length], attrs={"axis": 0}, dtype="int64", shape=(2,))
            grid = op("Reshape", [line, both], dtype="int64", shape=(shape[0], shape[1]))
            made[key] = (self.for_batch(grid),)
        return made[key][0]

    def for_batch(self, value: Value) -> Value:
        """[A, …] repeated to [B, …] unless A is B."""
        shape = shape_of(value)
        assert shape is not None
        if shape[0] == self.batch and shape[0] is not None:
            return value
        key = ("batch", id(value), self.batch)
        made = self.layout.made
        if key not in made:
            ones = [self.layout.ints(1)] * (len(shape) - 1)
            target = self.emitter.op(
                "Concat", [self.layout.size(self.x, 0), *ones], attrs={"axis": 0}, dtype="int64", shape=(len(shape),)
            )
            wide = self.emitter.op("Expand", [value, target], dtype=dtype_of(value), shape=(self.batch, *shape[1:]))
            made[key] = (wide, value)
        return made[key][0]
