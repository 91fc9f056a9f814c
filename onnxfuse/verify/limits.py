"""A user's own limits for outputs, instead of the criterion of `compare`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from onnxfuse.errors import UsageError


@dataclass(frozen=True)
class Limits:
    """|a − b| ≤ atol + rtol·|b|, for all outputs (key "") and for single ones."""

    rtol: dict[str, float]
    atol: dict[str, float]

    def __bool__(self) -> bool:
        return bool(self.rtol or self.atol)

    def violations(self, name: str, a: np.ndarray, b: np.ndarray) -> int:
        """How many elements are off (NaN and infinities must be the same)."""
        rtol = self.rtol.get(name, self.rtol.get("", 0.0))
        atol = self.atol.get(name, self.atol.get("", 0.0))
        close = np.isclose(np.asarray(a, np.float64), np.asarray(b, np.float64), rtol=rtol, atol=atol, equal_nan=True)
        return int(close.size - np.count_nonzero(close))


def parse(texts: Sequence[str], outputs: Sequence[str], option: str) -> dict[str, float]:
    """`1e-3` for all outputs, `name:1e-3` for one.

    Raises:
        UsageError: not a number, a negative one, or no such output.
    """
    limits: dict[str, float] = {}
    for text in texts:
        name, _, number = text.rpartition(":")
        try:
            limits[name] = float(number)
            if not limits[name] >= 0:
                raise ValueError
        except ValueError:
            raise UsageError(f"`{text}` is no value for {option}", hint="write 1e-3, or output:1e-3") from None
        if name and name not in outputs:
            raise UsageError(f"there is no output `{name}`", hint=f"the model has {', '.join(outputs)}")
    return limits
