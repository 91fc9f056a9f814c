"""A whole model on a GPU: a Llama of Llama-3-8B's layer shape, exported by PyTorch, before and after onnxfuse.

    python benchmarks/bench_llama.py --layers 4 --tokens 1 16 512 2048 --results benchmarks/results/llama.csv

Exports a randomly initialised Llama (hidden 4096, ffn 14336, 32/8 heads, float16, no cache) with PyTorch's dynamo
exporter, optimizes it for CUDA, checks the logits of both graphs against a float32 run of the same weights in PyTorch,
then times them in ONNX Runtime with inputs and outputs bound on the device and one CUDA graph per token count.
Reported: median and 20/80 % quantiles in milliseconds a run, the roofline floor (weight bytes over the copy bandwidth
measured here, or flops over the matrix rate measured here, whichever is larger), and the error of each graph.
Peers in the same run: ONNX Runtime with all of its optimizations, PyTorch eager and torch.compile, all as CUDA graphs.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import onnxruntime as ort
import torch

FIELDS = [
    "date", "commit", "gpu", "driver", "cuda", "torch", "onnxruntime", "layers", "tokens", "variant",
    "p20_ms", "median_ms", "p80_ms", "floor_ms", "max_error", "nodes",
]  # fmt: skip


def build_model(layers: int, vocab: int) -> torch.nn.Module:
    """A seeded float16 Llama on the GPU; every parameter random, norms near one."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=layers, num_attention_heads=32,
        num_key_value_heads=8, vocab_size=vocab, max_position_embeddings=4096, rms_norm_eps=1e-5,
        rope_theta=500000.0, tie_word_embeddings=False, use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = LlamaForCausalLM(config).half().eval()
    for name, parameter in model.named_parameters():
        with torch.no_grad():
            if "norm" in name:
                parameter.copy_(1 + 0.1 * torch.randn_like(parameter))
            else:
                parameter.copy_(0.02 * torch.randn_like(parameter))
    return model


class Logits(torch.nn.Module):
    """Only the logits, so that the exported graph has one output."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=input_ids, use_cache=False).logits


def export(model: torch.nn.Module, path: Path, opset: int) -> None:
    ids = torch.randint(0, 1000, (2, 9), device="cuda")
    shapes = {"input_ids": {0: torch.export.Dim("batch"), 1: torch.export.Dim("seq")}}
    program = torch.onnx.export(
        Logits(model), (), kwargs={"input_ids": ids}, dynamo=True, opset_version=opset, dynamic_shapes=shapes,
        input_names=["input_ids"], output_names=["logits"], verbose=False,
    )  # fmt: skip
    program.save(str(path), external_data=True)


def session(path: Path, library: str | None, graph: bool = True) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
    if library:
        options.register_custom_ops_library(library)
    providers = [("CUDAExecutionProvider", {"enable_cuda_graph": str(int(graph)), "use_tf32": "0"})]
    return ort.InferenceSession(str(path), options, providers=providers)


def run_options(graph_id: int) -> ort.RunOptions:
    options = ort.RunOptions()
    options.add_run_config_entry("gpu_graph_id", str(graph_id))
    options.add_run_config_entry("disable_synchronize_execution_providers", "1")
    return options


class Bound:
    """One session and one token count: inputs and outputs on the device, one captured CUDA graph."""

    def __init__(self, owner: ort.InferenceSession, ids: np.ndarray, vocab: int, graph_id: int) -> None:
        self.session = owner
        self.binding = owner.io_binding()
        self.ids = ort.OrtValue.ortvalue_from_numpy(ids, "cuda", 0)
        shape = [*ids.shape, vocab]
        self.logits = ort.OrtValue.ortvalue_from_shape_and_type(shape, np.float16, "cuda", 0)
        self.binding.bind_ortvalue_input("input_ids", self.ids)
        self.binding.bind_ortvalue_output(owner.get_outputs()[0].name, self.logits)
        self.options = run_options(graph_id)
        for _ in range(4):  # two plain runs, the capture, one replay
            self.run()
        torch.cuda.synchronize()

    def run(self) -> None:
        self.session.run_with_iobinding(self.binding, self.options)

    def result(self) -> np.ndarray:
        torch.cuda.synchronize()
        return self.logits.numpy().astype(np.float32)


class TorchGraph:
    """A PyTorch callable captured as a CUDA graph for one token count."""

    def __init__(self, function: torch.nn.Module, ids: np.ndarray) -> None:
        self.ids = torch.from_numpy(ids).cuda()
        with torch.no_grad():
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                for _ in range(3):
                    function(self.ids)
            torch.cuda.synchronize()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.out = function(self.ids)

    def run(self) -> None:
        self.graph.replay()

    def result(self) -> np.ndarray:
        self.run()
        torch.cuda.synchronize()
        return self.out.float().cpu().numpy()


def time_interleaved(variants: dict[str, object], seconds: float) -> dict[str, np.ndarray]:
    """Milliseconds a run: rounds of back-to-back runs per variant, variants taking turns; each round is one sample."""
    samples: dict[str, list[float]] = {name: [] for name in variants}
    per_round = {}
    for name, variant in variants.items():
        start = time.perf_counter()
        for _ in range(5):
            variant.run()
        torch.cuda.synchronize()
        per_round[name] = max(3, min(200, int(0.02 / max((time.perf_counter() - start) / 5, 1e-6))))
    stop = time.perf_counter() + seconds * len(variants)
    while time.perf_counter() < stop or len(next(iter(samples.values()))) < 5:
        for name, variant in variants.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(per_round[name]):
                variant.run()
            torch.cuda.synchronize()
            samples[name].append((time.perf_counter() - start) / per_round[name] * 1e3)
    return {name: np.percentile(values, [20, 50, 80]) for name, values in samples.items()}


def ceilings() -> tuple[float, float]:
    """Copy bandwidth (bytes/s, read plus written) and float16 matrix rate (flop/s) of this GPU, measured."""
    a = torch.empty(1 << 31, dtype=torch.uint8, device="cuda").random_()
    b = torch.empty_like(a)
    x = torch.randn(8192, 8192, device="cuda", dtype=torch.float16)
    y = torch.randn(8192, 8192, device="cuda", dtype=torch.float16)

    def event_time(function, runs: int = 10) -> float:
        for _ in range(3):
            function()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(runs):
            function()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / runs / 1e3

    bandwidth = 2 * a.numel() / event_time(lambda: b.copy_(a))
    rate = 2 * 8192**3 / event_time(lambda: x @ y)
    return bandwidth, rate


def floor_ms(model: torch.nn.Module, tokens: int, bandwidth: float, rate: float) -> float:
    """Each weight read once (one embedding row per token), or all matrix products at full rate."""
    weights = sum(p.numel() for n, p in model.named_parameters() if "embed_tokens" not in n)
    return max(2 * weights / bandwidth, 2 * weights * tokens / rate) * 1e3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--opset", type=int, default=18)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 16, 512, 2048])
    parser.add_argument("--seconds", type=float, default=0.6, help="per variant and token count")
    parser.add_argument("--work", type=Path, default=Path("/tmp/bench_llama"))
    parser.add_argument("--results", type=Path, default=None, help="CSV to append to")
    parser.add_argument("--optimize-args", default="", help="more options for `onnxfuse optimize`")
    parser.add_argument("--disable", action="append", default=[], metavar="NAME:RULE[,RULE…]",
                        help="also time a variant NAME without these rules (what each fusion brings)")  # fmt: skip
    parser.add_argument("--no-torch", action="store_true")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)

    import onnxfuse

    model = build_model(args.layers, args.vocab)
    base = args.work / "base.onnx"
    export(model, base, args.opset)
    print("exported", base, flush=True)

    paths = {"ort": base}
    for name, disabled in {"onnxfuse": "", **dict(d.split(":", 1) for d in args.disable)}.items():
        out = args.work / f"{name}.onnx"
        command = [sys.executable, "-m", "onnxfuse", "optimize", str(base), "-o", str(out), "--target", "cuda",
                   "--no-verify", "--report", str(out.with_suffix(".json")), *args.optimize_args.split()]  # fmt: skip
        for rule in filter(None, disabled.split(",")):
            command += ["--disable", rule]
        started = time.perf_counter()
        subprocess.run(command, check=True)
        report = json.loads(out.with_suffix(".json").read_text())
        print(f"{name}: optimized in {time.perf_counter() - started:.1f} s", report["nodes"], report["ops_after"],
              flush=True)
        paths[name] = out

    library = str(onnxfuse.library_path())
    sessions = {}
    for name, path in paths.items():
        mine = None if name == "ort" else library
        try:
            sessions[name] = session(path, mine)
            Bound(sessions[name], np.ones((1, 8), np.int64), args.vocab, 1000)
        except Exception as error:  # a session that cannot be captured is timed launched, and called so
            print(f"{name}: no CUDA graph ({str(error)[:300]})", flush=True)
            sessions.pop(name, None)
            sessions[f"{name}-launched"] = session(path, mine, graph=False)
    print("sessions", list(sessions), flush=True)
    bandwidth, rate = ceilings()
    print(f"copy bandwidth {bandwidth / 1e12:.2f} TB/s, float16 matrix rate {rate / 1e12:.0f} TFLOP/s",
          flush=True)

    import onnx

    nodes = {name: len(onnx.load(path, load_external_data=False).graph.node) for name, path in paths.items()}
    rng = np.random.default_rng(0)
    compiled = torch.compile(Logits(model), dynamic=False) if not args.no_torch else None
    rows, failures = [], 0
    for index, tokens in enumerate(args.tokens):
        ids = rng.integers(0, args.vocab, (1, tokens), dtype=np.int64)
        with torch.no_grad():
            half = Logits(model)(torch.from_numpy(ids).cuda()).float().cpu().numpy()
            model.float()
            oracle = Logits(model)(torch.from_numpy(ids).cuda()).cpu().numpy()
            model.half()
        variants: dict[str, object] = {
            name: Bound(owner, ids, args.vocab, index + 1) for name, owner in sessions.items()
        }
        if compiled is not None:
            variants["torch-eager"] = TorchGraph(Logits(model), ids)
            variants["torch-compile"] = TorchGraph(compiled, ids)
        scale = np.abs(oracle).max()
        allowed = 4 * np.abs(half - oracle).max() / scale + 1e-3
        errors = {}
        for name, variant in variants.items():
            errors[name] = float(np.abs(variant.result() - oracle).max() / scale)
            if not errors[name] <= allowed:
                print(f"WRONG: {name} at {tokens} tokens: error {errors[name]:.2e}, allowed {allowed:.2e}")
                failures += 1
        times = time_interleaved(variants, args.seconds)
        floor = floor_ms(model, tokens, bandwidth, rate)
        for name in variants:
            p20, median, p80 = times[name]
            rows.append([tokens, name, p20, median, p80, floor, errors[name], nodes.get(name, "")])
            print(f"{tokens:6d} {name:16s} {median:8.3f} ms  floor {floor:7.3f}  error {errors[name]:.1e}", flush=True)
        del variants
    if args.results:
        write(args, rows)
    return 1 if failures else 0


def write(args: argparse.Namespace, rows: list[list]) -> None:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], capture_output=True, text=True
    ).stdout.strip()
    head = [datetime.date.today().isoformat(), commit, torch.cuda.get_device_name(), driver, torch.version.cuda,
            torch.__version__, ort.__version__, args.layers]  # fmt: skip
    args.results.parent.mkdir(parents=True, exist_ok=True)
    fresh = not args.results.exists()
    with open(args.results, "a", newline="") as file:
        writer = csv.writer(file)
        if fresh:
            writer.writerow(FIELDS)
        writer.writerows([*head, *row] for row in rows)


if __name__ == "__main__":
    sys.exit(main())
