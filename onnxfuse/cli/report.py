"""`onnxfuse report`."""

from __future__ import annotations

from pathlib import Path

import click

from onnxfuse.cli import options, render, sizes
from onnxfuse.errors import EXIT_OK


@click.command("report")
@click.argument("model")
@click.option("-o", "--output", metavar="FILE.html", help="Page to write; default: MODEL with .html for its suffix.")
@click.option("--target", default="cpu", show_default=True, metavar="cpu|cuda[:smNN]|auto", help="What to fuse for.")
@click.option(
    "--rules", "rule_paths", multiple=True, metavar="PATH", help="Rule file or folder besides the built-in ones."
)
@click.option("--disable", multiple=True, metavar="RULE", help="A rule that must not fire; may be given several times.")
@sizes.shapes_option
@options.custom_ops_option
@click.option("--no-bench", is_flag=True, help="Do not time the model.")
@click.option("--no-verify", is_flag=True, help="Do not compare the result with the original.")
@click.option(
    "--seconds", type=click.FloatRange(0.01), default=3.0, show_default=True, help="Time to measure per case."
)
@options.json_option
@options.verbosity_options
def report_command(
    model: str, output: str | None, target: str, rule_paths: tuple[str, ...], disable: tuple[str, ...],
    shape_texts: tuple[str, ...], custom_ops: tuple[str, ...],
    no_bench: bool, no_verify: bool, seconds: float, as_json: bool, quiet: bool,
    verbose: int,
) -> int:  # fmt: skip
    """Write one HTML page about what fusing does to MODEL: blocks, rules, the model layer by layer, what was missed and
    why, errors, times, memory.

    The page is one file that loads nothing from anywhere.

    \b
    Examples:
      onnxfuse report model.onnx
      onnxfuse report model.onnx -o page.html --shapes batch=1,seq=128 --shapes batch=8,seq=512
    """
    from onnxfuse import __version__, html_report
    from onnxfuse.destination import check_files
    from onnxfuse.html_report import gather
    from onnxfuse.replacement import write_text

    destination = Path(output) if output is not None else Path(model).with_suffix(".html")
    check_files({"--output": destination}, {"MODEL": model})
    with render.Progress(list(gather.STEPS), enabled=not quiet) as progress:
        content = gather.gather(
            model, target=target, rules=rule_paths, disable=disable, shapes=shape_texts, measure=not no_bench,
            custom_ops=custom_ops, seconds=seconds, verify=not no_verify, version=__version__, progress=progress,
        )  # fmt: skip
    write_text(destination, html_report.render(content))
    if as_json:
        render.data_json({
            "schema": 1, "page": str(destination), "report": content.optimized, "before": content.before,
            "after": content.after, "misses": list(content.misses), "bench": content.bench,
        })  # fmt: skip
    else:
        render.data(f"written: {destination}")
    return EXIT_OK
