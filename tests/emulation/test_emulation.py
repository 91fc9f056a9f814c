"""The sm_90a kernels on the CPU: threads, barriers and copies emulated in random order, results against float64.

No GPU is needed, only the CUDA headers: what a host compiler cannot take of the kernels' sources is replaced, and
`hopper_ptx.cuh` of this folder takes the place of theirs. `ONNXFUSE_EMULATION=SECONDS,SEED` asks for a longer run.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.cuda_headers import cuda_headers

ROOT = Path(__file__).parents[2]
CUDA, HERE = ROOT / "custom_ops" / "cuda", Path(__file__).parent
FLAGS = ("-std=c++17", "-O1", "-mavx2", "-mf16c", "-w", "-Wno-psabi")

#: What stands in the sources, and what a host compiler gets.
REPLACED = (
    (r"extern __shared__ uint8_t shared_raw\[\];", "uint8_t* const shared_raw = cta_shared();"),
    (r'\(""\s*: "\+f"\(', '("" : "+x"('),
    (r'"\+l"\(', '"+r"('),
    (r'float r;\n\s*asm\("ex2[^\n]*\n\s*return r;', "return exp2f(v);"),
    (r'float r;\n\s*asm\("rcp[^\n]*\n\s*return r;', "return 1.0f / v;"),
)


def build(kernel: str, folder: Path) -> Path:
    """The emulation of one family; its path. Skips where it cannot be built or run."""
    compiler, include = shutil.which("g++"), cuda_headers()
    if compiler is None or include is None:
        pytest.skip("there is no g++, or no CUDA headers")
    cpu = Path("/proc/cpuinfo")
    if not cpu.exists() or not {"avx2", "f16c"} <= set(cpu.read_text().split()):
        pytest.skip("the CPU has no half-precision conversions")
    for path in (*CUDA.glob("*.cuh"), *CUDA.glob("*.h"), *CUDA.glob("*_variants.inc")):
        if path.name in ("hopper_ptx.cuh", "wgmma_shapes.cuh", "mma.cuh"):
            continue
        text = path.read_text()
        for pattern, replacement in REPLACED:
            text = re.sub(pattern, replacement, text)
        (folder / path.name).write_text(text)
    (folder / "wgmma_shapes.cuh").write_text('#pragma once\n#include "hopper_ptx.cuh"\n')
    program = folder / kernel
    includes = (f"-I{HERE}", f"-I{folder}", f"-isystem{include}")
    command = [compiler, *FLAGS, *includes, str(HERE / f"{kernel}.cc"), "-o", str(program)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[:4000]
    return program


@pytest.mark.parametrize("kernel", ("tile", "stream", "skinny"))
def test_right_whatever_the_order(kernel: str, tmp_path: Path) -> None:
    program = build(kernel, tmp_path)
    seconds, seed = os.environ.get("ONNXFUSE_EMULATION", "10,1").split(",")
    done = subprocess.run([str(program), seconds, seed], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert int(done.stdout.split()[0]) >= 20


@pytest.mark.parametrize(("kernel", "file", "correct", "broken", "complaint"), (
    ("tile", "wgmma_tile.cuh", "barrier_expect_bytes(full + stage * 8, min(", "if (false) barrier_expect_bytes(0, min(",
     "FAILED"),
    ("tile", "wgmma_tile.cuh", "if (p.m < Tile::kTileM && p.cluster_n == 1) {", "if (false) {",
     "nobody has written"),
    ("tile", "wgmma_tile.cuh", "if (!p.prefetch_weight) wait_for_prerequisites();", "", "FAILED"),
    ("stream", "wgmma_stream.cuh", "wgmma_wait<1>();", "", "FAILED"),
    ("skinny", "skinny.cuh", "wait_for_value(any);", "", "FAILED"),
), ids=("an expectation", "rows beyond x", "a wait", "a product", "fragments"))  # fmt: skip
def test_what_is_broken_is_found(
    kernel: str, file: str, correct: str, broken: str, complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = tmp_path / "sources"
    shutil.copytree(CUDA, sources)
    text = (sources / file).read_text()
    assert correct in text
    (sources / file).write_text(text.replace(correct, broken))
    for variants in sources.glob("*_variants.inc"):  # a few, for the time that compiling takes
        lines = [line for line in variants.read_text().splitlines() if line.startswith("VARIANT")]
        variants.write_text("\n".join(lines[:: max(1, len(lines) // 4)]) + "\n")
    monkeypatch.setattr(f"{__name__}.CUDA", sources)
    done = subprocess.run([str(build(kernel, tmp_path)), "60", "1"], capture_output=True, text=True)
    assert done.returncode == 1 and complaint in done.stdout
