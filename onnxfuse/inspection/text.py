"""An inspection as rows of text."""

from __future__ import annotations

from typing import Any

from onnxfuse.inspection.model import Inspection
from onnxfuse.ops.opdef import TensorType


def quantity(number: float | None, unit: str = "") -> str:
    """`12.3 GFLOP`: three digits and a decimal prefix."""
    if number is None:
        return "?"
    for limit, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= limit:
            return f"{number / limit:.3g} {prefix}{unit}"
    return f"{number:.3g} {unit}".rstrip()


def describe(found: Inspection, top: int) -> tuple[list[tuple[str, str]], list[tuple[Any, ...]]]:
    """(facts as name and text, rows of the `top` most expensive ops and of the rest)."""
    parameters = found.parameters
    by_dtype = ", ".join(f"{quantity(n)} {dtype}" for dtype, n in parameters.by_dtype.items())
    facts = [
        ("model", found.path),
        ("producer", found.producer or "unknown"),
        ("opsets", ", ".join(f"{d} {v}" for d, v in found.opsets.items())),
        *((f"input {name}", _type(t)) for name, t in found.inputs.items()),
        *((f"output {name}", _type(t)) for name, t in found.outputs.items()),
        ("sizes", ", ".join(f"{d}={n}" for d, n in found.dims.items()) or "all fixed"),
        ("parameters", f"{quantity(parameters.count)} in {parameters.tensors} tensors ({by_dtype})"),
        ("weights", quantity(parameters.bytes, "B")),
        ("nodes", str(found.nodes)),
        ("operations", quantity(found.flops, "FLOP")),
        ("bytes moved", quantity(found.bytes, "B")),
        ("peak activations", f"{quantity(found.peak.bytes, 'B')} at {found.peak.node}"),
    ]
    if found.blocks is not None:
        facts += [(f"block {kind}", str(count)) for kind, count in found.blocks.items()]
    unknown = sum(r.unknown for r in found.ops)
    if unknown:
        facts.append(("unknown sizes", f"{unknown} nodes whose sizes depend on data are not counted"))
    rows: list[tuple[Any, ...]] = [
        (r.op, r.count, quantity(r.flops), quantity(r.bytes, "B"), round(r.intensity, 2)) for r in found.ops[:top]
    ]
    rest = found.ops[top:]
    if rest:
        flops, moved = sum(r.flops for r in rest), sum(r.bytes for r in rest)
        rows.append((f"{len(rest)} more ops", sum(r.count for r in rest), quantity(flops), quantity(moved, "B"), ""))
    return facts, rows


def _type(tensor: TensorType) -> str:
    return str(tensor)
