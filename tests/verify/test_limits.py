"""A user's own limits."""

from __future__ import annotations

import numpy as np
import pytest

from onnxfuse.errors import UsageError
from onnxfuse.verify.limits import Limits, parse


def test_own_limits() -> None:
    limits = Limits(parse(("1e-3", "b:0.5"), ["a", "b"], "--rtol"), {})
    assert limits.violations("a", np.array([1.0, 1.01]), np.array([1.0, 1.0])) == 1
    assert limits.violations("b", np.array([1.0, 1.01]), np.array([1.0, 1.0])) == 0
    assert limits.violations("a", np.array([np.nan, 1.0]), np.array([np.nan, np.inf])) == 1
    assert limits and not Limits({}, {})


def test_what_is_refused() -> None:
    with pytest.raises(UsageError, match="no output `c`"):
        parse(("c:1",), ["a"], "--atol")
    with pytest.raises(UsageError, match="`x` is no value for --atol"):
        parse(("x",), ["a"], "--atol")
    with pytest.raises(UsageError, match="`-1` is no value for --rtol"):
        parse(("-1",), ["a"], "--rtol")
