"""The optimizers that coverage.py compares, and what each makes of one model. Run as a script: the process they run in.

An optimizer may hang or crash, and so may the runtime on what it wrote. So each works in a child process, which takes
one JSON request a line on its standard input, and is ended when it does not answer in time.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx

#: Largest difference from the stored outputs, relative to the largest of them.
TOLERANCE = {"float32": 2e-4, "float16": 2e-2, "bfloat16": 2e-2}
#: Seconds for one tool on one file, with running what it wrote.
LIMIT_S = 90.0
OURS = {"onnxfuse (cpu)": "cpu", "onnxfuse (cuda)": "cuda"}

#: `model_type` of onnxruntime.transformers by family (the start of the file name); `bert` for all others.
MODEL_TYPES = {
    "bart": "bart", "whisper": "bart", "clip": "clip", "siglip": "clip", "vit": "vit",
    "gpt2": "gpt2", "nanogpt": "gpt2", "opt": "gpt2", "bloom": "gpt2", "gpt_neox": "gpt_neox",
    "phi-": "phi", "phi3": "gpt2", "qwen3": "qwen3",
    "qwen2": "gpt2", "llama": "gpt2", "meta_llama": "gpt2", "mistral": "gpt2", "gemma": "gpt2", "stablelm": "gpt2",
    "t5": "t5",
}  # fmt: skip


def _ort_python(source: Path, destination: Path, **options: Any) -> None:
    from onnxruntime.transformers import optimizer

    kind = next((kind for family, kind in MODEL_TYPES.items() if source.name.startswith(family)), "bert")
    made = optimizer.optimize_model(str(source), model_type=kind, num_heads=0, hidden_size=0, use_gpu=False, **options)
    made.save_model_to_file(str(destination))


def _ort_session(source: Path, destination: Path) -> None:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.optimized_model_filepath = str(destination)
    options.log_severity_level = 4
    onnxruntime.InferenceSession(str(source), options, providers=["CPUExecutionProvider"])


def _ort_fusions(source: Path, destination: Path) -> None:
    import onnx_ir
    from onnxscript import optimizer
    from onnxscript.rewriter import ort_fusions

    model = onnx_ir.load(source)
    optimizer.optimize(model)
    model, _ = ort_fusions.optimize_for_ort(model)
    onnx_ir.save(model, destination)


#: The other tools: each reads a file and writes one.
PEERS: dict[str, Callable[[Path, Path], None]] = {
    "onnxruntime.transformers": _ort_python,
    "onnxruntime.transformers, opt_level 0": lambda source, destination: _ort_python(source, destination, opt_level=0),
    "ORT session, ALL": _ort_session,
    "onnxscript ort_fusions": _ort_fusions,
}
TOOLS = (*OURS, *PEERS)


def evaluate(tool: str, folder: Path, record: dict[str, Any]) -> dict[str, Any]:
    """One tool on one model: what it finds, and whether the result still gives the stored outputs.

    Returns:
        ``state``: ``right``, ``structure`` (the CPU provider cannot run it, so only the graph was looked at),
        ``wrong`` or ``failed`` (the tool raised); ``error`` in words; ``blocks`` (for us after fuse), ``written``
        (blocks of the file that was written), ``nodes`` [before, after], ``seconds``, ``apart`` (for us: what lowering
        took apart, and why).
    """
    source = folder / record["file"]
    row: dict[str, Any] = {"tool": tool, "file": record["file"], "state": "failed", "error": "", "blocks": {},
                           "written": {}, "nodes": [0, 0], "seconds": 0.0, "apart": []}
    with tempfile.TemporaryDirectory(prefix="coverage") as temporary:
        destination = Path(temporary) / source.name
        try:
            started = time.perf_counter()
            report = _optimize(tool, source, destination)
            row["seconds"] = round(time.perf_counter() - started, 4)
            written = onnx.load(destination)
            row["nodes"] = [count_nodes(onnx.load(source).graph), count_nodes(written.graph)]
            row["written"] = _either(_blocks(written), report["blocks_lowered"]) if report else _blocks(written)
            row["blocks"] = report["blocks"] if report else row["written"]
            row["apart"] = report["lowering"].get("taken_apart", []) if report else []
        except Exception as error:
            row["error"] = _first_line(error)
            return row
        row["state"], row["error"] = _judge(tool, source, written, folder / record["npz"], record["dtype"])
    return row


def _optimize(tool: str, source: Path, destination: Path) -> dict[str, Any]:
    if tool not in OURS:
        PEERS[tool](source, destination)
        return {}
    import onnxfuse

    return onnxfuse.optimize(source, destination, target=OURS[tool], verify=False).report


def _blocks(proto: onnx.ModelProto) -> dict[str, Any]:
    from onnxfuse import blocks
    from onnxfuse.graph import shapes
    from onnxfuse.graph.model import Model

    model = Model(proto)
    shapes.infer(model)
    return blocks.count(model, bias_behind=True)


def _either(read: dict[str, Any], reported: dict[str, Any]) -> dict[str, Any]:
    """The larger of both counts: only the report knows what was packed, only the other counts biases behind."""
    key = "shared_input_matmul_groups"
    larger = {k: max(read.get(k, 0), reported.get(k, 0)) for k in {*read, *reported} - {key}}
    return {**larger, key: {**read.get(key, {}), **{str(k): n for k, n in reported.get(key, {}).items()}}}


def _judge(tool: str, source: Path, written: onnx.ModelProto, stored: Path, dtype: str) -> tuple[str, str]:
    try:
        error = difference(written, stored, dtype)
    except Exception as failure:
        text = _first_line(failure)
        no_kernel = "NOT_IMPLEMENTED" in text or "Could not find an implementation" in text
        return ("structure" if dtype == "bfloat16" or (no_kernel and OURS.get(tool) == "cuda") else "wrong"), text
    if error > 1.0:
        # Quantized models differ between releases and instruction sets: as far as the exported file itself does here.
        error /= max(difference(onnx.load(source), stored, dtype), 1.0) * 1.05
    return ("right" if error <= 1.0 else "wrong"), f"{error:.3g} of the tolerance"


def difference(model: onnx.ModelProto, stored: Path, dtype: str) -> float:
    """Run a model on both stored input sets; the worst error over the tolerance (≤ 1: right)."""
    import onnxfuse
    from onnxfuse.runtime import oracle

    worst = 0.0
    with np.load(stored) as data:
        for index in range(2):
            feeds = {k.split("/", 2)[2]: data[k] for k in data.files if k.startswith(f"set{index}/in/")}
            reference = {k.split("/", 2)[2]: data[k] for k in data.files if k.startswith(f"set{index}/out/")}
            if not reference:
                continue
            if dtype == "bfloat16":  # the CPU provider has too few kernels for it
                outputs = oracle.runner(model, "float32").run(oracle.cast_feeds(feeds, "float32"))
            else:
                session = onnxfuse.session(model)
                outputs = dict(zip(reference, session.run(list(reference), feeds), strict=True))
            worst = max(worst, *(_error(outputs[name], wanted) for name, wanted in reference.items()))
    return worst / TOLERANCE.get(dtype, 2e-4)


def _error(got: Any, reference: np.ndarray) -> float:
    a, b = np.asarray(got, np.float64), np.asarray(reference, np.float64)
    if a.shape != b.shape or not np.array_equal(np.isnan(a), np.isnan(b)):
        return float("inf")
    largest = max(float(np.max(np.abs(b[np.isfinite(b)]), initial=0.0)), 1e-30)
    return float(np.max(np.abs(np.nan_to_num(a - b)), initial=0.0)) / largest


def count_nodes(graph: onnx.GraphProto) -> int:
    """Nodes with those of subgraphs, without Constants."""
    inner = (a.g for n in graph.node for a in n.attribute if a.type == onnx.AttributeProto.GRAPH)
    return sum(n.op_type != "Constant" for n in graph.node) + sum(count_nodes(g) for g in inner)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".split("\n")[0].replace(tempfile.gettempdir(), "")[:160]


class Worker:
    """A child process that evaluates, started when it is first asked and again after it was lost."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def evaluate(self, tool: str, folder: Path, record: dict[str, Any], limit_s: float = LIMIT_S) -> dict[str, Any]:
        """`evaluate` in the child; a crash or a hang is the state ``failed``."""
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                text=True,
            )
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps([tool, str(folder), record]) + "\n")
        process.stdin.flush()
        ready, _, _ = select.select([process.stdout], [], [], limit_s)
        line = process.stdout.readline() if ready else ""
        if line:
            return json.loads(line)
        process.kill()
        process.wait()
        self._process = None
        error = f"crashed with {process.returncode}" if ready else f"no answer in {limit_s:g} s"
        return {"tool": tool, "file": record["file"], "state": "failed", "error": error, "blocks": {}, "written": {},
                "nodes": [0, 0], "seconds": limit_s, "apart": []}

    def close(self) -> None:
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process.wait()
            self._process = None


def serve() -> None:
    """Answer requests until standard input ends. Tools print what they like: it goes to standard error."""
    # onnxruntime.transformers imports torch, which need not be installed with the rest: a folder that has it.
    sys.path += filter(None, [os.environ.get("COVERAGE_TORCH")])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        tool, folder, record = json.loads(line)
        answers.write(json.dumps(evaluate(tool, Path(folder), record)) + "\n")
        answers.flush()


if __name__ == "__main__":
    serve()
