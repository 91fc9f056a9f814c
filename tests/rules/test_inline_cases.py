"""Every inline case of every built-in rule, and the lint of all of them."""

from __future__ import annotations

import pytest

from onnxfuse import rules, ruletest
from onnxfuse.rewrite.vocabulary import vocabulary
from onnxfuse.rules import lint

CASES = [case for program in rules.load() for case in ruletest.cases(program)]


@pytest.mark.parametrize("case", CASES, ids=[case.id for case in CASES])
def test_case(case: ruletest.Case) -> None:
    result = ruletest.run_case(case)
    assert result.passed, f"{case.program.file}:{case.line}: {result.outcome}: {result.message}"


@pytest.mark.parametrize("program", list(rules.load()), ids=lambda p: p.id)
def test_every_alternative_is_used_by_a_case(program: object) -> None:
    report = ruletest.run_rule(program)
    assert not report.untested, f"{program.file}: no positive case uses {', '.join(report.untested)}"


def test_lint() -> None:
    found = lint.lint(rules.load(), vocabulary())
    assert not found, "\n".join(map(str, found))
