"""A pytest fixture to assert in one's own test suite that models still fuse.

    def test_my_model(onnxfuse_model):
        model = onnxfuse_model("model.onnx")
        model.assert_fusions({"rms-norm": 5, "gated-linear": ">=2"})
        model.assert_equal(tolerance=1e-4)

Loaded by pytest through the entry point `pytest11`; nothing of onnxfuse is imported before the fixture is used.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import onnx

    from onnxfuse.optimizer import Result


class FusedModel:
    """A model that went through `optimize`, with assertions about it.

    Attributes:
        result: what `onnxfuse.optimize` returned.
        report: its JSON report.
    """

    def __init__(self, source: Any, result: Result, target: str, rules: tuple[str, ...]) -> None:
        self.source = source
        self.result = result
        self.report = result.report
        self._target = target
        self._rules = rules

    @property
    def model(self) -> onnx.ModelProto:
        """The fused model."""
        return self.result.model

    @property
    def fusions(self) -> dict[str, int]:
        """How often each rule applied."""
        return {f["rule"]: f["count"] for f in self.report["fusions"]}

    def assert_fusions(self, expected: Mapping[str, int | str]) -> None:
        """Fail unless each rule applied as often as said (`5`, `">=5"`). The message says why a fusion was lost."""
        wrong = self._differences(self.fusions, expected)
        if wrong:
            lines = [f"{rule} applied {found} times, expected {condition}" for rule, found, condition in wrong]
            lines += [self.why(rule) for rule, found, condition in wrong if found < int(str(condition).lstrip("<>="))]
            pytest.fail("\n".join(line for line in lines if line), pytrace=False)

    def assert_blocks(self, expected: Mapping[str, int | str]) -> None:
        """Fail unless so many blocks of each kind were found (`{"rmsnorm": 5}`)."""
        self._assert_counts("blocks", self.report["blocks"], expected)

    def assert_ops(self, expected: Mapping[str, int | str]) -> None:
        """Fail unless the fused model holds so many of each op (`{"onnxfuse::Linear": ">=8", "ai.onnx::Pow": 0}`)."""
        self._assert_counts("ops", self.report["ops_after"], expected)

    def assert_equal(self, tolerance: float | None = None) -> None:
        """Fail unless the fused model was verified, without anything taken back, within `tolerance` if given."""
        verify = self.report["verify"]
        problems = list(verify.get("problems", ()))
        problems += [f"{r['rule']} was taken back: {r['problem']}" for r in self.report["reverted"]]
        if verify["status"] not in ("passed", "structure-only"):
            problems.append(f"verification: {verify['status']}")
        for output in verify.get("outputs", ()):
            if tolerance is not None and not output["error"] <= tolerance:
                problems.append(f"output `{output['name']}`: error {output['error']:.3g}, allowed {tolerance:.3g}")
        if problems:
            pytest.fail("\n".join(problems), pytrace=False)

    def why(self, rule: str) -> str:
        """The constraint that stopped a rule where it came nearest, in one line; empty if it was not tried."""
        from onnxfuse import pipeline
        from onnxfuse.explanation import explain

        options = pipeline.Options(target=pipeline.resolve_target(self._target), rules=self._rules)
        found = explain(self.source, options, rule=rule)
        gate = found.rules[0].gate
        if gate is not None:
            return f"{rule} was not tried: needs {gate.expected}, found {gate.found}"
        misses = [m for m in found.misses if not m.taken_by]
        if not misses:
            return ""
        miss = misses[0]
        place = f"{miss.file}:{miss.reason.line} {miss.reason.check}"
        return f"{rule} at {miss.node}: {place}: expected {miss.reason.expected}, found {miss.reason.found}"

    def _assert_counts(self, kind: str, found: Mapping[str, Any], expected: Mapping[str, int | str]) -> None:
        wrong = self._differences(found, expected)
        if wrong:
            lines = [f"{kind}: {number} {name}, expected {condition}" for name, number, condition in wrong]
            pytest.fail("\n".join(lines), pytrace=False)

    @staticmethod
    def _differences(found: Mapping[str, Any], expected: Mapping[str, int | str]) -> list[tuple[str, int, int | str]]:
        from onnxfuse.regress.config import holds

        counts = {name: int(found.get(name, 0)) for name in expected}
        return [(name, counts[name], c) for name, c in expected.items() if not holds(counts[name], str(c))]


@pytest.fixture
def onnxfuse_model() -> Callable[..., FusedModel]:
    """Optimize a model: `onnxfuse_model(path_or_proto, target="cpu", rules=(), verify=True, **options)`.

    `options` go to `onnxfuse.optimize`. Nothing is written. A result that verification refuses is returned all the
    same; `assert_equal` fails then.
    """

    def make(
        model: str | os.PathLike[str] | onnx.ModelProto,
        target: str = "cpu",
        rules: Iterable[str | os.PathLike[str]] = (),
        **options: Any,
    ) -> FusedModel:
        from onnxfuse.optimizer import optimize

        paths = tuple(os.fspath(r) for r in rules)
        options.setdefault("allow_unverified", True)
        return FusedModel(model, optimize(model, target=target, rules=paths, **options), target, paths)

    return make
