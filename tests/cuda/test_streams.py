"""The streaming kernels in chains, as they overlap in a model: every call has the same bits as the first."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest

from onnxfuse.errors import OnnxfuseError
from onnxfuse.runtime.kernels import Kernels, Plan, Shape, Variant

COPIES, CALLS = 3, 240


def stream_variants() -> list[Variant]:
    try:
        return [v for v in Kernels().variants() if v.path == "stream" and v.rows <= 16]
    except (OnnxfuseError, OSError):
        return []


def plans(variant: Variant) -> Iterator[Plan]:
    splits = (1, 2, 4) if variant.split > 1 else (1,)
    aheads = (0, 8) if variant.split == 1 else (0,)
    for stages, lead, ahead, split in itertools.product((1, 3, 8, variant.max_stages), (0, 8, 64), aheads, splits):
        yield Plan("stream", variant.index, stages, split, 1, 8, 0, lead, ahead)


@pytest.mark.parametrize("dtype", ("float16", "bfloat16"))
@pytest.mark.parametrize("constant", (True, False), ids=("constant", "not constant"))
@pytest.mark.parametrize("variant", stream_variants(), ids=lambda v: f"stream{v.index}")
def test_every_call_of_a_chain_has_the_same_bits(variant: Variant, constant: bool, dtype: str) -> None:
    cupy = pytest.importorskip("cupy")
    kernels = Kernels()
    stream = cupy.cuda.Stream(non_blocking=True)
    generator = np.random.default_rng(5)

    def on_device(*size: int) -> object:
        # Half precision by its bits: exponents of about 1, so that sums are finite in both dtypes.
        bits = generator.integers(0, 1 << 9, size, dtype=np.uint16)
        signs = generator.integers(0, 2, size, dtype=np.uint16) << np.uint16(15)
        one = np.uint16(0x3A00 if dtype == "float16" else 0x3F00)
        return cupy.asarray((bits >> np.uint16(3)) | signs | one)

    for rows, norm in ((1, "rms"), (variant.rows - 3, "layer"), (variant.rows + 1, "none")):
        shape = Shape(rows, 1160, 1352, dtype, norm)  # tails of columns and of K
        x = on_device(rows, shape.k)
        weights = [on_device(shape.n, shape.k) for _ in range(COPIES)]
        sums = cupy.zeros(shape.n, cupy.float32)
        results = [cupy.empty((rows, shape.n), cupy.uint16) for _ in range(COPIES)]
        problems = []
        for weight, result in zip(weights, results, strict=True):
            problem = shape.as_c()
            problem.x, problem.weight, problem.y = x.data.ptr, weight.data.ptr, result.data.ptr
            problem.colsum, problem.weight_is_constant = sums.data.ptr, int(constant)
            problems.append(problem)
        scratch = cupy.empty(1 << 20, cupy.uint8)
        expected = None
        for plan in plans(variant):
            if kernels.scratch_bytes(problems[0], plan) < 0:
                continue
            calls = [kernels.prepared(problem, plan, scratch.data.ptr) for problem in problems]
            for result in results:
                result.fill(0xFFFF)
            cupy.cuda.Device().synchronize()
            for index in range(CALLS):
                calls[index % COPIES](stream.ptr)
            stream.synchronize()
            found = [result.get() for result in results]
            for index in range(CALLS // 4):
                calls[index % COPIES](stream.ptr)
            stream.synchronize()
            assert all((a == b.get()).all() for a, b in zip(found, results, strict=True)), f"{shape} {plan}"
            bits = [f.view(np.float16).astype(np.float64) if dtype == "float16" else
                    (f.astype(np.uint32) << 16).view(np.float32).astype(np.float64) for f in found]  # fmt: skip
            expected = bits if expected is None else expected
            for one, other in zip(bits, expected, strict=True):
                assert np.isfinite(one).all(), f"{shape} {plan}"
                assert np.abs(one - other).max() <= 2e-2 * np.abs(other).max(), f"{shape} {plan}"
