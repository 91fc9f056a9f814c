"""How far one array is from another: absolute, relative, angle, units in the last place."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import ml_dtypes
import numpy as np

from onnxfuse.errors import UsageError

_MANTISSA_BITS = {"float64": 52, "float32": 23, "float16": 10, "bfloat16": 7}
_SMALLEST_EXPONENT = {"float64": -1022, "float32": -126, "float16": -14, "bfloat16": -126}


@dataclass
class Difference:
    """Statistics over all finite elements.

    Attributes:
        max_abs, mean_abs, p99_abs: of |a − b|.
        max_rel, p99_rel: of |a − b| / |b|, where b is not tiny (above a millionth of the largest |b|).
        scaled: max_abs / largest |b|.
        cosine: of the angle between a and b.
        max_ulp: of |a − b| in units in the last place of b in a's dtype, where b is not tiny.
        mismatched_kind: elements of which only one is NaN, or infinite.
        worst: index and both values of the largest absolute difference.
    """

    max_abs: float = 0.0
    mean_abs: float = 0.0
    p99_abs: float = 0.0
    max_rel: float = 0.0
    p99_rel: float = 0.0
    scaled: float = 0.0
    cosine: float = 1.0
    max_ulp: float = 0.0
    mismatched_kind: int = 0
    worst: dict[str, Any] | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def difference(a: np.ndarray, b: np.ndarray) -> Difference:
    """Statistics of `a` against the reference `b`, both of one shape."""
    dtype = "bfloat16" if a.dtype == ml_dtypes.bfloat16 else a.dtype.name
    x, y = np.asarray(a, np.float64).reshape(-1), np.asarray(b, np.float64).reshape(-1)
    both = np.isfinite(x) & np.isfinite(y)
    same = (np.isnan(x) & np.isnan(y)) | (np.isinf(x) & (x == y))
    result = Difference(mismatched_kind=int(np.count_nonzero(~both & ~same)))
    if not both.any():
        return result
    gap = np.abs(x - y, where=both, out=np.zeros_like(x))
    magnitude = np.abs(y, where=both, out=np.zeros_like(y))
    largest = float(magnitude.max())
    index = int(gap.argmax())
    result.max_abs = float(gap[index])
    result.mean_abs = float(gap[both].mean())
    result.p99_abs = float(np.quantile(gap[both], 0.99))
    result.scaled = result.max_abs / largest if largest else result.max_abs
    big = both & (magnitude > largest * 1e-6)
    if big.any():
        relative = gap[big] / magnitude[big]
        result.max_rel = float(relative.max())
        result.p99_rel = float(np.quantile(relative, 0.99))
        if dtype in _MANTISSA_BITS:
            exponent = np.maximum(np.floor(np.log2(magnitude[big])), _SMALLEST_EXPONENT[dtype])
            result.max_ulp = float((gap[big] / np.exp2(exponent - _MANTISSA_BITS[dtype])).max())
    norms = float(np.linalg.norm(x[both]) * np.linalg.norm(y[both]))
    result.cosine = float(np.dot(x[both], y[both]) / norms) if norms else 1.0
    result.worst = {"index": [int(i) for i in np.unravel_index(index, a.shape)], "value": float(x[index]),
                    "reference": float(y[index])}
    return result


@dataclass(frozen=True)
class Tolerance:
    """A user's own limits: |a − b| ≤ atol + rtol·|b|, for all outputs and for single ones."""

    rtol: dict[str, float]
    atol: dict[str, float]

    def __bool__(self) -> bool:
        return bool(self.rtol or self.atol)

    def violations(self, name: str, a: np.ndarray, b: np.ndarray) -> int:
        """How many elements are off (NaN and infinities must be the same)."""
        rtol = self.rtol.get(name, self.rtol.get("", 0.0))
        atol = self.atol.get(name, self.atol.get("", 0.0))
        close = np.isclose(np.asarray(a, np.float64), np.asarray(b, np.float64), rtol=rtol, atol=atol, equal_nan=True)
        return int(close.size - np.count_nonzero(close))


def parse_limits(texts: tuple[str, ...], outputs: list[str], option: str) -> dict[str, float]:
    """`1e-3` for all outputs ("" in the result), `name:1e-3` for one.

    Raises:
        UsageError: not a number, or no such output.
    """
    limits: dict[str, float] = {}
    for text in texts:
        name, _, number = text.rpartition(":")
        try:
            limits[name] = float(number)
        except ValueError:
            raise UsageError(f"`{text}` is no value for {option}", hint="write 1e-3, or output:1e-3") from None
        if name and name not in outputs:
            raise UsageError(f"there is no output `{name}`", hint=f"the model has {', '.join(outputs)}")
    return limits
