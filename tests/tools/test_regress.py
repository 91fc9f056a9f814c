"""regress: what it catches, what it writes, and what it refuses to read."""

from __future__ import annotations

import json
import shutil
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from onnxfuse import regress
from onnxfuse.cli import main
from onnxfuse.errors import UsageError
from onnxfuse.regress import Check, ModelResult, outputs
from onnxfuse.regress.config import KEYS, holds

MODELS = Path(__file__).parents[2] / "models"
LLAMA = "llama-ts17-f16-eager.onnx"


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as stop:
        main.main(list(arguments))
    return int(stop.value.code or 0), capsys.readouterr().out


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copy(MODELS / LLAMA, tmp_path / "llama.onnx")
    return tmp_path


def configure(folder: Path, *lines: str, model: str = "llama.onnx") -> Path:
    path = folder / "regress.yaml"
    path.write_text(
        "\n".join(["schema: 1", "baseline: baseline.json", "models:", f"  - model: {model}", *lines]) + "\n"
    )
    return path


def test_the_baseline_holds_until_something_changes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = configure(folder)
    assert run(capsys, "regress", str(config), "--update")[0] == 0
    recorded = json.loads((folder / "baseline.json").read_text())["models"]["llama"]
    assert recorded["fusions"]["rms-norm"] == 5 and recorded["ops"]
    assert run(capsys, "regress", str(config))[0] == 0

    # A rule disabled: the fusion is lost.
    junit, summary = folder / "results.xml", folder / "summary.md"
    config = configure(folder, "    disable: [rms-norm]")
    code, out = run(capsys, "regress", str(config), "--junit", str(junit), "--markdown", str(summary))
    assert code == 1 and "lost: rms-norm 0, expected 5" in out
    root = ET.parse(junit).getroot()
    suite = root.find("testsuite")
    assert suite is not None and suite.get("name") == "llama" and int(suite.get("failures", "0")) >= 1
    failed = {c.get("name") for c in suite.iter("testcase") if c.find("failure") is not None}
    assert "fusions" in failed and "verify" not in failed
    text = summary.read_text()
    assert "0 of 1 models as expected" in text and "| llama |" in text and "lost: rms-norm" in text

    # An op count changed.
    recorded["ops"]["ai.onnx::MatMul"] += 1
    (folder / "baseline.json").write_text(json.dumps({"schema": 1, "models": {"llama": recorded}}))
    code, out = run(capsys, "regress", str(configure(folder)), "--json")
    checks = {c["name"]: c for c in json.loads(out)["models"][0]["checks"]}
    assert code == 1 and checks["ops"]["status"] == "failed" and "changed: ai.onnx::MatMul" in checks["ops"]["message"]
    assert checks["fusions"]["status"] == "passed"


def test_a_broken_tolerance(folder: Path) -> None:
    config = regress.load(configure(folder, "    tolerance: 1e-12"))
    result = regress.run_model(config.models[0])
    (check,) = [c for c in result.checks if c.name == "verify"]
    assert check.status == "failed" and "output `logits`: error" in check.message


def test_expected_counts_and_speed(folder: Path) -> None:
    lines = ['    fusions: {rms-norm: 5, silu: ">=1"}', "    blocks: {rmsnorm: 6}", "    verify: false"]
    lines += ["    max_ratio: 1e-6", "    shapes: batch=1,seq=8", "    seconds: 0.05"]
    result = regress.run_model(regress.load(configure(folder, *lines)).models[0])
    states = {c.name: (c.status, c.message) for c in result.checks}
    assert states["fusions"][0] == "passed" and states["verify"][0] == "skipped"
    assert states["blocks"] == ("failed", "lost: rmsnorm 5, expected 6")
    assert states["speed"][0] == "failed" and "allowed 1e-06" in states["speed"][1]
    assert result.found["ratio"] > 0


def test_a_missing_model_is_one_failed_check(folder: Path) -> None:
    result = regress.run_model(regress.load(configure(folder, model="nowhere.onnx")).models[0])
    assert [(c.name, c.status) for c in result.checks] == [("optimize", "failed")]
    assert "nowhere.onnx" in result.checks[0].message


@pytest.mark.parametrize(
    ("lines", "message", "hint"),
    [
        (["    fusoins: {a: 1}"], "unknown key `fusoins`", "did you mean `fusions`?"),
        (["    tolerance: -1"], "`tolerance` is `-1`: must be a number above 0", None),
        (["    tolerance: 1e-3x"], "must be a number", None),
        (["    fusions: [a]"], "must be a mapping", None),
        (["    fusions: {a: many}"], "must be a number, or a condition", None),
        (["  - model: llama.onnx"], "two models are called `llama`", "give one a `name`"),
    ],
)
def test_what_is_wrong_in_a_configuration(folder: Path, lines: list[str], message: str, hint: str | None) -> None:
    with pytest.raises(UsageError, match=message) as error:
        regress.load(configure(folder, *lines))
    assert error.value.where == f"{folder / 'regress.yaml'}:5"
    if hint:
        assert error.value.hint == hint


def test_update_needs_a_place(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder / "plain.yaml"
    path.write_text("schema: 1\nmodels:\n  - model: llama.onnx\n")
    assert run(capsys, "regress", str(path), "--update")[0] == 2
    assert run(capsys, "regress", str(path), "--model", "other")[0] == 2


def test_paths_are_relative_to_the_configuration(folder: Path) -> None:
    model = regress.load(configure(folder, "    rules: [my_rules]", "    inputs: in.npz")).models[0]
    assert model.model == folder / "llama.onnx" and model.inputs == folder / "in.npz"
    assert model.rules == (str(folder / "my_rules"),)


def test_conditions() -> None:
    assert holds(5, "5") and not holds(4, "5") and holds(6, ">=5") and holds(0, "<1") and not holds(2, "<=1")


def test_junit_escapes_and_drops_what_xml_cannot_hold() -> None:
    result = ModelResult("a<b>&\x00", [Check("ops", "failed", "x < \x0b y\nmore"), Check("verify", "skipped", "off")])
    root = ET.fromstring(outputs.junit([result]).split("\n", 1)[1])
    assert root.get("tests") == "2" and root.get("failures") == "1"
    failure = root.find("testsuite/testcase/failure")
    assert failure is not None and failure.get("message") == "x < \ufffd y"


def test_every_key_is_described() -> None:
    fields = set(regress.Expectation.__dataclass_fields__)
    assert fields == set(KEYS)


def test_every_key_is_documented() -> None:
    page = (Path(__file__).parents[2] / "docs" / "guides" / "ci.md").read_text()
    assert [key for key in KEYS if f"`{key}`" not in page] == []
