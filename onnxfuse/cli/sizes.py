"""The `--shapes` option: sizes of named dims and whole input shapes in one text."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import click

from onnxfuse.errors import UsageError

_ENTRY = re.compile(r"\s*(?:([^=:,]+)=(\d+)|([^=,]+):\[?(\d+(?:x\d+)*)\]?)\s*(?:,|$)")

shapes_option = click.option(
    "--shapes", "shape_texts", multiple=True, metavar="SIZES",
    help="Sizes: dims by name (batch=1,seq=128), whole inputs (input_ids:1x128), or both with commas between. "
    "Dims that are not named get defaults: batch 1, other 128.",
)  # fmt: skip


@dataclass(frozen=True)
class SizeSpec:
    """One `--shapes` text, taken apart."""

    text: str = ""
    dims: dict[str, int] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)


def parse(text: str) -> SizeSpec:
    """`batch=2,seq=16,pixels:1x3x224x224` as dims and shapes.

    Raises:
        UsageError: the text has another form.
    """
    dims: dict[str, int] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    position = 0
    while position < len(text):
        match = _ENTRY.match(text, position)
        if match is None:
            raise UsageError(
                f"`{text}` does not say sizes", hint="write dims as batch=1,seq=128 and inputs as input_ids:1x128"
            )
        if match[1] is not None:
            dims[match[1].strip()] = int(match[2])
        else:
            shapes[match[3].strip()] = tuple(int(n) for n in match[4].split("x"))
        position = match.end()
    return SizeSpec(text, dims, shapes)
