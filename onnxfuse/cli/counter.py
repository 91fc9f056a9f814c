"""A progress bar over a number of rounds, on a terminal, when the work takes over a second."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any

from onnxfuse.cli import render


class Counter:
    """Call it with (done, total). Silent when stderr is no terminal, or with `enabled=False`."""

    def __init__(self, label: str, enabled: bool = True) -> None:
        self._label = label
        self._enabled = enabled and sys.stderr.isatty()
        self._started = 0.0
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> Counter:
        self._started = time.monotonic()
        return self

    def __call__(self, done: int, total: int) -> None:
        if not self._enabled:
            return
        if self._bar is None:
            if time.monotonic() - self._started < render.PROGRESS_AFTER_S:
                return
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            console = Console(stderr=True, no_color=not render.use_colour(sys.stderr))
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self._bar = Progress(*columns, console=console, transient=True)
            self._task = self._bar.add_task(self._label, total=total)
            self._bar.start()
        self._bar.update(self._task, completed=done, total=total)

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
