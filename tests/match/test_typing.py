"""Shapes compared with what is known of them."""

from __future__ import annotations

import pytest

from onnxfuse.graph import dims
from onnxfuse.match.typing import broadcasts_to

A, B, C = (dims.symbol(name) for name in "abc")
BOTH = dims.broadcast(A, B)


@pytest.mark.parametrize(
    ("shape", "whole", "holds"),
    [
        ((A,), (A,), True),
        ((1,), (A,), True),
        ((A,), (B,), False),
        ((A,), (BOTH,), True),
        ((BOTH,), (BOTH,), True),
        ((BOTH,), (dims.broadcast(BOTH, C),), True),
        ((C,), (BOTH,), False),
        ((BOTH,), (A,), False),
        ((A,), (A + 1,), False),
        ((None,), (A,), False),
        ((A,), (None,), False),
        ((A,), (B, A), True),
        ((B, A), (A,), False),
        (None, (A,), False),
    ],
)
def test_broadcasts_to(shape: tuple | None, whole: tuple, holds: bool) -> None:
    """A part of a broadcast size fits it, whichever of the parts is not 1."""
    assert broadcasts_to(shape, whole) is holds
