"""Chooses the kernel plan for each product of a fused model by measuring, and writes a tuning file.

The library reads the file that `ONNXFUSE_TUNING` names. Entries are kept per architecture, dtype, op, weight shape and
number of rows; plans that give a wrong result are never kept, and neither is one that does not beat the plan the
library would use anyway.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from onnxfuse import __version__
from onnxfuse.errors import ModelError, UsageError
from onnxfuse.graph import model as models
from onnxfuse.graph import view
from onnxfuse.ops.opdef import FUSED_DOMAIN
from onnxfuse.runtime import gpu
from onnxfuse.runtime.kernels import DTYPES, NORMS, PATHS, Kernels, Plan, Shape, Variant

ENVIRONMENT_VARIABLE = "ONNXFUSE_TUNING"
BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
DIFFERENCE_LIMIT = {"float16": 3e-3, "bfloat16": 2e-2}
"""Largest relative difference from the portable kernel, a few roundings of the dtype."""

KEY = ("architecture", "dtype", "gated", "norm", "epilogue", "columns", "k", "rows")
EPILOGUES = ("none", "vendor", "own")
"""What follows a product: nothing but bias or residual, an activation that cuBLASLt has too, or another."""
PLAN = tuple(field.name for field in fields(Plan) if field.name != "overlap")
"""The fields of an entry of a tuning file: what it is for, and the plan; in the order of the shipped table."""

MULTIPROCESSORS = 132  # of a Hopper GPU, about; only what is far off for it is left out
WORTH_TRYING = 1.5  # times the least modelled time; of 400 shapes the fastest plan had up to 1.3 times that
FINALISTS = 4
FINAL_ROUNDS = 6  # even: each of two finalists is first as often as the other
WORTH_WHILE = 0.98  # of the time of the plan that is used anyway
SCAN_SECONDS, FINAL_SECONDS = 0.004, 0.02

_INPUTS = {"Linear": ("x", "weight", "bias", "residual"), "GatedLinear": ("x", "weight", "bias")}


@dataclass(frozen=True)
class Tuned:
    """The outcome for one shape: the plan that won, its time and that of the plan used without it."""

    shape: Shape
    plan: Plan
    microseconds: float
    default_microseconds: float


def shapes_of(source: str | os.PathLike[str], rows: Iterable[int]) -> list[Shape]:
    """The products of a fused model's ops with constant 16-bit weights, each with every number of rows.

    Raises:
        ModelError: the model has no such op.
    """
    model = models.load(source)
    found: dict[Shape, None] = {}
    for graph in model.graphs():
        for node in graph.nodes:
            if view.domain(node) != FUSED_DOMAIN or node.op not in _INPUTS:
                continue
            given = dict(zip(_INPUTS[node.op], node.inputs, strict=False))
            weight = given["weight"]
            shape, dtype = getattr(weight, "shape", None), getattr(weight, "dtype", None)
            if not shape or len(shape) != 2 or not all(isinstance(d, int) for d in shape):
                continue
            name = np.dtype(dtype).name if dtype is not None else ""
            if name not in DIFFERENCE_LIMIT or node.attrs.get("layout", "NK") != "NK":
                continue
            gated = node.op == "GatedLinear"
            present = {key for key, value in given.items() if getattr(value, "name", "")}
            base = Shape(
                rows=1, n=shape[0] // 2 if gated else shape[0], k=shape[1], dtype=name,
                norm=str(node.attrs.get("norm", "none")), gated=gated, bias="bias" in present,
                activation=str(node.attrs.get("activation", "silu" if gated else "none")),
                residual="residual" in present,
            )  # fmt: skip
            for count in rows:
                found.setdefault(replace(base, rows=count))
    if not found:
        raise ModelError(
            f"`{os.fspath(source)}` has no onnxfuse op with a constant 16-bit weight to tune",
            hint="tune the output of `onnxfuse optimize --target cuda`",
        )
    return list(found)


def bucket(rows: int) -> int:
    """The number of rows rounded up, as the library does where it has no plan for just so many."""
    return next((b for b in BUCKETS if b >= rows), BUCKETS[-1])


def candidates(shape: Shape, variants: Sequence[Variant]) -> list[Plan]:
    """Plans worth timing: what cannot fit, and tiles far from the shape, are left out before anything runs."""
    found = [Plan("vendor")]
    packed = shape.n * (2 if shape.gated else 1)
    if shape.rows <= 16:
        rows = max(8, bucket(shape.rows))
        found += _for_few_rows(packed, [v for v in variants if v.path == "stream" and v.rows == rows])
    for v in variants:
        if v.path == "stream" and v.split > 1 and 16 < shape.rows <= 512:
            fits = v.rows == bucket(shape.rows) if shape.rows <= 32 else 32 <= v.rows <= 2 * shape.rows
            if not fits:
                continue
            stats = (0, 1) if shape.norm != "none" and shape.rows >= 64 else (0,)
            kilobytes = (50, 75, 110) if shape.rows <= 32 else (75, 110)
            for split, size, own in product((1, 2, 4, 8), kilobytes, stats):
                found.append(Plan("stream", v.index, _stages(v, size), split, 1, 8, own, 3))
        if v.path == "tile" and shape.rows > 16 and v.gated == shape.gated:
            if v.rows > 4 * shape.rows:
                continue
            rasters = (4, 16) if shape.rows > 1024 else (8,)
            ways = [0] if shape.norm == "none" else [1, 2] if v.columns > 128 else [0, 1, 2]
            stages = (0, 5) if v.rows == 64 else (0,)  # of small tiles a full ring's first loads hold each other up
            for depth, (cm, cn), raster, way in product(stages, ((1, 1), (2, 1), (1, 2)), rasters, ways):
                found.append(Plan("tile", v.index, depth, cm, cn, raster, way))
    return list(dict.fromkeys(found))


def _for_few_rows(packed: int, variants: Sequence[Variant]) -> list[Plan]:
    """Streaming plans that have about one CTA for each multiprocessor, by tiles that split K and by skinny ones."""

    def distance(v: Variant, split: int) -> float:
        return abs(math.log(-(-packed // v.columns) * split / MULTIPROCESSORS))

    found = []
    for v in (v for v in variants if v.split > 1):
        splits = sorted((1, 2, 4, 8), key=lambda split: distance(v, split))[:2]
        for split, size, lead in product(splits, (50, 75, 110), (4, 8, 12)):
            found.append(Plan("stream", v.index, _stages(v, size), split, 1, 8, 0, lead))
    skinny = sorted((v for v in variants if v.split == 1), key=lambda v: distance(v, 1))
    fitting = [v for v in skinny if 100 <= -(-packed // v.columns) <= 140]
    leads = (4, 8, 16, 32) if fitting else (8, 16)
    for v, size, lead, ahead in product(fitting[:1] or skinny[:2], (70, 110), leads, (0, 8, 16)):
        found.append(Plan("stream", v.index, _stages(v, size), 1, 1, 8, 0, lead, ahead))
    return found


def _stages(v: Variant, kilobytes: int) -> int:
    """Of the streaming kernels' ring, in so much shared memory."""
    return min(v.max_stages, max(2, kilobytes * 1024 // ((v.rows + v.columns) * 128)))


def _worth_trying(kernels: Kernels, shape: Shape) -> list[Plan]:
    times = {plan: kernels.modelled(shape, plan) for plan in candidates(shape, kernels.variants())}
    if shape.rows <= 64:  # the model does not tell streams from one another
        return list(times)
    least = min((time for time in times.values() if time is not None), default=0.0)
    return [plan for plan, time in times.items() if time is None or time <= WORTH_TRYING * least]


def tune_shape(kernels: Kernels, shape: Shape, skip: Collection[tuple[str, int]] = ()) -> Tuned:
    """Times the candidates for one shape: all of them briefly, the best few again beside the plan used so far."""
    limit = DIFFERENCE_LIMIT[shape.dtype]
    default = kernels.chosen(shape)
    with kernels.bench(shape) as bench:
        scanned: list[tuple[float, Plan]] = []
        for plan in _worth_trying(kernels, shape):
            if (plan.path, plan.variant) in skip:
                continue
            measured = bench.measure(plan, SCAN_SECONDS)
            if measured is not None and measured[1] <= limit:
                scanned.append((measured[0], plan))
        scanned.sort(key=lambda item: item[0])
        finalists = [default, *(plan for _, plan in scanned[:FINALISTS] if plan != default)]
        times: dict[Plan, list[float]] = {plan: [] for plan in finalists}
        # The clock of a hot GPU wanders by several percent: in turns, each first once, and compared within a round.
        for first in range(FINAL_ROUNDS):
            at = first % len(finalists)
            for plan in (*finalists[at:], *finalists[:at]):
                measured = bench.measure(plan, FINAL_SECONDS)
                right = measured is not None and measured[1] <= limit
                times[plan].append(measured[0] if measured is not None and right else math.inf)

    default_works = math.inf not in times[default]

    def score(plan: Plan) -> float:  # of its time the part of the default's; of a plan that failed once infinite
        if math.inf in times[plan]:
            return math.inf
        pairs = zip(times[plan], times[default], strict=True)
        return statistics.median(a / b for a, b in pairs) if default_works else statistics.median(times[plan])

    best = min(finalists, key=score)
    if default_works and score(best) > WORTH_WHILE:
        best = default
    return Tuned(shape, best, statistics.median(times[best]), statistics.median(times[default]))


def tune(
    source: str | os.PathLike[str],
    destination: Path,
    rows: Iterable[int] = (1, 16, 128, 512, 2048),
    report: Callable[[Tuned], None] | None = None,
) -> list[Tuned]:
    """Tunes every product of the model; returns what was measured now.

    An existing file of the same library, kernels, GPU and driver is continued: shapes that it holds are not measured
    again, and it is written after every shape, beside and then renamed, so an interrupted run loses one at most.

    Raises:
        ModelError: the model has nothing to tune.
        RuntimeMissingError: no library with CUDA kernels, or no GPU.
    """
    return tune_shapes(shapes_of(source, rows), destination, report)


def tune_shapes(
    shapes: Iterable[Shape],
    destination: Path,
    report: Callable[[Tuned], None] | None = None,
    skip: Collection[tuple[str, int]] = (),
    seconds: float | None = None,
) -> list[Tuned]:
    """As `tune`, for given shapes; `skip` names variants (path, index) that are not to be tried.

    After `seconds` no further shape is begun; another run continues.
    """
    kernels = Kernels()
    header = _header(kernels.variants())
    entries = _read(destination, header)
    results = []
    stop = None if seconds is None else time.monotonic() + seconds
    for shape in shapes:
        key = _key(kernels.architecture, shape)
        if any(all(entry.get(name) == value for name, value in key.items()) for entry in entries):
            continue
        if stop is not None and time.monotonic() >= stop:
            break
        tuned = tune_shape(kernels, shape, skip)
        plan = {**asdict(tuned.plan), "path": PATHS.index(tuned.plan.path)}
        del plan["overlap"]
        if tuned.microseconds < math.inf:  # else nothing works, which is nothing to keep
            known = tuned.default_microseconds < math.inf
            default_us = round(tuned.default_microseconds, 3) if known else None
            times = {"us": round(tuned.microseconds, 3), "default_us": default_us}
            entries.append({**key, **plan, **times})
            _write(destination, {**header, "entries": entries})
        results.append(tuned)
        if report is not None:
            report(tuned)
    return results


def stored_plans(path: Path, architecture: int, either_dtype: bool = False) -> Callable[[Shape], Plan | None]:
    """What a tuning file says to use for a shape on this architecture; None for what it does not hold.

    `either_dtype`: a plan tuned in the other 16-bit dtype serves where there is none of the shape's own, as in the
    table that is shipped.

    Raises:
        UsageError: there is no such file, or it is not a tuning file.
    """
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))["entries"]
        plans = {tuple(int(entry[name]) for name in KEY): plan_of(entry) for entry in entries}
    except OSError as error:
        hint = "give a file that `onnxfuse tune` wrote"
        raise UsageError(f"the tuning file `{path}` cannot be read: {error.strerror}", hint=hint) from error
    except (ValueError, KeyError, TypeError, IndexError) as error:
        hint = "give a file that `onnxfuse tune` wrote"
        raise UsageError(f"`{path}` is not a tuning file: {error!r}", hint=hint) from error

    def find(shape: Shape) -> Plan | None:
        dtypes = (shape.dtype, *(DIFFERENCE_LIMIT if either_dtype else ()))
        for rows, dtype in product((shape.rows, bucket(shape.rows)), dtypes):
            key = _key(architecture, replace(shape, rows=rows, dtype=dtype))
            for other in _EPILOGUES_TO_TRY[key["epilogue"]]:  # as the library does
                plan = plans.get(tuple({**key, "epilogue": other}[name] for name in KEY))
                if plan is not None and (other == key["epilogue"] or plan.path != "vendor"):
                    return plan
        return None

    return find


def epilogue(activation: str) -> str:
    """The class of `EPILOGUES` that this activation belongs to: its products share a plan."""
    return {"none": "none", "gelu_tanh": "vendor"}.get(activation, "own")


_EPILOGUES_TO_TRY = ((0, 2, 1), (1, 2, 0), (2, 1, 0))


def plan_of(entry: dict[str, Any]) -> Plan:
    """The plan of an entry of a tuning file."""
    return Plan(**{**{name: int(entry[name]) for name in PLAN}, "path": PATHS[int(entry["path"])]})  # type: ignore[arg-type]


def _key(architecture: int, shape: Shape) -> dict[str, int]:
    return {
        "architecture": architecture, "dtype": DTYPES.index(shape.dtype), "gated": int(shape.gated),
        "norm": NORMS.index(shape.norm), "epilogue": EPILOGUES.index(epilogue(shape.activation)),
        "columns": shape.n * (2 if shape.gated else 1), "k": shape.k,
        "rows": shape.rows,
    }  # fmt: skip


def _header(variants: Sequence[Variant]) -> dict[str, Any]:
    devices = gpu.devices()
    name, driver = (devices[0].name, devices[0].driver_cuda) if devices else ("unknown", "unknown")
    # A plan names its variant by number, which means another kernel once the list has changed.
    listed = hashlib.sha256(repr([tuple(asdict(variant).values()) for variant in variants]).encode()).hexdigest()[:16]
    return {"version": 2, "library": __version__, "variants": listed, "gpu": name, "driver_cuda": driver}


def _read(path: Path, header: dict[str, Any]) -> list[dict[str, Any]]:
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    if not isinstance(stored, dict) or any(stored.get(key) != value for key, value in header.items()):
        return []  # another library, list of variants, GPU or driver: measured times do not carry over
    return [entry for entry in stored.get("entries", []) if isinstance(entry, dict)]


def _write(path: Path, content: dict[str, Any]) -> None:
    beside = path.with_name(path.name + ".part")
    beside.write_text(json.dumps(content, indent=1), encoding="utf-8")
    beside.replace(path)
