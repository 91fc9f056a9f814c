"""What may import what: imports of the package by `ast`, `#include` lines of the custom ops."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "onnxfuse"
CUSTOM_OPS = ROOT / "custom_ops"

#: A package or module imports only what stands lower. Equal rank means: siblings, none imports another.
RANK = {
    "errors": -1, "replacement": 0,
    "graph": 1, "ops": 1, "destination": 1,
    "rules": 2, "analysis": 2, "blocks": 2, "quirks": 2, "inspection": 2, "diff": 2,
    "match": 3,
    "runtime": 4, "rewrite": 4, "lower": 4,
    "verify": 5, "bench": 5, "tune": 5, "ruletest": 5, "pipeline": 5,
    "report": 6, "reverting": 6, "explanation": 6, "skeleton": 6,
    "in_place_cache": 7,
    "optimizer": 8,
    "regress": 9, "html_report": 9, "pytest_plugin": 10,
    "cli": 10,
    "__init__": 11, "__main__": 11,
}  # fmt: skip
#: A rule is data: it knows nothing of graphs. A rewrite runs nothing. Exceptions to the ranks, downwards.
FORBIDDEN = {("rules", "graph"), ("rewrite", "runtime"), ("ops", "graph")}
#: Packages of others that only one of ours may import.
ONLY_IN = {
    "onnxruntime": {"runtime"}, "cupy": {"runtime"}, "click": {"cli"}, "rich": {"cli"},
    "onnx_graphsurgeon": {"graph"}, "yaml": {"rules"}, "pydantic": {"rules"},
}  # fmt: skip


def imports() -> Iterator[tuple[str, str, str]]:
    """(file:line, importing part, imported module)."""
    for path in sorted(PACKAGE.rglob("*.py")):
        part = path.relative_to(PACKAGE).with_suffix("").parts[0]
        for node in ast.walk(ast.parse(path.read_text())):
            names: list[str] = []
            if isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{path}: relative import"
                base = node.module or ""
                names = [f"{base}.{a.name}" for a in node.names] if base == "onnxfuse" else [base]
            elif isinstance(node, ast.Import):
                names = [a.name for a in node.names]
            for name in names:
                yield f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}", part, name


def test_every_part_has_a_rank() -> None:
    parts = {p.stem for p in PACKAGE.iterdir() if p.suffix == ".py" or (p / "__init__.py").exists()}
    assert parts <= set(RANK), "give the new part its place"


def test_imports_go_down() -> None:
    wrong = []
    for where, part, name in imports():
        if not name.startswith("onnxfuse."):
            continue
        used = name.split(".")[1]
        if used == part or used not in RANK:
            continue
        if RANK[used] >= RANK[part] or (part, used) in FORBIDDEN:
            wrong.append(f"{where}: {part} imports {used}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("package", sorted(ONLY_IN))
def test_packages_of_others_stay_in_one_place(package: str) -> None:
    wrong = [f"{where}: {part}" for where, part, name in imports()
             if name.split(".")[0] == package and part not in ONLY_IN[package]]
    assert not wrong, "\n".join(wrong)


def test_onnxruntime_is_imported_when_needed() -> None:
    """Not at the head of a module: `import onnxfuse` and `--help` work without it."""
    for path in (PACKAGE / "runtime").rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                names = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""]
                assert not any(n.split(".")[0] in ("onnxruntime", "cupy") for n in names), path


def test_only_the_renderer_prints() -> None:
    wrong = []
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.relative_to(PACKAGE).as_posix() == "cli/render.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
                wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not wrong, "\n".join(wrong)


def includes(path: Path) -> list[str]:
    return re.findall(r'^\s*#\s*include\s*[<"]([^">]+)[">]', path.read_text(), re.MULTILINE)


def sources() -> list[Path]:
    return [p for p in sorted(CUSTOM_OPS.rglob("*")) if p.suffix in (".h", ".cc", ".cu", ".cuh", ".inc")]


def folder(path: Path) -> str:
    parts = path.relative_to(CUSTOM_OPS).parts
    return parts[0] if len(parts) > 1 else ""


OP_FOLDERS = {folder(p) for p in sources() if p.name == "op.cc"}


def test_ops_do_not_include_each_other() -> None:
    assert {"linear", "gated_linear"} <= OP_FOLDERS
    for path in sources():
        for include in includes(path):
            target = (path.parent / include).resolve()
            if target.is_relative_to(CUSTOM_OPS) and target.exists() and folder(path) in OP_FOLDERS | {"common"}:
                others = OP_FOLDERS - {folder(path)}
                assert folder(target) not in others, f"{path.relative_to(ROOT)} includes {include}"


def test_kernels_do_not_know_onnxruntime() -> None:
    """Device code, `common/` and the kernels of each op do not; only the glue does."""
    for path in sources():
        kernel = path.suffix in (".cu", ".cuh", ".inc") or folder(path) == "common"
        if kernel or (folder(path) in OP_FOLDERS and path.name != "op.cc"):
            assert not [i for i in includes(path) if "onnxruntime" in i or i.startswith("../ort/")], path
