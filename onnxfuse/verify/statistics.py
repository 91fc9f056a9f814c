"""How far one tensor is from another, in the numbers that people ask for."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

#: Elements below this share of the largest reference value are left out of relative errors: they measure rounding of
#: sums that cancel, not mistakes.
RELATIVE_FLOOR = 1e-3
_BITS = {"float64": (np.int64, 63), "float32": (np.int32, 31), "float16": (np.int16, 15), "bfloat16": (np.int16, 15)}


@dataclass(frozen=True)
class Statistics:
    """Differences of an output from its reference.

    Attributes:
        max_abs, mean_abs, p99_abs: absolute differences.
        max_rel, mean_rel, p99_rel: relative to each element's reference, over elements of at least `RELATIVE_FLOOR` of
            the largest reference value.
        cosine: of the angle between both, as flat vectors; 1.0 is the same direction.
        max_ulp: largest distance in representable numbers of the output's dtype; None for integers.
        worst: index, value and reference where the absolute difference is largest.
        non_finite: elements where one is NaN or infinite and the other is not the same.
        elements: how many there are.
    """

    max_abs: float
    mean_abs: float
    p99_abs: float
    max_rel: float
    mean_rel: float
    p99_rel: float
    cosine: float
    max_ulp: int | None
    worst: dict[str, Any] | None
    non_finite: int
    elements: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def statistics(found: np.ndarray, reference: np.ndarray) -> Statistics:
    """Compare two arrays of one shape, in float64.

    Raises:
        ValueError: the shapes differ.
    """
    if found.shape != reference.shape:
        raise ValueError(f"shape {list(found.shape)} against {list(reference.shape)}")
    if found.size == 0:
        return Statistics(0, 0, 0, 0, 0, 0, 1.0, 0, None, 0, 0)
    a, b = found.astype(np.float64), reference.astype(np.float64)
    both = np.isfinite(a) & np.isfinite(b)
    with np.errstate(invalid="ignore"):
        same_kind = (np.isnan(a) & np.isnan(b)) | (a == b)
    difference = np.zeros(a.shape)
    np.subtract(a, b, out=difference, where=both)
    absolute = np.where(~both & ~same_kind, np.inf, np.abs(difference))
    index = np.unravel_index(int(np.argmax(absolute)), absolute.shape)
    counted = absolute[both] if both.any() else np.zeros(1)
    magnitude = np.abs(b[both]) if both.any() else np.zeros(1)
    large = magnitude >= max(RELATIVE_FLOOR * magnitude.max(initial=0.0), np.finfo(np.float64).tiny)
    relative = counted[large] / magnitude[large] if large.any() else np.zeros(1)
    return Statistics(
        max_abs=float(absolute.max()),
        mean_abs=float(counted.mean()),
        p99_abs=float(np.quantile(counted, 0.99)),
        max_rel=float(relative.max()),
        mean_rel=float(relative.mean()),
        p99_rel=float(np.quantile(relative, 0.99)),
        cosine=_cosine(a[both], b[both]),
        max_ulp=_ulp(found, reference, both),
        worst={"index": [int(i) for i in index], "value": float(a[index]), "reference": float(b[index])},
        non_finite=int(np.count_nonzero(~both & ~same_kind)),
        elements=found.size,
    )


def _cosine(a: np.ndarray, b: np.ndarray) -> float:
    norms = float(np.linalg.norm(a)) * float(np.linalg.norm(b))
    if norms == 0:
        return 1.0 if not a.any() and not b.any() else 0.0
    return float(np.clip(np.dot(a, b) / norms, -1.0, 1.0))


def _ulp(found: np.ndarray, reference: np.ndarray, both: np.ndarray) -> int | None:
    name = found.dtype.name
    if name not in _BITS or not both.any():
        return None if name not in _BITS else 0
    rounded = reference.astype(found.dtype)
    a, b = (_ordered(array[both], *_BITS[name]) for array in (found, rounded))
    return int(np.abs(a - b).max())


def _ordered(array: np.ndarray, bits: type, sign: int) -> np.ndarray:
    """Integers in the order of the floats they stand for, one apart (Python ints for float64: no overflow)."""
    raw = np.ascontiguousarray(array).view(bits).astype(object if bits is np.int64 else np.int64)
    return np.where(raw < 0, -(raw + (1 << sign)), raw)
