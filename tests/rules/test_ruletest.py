"""The harness tells the outcomes apart, above all a rewrite that is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from onnxfuse import ruletest
from onnxfuse.errors import RuleError
from onnxfuse.rules.loading import builtin_folder, parse
from onnxfuse.ruletest import Outcome, cases, run_case, run_rule

RULE = (builtin_folder() / "fuse" / "linear-bias.yaml").read_text()
HEAD = RULE.split("tests:\n")[0]
VISIBLE = '  no_match:\n    - {from: last, replace: {"=> (y)": "=> (y, h)"}, because: '
CASES = """tests:
  match:
    - name: last
      graph: |
        g (float[B,S,16] x) => (y) <float[24,16] w, float[24] b>
        {
          h = onnxfuse.Linear (x, w)
          y = Add (b, h)
        }
      expect: {op: Linear, nodes: 1}
"""


def program(text: str):
    return parse(text, Path("linear-bias.yaml"))


def outcome(tests: str, head: str = HEAD) -> ruletest.Result:
    return run_case(cases(program(head + CASES + tests))[-1])


@pytest.mark.parametrize(
    ("tests", "wanted", "message"),
    [
        ("", Outcome.MATCHED, ""),
        ("    - {name: half, from: last, as: float16}\n", Outcome.MATCHED, ""),
        ("    - {name: brain, from: last, as: bfloat16}\n", Outcome.MATCHED, ""),
        (
            '    - {name: sub, from: last, replace: {"y = Add": "y = Sub"}}\n',
            Outcome.MISSING,
            "nodes: expected Add, found none in the graph",
        ),
        (
            '    - {name: act, from: last, replace: {"Linear (": "Linear <activation=\\"relu\\"> ("}}\n',
            Outcome.MISSING,
            "nodes.lin.attrs.activation",
        ),
        ("    - {name: many, from: last, expect: {count: 2}}\n", Outcome.WRONG_RESULT, "applied 1 times, not 2"),
        ("    - {name: op, from: last, expect: {op: Gemm}}\n", Outcome.WRONG_RESULT, "no Gemm was made, but Linear"),
        ("    - {name: nodes, from: last, expect: {nodes: 2}}\n", Outcome.WRONG_RESULT, "1 nodes (Linear), not 2"),
        ("    - {name: ops, from: last, expect: {ops: {Add: 1}}}\n", Outcome.WRONG_RESULT, "0 Add, not 1"),
        (
            "    - {name: attr, from: last, expect: {attrs: {norm: rms}}}\n",
            Outcome.WRONG_RESULT,
            "norm is none, not rms",
        ),
        (
            '    - {name: text, from: last, replace: {"y = Add (b, h)": "y = Add (b"}}\n',
            Outcome.BROKEN,
            "not ONNX text",
        ),
        (
            '    - {name: graph, from: last, replace: {"y = Add (b, h)": "y = Ad (b, h)"}}\n',
            Outcome.BROKEN,
            "No Op registered",
        ),
        (f"{VISIBLE}private.lin}}\n", Outcome.REJECTED, ""),
        (f"{VISIBLE}private}}\n", Outcome.REJECTED, ""),
        (f"{VISIBLE}priv}}\n", Outcome.WRONG_REASON, "private.lin"),
        (f"{VISIBLE}nodes}}\n", Outcome.WRONG_REASON, "private.lin"),
        ("  no_match:\n    - {from: last, because: private}\n", Outcome.NOISY, "applied 1 times"),
    ],
)
def test_outcomes(tests: str, wanted: Outcome, message: str) -> None:
    result = outcome(tests)
    assert result.outcome is wanted, result.message
    assert message in result.message


@pytest.mark.parametrize(
    "wrong",
    [
        "{fn: scale, of: [b], value: 1.1}",
        "{fn: negate, of: [b]}",
        "{fn: full, shape: [N], value: 0}",
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_rewrite_that_computes_something_else_is_found(wrong: str, dtype: str) -> None:
    head = HEAD.replace("{fn: flatten, of: [b]}", wrong)
    assert head != HEAD
    result = outcome(f"    - {{name: again, from: last, as: {dtype}}}\n", head)
    assert result.outcome is Outcome.INACCURATE, result.message
    assert result.message.startswith("output `y`: error")


def test_edits_must_fit_once() -> None:
    with pytest.raises(RuleError, match="occurs not in case `last`"):
        cases(program(HEAD + CASES + '    - {name: a, from: last, replace: {"nothing": "x"}}\n'))
    with pytest.raises(RuleError, match="occurs 2 times"):
        cases(program(HEAD + CASES + '    - {name: a, from: last, replace: {"24": "x"}}\n'))
    with pytest.raises(RuleError, match="names no earlier case: `lost`"):
        cases(program(HEAD + CASES + "    - {name: a, from: lost}\n"))


def test_alternatives_that_no_case_uses_are_reported() -> None:
    head = HEAD.replace(
        "y:   {op: Add, in: [lin, b], same_shape: lin}",
        "y:\n    any_of:\n      - {op: Add, in: [lin, b]}\n      - {op: Sum, in: [lin, b]}",
    )
    assert head != HEAD
    report = run_rule(program(head + CASES))
    assert report.untested == ["nodes.y.any_of[1]"] and not report.passed and all(r.passed for r in report.results)
    report = run_rule(program(head + CASES + '    - {name: sum, from: last, replace: {"y = Add": "y = Sum"}}\n'))
    assert report.passed
