"""The CUDA kernels of the library through its C surface: which plans exist, how long one takes. No session needed."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from onnxfuse.errors import RuntimeMissingError
from onnxfuse.runtime import library

PATHS = ("generic", "stream", "tile", "vendor")
DTYPES = ("float32", "float16", "bfloat16")
NORMS = ("none", "rms", "layer")
ACTIVATIONS = ("none", "relu", "gelu", "gelu_tanh", "quick_gelu", "silu", "tanh")

_PLAN_FIELDS = ("path", "variant", "stages", "cluster_m", "cluster_n", "raster", "row_stats", "lead", "ahead",
                "overlap")


class CProblem(ctypes.Structure):
    """`LinearProblem` of `custom_ops/cuda/problem.h`."""

    _fields_ = [
        *[(name, ctypes.c_void_p) for name in ("x", "weight", "bias", "residual", "colsum", "y")],
        *[(name, ctypes.c_int64) for name in ("m", "n", "k", "interleave")],
        *[(name, ctypes.c_int32) for name in ("dtype", "norm", "activation", "layout")],
        ("epsilon", ctypes.c_float),
        *[(name, ctypes.c_int32) for name in ("gated", "weight_is_constant")],
    ]


class CPlan(ctypes.Structure):
    """`Plan` of the same header."""

    _fields_ = [(name, ctypes.c_int32) for name in _PLAN_FIELDS]


@dataclass(frozen=True)
class Plan:
    """One variant of one kernel family and its run-time knobs."""

    path: str = "generic"
    variant: int = 0
    stages: int = 0
    cluster_m: int = 1
    cluster_n: int = 1
    raster: int = 8
    row_stats: int = 0
    lead: int = 0
    ahead: int = 0
    overlap: int = 1

    def as_c(self) -> CPlan:
        return CPlan(**{**asdict(self), "path": PATHS.index(self.path)})

    @classmethod
    def from_c(cls, plan: CPlan) -> Plan:
        values = {name: int(getattr(plan, name)) for name in _PLAN_FIELDS}
        return cls(**{**values, "path": PATHS[values["path"]]})  # type: ignore[arg-type]

    def __str__(self) -> str:
        return (
            f"{self.path}{self.variant} stages {self.stages} cluster {self.cluster_m}x{self.cluster_n}"
            f" raster {self.raster} stats {self.row_stats} lead {self.lead}+{self.ahead}"
        )


@dataclass(frozen=True)
class Shape:
    """One op call: y[rows, n] from x[rows, k]; `n` is the number of columns of y."""

    rows: int
    n: int
    k: int
    dtype: str = "float16"
    norm: str = "none"
    activation: str = "none"
    gated: bool = False
    bias: bool = False
    residual: bool = False

    def as_c(self) -> CProblem:
        return CProblem(
            m=self.rows, n=self.n, k=self.k, dtype=DTYPES.index(self.dtype), norm=NORMS.index(self.norm),
            activation=ACTIVATIONS.index(self.activation), gated=int(self.gated), epsilon=1e-5, weight_is_constant=1,
        )  # fmt: skip


@dataclass(frozen=True)
class Variant:
    """A tile of a family: rows of x, packed weight columns, and the most stages that fit its shared memory.

    `split`: CTAs of a cluster that share K; of the path "stream" the most that can, 1 for its skinny tiles, which have
    all of K and few columns.
    """

    path: str
    index: int
    rows: int
    columns: int
    gated: bool
    max_stages: int
    split: int


class Kernels:
    """The kernels on the current device.

    Raises:
        RuntimeMissingError: there is no library, it has no CUDA kernels, or there is no GPU.
    """

    def __init__(self) -> None:
        path = library.library_path()
        self._library: Any = ctypes.CDLL(str(path))
        try:
            self._library.onnxfuse_cuda_bench_open.restype = ctypes.c_void_p
            self._library.onnxfuse_cuda_scratch.restype = ctypes.c_int64
            self._library.onnxfuse_cuda_modelled.restype = ctypes.c_double
        except AttributeError as error:
            raise RuntimeMissingError(
                f"the custom-op library `{path}` has no CUDA kernels",
                hint="build it where nvcc is found, or with -DONNXFUSE_CUDA=ON",
            ) from error
        architecture, multiprocessors = ctypes.c_int(), ctypes.c_int()
        if self._library.onnxfuse_cuda_device(ctypes.byref(architecture), ctypes.byref(multiprocessors)):
            raise RuntimeMissingError("there is no CUDA GPU to tune for", hint="run `onnxfuse doctor`")
        self.architecture = architecture.value

    def variants(self) -> list[Variant]:
        found = []
        for path in ("stream", "tile"):
            for index in range(1000):
                values = [ctypes.c_int() for _ in range(5)]
                if self._library.onnxfuse_cuda_variant(PATHS.index(path), index, *map(ctypes.byref, values)):
                    break
                rows, columns, gated, stages, split = (v.value for v in values)
                found.append(Variant(path, index, rows, columns, bool(gated), stages, split))
        return found

    def chosen(self, shape: Shape) -> Plan:
        """The plan that the ops use for this shape."""
        plan = CPlan()
        self._library.onnxfuse_cuda_choose(ctypes.byref(shape.as_c()), ctypes.byref(plan))
        return Plan.from_c(plan)

    def modelled(self, shape: Shape, plan: Plan) -> float | None:
        """Microseconds of one call by the model that chooses where nothing was measured; None if it cannot tell."""
        time = float(self._library.onnxfuse_cuda_modelled(ctypes.byref(shape.as_c()), ctypes.byref(plan.as_c())))
        return time if time > 0.0 else None

    def scratch_bytes(self, problem: CProblem, plan: Plan) -> int:
        """Device bytes that `run` needs beside the tensors; -1 if the plan cannot run the problem."""
        return int(
            self._library.onnxfuse_cuda_scratch(
                ctypes.byref(problem), ctypes.byref(plan.as_c()), None, ctypes.c_int64(0)
            )
        )

    def run(self, problem: CProblem, plan: Plan, scratch: int, stream: int) -> None:
        """Enqueues one call; all addresses are those of device memory, `stream` is a cudaStream_t.

        Raises:
            RuntimeMissingError: the plan cannot run the problem here, or its launch failed.
        """
        self.prepared(problem, plan, scratch)(stream)

    def prepared(self, problem: CProblem, plan: Plan, scratch: int) -> Callable[[int], None]:
        """`run` for one problem and plan, with all but the stream converted once: for calls that are timed."""
        error, capacity, address = ctypes.create_string_buffer(1024), ctypes.c_int64(1024), ctypes.c_void_p(scratch)
        function, problem_at, plan_at = (
            self._library.onnxfuse_cuda_run, ctypes.byref(problem), ctypes.byref(plan.as_c()),
        )  # fmt: skip

        def call(stream: int) -> None:
            if function(problem_at, plan_at, address, ctypes.c_void_p(stream), error, capacity):
                raise RuntimeMissingError(f"the kernel `{plan}` failed: {error.value.decode()}")

        return call

    @contextmanager
    def bench(self, shape: Shape) -> Iterator[Bench]:
        """Data for one shape on the device, for as long as the context lasts."""
        error = ctypes.create_string_buffer(1024)
        handle = self._library.onnxfuse_cuda_bench_open(
            ctypes.byref(shape.as_c()), int(shape.bias), int(shape.residual), error, ctypes.c_int64(1024)
        )
        if not handle:
            raise RuntimeMissingError(f"no bench for `{shape}`: {error.value.decode()}")
        try:
            yield Bench(self._library, handle)
        finally:
            self._library.onnxfuse_cuda_bench_close(ctypes.c_void_p(handle))


class Bench:
    """See `Kernels.bench`."""

    def __init__(self, opened: Any, handle: int) -> None:
        self._library, self._handle = opened, ctypes.c_void_p(handle)

    def measure(self, plan: Plan, seconds: float) -> tuple[float, float] | None:
        """Microseconds of one call and its relative difference from the portable kernel; None if it cannot run."""
        error = ctypes.create_string_buffer(1024)
        microseconds, difference = ctypes.c_double(), ctypes.c_double()
        failed = self._library.onnxfuse_cuda_bench_measure(
            self._handle, ctypes.byref(plan.as_c()), ctypes.c_double(seconds), ctypes.byref(microseconds),
            ctypes.byref(difference), error, ctypes.c_int64(1024),
        )  # fmt: skip
        return None if failed else (microseconds.value, difference.value)
