"""Tables, JSON, colour and the progress bar."""

from __future__ import annotations

import io
import json
import time

import pytest

from onnxfuse.cli import render


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_numbers_stand_on_the_right() -> None:
    text = render.table([("a", 1.5), ("long name", 20.25)], ("name", "value"))
    assert text.splitlines() == ["name       value", "---------  -----", "a            1.5", "long name  20.25"]
    assert render.table([], ("name", "value")).splitlines()[0] == "name  value"


def test_json_has_no_infinities(capsys: pytest.CaptureFixture[str]) -> None:
    render.data_json({"a": float("inf"), "b": [float("nan"), 1.0], "c": {"d": -float("inf")}})
    assert json.loads(capsys.readouterr().out) == {"a": "inf", "b": ["nan", 1.0], "c": {"d": "-inf"}}


def test_colour_is_for_terminals_that_want_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert render.use_colour(Terminal()) and not render.use_colour(io.StringIO())
    monkeypatch.setenv("NO_COLOR", "1")
    assert not render.use_colour(Terminal())
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "dumb")
    assert not render.use_colour(Terminal())


@pytest.mark.parametrize(
    ("stream", "seconds", "shown"), [(Terminal, 0.4, True), (Terminal, 0.0, False), (io.StringIO, 0.4, False)]
)
def test_the_bar_shows_for_long_work_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, stream: type[io.StringIO], seconds: float, shown: bool
) -> None:
    stderr = stream()
    monkeypatch.setattr(render.sys, "stderr", stderr)
    monkeypatch.setattr(render, "PROGRESS_AFTER_S", 0.1)
    with render.Progress(["load", "lift"]) as progress:
        progress("load")
        progress("lift")
        time.sleep(seconds)
    assert ("lift" in stderr.getvalue()) == shown


def test_quiet_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = Terminal()
    monkeypatch.setattr(render.sys, "stderr", stderr)
    monkeypatch.setattr(render, "PROGRESS_AFTER_S", 0.01)
    with render.Progress(["load"], enabled=False) as progress:
        progress("load")
        time.sleep(0.1)
    assert stderr.getvalue() == ""
