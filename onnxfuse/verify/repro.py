"""A diverging node as files that fail alone: `model.onnx`, `data.npz`, and what was seen in `divergence.json`."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx

from onnxfuse.errors import OutputError, VerificationError
from onnxfuse.graph import saving
from onnxfuse.runtime.session import Runner
from onnxfuse.verify.bisect import Divergence, node_model
from onnxfuse.verify.compare import compare


def write(fused: onnx.ModelProto, divergence: Divergence, folder: Path, fused_dir: Path | None = None) -> Path:
    """Write a repro into `folder`, which is made if it does not exist.

    `data.npz` holds `set0/in/<input>` and `set0/out/<output>` (what should come out), so `onnxfuse run` and
    `onnxfuse verify --inputs` read it.

    Raises:
        VerificationError: the divergence names no node.
        OutputError: the folder cannot be written.
    """
    if divergence.node is None:
        raise VerificationError(f"`{divergence.value}` is made by no node of the fused model")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"cannot make the folder `{folder}`: {error.strerror}") from error
    model = node_model(fused, divergence)
    saving.write(model, folder / "model.onnx", fused_dir or Path(), external_data=False)
    arrays = {f"set0/in/{n}": _storable(v) for n, v in divergence.inputs.items()}
    arrays |= {f"set0/out/{n}": _storable(v) for n, v in divergence.expected.items()}
    np.savez(folder / "data.npz", **arrays)  # type: ignore[arg-type]
    (folder / "divergence.json").write_text(json.dumps({"schema": 1, **divergence.to_json()}, indent=2) + "\n")
    return folder


def _storable(array: np.ndarray) -> np.ndarray:
    """NumPy files know no bfloat16: its values are kept as float32, which holds them exactly."""
    return array.astype(np.float32) if array.dtype.name == "bfloat16" else array


def fails(folder: Path, dtype: str, provider: str = "cpu") -> bool:
    """Whether the repro in `folder` still fails: its model does not give what `data.npz` says it should."""
    model = onnx.load(folder / "model.onnx")
    with np.load(folder / "data.npz") as archive:
        inputs = {k.removeprefix("set0/in/"): archive[k] for k in archive.files if k.startswith("set0/in/")}
        expected = {k.removeprefix("set0/out/"): archive[k] for k in archive.files if k.startswith("set0/out/")}
    for value in model.graph.input:
        kind = onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
        inputs[value.name] = inputs[value.name].astype(kind)
    found = Runner(model, provider).run(inputs)
    return any(not compare(found[n], v.astype(found[n].dtype), v, dtype).passed for n, v in expected.items())
