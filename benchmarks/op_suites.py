"""The cells of the op benchmark: which product, with what around it, for how many rows, in which dtype.

A suite is a claim about one op; a cell is one call of it. Cells of a low priority number are measured first, so that
a run that has to end early has the most important ones.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from onnxfuse.runtime.kernels import Shape

DTYPES = ("float16", "bfloat16")
ROWS = (1, 32, 128, 512, 1024)
WIDTHS = (1024, 2048, 4096)
ACTIVATIONS = ("gelu_tanh", "gelu", "silu")
MANY_ROWS = (512, 1024, 2048, 4096)
LLAMA_8B = ((6144, 4096, "rms"), (4096, 4096, "none"), (28672, 4096, "rms"), (4096, 14336, "none"))
"""(N, K, norm before it): query, key and value; attention output; gate and up; down."""

BERT_LARGE = ((3072, 1024), (1024, 1024), (4096, 1024), (1024, 4096))
VIT_L_ROWS = (197, 577, 1576, 3152)
"""One image of 224 or 384 pixels, eight or sixteen of 224: 197 and 577 patches are odd numbers of rows."""

GOALS = ("norm-linear", "activation", "swiglu", "decode", "layer-norm")
"""The suites that something is claimed of (op_verdict.py)."""
SUITES = (*GOALS, "llama", "between")
"""`llama` is what a Llama-3-8B needs tuned besides; `between` what has to be chosen without measured plans."""

ROWS_BETWEEN = (24, 48, 100, 300, 700, 1300, 2600)
WEIGHTS_BETWEEN = ((1024, 1024), (4096, 1024), (1024, 4096), (3072, 768), (4096, 4096), (6144, 4096), (14336, 4096),
                   (4096, 14336), (5120, 2048))  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """One call to measure."""

    suite: str
    shape: Shape
    priority: int = 0

    @property
    def packed_columns(self) -> int:
        return self.shape.n * (2 if self.shape.gated else 1)

    @property
    def weight_bytes(self) -> int:
        return self.packed_columns * self.shape.k * 2

    def __str__(self) -> str:
        s = self.shape
        parts = [s.norm if s.norm != "none" else "", "gated" if s.gated else "", "bias" if s.bias else "",
                 s.activation if s.activation != "none" else "", "residual" if s.residual else ""]  # fmt: skip
        return f"{self.suite} {s.dtype} {s.rows}x{s.k}->{s.n} {' '.join(filter(None, parts))}".rstrip()


def _float16_cells() -> list[Cell]:
    def activated(n: int, k: int, rows: int, priority: int) -> list[Cell]:
        return [Cell("activation", Shape(rows, n, k, activation=a, bias=True), priority) for a in ACTIVATIONS]

    found = [Cell("norm-linear", Shape(m, d, d, norm="rms")) for d in WIDTHS for m in ROWS]
    found += [cell for m in MANY_ROWS for cell in activated(4096, 4096, m, 0)]
    layers = [(n, k) for n, k, _ in LLAMA_8B if (n, k) != (4096, 4096)] + list(BERT_LARGE)
    found += [cell for m in MANY_ROWS for n, k in layers for cell in activated(n, k, m, 2)]
    for m in (1, 16, 128, 512, 2048):
        found.append(Cell("swiglu", Shape(m, 14336, 4096, norm="rms", activation="silu", gated=True)))
    found += [Cell("decode", Shape(m, n, k, norm=norm)) for n, k, norm in LLAMA_8B for m in (1, 2, 4, 8, 16)]
    rows = sorted({128, 384, 512, 1024, 2048, 4096, *VIT_L_ROWS})  # BERT-large and ViT-L have the same widths
    found += [Cell("layer-norm", Shape(m, 4096, 1024, norm="layer", activation="gelu", bias=True)) for m in rows]
    for m in (1, 16, 128, 512, 2048):
        found += [
            Cell("llama", Shape(m, 6144, 4096, norm="rms"), 4), Cell("llama", Shape(m, 4096, 4096, residual=True), 4),
            Cell("llama", Shape(m, 4096, 14336, residual=True), 4), Cell("llama", Shape(m, 32000, 4096, norm="rms"), 4),
        ]  # fmt: skip
    found += [
        Cell("between", Shape(m, n, k, norm=norm), 6)
        for n, k in WEIGHTS_BETWEEN for m in ROWS_BETWEEN for norm in ("none", "rms")
    ]  # fmt: skip
    return found


def cells(suites: tuple[str, ...] = GOALS, dtypes: tuple[str, ...] = DTYPES) -> list[Cell]:
    """All cells of these suites, most important first: bfloat16 comes right after the same cells in float16."""
    found = [
        Cell(cell.suite, replace(cell.shape, dtype=dtype), cell.priority + DTYPES.index(dtype))
        for dtype in dtypes for cell in _float16_cells() if cell.suite in suites
    ]  # fmt: skip
    return sorted(found, key=lambda cell: (cell.priority, SUITES.index(cell.suite)))
