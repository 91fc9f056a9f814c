"""Strict YAML: 1.2 scalars, no duplicate keys, no anchors' surprises, and the line of every key."""

from __future__ import annotations

import re
from typing import Any, ClassVar

import yaml

from onnxfuse.errors import RuleError

_Base = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_FLOAT = re.compile(r"^[-+]?(\d+\.\d*|\.\d+|\d+(?=[eE]))([eE][-+]?\d+)?$")
_INT = re.compile(r"^[-+]?(0|[1-9]\d*)$")


class _Loader(_Base):  # type: ignore[misc, valid-type]
    """Resolves nothing implicitly: `_scalar` does, by YAML 1.2 (1e-6 is a float, `no` and `on` are strings)."""

    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}


def parse(text: str, file: str, first_line: int = 0) -> Any:
    """The document as plain Python objects.

    Raises:
        RuleError: not YAML, a duplicate key, or a tag; with file and line.
    """
    return _construct(_compose(text, file, first_line), file, first_line)


def _compose(text: str, file: str, first_line: int) -> yaml.Node | None:
    try:
        return yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = first_line + (mark.line + 1 if mark else 1)
        raise RuleError(f"not valid YAML: {error.problem or error.context}", where=f"{file}:{line}") from error
    except yaml.YAMLError as error:
        raise RuleError(f"not valid YAML: {error}", where=file) from error


def _construct(node: yaml.Node | None, file: str, first_line: int) -> Any:
    if node is None:
        return None
    if isinstance(node, yaml.ScalarNode):
        return _scalar(node)
    if isinstance(node, yaml.SequenceNode):
        return [_construct(item, file, first_line) for item in node.value]
    result: dict[Any, Any] = {}
    for key_node, value_node in node.value:
        if not isinstance(key_node, yaml.ScalarNode):
            raise RuleError("a key must be a plain word", where=f"{file}:{first_line + key_node.start_mark.line + 1}")
        key = key_node.value
        if key in result:
            line = first_line + key_node.start_mark.line + 1
            raise RuleError(f"duplicate key `{key}`", where=f"{file}:{line}", hint="a key may occur once in a mapping")
        result[key] = _construct(value_node, file, first_line)
    return result


def _scalar(node: yaml.ScalarNode) -> Any:
    text = node.value
    if node.style in ("'", '"', "|", ">"):
        return text
    if text in ("true", "false"):
        return text == "true"
    if text in ("", "null", "~"):
        return None
    first = text[0]
    if first.isdigit() or first in "+-.":
        if _INT.match(text):
            return int(text)
        if _FLOAT.match(text):
            return float(text)
    return text


def lines(text: str, file: str) -> dict[str, int]:
    """The line of every entry, by its path: ``nodes.ms.attrs.axes``, ``nodes.sq.any_of[1]``. Made to show a failure."""
    found: dict[str, int] = {}

    def walk(node: yaml.Node | None, path: str) -> None:
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                inner = f"{path}.{key.value}" if path else key.value
                found[inner] = key.start_mark.line + 1
                walk(value, inner)
        elif isinstance(node, yaml.SequenceNode):
            for index, item in enumerate(node.value):
                inner = f"{path}[{index}]"
                found[inner] = item.start_mark.line + 1
                walk(item, inner)

    walk(_compose(text, file, 0), "")
    return found
