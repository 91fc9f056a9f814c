"""`onnxfuse tune`."""

from __future__ import annotations

from dataclasses import asdict

import click

from onnxfuse.cli import options, render
from onnxfuse.errors import EXIT_OK, UsageError


@click.command("tune")
@click.argument("model")
@click.option("-o", "--output", required=True, metavar="FILE.json", help="Tuning file to write, or to continue.")
@click.option(
    "--rows",
    default="1,16,128,512,2048",
    show_default=True,
    metavar="N,N,…",
    help="Numbers of rows (batch times tokens) to tune for; powers of two serve those between them too.",
)
@options.json_option
def tune_command(model: str, output: str, rows: str, as_json: bool) -> int:
    """Measure which kernel is fastest for each product of MODEL on this GPU.

    The library reads the file that the environment variable ONNXFUSE_TUNING names. Every candidate's result is checked
    before it is timed. Shapes that the file already holds for this GPU and driver are not measured again.

    \b
    Example:
      onnxfuse tune model.fused.onnx -o tuning.json
      ONNXFUSE_TUNING=tuning.json python serve.py
    """
    from pathlib import Path

    from onnxfuse import tune

    try:
        counts = [int(part) for part in rows.split(",")]
    except ValueError:
        counts = []
    if not counts or min(counts) < 1:
        raise UsageError(f"`--rows {rows}` is not a list of positive numbers", hint="for example --rows 1,16,512")

    def show(tuned: tune.Tuned) -> None:
        shape = tuned.shape
        kind = "GatedLinear" if shape.gated else "Linear"
        render.note(
            f"{kind} {shape.rows}x{shape.k}->{shape.n} {shape.dtype}: {tuned.default_microseconds:.1f} -> "
            f"{tuned.microseconds:.1f} us ({tuned.plan})"
        )

    results = tune.tune(model, Path(output), counts, None if as_json else show)
    if as_json:
        render.data_json({"schema": 1, "output": output, "tuned": [asdict(tuned) for tuned in results]})
    else:
        render.data(f"written: {output} ({len(results)} shapes measured)")
    return EXIT_OK
