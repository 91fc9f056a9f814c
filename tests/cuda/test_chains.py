"""Every kernel in chains where each call reads what the one before wrote, as in a model, with nothing between them.

Kernels start before their predecessors have ended; one that reads x or a norm's statistics too early gives other bits
than a chain with a pause after every call.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from onnxfuse.errors import OnnxfuseError
from onnxfuse.runtime.kernels import Kernels, Plan, Shape, Variant

BUFFERS, CALLS = 3, 31


def all_variants() -> list[Variant]:
    try:
        return Kernels().variants()
    except (OnnxfuseError, OSError):
        return []


def plans(variant: Variant, rows: int) -> Iterator[Plan]:
    if variant.path == "stream":
        if rows > 2 * variant.rows:
            return
        for split in (1, 2, 4) if variant.split > 1 else (1,):
            for lead in (0, 8):
                yield Plan("stream", variant.index, min(8, variant.max_stages), split, lead=lead, ahead=4)
        return
    for cluster in ((1, 1), (2, 1), (1, 2)):
        for row_stats in range(3):
            yield Plan("tile", variant.index, 0, *cluster, raster=4, row_stats=row_stats)


@pytest.mark.parametrize("dtype", ("float16", "bfloat16"))
@pytest.mark.parametrize("variant", all_variants(), ids=lambda v: f"{v.path}{v.index}")
def test_a_chain_has_the_bits_of_single_calls(variant: Variant, dtype: str) -> None:
    cupy = pytest.importorskip("cupy")
    kernels = Kernels()
    stream = cupy.cuda.Stream(non_blocking=True)
    generator = np.random.default_rng(7)
    few = variant.path == "stream"
    checked = 0
    sizes = ((variant.rows - 3, 1032), (variant.rows + 1, 520)) if few else ((70, 520), (577, 1032), (1100, 2056))
    for rows, width in sizes:
        for norm in ("rms", "layer"):
            shape = Shape(rows, width, width, dtype, norm, "silu" if variant.gated else "none", variant.gated)
            columns = width * (2 if variant.gated else 1)
            values = (generator.standard_normal((columns, width)) * 2.0 / np.sqrt(width)).astype(np.float32)
            start = generator.standard_normal((rows, width)).astype(np.float32)
            as_bits = (lambda v: v.astype(np.float16).view(np.uint16)) if dtype == "float16" else (
                lambda v: (v.view(np.uint32) >> 16).astype(np.uint16))  # fmt: skip
            weight, first = cupy.asarray(as_bits(values)), cupy.asarray(as_bits(start))
            sums = cupy.zeros(columns, cupy.float32)
            buffers = [cupy.empty((rows, width), cupy.uint16) for _ in range(BUFFERS)]
            problems = []
            for index in range(BUFFERS):
                problem = shape.as_c()
                problem.x, problem.y = buffers[index].data.ptr, buffers[(index + 1) % BUFFERS].data.ptr
                problem.weight, problem.colsum, problem.weight_is_constant = weight.data.ptr, sums.data.ptr, 1
                problems.append(problem)
            scratch = cupy.empty(1 << 20, cupy.uint8)
            for plan in plans(variant, rows):
                if kernels.scratch_bytes(problems[0], plan) < 0:
                    continue
                calls = [kernels.prepared(problem, plan, scratch.data.ptr) for problem in problems]
                found = []
                for pause in (True, False, False):
                    for buffer in buffers:
                        buffer.fill(0xFFFF)
                    buffers[0][...] = first
                    cupy.cuda.Device().synchronize()
                    for index in range(CALLS):
                        calls[index % BUFFERS](stream.ptr)
                        if pause:
                            stream.synchronize()
                    stream.synchronize()
                    found.append(buffers[CALLS % BUFFERS].get())
                with stream:
                    stream.begin_capture()
                    for index in range(CALLS):
                        calls[index % BUFFERS](stream.ptr)
                    graph = stream.end_capture()
                for _ in range(3):  # a graph brings the same flags again
                    for buffer in buffers:
                        buffer.fill(0xFFFF)
                    buffers[0][...] = first
                    cupy.cuda.Device().synchronize()
                    graph.launch(stream)
                    stream.synchronize()
                    found.append(buffers[CALLS % BUFFERS].get())
                assert len(np.unique(found[0])) > 100, f"{shape} {plan}"
                assert all((found[0] == other).all() for other in found[1:]), f"{shape} {plan}"
                checked += 1
    assert checked
