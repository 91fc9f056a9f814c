"""Optimize one model and judge the result."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from onnxfuse.bench import Subject, run_case
from onnxfuse.errors import OnnxfuseError
from onnxfuse.graph import files
from onnxfuse.inspection import bind
from onnxfuse.inspection.sizes import parse_sizes
from onnxfuse.optimizer import Result, optimize
from onnxfuse.regress.config import Expectation, holds
from onnxfuse.runtime import feeds


@dataclass(frozen=True)
class Check:
    """One thing that was checked. `status`: passed, failed or skipped."""

    name: str
    status: str
    message: str = ""
    seconds: float = 0.0


@dataclass
class ModelResult:
    """All checks of one model, and what was found (the baseline's record)."""

    name: str
    checks: list[Check] = field(default_factory=list)
    found: dict[str, Any] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        return all(c.status != "failed" for c in self.checks)

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "passed": self.passed,
            "checks": [vars(c) for c in self.checks],
            "found": self.found,
        }


def run_model(wanted: Expectation, baseline: Mapping[str, Any] | None = None) -> ModelResult:
    """Check one model against its expectations and, where those say nothing, against the baseline's record of it.

    An error (a missing file, a rule that does not load) is a failed check, so that the other models still run.
    """
    result = ModelResult(wanted.name)
    started = time.perf_counter()
    try:
        optimized = optimize(
            wanted.model, target=wanted.target, rules=wanted.rules, disable=wanted.disable, verify=wanted.verify,
            allow_unverified=True, inputs=wanted.inputs, custom_ops=wanted.custom_ops,
        )  # fmt: skip
    except OnnxfuseError as error:
        result.checks.append(Check("optimize", "failed", str(error), time.perf_counter() - started))
        return result
    result.checks.append(Check("optimize", "passed", "", time.perf_counter() - started))
    report = optimized.report
    result.found = {
        "fusions": {f["rule"]: f["count"] for f in report["fusions"]},
        "blocks": {k: n for k, n in report["blocks"].items() if isinstance(n, int)},
        "ops": report["ops_after"],
        "nodes": report["nodes"]["after"],
    }
    _count_checks(result, wanted, baseline)
    _verify_check(result, wanted, report)
    if wanted.max_ratio is not None:
        _speed_check(result, wanted, optimized)
    return result


def _count_checks(result: ModelResult, wanted: Expectation, baseline: Mapping[str, Any] | None) -> None:
    for kind in ("fusions", "blocks", "ops"):
        own: dict[str, str] = dict(getattr(wanted, kind))
        recorded = {str(k): str(n) for k, n in (baseline or {}).get(kind, {}).items()} if baseline else {}
        if not own and not recorded:
            result.checks.append(Check(kind, "skipped", "nothing expected"))
            continue
        # A baseline is complete: what it does not list must not be there. An expectation speaks of what it lists.
        conditions = {**(dict.fromkeys(result.found[kind], "0") if recorded and not own else {}), **recorded, **own}
        found = result.found[kind]
        wrong = [
            _difference(kind, name, found.get(name, 0), condition)
            for name, condition in sorted(conditions.items())
            if not holds(found.get(name, 0), condition)
        ]
        result.checks.append(Check(kind, "failed" if wrong else "passed", "; ".join(wrong)))
    condition = wanted.nodes or (str(baseline["nodes"]) if baseline and "nodes" in baseline else None)
    if condition is not None:
        found_nodes = result.found["nodes"]
        wrong_nodes = "" if holds(found_nodes, condition) else f"{found_nodes} nodes, expected {condition}"
        result.checks.append(Check("nodes", "failed" if wrong_nodes else "passed", wrong_nodes))


def _difference(kind: str, name: str, found: int, condition: str) -> str:
    number = int(condition.lstrip("<>="))
    word = "lost" if found < number and kind in ("fusions", "blocks") else "changed"
    return f"{word}: {name} {found}, expected {condition}"


def _verify_check(result: ModelResult, wanted: Expectation, report: Mapping[str, Any]) -> None:
    verify = report["verify"]
    if not wanted.verify:
        result.checks.append(Check("verify", "skipped", "switched off"))
        return
    errors = {o["name"]: o["error"] for o in verify.get("outputs", ())}
    result.found["error"] = max(errors.values(), default=0.0)
    problems = list(verify.get("problems", ()))
    problems += [f"{r['rule']} was taken back: {r['problem']}" for r in report["reverted"]]
    if verify["status"] == "unverified":
        problems.append("the result could not be verified")
    if wanted.tolerance is not None:
        problems += [f"output `{n}`: error {e:.3g}, allowed {wanted.tolerance:.3g}" for n, e in errors.items()
                     if not e <= wanted.tolerance]  # fmt: skip
    seconds = float(report["seconds"].get("verify", 0.0))
    result.checks.append(Check("verify", "failed" if problems else "passed", "; ".join(problems), seconds))


def _speed_check(result: ModelResult, wanted: Expectation, optimized: Result) -> None:
    started = time.perf_counter()
    provider = wanted.target.split(":")[0]
    try:
        base = files.read_proto(wanted.model)
        dims, shapes = parse_sizes(wanted.shapes)
        specs = feeds.input_specs(base)
        scenario = feeds.Scenario("regress", batch=1, seq=128, past=128, fixed=bind(base, shapes, dims), shapes=shapes)
        subjects = [
            Subject("ort", base, base_dir=wanted.model.resolve().parent, custom_ops=wanted.custom_ops),
            Subject("onnxfuse", optimized.model, custom_ops=wanted.custom_ops),
        ]
        case = run_case(subjects, feeds.generate(specs, scenario), provider=provider, seconds=wanted.seconds)
    except OnnxfuseError as error:
        result.checks.append(Check("speed", "failed", str(error), time.perf_counter() - started))
        return
    fused = case.subject("onnxfuse")
    if fused.ratio is None:
        message = fused.reason or case.subject("ort").reason
        result.checks.append(Check("speed", "failed", message, time.perf_counter() - started))
        return
    ratio = fused.ratio
    result.found["ratio"] = round(ratio.value, 4)
    # Worse for certain: the whole interval lies above what is allowed, so noise alone does not fail a run.
    slow = ratio.low > (wanted.max_ratio or 0.0)
    message = (
        f"{ratio.value:.3f} of the unfused time ({ratio.low:.3f} to {ratio.high:.3f}), allowed {wanted.max_ratio:g}"
    )
    result.checks.append(Check("speed", "failed" if slow else "passed", message, time.perf_counter() - started))
