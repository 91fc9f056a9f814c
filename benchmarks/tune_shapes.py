"""Tunes the shapes of the benchmark's suites, without a model:

    python benchmarks/tune_shapes.py --suite llama swiglu -o tuning.json
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from bench_op import suites

from onnxfuse import tune


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", nargs="+", choices=list(suites()), default=["llama", "swiglu"])
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--skip", nargs="*", default=[], metavar="VARIANT", help="not to be tried, such as tile9")
    arguments = parser.parse_args()
    skip = set()
    for name in arguments.skip:
        found = re.fullmatch(r"([a-z]+)(\d+)", name)
        if found is None:
            parser.error(f"`{name}` is not a variant")
        skip.add((found[1], int(found[2])))
    shapes = [shape for name in arguments.suite for shape in suites()[name] if shape.dtype == "float16"]

    def show(tuned: tune.Tuned) -> None:
        shape = tuned.shape
        call = f"{shape.rows:5d}x{shape.k}->{shape.n}{' gated' if shape.gated else ''}"
        print(f"{call}: {tuned.default_microseconds:.2f} -> {tuned.microseconds:.2f} us  {tuned.plan}", flush=True)

    tune.tune_shapes(shapes, arguments.output, show, skip)


if __name__ == "__main__":
    main()
