"""Measures one cell of the op benchmark on the GPU, with PyTorch for data, graphs, cuBLAS and the peers.

The result is checked first, against float64 and into a poisoned output. Contenders are chained in CUDA graphs over
weights that are rotated, so that L2 does not hold them, and are timed in turns: the clock of a hot GPU wanders.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import math
import os
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence

os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # one Triton kernel a call; a pool takes longer to start
import torch
from op_rows import FAILED
from op_suites import Cell
from result_rows import provenance

from onnxfuse.errors import VerificationError
from onnxfuse.runtime.kernels import CProblem, Kernels, Plan, Shape

ERROR_LIMIT = {"float16": 5e-4, "bfloat16": 4e-3}
ROUNDS = 7
ROUND_MICROSECONDS = 4000.0
ROTATED_BYTES = 300e6
EPSILON = 1e-5
Call = Callable[[int], object]


def unfused(shape: Shape, x: torch.Tensor, gamma: torch.Tensor | None, beta: torch.Tensor | None, w: torch.Tensor,
            bias: torch.Tensor | None, residual: torch.Tensor | None) -> torch.Tensor:  # fmt: skip
    """The op as the code of a model has it; the norm as in the Llama of `transformers`."""
    f = torch.nn.functional
    if shape.norm == "rms":
        wide = x if x.dtype == torch.float64 else x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPSILON)
        x = wide.to(x.dtype)
        x = x if gamma is None else gamma * x
    elif shape.norm == "layer":
        x = f.layer_norm(x, (shape.k,), gamma, beta, EPSILON)
    v = f.linear(x, w, bias)
    up = None
    if shape.gated:
        v, up = v[:, : shape.n], v[:, shape.n :]
    if shape.activation == "silu":
        v = f.silu(v)
    elif shape.activation.startswith("gelu"):
        v = f.gelu(v, approximate="tanh" if shape.activation == "gelu_tanh" else "none")
    elif shape.activation != "none":
        raise ValueError(f"no peer for `{shape.activation}`")
    if up is not None:
        v = v * up
    return v if residual is None else v + residual


def chain_length(copies: int, flops: float) -> int:
    """Calls in one graph, a multiple of the copies of the weight: many short ones, few long ones."""
    wanted = 16 if flops < 1e11 else 4
    return copies * math.ceil(wanted / copies)


class Case:
    """Tensors of one cell, with rotated weights in both layouts."""

    def __init__(self, cell: Cell, device: str = "cuda", copies: int | None = None) -> None:
        shape = self.shape = cell.shape
        dtype = getattr(torch, shape.dtype)
        packed = cell.packed_columns
        generator = torch.Generator(device=device).manual_seed(1)

        def normal(*size: int, scale: float = 1.0) -> torch.Tensor:
            return (torch.randn(*size, generator=generator, device=device) * scale).to(dtype)

        self.x = normal(shape.rows, shape.k)
        self.copies = copies or max(2, min(64, math.ceil(ROTATED_BYTES / cell.weight_bytes)))
        self.weights = [normal(packed, shape.k, scale=shape.k**-0.5) for _ in range(self.copies)]
        self.across = [w.t().contiguous() for w in self.weights]  # [K, N]
        self.sums = [w.float().sum(1) for w in self.weights] if shape.norm == "layer" else []
        self.gamma = torch.ones(shape.k, device=device, dtype=dtype) if shape.norm != "none" else None
        self.beta = torch.zeros(shape.k, device=device, dtype=dtype) if shape.norm == "layer" else None
        self.bias = normal(packed) if shape.bias else None
        self.residual = normal(shape.rows, shape.n) if shape.residual else None
        self.y = torch.empty(shape.rows, shape.n, device=device, dtype=dtype)
        self.product = torch.empty(shape.rows, packed, device=device, dtype=dtype)
        self.count = chain_length(self.copies, 2.0 * shape.rows * packed * shape.k)

    def problem(self, index: int) -> CProblem:
        problem = self.shape.as_c()
        problem.x, problem.y = self.x.data_ptr(), self.y.data_ptr()
        problem.weight = self.weights[index].data_ptr()
        problem.bias = self.bias.data_ptr() if self.bias is not None else None
        problem.residual = self.residual.data_ptr() if self.residual is not None else None
        problem.colsum = self.sums[index].data_ptr() if self.sums else None
        return problem

    def arguments(self, index: int) -> tuple[torch.Tensor | None, ...]:
        return (self.x, self.gamma, self.beta, self.weights[index], self.bias, self.residual)

    def exact(self) -> torch.Tensor:
        wide = (None if t is None else t.double() for t in self.arguments(0))
        return unfused(self.shape, *wide)  # type: ignore[arg-type]

    def error(self, result: torch.Tensor) -> float:
        exact = self.exact()
        return float(((result.double() - exact).norm() / exact.norm()).item())


class Replay:
    """Calls chained in a CUDA graph, over all weights."""

    def __init__(self, call: Call, copies: int, count: int) -> None:
        self.count = count
        self.stream = torch.cuda.Stream()
        with torch.cuda.stream(self.stream):
            for i in range(3):
                call(i % copies)
            self.stream.synchronize()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, stream=self.stream):
                for i in range(count):
                    call(i % copies)
        self.replays = 1
        self.once()
        self.replays = max(1, min(100, int(ROUND_MICROSECONDS / max(self.once() * count, 1.0))))

    def once(self) -> float:
        """Microseconds of one call."""
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        with torch.cuda.stream(self.stream):
            start.record()
            for _ in range(self.replays):
                self.graph.replay()
            stop.record()
            self.stream.synchronize()
        return float(start.elapsed_time(stop)) * 1e3 / self.replays / self.count


def current_stream() -> int:
    return int(torch.cuda.current_stream().cuda_stream)


def launched(call: Call, copies: int) -> float:
    """Microseconds of one call launched from Python, without a graph: the median of five batches."""
    for i in range(5):
        call(i % copies)
    times = []
    for _ in range(5):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        start.record()
        for i in range(20):
            call(i % copies)
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop) * 1e3 / 20)
    return statistics.median(times)


class GpuMeasurer:
    """See `op_run.Measurer`. `plans` says which plan to run a shape with, if not the one that the ops choose."""

    def __init__(self, kernels: Kernels, plans: Callable[[Shape], Plan | None] = lambda shape: None) -> None:
        self.kernels, self.plans = kernels, plans

    def measure(self, cell: Cell, peers: Sequence[str]) -> Mapping[str, object]:
        case = Case(cell)
        plan = self.plans(cell.shape) or self.kernels.chosen(cell.shape)
        problems = [case.problem(i) for i in range(case.copies)]
        scratch = max(self.kernels.scratch_bytes(problems[0], plan), 16)
        memory = torch.empty(scratch, dtype=torch.uint8, device=case.x.device)
        calls = [self.kernels.prepared(problem, plan, memory.data_ptr()) for problem in problems]

        def ours(i: int) -> None:
            calls[i](current_stream())

        case.y.fill_(float("nan"))
        ours(0)
        error = case.error(case.y)
        if not error < ERROR_LIMIT[cell.shape.dtype]:
            raise VerificationError(f"relative error {error:.2e} with `{plan}`")
        replays = {"us": Replay(ours, case.copies, case.count)}
        failed = {}
        for name, call in self._peers(case, peers):
            try:
                replays[name] = Replay(call, case.copies, case.count)
            except RuntimeError as failure:  # a peer that fails says nothing of ours
                print(f"{cell}: {name} failed: {str(failure)[:300]}", file=sys.stderr, flush=True)
                failed[name] = FAILED
        times: dict[str, list[float]] = {name: [] for name in replays}
        for _ in range(ROUNDS):
            for name, replay in replays.items():
                times[name].append(replay.once())
        found: dict[str, object] = {name: statistics.median(values) for name, values in times.items()}
        layout = min(("TN", "NN"), key=lambda name: statistics.median(times[name]))
        del found["TN"], found["NN"]
        found["cublas_us"], found["cublas_layout"] = statistics.median(times[layout]), layout
        found["ratio"] = statistics.median(a / b for a, b in zip(times["us"], times[layout], strict=True))
        found |= {"plan": str(plan), "error": f"{error:.1e}", **failed}
        if "eager_us" in peers:
            found["eager_us"] = launched(lambda i: unfused(case.shape, *case.arguments(i)), case.copies)
            found["launched_us"] = launched(ours, case.copies)
        return found

    def _peers(self, case: Case, wanted: Sequence[str]) -> Iterator[tuple[str, Call]]:
        yield "TN", lambda i: torch.mm(case.x, case.weights[i].t(), out=case.product)
        yield "NN", lambda i: torch.mm(case.x, case.across[i], out=case.product)
        s = case.shape
        if s.activation == "gelu_tanh" and s.bias and s.norm == "none" and not s.gated and not s.residual:
            fused = torch._addmm_activation
            yield "cublaslt_us", lambda i: fused(case.bias, case.x, case.weights[i].t(), use_gelu=True)
        if "compile_us" in wanted:
            compiled = compile_for(case.shape)
            yield "compile_us", lambda i: compiled(*case.arguments(i))
        if "eager_graph_us" in wanted:
            yield "eager_graph_us", lambda i: unfused(s, *case.arguments(i))


def compile_for(shape: Shape) -> Callable[..., torch.Tensor]:
    """torch.compile's program for one static shape; nothing of other shapes is kept, so no limit of them is met."""
    torch._dynamo.reset()
    return torch.compile(lambda *arguments: unfused(shape, *arguments), dynamic=False)


def compile_all(cells: Sequence[Cell]) -> None:
    """Compiles for these cells, so that Inductor's cache on disk has their programs afterwards."""
    for cell in cells:
        case = Case(cell, copies=1)
        compile_for(cell.shape)(*case.arguments(0))
    torch.cuda.synchronize()


def copy_bandwidth() -> float:
    """TB/s read and written by a large device-to-device copy, the best of five."""
    a = torch.empty(1 << 30, dtype=torch.float32, device="cuda").normal_()
    b = torch.empty_like(a)
    best = math.inf
    for _ in range(6):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        b.copy_(a)
        stop.record()
        torch.cuda.synchronize()
        best = min(best, start.elapsed_time(stop) * 1e-3)
    return 2 * a.numel() * 4 / best / 1e12


def cublas_version() -> str:
    for name in ("libcublasLt.so.13", "libcublasLt.so.12"):
        try:
            library = ctypes.CDLL(name)
        except OSError:
            continue
        library.cublasLtGetVersion.restype = ctypes.c_size_t
        number = int(library.cublasLtGetVersion())
        return f"{number // 10000}.{number // 100 % 100}.{number % 100}"
    return "unknown"


def machine(commit: str | None) -> dict[str, object]:
    """What a row says of the machine and the software."""
    runtime = "unknown"
    for name in ("onnxruntime-gpu", "onnxruntime"):
        try:
            runtime = importlib.metadata.version(name)
            break
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        **provenance(commit, torch.cuda.get_device_name()),
        "cuda": torch.version.cuda, "cublas": cublas_version(), "torch": torch.__version__, "onnxruntime": runtime,
        "copy_tb_s": copy_bandwidth(),
    }  # fmt: skip
