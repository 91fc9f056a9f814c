"""Compare one output of a fused model with the unfused model and with the oracle.

All errors are absolute differences divided by the largest finite magnitude in the oracle's output. An element is right
when it is within the tolerance of the oracle, or of the unfused output:

    tolerance = FACTOR x (largest error of the unfused output where it is undisputed) + FLOOR[dtype]

where an output that is narrower than the dtype that the model computes in has one rounding to its own for a floor. If
activations are quantized, how far the original itself moves with the last bits of its weights stands in for a smaller
error of the unfused output, up to a limit.

Why both. The oracle alone would fail a faithful rewrite where the exporter's own graph departs from the wide dtype on
purpose, for example where a mask of finfo.min sums to -inf in float32 and not in float64. The unfused output alone
would fail a rewrite that is better than the original, for example one that does not overflow in float16. Rows where
the two disagree by more than DISPUTED are left out when the unfused error is taken, so that they cannot widen the
tolerance.

Non-finite values: where the oracle and the unfused output are both finite, the fused output must be too. Where one of
them is NaN or infinite, the fused output must equal it in kind (NaN, +inf, -inf), or be within tolerance of the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

#: Rounding differs between two orders of the same sums; the worst element of one may be this much worse than that of
#: the other although both are as good. Measured on the model corpus: ratios up to 2.
FACTOR = 3.0

#: What a rewrite may add, relative to the largest value: folding a norm's weight into a matrix rounds it once more.
#: A few units in the last place of the dtype (2^-24, 2^-11, 2^-8), over the depth of a model.
FLOOR = {"float64": 1e-10, "float32": 2e-5, "float16": 4e-3, "bfloat16": 3e-2}

#: Quantized activations round to one of 256 values, and a different last bit before may round to the next one.
QUANTIZED_FLOOR = 5e-3

#: Where the oracle has no int8 activations and the two models have, their rounding is a part of the unfused error.
GRANTED_DISPUTED = 0.1

#: Errors of the unfused output above this are no rounding: the graph means something else in the wide dtype, or the
#: narrow one overflowed.
DISPUTED = {"float64": 1e-6, "float32": 1e-3, "float16": 0.1, "bfloat16": 0.4}


@dataclass
class Comparison:
    """How one output of one input set compares.

    Attributes:
        error: largest error of the fused output against the oracle, undisputed elements only.
        unfused_error: the same of the unfused output.
        tolerance: what `error` was held to.
        passed: whether every element is right.
        worst: where it is worst: index, fused, unfused and oracle value.
        disputed: share of elements where unfused output and oracle disagree beyond rounding.
        problem: what is wrong, in words; empty when it passed.
    """

    error: float = 0.0
    unfused_error: float = 0.0
    tolerance: float = 0.0
    passed: bool = True
    worst: dict[str, Any] | None = None
    disputed: float = 0.0
    problem: str = ""


def compare(
    fused: np.ndarray, unfused: np.ndarray, oracle: np.ndarray, dtype: str, *, quantized: bool = False,
    allowance: float = 0.0, disputed: float = 0.0,
) -> Comparison:
    """Compare one output.

    Args:
        fused, unfused, oracle: the values; shapes must agree.
        dtype: the narrowest float dtype that the model computes in; it picks floor and dispute limit. The output itself
            may be narrower: then one rounding to it is granted as well.
        quantized: whether the model quantizes activations.
        allowance: what a right output may differ by for other reasons, relative to its largest value.
        disputed: the limit of disputes if it is more than the dtype's.
    """
    if fused.shape != unfused.shape:
        return Comparison(passed=False, error=float("inf"),
                          problem=f"shape {list(fused.shape)} instead of {list(unfused.shape)}")
    if fused.dtype.kind in "biuSUO" or unfused.dtype.kind in "biuSUO":
        return _exact(fused, unfused, oracle)
    if fused.size == 0:
        return Comparison()
    f, u, o = (np.asarray(a, dtype=np.float64) for a in (fused, unfused, oracle))
    finite_o = np.isfinite(o)
    scale = float(np.max(np.abs(o), where=finite_o, initial=0.0)) or 1.0
    with np.errstate(invalid="ignore", over="ignore"):
        unfused_error = np.abs(u - o) / scale
        fused_error = np.abs(f - o) / scale
        fused_to_unfused = np.abs(f - u) / scale
    one_rounding = float(ml_dtypes.finfo(unfused.dtype).eps)  # type: ignore[no-untyped-call]
    limit = max(DISPUTED[dtype], one_rounding, disputed)
    undisputed = np.isfinite(u) & finite_o & (unfused_error <= limit)
    baseline = float(np.max(unfused_error, where=undisputed, initial=0.0))
    floor = max(FLOOR[dtype], one_rounding, QUANTIZED_FLOOR if quantized else 0.0)
    tolerance = max(FACTOR * baseline, allowance) + floor
    # Comparisons with NaN are false, so a NaN in the fused output is wrong here.
    right = (fused_error <= tolerance) | (fused_to_unfused <= tolerance) | _same_kind(f, o) | _same_kind(f, u)
    shown = np.where(undisputed, fused_error, np.minimum(fused_error, fused_to_unfused))
    shown = np.where(right, np.where(np.isfinite(shown), shown, 0.0), np.where(np.isnan(shown), np.inf, shown))
    index = np.unravel_index(int(np.argmax(shown)), shown.shape)
    result = Comparison(
        error=float(shown[index]), unfused_error=baseline, tolerance=tolerance, passed=bool(right.all()),
        worst={"index": [int(i) for i in index], "fused": float(f[index]), "unfused": float(u[index]),
               "oracle": float(o[index])},
        disputed=float(1.0 - undisputed.mean()),
    )
    if not result.passed:
        wrong = int(np.size(right) - np.count_nonzero(right))
        result.problem = (
            f"{wrong} of {right.size} elements wrong; worst at {result.worst['index']}: "  # type: ignore[index]
            f"{f[index]:.6g}, unfused {u[index]:.6g}, oracle {o[index]:.6g} "
            f"(error {result.error:.2g}, allowed {tolerance:.2g})"
        )
    return result


def _same_kind(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Where both are NaN, or the same infinity."""
    return (np.isnan(a) & np.isnan(b)) | (np.isinf(a) & (a == b))


def _exact(fused: np.ndarray, unfused: np.ndarray, oracle: np.ndarray) -> Comparison:
    """Integers, booleans and strings are equal or wrong."""
    equal = (fused == unfused) | (fused == oracle)
    if bool(np.all(equal)):
        return Comparison()
    index = tuple(int(i) for i in np.argwhere(~equal)[0])
    return Comparison(
        error=float("inf"), passed=False, worst={"index": list(index)},
        problem=f"{int(np.count_nonzero(~equal))} of {equal.size} elements differ, the first at {list(index)}: "
                f"{fused[index]!r} instead of {unfused[index]!r}",
    )
