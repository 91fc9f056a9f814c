"""What an op is to onnxfuse: its signature, and the functions that every op of our domains provides.

Two domains are described with it. ``onnxfuse`` holds the fused ops, which have kernels in the custom-op library.
``onnxfuse.std`` holds the *lifted* ops: ONNX's own newest operators (and two extra attributes of `Attention`) under a
name of ours, so that a model of any opset can carry them between the stages of the rewriter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import AttributeProto, NodeProto

from onnxfuse.errors import OpError

FUSED_DOMAIN = "onnxfuse"
STD_DOMAIN = "onnxfuse.std"

FLOAT_DTYPES = frozenset({"float32", "float16", "bfloat16"})
HALF_DTYPES = frozenset({"float16", "bfloat16"})
BYTES_OF = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "bool": 1}

Dim = int | str | None
"""A known size, a named size, or an unknown one."""


@dataclass(frozen=True)
class TensorType:
    """A dtype name (None: unknown) and a shape (None: unknown rank; a dim may be a size, a name or None)."""

    dtype: str | None = None
    shape: tuple[Dim, ...] | None = None

    def __str__(self) -> str:
        if self.shape is None:
            return f"{self.dtype or '?'}[?]"
        return f"{self.dtype or '?'}[{','.join('?' if d is None else str(d) for d in self.shape)}]"


@dataclass(frozen=True)
class InputDef:
    """One input. `dtypes` lists the allowed dtypes; `same_as_t` inputs must have the dtype of input 0 (T)."""

    name: str
    optional: bool = False
    same_as_t: bool = True
    dtypes: frozenset[str] = FLOAT_DTYPES


@dataclass(frozen=True)
class AttrDef:
    """One attribute: its default (None: may be absent) and the allowed values or the allowed closed range."""

    name: str
    type: type
    default: Any = None
    choices: tuple[Any, ...] | None = None
    minimum: float | None = None


@dataclass(frozen=True)
class Cost:
    """What one run of a node costs: floating-point operations, and the bytes it must read and write."""

    flops: int
    bytes_read: int
    bytes_written: int

    @property
    def bytes(self) -> int:
        return self.bytes_read + self.bytes_written


@dataclass(frozen=True)
class Tolerance:
    """A kernel passes when its error is at most `factor` x the unfused graph's error + `floor` x the largest value."""

    factor: float = 2.0
    floor: Mapping[str, float] = field(
        default_factory=lambda: {"float32": 2.0**-20, "float16": 2.0**-11, "bfloat16": 2.0**-8}
    )


InferFn = Callable[["OpDef", Sequence[TensorType | None], Mapping[str, Any]], list[TensorType]]
ReferenceFn = Callable[[Sequence[np.ndarray | None], Mapping[str, Any]], list[np.ndarray]]
BodyFn = Callable[..., None]
CostFn = Callable[[Sequence[TensorType | None], Mapping[str, Any]], Cost]


@dataclass(frozen=True)
class OpDef:
    """An op of the `onnxfuse` or `onnxfuse.std` domain. The functions get attributes with defaults filled in."""

    name: str
    domain: str
    summary: str
    inputs: tuple[InputDef, ...]
    outputs: tuple[str, ...]
    attributes: tuple[AttrDef, ...]
    infer_fn: InferFn
    reference_fn: ReferenceFn
    body_fn: BodyFn
    cost_fn: CostFn
    version: int = 1
    optional_outputs: int = 0
    min_body_opset: int = 11
    kernels: Mapping[str, frozenset[str]] = field(default_factory=dict)
    tolerance: Tolerance = Tolerance()

    @property
    def full_name(self) -> str:
        return f"{self.domain}::{self.name}"

    def input_index(self, name: str) -> int:
        """The position of the input called `name`."""
        for index, spec in enumerate(self.inputs):
            if spec.name == name:
                return index
        raise OpError(f"{self.full_name} has no input `{name}`")

    # Attributes -------------------------------------------------------------------------------------------------

    def resolve(self, attrs: Mapping[str, Any], *, where: str | None = None) -> dict[str, Any]:
        """All attributes, defaults filled in. Raises OpError for an unknown name or a value that is not allowed."""
        known = {a.name: a for a in self.attributes}
        for name in attrs:
            if name not in known:
                raise OpError(
                    f"{self.full_name} has no attribute `{name}`",
                    where=where,
                    hint=f"its attributes are {', '.join(sorted(known)) or 'none'}",
                )
        resolved: dict[str, Any] = {}
        for name, spec in known.items():
            value = attrs.get(name, spec.default)
            resolved[name] = value if value is None else self._checked(spec, value, where)
        return resolved

    def _checked(self, spec: AttrDef, value: Any, where: str | None) -> Any:
        if isinstance(value, bytes):
            value = value.decode()
        if spec.type is float and isinstance(value, (int, float, np.floating)) and not isinstance(value, bool):
            value = float(value)
        elif spec.type is int and isinstance(value, (bool, int, np.integer)):
            value = int(value)
        if not isinstance(value, spec.type):
            raise OpError(
                f"{self.full_name}: attribute `{spec.name}` is `{value!r}`, not {spec.type.__name__}", where=where
            )
        if spec.choices is not None and value not in spec.choices:
            raise OpError(
                f"{self.full_name}: attribute `{spec.name}` is `{value}`",
                where=where,
                hint=f"allowed: {', '.join(map(str, spec.choices))}",
            )
        if spec.minimum is not None and not value >= spec.minimum:  # type: ignore[operator]
            raise OpError(
                f"{self.full_name}: attribute `{spec.name}` is `{value}`, below {spec.minimum:g}", where=where
            )
        return value

    def attributes_of(self, node: NodeProto) -> dict[str, Any]:
        """The resolved attributes of an ONNX node of this op."""
        given = {
            a.name: onnx.helper.get_attribute_value(a) for a in node.attribute if a.type != AttributeProto.UNDEFINED
        }
        return self.resolve(given, where=f"node `{node.name}`" if node.name else None)

    # Shapes -----------------------------------------------------------------------------------------------------

    def infer(self, inputs: Sequence[TensorType | None], attrs: Mapping[str, Any] | None = None) -> list[TensorType]:
        """Types of all outputs from the types of the inputs (None: input absent).

        Raises OpError, naming the offending shapes, if the inputs cannot be valid; what is unknown is not an error.
        """
        resolved = self.resolve(attrs or {})
        padded = self._check_presence(inputs)
        t = padded[0].dtype if padded[0] is not None else None
        for spec, tensor in zip(self.inputs, padded, strict=True):
            if tensor is None or tensor.dtype is None:
                continue
            if tensor.dtype not in spec.dtypes:
                self._refuse(inputs, f"input `{spec.name}` is `{tensor.dtype}`, not {' or '.join(sorted(spec.dtypes))}")
            if spec.same_as_t and t is not None and tensor.dtype != t:
                self._refuse(inputs, f"input `{spec.name}` is `{tensor.dtype}` while `{self.inputs[0].name}` is `{t}`")
        return self.infer_fn(self, padded, resolved)

    def _check_presence(self, inputs: Sequence[Any]) -> list[Any]:
        if len(inputs) > len(self.inputs):
            raise OpError(f"{self.full_name} takes at most {len(self.inputs)} inputs, not `{len(inputs)}`")
        padded = list(inputs) + [None] * (len(self.inputs) - len(inputs))
        for spec, value in zip(self.inputs, padded, strict=True):
            if value is None and not spec.optional:
                raise OpError(f"{self.full_name}: input `{spec.name}` is missing")
        return padded

    def _refuse(self, inputs: Sequence[TensorType | None], why: str) -> None:
        shown = ", ".join(f"{s.name} {t}" for s, t in zip(self.inputs, inputs, strict=False) if t is not None)
        raise OpError(f"{self.full_name}: {why} ({shown})")

    def refuse(self, inputs: Sequence[TensorType | None], why: str) -> OpError:
        """An OpError that shows the types of all inputs; for infer functions: ``raise op.refuse(...)``."""
        try:
            self._refuse(inputs, why)
        except OpError as error:
            return error
        raise AssertionError("unreachable")

    # Meaning ----------------------------------------------------------------------------------------------------

    def reference(
        self,
        inputs: Sequence[np.ndarray | None],
        attrs: Mapping[str, Any] | None = None,
        precision: type[np.floating] = np.float64,
    ) -> list[np.ndarray]:
        """All outputs computed by NumPy in `precision` (float64 or float32), not rounded to T."""
        padded = self._check_presence(inputs)
        wide = [
            None if a is None else (a.astype(precision) if s.dtypes & FLOAT_DTYPES and _is_float(a) else np.asarray(a))
            for s, a in zip(self.inputs, padded, strict=True)
        ]
        with np.errstate(all="ignore"):
            return self.reference_fn(wide, self.resolve(attrs or {}))

    def cost(self, inputs: Sequence[TensorType | None], attrs: Mapping[str, Any] | None = None) -> Cost:
        """Flops and bytes of one run. All shapes must be known sizes (OpError otherwise)."""
        padded = self._check_presence(inputs)
        for spec, tensor in zip(self.inputs, padded, strict=True):
            if tensor is not None and (tensor.shape is None or not all(isinstance(d, int) for d in tensor.shape)):
                raise OpError(f"{self.full_name}: the cost needs known sizes; `{spec.name}` is {tensor}")
        self.infer(padded, attrs)
        return self.cost_fn(padded, self.resolve(attrs or {}))


def _is_float(array: np.ndarray) -> bool:
    return np.asarray(array).dtype.kind == "f" or np.asarray(array).dtype.name == "bfloat16"


def unify(a: Dim, b: Dim) -> tuple[bool, Dim]:
    """Whether two dims can be equal, and what is then known: a size beats a name, a name beats unknown."""
    if isinstance(a, int) and isinstance(b, int):
        return a == b, a
    if isinstance(a, int):
        return True, a
    if isinstance(b, int):
        return True, b
    return True, a if a is not None else b


def product(dims: Sequence[int]) -> int:
    result = 1
    for d in dims:
        result *= d
    return result


def tensor_bytes(tensor: TensorType | None, default_dtype: str = "float32") -> int:
    """Bytes of a tensor with known sizes; 0 for None."""
    if tensor is None or tensor.shape is None:
        return 0
    return product([d for d in tensor.shape if isinstance(d, int)]) * BYTES_OF[tensor.dtype or default_dtype]
