"""One comparison: some forms of a model, one set of inputs, one provider."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from onnxfuse.errors import OnnxfuseError
from onnxfuse.runtime import oracle
from onnxfuse.runtime.binding import BoundSession
from onnxfuse.runtime.profiling import NodeTime, by_op, profile
from onnxfuse.runtime.session import Runner
from onnxfuse.runtime.timing import Progress, Ratio, Samples, interleaved, ratio

#: The largest difference, relative to the largest reference value, with which a result still counts as the same.
TOLERANCE = {"float64": 1e-6, "float32": 2e-4, "float16": 2e-2, "bfloat16": 6e-2}


@dataclass(frozen=True)
class Subject:
    """One form of a model.

    Attributes:
        name: such as `ort` (the unfused model with all of ONNX Runtime's optimizations: the baseline), `ort-basic`,
            `onnxfuse`.
        proto: the model.
        level: graph optimizations of ONNX Runtime in its session.
        base_dir: folder of external data.
        custom_ops: further custom-op libraries.
    """

    name: str
    proto: onnx.ModelProto
    level: str = "all"
    base_dir: Path | None = None
    custom_ops: tuple[str, ...] = ()


@dataclass
class SubjectResult:
    """What came out for one subject.

    `status` is `ok`, `wrong` (differs from the reference by more than the tolerance; not timed) or `refused` (ONNX
    Runtime cannot load or run it; not timed). `error` is the largest difference over the largest reference value.
    """

    name: str
    status: str = "ok"
    reason: str = ""
    error: float | None = None
    samples: Samples | None = None
    ratio: Ratio | None = None
    nodes: list[NodeTime] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        result: dict[str, Any] = {"name": self.name, "status": self.status, "error": self.error}
        if self.reason:
            result["reason"] = self.reason
        if self.samples is not None:
            result.update(self.samples.to_json())
        if self.ratio is not None:
            result["ratio"] = {k: round(v, 4) for k, v in vars(self.ratio).items()}
        if self.nodes:
            result["ops"] = [vars(r) for r in by_op(self.nodes)]
            result["nodes"] = [n.to_json() for n in self.nodes]
        return result


@dataclass
class CaseResult:
    """All subjects on one set of inputs. The ratio of each is its time over the baseline's: below 1 is faster."""

    sizes: dict[str, list[int]]
    baseline: str
    subjects: list[SubjectResult]

    def subject(self, name: str) -> SubjectResult:
        return next(s for s in self.subjects if s.name == name)

    @property
    def correct(self) -> bool:
        return all(s.status == "ok" for s in self.subjects)

    def to_json(self) -> dict[str, Any]:
        return {
            "inputs": self.sizes,
            "baseline": self.baseline,
            "subjects": [s.to_json() for s in self.subjects],
        }


def run_case(
    subjects: Sequence[Subject],
    feeds: Mapping[str, np.ndarray],
    *,
    baseline: str = "ort",
    provider: str = "cpu",
    seconds: float = 3.0,
    min_rounds: int = 10,
    cuda_graph: bool = False,
    profile_runs: int = 0,
    tolerance: float | None = None,
    progress: Progress | None = None,
) -> CaseResult:
    """Check all subjects against a reference, then time those that are right, in turns.

    The reference is the first subject without ONNX Runtime's optimizations, computed in float32 when the model's
    floats are narrower.

    Args:
        subjects: the first is the unfused model.
        feeds: arrays by input name.
        baseline: the subject that ratios are relative to.
        cuda_graph: replay each subject as one CUDA graph.
        profile_runs: also run each subject so many times under ONNX Runtime's profiler (0: not).
        tolerance: overrides the dtype's.

    Raises:
        ModelError: the first subject does not run, so there is no reference.
    """
    reference = _reference(subjects[0], feeds, provider)
    results = {s.name: SubjectResult(s.name) for s in subjects}
    sessions: dict[str, Callable[[], None]] = {}
    for subject in subjects:
        result = results[subject.name]
        try:
            session = BoundSession(
                subject.proto,
                feeds,
                provider=provider,
                level=subject.level,
                base_dir=subject.base_dir,
                custom_ops=subject.custom_ops,
            )
            session.run()
            outputs = session.outputs()
            if cuda_graph:
                session = BoundSession(
                    subject.proto, feeds, provider=provider, level=subject.level, base_dir=subject.base_dir,
                    custom_ops=subject.custom_ops,
                    cuda_graph=True, outputs=outputs,
                )  # fmt: skip
                session.run()
                outputs = session.outputs()
        except OnnxfuseError as error:
            result.status, result.reason = "refused", error.message
            continue
        _judge(result, outputs, reference, tolerance)
        if result.status == "ok":
            sessions[subject.name] = session.run
    if sessions:
        timed = interleaved(sessions, seconds=seconds, min_rounds=min_rounds, progress=progress)
        for name, samples in timed.items():
            results[name].samples = samples
            if baseline in timed and name != baseline:
                results[name].ratio = ratio(timed[baseline], samples)
    sessions.clear()
    if profile_runs:
        for subject in subjects:
            if results[subject.name].status == "ok":
                results[subject.name].nodes = profile(
                    subject.proto, feeds, provider=provider, level=subject.level, base_dir=subject.base_dir,
                    custom_ops=subject.custom_ops,
                    runs=profile_runs,
                )  # fmt: skip
    sizes = {name: list(value.shape) for name, value in feeds.items()}
    return CaseResult(sizes, baseline, list(results.values()))


def _reference(subject: Subject, feeds: Mapping[str, np.ndarray], provider: str) -> dict[str, np.ndarray]:
    halves = {"float16", "bfloat16"}
    wide = any(
        onnx.helper.tensor_dtype_to_np_dtype(t.data_type).name in halves for t in subject.proto.graph.initializer
    )
    if wide or any(v.dtype.name in halves for v in feeds.values()):
        runner = oracle.runner(
            subject.proto, "float32", provider, base_dir=subject.base_dir, custom_ops=subject.custom_ops, exact=False
        )
        return runner.run(oracle.cast_feeds(feeds, "float32"))
    runner = Runner(
        subject.proto, provider, level="none", base_dir=subject.base_dir, custom_ops=subject.custom_ops, exact=False
    )
    return runner.run(feeds)


def _judge(
    result: SubjectResult, outputs: Mapping[str, np.ndarray], reference: Mapping[str, np.ndarray], given: float | None
) -> None:
    worst = 0.0
    for name, expected in reference.items():
        if name not in outputs:
            result.status, result.reason = "wrong", f"output `{name}` is missing"
            return
        found = outputs[name]
        if found.shape != expected.shape:
            result.status = "wrong"
            result.reason = f"output `{name}` has shape {list(found.shape)}, not {list(expected.shape)}"
            return
        limit = given if given is not None else TOLERANCE.get(found.dtype.name, 0.0)
        error = difference(found, expected)
        worst = max(worst, error)
        if not error <= limit:
            result.status = "wrong"
            result.reason = f"output `{name}` differs by {error:.3g} of the largest value, more than {limit:.3g}"
    result.error = worst


def difference(found: np.ndarray, expected: np.ndarray) -> float:
    """The largest difference over the largest reference value; inf where NaN or infinities do not agree."""
    if found.size == 0:
        return 0.0
    if expected.dtype.kind in "biuO":
        return 0.0 if np.array_equal(found, expected) else float("inf")
    a, b = found.astype(np.float64), expected.astype(np.float64)
    finite = np.isfinite(b)
    if not np.array_equal(np.where(finite, 0, b), np.where(np.isfinite(a), 0, a), equal_nan=True):
        return float("inf")
    if not finite.any():
        return 0.0
    scale = float(np.abs(b[finite]).max()) or 1.0
    return float(np.abs(a[finite] - b[finite]).max()) / scale
