"""What is regular in a constant: one number everywhere, counting along an axis, a band of two numbers."""

from __future__ import annotations

from typing import Any

import numpy as np


def find(array: np.ndarray) -> tuple[Any, ...] | None:
    """``uniform, number``; ``counting, axis, start, step``; or ``band, diagonal, width, inside, outside``: the number
    `inside` where column - row ≤ diagonal (and, unless width is None, > diagonal - width), the other one elsewhere."""
    if array.size == 0 or array.dtype.kind not in "fiub":
        return None
    numbers = array.astype(np.float64)
    first = numbers.reshape(-1)[0]
    if (numbers == first).all():
        return "uniform", array.reshape(-1)[0].item()
    if array.dtype.kind in "iu":
        for axis, size in enumerate(array.shape):
            if size < 2:
                continue
            line = np.moveaxis(array, axis, -1).reshape(-1, size)
            step = int(line[0, 1]) - int(line[0, 0])
            if (line == int(line[0, 0]) + step * np.arange(size)).all():
                return "counting", axis, int(line[0, 0]), step
    if array.ndim < 2 or array.shape[-1] < 2 or array.shape[-2] < 2:
        return None
    sheets = numbers.reshape(-1, *array.shape[-2:])
    sheet = sheets[0]
    if not (sheets == sheet).all():
        return None
    levels = np.unique(sheet)
    if levels.size != 2:
        return None
    rows, columns = np.indices(sheet.shape)
    for inside in levels:
        chosen = sheet == inside
        offsets = (columns - rows)[chosen]
        diagonal, lowest = int(offsets.max()), int(offsets.min())
        # A band must be seen to end inside the matrix; otherwise nothing is known beyond it.
        if diagonal >= sheet.shape[1] - 1:
            continue
        for width in (None, diagonal - lowest + 1):
            band = columns - rows <= diagonal
            if width is not None:
                band &= columns - rows > diagonal - width
            if (band == chosen).all():
                other = levels[levels != inside][0]
                kind = array.dtype.kind
                cast = bool if kind == "b" else int if kind in "iu" else float
                return "band", diagonal, width, cast(inside), cast(other)
    return None
