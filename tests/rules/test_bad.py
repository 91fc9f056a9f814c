"""Every file of rules/bad is rejected with the finding that its first line names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from onnxfuse import rules, ruletest
from onnxfuse.errors import RuleError
from onnxfuse.rewrite.vocabulary import vocabulary
from onnxfuse.rules import lint
from onnxfuse.rules.loading import load_file

BAD = Path(__file__).parents[2] / "rules" / "bad"
FILES = sorted(BAD.glob("**/*.yaml"))


def expectation(path: Path) -> tuple[int, str, str]:
    line, lint_id, message = re.fullmatch(
        r"# expect: (\d+) ([\w-]+)(?:: (.*))?", path.read_text().splitlines()[0]
    ).groups()
    return int(line), lint_id, message or ""


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(BAD)))
def test_rejected(path: Path) -> None:
    line, wanted, message = expectation(path)
    if wanted == "nothing":
        assert lint.lint([load_file(path)], vocabulary()) == []
        return
    if wanted == "alternative-not-tested":
        program = load_file(path)
        assert [f"no positive case uses {choice}" for choice in ruletest.run_rule(program).untested] == [message]
        assert program.line("nodes.y.any_of[1]") == line
        return
    others = [BAD / "same-priority-a.yaml"] if wanted == "same-priority" else []
    others += [BAD / "duplicate-id.yaml"] if wanted == "duplicate-id" else []
    try:
        found = lint.lint(rules.load([*others, path], builtin=False), vocabulary())
    except RuleError as error:
        assert message in error.message
        assert error.where.removeprefix(str(path)).lstrip(":") in (str(line), "")
        return
    assert [(d.id, d.message) for d in found] == [(wanted, message)]
    assert found[0].line == line


def test_every_lint_id_has_a_file() -> None:
    shown = {expectation(path)[1] for path in FILES}
    assert set(lint.MEANING) <= shown, f"no file in rules/bad for {sorted(set(lint.MEANING) - shown)}"


def test_a_rule_with_a_structural_fault_does_not_load() -> None:
    with pytest.raises(RuleError, match="value `bias` is not defined") as caught:
        rules.load([BAD / "undefined-value.yaml"], builtin=False)
    assert caught.value.where == f"{BAD / 'undefined-value.yaml'}:10"


def test_folders_are_searched_but_not_their_bad_examples(tmp_path: Path) -> None:
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "x.yaml").write_text("not: a rule\n")
    with pytest.raises(RuleError, match="no rule file"):
        rules.load([tmp_path], builtin=False)
