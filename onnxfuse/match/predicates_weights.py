"""Named predicates about folding factors into weights: what the weight's dtype can still hold afterwards."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from onnxfuse.graph import consts, view
from onnxfuse.graph.ir import Constant, Value
from onnxfuse.match.predicates import Outcome, Refused, predicate
from onnxfuse.match.scope import Scope
from onnxfuse.match.typing import shape_of, show

#: The largest and the smallest normal number.
_LIMITS = {
    "float16": (65504.0, 2.0**-14), "bfloat16": (float.fromhex("0x1.fep127"), 2.0**-126),
    "float32": (float.fromhex("0x1.fffffep127"), 2.0**-126),
    "float64": (float.fromhex("0x1.fffffffffffffp1023"), 2.0**-1022),
}  # fmt: skip
#: Dtypes with the exponents of float32: factors between these bounds neither overflow nor underflow in them with any
#: weight that a model could have been trained to.
_WIDE = frozenset({"float32", "bfloat16"})
_ORDINARY = (2.0**-40, 2.0**40)
#: Clamping a vector's length from below by at most so much only matters for the zero vector.
_LEAST_LENGTH = 1e-11
#: So many slices of a matrix are read first; they bound its columns' sizes from below.
_SAMPLE = 64


@predicate
def number_or_row(scope: Scope, factor: Value, value: Value) -> Outcome:
    """of: a constant, a value that it is an operand with
    holds: it is one number, or one for each place along the value's last axis
    """
    shape = shape_of(factor)
    goal = shape_of(value)
    if shape is not None and all(d == 1 for d in shape):
        return {}
    if shape and goal and shape[-1] == goal[-1] and all(d == 1 for d in shape[:-1]):
        return {}
    return Refused(f"one number, or a row like the last axis of {show(goal)}", show(shape))


@predicate
def fits_scaled(
    scope: Scope, weight: Value, factor: Value | float, divided: int, bias: Value | None = None, layout: str = "KN"
) -> Outcome:
    """of: a constant matrix or vector, constant factors (one, or one per column; or a captured number), whether they \
are divisors (0 or 1), a bias or nothing, and the matrix's layout
    holds: matrix and bias times the factors are numbers that their dtype holds with all its digits: none overflows, \
and no column shrinks so far that rounding (to subnormal numbers) costs more than it costs anyway
    """
    return _fits(weight, factor, divided, bias, layout, per_row=False)


@predicate
def fits_scaled_rows(scope: Scope, weight: Value, factor: Value, divided: int, layout: str) -> Outcome:
    """of: a constant matrix, constant factors (one, or one per row), whether they are divisors (0 or 1), and the \
matrix's layout
    holds: as `fits_scaled`
    """
    return _fits(weight, factor, divided, None, layout, per_row=True)


@predicate
def read_by_one(scope: Scope, weight: Value) -> Outcome:
    """of: a constant
    holds: one node of this graph reads it, so that it needs not be stored beside what is made of it (tied embeddings)
    """
    readers = [reader for reader in view.consumers(weight) if reader in scope.position]
    return {} if len(readers) <= 1 else Refused("one reader", f"{len(readers)} of `{weight.name}`", readers[1])


@predicate
def multiple_of_mean(
    scope: Scope, factor: float, divisor: float, summed: int, dim: Any, epsilon: float
) -> Outcome:
    """of: a factor, a divisor, whether the mean is a sum (0 or 1), a dim, a number added to it
    holds: factor × the mean (or the sum) over the (known) dim / divisor is a positive multiple a of the mean
    results: `gain`: 1/√a; `epsilon`: the number / a
    """
    if not isinstance(dim, int) or dim <= 0:
        return Refused("a known size", dim)
    if not float(divisor):
        return Refused("a divisor other than 0", divisor)
    multiple = float(factor) / float(divisor) * (dim if summed else 1)
    if not 0 < multiple < math.inf:
        return Refused("a positive multiple", multiple)
    return {"gain": multiple**-0.5, "epsilon": float(epsilon) / multiple}


@predicate
def length_as_mean(scope: Scope, least: float, dim: Any) -> Outcome:
    """of: the least length that a vector is divided by, a dim (the vector's)
    holds: the dim is known, and the least length is so small (1e-11) that no vector but zero is shorter in practice
    results: `gain`: 1/√dim; `epsilon`: least² / dim, which added to the mean of squares keeps zero from being divided \
by zero and changes no longer vector
    """
    if not isinstance(dim, int) or dim <= 0:
        return Refused("a known size", dim)
    epsilon = float(least) ** 2 / dim
    if not 0 <= float(least) <= _LEAST_LENGTH or 0 < epsilon < _LIMITS["float32"][1]:
        return Refused(f"a length from 1e-18 to {_LEAST_LENGTH:g}, or 0", least)
    return {"gain": dim**-0.5, "epsilon": epsilon}


def _fits(
    weight: Value, factor: Value | float, divided: int, bias: Value | None, layout: str, *, per_row: bool
) -> Outcome:
    if not isinstance(weight, Constant) or not isinstance(factor, (Constant, int, float)):
        return Refused("constants", f"`{weight.name}` and `{getattr(factor, 'name', factor)}`")
    dtype = consts.dtype_of(weight)
    numbers = consts.array(factor) if isinstance(factor, Constant) else np.asarray(factor)
    factors = np.abs(numbers.astype(np.float64).reshape(-1))
    if divided:
        with np.errstate(divide="ignore"):
            factors = 1.0 / factors
    if dtype not in _LIMITS or not np.isfinite(factors).all():
        return Refused("finite factors of floats", dtype)
    sizes = factors[factors != 0]
    if dtype in _WIDE and (not sizes.size or (sizes.min() >= _ORDINARY[0] and sizes.max() <= _ORDINARY[1])):
        return {}
    limit, smallest = _LIMITS[dtype]
    matrix = consts.array(weight)
    if matrix.ndim != 2:
        matrix = matrix.reshape(1, -1)
    elif layout == "NK":
        matrix = matrix.T
    rows, columns = (factors, np.ones(1)) if per_row else (np.ones(1), factors)
    largest = _largest(matrix, rows, columns, limit)
    if isinstance(bias, Constant) and consts.size_of(bias):
        content = np.abs(consts.array(bias).astype(np.float64).reshape(-1)) * columns
        largest = max(largest, float(content.max()))
    if largest > limit:
        return Refused(f"products up to {limit:g}", largest)
    return _columns_keep_digits(matrix, rows, columns, smallest)


def _largest(matrix: np.ndarray, per_row: np.ndarray, per_column: np.ndarray, limit: float) -> float:
    """The largest product, or an upper bound of it that is within the limit."""
    if not matrix.size:
        return 0.0
    bound = _magnitude(matrix) * float(per_row.max() * per_column.max())
    if bound <= limit:
        return bound
    return float((np.abs(matrix.astype(np.float64)) * per_row[:, None] * per_column[None, :]).max())


def _magnitude(matrix: np.ndarray) -> float:
    """The largest absolute value. That of half-precision numbers is read from their bits, which NumPy compares 36
    times as fast."""
    if matrix.dtype.itemsize != 2:
        return max(abs(float(matrix.max())), abs(float(matrix.min())))
    stored = matrix if matrix.flags.c_contiguous else np.ascontiguousarray(matrix.T)
    bits = stored.view(np.uint16) & 0x7FFF
    return float(bits.max(keepdims=True).view(matrix.dtype).reshape(-1)[0])


def _columns_keep_digits(
    matrix: np.ndarray, per_row: np.ndarray, per_column: np.ndarray, smallest: float
) -> Outcome:
    """Whether the quadratic mean of each scaled column is at least the smallest normal number, or the column is zero.

    Below, the spacing of numbers no longer shrinks with them, so that rounding is not relative to the column's size.
    """
    rows = matrix.shape[0]
    for chosen in (slice(0, _SAMPLE), slice(0, rows)):
        part = matrix[chosen].astype(np.float64) * (per_row[chosen, None] if per_row.size > 1 else per_row)
        # The sum of some rows' squares is at most the sum of all.
        mean = np.sqrt(np.square(part).sum(axis=0) / max(rows, 1)) * per_column
        if part.shape[0] == rows:
            mean = mean[mean > 0]
        if not mean.size or float(mean.min()) >= smallest:
            return {}
    return Refused(f"columns of at least {smallest:g} on average", float(mean.min()))
