"""What a static check reports."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass

from onnxfuse.rules.patterns import Pattern
from onnxfuse.rules.program import Program


@dataclass(frozen=True)
class Diagnostic:
    """One finding: lint id, the path in the file, and what is wrong."""

    id: str
    rule: str
    file: str
    line: int | None
    path: str
    message: str
    hint: str | None = None

    def __str__(self) -> str:
        text = f"{self.file}:{self.line or 1}: {self.id}: {self.message}"
        return f"{text}\nhint: {self.hint}" if self.hint else text


class Findings:
    """Collects the findings of one rule."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.found: list[Diagnostic] = []

    def add(self, lint_id: str, path: str, message: str, hint: str | None = None) -> None:
        line = self.program.line(path) or self.program.line("id")
        self.found.append(Diagnostic(lint_id, self.program.id, self.program.file, line, path, message, hint))

    def undefined(self, lint_id: str, path: str, name: str, known: Iterable[str], what: str) -> None:
        near = difflib.get_close_matches(name, list(known), n=1)
        self.add(lint_id, path, f"{what} `{name}` is not defined", f"did you mean `{near[0]}`?" if near else None)


def distinct(program: Program) -> list[Pattern]:
    """The pattern nodes, each once."""
    return list({id(p): p for p in program.makers.values()}.values())
