"""The documentation says what the code does: options, errors, exit codes, report keys, links."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import click
import pytest

import onnxfuse
from onnxfuse import errors
from onnxfuse.cli.main import COMMANDS, cli

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.rglob("*.md"), *ROOT.glob("*.md"), *ROOT.glob("models/*.md"), *ROOT.glob("custom_ops/*.md")])


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("cli_reference", DOCS / "cli_reference.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_command_reference_is_current() -> None:
    module = script()
    assert module.OUT.read_text() == module.text(), "run `python docs/cli_reference.py`"


@pytest.mark.parametrize("name", list(COMMANDS))
def test_every_option_is_explained(name: str) -> None:
    def options(command: click.Command) -> list[click.Option]:
        found = [p for p in command.params if isinstance(p, click.Option)]
        if isinstance(command, click.Group):
            context = click.Context(command)
            for inner in command.list_commands(context):
                found += options(command.get_command(context, inner))  # type: ignore[arg-type]
        return found

    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    page = (DOCS / "reference" / "cli.md").read_text()
    for option in options(command):
        assert option.help, f"{name} {option.opts}"
        assert option.opts[-1] in page


def error_classes() -> list[type[errors.OnnxfuseError]]:
    def tree(kind: type[errors.OnnxfuseError]) -> list[type[errors.OnnxfuseError]]:
        return [kind, *(c for sub in kind.__subclasses__() for c in tree(sub))]

    return [c for c in tree(errors.OnnxfuseError) if c.__module__ == "onnxfuse.errors"]


def test_every_error_is_in_the_table() -> None:
    rows = dict(re.findall(r"^\| `([\w-]+)` \| (\d) \|", (DOCS / "reference" / "errors.md").read_text(), re.MULTILINE))
    assert rows == {c.id: str(c.exit_code) for c in error_classes()}


def test_every_exit_code_is_in_the_table() -> None:
    text = (DOCS / "reference" / "errors.md").read_text().split("## Exit codes")[1]
    codes = {int(c) for c in re.findall(r"^\| (\d+) \|", text, re.MULTILINE)}
    assert codes == {errors.EXIT_OK, errors.EXIT_FINDINGS, errors.EXIT_USAGE, 130}


def test_every_report_key_is_described() -> None:
    result = onnxfuse.optimize(ROOT / "models" / "vit-dyn18-f32-sdpa.onnx", target="cpu", verify_sets=1)
    page = (DOCS / "reference" / "report.md").read_text()
    keys = [*result.report, *result.report["verify"], *result.report["nodes"], *result.report["bytes"],
            *result.report["options"], *result.report["seconds"], *result.report["verify"]["outputs"][0]]
    assert not [key for key in keys if f"`{key}`" not in page]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text()):
        if not re.match(r"[a-z]+:", target):
            assert (page.parent / target).exists(), f"{page.relative_to(ROOT)}: {target}"
