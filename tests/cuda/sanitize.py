"""Every kernel variant once on small shapes, to run under NVIDIA's checkers; compares each with the portable kernel.

    compute-sanitizer --tool memcheck python tests/cuda/sanitize.py --small     (also initcheck, synccheck)
    compute-sanitizer --tool racecheck python tests/cuda/sanitize.py --small --without-stream-sums

`--small` leaves out the shape with many tiles, `--part 1/4` runs a quarter, as racecheck is slow. Exits with 1 if a
result differs. Needs no PyTorch and no ONNX Runtime, so that the checkers see our kernels only.

By its trace, racecheck 2025.3 holds a warp at a cluster's barrier until all warps of the block wait at it. Those that
take the norm's sums in a streaming kernel wait there before they begin, others after they have the sums: the run never
ends.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from onnxfuse.runtime.kernels import Kernels, Plan, Shape, Variant

# Rows, columns, K: a single partial tile; several, with a K tail; one that begins among the rows before; a long K
EXTENTS = ((5, 136, 200), (70, 264, 328), (193, 424, 136), (20, 72, 1352))
MANY_TILES = (2120, 2568, 200)  # several for each multiprocessor, some partial


def plans(variants: list[Variant], shape: Shape, stream_sums: bool = True) -> Iterator[Plan]:
    for v in variants:
        if v.path == "stream" and shape.rows > 1000:
            continue
        if v.path == "stream":
            if v.split == 1:  # warps with nothing to do; several rounds of the ring with all warps
                for stages in (3, 9):
                    for row_stats in (0,) if shape.norm == "none" else (0, 1):
                        yield Plan("stream", v.index, stages, row_stats=row_stats, ahead=2)
                continue
            for split in (1, 2, 4):
                row_stats = split % 2 if shape.norm != "none" else 0
                if stream_sums or row_stats or shape.norm == "none":
                    yield Plan("stream", v.index, 3, split, row_stats=row_stats)
        elif v.gated == shape.gated:
            for cluster in ((1, 1), (2, 1), (1, 2)):
                for row_stats in (0,) if shape.norm == "none" else (0, 1, 2):
                    yield Plan("tile", v.index, 0, *cluster, raster=2, row_stats=row_stats)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="without the shape that has many tiles")
    parser.add_argument("--without-stream-sums", action="store_true",
                        help="without the runs in which a streaming kernel takes the norm's sums, for racecheck")
    parser.add_argument("--part", default="1/1", metavar="I/N", help="every N-th plan, from the I-th on")
    parser.add_argument("--verbose", action="store_true", help="name every plan before it runs")
    options = parser.parse_args()
    first, parts = map(int, options.part.split("/"))
    kernels = Kernels()
    variants = kernels.variants()
    checked = wrong = 0
    for rows, n, k in EXTENTS if options.small else (*EXTENTS, MANY_TILES):
        for norm, activation, gated in (("none", "none", False), ("rms", "silu", False), ("layer", "gelu", False),
                                        ("rms", "silu", True)):
            shape = Shape(rows, n, k, "float16", norm, activation, gated, bias=norm != "none",
                          residual=not gated and norm == "rms")
            problem = shape.as_c()
            problem.colsum = 16  # any address: it is only asked whether the plan can run
            with kernels.bench(shape) as bench:
                for plan in list(plans(variants, shape, not options.without_stream_sums))[first - 1 :: parts]:
                    if kernels.scratch_bytes(problem, plan) < 0:  # refused
                        continue
                    if options.verbose:
                        print(f"{shape.rows}x{shape.k}->{shape.n} {shape.norm} {plan}", flush=True)
                    measured = bench.measure(plan, 0.0)
                    checked += 1
                    if measured is None or not measured[1] < 3e-3:
                        wrong += 1
                        print(f"wrong: {measured} {shape} {plan}")
    print(f"{checked} kernel runs checked, {wrong} wrong")
    return 1 if wrong or not checked else 0


if __name__ == "__main__":
    sys.exit(main())
