"""The CUDA kernels without ORT: call, check and time them through the library's C surface. Needs PyTorch and a GPU."""

from __future__ import annotations

import ctypes
import dataclasses
import math
import statistics

import torch

DTYPES = {"float32": (0, torch.float32), "float16": (1, torch.float16), "bfloat16": (2, torch.bfloat16)}
NORMS = {"none": 0, "rms": 1, "layer": 2}
ACTIVATIONS = {"none": 0, "relu": 1, "gelu": 2, "gelu_tanh": 3, "quick_gelu": 4, "silu": 5, "tanh": 6}
PATHS = {"generic": 0, "stream": 1, "tile": 2, "vendor": 3}


class CProblem(ctypes.Structure):
    _fields_ = [(n, ctypes.c_void_p) for n in ("x", "weight", "bias", "residual", "colsum", "y")] + [
        ("m", ctypes.c_int64), ("n", ctypes.c_int64), ("k", ctypes.c_int64), ("interleave", ctypes.c_int64),
        ("dtype", ctypes.c_int32), ("norm", ctypes.c_int32), ("activation", ctypes.c_int32),
        ("layout", ctypes.c_int32), ("epsilon", ctypes.c_float), ("gated", ctypes.c_int32),
        ("weight_is_constant", ctypes.c_int32)]


class CPlan(ctypes.Structure):
    _fields_ = [(n, ctypes.c_int32) for n in
                ("path", "variant", "stages", "cluster_m", "cluster_n", "raster", "row_stats", "lead",
                 "overlap")]


@dataclasses.dataclass(frozen=True)
class Plan:
    path: str
    variant: int = 0
    stages: int = 0
    cluster_m: int = 1
    cluster_n: int = 1
    raster: int = 8
    row_stats: int = 0
    lead: int = 0
    overlap: int = 1

    def c(self) -> CPlan:
        return CPlan(PATHS[self.path], self.variant, self.stages, self.cluster_m, self.cluster_n, self.raster,
                     self.row_stats, self.lead, self.overlap)

    def __str__(self) -> str:
        return (f"{self.path}{self.variant} s{self.stages} c{self.cluster_m}x{self.cluster_n} r{self.raster}"
                f"{' stats' if self.row_stats else ''}{f' l{self.lead}' if self.lead >= 0 else ''}"
                f"{'' if self.overlap else ' plain'}")


class KernelError(RuntimeError):
    pass


class Kernels:
    def __init__(self, path: str) -> None:
        self.lib = ctypes.CDLL(path)
        self.lib.onnxfuse_cuda_scratch.restype = ctypes.c_int64

    def variants(self, path: str) -> list[tuple[int, int, bool, int]]:
        found = []
        for index in range(1000):
            values = [ctypes.c_int() for _ in range(4)]
            if self.lib.onnxfuse_cuda_variant(PATHS[path], index, *[ctypes.byref(v) for v in values]):
                return found
            found.append((values[0].value, values[1].value, bool(values[2].value), values[3].value))
        return found

    def scratch_bytes(self, problem: CProblem, plan: Plan) -> int:
        error = ctypes.create_string_buffer(512)
        size = self.lib.onnxfuse_cuda_scratch(ctypes.byref(problem), ctypes.byref(plan.c()), error, 512)
        if size < 0:
            raise KernelError(error.value.decode())
        return size

    def run(self, problem: CProblem, plan: Plan, scratch: torch.Tensor | None = None) -> None:
        error = ctypes.create_string_buffer(512)
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        pointer = ctypes.c_void_p(scratch.data_ptr() if scratch is not None else 0)
        if self.lib.onnxfuse_cuda_run(ctypes.byref(problem), ctypes.byref(plan.c()), pointer, stream, error, 512):
            raise KernelError(error.value.decode())


@dataclasses.dataclass
class Case:
    """One op call: x[m,k], `copies` weights (rotated so that L2 does not hold them), y[m,n]."""

    m: int
    n: int
    k: int
    dtype: str = "float16"
    norm: str = "none"
    activation: str = "none"
    gated: bool = False
    bias: bool = False
    residual: bool = False
    interleave: int = 0
    copies: int = 1
    scale: float = 1.0
    mean: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        code, dtype = DTYPES[self.dtype]
        g = torch.Generator(device="cuda").manual_seed(self.seed)
        packed = 2 * self.n if self.gated else self.n

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=g, device="cuda", dtype=torch.float32)

        self.x = ((random(self.m, self.k) + self.mean) * self.scale).to(dtype)
        self.weights = [(random(packed, self.k) / math.sqrt(max(self.k, 1))).to(dtype) for _ in range(self.copies)]
        self.bias_t = random(packed).to(dtype) if self.bias else None
        self.residual_t = random(self.m, self.n).to(dtype) if self.residual else None
        self.colsums = [w.float().sum(1) for w in self.weights] if self.norm == "layer" else None
        self.y = torch.empty(self.m, self.n, device="cuda", dtype=dtype)
        self.code = code

    def problem(self, index: int = 0) -> CProblem:
        def pointer(t: torch.Tensor | None) -> int | None:
            return t.data_ptr() if t is not None else None
        return CProblem(self.x.data_ptr(), self.weights[index].data_ptr(), pointer(self.bias_t),
                        pointer(self.residual_t), self.colsums[index].data_ptr() if self.colsums else None,
                        self.y.data_ptr(), self.m, self.n, self.k, self.interleave, self.code, NORMS[self.norm],
                        ACTIVATIONS[self.activation], 0, 1e-5, int(self.gated), 1)

    def normalised(self, x: torch.Tensor) -> torch.Tensor:
        if self.norm == "rms":
            return x * torch.rsqrt((x * x).mean(1, keepdim=True) + 1e-5)
        if self.norm == "layer":
            return torch.nn.functional.layer_norm(x, (x.shape[1],), eps=1e-5)
        return x

    def activated(self, v: torch.Tensor) -> torch.Tensor:
        f = torch.nn.functional
        return {"none": lambda: v, "relu": lambda: torch.relu(v), "gelu": lambda: f.gelu(v),
                "gelu_tanh": lambda: f.gelu(v, approximate="tanh"), "silu": lambda: f.silu(v),
                "quick_gelu": lambda: v * torch.sigmoid(1.702 * v), "tanh": lambda: torch.tanh(v)}[self.activation]()

    def compute(self, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None,
                residual: torch.Tensor | None) -> torch.Tensor:
        """The op in PyTorch, in the dtype of its arguments (eager peer, or float64 reference)."""
        v = self.normalised(x) @ w.t()
        if bias is not None:
            v = v + bias
        if self.gated:
            if self.interleave:
                pair = v.view(v.shape[0], -1, 2, self.interleave)
                gate, up = pair[:, :, 0].reshape(v.shape[0], -1), pair[:, :, 1].reshape(v.shape[0], -1)
            else:
                gate, up = v[:, : self.n], v[:, self.n:]
            return self.activated(gate) * up
        v = self.activated(v)
        return v + residual if residual is not None else v

    def reference(self) -> torch.Tensor:
        def wide(t: torch.Tensor | None) -> torch.Tensor | None:
            return t.double() if t is not None else None
        return self.compute(self.x.double(), self.weights[0].double(), wide(self.bias_t), wide(self.residual_t))

    def error(self, kernels: Kernels, plan: Plan, reference: torch.Tensor) -> float:
        """‖y - reference‖ / ‖reference‖ of one run into a poisoned y."""
        self.y.fill_(float("nan"))
        scratch = self.scratch(kernels, plan)
        kernels.run(self.problem(), plan, scratch)
        torch.cuda.synchronize()
        return ((self.y.double() - reference).norm() / reference.norm()).item()

    def scratch(self, kernels: Kernels, plan: Plan) -> torch.Tensor:
        return torch.empty(max(kernels.scratch_bytes(self.problem(), plan), 16), dtype=torch.uint8, device="cuda")

    @property
    def weight_bytes(self) -> int:
        return self.weights[0].numel() * self.weights[0].element_size()


def copies_for(weight_bytes: int) -> int:
    return max(2, min(64, math.ceil(300e6 / weight_bytes)))


def time_graph(call, count: int, seconds: float = 0.02, repeats: int = 3) -> float:
    """Median microseconds of call(i), i = 0..count-1 chained in one CUDA graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call(0)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for i in range(count):
                call(i)
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        graph.replay()
        start.record()
        graph.replay()
        stop.record()
        stream.synchronize()
        once = start.elapsed_time(stop) / 1e3
        replays = max(1, min(200, int(seconds / max(once, 1e-6) / repeats)))
        results = []
        for _ in range(repeats):
            start.record()
            for _ in range(replays):
                graph.replay()
            stop.record()
            stream.synchronize()
            results.append(start.elapsed_time(stop) * 1e3 / replays / count)
        del graph
    return statistics.median(results)


def time_plan(kernels: Kernels, case: Case, plan: Plan, seconds: float = 0.02) -> float:
    problems = [case.problem(i) for i in range(case.copies)]
    scratch = case.scratch(kernels, plan)
    count = max(case.copies, 16)
    return time_graph(lambda i: kernels.run(problems[i % case.copies], plan, scratch), count, seconds)


def time_cublas(case: Case, seconds: float = 0.02) -> float:
    """The bare product of the same shape: the better of K-major and N-major weights."""
    packed = case.weights[0].shape[0]
    out = torch.empty(case.m, packed, device="cuda", dtype=case.x.dtype)
    views = [w.t() for w in case.weights]
    count = max(case.copies, 16)
    best = time_graph(lambda i: torch.mm(case.x, views[i % case.copies], out=out), count, seconds)
    rows = [w.t().contiguous() for w in case.weights]
    return min(best, time_graph(lambda i: torch.mm(case.x, rows[i % case.copies], out=out), count, seconds))


def copy_bandwidth() -> float:
    """Bytes per second read and written by a large device-to-device copy."""
    a = torch.empty(1 << 30, dtype=torch.float32, device="cuda")
    b = torch.empty_like(a)
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    best = math.inf
    for _ in range(5):
        start.record()
        b.copy_(a)
        stop.record()
        torch.cuda.synchronize()
        best = min(best, start.elapsed_time(stop) * 1e-3)
    return 2 * a.numel() * 4 / best
