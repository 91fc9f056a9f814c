"""Constants: read a value as an array, compare numbers as the stored dtype sees them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs
from onnx import numpy_helper
from onnx_graphsurgeon.ir.tensor import LazyValues, SparseValues

from onnxfuse.graph.ir import Constant, Deferred, Value
from onnxfuse.graph.types import name_of, numpy_of

#: Computed tensors of at least this many bytes are computed again rather than kept when nobody uses them.
KEPT_WHILE_USED = 4_000_000


def shape_of(value: Constant) -> tuple[int, ...]:
    return tuple(value._values.shape)


def dtype_of(value: Constant) -> str | None:
    return name_of(value._values.dtype)


def size_of(value: Constant) -> int:
    """Number of elements, without loading them."""
    return math.prod(value._values.shape)


def nbytes_of(value: Constant) -> int:
    """Bytes of the stored tensor, without loading it."""
    dtype = dtype_of(value)
    itemsize = numpy_of(dtype).itemsize if dtype else 1
    return size_of(value) * itemsize


def array(value: Constant) -> np.ndarray:
    """The content, in its own dtype (bfloat16 from ml_dtypes). Cached for small tensors, and for computed ones that are
    not large, so that reading (or computing) a large model's weights one after the other does not hold them all."""
    values = value._values
    if isinstance(values, np.ndarray):
        return values
    if isinstance(values, Deferred):
        if values.nbytes >= KEPT_WHILE_USED:
            return values.shared()
        loaded = values.load()
        value._values = loaded
        return loaded
    if isinstance(values, SparseValues):
        return values.load()
    cached = value.__dict__.get("_small")
    if cached is None:
        tensor = values.tensor
        base = value.__dict__.get("base_dir", "")
        cached = numpy_helper.to_array(tensor, base_dir=str(base))
        if cached.nbytes <= 4096:
            value.__dict__["_small"] = cached
    return cached


def of_attribute(
    value: object, limit: int | None = None
) -> tuple[str | None, tuple[int, ...] | None, np.ndarray | None]:
    """(dtype, shape, content) of a tensor attribute; the content only if it has at most `limit` elements."""
    values: Any = value._values if isinstance(value, gs.Constant) else value
    if isinstance(values, SparseValues) or not hasattr(values, "dtype"):
        return None, None, None
    shape = tuple(values.shape)
    dtype = name_of(values.dtype)
    if dtype is None or (limit is not None and math.prod(shape) > limit):
        return dtype, shape, None
    return dtype, shape, values if isinstance(values, np.ndarray) else numpy_helper.to_array(values.tensor)


def scalar(value: Value) -> float | int | bool | None:
    """The number in a constant with exactly one element (any rank), else None."""
    if not isinstance(value, Constant):
        return None
    cached = value.__dict__.get("_scalar", _UNREAD)
    if cached is _UNREAD:
        cached = None
        if size_of(value) == 1 and dtype_of(value) not in (None, "string"):
            item = array(value).reshape(-1)[0]
            cached = item.item() if isinstance(item, np.generic) and item.dtype.kind != "V" else float(item)
        value.__dict__["_scalar"] = cached
    return cached


_UNREAD = object()


def ints(value: Value, limit: int = 64) -> list[int] | None:
    """A constant integer tensor of rank 0 or 1 as a list, else None."""
    if not isinstance(value, Constant) or size_of(value) > limit:
        return None
    dtype = dtype_of(value)
    if dtype is None or not dtype.startswith(("int", "uint")) or len(shape_of(value)) > 1:
        return None
    return [int(x) for x in array(value).reshape(-1)]


def close(stored: float, literal: float, dtype: str | None) -> bool:
    """Whether a stored number is the literal, as far as its dtype can tell: equal after rounding the literal to the
    stored dtype, or within 1 ULP of it there, or within 1e-4 relative, whichever is larger."""
    if stored == literal:
        return True
    if not (math.isfinite(stored) and math.isfinite(literal)):
        return False
    tolerance = 1e-4 * abs(literal)
    if dtype in ("float16", "bfloat16", "float32"):
        rounded = numpy_of(dtype).type(literal)
        ulp = abs(float(np.nextafter(rounded, numpy_of(dtype).type(np.inf))) - float(rounded))
        tolerance = max(tolerance, 1.001 * ulp, abs(float(rounded) - literal) * 1.001)
    elif dtype is not None and not dtype.startswith("float"):
        return False
    return abs(stored - literal) <= tolerance


#: Dtypes of which several elements share a byte, and their bits.
_PACKED: dict[int, int] = {
    onnx.TensorProto.INT4: 4, onnx.TensorProto.UINT4: 4, onnx.TensorProto.FLOAT4E2M1: 4, onnx.TensorProto.INT2: 2,
    onnx.TensorProto.UINT2: 2,
}  # fmt: skip


def _bits_of(dtype: int) -> int:
    name = name_of(dtype)
    return _PACKED.get(dtype) or (0 if name in (None, "string") else numpy_of(str(name)).itemsize * 8)


def check_external(tensor: onnx.TensorProto, base_dir: Path) -> str | None:
    """What is wrong with a tensor's external data, or None: the file must be inside `base_dir`, exist, and hold
    the tensor at its offset."""
    info = {entry.key: entry.value for entry in tensor.external_data}
    location = info.get("location", "")
    path = (base_dir / location).resolve()
    if not location or Path(location).is_absolute() or not path.is_relative_to(base_dir.resolve()):
        return f"tensor `{tensor.name}`: external data path `{location}` leaves the model's folder"
    if not path.is_file():
        return f"tensor `{tensor.name}`: external data file `{location}` is missing"
    numbers = [info.get(key, "0") for key in ("offset", "length")]
    wrong = next((number for number in numbers if not number.isdecimal()), None)
    if wrong is not None:
        return f"tensor `{tensor.name}`: `{wrong}` is no place in the external data file"
    held = -(-math.prod(tensor.dims) * _bits_of(tensor.data_type) // 8)
    if "length" in info and int(info["length"]) < held:
        return f"tensor `{tensor.name}`: {info['length']} bytes of external data, its shape needs {held}"
    needed = int(numbers[0]) + max(int(numbers[1]), held)
    if path.stat().st_size < needed:
        return (
            f"tensor `{tensor.name}`: external data file `{location}` has {path.stat().st_size} bytes, {needed} needed"
        )
    return None


def is_lazy(value: Constant) -> bool:
    """Whether the content still lies in the file's own TensorProto."""
    return isinstance(value._values, LazyValues) and not isinstance(value._values, Deferred)


def is_external(value: Constant) -> bool:
    """Whether the content lies in a file of its own, so that reading it is expensive."""
    tensor = getattr(value._values, "tensor", None)
    return tensor is not None and tensor.data_location == onnx.TensorProto.EXTERNAL
