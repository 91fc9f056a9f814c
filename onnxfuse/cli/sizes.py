"""The `--shapes` option: sizes of named dims and whole input shapes in one text."""

from __future__ import annotations

from dataclasses import dataclass, field

import click

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
    from onnxfuse.inspection.sizes import parse_sizes

    dims, shapes = parse_sizes(text)
    return SizeSpec(text, dims, shapes)
