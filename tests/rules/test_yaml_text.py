from __future__ import annotations

import pytest

from onnxfuse.errors import RuleError
from onnxfuse.rules import yaml_text


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-6", 1e-6),
        ("1.0e-5", 1e-5),
        (".5", 0.5),
        ("-3", -3),
        ("0", 0),
        ("no", "no"),
        ("on", "on"),
        ("yes", "yes"),
        ("true", True),
        ("false", False),
        ("'1e-6'", "1e-6"),
        ("007", "007"),
        ("...", "..."),
        ("null", None),
        ("12:30", "12:30"),
        ("0x10", "0x10"),
        ("2024-01-01", "2024-01-01"),
        ("1...", "1..."),
    ],
)
def test_scalars_are_read_as_yaml_1_2_reads_them(text: str, value: object) -> None:
    found = yaml_text.parse(f"key: [{text}]", "f")["key"][0]
    assert found == value and type(found) is type(value)


def test_a_duplicate_key_is_an_error_with_its_line() -> None:
    with pytest.raises(RuleError, match="duplicate key `a`") as caught:
        yaml_text.parse("x: 1\nb:\n  a: 1\n  a: 2\n", "rule.yaml")
    assert caught.value.where == "rule.yaml:4"


@pytest.mark.parametrize("text", ["a: [1", "a: b: c", "? [1]\n: 2", "a: 'x"])
def test_what_is_not_yaml_is_an_error_with_a_place(text: str) -> None:
    with pytest.raises(RuleError) as caught:
        yaml_text.parse(text, "rule.yaml")
    assert caught.value.where.startswith("rule.yaml")


def test_lines_of_paths() -> None:
    text = "a:\n  b: 1\n  c:\n    - {d: 1}\n    - {d: 2,\n       e: 3}\n"
    lines = yaml_text.lines(text, "f")
    assert lines["a"] == 1 and lines["a.b"] == 2 and lines["a.c[1]"] == 5 and lines["a.c[1].e"] == 6
