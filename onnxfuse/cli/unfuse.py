"""`onnxfuse unfuse`."""

from __future__ import annotations

import click

from onnxfuse.cli import options, render
from onnxfuse.errors import EXIT_OK


@click.command("unfuse")
@click.argument("model")
@click.option("-o", "--output", required=True, metavar="OUT", help="File to write.")
@options.json_option
def unfuse_command(model: str, output: str, as_json: bool) -> int:
    """Turn every fused op of MODEL back into standard ONNX ops, so that it runs without the custom-op library.

    \b
    Example:
      onnxfuse unfuse model.fused.onnx -o model.plain.onnx
    """
    from onnxfuse import report
    from onnxfuse.optimizer import unfuse

    plain = unfuse(model, output)
    ops = report.count_ops(plain)
    if as_json:
        render.data_json({"schema": 1, "output": output, "nodes": sum(ops.values()), "ops": ops})
    else:
        render.data(f"written: {output} ({sum(ops.values())} nodes)")
    return EXIT_OK
