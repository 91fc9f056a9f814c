"""`onnxfuse inspect`."""

from __future__ import annotations

from pathlib import Path

import click

from onnxfuse.cli import options, render, sizes
from onnxfuse.errors import EXIT_OK, OnnxfuseError


@click.command("inspect")
@click.argument("model")
@sizes.shapes_option
@click.option("--top", type=click.IntRange(1), default=20, show_default=True, help="Show so many ops.")
@click.option("--no-blocks", is_flag=True, help="Do not look for transformer blocks (faster).")
@options.json_option
def inspect_command(model: str, shape_texts: tuple[str, ...], top: int, no_blocks: bool, as_json: bool) -> int:
    """Show what MODEL is: inputs, parameters, blocks, operations and bytes per op, peak activation memory.

    Numbers are worked out from shapes at the given sizes, nothing is run. Blocks are those that `optimize` would find.

    \b
    Examples:
      onnxfuse inspect model.onnx
      onnxfuse inspect model.onnx --shapes batch=8,seq=512 --json
    """
    from onnxfuse.graph import files
    from onnxfuse.inspection import inspect_model
    from onnxfuse.inspection.text import describe

    proto = files.read_proto(Path(model))
    given = sizes.parse(",".join(shape_texts))
    blocks = None
    if not no_blocks:
        from onnxfuse import pipeline

        try:
            built = pipeline.build(model, pipeline.Options(stop_after="fuse"))
            blocks = {key: n for key, n in built.blocks.items() if isinstance(n, int) and n}
        except OnnxfuseError as error:
            render.note(f"note: blocks were not counted: {error.message}")
    found = inspect_model(proto, model, shapes=given.shapes, dims=given.dims, blocks=blocks)
    if as_json:
        render.data_json(found.to_json())
        return EXIT_OK
    facts, ops = describe(found, top)
    width = max(len(name) for name, _ in facts)
    render.data("\n".join(f"{name:<{width}}  {text}" for name, text in facts))
    render.data("")
    render.data(render.table(ops, ("op", "count", "FLOP", "bytes", "FLOP/byte")))
    return EXIT_OK
