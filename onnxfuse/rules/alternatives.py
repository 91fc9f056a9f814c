"""Alternatives that can never be chosen."""

from __future__ import annotations

from onnxfuse.rules.findings import Findings, distinct
from onnxfuse.rules.patterns import AnyPattern, ChainPattern, OpPattern
from onnxfuse.rules.program import Program


def alternative_findings(program: Program, out: Findings) -> None:
    """An alternative asks for all that an earlier one asks for: what it matches, the earlier one has taken."""
    for pattern in distinct(program):
        if not isinstance(pattern, AnyPattern):
            continue
        for index, later in enumerate(pattern.alternatives):
            earlier = next((e for e in pattern.alternatives[:index] if _covers(e, later)), None)
            if earlier is not None:
                first = earlier.id.removeprefix(f"{pattern.id}.")
                message = f"whatever alternative `{index}` of `{pattern.name}` matches, `{first}` matches before it"
                out.add("unreachable-alternative", later.id, message, "remove it, or put it first")


def _covers(earlier: object, later: object) -> bool:
    """Whether all conditions of `earlier` are conditions of `later`, and both set the same captures."""
    if type(earlier) is not type(later) or earlier.set != later.set or earlier.checks is not None:  # type: ignore[attr-defined]
        return False
    if isinstance(earlier, OpPattern) and isinstance(later, OpPattern):
        same = (earlier.op, earlier.domain, earlier.out, earlier.optional, earlier.rest) == (
            later.op, later.domain, later.out, later.optional, later.rest
        )  # fmt: skip
        attrs = {(a.name, a.kind, str(a.value)) for a in later.attrs}
        return (
            same
            and _operand_keys(earlier) == _operand_keys(later)
            and {(a.name, a.kind, str(a.value)) for a in earlier.attrs} <= attrs
        )
    if isinstance(earlier, ChainPattern) and isinstance(later, ChainPattern):
        return earlier.op == later.op and _operand_keys(earlier) == _operand_keys(later)
    return bool(getattr(earlier, "other", None) == getattr(later, "other", None))


def _operand_keys(pattern: OpPattern | ChainPattern) -> list[tuple[str, str, str, bool]]:
    """Operands without their places in the file; in any order where the op takes them in any order."""
    found = [(o.kind, o.name, str(o.number), o.optional) for o in pattern.operands]
    return sorted(found) if isinstance(pattern, ChainPattern) or pattern.commutes else found
