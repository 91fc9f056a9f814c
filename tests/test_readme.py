"""The README's commands run, in order, and do what the text around them says."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import onnx
import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a newcomer has: the checkout's models and the environment of this process."""
    path = tmp_path_factory.mktemp("readme")
    shutil.copytree(ROOT / "models", path / "models", ignore=shutil.ignore_patterns("*.npz"))
    return path


@pytest.fixture(scope="module")
def environment(folder: Path) -> dict[str, str]:
    tools = folder / "bin"
    tools.mkdir()
    for name, module in (("onnxfuse", "-m onnxfuse"), ("python", "")):
        tool = tools / name
        tool.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {module} "$@"\n')
        tool.chmod(0o755)
    return {**os.environ, "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}


def run(command: str, folder: Path, environment: dict[str, str]) -> str:
    done = subprocess.run(["bash", "-ec", command], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


def commands() -> list[str]:
    lines = [line.split(" # ")[0].strip() for block in blocks("bash") for line in block.strip().splitlines()]
    # Setting up an environment takes minutes and is .ci/run's own first step; here only what comes after it.
    lines = [re.sub(r"^python3 -m venv .*?&& \.venv/bin/onnxfuse", "onnxfuse", line) for line in lines]
    return [line for line in lines if line.startswith("onnxfuse ")]


def test_the_two_commands_are_there() -> None:
    first, second = (block.strip() for block in blocks("bash")[:2])
    assert "\n" not in first and "pip install" in first and "onnxfuse optimize models/llama" in first
    assert second == "bash .ci/run"
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


def test_commands_run_in_order(folder: Path, environment: dict[str, str]) -> None:
    given = commands()
    assert len(given) >= 7
    outputs = {command: run(command, folder, environment) for command in given}
    assert "verified on" in outputs[given[0]]
    for name in ("llama.fused.onnx", "bert.fused.onnx", "bert.plain.onnx", "report.json"):
        assert (folder / name).is_file()
    plain = onnx.load(folder / "bert.plain.onnx")
    assert not any("onnxfuse" in o.domain for o in plain.opset_import)


def test_python_blocks_run(folder: Path, environment: dict[str, str]) -> None:
    code = "\n".join(blocks("python"))
    (folder / "readme.py").write_text(code)
    assert "rmsnorm" in run("python readme.py", folder, environment) or (folder / "vit.fused.onnx").is_file()


def test_every_file_that_the_readme_names_is_there() -> None:
    for target in re.findall(r"(?:src=\"|\]\()([^)\"#\s]+)", README):
        if not re.match(r"[a-z]+:", target):
            assert (ROOT / target).exists(), target
