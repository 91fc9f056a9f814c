"""Fused against unfused models on the CPU provider at real widths, both with all optimizations of ONNX Runtime.

    python benchmarks/bench_cpu.py FOLDER [--factor 6] [--tokens 16,128] [--models bert,llama] [--csv FILE]

The models of the corpus have 64 features. Each is made wider first: every size that derives from the width (in weights
and in the constants that give shapes) is multiplied, and weights are drawn anew from a seed. A widened model that does
not run is reported, not timed. Both sessions take turns; with one thread the time is that of the process, which other
load on the machine disturbs little.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

#: Sizes that derive from the corpus's width of 64: half and whole head size, key-value heads, MLP, packed products.
SIZES = (8, 16, 32, 64, 128, 192, 256)
#: Inputs of these ops (by index) that give shapes or bounds.
SHAPE_INPUTS = {"Reshape": (1,), "Expand": (1,), "Split": (1,), "Slice": (1, 2), "ConstantOfShape": (0,), "Tile": ()}
FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16)


def widen(proto: onnx.ModelProto, factor: int, seed: int = 0) -> onnx.ModelProto:
    """The model with every width multiplied, and seeded random weights."""
    wide = onnx.ModelProto()
    wide.CopyFrom(proto)
    rng = np.random.default_rng(seed)
    shape_values = _shape_values(wide.graph)
    kernels = {n.input[1] for n in wide.graph.node if n.op_type == "Conv"}
    for tensor, name in _tensors(wide.graph):
        tensor.CopyFrom(_wider(tensor, name in shape_values, name in kernels, factor, rng))
    del wide.graph.value_info[:]
    for value in (*(i for i in wide.graph.input if i.name.startswith("past")), *wide.graph.output):
        for dim in value.type.tensor_type.shape.dim[1:]:
            if dim.dim_value in SIZES and value.type.tensor_type.elem_type in FLOATS:
                dim.dim_value *= factor
    for node in wide.graph.node:
        for attribute in node.attribute:
            if attribute.name in ("split", "shape"):
                scaled = [factor * i if i in SIZES else i for i in attribute.ints]
                del attribute.ints[:]
                attribute.ints.extend(scaled)
    return wide


def _tensors(graph: onnx.GraphProto) -> list[tuple[TensorProto, str]]:
    found = [(t, t.name) for t in graph.initializer]
    for node in graph.node:
        if node.op_type == "Constant":
            found.extend((a.t, node.output[0]) for a in node.attribute if a.name == "value")
    return found


def _shape_values(graph: onnx.GraphProto) -> set[str]:
    """Constants that end in a shape or in bounds, directly or through Concat, Unsqueeze and the like."""
    producers = {o: n for n in graph.node for o in n.output}
    found: set[str] = set()
    todo = [n.input[i] for n in graph.node for i in SHAPE_INPUTS.get(n.op_type, ()) if i < len(n.input)]
    while todo:
        name = todo.pop()
        if name in found:
            continue
        found.add(name)
        maker = producers.get(name)
        if maker is not None and maker.op_type in ("Concat", "Unsqueeze", "Cast", "Identity", "Reshape", "Where"):
            todo.extend(maker.input)
    return found


def _wider(
    tensor: TensorProto, is_shape: bool, is_kernel: bool, factor: int, rng: np.random.Generator
) -> TensorProto:
    array = numpy_helper.to_array(tensor)
    if tensor.data_type in (TensorProto.INT64, TensorProto.INT32):
        if is_shape and array.size <= 8:
            array = np.where(np.isin(array, SIZES), array * factor, array).astype(array.dtype)
        return numpy_helper.from_array(array, tensor.name)
    if tensor.data_type not in FLOATS or array.size < 8:
        return tensor
    scaled = array.ndim if not is_kernel else 2  # channels, not the window
    shape = [d * factor if d in SIZES and i < scaled else d for i, d in enumerate(array.shape)]
    if shape == list(array.shape):
        return tensor
    if array.ndim == 1 or math.prod(shape) == max(shape):
        # Vectors: keep the values (norm scales near one, biases, frequencies) by repeating them.
        values = np.resize(array, shape)
    else:
        values = rng.standard_normal(shape) / math.sqrt(max(shape[-2:]))
    return numpy_helper.from_array(np.ascontiguousarray(values.astype(array.dtype)), tensor.name)


def feeds_for(proto: onnx.ModelProto, stored: dict[str, np.ndarray], tokens: int, factor: int) -> dict[str, np.ndarray]:
    """Inputs for one sequence of `tokens` tokens (with a past: as many cached ones), after the stored ones."""
    rng = np.random.default_rng(1)
    past = any(v.ndim == 4 and k.startswith("past") for k, v in stored.items())
    sizes = {7: tokens, 10: tokens + 3, 3: 3} if past else {7: tokens}
    feeds = {}
    for value in proto.graph.input:
        have = stored.get(value.name)
        if have is None:
            continue
        float_input = np.issubdtype(have.dtype, np.floating)
        shape = [1, *have.shape[1:]] if have.ndim > 1 else list(have.shape)
        for axis in range(1, have.ndim):
            shape[axis] = sizes.get(have.shape[axis], have.shape[axis])
            if float_input and axis == have.ndim - 1 and past and shape[axis] in SIZES:
                shape[axis] *= factor
        if float_input:
            feeds[value.name] = rng.standard_normal(shape).astype(have.dtype)
        elif "mask" in value.name:
            feeds[value.name] = np.ones(shape, have.dtype)
        elif "position" in value.name:
            steps = np.arange(shape[-1]) + (tokens if past else 0)
            feeds[value.name] = np.broadcast_to(steps, shape).astype(have.dtype)
        elif have.max(initial=0) > 1:
            feeds[value.name] = rng.integers(0, 200, shape).astype(have.dtype)
        else:
            feeds[value.name] = np.resize(have, shape)
    return feeds


def race(sessions: dict[str, Any], feeds: dict[str, np.ndarray], seconds: float, threads: int) -> dict[str, float]:
    """Milliseconds per run (the fastest fifth), measured in turns."""
    clock = time.process_time if threads == 1 else time.perf_counter
    times: dict[str, list[float]] = {name: [] for name in sessions}
    for session in sessions.values():
        session.run(None, feeds)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times[next(iter(times))]) < 7:
        for name, session in sessions.items():
            started = clock()
            session.run(None, feeds)
            times[name].append(clock() - started)
    return {name: 1e3 * float(np.percentile(values, 20)) for name, values in times.items()}


def agrees(unfused: list[np.ndarray], fused: list[np.ndarray], half: bool) -> bool:
    limit = 3e-2 if half else 1e-3
    for a, b in zip(unfused, fused, strict=True):
        wide, difference = a.astype(np.float64), a.astype(np.float64) - b.astype(np.float64)
        scale = max(float(np.max(np.abs(np.nan_to_num(wide)), initial=0)), 1e-20)
        if not float(np.max(np.abs(np.nan_to_num(difference)), initial=0)) <= limit * scale:
            return False
    return True


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--factor", type=int, default=6)
    parser.add_argument("--tokens", default="16,128")
    parser.add_argument("--models", default="")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=0.6)
    parser.add_argument("--csv", type=Path)
    options = parser.parse_args(arguments)
    import onnxfuse
    from onnxfuse.runtime.session import ort

    records = json.loads((options.folder / "manifest.json").read_text())["models"]
    names = [n for n in options.models.split(",") if n]
    rows: list[dict[str, Any]] = []
    skipped: list[str] = []
    for record in records:
        if (names and not any(n in record["file"] for n in names)) or record["dtype"] == "bfloat16":
            continue
        archive = np.load(options.folder / record["npz"])
        stored = {k.split("/", 2)[2]: archive[k] for k in archive.files if k.startswith("set0/in/")}
        try:
            wide = widen(onnx.load(options.folder / record["file"]), options.factor)
            settings = ort().SessionOptions()
            settings.intra_op_num_threads = options.threads
            settings.log_severity_level = 4
            unfused = ort().InferenceSession(wide.SerializeToString(), settings, providers=["CPUExecutionProvider"])
            unfused.run(None, feeds_for(wide, stored, 16, options.factor))
        except Exception as error:
            skipped.append(f"{record['file']}: {str(error).splitlines()[0][-110:]}")
            continue
        result = onnxfuse.optimize(wide, target="cpu", verify=False)
        fused = onnxfuse.session(result.model, intra_op_num_threads=options.threads)
        for tokens in (int(t) for t in options.tokens.split(",")):
            feeds = feeds_for(wide, stored, tokens, options.factor)
            try:
                same = agrees(unfused.run(None, feeds), fused.run(None, feeds), record["dtype"] == "float16")
            except Exception as error:
                skipped.append(f"{record['file']} at {tokens}: {str(error).splitlines()[0][-110:]}")
                continue
            ms = race({"unfused": unfused, "fused": fused}, feeds, options.seconds, options.threads)
            row = {"model": record["file"], "tokens": tokens, "unfused_ms": round(ms["unfused"], 3),
                   "fused_ms": round(ms["fused"], 3), "ratio": round(ms["fused"] / ms["unfused"], 3), "same": same}
            rows.append(row)
            print(f"{row['model']:44} {tokens:4} tokens  {row['unfused_ms']:8.2f} -> {row['fused_ms']:8.2f} ms  "
                  f"x{row['ratio']:.3f}{'' if same else '  DIFFERENT OUTPUTS'}", flush=True)
    for line in skipped:
        print(f"not timed: {line}")
    ratios = [r["ratio"] for r in rows if r["same"]]
    if ratios:
        print(f"{len(ratios)} timings: ratio fused/unfused median {np.median(ratios):.3f}, best {min(ratios):.3f}, "
              f"worst {max(ratios):.3f}, above 1.05: {sum(r > 1.05 for r in ratios)}")
    if options.csv and rows:
        with options.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    return 0 if ratios and max(ratios) <= 1.05 else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
