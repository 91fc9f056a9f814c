"""Einsum of one or two tensors as Transpose, MatMul and Mul, which are what the rules know."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from onnxfuse.graph.canonicalize.scope import Scope, shape_of, static_attr
from onnxfuse.graph.ir import Node, Value
from onnxfuse.graph.types import FLOATS

_SPARE = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True)
class _Equation:
    """Letters of the operands and of the result; an ellipsis has become letters of its own."""

    operands: tuple[str, ...]
    result: str


def einsum_to_products(scope: Scope) -> int:
    """A contraction of two tensors becomes a MatMul, one without a common sum a Mul, one operand a Transpose."""
    count = 0
    for node in scope.nodes("Einsum"):
        equation = _parse(node)
        if equation is None or scope.opset < 13 or scope.is_output(node.outputs[0]):
            continue
        if len(equation.operands) == 1:
            made = _permuted(scope, node, equation)
        elif len(equation.operands) == 2:
            made = _product(scope, node, equation)
        else:
            continue
        if made is not None:
            count += scope.replace(node.outputs[0], made)
    return count


def _parse(node: Node) -> _Equation | None:
    """None for what is not followed: unknown ranks, a letter twice in one operand."""
    text = static_attr(node, "equation")
    if text is None:
        return None
    text = (text.decode() if isinstance(text, bytes) else str(text)).replace(" ", "")
    left, arrow, result = text.partition("->")
    terms = left.split(",")
    shapes = [shape_of(value) for value in node.inputs]
    if len(terms) != len(shapes) or any(s is None for s in shapes):
        return None
    ranks = [len(s) for s in shapes if s is not None]
    dotted = [rank - len(term.replace("...", "")) for term, rank in zip(terms, ranks, strict=True)]
    longest = max(dotted)
    spare = [c for c in _SPARE if c not in text][:longest] if longest > 0 else []
    if min(dotted) < 0 or len(spare) < longest:
        return None
    if not arrow:
        once = sorted(c for c in set(left) - set(",.") if left.count(c) == 1)
        result = ("..." if "..." in left else "") + "".join(once)
    words = [t.replace("...", "".join(spare[longest - n :])) for t, n in zip(terms, dotted, strict=True)]
    if any(len(word) != rank or len(set(word)) != rank for word, rank in zip(words, ranks, strict=True)):
        return None
    result = result.replace("...", "".join(spare))
    known = set("".join(words))
    return _Equation(tuple(words), result) if set(result) <= known and len(set(result)) == len(result) else None


def _permuted(scope: Scope, node: Node, equation: _Equation) -> Value | None:
    (letters,) = equation.operands
    if set(letters) != set(equation.result):
        return None
    return _turned_or_same(scope, node, node.inputs[0], letters, list(equation.result))


def _product(scope: Scope, node: Node, equation: _Equation) -> Value | None:
    first, second = equation.operands
    result = equation.result
    if (set(first) ^ set(second)) - set(result):
        return None  # a sum over one operand alone
    common = [c for c in first if c in second]
    summed = [c for c in common if c not in result]
    if not summed:
        return scope.insert(node, "Mul", [_aligned(scope, node, i, equation.operands[i], result) for i in (0, 1)])
    sizes = [dict(zip(letters, shape_of(value) or (), strict=True))
             for letters, value in zip(equation.operands, node.inputs, strict=True)]  # fmt: skip
    if node.inputs[0].dtype not in FLOATS or any(sizes[0][c] is None or sizes[0][c] != sizes[1][c] for c in summed):
        return None
    batch = [c for c in common if c in result]
    rows, columns = [c for c in first if c not in second], [c for c in second if c not in first]
    if result[: len(batch)] == "".join(c for c in result if c in batch):
        # Where the result begins with what both have, its own order saves a Transpose.
        batch, rows, columns = (sorted(part, key=result.index) for part in (batch, rows, columns))
    plan = _Plan(batch, rows, columns, summed, sizes)
    return plan.build(scope, node, equation) if plan.possible() else None


def _aligned(scope: Scope, node: Node, operand: int, letters: str, result: str) -> Value:
    """An operand with its axes in the order of the result, and ones where it has none, but for leading ones."""
    value = _turned_or_same(scope, node, node.inputs[operand], letters, [c for c in result if c in letters])
    own = [i for i, c in enumerate(result) if c in letters]
    start = own[0] if own else len(result)
    return _with_ones(scope, node, value, [i - start for i in range(start, len(result)) if i not in own])


def _turned_or_same(scope: Scope, node: Node, value: Value, letters: str, wanted: Sequence[str]) -> Value:
    perm = [letters.index(c) for c in wanted]
    return value if perm == sorted(perm) else scope.insert(node, "Transpose", [value], {"perm": perm})


def _with_ones(scope: Scope, node: Node, value: Value, axes: list[int]) -> Value:
    if not axes:
        return value
    return scope.insert(node, "Unsqueeze", [value, scope.integers(f"{node.outputs[0].name}_axes", axes)])


@dataclass
class _Plan:
    """MatMul of [batch, rows, sum] and [batch, sum, columns]. Several sums, or columns of known sizes, are one axis;
    rows and columns that stay apart are axes of size 1 in the other operand."""

    batch: list[str]
    rows: list[str]
    columns: list[str]
    summed: list[str]
    sizes: list[dict[str, Any]]

    @property
    def joined(self) -> list[str]:
        """Columns that become one axis."""
        whole = len(self.columns) > 1 and all(isinstance(self.sizes[1][c], int) for c in self.columns)
        return self.columns if whole else self.columns[-1:]

    def possible(self) -> bool:
        return len(self.summed) == 1 or all(isinstance(self.sizes[0][c], int) for c in self.summed)

    def build(self, scope: Scope, node: Node, equation: _Equation) -> Value:
        apart_rows = self.rows[:-1]
        apart_columns = [c for c in self.columns if c not in self.joined]
        first, second = equation.operands
        a = _turned_or_same(scope, node, node.inputs[0], first, [*self.batch, *self.rows, *self.summed])
        b = _turned_or_same(scope, node, node.inputs[1], second,
                            [*self.batch, *apart_columns, *self.summed, *self.joined])  # fmt: skip
        lead = len(self.batch) + len(self.rows)
        if len(self.summed) > 1:
            a = self._reshape(scope, node, a, [0] * lead + [self._size(0, self.summed)])
        start = len(self.batch) + len(apart_columns)
        if len(self.summed) > 1 or len(self.joined) > 1:
            tail = [self._size(0, self.summed)] if len(self.summed) > 1 else [0]
            if self.joined:
                last = self._size(1, self.joined) if len(self.joined) > 1 else self.sizes[1][self.joined[0]]
                tail.append(last if isinstance(last, int) else -1)
            b = self._reshape(scope, node, b, [0] * start + tail)
        # Ones where the other operand has rows or columns of its own; none before a plain matrix.
        ones = list(range(len(self.batch) + len(apart_rows), len(self.batch) + len(apart_rows) + len(apart_columns)))
        a = _with_ones(scope, node, a, ones + ([] if self.rows else [lead + len(ones)]))
        if self.batch or apart_columns:
            b = _with_ones(scope, node, b, list(range(len(self.batch), len(self.batch) + len(apart_rows))))
        if not self.columns:
            b = _with_ones(scope, node, b, [len(shape_of(b) or ())])
        y: Value = scope.insert(node, "MatMul", [a, b])
        made = [*self.batch, *apart_rows, *apart_columns, *(self.rows[-1:] or ["-"]), *(self.joined[-1:] or ["-"])]
        gone = [i for i, c in enumerate(made) if c == "-"]
        if gone:
            y = scope.insert(node, "Squeeze", [y, scope.integers(f"{node.outputs[0].name}_axes", gone)])
            made = [c for c in made if c != "-"]
        if len(self.joined) > 1:
            y = self._reshape(scope, node, y, [0] * (len(made) - 1) + [self.sizes[1][c] for c in self.joined])
            made = [*made[:-1], *self.joined]
        return _turned_or_same(scope, node, y, "".join(made), list(equation.result))

    def _size(self, operand: int, letters: list[str]) -> int:
        size = 1
        for c in letters:
            size *= self.sizes[operand][c]
        return size

    def _reshape(self, scope: Scope, node: Node, value: Value, target: list[int]) -> Value:
        return scope.insert(node, "Reshape", [value, scope.integers(f"{node.outputs[0].name}_shape", target)])
