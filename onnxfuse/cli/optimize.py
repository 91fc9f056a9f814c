"""`onnxfuse optimize`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from onnxfuse.cli import options, render
from onnxfuse.errors import EXIT_FINDINGS, EXIT_OK, VerificationError

_STAGES = ("canonicalize", "lift", "fuse", "lower")


@click.command("optimize")
@click.argument("model")
@click.option("-o", "--output", metavar="OUT", help="File to write; default: MODEL with .fused before its suffix.")
@click.option("--target", default="auto", show_default=True, metavar="cpu|cuda[:smNN]|auto",
              help="What to fuse for; auto: CUDA where ONNX Runtime can use a GPU, else CPU.")
@click.option("--rules", "rule_paths", multiple=True, metavar="PATH",
              help="Rule file or folder besides the built-in ones.")
@click.option("--disable", multiple=True, metavar="RULE", help="A rule that must not fire; may be given several times.")
@click.option("--exclude-node", multiple=True, metavar="NAME", help="A node (or output) that no rule may touch.")
@click.option("--no-verify", is_flag=True, help="Do not compare the result with the original.")
@click.option("--allow-unverified", is_flag=True, help="Write the result even if it could not be verified.")
@click.option("--verify-sets", type=click.IntRange(1), metavar="N", help="Compare on at most N input sets.")
@options.inputs_options
@options.custom_ops_option
@click.option("--stop-after", type=click.Choice(_STAGES), help="Write what is there after this stage.")
@click.option("--kv-cache", type=click.Choice(["separate", "shared"]), default="separate", show_default=True,
              help="shared: past and present of a key/value cache lie in one buffer, which each step writes in place.")
@click.option("--external-data/--inline-data", default=None,
              help="Keep big tensors in OUT.data, or inside; default: as MODEL does, or as size demands.")
@click.option("--dry-run", is_flag=True, help="Do everything but write the model.")
@click.option("--fail-on-none", is_flag=True, help="Exit with 1 when nothing was fused.")
@click.option("--report", "report_path", metavar="FILE.json", help="Write the report as JSON.")
@options.json_option
@options.verbosity_options
def optimize_command(
    model: str, output: str | None, target: str, rule_paths: tuple[str, ...], disable: tuple[str, ...],
    exclude_node: tuple[str, ...], no_verify: bool, allow_unverified: bool, verify_sets: int | None,
    inputs: str | None, input_shapes: tuple[str, ...], save_inputs: str | None, seed: int,
    custom_ops: tuple[str, ...], stop_after: str | None, kv_cache: str, external_data: bool | None, dry_run: bool,
    fail_on_none: bool, report_path: str | None, as_json: bool, quiet: bool, verbose: int,
) -> int:
    """Fuse the blocks of MODEL, compare the result with the original, and write it.

    Fusions that make the result wrong are found and taken back. A result that cannot be verified is not written
    (--allow-unverified writes it).

    \b
    Examples:
      onnxfuse optimize model.onnx
      onnxfuse optimize model.onnx -o fused.onnx --target cuda:sm90 --report report.json
      onnxfuse optimize model.onnx --disable rms-norm --exclude-node /layers.3/mlp/Mul
      onnxfuse optimize model.onnx --inputs real-inputs.npz
      onnxfuse optimize decoder.onnx --kv-cache shared

    Exit codes: 0 written (or dry run); 1 not verified, or nothing fused with --fail-on-none; 2 bad input.
    """
    from onnxfuse import report as reports
    from onnxfuse.destination import check_files
    from onnxfuse.optimizer import optimize

    destination = output if output is not None else _default_output(model)
    check_files(
        {"--report": report_path, "--save-inputs": save_inputs},
        {"MODEL": model, "--output": destination, "--inputs": inputs},
    )
    steps = ["load", *_STAGES, "verify", "save"]
    with render.Progress(steps, enabled=not quiet) as progress:
        try:
            result = optimize(
                model, destination, target=target, rules=rule_paths, disable=disable, exclude_nodes=exclude_node,
                verify=not no_verify, allow_unverified=allow_unverified, input_shapes=input_shapes, inputs=inputs,
                save_inputs=save_inputs, seed=seed, verify_sets=verify_sets, stop_after=stop_after, kv_cache=kv_cache,
                dry_run=dry_run, external_data=external_data, custom_ops=custom_ops, progress=progress,
            )
        except VerificationError as error:
            if error.report is not None and report_path is not None:
                _write_json(report_path, error.report)
            raise
    if report_path is not None:
        _write_json(report_path, result.report)
    if as_json:
        render.data_json(result.report)
    elif not quiet:
        render.data(reports.summary(result.report))
        if verbose:
            for line in result.report["verify"].get("notes", ()):
                render.note(f"note: {line}")
    if fail_on_none and not result.report["fusions"]:
        render.note("nothing was fused")
        return EXIT_FINDINGS
    return EXIT_OK


def _default_output(model: str) -> str:
    path = Path(model)
    return str(path.with_name(f"{path.stem}.fused{path.suffix or '.onnx'}"))


def _write_json(path: str, content: dict[str, Any]) -> None:
    from onnxfuse.replacement import write_text

    write_text(Path(path), json.dumps(render.finite(content), indent=2) + "\n")
