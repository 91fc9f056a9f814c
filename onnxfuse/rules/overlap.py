"""Whether two rules can match at one root."""

from __future__ import annotations

from onnxfuse.rules.patterns import NUMBER, VALUE, AnyPattern, ChainPattern, Operand, OpPattern, parts
from onnxfuse.rules.program import Program


def may_overlap(first: Program, second: Program) -> bool:
    """Whether one root may satisfy both, as far as ops, operands and attributes of the patterns tell."""
    return first.required == second.required and _Overlap(first, second).values(first.outputs[0], second.outputs[0], 0)


class _Overlap:
    """Compares two patterns from their roots downwards; in doubt they may overlap."""

    DEPTH = 6

    def __init__(self, first: Program, second: Program) -> None:
        self.first = first
        self.second = second

    def values(self, a: str, b: str, depth: int) -> bool:
        one, other = self.first.makers.get(a), self.second.makers.get(b)
        if one is None or other is None:
            consts = {given.const for given in (self.first.spec.inputs.get(a), self.second.spec.inputs.get(b)) if given}
            made = one is not None or other is not None
            return not (consts >= {True, False} or (made and True in consts))
        if depth > self.DEPTH:
            return True
        return any(self.nodes(x, y, a, b, depth) for x in parts(one) for y in parts(other))

    def nodes(self, x: object, y: object, a: str, b: str, depth: int) -> bool:
        if getattr(x, "optional", False) or getattr(y, "optional", False):
            return True
        if isinstance(x, ChainPattern) and isinstance(y, ChainPattern):
            return x.op == y.op and len(x.operands) == len(y.operands)
        if not (isinstance(x, OpPattern) and isinstance(y, OpPattern)):
            return not (isinstance(x, AnyPattern) or isinstance(y, AnyPattern))
        if (x.domain, x.op) != (y.domain, y.op) or x.out.index(a) != y.out.index(b) or not _attrs_meet(x, y):
            return False
        straight = self.pairs(x.operands, y.operands, depth)
        return straight or (x.commutes and self.pairs(x.operands, y.operands[::-1], depth))

    def pairs(self, ours: list[Operand], theirs: list[Operand], depth: int) -> bool:
        return all(self.operands(o, p, depth) for o, p in zip(ours, theirs, strict=False))

    def operands(self, o: Operand, p: Operand, depth: int) -> bool:
        if o.kind == VALUE and p.kind == VALUE:
            return self.values(o.name, p.name, depth + 1)
        if "absent" in (o.kind, p.kind):
            return o.kind == p.kind or any(k.kind == "any" or k.optional for k in (o, p))
        if o.kind == NUMBER and p.kind == NUMBER:
            return bool(o.number == p.number)
        program, value, constant = (self.first, o, p) if o.kind == VALUE else (self.second, p, o)
        if value.kind != VALUE or constant.kind == "any":
            return True
        given = program.spec.inputs.get(value.name)
        return value.name not in program.makers and (given is None or given.const is not False)


def _attrs_meet(x: OpPattern, y: OpPattern) -> bool:
    wanted = {a.name: a.value for a in x.attrs if a.kind == "equal"}
    return all(wanted.get(a.name, a.value) == a.value for a in y.attrs if a.kind == "equal")
