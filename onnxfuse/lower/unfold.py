"""Undoes what fuse did to constants, by the recipe that each made constant carries.

Where an op is taken apart again, the model gets back the very tensors that it came with: nothing is rounded twice,
and a weight that was shared before is shared again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from onnxfuse.graph import consts
from onnxfuse.graph.ir import Constant, Value
from onnxfuse.lower import weights
from onnxfuse.lower.emit import Emitter


@dataclass(frozen=True)
class Unscaled:
    """A product without its norm's scale and shift, and these."""

    weight: Value
    bias: Value | None
    scale: Constant
    shift: Constant | None


def unscaled(weight: Value, bias: Value | None) -> Unscaled | None:
    """The constants before a norm's scale went into the weight and its shift into the bias; None if they did not."""
    made = _recipe(weight)
    if made is None or made[0] != "scale_rows":
        return None
    original, scale = made[1]
    if len(consts.shape_of(scale)) != 1 or _is_rounded(scale):
        return None
    shifted = _recipe(bias)
    if shifted is not None and shifted[0] == "matmul_bias" and shifted[1][0] is original:
        return Unscaled(original, shifted[1][2], scale, shifted[1][1])
    return Unscaled(original, bias, scale, None)


def _is_rounded(scale: Constant) -> bool:
    """Whether the norm's scale came in float32 and was cast to bfloat16. Its few digits were not used for the folded
    weight, which is the better one."""
    made = _recipe(scale)
    return made is not None and made[0] == "cast" and consts.dtype_of(scale) == "bfloat16"


def packed_parts(
    emitter: Emitter, weight: Constant, bias: Constant | None, layout: str, sizes: list[int]
) -> list[tuple[Constant, Constant | None]]:
    """The weights and biases of `sizes` columns each that were packed; cut out anew if they were not packed by us."""
    made = _recipe(weight)
    if made is not None and made[0] == "concat":
        axis = 0 if layout == "NK" else 1
        found = [p for p in made[1] if isinstance(p, Constant)]
        if [consts.shape_of(p)[axis] for p in found] == sizes:
            return list(zip(found, _bias_parts(emitter, bias, sizes), strict=True))
    pieces = []
    start = 0
    for size in sizes:
        pieces.append(weights.columns(emitter, weight, layout, start, start + size))
        start += size
    return list(zip(pieces, _bias_parts(emitter, bias, sizes), strict=True))


def _bias_parts(emitter: Emitter, bias: Constant | None, sizes: list[int]) -> list[Constant | None]:
    if bias is None:
        return [None] * len(sizes)
    made = _recipe(bias)
    if made is not None and made[0] == "concat" and len(made[1]) == len(sizes):
        have = [size if p is None else consts.size_of(p) for p, size in zip(made[1], sizes, strict=True)]
        if have == sizes:
            return list(made[1])
    pieces: list[Constant | None] = []
    start = 0
    for size in sizes:
        pieces.append(weights.entries(emitter, bias, start, start + size))
        start += size
    return pieces


def _recipe(value: Value | None) -> tuple[str, tuple[Any, ...], dict[str, Any]] | None:
    return value.recipe if isinstance(value, Constant) else None
