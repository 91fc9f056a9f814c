"""Runs the commands of a Markdown page.

A ```` ```console ```` block is run: lines after ``$ `` are commands, the lines below are what they must print, in
order; ``…`` stands for anything, a line of its own for any number of lines. ``# exit N`` after a command is its exit
code (else 0). A block after ``<!-- file: NAME -->`` is written to that file. ``<!-- not run: WHY -->`` skips the next
block.
"""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
_BLOCK = re.compile(r"(?:<!-- (?P<marker>.*?) -->\n)?```(?P<kind>\w*)\n(?P<body>.*?)\n?```", re.DOTALL)
_EXIT = re.compile(r"\s*# exit (\d+)$")


@dataclass
class Command:
    text: str
    code: int = 0
    expected: list[str] = field(default_factory=list)


@dataclass
class Block:
    """A fenced block: its kind (language), its text, and the comment before it."""

    kind: str
    body: str
    marker: str

    def commands(self) -> Iterator[Command]:
        command: Command | None = None
        for line in self.body.splitlines():
            if line.startswith("$ "):
                if command is not None:
                    yield command
                found = _EXIT.search(line)
                command = Command(_EXIT.sub("", line[2:]), int(found[1]) if found else 0)
            elif command is not None:
                command.expected.append(line)
        if command is not None:
            yield command


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [Block(m["kind"], m["body"], m["marker"] or "") for m in _BLOCK.finditer(text)]


def run_page(page: Path, folder: Path) -> int:
    """Run a page in an empty folder in which `models` is there; returns how many commands ran.

    Raises:
        AssertionError: a command exits with another code, or prints something else.
    """
    (folder / "models").symlink_to(ROOT / "models")
    environment = _environment(folder)
    ran = 0
    for block in blocks(page):
        if block.marker.startswith("not run:"):
            continue
        if block.marker.startswith("file:"):
            path = folder / block.marker.removeprefix("file:").strip()
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.body + "\n", encoding="utf-8")
        elif block.kind == "console":
            for command in block.commands():
                _run(command, folder, environment, page)
                ran += 1
        else:
            assert block.kind not in ("sh", "bash", "python", "yaml"), f"{page.name}: a block that nobody runs"
    return ran


def _environment(folder: Path) -> dict[str, str]:
    scripts = folder / ".bin"
    scripts.mkdir()
    for name, arguments in (("onnxfuse", "-m onnxfuse "), ("python", "")):
        script = scripts / name
        script.write_text(f'#!/bin/sh\nexec "{sys.executable}" {arguments}"$@"\n')
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(p for p in paths if p),
        "COLUMNS": "200",
    }


def _run(command: Command, folder: Path, environment: dict[str, str], page: Path) -> None:
    done = subprocess.run(
        ["bash", "-c", command.text],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    printed = done.stdout + done.stderr
    where = f"{page.name}: $ {command.text}\n{printed}"
    assert done.returncode == command.code, f"exit {done.returncode}, not {command.code}: {where}"
    missing = first_missing(command.expected, printed.splitlines())
    assert missing is None, f"`{missing}` is not printed: {where}"


def first_missing(expected: list[str], printed: list[str]) -> str | None:
    """The first expected line that is not found, or None. Lines follow each other directly unless `…` stands between;
    how wide the columns of a table are does not matter."""
    printed = [_narrow(line) for line in printed]
    position, anywhere = 0, False
    for line in expected:
        if line.strip() == "…":
            anywhere = True
            continue
        pattern = re.compile(".*".join(re.escape(part) for part in _narrow(line).split("…")))
        places = range(position, len(printed)) if anywhere else range(position, min(position + 1, len(printed)))
        found = next((i for i in places if pattern.fullmatch(printed[i])), None)
        if found is None:
            return line
        position, anywhere = found + 1, False
    return None


def _narrow(line: str) -> str:
    return re.sub(r"-{2,}", "--", re.sub(r"(?<=\S) {2,}", " ", line.rstrip()))
