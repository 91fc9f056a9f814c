"""Finding, checking and registering the custom-op library; building it without what it needs."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import onnxruntime as ort
import pytest

from onnxfuse.errors import RuntimeMissingError
from onnxfuse.runtime import library

CUSTOM_OPS = Path(__file__).parents[2] / "custom_ops"


def test_library_path_is_a_file_and_its_build_info_tells_it() -> None:
    path = library.library_path()
    assert path.is_file()
    info = library.build_info()
    assert info["path"] == str(path)
    assert info["abi"] == library.ABI_VERSION
    assert {"Linear", "GatedLinear"} <= {op["name"] for op in info["ops"]}


def test_environment_names_the_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    copy = tmp_path / "copy.so"
    copy.write_bytes(library.library_path().read_bytes())
    monkeypatch.setenv(library.ENVIRONMENT_VARIABLE, str(copy))
    assert library.library_path() == copy
    library.register(ort.SessionOptions())


def test_missing_library_says_where_it_was_looked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(library.ENVIRONMENT_VARIABLE, str(tmp_path / "nowhere.so"))
    with pytest.raises(RuntimeMissingError) as caught:
        library.register(ort.SessionOptions())
    assert f"`{tmp_path / 'nowhere.so'}`" in caught.value.message
    assert library.ENVIRONMENT_VARIABLE in (caught.value.hint or "")


def test_foreign_library_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    foreign = tmp_path / "foreign.so"
    foreign.write_bytes(b"no library at all")
    monkeypatch.setenv(library.ENVIRONMENT_VARIABLE, str(foreign))
    with pytest.raises(RuntimeMissingError, match="not a usable custom-op library"):
        library.library_path()


def test_library_of_another_abi_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "ABI_VERSION", library.ABI_VERSION + 1)
    library._check_abi.cache_clear()
    with pytest.raises(RuntimeMissingError, match="has ABI version"):
        library.library_path()
    library._check_abi.cache_clear()


def test_abi_version_is_the_same_in_cmake_and_python() -> None:
    assert f"set(ONNXFUSE_ABI_VERSION {library.ABI_VERSION})" in (CUSTOM_OPS / "CMakeLists.txt").read_text()


@pytest.mark.parametrize("isa", ["baseline", "avx2"])
def test_kernels_of_lesser_instruction_sets(isa: str) -> None:
    environment = {**os.environ, "ONNXFUSE_ISA": isa}
    name = "import sys; from onnxfuse.runtime import library; print(library.build_info()['isa'])"
    chosen = subprocess.run([sys.executable, "-c", name], env=environment, capture_output=True, text=True, check=True)
    if chosen.stdout.strip() != isa:
        pytest.skip(f"this CPU has no {isa}")
    tests = ["tests/ops/test_kernels.py", "-k", "range or several_threads or huge or (test_linear and silu)"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *tests]
    run = subprocess.run(command, env=environment, cwd=CUSTOM_OPS.parent, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout[-2000:]


def load_header_script() -> object:
    spec = importlib.util.spec_from_file_location("fetch_ort_headers", CUSTOM_OPS / "cmake" / "fetch_ort_headers.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "Types: deb\nURIs: mirror\nSuites: old old-updates\nComponents: main\n\nTypes: deb\nSuites: old-security\n",
            "Types: deb\nURIs: mirror\nSuites: new\nComponents: main\n",
        ),
        (
            "# a comment\ndeb [signed-by=k] mirror old main\ndeb mirror old-security main\n",
            "deb [signed-by=k] mirror new main\n",
        ),
        ("deb mirror old main contrib\n", "deb mirror new main contrib\n"),
    ],
)
def test_source_list_is_moved_to_another_release(text: str, expected: str) -> None:
    assert load_header_script().for_release(text, "new") == expected  # type: ignore[attr-defined]


def test_header_script_fails_cleanly_where_there_is_no_apt(tmp_path: Path) -> None:
    script = CUSTOM_OPS / "cmake" / "fetch_ort_headers.py"
    run = subprocess.run(
        [sys.executable, str(script), str(tmp_path)], env={"PATH": ""}, capture_output=True, text=True, check=False
    )
    assert run.returncode == 1
    assert "no apt-get" in run.stderr
