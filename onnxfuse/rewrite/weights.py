"""Named weight functions: new constants from old ones, computed when they are first needed.

Each function checks shapes at once and returns a `Plan`: the result's shape, dtype and the computation. Values are
computed in float64 (float32 for half-precision tensors, where it is exact enough) and rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from onnxfuse.graph import consts
from onnxfuse.graph.ir import Constant, Deferred
from onnxfuse.graph.types import HALVES, numpy_of

#: A source of at least this many bytes with other readers is not duplicated.
SHARED_LIMIT = 64 * 1024


class Unfit(Exception):
    """A weight function that cannot be applied to these operands."""

    def __init__(self, expected: str, found: str) -> None:
        super().__init__(f"expected {expected}, found {found}")
        self.expected = expected
        self.found = found


@dataclass(slots=True)
class Plan:
    shape: tuple[int, ...]
    dtype: str
    compute: Callable[[], np.ndarray]

    def deferred(self) -> Deferred:
        dtype = numpy_of(self.dtype)
        return Deferred(self.shape, dtype, lambda: np.asarray(self.compute()).astype(dtype, copy=False))


WeightFunction = Callable[..., "Plan | Constant | None"]
REGISTRY: dict[str, WeightFunction] = {}
#: Functions whose list operands may have absent members.
TAKES_ABSENT = frozenset({"add", "matmul_bias", "concat"})


def weight(function: WeightFunction) -> WeightFunction:
    """Register a weight function under its name; the first line of its docstring is its reference."""
    REGISTRY[function.__name__] = function
    return function


def dtype_of(value: Constant) -> str:
    name = consts.dtype_of(value)
    if name is None:
        raise Unfit("a numeric tensor", "a tensor of another type")
    return name


def wide(value: Constant) -> np.ndarray:
    """The content in the dtype that it is computed in."""
    name = dtype_of(value)
    if name in HALVES:
        return consts.array(value).astype(np.float32)
    return consts.array(value).astype(np.float64) if name == "float32" else consts.array(value)


def _shape(value: Constant) -> tuple[int, ...]:
    return tuple(int(d) for d in consts.shape_of(value))


def _axis(axis: Any, rank: int) -> int:
    if not isinstance(axis, int) or not -rank <= axis < rank:
        raise Unfit(f"an axis of a tensor of rank {rank}", str(axis))
    return axis % rank


def k_axis(layout: str | None) -> int:
    """The axis of K in a weight matrix: 0 as ONNX MatMul has it (``KN``, the default), 1 for ``NK``."""
    return 1 if layout == "NK" else 0


@weight
def transpose(w: Constant, *, perm: Sequence[int] | None = None) -> Plan:
    """`of: [w]`, `perm` (default: reversed): the axes permuted"""
    shape = _shape(w)
    order = list(perm) if perm is not None else list(range(len(shape)))[::-1]
    if sorted(order) != list(range(len(shape))):
        raise Unfit(f"a permutation of {len(shape)} axes", str(order))
    return Plan(tuple(shape[i] for i in order), dtype_of(w), lambda: np.transpose(consts.array(w), order))


@weight
def concat(*parts: Constant | None, axis: int = 0, sizes: Sequence[int] | None = None) -> Plan | None:
    """`of: [a, b, …]` or `[w*]`, `axis`: joined. `missing: N` stands zeros of size N in for absent vectors"""
    present = [p for p in parts if p is not None]
    if not present:
        return None
    if len(present) < len(parts) and (sizes is None or len(_shape(present[0])) != 1):
        raise Unfit("all operands, or `missing` for vectors", "an absent operand")
    first = _shape(present[0])
    at = _axis(axis, len(first))
    total = 0
    for index, part in enumerate(parts):
        shape = _shape(part) if part is not None else (sizes[index],)  # type: ignore[index]
        if len(shape) != len(first) or shape[:at] + shape[at + 1 :] != first[:at] + first[at + 1 :]:
            raise Unfit(f"shapes like {list(first)} except along axis {at}", str(list(shape)))
        if part is not None and dtype_of(part) != dtype_of(present[0]):
            raise Unfit(f"dtype {dtype_of(present[0])}", dtype_of(part))
        total += shape[at]
    dtype = dtype_of(present[0])

    def compute() -> np.ndarray:
        zeros = numpy_of(dtype)
        arrays = [consts.array(p) if p is not None else np.zeros(sizes[i], zeros) for i, p in enumerate(parts)]  # type: ignore[index]
        return np.concatenate(arrays, axis=at)

    return Plan((*first[:at], total, *first[at + 1 :]), dtype, compute)


@weight
def interleave(a: Constant, b: Constant, *, axis: int = 0, block: int = 1) -> Plan:
    """`of: [a, b]`, `axis`, `block: n`: blocks of n slices of `a` and of `b` alternate"""
    shape = _shape(a)
    at = _axis(axis, len(shape))
    if _shape(b) != shape or dtype_of(a) != dtype_of(b):
        raise Unfit(f"two tensors of shape {list(shape)}", str(list(_shape(b))))
    if block < 1 or shape[at] % block:
        raise Unfit(f"a size of axis {at} divisible by {block}", str(shape[at]))

    def compute() -> np.ndarray:
        cut = (*shape[:at], shape[at] // block, block, *shape[at + 1 :])
        both = [consts.array(v).reshape(cut) for v in (a, b)]
        return np.stack(both, axis=at + 1).reshape(*shape[:at], 2 * shape[at], *shape[at + 1 :])

    return Plan((*shape[:at], 2 * shape[at], *shape[at + 1 :]), dtype_of(a), compute)


@weight
def split(w: Constant, *, axis: int = 0, parts: int | Sequence[int] = 2, part: int = 0) -> Plan:
    """`of: [w]`, `axis`, `parts` (how many equal ones, or their sizes), `part`: one slice of it"""
    shape = _shape(w)
    at = _axis(axis, len(shape))
    if isinstance(parts, int):
        if parts < 1 or shape[at] % parts:
            raise Unfit(f"a size of axis {at} divisible by {parts}", str(shape[at]))
        sizes = [shape[at] // parts] * parts
    else:
        sizes = list(parts)
    if sum(sizes) != shape[at] or not 0 <= part < len(sizes):
        raise Unfit(f"parts that sum to {shape[at]}", str(sizes))
    start = sum(sizes[:part])
    where = (slice(None),) * at + (slice(start, start + sizes[part]),)
    return Plan((*shape[:at], sizes[part], *shape[at + 1 :]), dtype_of(w), lambda: consts.array(w)[where])


@weight
def every_nth(w: Constant, *, axis: int = 0, parts: int = 2, part: int = 0) -> Plan:
    """`of: [w]`, `axis`, `parts: n`, `part`: each n-th slice, from the one at `part` on"""
    shape = _shape(w)
    at = _axis(axis, len(shape))
    if not isinstance(parts, int) or parts < 1 or shape[at] % parts or not 0 <= part < parts:
        raise Unfit(f"a size of axis {at} divisible by {parts}", str(shape[at]))
    where = (slice(None),) * at + (slice(part, None, parts),)
    return Plan((*shape[:at], shape[at] // parts, *shape[at + 1 :]), dtype_of(w), lambda: consts.array(w)[where])


@weight
def reshape(w: Constant, *, shape: Sequence[int]) -> Plan:
    """`of: [w]`, `shape: [K, -1]`: the same elements in another shape"""
    goal = list(shape)
    size = math.prod(_shape(w))
    if goal.count(-1) == 1:
        known = math.prod(d for d in goal if d != -1)
        goal[goal.index(-1)] = size // known if known else 0
    if math.prod(goal) != size:
        raise Unfit(f"{size} elements", str(list(shape)))
    return Plan(tuple(goal), dtype_of(w), lambda: consts.array(w).reshape(goal))


@weight
def flatten(w: Constant) -> Plan | Constant:
    """`of: [w]`: the elements as a vector"""
    shape = _shape(w)
    if len(shape) == 1:
        return w
    return Plan((math.prod(shape),), dtype_of(w), lambda: consts.array(w).reshape(-1))


@weight
def squeeze(w: Constant) -> Plan | Constant:
    """`of: [w]`: without leading dims of size 1"""
    shape = _shape(w)
    kept = list(shape)
    while kept and kept[0] == 1:
        kept.pop(0)
    return w if tuple(kept) == shape else Plan(tuple(kept), dtype_of(w), lambda: consts.array(w).reshape(kept))


@weight
def expand(w: Constant, *, shape: Sequence[int]) -> Plan | Constant:
    """`of: [w]`, `shape: [N]`: broadcast to a shape (leading ones dropped first)"""
    goal = tuple(int(d) for d in shape)
    have = _shape(w)
    if have == goal:
        return w
    kept = have
    while len(kept) > len(goal) and kept[0] == 1:
        kept = kept[1:]
    if len(kept) > len(goal) or any(d not in (1, g) for d, g in zip(kept, goal[len(goal) - len(kept) :], strict=True)):
        raise Unfit(f"a shape that broadcasts to {list(goal)}", str(list(have)))
    return Plan(goal, dtype_of(w), lambda: np.broadcast_to(consts.array(w).reshape(kept), goal))


@weight
def pad(w: Constant, *, axis: int = 0, before: int = 0, after: int = 0) -> Plan:
    """`of: [w]`, `axis`, `before`, `after`: zeros added"""
    shape = _shape(w)
    at = _axis(axis, len(shape))
    if before < 0 or after < 0:
        raise Unfit("counts of zeros", f"{before}, {after}")
    width = [(0, 0)] * at + [(before, after)] + [(0, 0)] * (len(shape) - at - 1)
    grown = (*shape[:at], shape[at] + before + after, *shape[at + 1 :])
    return Plan(grown, dtype_of(w), lambda: np.pad(consts.array(w), width))


@weight
def cast(w: Constant) -> Plan:
    """`of: [w]`, `to`: in another dtype"""
    return Plan(_shape(w), dtype_of(w), lambda: consts.array(w))


def _before_cast(value: Constant) -> Constant:
    """What a constant was cast from, if a rule cast it: a float32 scale is not rounded to half precision first."""
    recipe = value.recipe
    return recipe[1][0] if recipe is not None and recipe[0] == "cast" else value


def _scaled(w: Constant, s: Constant, axis: int) -> Plan:
    shape = _shape(w)
    if len(shape) != 2:
        raise Unfit("a matrix", str(list(shape)))
    size = consts.size_of(s)
    if size not in (1, shape[axis]) or max((*_shape(s), 1)) != size:
        raise Unfit(f"a vector of {shape[axis]} factors", str(list(_shape(s))))

    def compute() -> np.ndarray:
        factors = wide(_before_cast(s)).reshape(-1)
        return wide(w) * (factors[:, None] if axis == 0 else factors[None, :])

    return Plan(shape, dtype_of(w), compute)


@weight
def scale_rows(w: Constant, s: Constant, *, layout: str = "KN") -> Plan:
    """`of: [w, s]`, `layout`: each row k of W (along K) times s[k]: diag(s)·W"""
    return _scaled(w, s, k_axis(layout))


@weight
def scale_cols(w: Constant, s: Constant, *, layout: str = "KN") -> Plan:
    """`of: [w, s]`, `layout`: each column n of W (along N) times s[n]: W·diag(s)"""
    return _scaled(w, s, 1 - k_axis(layout))


@weight
def scale(w: Constant | None, *, value: float) -> Plan | None:
    """`of: [w]`, `value`: times a number; an absent operand stays absent"""
    if w is None:
        return None
    return Plan(_shape(w), dtype_of(w), lambda: wide(w) * float(value))


def _elementwise(a: Constant, b: Constant, function: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> Plan:
    try:
        shape = np.broadcast_shapes(_shape(a), _shape(b))
    except ValueError:
        raise Unfit(f"a shape that broadcasts with {list(_shape(a))}", str(list(_shape(b)))) from None
    return Plan(tuple(shape), dtype_of(a), lambda: function(wide(a), wide(b)))


@weight
def add(a: Constant | None, b: Constant | None) -> Plan | Constant | None:
    """`of: [a, b]`: the sum; an absent operand counts as zero"""
    if a is None or b is None:
        return a if b is None else b
    return _elementwise(a, b, np.add)


@weight
def mul(a: Constant | None, b: Constant) -> Plan | None:
    """`of: [a, b]`: the product; absent if the first is"""
    return None if a is None else _elementwise(a, b, np.multiply)


@weight
def matmul_bias(
    w: Constant, beta: Constant | None, bias: Constant | None, *, layout: str = "KN"
) -> Plan | Constant | None:
    """`of: [w, beta, bias]`, `layout`: beta·W + bias, a vector of N; an absent operand counts as zero"""
    if beta is None:
        return bias
    shape, axis = _shape(w), k_axis(layout)
    if len(shape) != 2 or consts.size_of(beta) not in (1, shape[axis]):
        raise Unfit("a matrix and a vector of K elements", f"{list(shape)} and {list(_shape(beta))}")
    columns = shape[1 - axis]
    if bias is not None and consts.size_of(bias) not in (1, columns):
        raise Unfit(f"a bias of {columns} elements", str(list(_shape(bias))))

    def compute() -> np.ndarray:
        vector = np.broadcast_to(wide(_before_cast(beta)).reshape(-1), (shape[axis],)).astype(np.float64)
        matrix = consts.array(w).astype(np.float64)
        product = vector @ (matrix if axis == 0 else matrix.T)
        return product if bias is None else product + wide(bias).reshape(-1)

    return Plan((columns,), dtype_of(w), compute)


@weight
def column_sum(w: Constant, *, layout: str = "KN") -> Plan:
    """`of: [w]`, `layout`: the sum over K of W as stored, float32, a vector of N"""
    shape, axis = _shape(w), k_axis(layout)
    if len(shape) != 2:
        raise Unfit("a matrix", str(list(shape)))
    return Plan((shape[1 - axis],), "float32", lambda: consts.array(w).astype(np.float64).sum(axis=axis))


@weight
def one_plus(w: Constant) -> Plan:
    """`of: [w]`: 1 + w"""
    return Plan(_shape(w), dtype_of(w), lambda: wide(w) + 1.0)


@weight
def negate(w: Constant) -> Plan:
    """`of: [w]`: −w"""
    return Plan(_shape(w), dtype_of(w), lambda: -wide(w))


@weight
def reciprocal(w: Constant) -> Plan:
    """`of: [w]`: 1 / w"""
    return Plan(_shape(w), dtype_of(w), lambda: 1.0 / wide(w))


@weight
def full(*, shape: Sequence[int], value: float = 0.0, dtype: str = "float32") -> Plan:
    """`shape: [K]`, `value`, `to` (default T): a constant of equal elements"""
    goal = tuple(int(d) for d in shape)
    return Plan(goal, dtype, lambda: np.full(goal, value, np.float64))
