"""Every model of the corpus: canonicalized, it computes what it computed, is no larger, and inference told the truth.

Set ONNXFUSE_CORPUS to a folder of ``NAME.onnx`` with ``NAME.npz`` (inputs and outputs of two sets of sizes).
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import onnx
import pytest

from onnxfuse.graph import model, shapes
from onnxfuse.graph.canonicalize import canonicalize
from tests.graph.soundness import disagreements, session

FOLDER = os.environ.get("ONNXFUSE_CORPUS")
FILES = sorted(Path(FOLDER).glob("*.onnx")) if FOLDER else []

pytestmark = [
    pytest.mark.corpus,
    pytest.mark.skipif(not FILES, reason="ONNXFUSE_CORPUS names no folder of models"),
]

#: Relative to the largest value. Float16 models run on the CPU through float32 between neighbouring nodes, so removing
#: a node between two others changes where they round.
TOLERANCE = {"float16": 5e-3}


def _sets(path: Path) -> list[tuple[dict[str, np.ndarray], dict[str, np.ndarray]]]:
    stored = np.load(path.with_suffix(".npz"))
    found = []
    for name in ("set0", "set1"):
        parts = [{}, {}]
        for key in stored.files:
            for part, kind in zip(parts, ("in", "out"), strict=True):
                if key.startswith(f"{name}/{kind}/"):
                    part[key.removeprefix(f"{name}/{kind}/")] = stored[key]
        found.append((parts[0], parts[1]))
    return found


@pytest.mark.parametrize("path", FILES or [Path("none")], ids=lambda p: p.stem)
def test_inferred_sizes_are_the_real_ones(path: Path) -> None:
    if "bf16" in path.stem:
        pytest.skip("ONNX Runtime's CPU provider has too few bfloat16 kernels")
    loaded = model.load(path)
    shapes.infer(loaded)
    for feeds, _ in _sets(path):
        wrong, checked = disagreements(loaded, feeds)
        assert not wrong
        assert checked > 100


@pytest.mark.parametrize("path", FILES or [Path("none")], ids=lambda p: p.stem)
def test_canonical_models_compute_the_same(path: Path, tmp_path: Path) -> None:
    loaded = model.load(path)
    before = sum(len(graph.nodes) for graph in loaded.graphs())
    interface = [(v.name, v.declared.SerializeToString()) for v in [*loaded.graph.inputs, *loaded.graph.outputs]]
    canonicalize(loaded)
    assert sum(len(graph.nodes) for graph in loaded.graphs()) <= before
    out = tmp_path / path.name
    loaded.save(out)
    assert out.stat().st_size <= path.stat().st_size * 1.01
    written = onnx.load(out)
    assert [(v.name, v.SerializeToString()) for v in [*written.graph.input, *written.graph.output]] == interface
    assert not any(canonicalize(model.load(out)).values()), "a second run finds nothing to do"
    if "bf16" in path.stem:
        return
    running = session(written)
    names = [o.name for o in running.get_outputs()]
    # Integer products depend on the instruction set: what was stored is of another machine.
    here = session(onnx.load(path)) if "int" in path.stem else None
    for feeds, stored in _sets(path):
        expected = dict(zip(names, here.run(None, feeds), strict=True)) if here else stored
        for name, found in zip(names, running.run(None, feeds), strict=True):
            want = expected[name]
            assert found.shape == want.shape
            assert found.dtype == want.dtype
            if want.size == 0:
                continue
            wide = want.astype(np.float64)
            largest = max(float(np.abs(wide).max()), 1e-30)
            half = "f16" in path.stem
            limit = (TOLERANCE["float16"] if half else 1e-5) * largest
            assert float(np.abs(found.astype(np.float64) - wide).max()) <= limit
        wrong, checked = disagreements(loaded, feeds)
        assert not wrong
        assert checked > 50
