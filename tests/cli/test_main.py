"""The group: help, unknown commands, errors as text and JSON, module entry."""

from __future__ import annotations

import subprocess
import sys

import pytest

from onnxfuse.cli import main as module
from onnxfuse.errors import OnnxfuseError


def test_help_lists_every_command_without_loading_onnx() -> None:
    code = "import sys; sys.argv = ['onnxfuse', '--help']\ntry:\n import onnxfuse.cli.main as m; m.main()\n" \
           "except SystemExit: print('onnx' in sys.modules, 'onnxruntime' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip().endswith("False False")
    assert all(name in done.stdout for name in module.COMMANDS)


@pytest.mark.parametrize("name", list(module.COMMANDS))
def test_every_command_has_help_with_an_example(cli, name: str) -> None:
    outcome = cli(name, "--help")
    assert outcome.code == 0
    assert "onnxfuse " + name in outcome.out and "Example" in outcome.out


def test_did_you_mean(cli) -> None:
    outcome = cli("optimise", "x")
    assert outcome.code == 2 and "did you mean `optimize`" in outcome.err and outcome.out == ""
    assert cli("optimize", "x", "--disabel", "y").code == 2


def test_both_spellings_of_options_work(cli, tiny, tmp_path) -> None:
    outcome = cli("optimize", tiny, "--dry_run", "--no_verify", "--target", "cpu")
    assert outcome.code == 0, outcome.err


def test_json_errors(cli, tmp_path) -> None:
    outcome = cli("optimize", tmp_path / "missing.onnx", "--json")
    assert outcome.code == 2
    assert outcome.data["error"]["id"] == "bad-model"
    assert "error[bad-model]: no such file" in outcome.err and "hint: " in outcome.err


def test_no_colour_when_not_a_terminal(cli, tmp_path) -> None:
    assert "\x1b" not in cli("optimize", tmp_path / "missing.onnx").err


def test_a_defect_is_one_line(cli, monkeypatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("boom")

    monkeypatch.setattr("onnxfuse.cli.doctor.collect", broken)
    outcome = cli("doctor")
    assert outcome.code == 2 and "internal error: RuntimeError: boom" in outcome.err
    assert "Traceback" not in outcome.err
    monkeypatch.setenv("ONNXFUSE_TRACEBACK", "1")
    with pytest.raises(RuntimeError):
        module.main(["doctor"])


def test_interrupts(cli, monkeypatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("onnxfuse.cli.doctor.collect", interrupted)
    outcome = cli("doctor")
    assert outcome.code == 130 and "nothing was written" in outcome.err


def test_module_entry() -> None:
    done = subprocess.run([sys.executable, "-m", "onnxfuse", "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("Usage: onnxfuse")


def test_every_error_class_has_its_own_id() -> None:
    def tree(kind: type[OnnxfuseError]) -> list[type[OnnxfuseError]]:
        return [kind, *(c for sub in kind.__subclasses__() for c in tree(sub))]

    classes = tree(OnnxfuseError)
    assert len({c.id for c in classes}) == len(classes)
    assert {c.exit_code for c in classes} <= {1, 2}
