"""The order in which cells are measured, and what is left out when there is no time; knows nothing of GPUs.

First every cell without the peers that take long, then once more, all contenders in turns, the cells whose claims
speak of those peers. A row of the second pass replaces that of the first.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from op_rows import FAILED, NOT_RUN, Row, of_cell
from op_suites import Cell

from onnxfuse.errors import OnnxfuseError

SLOW_PEERS = {"norm-linear": ("compile_us", "eager_graph_us", "eager_us"), "activation": ("compile_us",)}
"""What the second pass adds, by suite: PyTorch, which compiles for seconds and launches for milliseconds."""


class Measurer(Protocol):
    """Measures one call."""

    def measure(self, cell: Cell, peers: Sequence[str]) -> Mapping[str, object]:
        """Fields of its row; `peers` besides cuBLAS and cuBLASLt.

        Raises:
            OnnxfuseError: the fused op cannot be run, or gives a wrong result.
        """
        ...


def run(
    cells: Sequence[Cell],
    measurer: Measurer,
    common: Mapping[str, object],
    *,
    slow_peers: bool,
    seconds: float | None = None,
    on_row: Callable[[Cell, Row, list[Row]], None] = lambda cell, row, rows: None,
    clock: Callable[[], float] = time.monotonic,
) -> list[Row]:
    """The rows of all cells, in their order; those that `seconds` do not suffice for say so.

    `on_row` is called after every measurement with all rows there are by then.
    """
    started = clock()
    rows: dict[Cell, Row] = {}

    def attempt(cell: Cell, peers: Sequence[str]) -> None:
        absent = dict.fromkeys((p for p in SLOW_PEERS.get(cell.suite, ()) if p not in peers), NOT_RUN)
        try:
            measured: Mapping[str, object] = measurer.measure(cell, peers)
        except OnnxfuseError as error:
            measured = {"us": FAILED, "error": " ".join(str(error).split())[:200]}
        rows[cell] = of_cell(cell, common, {**absent, **measured})
        on_row(cell, rows[cell], list(rows.values()))

    def passes(todo: Sequence[Cell], peers_of: Callable[[Cell], Sequence[str]]) -> None:
        """Measures until the next cell would likely end late: the slowest of the last four says how long one takes."""
        taken: list[float] = []
        for cell in todo:
            begin = clock()
            if seconds is not None and begin - started + max(taken[-4:], default=0.0) > seconds:
                return
            attempt(cell, peers_of(cell))
            taken.append(clock() - begin)

    passes(cells, lambda cell: ())
    if slow_peers:
        right = [cell for cell in cells if cell in rows and rows[cell]["us"] != FAILED]
        passes([cell for cell in right if cell.suite in SLOW_PEERS], lambda cell: SLOW_PEERS[cell.suite])
    for cell in cells:
        if cell not in rows:
            wanted = ("us", "cublas_us", *SLOW_PEERS.get(cell.suite, ()))
            rows[cell] = of_cell(cell, common, dict.fromkeys(wanted, NOT_RUN))
    return [rows[cell] for cell in cells]


def line(cell: Cell, row: Row) -> str:
    """A row for the terminal."""
    if row["us"] in (FAILED, NOT_RUN):
        return f"{cell}: {row['us']} {row['error']}".rstrip()
    peers = "  ".join(f"{name[:-3]} {row[name]}" for name in ("cublaslt_us", "compile_us", "eager_graph_us", "eager_us")
                      if row[name] not in ("", NOT_RUN))  # fmt: skip
    return (
        f"{cell}: {row['us']} us, cublas {row['cublas_us']} ({row['cublas_layout']}), x{row['ratio']}, "
        f"{row['weight_tb_s']} TB/s, error {row['error']}  {peers}  [{row['plan']}]"
    )
