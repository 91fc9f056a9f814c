"""Dtype names and their ONNX and NumPy equivalents."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx
from onnx import TensorProto

_SPECIAL = {
    TensorProto.BFLOAT16: ("bfloat16", np.dtype(ml_dtypes.bfloat16)),
    TensorProto.FLOAT8E4M3FN: ("float8e4m3fn", np.dtype(ml_dtypes.float8_e4m3fn)),
    TensorProto.FLOAT8E4M3FNUZ: ("float8e4m3fnuz", np.dtype(ml_dtypes.float8_e4m3fnuz)),
    TensorProto.FLOAT8E5M2: ("float8e5m2", np.dtype(ml_dtypes.float8_e5m2)),
    TensorProto.FLOAT8E5M2FNUZ: ("float8e5m2fnuz", np.dtype(ml_dtypes.float8_e5m2fnuz)),
    TensorProto.INT4: ("int4", np.dtype(ml_dtypes.int4)),
    TensorProto.UINT4: ("uint4", np.dtype(ml_dtypes.uint4)),
    TensorProto.STRING: ("string", np.dtype(object)),
    TensorProto.BOOL: ("bool", np.dtype(bool)),
}

_NAME_OF_ONNX: dict[int, str] = {}
_ONNX_OF_NAME: dict[str, int] = {}
_NUMPY_OF_NAME: dict[str, np.dtype] = {}
for _number in TensorProto.DataType.values():
    if _number == TensorProto.UNDEFINED:
        continue
    if _number in _SPECIAL:
        _name, _np = _SPECIAL[_number]
    else:
        try:
            _np = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(_number))
        except (KeyError, TypeError, ValueError):
            continue
        _name = _np.name
    _NAME_OF_ONNX[_number] = _name
    _ONNX_OF_NAME.setdefault(_name, _number)
    _NUMPY_OF_NAME.setdefault(_name, _np)
_NAME_OF_NUMPY = {dtype: name for name, dtype in _NUMPY_OF_NAME.items()}

FLOATS = frozenset({"float64", "float32", "float16", "bfloat16"})
HALVES = frozenset({"float16", "bfloat16"})


def name_of(dtype: object) -> str | None:
    """The dtype's name, from an ONNX number, a NumPy dtype or a name; None for None or what has no name."""
    if dtype is None or isinstance(dtype, str):
        return dtype
    if isinstance(dtype, int):
        return _NAME_OF_ONNX.get(dtype)
    if isinstance(dtype, onnx.TypeProto):  # of a sequence or an optional
        return None
    return _NAME_OF_NUMPY.get(np.dtype(dtype))  # type: ignore[call-overload]


def onnx_of(name: str) -> int:
    """The ``TensorProto.DataType`` number of a dtype name."""
    return _ONNX_OF_NAME[name]


def numpy_of(name: str) -> np.dtype:
    """The NumPy dtype of a dtype name (bfloat16 and the like from ml_dtypes)."""
    return _NUMPY_OF_NAME[name]
