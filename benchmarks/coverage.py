"""Which blocks of the model corpus are found, and are still right, against what the manifest says is in the models.

    python benchmarks/coverage.py FOLDER [--target cpu] [--models llama,bert] [--missing] [--json FILE]

Shares are over blocks that are not one op in the exported file already; files fused already (genai) are left out. A
model whose outputs no longer match the stored ones (relative to the largest reference value: 2e-4 float32, 2e-2 half,
1e-3 quantized; or as far as the exported file itself matches them here) counts as nothing found.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import onnx

TOLERANCE = {"float32": 2e-4, "float16": 2e-2, "bfloat16": 2e-2}
#: Dtypes that ONNX Runtime's CPU provider cannot compute in; such models run through the float32 oracle instead.
NOT_ON_CPU = ("bfloat16",)
#: What is reported, as sums of manifest keys.
KINDS: dict[str, tuple[str, ...]] = {
    "rmsnorm": ("rmsnorm",),
    "layernorm": ("layernorm",),
    "skip+norm": ("skip_rmsnorm", "skip_layernorm"),
    "gelu": ("act_gelu_erf", "act_gelu_tanh", "act_quick_gelu"),
    "silu": ("act_silu",),
    "matmul+bias": ("matmul_bias",),
    "matmul+bias+act": (
        "matmul_bias_act_gelu_erf", "matmul_bias_act_gelu_tanh", "matmul_bias_act_quick_gelu", "matmul_bias_act_relu",
        "matmul_bias_act_tanh",
    ),
    "matmul+act": ("matmul_act_silu", "matmul_act_gelu_tanh", "matmul_act_relu"),
    "swiglu/geglu": ("swiglu", "geglu", "reglu"),
    "qkv packed": ("qkv_shared_input_groups",),
    "rope": ("rope",),
    "attention": ("attention",),
}  # fmt: skip
#: Native ops of the exported file that already are the block.
_NATIVE = {
    "rmsnorm": ("RMSNormalization", "SimplifiedLayerNormalization", "com.microsoft::SkipSimplifiedLayerNormalization"),
    "skip_rmsnorm": ("com.microsoft::SkipSimplifiedLayerNormalization",),
    "layernorm": ("LayerNormalization",),
    "act_gelu_erf": ("Gelu",),
    "act_gelu_tanh": ("Gelu",),
    "act_silu": ("Swish",),
    "matmul_bias": ("Gemm",),
    "rope": ("RotaryEmbedding",),
    "attention": ("Attention", "com.microsoft::GroupQueryAttention", "com.microsoft::MultiHeadAttention"),
}


def native(record: dict[str, Any], key: str) -> int:
    """How many blocks of `key` are one op in the exported file."""
    return sum(record["native_ops"].get(op, 0) for op in _NATIVE.get(key, ()))


def found_of(blocks: dict[str, Any], key: str) -> int:
    """What was counted for a manifest key. A product whose bias came from a norm's shift counts for the key without."""
    found = int(blocks.get(key, 0))
    if key.startswith("matmul_act_"):
        found += int(blocks.get(key.replace("matmul_", "matmul_bias_", 1), 0))
    return found


def matches(outputs: dict[str, np.ndarray], reference: dict[str, np.ndarray], dtype: str) -> float:
    """The worst error relative to the largest reference value, over the tolerance (≤ 1: right)."""
    worst = 0.0
    for name, wanted in reference.items():
        got = np.asarray(outputs[name], np.float64)
        wanted = np.asarray(wanted, np.float64)
        scale = max(float(np.max(np.abs(wanted[np.isfinite(wanted)]), initial=0.0)), 1e-30)
        if got.shape != wanted.shape or not np.array_equal(np.isnan(got), np.isnan(wanted)):
            return float("inf")
        worst = max(worst, float(np.max(np.abs(np.nan_to_num(got - wanted)), initial=0.0)) / scale)
    return worst / TOLERANCE.get(dtype, 2e-4)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--target", default="cpu")
    parser.add_argument("--models", default="", help="only files whose name contains one of these (comma-separated)")
    parser.add_argument("--missing", action="store_true", help="list the blocks that were not found, by file")
    parser.add_argument("--json", type=Path, help="write all counts to a file")
    options = parser.parse_args(arguments)
    records = json.loads((options.folder / "manifest.json").read_text())["models"]
    wanted = [w for w in options.models.split(",") if w]
    records = [r for r in records if not wanted or any(w in r["file"] for w in wanted)]
    totals: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    rows: list[dict[str, Any]] = []
    for record in records:
        row = evaluate(options.folder, record, options.target)
        rows.append(row)
        for kind, keys in KINDS.items() if "genai" not in record["file"] else ():
            missing = []
            for key in keys:
                expected = int(record["expected"].get(key, 0))
                already = min(native(record, key), expected)
                if expected == already:
                    continue
                found = min(found_of(row["blocks"], key), expected) - already
                totals[kind][0] += expected - already
                totals[kind][1] += max(found, 0)
                totals[kind][2] += max(found, 0) if row["right"] else 0
                if found < expected - already:
                    missing.append(f"{key} {found}/{expected - already}")
            if missing and options.missing:
                print(f"  {record['file']}: {', '.join(missing)}")
        state = "right" if row["right"] else f"WRONG ({row['error']})"
        before, after = row["nodes"]
        print(f"{record['file']}: {state}, {before} -> {after} nodes, {row['seconds']:.2f} s", flush=True)
    print(f"\n{'kind':18} {'expected':>8} {'found':>6} {'and right':>9}  share")
    for kind, (expected, found, right) in totals.items():
        print(f"{kind:18} {expected:8} {found:6} {right:9}  {100 * right / expected:.1f}%")
    if options.json:
        options.json.write_text(json.dumps({"rows": rows, "totals": totals}, indent=1))
    return 0 if all(row["right"] for row in rows) else 1


def evaluate(folder: Path, record: dict[str, Any], target: str) -> dict[str, Any]:
    """Optimize one model without verification and compare its outputs with the stored ones."""
    import onnxfuse

    row: dict[str, Any] = {"file": record["file"], "blocks": {}, "blocks_lowered": {}, "right": False, "error": "",
                           "nodes": [0, 0], "seconds": 0.0}
    started = time.perf_counter()
    try:
        result = onnxfuse.optimize(folder / record["file"], target=target, verify=False)
        row["seconds"] = time.perf_counter() - started
        report = result.report
        row.update(blocks=report["blocks"], blocks_lowered=report["blocks_lowered"],
                   nodes=[report["nodes"]["before"], report["nodes"]["after"]])
        error = check(result.model, folder / record["npz"], record["dtype"])
        if error > 1.0:
            original = check(onnx.load(folder / record["file"]), folder / record["npz"], record["dtype"])
            row["right"] = error <= 1.05 * original
        else:
            row["right"] = True
        row["error"] = f"{error:.3g} x tolerance"
    except Exception as error:
        row["error"] = f"{type(error).__name__}: {error}".split("\n")[0][:200]
    return row


def check(model: onnx.ModelProto, stored: Path, dtype: str) -> float:
    """Run the model on the stored inputs; the error relative to the tolerance (≤ 1: right)."""
    import onnxfuse
    from onnxfuse.runtime import oracle

    data = np.load(stored)
    worst = 0.0
    for index in range(2):
        feeds = {k.split("/", 2)[2]: data[k] for k in data.files if k.startswith(f"set{index}/in/")}
        reference = {k.split("/", 2)[2]: data[k] for k in data.files if k.startswith(f"set{index}/out/")}
        if not reference:
            continue
        if dtype in NOT_ON_CPU:
            outputs = oracle.runner(model, "float32").run(oracle.cast_feeds(feeds, "float32"))
        else:
            session = onnxfuse.session(model)
            outputs = dict(zip(reference, session.run(list(reference), feeds), strict=True))
        worst = max(worst, matches(outputs, reference, dtype))
    return worst


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
