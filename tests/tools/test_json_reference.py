"""Every key that a command prints as JSON is on the reference page, in the command's section."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from onnxfuse.cli import main

ROOT = Path(__file__).parents[2]
MODEL = str(ROOT / "models" / "llama-dyn20-f32-sdpa-tf5.onnx")
PAGE = (ROOT / "docs" / "reference" / "json.md").read_text()

COMMANDS = {
    "inspect": ["inspect", MODEL],
    "diff": ["diff", MODEL, str(ROOT / "models" / "vit-dyn18-f32-sdpa.onnx")],
    "bench": ["bench", MODEL, MODEL, "--seconds", "0.02", "--shapes", "batch=1,seq=4", "--profile"],
    "explain": ["explain", MODEL],
    "verify": ["verify", MODEL, MODEL, "--verify-sets", "1"],
    "rules list": ["rules", "list"],
    "rules show": ["rules", "show", "silu"],
    "rules lint": ["rules", "lint", "silu"],
    "rules test": ["rules", "test", "silu"],
}
#: Objects whose keys are names of things, not part of the format.
NAMED = {"opsets", "dims", "inputs", "outputs", "ops", "blocks", "by_dtype", "bound", "options"}


def section(command: str) -> str:
    name = command.split()[0]
    start = PAGE.index(f"## `{name}`")
    end = PAGE.find("\n## ", start + 1)
    return PAGE[start : end if end > 0 else None]


def keys(value: Any, name: str = "") -> set[str]:
    if isinstance(value, list):
        return set().union(*(keys(v, name) for v in value[:3])) if value else set()
    if not isinstance(value, dict):
        return set()
    own = set() if name in NAMED else set(value)
    return own.union(*(keys(inner, key) for key, inner in value.items())) if value else own


@pytest.mark.parametrize("command", COMMANDS)
def test_keys_are_documented(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main.main([*COMMANDS[command], "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["schema"] == 1
    text = section(command)
    # `index`, `value`, `reference` belong to `worst`; `node`, `op` … to nodes of a profile.
    small = {"schema", "index", "value", "reference", "milliseconds", "provider", "output", "scale", "set", "name"}
    missing = sorted(k for k in keys(found) - small if f"`{k}`" not in text)
    assert not missing, f"{command}: {missing}"
