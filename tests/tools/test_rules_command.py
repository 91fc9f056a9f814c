"""rules list, show, lint, test, new, schema; drawing and mutation."""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import pytest

from onnxfuse import rules
from onnxfuse.cli import main
from onnxfuse.errors import UsageError
from onnxfuse.rules.drawing import draw
from onnxfuse.rules.loading import load_file
from onnxfuse.ruletest import run_rule
from onnxfuse.ruletest.mutate import mutants, mutate_rule
from onnxfuse.skeleton import skeleton

MODELS = Path(__file__).parents[2] / "models"
VIT, LLAMA = MODELS / "vit-dyn18-f32-sdpa.onnx", MODELS / "llama-ts17-f16-eager.onnx"

LAX = """
schema: 1
id: lax-relu
stage: lift
summary: Max with any number taken for Relu
inputs:
  x: {dtype: T}
nodes:
  y: {op: Max, in: [x, $bound]}
outputs: [y]
rewrite:
  node: {op: Relu, in: [x], out: [y]}
tests:
  match:
    - name: zero
      graph: |
        g (float[B,8] x) => (y) <float bound = {0}>
        {
          y = Max (x, bound)
        }
"""


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as stop:
        main.main(list(arguments))
    return int(stop.value.code or 0), capsys.readouterr().out


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    code, out = run(capsys, "rules", "list", "--json")
    found = json.loads(out)["rules"]
    assert code == 0 and {r["stage"] for r in found} >= {"lift", "fuse"}
    assert [r["id"] for r in found] == [
        r["id"] for r in sorted(found, key=lambda r: ("lift fuse lower".index(r["stage"]), r["id"]))
    ]
    code, out = run(capsys, "rules", "list", "--stage", "fuse")
    assert "linear-bias" in out and "gelu-erf" not in out


def test_show(capsys: pytest.CaptureFixture[str]) -> None:
    code, out = run(capsys, "rules", "show", "rms-norm")
    assert code == 0
    assert "mean    = ReduceMean(square, ..., axes=[-1], keepdims=1)" in out
    assert "narrow  = Cast(unit, to=T), or absent" in out
    assert "$eps is from 0 to 0.1" in out and "y = std.RMSNormalization(x, flat, epsilon=$eps)" in out
    code, out = run(capsys, "rules", "show", "rms-nrom", "--json")
    assert code == 2 and json.loads(out)["error"]["hint"] == "did you mean `rms-norm`?"


def test_every_rule_can_be_drawn() -> None:
    for program in rules.load():
        text = draw(program)
        assert text.splitlines()[0].split()[0] in [*program.outputs, *program.spec.nodes]
        assert "becomes" in text


def test_schema_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    code, out = run(capsys, "rules", "schema")
    assert code == 0 and "nodes" in json.loads(out)["properties"]


def test_mutants_of_a_strict_rule_are_rejected() -> None:
    report = mutate_rule(rules.load().get("silu"))
    assert report.passed and report.rejected >= 20


def test_a_rule_that_checks_too_little_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "lax-relu.yaml").write_text(LAX)
    report = mutate_rule(load_file(tmp_path / "lax-relu.yaml"))
    assert [what for _, what, _ in report.survivors] == ["the constant `bound` is [0.25]"]
    code, out = run(capsys, "rules", "test", "lax-relu", "--rules", str(tmp_path), "--mutate", "--json")
    (entry,) = json.loads(out)["rules"]
    assert code == 1 and not entry["passed"] and entry["cases"][0]["passed"]
    assert run(capsys, "rules", "test", "lax-relu", "--rules", str(tmp_path))[0] == 0


def test_mutants_change_one_thing() -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 17]> g (float[n,8] x) => (float[n,8] y) <float two = {2}>
        { a = Pow (x, two)  b = ReduceMean <axes=[-1], keepdims=1> (a)  y = Div (x, b) }"""
    )
    found = [m.what for m in mutants(model)]
    assert found == [
        "Pow `a` is Mul", "Pow `a` has its operands swapped", "`a` is an output of the graph",
        "ReduceMean `b` is ReduceMax", "ReduceMean `b` has axes = [0]", "ReduceMean `b` has keepdims = 0",
        "`b` is an output of the graph", "Div `y` is Mul", "Div `y` has its operands swapped",
        "the constant `two` is [3.25]",
    ]  # fmt: skip


def test_lint_reports_a_file_and_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "lax-relu.yaml").write_text(LAX.replace("nodes:", "  unread: {dtype: T}\nnodes:"))
    code, out = run(capsys, "rules", "lint", "lax-relu", "--rules", str(tmp_path), "--json")
    findings = json.loads(out)["findings"]
    assert code == 1 and [(f["id"], f["rule"]) for f in findings] == [("unused-input", "lax-relu")]
    assert all(f["line"] and f["file"].endswith("lax-relu.yaml") for f in findings)


@pytest.mark.parametrize(
    ("model", "output", "inputs", "new_op"),
    [
        (VIT, "gelu", ["linear_4"], "Gelu"),
        (
            LLAMA,
            "/m/model/layers.0/input_layernorm/Mul_1_output_0",
            ["/m/model/embed_tokens/Gather_output_0"],
            "RMSNormalization",
        ),
    ],
)
def test_a_skeleton_works_once_its_rewrite_is_named(
    model: Path, output: str, inputs: list[str], new_op: str, tmp_path: Path
) -> None:
    text = skeleton(model, output, inputs, rule_id="draft")
    path = tmp_path / "draft.yaml"
    path.write_text(text)
    assert run_rule(load_file(path)).passed, "as printed"
    path.write_text(
        text.replace("op: TodoOp, domain: my.domain", f"op: {new_op}, domain: std").replace(
            "numeric: false", "numeric: true"
        )
    )
    report = run_rule(load_file(path))
    assert report.passed, [r.message for r in report.results]


def test_a_skeleton_of_an_open_cut_is_refused() -> None:
    with pytest.raises(UsageError, match=r"nodes lie above|graph input"):
        skeleton(VIT, "gelu", ["layer_norm"])
    with pytest.raises(UsageError, match="no value `gleu`") as error:
        skeleton(VIT, "gleu", ["linear_4"])
    assert error.value.hint == "did you mean `gelu`?"


def test_new_writes_no_existing_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["rules", "new", "--from", str(VIT), "--output", "gelu", "--inputs", "linear_4"]
    path = tmp_path / "my-rule.yaml"
    assert run(capsys, *arguments, "-o", str(path))[0] == 0
    assert path.read_text().startswith("# yaml-language-server")
    assert run(capsys, *arguments, "-o", str(path))[0] == 2
