"""A whole model on a GPU: a Llama of Llama-3-8B's layer shape, exported by PyTorch, before and after onnxfuse.

    python benchmarks/bench_llama.py --ablate --results benchmarks/results/llama.csv

Exports a randomly initialised Llama (hidden 4096, ffn 14336, 32/8 heads, float16, no cache) with PyTorch's dynamo
exporter, optimizes it for CUDA, checks the logits of both graphs against a float32 run of the same weights in PyTorch,
then times them in ONNX Runtime with inputs and outputs bound on the device and one CUDA graph per token count.
Reported: median and 20/80 % quantiles in milliseconds a run, the roofline floor (weight bytes over the copy bandwidth
measured here, or flops over the matrix rate measured here, whichever is larger), and the error of each graph.
`--ablate` also times the model without one fusion at a time. `--prepare` stops before the timing, `--reuse` takes the
models of an earlier run. With `ONNXFUSE_TUNING` set the rows are called tuned. Exits with 1 if a result is wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import llama_rows
import numpy as np
from llama_rows import BASELINE, OURS, TUNED, WITHOUT, Row
from result_rows import provenance

ROOT = Path(__file__).resolve().parent.parent
COMPILE_SECONDS = 40.0  # what a first torch.compile of the model takes


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--opset", type=int, default=18)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 16, 512, 2048])
    parser.add_argument("--seconds", type=float, default=0.3, help="per variant and token count")
    parser.add_argument("--work", type=Path, default=Path("/tmp/bench_llama"))
    parser.add_argument("--results", type=Path, metavar="CSV", help="file to append the rows to")
    parser.add_argument("--commit", help="commit to record, where git is not at hand")
    parser.add_argument("--optimize-args", default="", help="more options for `onnxfuse optimize`")
    parser.add_argument("--ablate", nargs="*", choices=list(llama_rows.ABLATIONS), metavar="FUSION",
                        help="also without these fusions, one at a time (all, if none is named)")
    parser.add_argument("--peers", choices=("none", "eager", "torch"), default="none",
                        help="also PyTorch eager, or eager and torch.compile, as CUDA graphs")
    parser.add_argument("--deadline", type=float, metavar="SECONDS",
                        help="from the start of this script; begins no torch.compile that would end later")
    parser.add_argument("--prepare", action="store_true", help="export and optimize only")
    parser.add_argument("--reuse", action="store_true", help="use the models that are in --work already")
    found = parser.parse_args(argv)
    if found.ablate == []:
        found.ablate = list(llama_rows.ABLATIONS)
    return found


def models(work: Path, ablations: Sequence[str]) -> dict[str, tuple[Path, list[str]]]:
    """By variant: the file to write, and the rules that must not fire."""
    found: dict[str, tuple[Path, list[str]]] = {OURS: (work / "onnxfuse.onnx", [])}
    for name in ablations:
        found[WITHOUT + name] = (work / f"without-{name}.onnx", llama_rows.rules_of(name, ROOT / "rules"))
    return found


def optimize_all(base: Path, wanted: dict[str, tuple[Path, list[str]]], options: argparse.Namespace) -> None:
    """Optimizes side by side, each in its own process.

    Raises:
        subprocess.CalledProcessError: one of them failed.
    """
    started = time.perf_counter()
    processes = {}
    for name, (out, disabled) in wanted.items():
        if options.reuse and out.exists():
            continue
        command = [sys.executable, "-m", "onnxfuse", "optimize", str(base), "-o", str(out), "--target", "cuda",
                   "--no-verify", "--quiet", "--report", str(report_of(out))]  # fmt: skip
        command += options.optimize_args.split()
        for rule in disabled:
            command += ["--disable", rule]
        processes[name] = subprocess.Popen(command)
    for name, process in processes.items():
        if process.wait() != 0:
            raise subprocess.CalledProcessError(process.returncode, process.args)
        nodes = json.loads(report_of(wanted[name][0]).read_text(encoding="utf-8"))["nodes"]
        print(f"{time.perf_counter() - started:5.0f}s {name}: {nodes['before']} -> {nodes['after']} nodes", flush=True)


def report_of(out: Path) -> Path:
    return out.with_suffix(".json")


def node_counts(wanted: dict[str, tuple[Path, list[str]]]) -> dict[str, int]:
    counts = {}
    for name, (out, _) in wanted.items():
        nodes = json.loads(report_of(out).read_text(encoding="utf-8"))["nodes"]
        counts[name], counts[BASELINE] = nodes["after"], nodes["before"]
    return counts


def main(argv: Sequence[str] | None = None) -> int:
    started = time.perf_counter()
    options = arguments(argv)
    options.work.mkdir(parents=True, exist_ok=True)
    import llama_gpu as gpu

    import onnxfuse

    def note(text: str) -> None:
        print(f"{time.perf_counter() - started:5.0f}s {text}", flush=True)

    model = gpu.build_model(options.layers, options.vocab)
    base = options.work / "base.onnx"
    if not (options.reuse and base.exists()):
        gpu.export(model, base, options.opset)
        note(f"exported {base}")
    wanted = models(options.work, options.ablate or ())
    optimize_all(base, wanted, options)
    if options.prepare:
        return 0
    nodes, failures = node_counts(wanted), 0
    tuned = bool(os.environ.get("ONNXFUSE_TUNING"))
    sessions = {}
    for name, path in {BASELINE: base, **{name: out for name, (out, _) in wanted.items()}}.items():
        library = None if name == BASELINE else str(onnxfuse.library_path())
        shown = TUNED if tuned and name == OURS else name
        try:
            opened, captured = gpu.open_session(path, library, options.vocab)
        except Exception as error:  # ONNX Runtime raises its own kinds; the others are still worth their time
            note(f"FAILED: {name}: {str(error)[:300]}")
            failures += 1
            continue
        sessions[shown if captured else f"{shown}, launched"] = (name, opened)
    bandwidth, rate = gpu.ceilings()
    note(f"{len(sessions)} sessions; copy {bandwidth / 1e12:.2f} TB/s, float16 products {rate / 1e12:.0f} TFLOP/s")

    rng = np.random.default_rng(0)
    head, compile_seconds = _head(options, gpu.versions()), COMPILE_SECONDS
    rows: list[Row] = []
    for index, tokens in enumerate(options.tokens):
        ids = rng.integers(0, options.vocab, (1, tokens), dtype=np.int64)
        half, oracle = gpu.results_of(model, ids)
        variants = {name: gpu.Bound(opened, ids, options.vocab, index + 1) for name, (_, opened) in sessions.items()}
        if options.peers != "none":
            variants["torch-eager"] = gpu.eager(model, ids)
        begin = time.perf_counter()
        if options.peers == "torch" and (options.deadline is None or
                                         begin - started + compile_seconds < options.deadline):  # fmt: skip
            variants["torch-compile"] = gpu.compiled(model, ids)
            compile_seconds = time.perf_counter() - begin
        scale = np.abs(oracle).max()
        allowed = 4 * np.abs(half - oracle).max() / scale + 1e-3
        errors = {name: float(np.abs(variant.result() - oracle).max() / scale) for name, variant in variants.items()}
        for name, error in errors.items():
            if not error <= allowed:
                print(f"WRONG: {name} at {tokens} tokens: error {error:.2e}, allowed {allowed:.2e}", flush=True)
                failures += 1
        times = gpu.time_interleaved(variants, options.seconds)
        floor = gpu.floor_ms(model, tokens, bandwidth, rate)
        new = []
        for name in variants:
            p20, median, p80 = times[name]
            known = nodes.get(sessions[name][0], "") if name in sessions else ""
            new.append({
                **head, "tokens": str(tokens), "variant": name, "p20_ms": f"{p20:.4f}", "median_ms": f"{median:.4f}",
                "p80_ms": f"{p80:.4f}", "floor_ms": f"{floor:.4f}", "max_error": f"{errors[name]:.1e}",
                "nodes": str(known),
            })  # fmt: skip
            note(f"{tokens:6d} {name:28s} {median:8.3f} ms  floor {floor:7.3f}  error {errors[name]:.1e}")
        rows += new
        if options.results:
            llama_rows.append(options.results, new)
        del variants
    print(llama_rows.verdict(rows))
    return 1 if failures else 0


def _head(options: argparse.Namespace, versions: Sequence[str]) -> Row:
    gpu, cuda, torch, runtime = versions
    return {
        **provenance(options.commit, gpu), "cuda": cuda, "torch": torch, "onnxruntime": runtime,
        "layers": str(options.layers),
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
