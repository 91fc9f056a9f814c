"""Seeded inputs for a model: every input in the range that its name, its type and the graph allow, with the sizes of
named dimensions the same wherever the name occurs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import onnx
from onnx import helper

from onnxfuse.errors import InputDataError
from onnxfuse.runtime import caches, ranges

_IDS_WITHOUT_TABLE = 32
_IMAGE_SIDE = 32
_HEAD_SIZE = 16
_ENCODER_DIM = 64
#: What an additive mask holds where nothing is attended to: the lowest number of float16, which fits all dtypes.
_MASKED_SCORE = -65504.0


@dataclass(frozen=True)
class InputSpec:
    """One graph input.

    Attributes:
        name: its name.
        dtype: NumPy dtype (bfloat16 from ml_dtypes).
        dims: fixed sizes, names of symbolic ones, None for unnamed ones.
        range: what the graph says about its values.
        ranked: whether the model says how many dimensions there are; if not, `dims` are two unnamed ones.
        told: the role that the graph tells, whatever the name: past, or mask for one column per cached and new token.
        total: of a cache, the name of the dimension that counts cached and new tokens.
    """

    name: str
    dtype: np.dtype
    dims: tuple[int | str | None, ...]
    range: ranges.Range = field(default_factory=ranges.Range)
    ranked: bool = True
    told: str | None = None
    total: str = ""

    def accepts(self, shape: Sequence[int]) -> bool:
        """Whether the declaration allows a shape."""
        if not self.ranked:
            return True
        sizes = zip(self.dims, shape, strict=False)
        return len(self.dims) == len(shape) and all(not isinstance(d, int) or d == s for d, s in sizes)

    @property
    def role(self) -> str:
        """What the input means: mask, past, positions, branch, lengths, total, ids, integer, flag or data."""
        return self.told or _role(self)


@dataclass(frozen=True)
class Scenario:
    """The sizes and circumstances of one input set.

    Attributes:
        name: for reports.
        batch, seq, past: sizes; `seq` is the number of new tokens.
        padding: none, right, left, or masked (the first row is masked out altogether).
        scale: factor on normal-distributed float inputs.
        fixed: sizes of dimensions by name, which take precedence.
        shapes: whole shapes of inputs by name, which take precedence over all.
        seed: of the random values.
    """

    name: str
    batch: int = 2
    seq: int = 7
    past: int = 0
    padding: str = "none"
    scale: float = 1.0
    fixed: Mapping[str, int] = field(default_factory=dict)
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    seed: int = 0

    def having(self, **changes: object) -> Scenario:
        return replace(self, **changes)  # type: ignore[arg-type]


def input_specs(proto: onnx.ModelProto) -> list[InputSpec]:
    """The inputs that a caller must give: graph inputs without a default value.

    Raises:
        InputDataError: an input is no tensor.
    """
    defaults = {t.name for t in proto.graph.initializer}
    found = ranges.of_inputs(proto)
    specs = []
    for value in proto.graph.input:
        if value.name in defaults:
            continue
        kind = value.type.WhichOneof("value")
        if kind != "tensor_type":
            raise InputDataError(
                f"input `{value.name}` is of type `{kind}`, for which no values can be given",
                hint="--no-verify writes the result without running it",
            )
        tensor = value.type.tensor_type
        ranked = tensor.HasField("shape")
        dims: list[int | str | None] = [] if ranked else [None, None]
        for dim in tensor.shape.dim:
            if dim.WhichOneof("value") == "dim_value":
                dims.append(dim.dim_value)
            else:
                dims.append(dim.dim_param or None)
        dtype = np.dtype(helper.tensor_dtype_to_np_dtype(tensor.elem_type))
        specs.append(InputSpec(value.name, dtype, tuple(dims), found.get(value.name, ranges.Range()), ranked))
    return _told_by_graph(specs, caches.grown_dims(proto))


def _told_by_graph(specs: Sequence[InputSpec], grown: Mapping[str, str]) -> list[InputSpec]:
    """The inputs, with what the graph tells of those whose names tell nothing (`k0`, `am`)."""
    totals = {dim for dim in grown.values() if dim}
    result = []
    for spec in specs:
        if spec.name in grown and spec.dtype.kind in "fV":
            spec = replace(spec, told="past", total=grown[spec.name])
        elif spec.role == "ids" and len(spec.dims) == 2 and spec.dims[1] in totals:
            spec = replace(spec, told="mask")
        result.append(spec)
    return result


def generate(specs: Sequence[InputSpec], scenario: Scenario) -> dict[str, np.ndarray]:
    """Values for all inputs.

    Raises:
        InputDataError: an input's dtype has no values here, or a given shape does not fit an input.
    """
    rng = np.random.default_rng(scenario.seed)
    sizes = _Sizes(specs, scenario)
    shapes = {spec.name: sizes.shape(spec) for spec in specs}
    pad = _padding(scenario, _longest_mask(specs, shapes, scenario))
    # NumPy makes scalars of what has no dimensions; ONNX Runtime takes arrays only.
    return {spec.name: np.asarray(_values(spec, shapes[spec.name], scenario, pad, rng)) for spec in specs}


def has_past(specs: Iterable[InputSpec]) -> bool:
    """Whether the model takes a key/value cache."""
    return any(spec.role == "past" and any(not isinstance(d, int) for d in spec.dims) for spec in specs)


def unknown_dims(specs: Iterable[InputSpec]) -> list[str]:
    """Names of dimensions whose size neither the name nor the graph tells."""
    names = {d for spec in specs for d in spec.dims if isinstance(d, str)}
    return sorted(d for d in names if _kind(d) == "feature")


# -- sizes -------------------------------------------------------------------------------------------------------------

_KINDS: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (kind, re.compile(pattern))
    for kind, pattern in (
        ("batch", r"batch|^(b|n|bs)$"),
        # A buffer for a cache holds all tokens.
        ("total", r"total|max_(seq|len|cache|context)|full_len|kv_(seq|len)|key_len|context_len|^(t_total|kv)$"),
        ("past", r"past|cache_len|history"),
        ("decoder", r"(dec|tgt|target)[a-z]*[_ ]?(seq|len|input|tok)|^(dec_seq|t_dec)$"),
        ("seq", r"seq|len|tok|time|frame|^(s|l|t|n_ctx)$|audio|samples"),
        ("image", r"height|width|^(h|w)$"),
        ("channels", r"channel|^c$"),
        ("feature", r"dim|head|hidden|feature|size|^d$"),
    )
)


def _kind(name: str) -> str:
    """What a dimension's name says it counts."""
    lowered = name.lower()
    return next((kind for kind, pattern in _KINDS if pattern.search(lowered)), "unknown")


class _Sizes:
    """Sizes of symbolic dimensions in one scenario."""

    def __init__(self, specs: Sequence[InputSpec], scenario: Scenario) -> None:
        self.scenario = scenario
        self.with_past = has_past(specs)
        self.bound: dict[str, int] = dict(scenario.fixed)
        known = {spec.name: spec for spec in specs}
        for name, shape in scenario.shapes.items():
            if name not in known:
                raise InputDataError(f"the model has no input `{name}`", hint=f"it has {', '.join(known)}")
            spec = known[name]
            if not spec.accepts(shape):
                raise InputDataError(f"shape `{list(shape)}` does not fit input `{name}`, which is {list(spec.dims)}")
            for dim, size in zip(spec.dims, shape, strict=spec.ranked):
                if isinstance(dim, str):
                    self.bound.setdefault(dim, size)
        for spec in specs:
            if spec.total.isidentifier() and _kind(spec.total) == "unknown":
                self.bound.setdefault(spec.total, scenario.past + scenario.seq)
        # A name that tells nothing is the same size everywhere: `enc`, of an encoder's mask and of cached keys.
        for spec in specs:
            for axis, dim in enumerate(spec.dims):
                if isinstance(dim, str) and dim.isidentifier() and _kind(dim) == "unknown":
                    self.bound.setdefault(dim, self._by_place(spec, axis))

    def shape(self, spec: InputSpec) -> tuple[int, ...]:
        given = self.scenario.shapes.get(spec.name)
        if given is not None:
            return tuple(given)
        return tuple(d if isinstance(d, int) else self._size(spec, axis, d) for axis, d in enumerate(spec.dims))

    def _size(self, spec: InputSpec, axis: int, dim: str | None) -> int:
        if dim is not None:
            if dim in self.bound:
                return self.bound[dim]
            terms = re.split(r"\s*([+-])\s*", dim.strip())
            if len(terms) > 1:
                total = self._term(spec, axis, terms[0])
                for sign, term in zip(terms[1::2], terms[2::2], strict=True):
                    total += self._term(spec, axis, term) * (1 if sign == "+" else -1)
                return max(total, 0)
            return self._term(spec, axis, dim)
        return self._by_place(spec, axis)

    def _term(self, spec: InputSpec, axis: int, term: str) -> int:
        if term.isdigit():
            return int(term)
        if term in self.bound:
            return self.bound[term]
        scenario = self.scenario
        kind = _kind(term)
        if kind == "batch":
            return self.bound.get("batch", scenario.batch)
        if kind == "past":
            return scenario.past
        if kind == "total":
            return scenario.past + scenario.seq
        if kind == "decoder":
            return max(1, scenario.seq - 2)
        if kind == "seq":
            return scenario.seq
        if kind == "image":
            return _IMAGE_SIDE
        if kind == "channels":
            return 3
        if kind == "feature":
            return _HEAD_SIZE
        return self._by_place(spec, axis)

    def _by_place(self, spec: InputSpec, axis: int) -> int:
        """The size of a dimension without a telling name, from the input's role and the axis."""
        scenario = self.scenario
        batch = self.bound.get("batch", scenario.batch)
        role = spec.role
        if role == "past":
            return batch if axis == 0 else scenario.past if axis == len(spec.dims) - 2 else _HEAD_SIZE
        if role == "mask" and axis == len(spec.dims) - 1:
            return scenario.past + scenario.seq
        if axis == 0 and len(spec.dims) > 1:
            return batch
        if role == "data" and len(spec.dims) == 4:
            return 3 if axis == 1 else _IMAGE_SIDE
        if role == "data" and len(spec.dims) == 3 and axis == 2:
            return _ENCODER_DIM
        return batch if role == "lengths" else scenario.seq


# -- values ------------------------------------------------------------------------------------------------------------


def _role(spec: InputSpec) -> str:
    name = spec.name.lower()
    kind = spec.dtype.kind
    integer = kind in "iu"
    if "mask" in name and "past" not in name:
        return "mask"
    if "use_cache" in name or (kind == "b" and len(spec.dims) <= 1):
        return "branch"
    if integer and "seqlens" in name:
        return "lengths"
    if integer and "total_seq" in name:
        return "total"
    if integer and ("position" in name and "embed" not in name):
        return "positions"
    if not integer and kind != "b" and re.search(r"past|cache|(^|[._])(key|value)s?[._]?\d|\d[._](key|value)s?$", name):
        return "past"
    if integer:
        return "ids" if spec.dims and len(spec.dims) > 1 else "integer"
    return "flag" if kind == "b" else "data"


def _longest_mask(
    specs: Sequence[InputSpec], shapes: Mapping[str, tuple[int, ...]], scenario: Scenario
) -> tuple[int, int]:
    """Rows and columns that padding is decided for."""
    for spec in specs:
        if spec.role == "mask" and len(shapes[spec.name]) >= 2:
            return shapes[spec.name][0], shapes[spec.name][-1]
    return scenario.batch, scenario.past + scenario.seq


def _padding(scenario: Scenario, size: tuple[int, int]) -> np.ndarray:
    """Which positions are attended to, rows × columns. Each row is padded differently; at least one position is left,
    but for the first row of the `masked` kind."""
    rows, columns = size
    keep = np.ones((rows, columns), dtype=bool)
    for row in range(rows):
        count = min(columns - 1, (row * columns) // (rows + 1) + (columns > 2 and rows == 1) * (columns // 3))
        if scenario.padding in ("left", "masked") and count > 0:
            keep[row, :count] = False
        elif scenario.padding == "right" and count > 0:
            keep[row, columns - count :] = False
    if scenario.padding == "masked" and rows > 1:
        keep[0] = False
    return keep


def _values(
    spec: InputSpec, shape: tuple[int, ...], scenario: Scenario, pad: np.ndarray, rng: np.random.Generator
) -> np.ndarray:
    role = spec.role
    if role == "mask":
        return _mask(spec, shape, scenario, pad)
    if role == "branch":
        return np.full(shape, scenario.past > 0, dtype=spec.dtype)
    if role == "lengths":
        return np.full(shape, scenario.past + scenario.seq - 1, dtype=spec.dtype)
    if role == "total":
        return np.full(shape, scenario.past + scenario.seq, dtype=spec.dtype)
    if role == "positions":
        return _positions(spec, shape, scenario, pad)
    if role in ("ids", "integer"):
        return _integers(spec, shape, rng)
    if role == "flag":
        return rng.integers(0, 2, shape).astype(bool)
    if spec.dtype.kind not in "fV":
        raise InputDataError(
            f"no values can be generated for input `{spec.name}` of dtype "
            f"`{'string' if spec.dtype.kind == 'O' else spec.dtype}`",
            hint="give them with --inputs FILE.npz",
        )
    scale = 1.0 if role == "past" else scenario.scale
    return (rng.standard_normal(shape, dtype=np.float32) * scale).astype(spec.dtype)


def _mask(spec: InputSpec, shape: tuple[int, ...], scenario: Scenario, pad: np.ndarray) -> np.ndarray:
    columns = shape[-1] if shape else 0
    rows = shape[0] if len(shape) > 1 else 1
    keep = np.ones((rows, columns), dtype=bool)
    common = (min(rows, pad.shape[0]), min(columns, pad.shape[1]))
    keep[: common[0], : common[1]] = pad[: common[0], : common[1]]
    if len(shape) <= 2:
        return keep.reshape(shape).astype(spec.dtype)
    # A mask per query: causal, aligned at the end, and padded.
    queries = shape[-2]
    causal = np.arange(columns)[None, :] <= np.arange(queries)[:, None] + (columns - queries)
    full = np.broadcast_to(
        keep.reshape((rows,) + (1,) * (len(shape) - 2) + (columns,)) & causal, shape
    )
    if spec.dtype.kind in "biu":
        return full.astype(spec.dtype)
    return np.where(full, 0.0, _MASKED_SCORE).astype(spec.dtype)


def _positions(spec: InputSpec, shape: tuple[int, ...], scenario: Scenario, pad: np.ndarray) -> np.ndarray:
    """Positions of the new tokens: they count on from the cache, and start at the first token that is no padding."""
    if not shape:
        return np.array(scenario.past, dtype=spec.dtype)
    count = shape[-1]
    plain = np.arange(scenario.past, scenario.past + count)
    if len(shape) >= 2 and scenario.padding == "left" and shape[-2] == pad.shape[0]:
        rows = np.maximum(np.cumsum(pad, axis=1) - 1, 0)[:, -count:]
        values = np.broadcast_to(rows if rows.shape[1] == count else plain, shape)
    else:
        values = np.broadcast_to(plain, shape)
    limit = spec.range.limit
    return np.minimum(values, limit - 1).astype(spec.dtype) if limit else values.astype(spec.dtype)


def _integers(spec: InputSpec, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    if spec.range.limit is not None and spec.range.limit > 0:
        return rng.integers(0, spec.range.limit, shape).astype(spec.dtype)
    if spec.role == "integer" and spec.range.compared:
        return np.full(shape, max(spec.range.compared), dtype=spec.dtype)
    if spec.role == "integer":
        return np.ones(shape, dtype=spec.dtype)
    high = 2 if "type" in spec.name.lower() else _IDS_WITHOUT_TABLE
    return rng.integers(0, high, shape).astype(spec.dtype)
