"""What the rows of the op benchmark say about what is claimed of the kernels: met, missed, or open."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import op_rows
from op_rows import FAILED, Row, number
from op_suites import DTYPES, GOALS, cells

PUBLISHED = {
    (1, 1024): 6.31, (1, 2048): 5.14, (1, 4096): 1.76,
    (32, 1024): 5.68, (32, 2048): 5.43, (32, 4096): 1.83,
    (128, 1024): 4.95, (128, 2048): 4.17, (128, 4096): 1.91,
    (512, 1024): 2.64, (512, 2048): 1.78, (512, 4096): 1.76,
    (1024, 1024): 2.73, (1024, 2048): 1.93, (1024, 4096): 1.58,
}  # fmt: skip
"""By (rows, width): how much faster than eager, launched PyTorch LLMBoost's fused RMSNorm + Linear is, as published."""

NOISE = 1.01  # two measurements of one kernel differ by so much
Value = Callable[[Row], float | None]


@dataclass(frozen=True)
class Check:
    """One claim about one suite in one dtype; `met` is None while cells that it speaks of are not measured."""

    suite: str
    dtype: str
    claim: str
    figure: str
    met: bool | None

    @property
    def word(self) -> str:
        return {True: "met", False: "missed", None: "open"}[self.met]


def _over(field: str, base: str) -> Value:
    def value(row: Row) -> float | None:
        upper, lower = number(row[field]), number(row[base])
        return None if upper is None or not lower else upper / lower

    return value


def _field(name: str) -> Value:
    return lambda row: number(row[name])


def _published_margin(row: Row) -> float | None:
    """Our gain over eager PyTorch, both launched from Python, over the published gain."""
    gain = _over("eager_us", "launched_us")(row)
    return None if gain is None else gain / PUBLISHED[int(row["rows"]), int(row["k"])]


def _where(row: Row) -> str:
    activation = "" if row["activation"] == "none" or row["suite"] in ("swiglu", "layer-norm") else row["activation"]
    return f"{row['rows']} x {row['k']} -> {row['n']} {activation}".rstrip()


class _Suite:
    """The rows of a suite in a dtype, and the checks made of them."""

    def __init__(self, suite: str, dtype: str, rows: Sequence[Row]) -> None:
        self.suite, self.dtype = suite, dtype
        expected = [op_rows.of_cell(cell, {}, {}) for cell in cells((suite,), (dtype,))]
        by_key = {op_rows.key(row): row for row in rows}
        self.rows = [by_key.get(op_rows.key(row), row) for row in expected]

    def check(self, claim: str, value: Value, accept: Callable[[float], bool], worst: Callable[..., float] = max,
              only: Callable[[Row], bool] = lambda row: True, unit: str = "") -> Check:  # fmt: skip
        """`accept` must hold of every cell's value; the figure is the worst value, and where it is."""
        values: list[tuple[float, Row]] = []
        missing = failed = 0
        for row in filter(only, self.rows):
            measured = value(row)
            if measured is None:
                missing += 1
                failed += row["us"] == FAILED
            else:
                values.append((measured, row))
        bad = sum(not accept(v) for v, _ in values)
        met: bool | None = False if bad or failed else None if missing or not values else True
        if not values:
            return Check(self.suite, self.dtype, claim, f"{failed} failed" if failed else "not measured", met)
        at = worst(values, key=lambda item: item[0])
        figure = f"worst {at[0]:.3g}{unit} at {_where(at[1])}"
        if bad:
            figure += f"; {bad} of {len(values)} cells miss it"
        if failed:
            figure += f"; {failed} failed"
        if missing - failed:
            figure += f"; {missing - failed} not measured"
        return Check(self.suite, self.dtype, claim, figure, met)

    def mean(self, claim: str, value: Value, limit: float) -> Check:
        """The geometric mean of all cells is at most `limit`."""
        values = [v for row in self.rows if (v := value(row)) is not None]
        if not values:
            return Check(self.suite, self.dtype, claim, "not measured", None)
        mean = math.exp(sum(map(math.log, values)) / len(values))
        complete = len(values) == len(self.rows)
        suffix = "" if complete else f" of {len(values)} of {len(self.rows)} cells"
        met = False if mean > limit else True if complete else None
        return Check(self.suite, self.dtype, claim, f"{mean:.3f}{suffix}", met)


def _checks_of(suite: str, dtype: str, rows: Sequence[Row]) -> list[Check]:
    s = _Suite(suite, dtype, rows)
    ratio = _field("ratio")
    compiled, library = _over("us", "compile_us"), _over("us", "cublaslt_us")
    if suite == "norm-linear":
        return [
            s.check("at most 1.05 x cuBLAS' bare product", ratio, lambda v: v <= 1.05),
            s.mean("geometric mean at most 1.02 x cuBLAS", ratio, 1.02),
            s.check("no cell over 1.12 x cuBLAS", ratio, lambda v: v <= 1.12),
            s.check("faster than torch.compile", compiled, lambda v: v < 1),
            s.check("2.2 x as fast as eager PyTorch at 512 x 4096, both as graphs", _over("eager_graph_us", "us"),
                    lambda v: v >= 2.2, min, lambda row: (row["rows"], row["k"]) == ("512", "4096")),
            s.check("2.2 x as fast as eager PyTorch at 512 x 4096, both launched", _over("eager_us", "launched_us"),
                    lambda v: v >= 2.2, min, lambda row: (row["rows"], row["k"]) == ("512", "4096")),
            s.check("gain over launched eager PyTorch over that which LLMBoost published", _published_margin,
                    lambda v: v >= 1, min),
        ]  # fmt: skip
    if suite == "activation":
        return [
            s.check("at most 1.05 x cuBLAS' bare product", ratio, lambda v: v <= 1.05),
            s.check("not slower than cuBLASLt's epilogue", library, lambda v: v <= NOISE,
                    only=lambda row: row["activation"] == "gelu_tanh"),
            s.check("not slower than torch.compile", compiled, lambda v: v <= NOISE),
        ]  # fmt: skip
    if suite == "decode":
        return [s.check("weights read at 0.92 of the copy bandwidth", _field("bandwidth_share"),
                        lambda v: v >= 0.92, min)]  # fmt: skip
    return [s.check("at most 1.06 x cuBLAS' bare product", ratio, lambda v: v <= 1.06)]


def checks(rows: Iterable[Row], suites: Sequence[str] = GOALS, dtypes: Sequence[str] = DTYPES) -> list[Check]:
    """All claims about these suites, from the last measured row of each cell."""
    known = op_rows.latest(list(rows))
    return [check for suite in suites for dtype in dtypes for check in _checks_of(suite, dtype, known)]


def text(found: Sequence[Check]) -> str:
    """The checks as lines, the word first."""
    lines = [f"{c.word:7s} {c.suite:11s} {c.dtype:8s} {c.claim}: {c.figure}" for c in found]
    counts = {word: sum(c.word == word for c in found) for word in ("met", "missed", "open")}
    return "\n".join([*lines, ", ".join(f"{count} {word}" for word, count in counts.items())])
