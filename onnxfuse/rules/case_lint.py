"""Static checks of a rule's inline cases."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from onnxfuse.errors import RuleError
from onnxfuse.rules import spec
from onnxfuse.rules.findings import Findings, distinct
from onnxfuse.rules.patterns import ChainPattern, parts
from onnxfuse.rules.program import Program


def guards(program: Program) -> Iterator[str]:
    """The ids of checks that a `no_match` case should exercise. Privacy counts as one."""
    rule = program.spec
    for name, limit in rule.captures.items():
        for key in sorted(limit.model_fields_set):
            yield f"captures.{name}.{key}"
    for name, bound in rule.dims.items():
        for key in sorted(bound.model_fields_set):
            yield f"dims.{name}.{key}"
    for index in range(len(rule.where)):
        yield f"where[{index}]"
    seen: list[object] = []
    for provider, target in (rule.targets or {}).items():
        for key in sorted(target.model_fields_set):
            # One case is enough for a limit that several providers share.
            if (setting := (key, getattr(target, key))) not in seen:
                seen.append(setting)
                yield f"targets.{provider}.{key}"
    for name in rule.shared:
        if rule.shared[name] != "any":
            yield f"private.{name}"
    interior = set(program.makers) - set(rule.outputs) - set(rule.shared)
    if interior or any(
        isinstance(p, ChainPattern) and len(p.operands) > 2 for pat in distinct(program) for p in parts(pat)
    ):
        yield "private"


def case_findings(program: Program, out: Findings) -> None:
    """Guards without a near miss, and edits that do not fit."""
    try:
        tests = program.source.tests()
    except RuleError as error:
        out.add("guard-not-tested", "tests", error.message)
        return
    reasons = [case.because for case in tests.no_match]
    for guard in guards(program):
        if not any(reason == guard or reason.startswith((f"{guard}.", f"{guard}[")) for reason in reasons):
            path = "outputs" if guard == "private" else guard.replace("private.", "shared.")
            out.add("guard-not-tested", path, f"no `no_match` case has `because: {guard}`")
    _edits(program, tests, out)


def _edits(program: Program, tests: spec.Tests, out: Findings) -> None:
    texts: dict[str, str] = {}
    kinds: list[tuple[str, Sequence[spec.MatchCase | spec.NoMatchCase]]] = [
        ("match", tests.match),
        ("no_match", tests.no_match),
    ]
    for kind, items in kinds:
        for index, case in enumerate(items):
            path = f"tests.{kind}[{index}]"
            text = getattr(case, "graph", None) or texts.get(case.from_ or "")
            if text is None:
                out.undefined("undefined-value", path, str(case.from_), texts, "case")
                continue
            for old, new in case.replace.items():
                if text.count(old) != 1:
                    out.add(
                        "replace-not-once", path, f"the text `{old}` occurs {text.count(old)} times in `{case.from_}`"
                    )
                text = text.replace(old, new)
            if isinstance(case, spec.MatchCase):
                texts[case.name] = text
