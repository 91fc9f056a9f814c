"""`onnxfuse run`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from onnxfuse.cli import options, render
from onnxfuse.errors import EXIT_OK


@click.command("run")
@click.argument("model")
@options.inputs_options
@click.option("--save-outputs", metavar="FILE.npz", help="Write the outputs.")
@click.option("--provider", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True,
              help="Execution provider.")
@options.custom_ops_option
@options.json_option
def run_command(
    model: str, inputs: str | None, input_shapes: tuple[str, ...], save_inputs: str | None, seed: int,
    save_outputs: str | None, provider: str, custom_ops: tuple[str, ...], as_json: bool,
) -> int:
    """Run MODEL once in ONNX Runtime and describe its outputs.

    Inputs are generated in the range that the model allows, or taken from --inputs.

    \b
    Examples:
      onnxfuse run model.fused.onnx
      onnxfuse run model.onnx --input-shapes input_ids:1,16 --save-outputs out.npz
    """
    from onnxfuse.destination import check_files
    from onnxfuse.graph import files
    from onnxfuse.runtime import archive, feeds, scenarios
    from onnxfuse.runtime.session import Runner

    check_files({"--save-inputs": save_inputs, "--save-outputs": save_outputs}, {"MODEL": model, "--inputs": inputs})
    path = Path(model)
    proto = files.read_proto(path)
    runner = Runner(proto, provider, level="all", base_dir=path.resolve().parent, custom_ops=custom_ops, exact=False)
    specs = feeds.input_specs(proto)
    if inputs is not None:
        sets = [scenarios.InputSet(f"set {i}", v, runner.run(v))
                for i, v in enumerate(archive.load_npz(inputs, specs))]
    else:
        sets = scenarios.plan(specs, runner.run, seed=seed, shapes=archive.parse_shapes(input_shapes), limit=1).sets
    if save_inputs is not None:
        archive.save_npz(save_inputs, [s.feeds for s in sets])
    if save_outputs is not None:
        archive.save_npz(save_outputs, [s.outputs for s in sets], kind="out")
    rows = [_describe(s.name, name, value) for s in sets for name, value in s.outputs.items()]
    if as_json:
        render.data_json({"schema": 1, "model": model, "provider": runner.provider, "outputs": rows})
    else:
        header = list(rows[0]) if rows else ["output"]
        render.data(render.table([list(row.values()) for row in rows], header))
    return EXIT_OK


def _describe(label: str, name: str, value: Any) -> dict[str, Any]:
    import numpy as np

    shape = "x".join(map(str, value.shape))
    row: dict[str, Any] = {"set": label, "output": name, "dtype": str(value.dtype), "shape": shape}
    numeric = value.dtype.kind in "fiubV" and value.size > 0
    wide = value.astype(np.float64) if numeric else np.zeros(0)
    finite = wide[np.isfinite(wide)]
    row["min"] = float(finite.min()) if finite.size else None
    row["max"] = float(finite.max()) if finite.size else None
    row["mean"] = float(finite.mean()) if finite.size else None
    row["not finite"] = int(wide.size - finite.size)
    return row
