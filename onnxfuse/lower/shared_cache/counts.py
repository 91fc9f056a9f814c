"""What takes the place of the length of the cache: numbers made of the attention mask, or given as inputs.

A buffer is longer than what it holds, so its shape does not say how many tokens there were before. The mask does: it
has one column for each token so far, cached and new.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from onnxfuse.graph import types
from onnxfuse.graph.ir import Constant, Value, Variable
from onnxfuse.lower.emit import Emitter, dtype_of, shape_of

SEQLENS, TOTAL = "seqlens_k", "total_sequence_length"


class Counts:
    """Makes each number when it is first asked for, once.

    Args:
        emitter: takes up the nodes.
        new_tokens: how many tokens are new: a number, or a graph input and the axis that has that size.
        batch: the size of the batch (int or symbolic).
        padding: the input [batch, total] of 0 and 1, or None: two inputs are added to the graph instead.
    """

    def __init__(
        self, emitter: Emitter, new_tokens: int | tuple[Value, int], batch: Any, padding: Value | None
    ) -> None:
        self._emitter = emitter
        self._new_tokens = new_tokens
        self._batch = batch
        self._padding = padding
        self._made: dict[str, Value] = {}
        self._constants: dict[str, Constant] = {}
        self.inputs: list[Variable] = []
        if padding is None:
            self.inputs = [self._input(SEQLENS, (batch,)), self._input(TOTAL, ())]
            self._made = {"last rows": self.inputs[0], "total32": self.inputs[1]}

    # Lengths, int64 of shape [1] ------------------------------------------------------------------------------------

    def new(self) -> Value:
        """New tokens of each sequence."""
        if isinstance(self._new_tokens, int):
            return self._ints(self._new_tokens)
        if "new" not in self._made:
            self._made["new"] = self.size(*self._new_tokens)
        return self._made["new"]

    def total(self) -> Value:
        """Tokens so far, cached and new, of the longest sequence."""
        if "total" not in self._made:
            if self._padding is not None:
                self._made["total"] = self.size(self._padding, 1)
            else:
                wide = self._cast(self._made["total32"], "int64", ())
                self._made["total"] = self._op("Reshape", [wide, self._ints(1)], (1,), "int64")
        return self._made["total"]

    def past(self) -> Value:
        """Cached tokens of the longest sequence."""
        if "past" not in self._made:
            self._made["past"] = self._op("Sub", [self.total(), self.new()], (1,), "int64")
        return self._made["past"]

    def size(self, value: Value, axis: int) -> Value:
        """The size of one axis of a value."""
        shape = shape_of(value)
        assert shape is not None
        if isinstance(shape[axis], int):
            return self._ints(shape[axis])
        tokens = self._new_tokens[0] if not isinstance(self._new_tokens, int) else value
        if tokens is not value and shape[axis] in (shape_of(tokens) or ()):  # better not of a cache
            return self.size(tokens, (shape_of(tokens) or ()).index(shape[axis]))
        key = f"size {axis} of {value.name}"
        if key not in self._made:
            whole = self._op("Shape", [value], (len(shape),), "int64")
            self._made[key] = self._op("Gather", [whole, self._ints(axis)], (1,), "int64", axis=0)
        return self._made[key]

    # For the kernel -------------------------------------------------------------------------------------------------

    def last_rows(self) -> Value:
        """The row of each sequence's last token, int32 [batch]. A sequence without any has row 0, since the kernel
        refuses -1."""
        if "last rows" not in self._made:
            last = self._op("Sub", [self._tokens(), self._number(1)], (self._batch,), "int32")
            self._made["last rows"] = self._op("Max", [last, self._number(0)], (self._batch,), "int32")
        return self._made["last rows"]

    def total32(self) -> Value:
        """`total` as an int32 scalar."""
        if "total32" not in self._made:
            scalar = self._op("Reshape", [self.total(), self._ints()], (), "int64")
            self._made["total32"] = self._cast(scalar, "int32", ())
        return self._made["total32"]

    def poison(self, dtype: str, window: int) -> Value | None:
        """[batch, 1, 1]: NaN for a sequence whose mask the buffer cannot follow, else 0; None without a mask.

        The tokens of a sequence stand one after the other, from row 0 on. So in the first run padding may only come
        after them, and in a later one every new token counts.

        Args:
            dtype: of the result.
            window: of the layer with the shortest one; 0: none has one. The kernel counts rows where the mask counts
                columns, so once a sequence is longer than the window, there may be no padding in it.
        """
        if self._padding is None:
            return None
        batch = self._batch
        first = self._op("Equal", [self.past(), self._ints(0)], (1,), "bool")
        differs = self._op("Xor", [self._new_columns(), self._expected_columns(first)], (batch, None), "bool")
        wrong = self._cast(self._reduce("ReduceMax", self._cast(differs, "int32", (batch, None))), "bool", (batch,))
        if window:
            gaps = self._op("Less", [self._tokens(), self.total32()], (batch,), "bool")
            long = self._op("Less", [self._number(window), self.total32()], (), "bool")
            later = self._op("And", [long, self._op("Not", [first], (1,), "bool")], (1,), "bool")
            wrong = self._op("Or", [wrong, self._op("And", [gaps, later], (batch,), "bool")], (batch,), "bool")
        wrong = self._op("Reshape", [wrong, self._ints(-1, 1, 1)], (batch, 1, 1), "bool")
        nan, zero = (self._constant(np.array(number, types.numpy_of(dtype))) for number in (np.nan, 0.0))
        return self._op("Where", [wrong, nan, zero], (batch, 1, 1), dtype)

    # Parts ----------------------------------------------------------------------------------------------------------

    def _kept(self) -> Value:
        """The mask as truth values."""
        assert self._padding is not None
        if "kept" not in self._made:
            own = dtype_of(self._padding) == "bool"
            self._made["kept"] = self._padding if own else self._cast(self._padding, "bool", shape_of(self._padding))
        return self._made["kept"]

    def _tokens(self) -> Value:
        """Tokens of each sequence so far, int32 [batch]."""
        if "tokens" not in self._made:
            kept = self._kept()
            self._made["tokens"] = self._reduce("ReduceSum", self._cast(kept, "int32", shape_of(kept)))
        return self._made["tokens"]

    def _new_columns(self) -> Value:
        """The mask of the new tokens, bool [batch, new]."""
        bounds = [self.past(), self._ints(np.iinfo(np.int64).max), self._ints(1)]
        return self._op("Slice", [self._kept(), *bounds], (self._batch, None), "bool")

    def _expected_columns(self, first: Value) -> Value:
        """What `_new_columns` must be: tokens and then padding in the first run, tokens only in a later one."""
        new = self._cast(self.new(), "int32", (1,))
        count = self._op("Where", [first, self._tokens(), new], (self._batch,), "int32")
        column = self._op("Reshape", [count, self._ints(-1, 1)], (self._batch, 1), "int32")
        end = self._op("Reshape", [new, self._ints()], (), "int32")
        places = self._op("Range", [self._number(0), end, self._number(1)], (None,), "int32")
        return self._op("Less", [places, column], (self._batch, None), "bool")

    def _reduce(self, op: str, value: Value) -> Value:
        """Over the second axis of [batch, n], which goes."""
        if self._emitter.opset >= (13 if op == "ReduceSum" else 18):
            return self._op(op, [value, self._ints(1)], (self._batch,), "int32", keepdims=0)
        return self._op(op, [value], (self._batch,), "int32", keepdims=0, axes=[1])

    def _cast(self, value: Value, dtype: str, shape: Any) -> Value:
        return self._op("Cast", [value], shape, dtype, to=types.onnx_of(dtype))

    def _op(self, op: str, inputs: list[Value], shape: Any, dtype: str, **attrs: Any) -> Value:
        made = Variable(self._emitter.model.names.fresh(f"kv_cache_{op}"), dtype=dtype, shape=shape)
        return self._emitter.op(op, inputs, attrs=attrs, out=made)

    def _ints(self, *numbers: int) -> Constant:
        return self._constant(np.array(numbers, np.int64))

    def _number(self, number: int) -> Constant:
        return self._constant(np.array(number, np.int32))

    def _constant(self, array: np.ndarray) -> Constant:
        key = f"{array.dtype} {array.tolist()}"
        if key not in self._constants:
            text = "_".join(str(number) for number in array.ravel().tolist()).replace("-", "minus_")
            self._constants[key] = self._emitter.constant(f"kv_cache_const_{text}", array)
        return self._constants[key]

    def _input(self, name: str, shape: tuple[Any, ...]) -> Variable:
        made = Variable(self._emitter.model.names.fresh(name), dtype="int32", shape=shape)
        self._emitter.graph.inputs.append(made)
        return made
