"""Brings tensors of an Attention into the layout that a kernel wants. What layers share is made once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from onnxfuse.graph import types
from onnxfuse.graph.ir import Constant, Value, Variable
from onnxfuse.lower.emit import Emitter, dtype_of, shape_of

#: What was made for a graph already, by what it was made of.
_MADE: WeakKeyDictionary[Emitter, dict[tuple[Any, ...], Any]] = WeakKeyDictionary()


@dataclass(frozen=True)
class Counted:
    """A size: the number or symbol that it is known by (None: unknown), and what computes it, as int64 of shape [1]."""

    dim: Any
    size: Callable[[], Value]


class Layout:
    """Adds the Reshapes, Transposes and the like to an emitter."""

    def __init__(self, emitter: Emitter) -> None:
        self.emitter = emitter
        self.made = _MADE.setdefault(emitter, {})

    def new(self, like: Value, shape: tuple[Any, ...] | None) -> Variable:
        """A value without a producer yet, of the dtype of `like`."""
        return Variable(self.emitter.model.names.fresh(f"{like.name}_attention"), dtype=dtype_of(like), shape=shape)

    # Heads ----------------------------------------------------------------------------------------------------------

    def merge_heads(self, x: Value) -> Value:
        """[B, H, S, D] -> [B, S, H·D]."""
        shape = shape_of(x)
        assert shape is not None
        b, h, s, d = shape
        turned = self.emitter.op("Transpose", [x], attrs={"perm": [0, 2, 1, 3]}, shape=(b, s, h, d))
        return self.reshape(turned, [0, 0, h * d], (b, s, h * d))

    def split_heads(self, x: Value, heads: int, out: Value | None = None) -> Value:
        """[B, S, H·D] -> [B, H, S, D]."""
        shape = shape_of(x)
        assert shape is not None
        b, s, hidden = shape
        size = hidden // heads
        apart = self.reshape(x, [0, 0, heads, size], (b, s, heads, size))
        return self.emitter.op("Transpose", [apart], attrs={"perm": [0, 2, 1, 3]}, shape=(b, heads, s, size), out=out)

    def repeat_heads(self, x: Value, times: int) -> Value:
        """[B, G, L, D] -> [B, G·times, L, D], each head `times` times in a row."""
        shape = shape_of(x)
        assert shape is not None
        b, g, length, d = shape
        wide = self.unsqueeze(x, [2], (b, g, 1, length, d))
        wide = self.emitter.op("Expand", [wide, self.ints(1, 1, times, 1, 1)], shape=(b, g, times, length, d))
        return self.reshape(wide, [0, g * times, -1, d], (b, g * times, length, d))

    def repeat_packed(self, x: Value, heads: int, times: int) -> Value:
        """[B, L, G·D] -> [B, L, G·times·D], each head `times` times in a row."""
        shape = shape_of(x)
        assert shape is not None
        b, length, hidden = shape
        d = hidden // heads
        apart = self.reshape(x, [0, 0, heads, 1, d], (b, length, heads, 1, d))
        wide = self.emitter.op("Expand", [apart, self.ints(1, 1, 1, times, 1)], shape=(b, length, heads, times, d))
        return self.reshape(wide, [0, 0, hidden * times], (b, length, hidden * times))

    def concat(self, first: Value, second: Value, out: Value | None, length: Any) -> Value:
        """Along the sequence of [B, H, L, D]."""
        shape = shape_of(second)
        assert shape is not None
        total = (shape[0], shape[1], length, shape[3])
        return self.emitter.op("Concat", [first, second], attrs={"axis": 2}, out=out, shape=total)

    def group_to_rows(self, q: Value, groups: int, times: int) -> Value:
        """[B, S, groups·times·D] -> [B, times·S, groups·D]: the query heads of a group as queries of its key head."""
        shape = shape_of(q)
        assert shape is not None
        b, s, hidden = shape
        d = hidden // (groups * times)
        apart = self.reshape(q, [0, 0, groups, times, d], (b, s, groups, times, d))
        turned = self.transpose(apart, [0, 3, 1, 2, 4])
        return self.reshape(turned, [0, -1, groups * d], (b, None, groups * d))

    def rows_to_group(self, y: Value, groups: int, times: int, queries: Any, out: Value | None) -> Value:
        """[B, times·S, groups·E] -> [B, S, groups·times·E]."""
        shape = shape_of(y)
        assert shape is not None
        b, _, hidden = shape
        e = hidden // groups
        apart = self.reshape(y, [0, times, -1, groups, e], (b, times, queries, groups, e))
        turned = self.transpose(apart, [0, 2, 3, 1, 4])
        return self.reshape(turned, [0, 0, hidden * times], (b, queries, hidden * times), out)

    def bias_of_rows(self, bias: Value, groups: int, times: int) -> Value:
        """A bias [·, 1 or H, S, L] for queries that stand as `group_to_rows` has them."""
        shape = shape_of(bias)
        assert shape is not None
        key = ("rows of bias", id(bias), groups, times)
        if key not in self.made:
            if shape[1] == 1:
                rows = self.emitter.op("Concat", [bias] * times, attrs={"axis": 2}, shape=(shape[0], 1, None, shape[3]))
            else:
                rows = self.reshape(bias, [0, groups, -1, 0], (shape[0], groups, None, shape[3]))
            self.made[key] = (rows, bias)
        found: Value = self.made[key][0]
        return found

    # Masks ----------------------------------------------------------------------------------------------------------

    def bias(self, mask: Value, queries: Counted, keys: Counted, dtype: str | None) -> Value:
        """A mask as [B or 1, H or 1, S, L] of dtype T to be added to the scores."""
        key = ("bias", id(mask), queries.dim, keys.dim, dtype)
        if key not in self.made:
            full = self.to_scores(self.to_four_dims(mask), queries, keys)
            if dtype_of(full) == "bool":
                full = self.emitter.op(
                    "Where",
                    [full, self.scalar(0.0, dtype), self.scalar(-np.inf, dtype)],
                    dtype=dtype,
                    shape=shape_of(full),
                )
            self.made[key] = (full, mask)
        return self.made[key][0]

    def to_four_dims(self, mask: Value) -> Value:
        shape = shape_of(mask)
        assert shape is not None
        missing = 4 - len(shape)
        return mask if not missing else self.unsqueeze(mask, list(range(missing)), (1,) * missing + tuple(shape))

    def to_scores(self, mask: Value, queries: Counted, keys: Counted) -> Value:
        """A mask of four dims, repeated over queries and keys unless it provably has all of them: kernels do not."""
        shape = shape_of(mask)
        assert shape is not None
        wanted = [
            self.ints(1) if dim == have and dim is not None else size()
            for have, dim, size in ((shape[2], queries.dim, queries.size), (shape[3], keys.dim, keys.size))
        ]
        if all(isinstance(w, Constant) and w is self.ints(1) for w in wanted):
            return mask
        key = ("scores", id(mask), queries.dim, keys.dim)
        if key not in self.made:
            ones = [self.ints(1), self.ints(1)]
            target = self.emitter.op("Concat", [*ones, *wanted], attrs={"axis": 0}, dtype="int64", shape=(4,))
            wide = self.emitter.op("Expand", [mask, target], shape=(*shape[:2], queries.dim, keys.dim))
            self.made[key] = (wide, mask)
        return self.made[key][0]

    def nan_to_zero(self, x: Value, out: Value | None) -> Value:
        """Where x is NaN: 0."""
        asked = x
        if dtype_of(x) == "bfloat16":  # for which there is no IsNaN
            asked = self.emitter.op("Cast", [x], attrs={"to": types.onnx_of("float32")}, dtype="float32")
        is_nan = self.emitter.op("IsNaN", [asked], dtype="bool", shape=shape_of(x))
        return self.emitter.op(
            "Where", [is_nan, self.scalar(0.0, dtype_of(x)), x], out=out, dtype=dtype_of(x), shape=shape_of(x)
        )

    # Counts ---------------------------------------------------------------------------------------------------------

    def size(self, x: Value, axis: int) -> Value:
        """The size of one axis, int64 of shape [1]."""
        shape = shape_of(x)
        assert shape is not None
        dim = shape[axis]
        key = ("size", dim) if dim is not None else ("size of", id(x), axis)
        if key not in self.made:
            if isinstance(dim, int):
                self.made[key] = (self.ints(dim), None)
            else:
                whole = self.emitter.op("Shape", [x], dtype="int64", shape=(len(shape),))
                one = self.emitter.op("Gather", [whole, self.ints(axis)], attrs={"axis": 0}, dtype="int64", shape=(1,))
                self.made[key] = (one, x)
        return self.made[key][0]

    def queries(self, q: Value, dim: Any, packed: bool) -> Counted:
        return Counted(dim, lambda: self.size(q, 1 if packed else 2))

    def keys(self, k: Value, past_k: Value | None, dim: Any, packed: bool) -> Counted:
        """All keys: new and cached ones. `k` is what the node was given."""

        def size() -> Value:
            new = self.size(k, 1 if packed else 2)
            if past_k is None:
                return new
            key = ("keys", id(k), id(past_k))
            if key not in self.made:
                total = self.emitter.op("Add", [new, self.size(past_k, 2)], dtype="int64", shape=(1,))
                self.made[key] = (total, k, past_k)
            found: Value = self.made[key][0]
            return found

        return Counted(dim, size)

    def numbered(self, count: Counted) -> Value:
        """0, 1, 2, … as int64, as many as counted."""
        size = count.size()
        key = ("numbered from 0", id(size))
        if key not in self.made:
            zero, one = (self.emitter.constant(n, np.array(i, np.int64)) for n, i in (("zero", 0), ("one", 1)))
            number = self.squeeze(size, [0], ())
            self.made[key] = (self.emitter.op("Range", [zero, number, one], dtype="int64", shape=(count.dim,)), size)
        found: Value = self.made[key][0]
        return found

    def key_counts(self, q: Value, k: Value) -> tuple[Value, Value]:
        """For GroupQueryAttention: the position of each sequence's last key (int32 [B]), the number of keys (int32)."""
        k_shape, q_shape = shape_of(k), shape_of(q)
        assert k_shape is not None and q_shape is not None
        key = ("counts", k_shape[1], q_shape[0])
        if key not in self.made:
            int32 = {"to": types.onnx_of("int32")}
            number = self.emitter.op("Cast", [self.size(k, 1)], attrs=int32, dtype="int32", shape=(1,))
            scalar = self.squeeze(number, [0], ())
            one = self.emitter.constant("one", np.array(1, np.int32))
            before = self.emitter.op("Sub", [scalar, one], dtype="int32", shape=())
            # Range reads numbers in host memory and writes to the device: no copy between them, which would keep the
            # session from capturing a CUDA graph.
            last = self.emitter.op("Range", [before, scalar, one], dtype="int32", shape=(1,))
            last = self.emitter.op("Expand", [last, self.size(q, 0)], dtype="int32", shape=(q_shape[0],))
            self.made[key] = ((last, scalar), None)
        return self.made[key][0]

    # Small things ---------------------------------------------------------------------------------------------------

    def cast(self, x: Value, dtype: str) -> Value:
        """x in another dtype; one Cast for all readers."""
        key = ("cast", id(x), dtype)
        if key not in self.made:
            self.made[key] = (self.emitter.op("Cast", [x], attrs={"to": types.onnx_of(dtype)}, dtype=dtype), x)
        found: Value = self.made[key][0]
        return found

    def reshape(self, x: Value, target: Sequence[int], shape: tuple[Any, ...], out: Value | None = None) -> Value:
        return self.emitter.op("Reshape", [x, self.ints(*target)], shape=shape, out=out)

    def transpose(self, x: Value, perm: list[int]) -> Value:
        shape = shape_of(x)
        assert shape is not None
        return self.emitter.op("Transpose", [x], attrs={"perm": perm}, shape=tuple(shape[p] for p in perm))

    def unsqueeze(self, x: Value, axes: list[int], shape: tuple[Any, ...]) -> Value:
        return self.emitter.op("Unsqueeze", [x, *self.axes(axes)], attrs=self.axes_attr(axes), shape=shape)

    def squeeze(self, x: Value, axes: list[int], shape: tuple[Any, ...]) -> Value:
        return self.emitter.op("Squeeze", [x, *self.axes(axes)], attrs=self.axes_attr(axes), shape=shape)

    def axes(self, axes: list[int]) -> list[Value]:
        return [self.ints(*axes)] if self.emitter.opset >= 13 else []

    def axes_attr(self, axes: list[int]) -> dict[str, Any]:
        return {} if self.emitter.opset >= 13 else {"axes": axes}

    def ints(self, *numbers: int) -> Constant:
        key = ("ints", numbers)
        if key not in self.made:
            self.made[key] = self.emitter.constant("ints_" + "_".join(map(str, numbers)), np.array(numbers, np.int64))
        return self.made[key]

    def scalar(self, number: float, dtype: str | None) -> Constant:
        assert dtype is not None
        key = ("scalar", number, dtype)
        if key not in self.made:
            self.made[key] = self.emitter.constant(f"scalar_{dtype}", np.array(number, types.numpy_of(dtype)))
        return self.made[key]
