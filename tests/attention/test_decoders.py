"""Every model with attention means the same after optimizing: batch sizes, lengths, caches, padding, positions.

The models are those of the folder that ONNXFUSE_CORPUS names, else of `models/`. Fused and exported model run in ONNX
Runtime on the same inputs; NaN must stand in the same places.
"""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from onnxfuse import pipeline
from onnxfuse.lower.kernels import Target

ort = pytest.importorskip("onnxruntime")

CORPUS = Path(os.environ.get("ONNXFUSE_CORPUS") or Path(__file__).parents[2] / "models")
RECORDS = [
    r for r in json.loads((CORPUS / "manifest.json").read_text())["models"] if (r["expected"] or {}).get("attention")
]
#: Those that the CPU provider can run, and that are not fused by their exporter already.
RUNNABLE = [r for r in RECORDS if r["dtype"] in ("float32", "float16") and "genai" not in r["file"]]
TOLERANCE = {"float32": 1e-4, "float16": 2e-2}
PADDING = ("none", "left", "right", "holes", "all")
_NUMPY = {"int64": np.int64, "int32": np.int32, "float": np.float32, "float16": np.float16, "bool": np.bool_}


def session(model: bytes, optimized: bool) -> Any:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    if not optimized:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def padding_mask(kind: str, batch: int, length: int, random: np.random.Generator) -> np.ndarray:
    mask = np.ones((batch, length), np.int64)
    for row in mask:
        hidden = int(random.integers(1, length)) if length > 1 else 0
        if kind == "left":
            row[:hidden] = 0
        elif kind == "right":
            row[length - hidden :] = 0
        elif kind == "holes":
            row[:] = random.integers(0, 2, length)
    if kind == "all":
        mask[0] = 0
    return mask


def feeds(inputs: list[Any], batch: int, new: int, past: int, padding: str, offset: int) -> dict[str, np.ndarray]:
    """Inputs of a text or image model by the names that exporters give them and their dims."""
    random = np.random.default_rng(100 * batch + new)
    made = {}
    for value in inputs:
        shape = [d if isinstance(d, int) else _size(str(d), batch, new, past) for d in value.shape]
        dtype = _NUMPY[value.type.removeprefix("tensor(").removesuffix(")")]
        if "attention_mask" in value.name:
            made[value.name] = padding_mask(padding, *shape, random).astype(dtype)
        elif "position" in value.name:
            start = offset * np.arange(1, batch + 1)[:, None]
            made[value.name] = (np.arange(past, past + new)[None] + start).astype(dtype)
        elif np.issubdtype(dtype, np.integer):
            made[value.name] = random.integers(0, 2 if "type" in value.name else 250, shape).astype(dtype)
        else:
            made[value.name] = random.standard_normal(shape).astype(dtype)
    return made


def _size(name: str, batch: int, new: int, past: int) -> int:
    if "batch" in name:
        return batch
    if "total" in name or ("past" in name and "+" in name):
        return past + new
    return past if "past" in name else new


def difference(fused: np.ndarray, exported: np.ndarray) -> float:
    """The largest difference over the largest exported number; infinite where NaN or a shape differs."""
    if fused.shape != exported.shape:
        return np.inf
    if not fused.size:
        return 0.0
    a, b = fused.astype(np.float64), exported.astype(np.float64)
    if not np.array_equal(np.isnan(a), np.isnan(b)):
        return np.inf
    known = ~np.isnan(b)
    return float(np.abs(a - b)[known].max(initial=0) / max(np.abs(b[known]).max(initial=0), 1e-9))


@pytest.mark.parametrize("record", RUNNABLE, ids=lambda r: r["file"].removesuffix(".onnx"))
def test_fused_means_what_was_exported(record: dict[str, Any]) -> None:
    exported = onnx.load(CORPUS / record["file"])
    build = pipeline.build(exported, pipeline.Options(target=Target("cpu")))
    before = session(exported.SerializeToString(), optimized=False)
    after = session(build.model.to_proto().SerializeToString(), optimized=True)
    names = [i.name for i in before.get_inputs()]
    has = {part: any(part in n for n in names) for part in ("past", "attention_mask", "position")}
    ran = 0
    for batch, new, past, padding, offset in itertools.product(
        (1, 2, 3), (1, 5, 13), (0, 1, 17) if has["past"] else (0,), PADDING, (0, 3)
    ):
        if (offset and not has["position"]) or (padding != "none" and not has["attention_mask"]):
            continue
        given = feeds(before.get_inputs(), batch, new, past, padding, offset)
        fused = after.run(None, given)
        try:
            wanted = before.run(None, given)
        except Exception:
            assert batch > 1 and record.get("ort_batch_gt1_error"), "only tables of batch 1 may stop the exported model"
            continue
        ran += 1
        for output, a, b in zip(before.get_outputs(), fused, wanted, strict=True):
            case = f"{output.name} at batch {batch}, {new} new, {past} cached, padding {padding}, offset {offset}"
            assert difference(a, b) <= TOLERANCE[record["dtype"]], case
    assert ran >= 3


@pytest.mark.parametrize("record", RECORDS, ids=lambda r: r["file"].removesuffix(".onnx"))
@pytest.mark.parametrize("target", ["cpu", "cuda:sm90"])
def test_every_block_is_found(record: dict[str, Any], target: str) -> None:
    build = pipeline.build(onnx.load(CORPUS / record["file"]), pipeline.Options(target=Target.parse(target)))
    assert build.blocks.get("attention", 0) == record["expected"]["attention"]
    assert build.blocks.get("rope", 0) == record["expected"].get("rope", 0)


@pytest.mark.parametrize("record", RUNNABLE, ids=lambda r: r["file"].removesuffix(".onnx"))
def test_no_mask_input_loses_its_reader(record: dict[str, Any]) -> None:
    build = pipeline.build(onnx.load(CORPUS / record["file"]), pipeline.Options(target=Target("cpu")))
    exported = onnx.load(CORPUS / record["file"])
    read = {name for node in exported.graph.node for name in node.input}
    for value in build.model.graph.inputs:
        if "mask" in value.name and value.name in read:
            assert value.outputs, f"nothing reads `{value.name}`"
