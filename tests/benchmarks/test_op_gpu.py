"""The peers' code computes what the ops are specified to compute."""

from __future__ import annotations

import ctypes
import functools
import itertools
from collections.abc import Callable

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the peers are PyTorch code")

import op_gpu  # noqa: E402
from op_suites import Cell  # noqa: E402

from onnxfuse.errors import VerificationError  # noqa: E402
from onnxfuse.runtime.kernels import CProblem, Plan, Shape  # noqa: E402


def expected(case: op_gpu.Case) -> np.ndarray:
    """In float64, written out."""
    s = case.shape
    x, w = case.x.double().numpy(), case.weights[0].double().numpy()
    if s.norm == "layer":
        x = (x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + 1e-5)
    elif s.norm == "rms":
        x = x / np.sqrt((x**2).mean(1, keepdims=True) + 1e-5)
    v = x @ w.T + (case.bias.double().numpy() if case.bias is not None else 0.0)
    gate, up = (v[:, : s.n], v[:, s.n :]) if s.gated else (v, 1.0)
    if s.activation == "silu":
        gate = gate / (1 + np.exp(-gate))
    elif s.activation == "gelu":
        gate = gate * 0.5 * (1 + torch.erf(torch.from_numpy(gate / np.sqrt(2.0))).numpy())
    elif s.activation == "gelu_tanh":
        gate = 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)))
    return gate * up + (case.residual.double().numpy() if case.residual is not None else 0.0)


@pytest.mark.parametrize("shape", (
    Shape(3, 24, 64, norm="rms"),
    Shape(5, 16, 32, activation="gelu", bias=True, norm="layer"),
    Shape(4, 24, 64, activation="gelu_tanh", bias=True),
    Shape(2, 16, 64, activation="silu", bias=True, residual=True),
    Shape(3, 16, 64, "bfloat16", norm="rms", activation="silu", gated=True),
), ids=str)  # fmt: skip
def test_the_reference_and_the_peer(shape: Shape) -> None:
    case = op_gpu.Case(Cell("decode", shape), device="cpu", copies=2)
    oracle = expected(case)
    assert np.allclose(case.exact().numpy(), oracle, rtol=1e-9, atol=1e-9)
    half = op_gpu.unfused(shape, *case.arguments(0))
    assert half.dtype == getattr(torch, shape.dtype) and half.shape == (shape.rows, shape.n)
    assert case.error(half) < (2e-3 if shape.dtype == "float16" else 2e-2)
    assert case.error(half * 1.1) > 0.05
    assert torch.equal(case.across[1], case.weights[1].t())


def test_long_calls_are_chained_less_often() -> None:
    assert op_gpu.chain_length(copies=64, flops=1e6) == 64
    assert op_gpu.chain_length(copies=3, flops=1e6) == 18
    assert op_gpu.chain_length(copies=2, flops=1e12) == 4


class CpuKernels:
    """RMSNorm + product in NumPy, through the addresses that a kernel would get."""

    def __init__(self, factor: float = 1.0) -> None:
        self.factor = factor

    def chosen(self, shape: Shape) -> Plan:
        return Plan("tile", 3)

    def scratch_bytes(self, problem: CProblem, plan: Plan) -> int:
        return 64

    def prepared(self, problem: CProblem, plan: Plan, scratch: int) -> Callable[[int], None]:
        return lambda stream: self.run(problem, scratch)

    def run(self, problem: CProblem, scratch: int) -> None:
        def at(address: int, *size: int) -> np.ndarray:
            count = int(np.prod(size))
            return np.frombuffer((ctypes.c_char * (2 * count)).from_address(address), np.float16).reshape(size)

        assert scratch
        x = at(problem.x, problem.m, problem.k).astype(np.float64)
        x = x / np.sqrt((x**2).mean(1, keepdims=True) + 1e-5)
        at(problem.y, problem.m, problem.n)[:] = self.factor * x @ at(problem.weight, problem.n, problem.k).T


class CountingReplay:
    """Calls everything it is given once; what is made first takes 1 us, then 2, 3, …"""

    made = itertools.count(1)

    def __init__(self, call: op_gpu.Call, copies: int, count: int) -> None:
        for index in range(copies):
            call(index)
        self.us = float(next(self.made))

    def once(self) -> float:
        return self.us


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op_gpu, "Case", functools.partial(op_gpu.Case, device="cpu", copies=2))
    monkeypatch.setattr(op_gpu, "current_stream", lambda: 0)
    monkeypatch.setattr(op_gpu, "launched", lambda call, copies: (call(0), 50.0)[1])
    monkeypatch.setattr(CountingReplay, "made", itertools.count(1))
    monkeypatch.setattr(op_gpu, "Replay", CountingReplay)


@pytest.mark.usefixtures("on_cpu")
def test_a_cell_is_checked_and_timed_beside_its_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op_gpu, "compile_for", lambda shape: functools.partial(op_gpu.unfused, shape))
    cell = Cell("norm-linear", Shape(3, 16, 64, norm="rms"))
    found = op_gpu.GpuMeasurer(CpuKernels()).measure(cell, ("compile_us", "eager_graph_us", "eager_us"))
    assert float(str(found.pop("error"))) < 5e-4
    assert found == {
        "us": 1.0, "cublas_us": 2.0, "cublas_layout": "TN", "ratio": 0.5, "plan": str(Plan("tile", 3)),
        "compile_us": 4.0, "eager_graph_us": 5.0, "eager_us": 50.0, "launched_us": 50.0,
    }  # fmt: skip


@pytest.mark.usefixtures("on_cpu")
def test_a_wrong_result_is_not_timed() -> None:
    cell = Cell("norm-linear", Shape(3, 16, 64, norm="rms"))
    with pytest.raises(VerificationError, match=r"relative error \S+ with `tile3 "):
        op_gpu.GpuMeasurer(CpuKernels(factor=1.01)).measure(cell, ())
    assert next(CountingReplay.made) == 1


@pytest.mark.usefixtures("on_cpu")
def test_a_peer_that_fails_leaves_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: object) -> None:
        raise RuntimeError("no such thing")

    monkeypatch.setattr(op_gpu, "compile_for", lambda shape: broken)
    cell = Cell("norm-linear", Shape(3, 16, 64, norm="rms"))
    found = op_gpu.GpuMeasurer(CpuKernels()).measure(cell, ("compile_us",))
    assert (found["compile_us"], found["us"]) == ("failed", 1.0)


def test_torch_compile_takes_the_absent_operands() -> None:
    shape = Shape(3, 16, 64, "bfloat16", norm="rms", activation="silu", gated=True)
    case = op_gpu.Case(Cell("swiglu", shape), device="cpu", copies=1)
    try:
        compiled = op_gpu.compile_for(shape)(*case.arguments(0))
    except RuntimeError as error:
        pytest.skip(f"torch.compile does not work here: {str(error).splitlines()[0]}")
    assert case.error(compiled) < 2e-2
