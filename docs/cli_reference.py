"""Writes docs/reference/cli.md from the commands themselves: `python docs/cli_reference.py`."""

from __future__ import annotations

from pathlib import Path

import click

from onnxfuse.cli.main import COMMANDS, cli

OUT = Path(__file__).parent / "reference" / "cli.md"
HEAD = """# Commands

`onnxfuse COMMAND --help` shows the same. Options may be spelled with dashes or underscores. stdout is data, everything
else goes to stderr; `--json` prints data with a schema number; colour only on a terminal and without `NO_COLOR`. Exit
codes: 0 fine, 1 findings, 2 usage, bad input or a broken installation ([errors](errors.md)).

Shell completion: `eval "$(_ONNXFUSE_COMPLETE=bash_source onnxfuse)"` (or `zsh_source`, `fish_source`).

Environment: `ONNXFUSE_LIBRARY` names another build of the custom-op library, `ONNXFUSE_TRACEBACK=1` shows where a
defect happened, `XDG_CACHE_HOME` moves the cache of answers about ONNX Runtime's kernels, `ONNXFUSE_TUNING` names a
file of `onnxfuse tune`, `ONNXFUSE_TF32=1` lets the CUDA kernels round float32 products to TF32.

<!-- made by docs/cli_reference.py; do not edit -->
"""


def text() -> str:
    """The whole page."""
    parts = [HEAD]
    context = click.Context(cli, info_name="onnxfuse")
    for name in COMMANDS:
        command = cli.get_command(context, name)
        assert command is not None
        parts += _section(command, f"onnxfuse {name}", context, level=2)
    return "\n".join(parts)


def _section(command: click.Command, path: str, parent: click.Context, level: int) -> list[str]:
    context = click.Context(command, info_name=path.rsplit(" ", 1)[-1], parent=parent)
    usage = " ".join(["onnxfuse", *path.split()[1:], *command.collect_usage_pieces(context)])
    lines = [f"{'#' * level} `{path}`", "", f"    {usage}", "", _prose(command.help or ""), ""]
    rows = [p.get_help_record(context) for p in command.params if isinstance(p, click.Option)]
    if any(rows):
        lines += ["| option | meaning |", "|---|---|"]
        lines += [f"| `{_cell(row[0])}` | {_cell(row[1])} |" for row in rows if row]
        lines.append("")
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            if inner is not None:
                lines += _section(inner, f"{path} {name}", context, level + 1)
    return lines


def _prose(help_text: str) -> str:
    """Help as Markdown: paragraphs that keep their lines (`\\b`) become code."""
    parts = []
    for paragraph in help_text.split("\n\n"):
        lines = paragraph.strip("\n").split("\n")
        if lines and lines[0].strip() == "\b":
            title, *rest = [line.strip() for line in lines[1:]]
            parts.append(title + ("\n\n" + "\n".join("    " + line for line in rest) if rest else ""))
        else:
            parts.append("\n".join(line.strip() for line in lines))
    return "\n\n".join(parts)


def _cell(value: str) -> str:
    return " ".join(value.split()).replace("|", "\\|")


if __name__ == "__main__":
    OUT.write_text(text())
