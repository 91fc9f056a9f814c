"""The fused ops on a GPU, op by op, against cuBLAS, cuBLASLt, PyTorch eager and torch.compile in the same run.

    python benchmarks/bench_op.py --suite norm-linear activation --results benchmarks/results/ops.csv

Every result is checked first, against float64 and into a poisoned output. Then each contender is chained in one CUDA
graph over weights that are rotated, so that L2 does not hold them, and contenders are timed in turns (the clock of a
hot GPU wanders); a row has the median of the rounds. `eager_us` is launched from Python, as users do; all others are
graph replays. The plan is the one that the ops choose; `ONNXFUSE_TUNING` applies. Needs PyTorch.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import math
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from onnxfuse.runtime.kernels import CProblem, Kernels, Plan, Shape

FIELDS = [
    "date", "commit", "gpu", "driver", "cuda", "torch", "suite", "rows", "n", "k", "dtype", "norm", "activation",
    "gated", "bias", "residual", "plan", "error", "us", "cublas_us", "ratio", "cublaslt_us", "compile_us",
    "eager_graph_us", "eager_us", "weight_tb_s", "copy_tb_s",
]  # fmt: skip
ERROR_LIMIT = {"float16": 5e-4, "bfloat16": 4e-3}
ROUNDS = 3
ROTATED_BYTES = 300e6


def suites() -> dict[str, list[Shape]]:
    llama = ((6144, 4096, "rms"), (4096, 4096, "none"), (28672, 4096, "rms"), (4096, 14336, "none"))
    found: dict[str, list[Shape]] = {
        "norm-linear": [
            Shape(m, d, d, dtype, norm="rms")
            for dtype in ("float16", "bfloat16") for d in (1024, 2048, 4096) for m in (1, 32, 128, 512, 1024)
        ],
        "activation": [
            Shape(m, 4096, 4096, activation=a, bias=True)
            for m in (512, 1024, 2048, 4096) for a in ("gelu_tanh", "gelu", "silu")
        ],
        "swiglu": [Shape(m, 14336, 4096, norm="rms", activation="silu", gated=True) for m in (1, 16, 128, 512, 2048)],
        "decode": [Shape(m, n, k, norm=norm) for n, k, norm in llama for m in (1, 2, 4, 8, 16)],
        "llama": [
            shape
            for m in (1, 16, 512, 2048)
            for shape in (
                Shape(m, 6144, 4096, norm="rms"), Shape(m, 4096, 4096, residual=True),
                Shape(m, 4096, 14336, residual=True),
            )
        ],
        "layer-norm": [  # BERT-large and ViT-L, up projections
            Shape(m, 4096, 1024, norm="layer", activation="gelu", bias=True) for m in (384, 512, 1024, 2048, 4096)
        ],
    }  # fmt: skip
    return found


class Case:
    """Tensors of one shape, with rotated weights."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        dtype = getattr(torch, shape.dtype)
        packed = shape.n * (2 if shape.gated else 1)
        generator = torch.Generator(device="cuda").manual_seed(1)

        def normal(*size: int, scale: float = 1.0) -> torch.Tensor:
            return (torch.randn(*size, generator=generator, device="cuda") * scale).to(dtype)

        self.x = normal(shape.rows, shape.k)
        copies = max(2, min(64, math.ceil(ROTATED_BYTES / (packed * shape.k * 2))))
        self.weights = [normal(packed, shape.k, scale=shape.k**-0.5) for _ in range(copies)]
        self.columns = [w.t() for w in self.weights]
        self.sums = [w.float().sum(1) for w in self.weights] if shape.norm == "layer" else []
        self.bias = normal(packed) if shape.bias else None
        self.residual = normal(shape.rows, shape.n) if shape.residual else None
        self.y = torch.empty(shape.rows, shape.n, device="cuda", dtype=dtype)
        self.product = torch.empty(shape.rows, packed, device="cuda", dtype=dtype)

    @property
    def weight_bytes(self) -> int:
        return self.weights[0].numel() * 2

    def problem(self, index: int) -> CProblem:
        problem = self.shape.as_c()
        problem.x, problem.y = self.x.data_ptr(), self.y.data_ptr()
        problem.weight = self.weights[index].data_ptr()
        problem.bias = self.bias.data_ptr() if self.bias is not None else None
        problem.residual = self.residual.data_ptr() if self.residual is not None else None
        problem.colsum = self.sums[index].data_ptr() if self.sums else None
        return problem

    def unfused(self, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None,
                residual: torch.Tensor | None) -> torch.Tensor:
        """The op as PyTorch code, as a model has it."""
        f, shape = torch.nn.functional, self.shape
        if shape.norm == "rms":
            x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
        elif shape.norm == "layer":
            x = f.layer_norm(x, (shape.k,), eps=1e-5)
        v = f.linear(x, w, bias)
        up = None
        if shape.gated:
            v, up = v[:, : shape.n], v[:, shape.n :]
        if shape.activation == "silu":
            v = f.silu(v)
        elif shape.activation.startswith("gelu"):
            v = f.gelu(v, approximate="tanh" if shape.activation == "gelu_tanh" else "none")
        if up is not None:
            v = v * up
        return v if residual is None else v + residual

    def exact(self) -> torch.Tensor:
        bias = self.bias.double() if self.bias is not None else None
        residual = self.residual.double() if self.residual is not None else None
        return self.unfused(self.x.double(), self.weights[0].double(), bias, residual)


class Replay:
    """Calls chained in a CUDA graph, over all weights."""

    def __init__(self, call: Callable[[int], object], copies: int) -> None:
        self.count = max(copies, 16)
        self.stream = torch.cuda.Stream()
        with torch.cuda.stream(self.stream):
            for i in range(3):
                call(i % copies)
            self.stream.synchronize()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, stream=self.stream):
                for i in range(self.count):
                    call(i % copies)
            self.graph.replay()
            self.replays = max(1, min(100, int(8e3 / max(self.once(1) * self.count, 1.0))))

    def once(self, replays: int | None = None) -> float:
        """Microseconds of one call."""
        replays = replays or self.replays
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        with torch.cuda.stream(self.stream):
            start.record()
            for _ in range(replays):
                self.graph.replay()
            stop.record()
            self.stream.synchronize()
        return start.elapsed_time(stop) * 1e3 / replays / self.count


def launched(call: Callable[[int], object], copies: int) -> float:
    """Microseconds of one call launched from Python, without a graph."""
    for i in range(5):
        call(i % copies)
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    for i in range(50):
        call(i % copies)
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop) * 1e3 / 50


def checked(kernels: Kernels, case: Case, plan: Plan, scratch: int) -> float:
    """Relative error of the fused op; exits if it is wrong, since a wrong time means nothing."""
    case.y.fill_(float("nan"))
    kernels.run(case.problem(0), plan, scratch, torch.cuda.current_stream().cuda_stream)
    exact = case.exact()
    error = ((case.y.double() - exact).norm() / exact.norm()).item()
    if not error < ERROR_LIMIT[case.shape.dtype]:
        sys.exit(f"wrong result: relative error {error:.2e} of {case.shape} with {plan}")
    return error


def contenders(kernels: Kernels, case: Case, plan: Plan, scratch: int,
               with_compile: bool) -> Iterator[tuple[str, Callable[[int], object]]]:
    problems = [case.problem(i) for i in range(len(case.weights))]
    yield "us", lambda i: kernels.run(problems[i], plan, scratch, torch.cuda.current_stream().cuda_stream)
    yield "cublas_us", lambda i: torch.mm(case.x, case.columns[i], out=case.product)
    if case.bias is not None and case.shape.norm == "none":
        gelu = case.shape.activation.startswith("gelu")
        yield "cublaslt_us", lambda i: torch._addmm_activation(case.bias, case.x, case.columns[i], use_gelu=gelu)
    if with_compile:
        torch._dynamo.reset()  # one specialised program per shape, not a recompilation limit
        compiled = torch.compile(case.unfused, dynamic=False)
        yield "compile_us", lambda i: compiled(case.x, case.weights[i], case.bias, case.residual)
    yield "eager_graph_us", lambda i: case.unfused(case.x, case.weights[i], case.bias, case.residual)


def measure(kernels: Kernels, shape: Shape, with_compile: bool) -> dict[str, object]:
    case = Case(shape)
    plan = kernels.chosen(shape)
    memory = torch.empty(max(kernels.scratch_bytes(case.problem(0), plan), 16), dtype=torch.uint8, device="cuda")
    error = checked(kernels, case, plan, memory.data_ptr())
    copies = len(case.weights)
    replays = {
        name: Replay(call, copies)
        for name, call in contenders(kernels, case, plan, memory.data_ptr(), with_compile)
    }
    times: dict[str, list[float]] = {name: [] for name in replays}
    for _ in range(ROUNDS):
        for name, replay in replays.items():
            times[name].append(replay.once())
    row: dict[str, object] = {name: round(statistics.median(values), 2) for name, values in times.items()}
    fused, bare = statistics.median(times["us"]), statistics.median(times["cublas_us"])
    eager = launched(lambda i: case.unfused(case.x, case.weights[i], case.bias, case.residual), copies)
    row |= {
        "rows": shape.rows, "n": shape.n, "k": shape.k, "dtype": shape.dtype, "norm": shape.norm,
        "activation": shape.activation, "gated": int(shape.gated), "bias": int(shape.bias),
        "residual": int(shape.residual), "plan": str(plan), "error": f"{error:.1e}", "ratio": round(fused / bare, 3),
        "eager_us": round(eager, 2), "weight_tb_s": round(case.weight_bytes / fused / 1e6, 3),
    }  # fmt: skip
    return row


def copy_bandwidth() -> float:
    """TB/s read and written by a large device-to-device copy, the best of five."""
    a = torch.empty(1 << 30, dtype=torch.float32, device="cuda")
    b = torch.empty_like(a)
    best = math.inf
    for _ in range(5):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        b.copy_(a)
        stop.record()
        torch.cuda.synchronize()
        best = min(best, start.elapsed_time(stop) * 1e-3)
    return 2 * a.numel() * 4 / best / 1e12


def machine() -> dict[str, object]:
    def output(*command: str) -> str:
        try:
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip().splitlines()[0]
        except (OSError, subprocess.CalledProcessError, IndexError):
            return "unknown"

    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "commit": output("git", "rev-parse", "--short", "HEAD"),
        "gpu": torch.cuda.get_device_name(),
        "driver": output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "copy_tb_s": round(copy_bandwidth(), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", nargs="+", choices=[*suites(), "all"], default=["norm-linear"])
    parser.add_argument("--results", type=Path, help="CSV file to append the rows to")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out: it takes seconds a shape")
    parser.add_argument("--commit", help="commit to record, where git is not at hand")
    arguments = parser.parse_args()
    names = list(suites()) if "all" in arguments.suite else arguments.suite
    kernels, common = Kernels(), machine()
    if arguments.commit:
        common["commit"] = arguments.commit
    print(f"{common['gpu']}, driver {common['driver']}, copy {common['copy_tb_s']} TB/s", flush=True)
    for name in names:
        ratios = []
        for shape in suites()[name]:
            row = {**common, "suite": name, **measure(kernels, shape, not arguments.no_compile)}
            ratios.append(float(str(row["ratio"])))
            peers = "  ".join(f"{peer[:-3]} {row[peer]}" for peer in
                              ("cublas_us", "cublaslt_us", "compile_us", "eager_graph_us", "eager_us") if peer in row)
            call = f"{shape.rows:5d}x{shape.k}->{shape.n} {shape.dtype:8s} {shape.activation:9s}"
            print(f"{name:11s} {call} {row['us']:8} us  x{row['ratio']:<6} {row['weight_tb_s']} TB/s  {peers}  "
                  f"[{row['plan']}]", flush=True)
            if arguments.results:
                new = not arguments.results.exists()
                with arguments.results.open("a", newline="", encoding="utf-8") as file:
                    writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
                    if new:
                        writer.writeheader()
                    writer.writerow(row)
        print(f"{name}: geometric mean {statistics.geometric_mean(ratios):.3f} x cuBLAS, worst {max(ratios):.3f}")


if __name__ == "__main__":
    main()
