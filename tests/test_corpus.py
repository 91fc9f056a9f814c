"""Every model of a corpus goes through `optimize` for the CPU and comes out right.

The corpus is the folder that ONNXFUSE_CORPUS names, else `models/` of this project: `NAME.onnx`, `NAME.npz` with two
input sets and their outputs, and `manifest.json` with what is in each source model.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest

import onnxfuse
from onnxfuse.errors import ModelError
from onnxfuse.runtime import oracle
from onnxfuse.runtime.session import Runner

ROOT = Path(__file__).parent.parent
CORPUS = Path(os.environ.get("ONNXFUSE_CORPUS") or ROOT / "models").resolve()
MANIFEST = {r["file"]: r for r in json.loads((CORPUS / "manifest.json").read_text())["models"]}

#: Largest difference, relative to the largest reference value.
TOLERANCE = {"float32": 2e-4, "float16": 2e-2, "bfloat16": 2e-2}
#: Models with quantized activations or weights.
QUANTIZED_TOLERANCE = 1e-3

#: How much of each kind of block must be found, over the models of the corpus together (blocks that were native ops
#: already count as kept).
FOUND = {
    "rmsnorm": 0.98, "layernorm": 0.98, "skip_rmsnorm": 0.95, "skip_layernorm": 0.95, "qk_norm_rmsnorm": 0.98,
    "act_gelu_erf": 0.98, "act_gelu_tanh": 0.98, "act_quick_gelu": 0.98, "act_silu": 0.98, "act_relu": 0.98,
    "swiglu": 0.98, "geglu": 0.98, "matmul": 0.98, "matmul_bias": 0.98, "matmul_bias_act_gelu_erf": 0.98,
    "matmul_bias_act_gelu_tanh": 0.98, "matmul_bias_act_quick_gelu": 0.98, "matmul_bias_act_relu": 0.98,
    "qkv_shared_input_groups": 0.95, "rope": 0.98, "attention": 0.98,
}  # fmt: skip


def fused_by_others(record: dict[str, Any]) -> bool:
    """Models that come out of another fuser: their blocks are contrib ops already."""
    return bool(record.get("already_fused"))



@pytest.mark.corpus
@pytest.mark.parametrize("name", sorted(MANIFEST))
def test_model(name: str, tmp_path: Path) -> None:
    record = MANIFEST[name]
    source, target = CORPUS / name, tmp_path / name
    result = onnxfuse.optimize(source, target, target="cpu")
    report = result.report
    assert report["verify"]["status"] in ("passed", "structure-only")
    assert not report["reverted"], "a fusion was wrong"
    assert target.stat().st_size <= 1.05 * source.stat().st_size + 4096
    assert report["nodes"]["after"] > 0 and not any(op.startswith("onnxfuse.std::") for op in report["ops_after"])
    onnx.shape_inference.infer_shapes(onnx.load(target))
    if record.get("npz"):
        _compare_with_stored(record, CORPUS / record["npz"], source, target)


def _compare_with_stored(record: dict[str, Any], archive: Path, source: Path, fused: Path) -> None:
    dtype = record["dtype"]
    quantized = any("Quant" in op or "NBits" in op for op in record.get("op_histogram", record.get("native_ops", {})))
    tolerance = QUANTIZED_TOLERANCE if quantized else TOLERANCE[dtype]
    proto = onnx.load(fused)
    try:
        runner, widened = Runner(proto, level="all"), False
    except ModelError:
        assert dtype == "bfloat16", "only bfloat16 has too few kernels on the CPU"
        runner, widened = oracle.runner(proto, "float32"), True
    # int8 products differ between releases and instruction sets: such a model's own difference here is allowed.
    original = Runner(onnx.load(source), level="all") if quantized else None
    with np.load(archive) as stored:
        for index in (0, 1):
            start = f"set{index}/in/"
            feeds = {k.removeprefix(start): stored[k] for k in stored.files if k.startswith(start)}
            got = runner.run(oracle.cast_feeds(feeds, "float32") if widened else feeds)
            own = original.run(feeds) if original is not None else {}
            for key in stored.files:
                output = key.removeprefix(f"set{index}/out/")
                if key == output:
                    continue
                allowed = tolerance + (_error(own[output], stored[key]) if own else 0.0)
                assert _error(got[output], stored[key]) <= allowed, f"{key} of {fused.name}"


def _error(got: np.ndarray, reference: np.ndarray) -> float:
    """Largest difference over largest reference value; infinite where only one of both is NaN."""
    if reference.dtype.kind == "V":
        reference = reference.view(ml_dtypes.bfloat16)
    a, b = got.astype(np.float64), reference.astype(np.float64)
    if a.shape != b.shape or not np.array_equal(np.isnan(a), np.isnan(b)):
        return float("inf")
    finite = np.isfinite(b)
    largest = float(np.max(np.abs(b), where=finite, initial=0.0)) or 1.0
    return float(np.max(np.abs(a - b), where=finite, initial=0.0)) / largest


@pytest.mark.corpus
def test_blocks_are_found() -> None:
    """Shares over the whole corpus; what a model misses is printed."""
    expected: dict[str, int] = dict.fromkeys(FOUND, 0)
    found: dict[str, int] = dict.fromkeys(FOUND, 0)
    missed: dict[str, list[str]] = {key: [] for key in FOUND}
    for name, record in sorted(MANIFEST.items()):
        if fused_by_others(record):
            continue
        blocks = onnxfuse.optimize(CORPUS / name, target="cpu", verify=False, stop_after="fuse").report["blocks"]
        for key in FOUND:
            want = record["expected"].get(key, 0)
            got = min(blocks.get(key, 0), want)
            expected[key] += want
            found[key] += got
            if got < want:
                missed[key].append(f"{name} {got}/{want}")
    shares = {k: found[k] / expected[k] for k in FOUND if expected[k]}
    short = {k: (round(s, 3), missed[k]) for k, s in shares.items() if s < FOUND[k]}
    assert not short
