"""Dimensions as models declare them."""

from __future__ import annotations

import re

from onnxfuse.graph.dims.polynomial import SymInt, is_nonnegative, symbol

_TOKEN = re.compile(r"\s*(?:(\d+)|([A-Za-z_][\w.]*)|([-+*()]))")


def parse(text: str) -> SymInt:
    """A declared dimension: a name, or an expression such as ``past_sequence_length + 2*seq`` as exporters write it.
    A text that is no such expression is a name as it stands."""
    tokens: list[str] = []
    position = 0
    stripped = text.strip()
    while position < len(stripped):
        match = _TOKEN.match(stripped, position)
        if match is None:
            return symbol(text)
        tokens.append(match.group().strip())
        position = match.end()
    if len(tokens) == 1 and not tokens[0].isdigit():
        return symbol(text)
    try:
        value, rest = _parse_sum(tokens)
    except (IndexError, ValueError):
        return symbol(text)
    return symbol(text) if rest or not is_nonnegative(value) else value


def _parse_sum(tokens: list[str]) -> tuple[SymInt, list[str]]:
    value, tokens = _parse_product(tokens)
    while tokens and tokens[0] in "+-":
        other, rest = _parse_product(tokens[1:])
        value = value + other if tokens[0] == "+" else value - other
        tokens = rest
    return value, tokens


def _parse_product(tokens: list[str]) -> tuple[SymInt, list[str]]:
    value, tokens = _parse_factor(tokens)
    while tokens and tokens[0] == "*":
        other, tokens = _parse_factor(tokens[1:])
        value = value * other
    return value, tokens


def _parse_factor(tokens: list[str]) -> tuple[SymInt, list[str]]:
    head, rest = tokens[0], tokens[1:]
    if head == "(":
        value, rest = _parse_sum(rest)
        if rest[0] != ")":
            raise ValueError(head)
        return value, rest[1:]
    if head in "+-*)":
        raise ValueError(head)
    return (int(head) if head.isdigit() else symbol(head)), rest
