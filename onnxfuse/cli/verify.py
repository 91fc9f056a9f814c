"""`onnxfuse verify`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from onnxfuse.cli import options, render
from onnxfuse.errors import EXIT_FINDINGS, EXIT_OK


@click.command("verify")
@click.argument("base")
@click.argument("fused")
@options.inputs_options
@click.option("--iterations", type=click.IntRange(1), default=1, show_default=True,
              help="Repeat with so many seeds.")
@click.option("--verify-sets", type=click.IntRange(1), metavar="N", help="At most N input sets per iteration.")
@click.option("--provider", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True,
              help="Execution provider of both models.")
@click.option("--rtol", multiple=True, metavar="[OUTPUT:]VALUE",
              help="Own limit |a-b| <= atol + rtol*|b| against the oracle.")
@click.option("--atol", multiple=True, metavar="[OUTPUT:]VALUE", help="See --rtol.")
@click.option("--bisect", is_flag=True, help="On a mismatch, name the node where the values first differ.")
@click.option("--repro", metavar="DIR", help="With --bisect: write that node alone, with its inputs.")
@options.custom_ops_option
@options.json_option
def verify_command(
    base: str, fused: str, inputs: str | None, input_shapes: tuple[str, ...], save_inputs: str | None, seed: int,
    iterations: int, verify_sets: int | None, provider: str, rtol: tuple[str, ...], atol: tuple[str, ...],
    bisect: bool, repro: str | None, custom_ops: tuple[str, ...], as_json: bool,
) -> int:
    """Compare FUSED with BASE, the original, on input sets that BASE can run.

    Both are held to BASE in a wider dtype. FUSED is right when its error is at most a small multiple of BASE's own, or
    within --rtol and --atol if they are given.

    \b
    Examples:
      onnxfuse verify model.onnx model.fused.onnx
      onnxfuse verify model.onnx model.fused.onnx --iterations 5 --atol logits:1e-3
      onnxfuse verify model.onnx model.fused.onnx --bisect --repro repro/

    Exit codes: 0 right; 1 a mismatch; 2 bad input.
    """
    from onnxfuse.destination import check_files
    from onnxfuse.graph import files
    from onnxfuse.runtime import archive
    from onnxfuse.verify import Verifier, limits

    check_files({"--save-inputs": save_inputs}, {"BASE": base, "FUSED": fused, "--inputs": inputs})
    base_path, fused_path = Path(base), Path(fused)
    original, rewritten = files.read_proto(base_path), files.read_proto(fused_path)
    names = [o.name for o in original.graph.output]
    own = limits.Limits(limits.parse(rtol, names, "--rtol"), limits.parse(atol, names, "--atol"))
    shapes = archive.parse_shapes(input_shapes)
    entries: list[dict[str, Any]] = []
    problems: list[str] = []
    notes: list[str] = []
    status, used, divergence = "passed", [], None
    for iteration in range(iterations):
        verifier = Verifier(
            original, base_dir=base_path.resolve().parent, provider=provider, seed=seed + 1000 * iteration,
            shapes=shapes, inputs=inputs, limit=verify_sets, custom_ops=custom_ops,
        )
        kept: dict[str, Any] = {}
        verdict = verifier.check(rewritten, base_dir=fused_path.resolve().parent, keep=kept)
        notes += [n for n in verdict.notes if n not in notes]
        used += [s.feeds for s in verifier.sets]
        if verdict.status != "passed" and status != "failed":
            status = verdict.status
        found, off = _statistics(verifier, kept, own)
        entries += found
        if own and kept:
            problems += off
            status = "failed" if off else ("passed" if status == "failed" else status)
        else:
            problems += verdict.problems
        if bisect and divergence is None and (verdict.failing or off):
            divergence = _bisect(verifier, original, rewritten, verdict, provider, base_path, fused_path, custom_ops)
    if save_inputs is not None:
        archive.save_npz(save_inputs, used)
    written = _repro(divergence, rewritten, repro, fused_path)
    result = {"schema": 1, "base": base, "fused": fused, "status": status, "outputs": entries, "problems": problems,
              "notes": notes, "divergence": divergence.to_json() if divergence else None, "repro": written}
    if as_json:
        render.data_json(result)
    else:
        _print(result)
    return EXIT_OK if status in ("passed", "structure-only") else EXIT_FINDINGS


def _statistics(verifier: Any, kept: dict[str, Any], own: Any) -> tuple[list[dict[str, Any]], list[str]]:
    from onnxfuse.verify.statistics import statistics

    entries, problems = [], []
    for inputs in verifier.sets:
        truth = verifier.truth(inputs)
        for name, value in kept.get(inputs.name, {}).items():
            if name not in truth or value.shape != truth[name].shape or value.dtype.kind in "SUO":
                continue
            entries.append({
                "set": inputs.name, "name": name, "scale": _largest(truth[name]),
                "oracle": statistics(value, truth[name]).to_json(),
                "unfused_oracle": statistics(inputs.outputs[name], truth[name]).to_json(),
                "unfused": statistics(value, inputs.outputs[name]).to_json(),
            })
            off = own.violations(name, value, truth[name]) if own else 0
            if off:
                problems.append(f"set `{inputs.name}`, output `{name}`: {off} elements outside of the limits")
    return entries, problems


def _largest(values: Any) -> float:
    import numpy as np

    wide = np.asarray(values, np.float64)
    return float(np.max(np.abs(wide), where=np.isfinite(wide), initial=0.0))


def _bisect(
    verifier: Any, original: Any, rewritten: Any, verdict: Any, provider: str, base: Path, fused: Path,
    custom_ops: tuple[str, ...],
) -> Any:
    from onnxfuse.verify.bisect import bisect

    failing = verdict.failing[0] if verdict.failing else verifier.sets[0].name
    inputs = next(s for s in verifier.sets if s.name == failing)
    return bisect(
        original, rewritten, inputs.feeds, dtype=verifier.dtype, provider=provider, base_dir=base.resolve().parent,
        fused_dir=fused.resolve().parent, custom_ops=custom_ops,
    )


def _repro(found: Any, rewritten: Any, folder: str | None, fused: Path) -> str | None:
    if found is None or folder is None:
        return None
    from onnxfuse.verify import repro

    return str(repro.write(rewritten, found, Path(folder), fused.resolve().parent))


def _print(result: dict[str, Any]) -> None:
    rows = [
        (e["set"], e["name"], e["oracle"]["max_abs"] / (e["scale"] or 1.0),
         e["unfused_oracle"]["max_abs"] / (e["scale"] or 1.0), e["oracle"]["max_abs"], e["oracle"]["p99_abs"],
         e["oracle"]["cosine"], e["unfused"]["max_ulp"])
        for e in result["outputs"]
    ]
    header = ("set", "output", "error", "unfused error", "max abs", "p99 abs", "cosine", "max ULP vs unfused")
    render.data(render.table(rows, header))
    for line in result["problems"]:
        render.data(f"wrong: {line}")
    found = result["divergence"]
    if found:
        made_by = f", made by rule {found['rule']}" if found["rule"] else ""
        render.data(f"first difference: `{found['value']}` of {found['op']}{made_by} ({found['cause']}): error "
                    f"{found['error']:.2g}, allowed {found['tolerance']:.2g}; {found['runs']} session runs")
    if result["repro"]:
        render.data(f"written: {result['repro']}")
    render.data(f"status: {result['status']}")
    for line in result["notes"]:
        render.note(f"note: {line}")
