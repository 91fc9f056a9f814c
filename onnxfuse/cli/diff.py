"""`onnxfuse diff`."""

from __future__ import annotations

from typing import Any

import click

from onnxfuse.cli import options, render
from onnxfuse.errors import EXIT_FINDINGS, EXIT_OK


@click.command("diff")
@click.argument("before")
@click.argument("after")
@click.option("--no-blocks", is_flag=True, help="Do not count transformer blocks.")
@click.option("--exit-code", is_flag=True, help="Exit with 1 when the models differ.")
@options.json_option
def diff_command(before: str, after: str, no_blocks: bool, exit_code: bool, as_json: bool) -> int:
    """Show what changed from model BEFORE to model AFTER, in blocks and ops, not in names.

    Nodes are paired by what they compute and by their neighbours. What has no partner is shown as regions, equal ones
    folded (`2 x` for two layers changed alike).

    \b
    Examples:
      onnxfuse diff model.onnx model.fused.onnx
      onnxfuse diff old-export.onnx new-export.onnx --exit-code

    Exit codes: 0 fine; 1 the models differ, with --exit-code; 2 bad input.
    """
    from onnxfuse import blocks
    from onnxfuse.diff import diff_models
    from onnxfuse.graph import model as models

    first, second = models.load(before), models.load(after)
    counts = [{}, {}] if no_blocks else [_numbers(blocks.count(m)) for m in (first, second)]
    found = diff_models(first, second, *counts)
    if as_json:
        render.data_json({"before": before, "after": after, **found.to_json()})
    else:
        _print(found)
    return EXIT_FINDINGS if exit_code and not found.same else EXIT_OK


def _numbers(counted: dict[str, Any]) -> dict[str, int]:
    return {key: n for key, n in counted.items() if isinstance(n, int)}


def _print(found: Any) -> None:
    if found.same:
        render.data(f"the models are the same up to names ({found.nodes_before} nodes)")
        return
    render.data(f"{found.nodes_before} nodes -> {found.nodes_after}, {found.unchanged} of them unchanged")
    for line in found.interface:
        render.data(f"  {line}")
    for title, rows in (("block", found.blocks), ("op", found.ops)):
        if rows:
            render.data("")
            render.data(
                render.table([(name, a, b, f"{b - a:+d}") for name, a, b in rows], (title, "before", "after", ""))
            )
    if found.regions:
        render.data("\nchanged regions:")
    for region in found.regions:
        render.data(f"  {region.count} x {_ops(region.removed)} -> {_ops(region.added)}   at `{region.example}`")
        for change in region.changes:
            render.data(f"        {change}")
    for op, count in found.weights:
        render.data(f"  weights of {count} {op} node{'s' if count > 1 else ''} differ")


def _ops(names: tuple[str, ...]) -> str:
    if not names:
        return "(nothing)"
    return " ".join(names) if len(names) <= 14 else " ".join(names[:12]) + f" … ({len(names)} nodes)"
