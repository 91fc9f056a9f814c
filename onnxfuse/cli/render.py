"""The only module that prints: data to stdout, everything else to stderr; colour and bars for terminals only."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any

from onnxfuse.errors import OnnxfuseError

#: Work shorter than this shows no progress bar.
PROGRESS_AFTER_S = 1.0


def data(text: str) -> None:
    """Write a result to stdout."""
    sys.stdout.write(text if text.endswith("\n") else text + "\n")
    sys.stdout.flush()


def data_json(value: Any) -> None:
    """Write a result to stdout as JSON (infinite numbers as strings, since JSON has none)."""
    data(json.dumps(finite(value), indent=2, ensure_ascii=False))


def finite(value: Any) -> Any:
    """The value with infinite numbers and NaN as strings."""
    if isinstance(value, dict):
        return {str(k): finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(v) for v in value]
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return str(value)
    return value


def note(text: str) -> None:
    """Write a remark to stderr."""
    sys.stderr.write(text + "\n")


def error(problem: OnnxfuseError, as_json: bool = False) -> None:
    """Write an error: what, where, and what to do."""
    if as_json:
        data_json({"schema": 1, "error": {"id": problem.id, "message": problem.message, "where": problem.where,
                                          "hint": problem.hint, "exit_code": problem.exit_code}})
    head = _paint("error", "1;31") + f"[{problem.id}]: {problem.message}"
    note(head)
    if problem.where:
        note(f"  --> {problem.where}")
    if problem.hint:
        note(_paint("hint", "1;36") + f": {problem.hint}")


def _paint(text: str, code: str) -> str:
    return f"\x1b[{code}m{text}\x1b[0m" if use_colour(sys.stderr) else text


def use_colour(stream: Any) -> bool:
    """Whether the stream is a terminal that wants colour (https://no-color.org)."""
    return bool(stream.isatty()) and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def table(rows: Iterable[Sequence[Any]], header: Sequence[str]) -> str:
    """A plain aligned table; columns of numbers to the right."""
    texts = [[_cell(c) for c in row] for row in rows]
    numeric = [bool(texts) and all(_is_number(row[i]) for row in texts) for i in range(len(header))]
    widths = [max(len(h), *(len(row[i]) for row in texts)) if texts else len(h) for i, h in enumerate(header)]

    def line(cells: Sequence[str]) -> str:
        parts = [c.rjust(w) if n else c.ljust(w) for c, w, n in zip(cells, widths, numeric, strict=True)]
        return "  ".join(parts).rstrip()

    return "\n".join([line(list(header)), line(["-" * w for w in widths]), *(line(row) for row in texts)])


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return "" if value is None else str(value)


def _is_number(text: str) -> bool:
    try:
        float(text or "0")
    except ValueError:
        return False
    return True


class Progress:
    """A progress bar over named steps, on a terminal, when the work takes over a second.

    Args:
        steps: the steps that will come, in order; others that come are shown too.
        enabled: False silences it.
    """

    def __init__(self, steps: Sequence[str], enabled: bool = True) -> None:
        self._steps = list(steps)
        self._enabled = enabled and sys.stderr.isatty()
        self._lock = threading.Lock()
        self._bar: Any = None
        self._task: Any = None
        self._current = ""
        self._done = 0
        self._timer: threading.Timer | None = None

    def __enter__(self) -> Progress:
        if self._enabled:
            self._timer = threading.Timer(PROGRESS_AFTER_S, self._show)
            self._timer.daemon = True
            self._timer.start()
        return self

    def __call__(self, step: str) -> None:
        with self._lock:
            if step in self._steps:
                self._done = max(self._done, self._steps.index(step))
            self._current = step
            if self._bar is not None:
                self._bar.update(self._task, description=step, completed=self._done)

    def _show(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        with self._lock:
            console = Console(stderr=True, no_color=not use_colour(sys.stderr))
            self._bar = Progress(
                TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), console=console, transient=True
            )
            self._task = self._bar.add_task(self._current, total=len(self._steps), completed=self._done)
            self._bar.start()

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        with self._lock:
            if self._bar is not None:
                self._bar.stop()
