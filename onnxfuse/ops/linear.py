"""``onnxfuse::Linear``: y = activation(norm(x) · W + bias) + residual."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from onnxfuse.ops import activations, norms
from onnxfuse.ops.body import BodyBuilder
from onnxfuse.ops.opdef import (
    FLOAT_DTYPES,
    FUSED_DOMAIN,
    AttrDef,
    Cost,
    Dim,
    InputDef,
    OpDef,
    TensorType,
    product,
    tensor_bytes,
    unify,
)

LAYOUTS = ("NK", "KN")


def weight_dims(
    op: OpDef, inputs: Sequence[TensorType | None], attrs: Mapping[str, Any]
) -> tuple[tuple[Dim, ...] | None, Dim, Dim]:
    """(leading dims of x, K, columns of the weight), checked against each other."""
    x, weight = inputs[0], inputs[1]
    assert x is not None and weight is not None
    if x.shape is not None and len(x.shape) < 1:
        raise op.refuse(inputs, "`x` must have rank 1 or more")
    if weight.shape is not None and len(weight.shape) != 2:
        raise op.refuse(inputs, f"`weight` must have rank 2, not `{len(weight.shape)}`")
    columns, k = (None, None) if weight.shape is None else weight.shape
    if attrs["layout"] == "KN":
        columns, k = k, columns
    leading = None
    if x.shape is not None:
        leading = x.shape[:-1]
        equal, k = unify(x.shape[-1], k)
        if not equal:
            raise op.refuse(inputs, f"the last dim of `x` is not the K of `weight` (layout {attrs['layout']})")
    return leading, k, columns


def check_vector(op: OpDef, inputs: Sequence[TensorType | None], name: str, columns: Dim) -> Dim:
    """Checks that the optional input `name` is 1-D with one element per column; returns what is known of columns."""
    vector = inputs[op.input_index(name)]
    if vector is None or vector.shape is None:
        return columns
    if len(vector.shape) != 1:
        raise op.refuse(inputs, f"`{name}` must have rank 1")
    equal, columns = unify(columns, vector.shape[0])
    if not equal:
        raise op.refuse(inputs, f"`{name}` must have one element per column of `weight`")
    return columns


def _infer(op: OpDef, inputs: Sequence[TensorType | None], attrs: Mapping[str, Any]) -> list[TensorType]:
    x, residual = inputs[0], inputs[3]
    assert x is not None
    leading, _, n = weight_dims(op, inputs, attrs)
    n = check_vector(op, inputs, "bias", n)
    n = check_vector(op, inputs, "colsum", n)
    shape = None if leading is None else (*leading, n)
    if residual is not None and residual.shape is not None:
        if shape is None:
            shape = residual.shape
        elif len(shape) != len(residual.shape):
            raise op.refuse(inputs, "`residual` must have exactly the shape of the output")
        else:
            pairs = [unify(a, b) for a, b in zip(shape, residual.shape, strict=True)]
            if not all(equal for equal, _ in pairs):
                raise op.refuse(inputs, "`residual` must have exactly the shape of the output")
            shape = tuple(d for _, d in pairs)
    return [TensorType(x.dtype, shape)]


def _reference(inputs: Sequence[np.ndarray | None], attrs: Mapping[str, Any]) -> list[np.ndarray]:
    x, weight, bias, residual, _ = inputs
    assert x is not None and weight is not None
    y = norms.apply(attrs["norm"], x, attrs["epsilon"]) @ (weight if attrs["layout"] == "KN" else weight.T)
    if bias is not None:
        y = y + bias
    y = activations.apply(attrs["activation"], y)
    return [y if residual is None else y + residual]


def emit_product(b: BodyBuilder, x: str, weight: str, bias: str, attrs: Mapping[str, Any]) -> str:
    """norm(x) · W + bias. The norm is computed in float32, the product in T."""
    if attrs["norm"] != "none":
        normed = norms.emit(b, attrs["norm"], b.cast(x, "float32"), attrs["epsilon"])
        x = b.cast(normed, b.dtype, "float32")
    y = b.op("MatMul", x, weight if attrs["layout"] == "KN" else b.op("Transpose", weight, perm=[1, 0]))
    return b.op("Add", y, bias) if bias else y


def _body(b: BodyBuilder, inputs: Sequence[str], outputs: Sequence[str], attrs: Mapping[str, Any]) -> None:
    x, weight, bias, residual, _ = inputs
    y = activations.emit(b, attrs["activation"], emit_product(b, x, weight, bias, attrs))
    b.finish(b.op("Add", y, residual) if residual else y, outputs[0])


def _cost(inputs: Sequence[TensorType | None], attrs: Mapping[str, Any]) -> Cost:
    x, weight = inputs[0], inputs[1]
    assert x is not None and x.shape is not None and weight is not None and weight.shape is not None
    sizes = [d for d in x.shape if isinstance(d, int)]
    rows, k = product(sizes[:-1]), sizes[-1]
    n = next(d for d in (weight.shape[0 if attrs["layout"] == "NK" else 1],) if isinstance(d, int))
    flops = 2 * rows * k * n + rows * k * norms.FLOPS_PER_ELEMENT[attrs["norm"]]
    flops += rows * n * (activations.FLOPS_PER_ELEMENT[attrs["activation"]] + sum(i is not None for i in inputs[2:4]))
    return Cost(flops, sum(map(tensor_bytes, inputs)), tensor_bytes(TensorType(x.dtype, (rows, n))))


PROLOGUE_ATTRIBUTES = (
    AttrDef("layout", str, "NK", LAYOUTS),
    AttrDef("norm", str, "none", norms.NORMS),
    AttrDef("epsilon", float, 1e-5, minimum=0.0),
)

LINEAR = OpDef(
    name="Linear",
    domain=FUSED_DOMAIN,
    summary="activation(norm(x) · W + bias) + residual",
    inputs=(
        InputDef("x"),
        InputDef("weight"),
        InputDef("bias", optional=True),
        InputDef("residual", optional=True),
        InputDef("colsum", optional=True, same_as_t=False, dtypes=frozenset({"float32"})),
    ),
    outputs=("y",),
    attributes=(*PROLOGUE_ATTRIBUTES, AttrDef("activation", str, "none", activations.ACTIVATIONS)),
    infer_fn=_infer,
    reference_fn=_reference,
    body_fn=_body,
    cost_fn=_cost,
    kernels={"cpu": FLOAT_DTYPES, "cuda": FLOAT_DTYPES},
)
