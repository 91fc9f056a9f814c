"""Timing several ways of computing one thing: warmed up, interleaved, medians and spread.

The variants take turns, so that a change of clock speed or of what else the machine does meets all of them alike.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Progress = Callable[[int, int], None]
"""Called with (rounds done, rounds expected)."""


@dataclass(frozen=True)
class Samples:
    """Seconds of single runs, in the order in which they were taken."""

    seconds: tuple[float, ...]

    def quantile(self, q: float) -> float:
        """Seconds below which the share `q` of the runs lies (0 … 1)."""
        return float(np.quantile(self.seconds, q))

    @property
    def median(self) -> float:
        return self.quantile(0.5)

    @property
    def spread(self) -> float:
        """(80% quantile − 20% quantile) / median: how much single runs vary; below 0.05 is quiet."""
        return (self.quantile(0.8) - self.quantile(0.2)) / self.median if self.median else 0.0

    def to_json(self) -> dict[str, Any]:
        return {
            "runs": len(self.seconds),
            "median_ms": round(self.median * 1e3, 6),
            "p20_ms": round(self.quantile(0.2) * 1e3, 6),
            "p80_ms": round(self.quantile(0.8) * 1e3, 6),
            "min_ms": round(min(self.seconds) * 1e3, 6),
            "spread": round(self.spread, 4),
        }


@dataclass(frozen=True)
class Ratio:
    """How long `new` takes relative to `old` (below 1 is faster), with a 95% interval of the median ratio."""

    value: float
    low: float
    high: float


def ratio(old: Samples, new: Samples) -> Ratio:
    """The median of the ratios of neighbouring runs. They were taken in the same round, so drift cancels; the interval
    comes from the order statistics of the ratios (a sign test), which assumes no distribution."""
    pairs = sorted(b / a for a, b in zip(old.seconds, new.seconds, strict=True))
    count = len(pairs)
    reach = 0.98 * math.sqrt(count)  # half of 1.96·sqrt(n): ranks around the middle
    low = max(0, math.floor(count / 2 - reach))
    high = min(count - 1, math.ceil(count / 2 + reach))
    return Ratio(float(np.median(pairs)), pairs[low], pairs[high])


def interleaved(
    variants: Mapping[str, Callable[[], object]],
    *,
    seconds: float = 3.0,
    warmup: int = 3,
    min_rounds: int = 10,
    max_rounds: int = 1000,
    progress: Progress | None = None,
) -> dict[str, Samples]:
    """Time the variants in turns.

    Args:
        variants: what to run, by name; each call must return only when the work is done.
        seconds: about how long to measure, all variants together; `min_rounds` has precedence.
        warmup: runs of each variant before anything is measured.
    """
    estimates = {name: _warm(run, warmup) for name, run in variants.items()}
    per_round = max(sum(estimates.values()), 1e-9)
    rounds = int(min(max_rounds, max(min_rounds, seconds / per_round)))
    taken: dict[str, list[float]] = {name: [] for name in variants}
    order: Sequence[str] = list(variants)
    for done in range(rounds):
        # Each variant leads in turn: the first after a pause meets other caches than the next.
        turn = done % len(order)
        for name in [*order[turn:], *order[:turn]]:
            start = time.perf_counter()
            variants[name]()
            taken[name].append(time.perf_counter() - start)
        if progress is not None:
            progress(done + 1, rounds)
    return {name: Samples(tuple(values)) for name, values in taken.items()}


def _warm(run: Callable[[], object], times: int) -> float:
    """Run some times; the shortest run in seconds."""
    best = float("inf")
    for _ in range(max(1, times)):
        start = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - start)
    return best
