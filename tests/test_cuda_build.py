"""The build of the CUDA kernels: what a change rebuilds, and that no kernel asks for more than its architecture has."""

from __future__ import annotations

import contextlib
import ctypes
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnxfuse.errors import RuntimeMissingError
from onnxfuse.runtime import kernels, library
from tests.cuda_headers import cuda_headers

ROOT = Path(__file__).parent.parent
CUDA = ROOT / "custom_ops" / "cuda"

#: Bytes of shared memory that a block may have, by architecture; static memory is limited to 48 KiB on all.
SHARED_MEMORY = {80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}
STATIC_LIMIT = 48 * 1024


def includes(path: Path) -> set[Path]:
    """The files of this folder that a file includes, and those that they include."""
    found: set[Path] = set()
    todo = [path]
    while todo:
        for name in re.findall(r'^\s*#include "([^"]+)"', todo.pop().read_text(), re.MULTILINE):
            included = CUDA / name
            if included.exists() and included not in found:
                found.add(included)
                todo.append(included)
    return found


def sources() -> list[Path]:
    """What is compiled, by CMakeLists.txt; a family that is compiled once per dtype is one source."""
    text = re.sub(r"#.*", "", (CUDA / "CMakeLists.txt").read_text())
    names = set(re.findall(r"\b[\w/]+\.(?:cc|cu)\b", text))
    names |= {f"wgmma_{family}.cu" for family in ("stream", "tile")}
    return sorted(path for path in CUDA.glob("*.c[cu]") if path.name in names)


def rebuilt(name: str) -> set[str]:
    """The sources that a change of a file recompiles."""
    return {path.name for path in sources() if path.name == name or CUDA / name in includes(path)}


def architectures_of(name: str) -> str:
    """`portable` if CMakeLists.txt compiles a .cu file for every architecture, `90a` if for that one."""
    text = re.sub(r"\$\{_family\}", "stream", (CUDA / "CMakeLists.txt").read_text())
    text += re.sub(r"\$\{_family\}", "tile", (CUDA / "CMakeLists.txt").read_text())
    found = {
        "portable" if "_portable" in match[1] else "90a"
        for match in re.finditer(r"onnxfuse_cuda_objects\(\w+ (\S+) ([^)]*)\)", text) if name in match[2].split()
    }  # fmt: skip
    assert len(found) == 1, f"{name}: {found}"
    return found.pop()


def test_everything_is_compiled() -> None:
    assert {path.name for path in CUDA.glob("*.c[cu]")} == {path.name for path in sources()}


@pytest.mark.parametrize(("changed", "expected"), (
    ("generic.cuh", {"generic.cu"}),
    ("generic.cu", {"generic.cu"}),
    ("vendor.cu", {"vendor.cu"}),
    ("row_stats.cu", {"row_stats.cu"}),
    ("wgmma_stream.cuh", {"wgmma_stream.cu", "hopper_launch.cu"}),
    ("stream_variants.inc", {"wgmma_stream.cu", "hopper_launch.cu"}),
    ("stream_params.cuh", {"skinny.cu", "wgmma_stream.cu", "hopper_launch.cu"}),
    ("skinny.cuh", {"skinny.cu", "hopper_launch.cu"}),
    ("skinny_variants.inc", {"skinny.cu", "hopper_launch.cu"}),
    ("wgmma_tile.cuh", {"wgmma_tile.cu", "hopper_launch.cu"}),
    ("tile_variants.inc", {"wgmma_tile.cu", "hopper_launch.cu"}),
    ("tuning_sm90.inc", {"tuning_table.cc"}),
    ("choose.cc", {"choose.cc"}),
), ids=lambda given: given if isinstance(given, str) else "-".join(sorted(given)))  # fmt: skip
def test_a_change_rebuilds_only_its_own_family(changed: str, expected: set[str]) -> None:
    """Device code is compiled again only where it is part of; `hopper_launch.cu` has no kernel of its own."""
    assert rebuilt(changed) == expected


def test_the_ops_are_compiled_apart_from_the_kernels() -> None:
    for path in sources():
        kernels = [i for i in includes(path) if i.suffix == ".cuh"]
        assert path.suffix == ".cu" or not kernels, f"{path.name} includes {kernels}: host code would wait for nvcc"


def test_portable_kernels_have_only_static_shared_memory() -> None:
    """The compiler refuses more than 48 KiB of it, and every architecture has that: what compiles, fits."""
    assert min(SHARED_MEMORY.values()) >= STATIC_LIMIT
    for path in (p for p in sources() if p.suffix == ".cu" and architectures_of(p.name) == "portable"):
        for file in (path, *includes(path)):
            assert "extern __shared__" not in file.read_text(), f"{file.name} is in {path.name}"


def test_dynamic_shared_memory_is_within_sm_90() -> None:
    limit = re.search(r"kSharedMemoryLimit = (\d+)", (CUDA / "launch_attributes.h").read_text())
    assert limit is not None
    assert int(limit[1]) == SHARED_MEMORY[90]


def built() -> ctypes.CDLL | None:
    """A library with CUDA kernels, if there is one: that of a CI run, or the one in use."""
    candidates = [ROOT / "build" / "ci-cuda" / "libonnxfuse_ops.so"]
    with contextlib.suppress(RuntimeMissingError):
        candidates.append(library.library_path())
    for path in candidates:
        if path.exists():
            opened = ctypes.CDLL(str(path))
            if hasattr(opened, "onnxfuse_cuda_variant"):
                return opened
    return None


@pytest.mark.parametrize(("path", "name", "least"), ((1, "stream", 2), (2, "tile", 2)))
def test_every_variant_has_stages_that_fit(path: int, name: str, least: int) -> None:
    """Needs no GPU: the library says for each variant how many stages are within the shared memory."""
    opened = built()
    if opened is None:
        pytest.skip("there is no library with CUDA kernels")
    lists = ("stream", "skinny") if name == "stream" else (name,)
    text = "\n".join((CUDA / f"{part}_variants.inc").read_text() for part in lists)
    listed = re.findall(r"^VARIANT\((\d+),", text, re.MULTILINE)
    assert [int(index) for index in listed] == list(range(len(listed)))
    stages = []
    values = [ctypes.c_int() for _ in range(5)]
    while opened.onnxfuse_cuda_variant(path, len(stages), *map(ctypes.byref, values)) == 0:
        stages.append(values[3].value)
    if not stages:
        pytest.skip("the library was built without the sm_90a kernels")
    if len(stages) != len(listed):
        pytest.skip("the library is of another list of variants")
    assert min(stages) >= least, stages


@settings(max_examples=400, deadline=None)
@given(
    rows=st.integers(1, 5000) | st.integers(1, 1 << 20), n=st.integers(1, 1500), k=st.integers(1, 1500),
    step=st.sampled_from((1, 8, 64)), dtype=st.sampled_from(kernels.DTYPES), norm=st.sampled_from(kernels.NORMS),
    activation=st.sampled_from(kernels.ACTIVATIONS), gated=st.booleans(), architecture=st.sampled_from((80, 90, 100)),
)  # fmt: skip
def test_what_is_chosen_can_run(
    rows: int, n: int, k: int, step: int, dtype: str, norm: str, activation: str, gated: bool, architecture: int
) -> None:
    opened = built()
    if opened is None or not hasattr(opened, "onnxfuse_cuda_choose_for"):
        pytest.skip("there is no library with these CUDA kernels")
    shape = kernels.Shape(rows, n * step, k * step, dtype, norm, activation, gated)
    problem, plan = shape.as_c(), kernels.CPlan()
    problem.colsum = 16  # any address: it is only asked whether the plan can run
    opened.onnxfuse_cuda_choose_for(ctypes.byref(problem), architecture, 132, ctypes.byref(plan))
    opened.onnxfuse_cuda_scratch.restype = ctypes.c_int64
    assert opened.onnxfuse_cuda_scratch(ctypes.byref(problem), ctypes.byref(plan), None, ctypes.c_int64(0)) >= 0
    chosen = kernels.Plan.from_c(plan)
    if architecture != 90 or dtype == "float32" or (step == 1 and (n % 8 or k % 8)):
        assert chosen.path in ("generic", "vendor")
    elif rows <= 16:
        assert chosen.path == "stream"
    if rows * problem.n * (1 + gated) * problem.k <= 1 << 24:
        assert chosen.path != "vendor"


def test_host_code_compiles_without_the_hopper_kernels() -> None:
    """As it is for all architectures but 90; a compiler of host code is enough."""
    compiler, headers = shutil.which("g++") or shutil.which("c++"), cuda_headers()
    if compiler is None or headers is None:
        pytest.skip("there is no C++ compiler, or no CUDA toolkit with its headers")
    warnings = ["-Wall", "-Wextra", "-Wshadow", "-Werror"]
    flags = ["-std=c++17", "-fsyntax-only", *warnings, f"-I{CUDA}", f"-isystem{headers}"]
    for path in sources():
        if path.suffix != ".cc" or path.name in ("ops.cc", "cuda_call.cc"):  # these need ORT's headers too
            continue
        done = subprocess.run([compiler, *flags, str(path)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


def test_divisors_divide(tmp_path: Path) -> None:
    program = tmp_path / "divide.cc"
    program.write_text("""
        #include <cstdio>
        #include <random>
        #include "divisor.h"
        int main() {
          std::mt19937 random(1);
          const int largest = 0x7fffffff;
          long wrong = 0;
          auto check = [&](int n, int d) { wrong += onnxfuse::cuda::Divisor(d).divide(n) != n / d; };
          for (int i = 0; i < 1000000; ++i) {
            const int d = static_cast<int>(random() >> 1 >> random() % 31) | 1;
            const int multiple = static_cast<int>(random() >> 1) / d * d;  // where rounding shows first
            for (int n : {static_cast<int>(random() >> 1), multiple, multiple > 0 ? multiple - 1 : 0, largest, 0})
              check(n, d);
          }
          for (int d = 1; d < 300; ++d)
            for (int n = 0; n < 3000; ++n) check(n, d);
          std::printf("%ld", wrong);
        }
    """)
    compiler = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))))
    subprocess.run([compiler, "-O2", "-std=c++17", f"-I{CUDA}", program, "-o", tmp_path / "divide"], check=True)
    assert subprocess.run([tmp_path / "divide"], capture_output=True, text=True, check=True).stdout == "0"
