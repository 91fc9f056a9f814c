"""Builds function bodies: lists of standard ONNX nodes, for any opset from 11 on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx import NodeProto, helper, numpy_helper

from onnxfuse.ops.opdef import TensorType

_ONNX_DTYPE = {
    "float64": onnx.TensorProto.DOUBLE,
    "float32": onnx.TensorProto.FLOAT,
    "float16": onnx.TensorProto.FLOAT16,
    "bfloat16": onnx.TensorProto.BFLOAT16,
    "int64": onnx.TensorProto.INT64,
    "int32": onnx.TensorProto.INT32,
    "bool": onnx.TensorProto.BOOL,
}


class BodyBuilder:
    """Collects nodes. Every value made here is named ``<prefix><n>``, so a prefix unique in the graph avoids clashes.

    Args:
        dtype: T of the node that is expanded.
        opset: the opset of the default domain that the nodes are written for.
        prefix: of value and node names.
        types: of the inputs of the expanded node, in order; None for an absent one.
    """

    def __init__(self, dtype: str, opset: int, prefix: str, types: Sequence[TensorType | None] = ()) -> None:
        self.dtype = dtype
        self.opset = opset
        self.prefix = prefix
        self.types = types
        self.nodes: list[NodeProto] = []
        self._constants: dict[tuple[str, bytes, tuple[int, ...]], str] = {}
        self._count = 0

    def input_dtype(self, index: int) -> str:
        """The dtype of an input of the expanded node; T if it is not known."""
        tensor = self.types[index] if index < len(self.types) else None
        return tensor.dtype if tensor is not None and tensor.dtype is not None else self.dtype

    def _fresh(self) -> str:
        self._count += 1
        return f"{self.prefix}{self._count}"

    def op(self, op_type: str, *inputs: str, outputs: int = 1, **attrs: Any) -> str:
        """Adds one node and returns its (first) output's name."""
        return self.ops(op_type, *inputs, outputs=outputs, **attrs)[0]

    def ops(self, op_type: str, *inputs: str, outputs: int, **attrs: Any) -> list[str]:
        """Adds one node with several outputs and returns their names."""
        names = [self._fresh() for _ in range(outputs)]
        node = helper.make_node(op_type, list(inputs), names, name=f"{names[0]}_{op_type}", **attrs)
        self.nodes.append(node)
        return names

    def constant(self, value: Any, dtype: str) -> str:
        """A constant of the given dtype (a scalar has rank 0); equal constants are made once."""
        array = _as_dtype(np.asarray(value), dtype)
        key = (dtype, array.tobytes(), array.shape)
        if key not in self._constants:
            tensor = numpy_helper.from_array(array)
            self._constants[key] = self.op("Constant", value=tensor)
        return self._constants[key]

    def scalar(self, value: float) -> str:
        """A scalar constant of dtype T."""
        return self.constant(value, self.dtype)

    def ints(self, *values: int) -> str:
        """A 1-D int64 constant."""
        return self.constant(np.array(values, np.int64), "int64")

    def cast(self, value: str, to: str, source: str | None = None) -> str:
        """`value` cast from `source` (default T) to dtype `to`; itself if they are the same."""
        return value if (source or self.dtype) == to else self.op("Cast", value, to=_ONNX_DTYPE[to])

    def reduce(self, op_type: str, value: str, axes: Sequence[int], keepdims: int = 1) -> str:
        """ReduceMean or ReduceMax, whose axes are an attribute before opset 18."""
        if self.opset >= 18:
            return self.op(op_type, value, self.ints(*axes), keepdims=keepdims)
        return self.op(op_type, value, axes=list(axes), keepdims=keepdims)

    def unsqueeze(self, value: str, *axes: int) -> str:
        if self.opset >= 13:
            return self.op("Unsqueeze", value, self.ints(*axes))
        return self.op("Unsqueeze", value, axes=list(axes))

    def split(self, value: str, parts: int, axis: int = -1) -> list[str]:
        """Equal parts along an axis whose size is not known here."""
        if self.opset >= 18:
            return self.ops("Split", value, outputs=parts, axis=axis, num_outputs=parts)
        return self.ops("Split", value, outputs=parts, axis=axis)

    def slice(self, value: str, start: int | str, end: int | str, axis: int, step: int = 1) -> str:
        """value[start:end:step] along one axis; a bound may be a number or the name of a 1-D int64 value."""
        names = [b if isinstance(b, str) else self.ints(b) for b in (start, end)]
        return self.op("Slice", value, *names, self.ints(axis), self.ints(step))

    def dim(self, value: str, axis: int) -> str:
        """The size of one axis, as int64 of shape [1]."""
        return self.op("Gather", self.op("Shape", value), self.ints(axis), axis=0)

    def finish(self, value: str, output: str) -> None:
        """Gives `value` the name of an output of the expanded node."""
        if value.startswith(self.prefix):
            for node in reversed(self.nodes):
                if value in node.output:
                    consumed = any(value in n.input for n in self.nodes)
                    if consumed or node.op_type == "Constant":
                        break
                    node.output[list(node.output).index(value)] = output
                    return
        self.nodes.append(helper.make_node("Identity", [value], [output], name=f"{self._fresh()}_Identity"))


def _as_dtype(array: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "bfloat16":
        import ml_dtypes

        return array.astype(ml_dtypes.bfloat16)
    return array.astype(dtype)
