from __future__ import annotations

import json
from pathlib import Path

import pytest

from onnxfuse import rules
from onnxfuse.errors import RuleError
from onnxfuse.rewrite import reference
from onnxfuse.rules import spec, yaml_text
from onnxfuse.rules.loading import builtin_folder, load_file, nearest_line, parse

RULE = (builtin_folder() / "fuse" / "linear-bias.yaml").read_text()


def test_the_builtin_rules_load_and_are_sorted_by_id() -> None:
    found = rules.load()
    assert list(found.programs) == sorted(found.programs)
    assert {p.stage for p in found} >= {"lift", "fuse"}


def test_an_unknown_rule_gets_a_suggestion() -> None:
    with pytest.raises(RuleError) as caught:
        rules.load().get("linear-bais")
    assert caught.value.message == "no rule `linear-bais`" and caught.value.hint == "did you mean `linear-bias`?"


def test_a_user_rule_may_not_take_a_builtin_id(tmp_path: Path) -> None:
    (tmp_path / "linear-bias.yaml").write_text(RULE)
    with pytest.raises(RuleError, match="two rules are called `linear-bias`"):
        rules.load([tmp_path])


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "linear-bias.yaml"
    path.write_text(RULE)
    first = load_file(path)
    assert load_file(path) is first
    path.write_text(RULE.replace("addition of a constant bias", "addition of a bias"))
    assert load_file(path).spec.summary.endswith("addition of a bias")


@pytest.mark.parametrize(
    ("old", "new", "message", "line", "hint"),
    [
        ("outputs:", "output:", "unknown key `output`", "output:", "did you mean `outputs`?"),
        ("stage: fuse", "stage: melt", "`stage` is `melt`", "stage:", None),
        ("op: Add, in: [lin, b]", "op: add, in: [lin, b]", "`nodes.y.op` is `add`", "op: add", None),
        ("same_shape: lin", "same_sape: lin", "unknown key `same_sape`", "same_sape", "did you mean `same_shape`?"),
        (
            "shape: [1..., N]",
            "shape: [1.., N]",
            "`inputs.b.shape[0]` is `1..`: expected a size, a dim",
            "[1.., N]",
            None,
        ),
        ("in: [lin, b]", "in: [lin, B]", "`nodes.y.in[1]` is `B`: expected an operand", "in: [lin, B]", None),
    ],
)
def test_a_malformed_rule_names_key_line_and_remedy(
    old: str, new: str, message: str, line: str, hint: str | None
) -> None:
    text = RULE.replace(old, new, 1)
    with pytest.raises(RuleError) as caught:
        parse(text, Path("r.yaml"))
    assert message in caught.value.message
    number = next(i for i, content in enumerate(text.splitlines(), 1) if line in content)
    assert caught.value.where == f"r.yaml:{number}"
    if hint:
        assert caught.value.hint == hint


def test_tests_are_only_parsed_when_asked_for() -> None:
    program = parse(RULE.split("tests:")[0] + "tests: {match: 3}\n", Path("linear-bias.yaml"))
    with pytest.raises(RuleError, match="tests"):
        program.source.tests()


def test_tests_need_not_come_last() -> None:
    head, tests = RULE.split("tests:\n")
    program = parse("tests:\n" + tests + head, Path("linear-bias.yaml"))
    assert program.source.tests().match[0].name == "last"


def test_a_rule_without_tests_is_refused() -> None:
    with pytest.raises(RuleError, match="no `tests`"):
        parse(RULE.split("tests:")[0], Path("linear-bias.yaml"))


def test_lines_of_checks_fall_back_to_the_key_above() -> None:
    program = parse(RULE, Path("linear-bias.yaml"))
    expected = next(i for i, content in enumerate(RULE.splitlines(), 1) if content.startswith("  lin:"))
    assert program.line("nodes.lin.attrs.activation") == expected
    assert program.line("nodes.lin.attrs.nothing.of.it") == expected
    assert nearest_line({}, "a.b") is None


def test_generated_files_are_up_to_date() -> None:
    assert not reference.stale(), "run `python -m onnxfuse.rewrite.reference`"


def test_the_builtin_rules_satisfy_the_committed_schema() -> None:
    schema = json.loads((builtin_folder() / "rule.schema.json").read_text())
    assert set(schema["required"]) == {"schema", "id", "stage", "summary", "nodes", "outputs", "rewrite", "tests"}
    for program in rules.load():
        assert spec.RuleFile.model_validate(yaml_text.parse(program.source.text, "rule")).id == program.id
