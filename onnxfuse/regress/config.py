"""The configuration of `onnxfuse regress` and its baseline file."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from onnxfuse.errors import UsageError
from onnxfuse.replacement import write_text
from onnxfuse.rules import yaml_text

SCHEMA = 1

#: Every key of an entry in `models` (and of `defaults`), for the documentation and for "did you mean".
KEYS = {
    "name": "how results call it; default: the file name without suffix",
    "model": "the file, relative to the configuration",
    "target": "what to fuse for: cpu, cuda, cuda:smNN; default cpu",
    "rules": "further rule files or folders, relative to the configuration",
    "custom_ops": "custom-op libraries that the model or the rules need, relative to the configuration",
    "disable": "ids of rules that must not fire",
    "fusions": "rule id: how often it must apply (a number, or a text such as \">=5\")",
    "blocks": "block kind: how many must be found",
    "ops": "`domain::Op`: how many the fused model must hold",
    "nodes": "how many nodes the fused model must hold",
    "verify": "whether to compare with the original; default true",
    "tolerance": "largest error allowed, relative to the largest value; default: what verification allows",
    "inputs": "an .npz file with input values for verification",
    "max_ratio": "largest time relative to ONNX Runtime on the unfused model; measured only if given",
    "shapes": "sizes for the time measurement, as --shapes of `bench`",
    "seconds": "seconds to measure; default 3",
}  # fmt: skip
_TOP = ("schema", "defaults", "baseline", "models")
_PATHS = ("model", "inputs")


@dataclass(frozen=True)
class Expectation:
    """One model and what must hold for it. Counts are texts of a condition: `5`, `>=5`."""

    name: str
    model: Path
    target: str = "cpu"
    rules: tuple[str, ...] = ()
    disable: tuple[str, ...] = ()
    custom_ops: tuple[str, ...] = ()
    fusions: Mapping[str, str] = field(default_factory=dict)
    blocks: Mapping[str, str] = field(default_factory=dict)
    ops: Mapping[str, str] = field(default_factory=dict)
    nodes: str | None = None
    verify: bool = True
    tolerance: float | None = None
    inputs: Path | None = None
    max_ratio: float | None = None
    shapes: str = ""
    seconds: float = 3.0


@dataclass(frozen=True)
class Config:
    """A configuration file. `baseline` is where `--update` writes what was found, and where it is compared with."""

    path: Path
    models: tuple[Expectation, ...]
    baseline: Path | None = None


def load(path: Path) -> Config:
    """Read a configuration.

    Raises:
        UsageError: the file is missing, holds an unknown key or a value of the wrong kind; with file and line.
    """
    if not path.is_file():
        raise UsageError(f"no such file: `{path}`", hint="check the path")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"the configuration cannot be read as text: {error}", where=str(path)) from error
    document = yaml_text.parse(text, str(path))
    reader = _Reader(path, yaml_text.lines(text, str(path)))
    if not isinstance(document, dict):
        raise UsageError("the configuration must be a mapping", where=str(path), hint="it needs `models:`")
    reader.known(document, _TOP, "")
    if document.get("schema") != SCHEMA:
        raise reader.error("schema", f"`schema` must be {SCHEMA}")
    entries = document.get("models")
    if not isinstance(entries, list) or not entries:
        raise reader.error("models", "`models` must list at least one model")
    defaults = document.get("defaults") or {}
    reader.known(defaults, tuple(KEYS), "defaults")
    models = [reader.model(entry, defaults, f"models[{i}]") for i, entry in enumerate(entries)]
    names = [m.name for m in models]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise reader.error(f"models[{index}]", f"two models are called `{name}`", "give one a `name`")
    baseline = document.get("baseline")
    return Config(path, tuple(models), path.parent / baseline if baseline else None)


class _Reader:
    def __init__(self, path: Path, lines: Mapping[str, int]) -> None:
        self.path = path
        self.lines = lines

    def error(self, place: str, message: str, hint: str | None = None) -> UsageError:
        line = self.lines.get(place) or self.lines.get(place.split(".")[0]) or 1
        return UsageError(message, where=f"{self.path}:{line}", hint=hint)

    def known(self, given: Any, keys: tuple[str, ...], place: str) -> None:
        if not isinstance(given, dict):
            raise self.error(place, f"`{place}` must be a mapping")
        for key in given:
            if key not in keys:
                near = difflib.get_close_matches(str(key), keys, n=1)
                hint = f"did you mean `{near[0]}`?" if near else f"keys: {', '.join(keys)}"
                raise self.error(f"{place}.{key}" if place else str(key), f"unknown key `{key}`", hint)

    def model(self, entry: Any, defaults: Mapping[str, Any], place: str) -> Expectation:
        self.known(entry, tuple(KEYS), place)
        merged = {**defaults, **entry}
        if not isinstance(merged.get("model"), str):
            raise self.error(place, "an entry needs `model`, the file to optimize")
        values: dict[str, Any] = {"name": merged.get("name", Path(merged["model"]).stem)}
        for key, value in merged.items():
            values[key] = self._value(key, value, f"{place}.{key}")
        return Expectation(**values)

    def _value(self, key: str, value: Any, place: str) -> Any:
        convert = _CONVERT[key]
        try:
            converted = convert(value)
        except (TypeError, ValueError) as error:
            raise self.error(place, f"`{key}` is `{value}`: {error}") from error
        if key in _PATHS:
            return self.path.parent / converted
        if key in ("rules", "custom_ops"):
            return tuple(str(self.path.parent / p) for p in converted)
        return converted


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("must be a text")
    return value


def _texts(value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
        raise TypeError("must be a list of texts")
    return tuple(value)


def _condition(value: Any) -> str:
    text = str(value)
    number = text.lstrip("<>=")
    if isinstance(value, bool) or not number.strip().isdigit() or text[: len(text) - len(number)] not in _SIGNS:
        raise ValueError("must be a number, or a condition such as `>=5`")
    return text


def _conditions(value: Any) -> dict[str, str]:
    if not isinstance(value, dict):
        raise TypeError("must be a mapping of names to numbers")
    return {str(k): _condition(v) for k, v in value.items()}


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError("must be true or false")
    return value


def _positive(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
        raise ValueError("must be a number above 0")
    return float(value)


_CONVERT: dict[str, Callable[[Any], Any]] = {
    "name": _text, "model": _text, "target": _text, "rules": _texts, "disable": _texts, "custom_ops": _texts,
    "fusions": _conditions,
    "blocks": _conditions, "ops": _conditions, "nodes": _condition, "verify": _flag, "tolerance": _positive,
    "inputs": _text, "max_ratio": _positive, "shapes": _text, "seconds": _positive,
}  # fmt: skip
_SIGNS: dict[str, Callable[[int, int], bool]] = {
    "": lambda a, b: a == b,
    "==": lambda a, b: a == b,
    ">=": lambda a, b: a >= b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    "<": lambda a, b: a < b,
}


def holds(found: int, condition: str) -> bool:
    """Whether a count meets `5` or `>=5`."""
    number = condition.lstrip("<>=")
    return _SIGNS[condition[: len(condition) - len(number)]](found, int(number))


# -- baseline ----------------------------------------------------------------------------------------------------------


def read_baseline(path: Path) -> dict[str, Any]:
    """What earlier runs found, by model name; empty if the file is not there yet.

    Raises:
        UsageError: the file is no baseline.
    """
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["schema"] != SCHEMA:
            raise ValueError(f"schema {content['schema']}")
        return dict(content["models"])
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"`{path}` is no baseline: {error}", hint="write it anew with --update") from error


def write_baseline(path: Path, models: Mapping[str, Any]) -> None:
    """Write beside and rename.

    Raises:
        OutputError: the file cannot be written.
    """
    text = json.dumps({"schema": SCHEMA, "models": dict(sorted(models.items()))}, indent=1, sort_keys=True) + "\n"
    write_text(path, text)
