"""Pull one element of a tensor back through the graph: `Elements(…).at(value, index)` is an expression.

Nothing is assumed that the graph does not say: where two sizes are not provably equal, or an index not provably in
range, the element is that of an opaque tensor.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from onnxfuse.analysis import expr, patterns
from onnxfuse.analysis.expr import Elem, Expr, Int, Lit, Op
from onnxfuse.analysis.poly import Index, Poly, product
from onnxfuse.analysis.reshaping import NotProvedError, Position, quotient_and_rest, reshaped
from onnxfuse.analysis.sizes import Sizes, UnknownSizeError, attr, axes_of, dtype_of
from onnxfuse.graph import consts, types, view
from onnxfuse.graph.ir import Constant, Node, Value

_COMPARE = {"Less", "LessOrEqual", "Greater", "GreaterOrEqual", "Equal"}
_ARITHMETIC = {"Add", "Sub", "Mul", "Div", "Min", "Max"}
_UNARY = {"Cos", "Sin", "Sqrt", "Reciprocal", "Exp"}
_LOGIC = {"And", "Or", "BitwiseAnd", "BitwiseOr"}

#: Constants with more elements are opaque; with more than the second number, their content is not looked at as a whole.
_LARGEST_TABLE = 1 << 26
_LARGEST_PATTERN = 1 << 22
_LARGEST_ROW = 1024

#: No mask or rotation is this many nodes deep.
_DEEPEST = 120


class Elements:
    """Elements of the values of one graph. Results are remembered; make a new object after the graph has changed.

    Args:
        present: sizes taken to be at least 1 (those of the tensor whose elements are asked for: one without elements
            has nothing to be wrong about).
    """

    def __init__(self, present: frozenset[Poly] = frozenset()) -> None:
        self.sizes = Sizes(self, present)
        self._known: dict[tuple[int, Position], Expr] = {}
        self._patterns: dict[int, tuple[Any, ...] | None] = {}
        self._columns: dict[int, list[int]] = {}
        self._alive: list[Value] = []
        self._depth = 0
        self._assuming: dict[frozenset[Poly], Elements] = {}

    def assuming(self, present: frozenset[Poly]) -> Elements:
        """The same graph's elements where these sizes are at least 1."""
        if present <= self.sizes.present:
            return self
        if present not in self._assuming:
            self._assuming[present] = Elements(self.sizes.present | present)
        return self._assuming[present]

    def at(self, value: Value, index: Position) -> Expr:
        """The element of `value` at `index` (one polynomial an axis, each within its size)."""
        key = (id(value), index)
        if key not in self._known:
            if self._depth >= _DEEPEST:
                return Elem(value, index)
            self._alive.append(value)
            self._known[key] = Elem(value, index)  # what a cycle would see
            self._depth += 1
            self._known[key] = self._derive(value, index)
            self._depth -= 1
        return self._known[key]

    def _derive(self, value: Value, index: Position) -> Expr:
        if isinstance(value, Constant):
            return self._constant(value, index)
        node = view.producer(value)
        if node is None or view.domain(node) != "":
            return Elem(value, index)
        try:
            return self._through(node, value, index)
        except (NotProvedError, UnknownSizeError):
            return Elem(value, index)

    # Constants ------------------------------------------------------------------------------------------------------

    def _constant(self, value: Constant, index: Position) -> Expr:
        number = consts.scalar(value)
        if number is not None:
            return expr.num(number)
        if not self._is_table(value):
            return Elem(value, index)
        known = [p.constant for p in index]
        if all(i is not None for i in known):
            item = consts.array(value)[tuple(known)]
            return expr.num(item.item() if item.dtype.kind != "V" else float(item))
        pattern = self._pattern(value) if consts.size_of(value) <= _LARGEST_PATTERN else None
        if pattern is None:
            return Elem(value, self._first_equal(value, index))
        kind, *rest = pattern
        if kind == "uniform":
            return expr.num(rest[0])
        if kind == "counting":
            axis, start, step = rest
            return Int(index[axis] * step + start)
        diagonal, width, inside, outside = rest
        row, column = index[-2], index[-1]
        condition = expr.ge(row - column + diagonal)
        if width is not None:
            condition = expr.and_(condition, expr.ge(column - row - diagonal + width - 1))
        return expr.where(condition, expr.num(inside), expr.num(outside))

    @staticmethod
    def _is_table(value: Value) -> bool:
        if not isinstance(value, Constant) or consts.dtype_of(value) in (None, "string"):
            return False
        return consts.size_of(value) <= _LARGEST_TABLE

    def _first_equal(self, value: Constant, index: Position) -> Position:
        """The index with its last position moved to the first column with the same numbers, so that elements of equal
        columns (the two halves of a stored rotary table) compare equal."""
        column = index[-1].constant if index else None
        if column is None:
            return index
        if id(value) not in self._columns:
            self._alive.append(value)
            array = consts.array(value)
            seen: dict[bytes, int] = {}
            self._columns[id(value)] = [
                seen.setdefault(array[..., i].tobytes(), i) for i in range(min(array.shape[-1], _LARGEST_ROW))
            ]
        columns = self._columns[id(value)]
        return (*index[:-1], Poly.of(columns[column])) if column < len(columns) else index

    def _pattern(self, value: Constant) -> tuple[Any, ...] | None:
        """uniform (one number everywhere), counting (start + step · index of one axis) or band (two numbers: below a
        diagonal of the last two axes, at most `width` wide, and elsewhere)."""
        if id(value) not in self._patterns:
            self._alive.append(value)
            self._patterns[id(value)] = patterns.find(consts.array(value))
        return self._patterns[id(value)]

    # Operators ------------------------------------------------------------------------------------------------------

    def _through(self, node: Node, value: Value, index: Position) -> Expr:
        op, ins = node.op, node.inputs
        if op in _UNARY:
            inner = self.at(ins[0], index)
            return Elem(value, index) if isinstance(inner, Elem) and inner.source is ins[0] else Op(op, (inner,))
        if op in ("Identity", "Dropout"):
            return self.at(ins[0], index)
        if op == "Cast":
            return self._cast(self.at(ins[0], index), ins[0], types.name_of(attr(node, "to", 1)))
        if op == "CastLike":
            return self._cast(self.at(ins[0], index), ins[0], dtype_of(ins[1]))
        if op in _COMPARE | _ARITHMETIC | _LOGIC | {"Where", "Neg", "Abs", "Not", "BitwiseNot", "IsNaN"}:
            return self._elementwise(node, index)
        if op == "Shape":
            return self._shape(node, index)
        if op == "Size":
            return Int(product(self.sizes.of(ins[0])))
        if op == "Range":
            start, step = self.at(ins[0], ()), self.at(ins[2], ())
            if isinstance(start, Int) and isinstance(step, Int):
                return Int(start.poly + step.poly * index[0])
        if op == "ConstantOfShape":
            return self._fill(node)
        if op in ("Unsqueeze", "Squeeze"):
            return self._squeeze(node, index)
        if op == "Transpose":
            rank = len(index)
            perm = attr(node, "perm", list(range(rank))[::-1])
            back = [Poly.of(0)] * rank
            for axis, source in enumerate(perm):
                back[source] = index[axis]
            return self.at(ins[0], tuple(back))
        if op in ("Expand", "Tile"):
            return self._expand(node, index)
        if op in ("Reshape", "Flatten"):
            return self._reshape(node, value, index)
        if op == "Slice":
            return self._slice(node, index)
        if op == "Gather":
            return self._gather(node, index)
        if op == "GatherND" and not attr(node, "batch_dims", 0):
            return self._gather_nd(node, index)
        if op == "Concat":
            return self._concat(node, index)
        if op == "CumSum":
            return self._cumulative_sum(node, index)
        if op == "Split":
            return self._split(node, value, index)
        if op == "Trilu":
            return self._trilu(node, index)
        if op == "ScatterND":
            return self._scatter_nd(node, index)
        raise NotProvedError

    def _elementwise(self, node: Node, index: Position) -> Expr:
        args = [self.at(v, self._aligned(v, index, node)) for v in node.inputs]
        op = node.op
        if op in _COMPARE:
            return expr.compare(op, *args)
        if op in _ARITHMETIC:
            dtype = dtype_of(node.outputs[0]) or dtype_of(node.inputs[0])
            if op == "Div" and dtype is not None and "int" in dtype:
                return _quotient(*args)
            result = args[0]
            for arg in args[1:]:
                result = expr.arithmetic(op, result, arg)
            return _rounded(result, dtype)
        if op in ("And", "Or") or (op in _LOGIC and all(expr.is_bool(a) for a in args)):
            return (expr.and_ if op.endswith("And") else expr.or_)(*args)
        if op == "Where":
            return expr.where(*args)
        if op == "Not" or (op == "BitwiseNot" and expr.is_bool(args[0])):
            return expr.not_(args[0])
        if op == "Neg":
            return expr.arithmetic("Sub", expr.num(0), args[0]) if isinstance(args[0], Int) else _negated(args[0])
        if op == "Abs" and isinstance(args[0], Int) and args[0].poly.never_negative():
            return args[0]
        return Op(op, tuple(args))

    def _aligned(self, value: Value, index: Position, node: Node) -> Position:
        """The index of an operand that broadcasts to the node's result."""
        own = self.sizes.of(value)
        if len(own) > len(index):
            raise NotProvedError
        result: list[Poly] = []
        for axis, size in enumerate(own, len(index) - len(own)):
            if size == 1:
                result.append(Poly.of(0))
                continue
            for other in node.inputs:
                theirs = self.sizes.of(other)
                back = axis - len(index) + len(theirs)
                if other is not value and back >= 0 and theirs[back] not in (size, 1):
                    raise NotProvedError  # one of the two may be 1 at run time
            result.append(index[axis])
        return tuple(result)

    def _cast(self, e: Expr, source: Value, to: str | None) -> Expr:
        if to == "bool":
            return expr.truthy(e)
        if expr.is_bool(e):
            one, zero = (expr.num(1), expr.num(0)) if to and "int" in to else (Lit(1.0), Lit(0.0))
            return expr.where(e, one, zero)
        if to in types.HALVES and isinstance(e, Int) and e.poly.constant is None:
            raise NotProvedError  # large positions are rounded
        if to in types.FLOATS:
            return _rounded(e, to)
        came_from = dtype_of(source)
        if came_from in types.FLOATS and not isinstance(e, Int):
            raise NotProvedError
        return e

    def _shape(self, node: Node, index: Position) -> Expr:
        sizes = self.sizes.of(node.inputs[0])
        rank = len(sizes)
        start = attr(node, "start", 0)
        start = max(start + rank, 0) if start < 0 else start
        position = index[0].constant
        if position is None:
            raise NotProvedError
        return Int(sizes[start + position])

    def _fill(self, node: Node) -> Expr:
        tensor = node.attrs.get("value")
        if tensor is None:
            return Lit(0.0)
        return expr.num(np.asarray(getattr(tensor, "values", tensor)).reshape(-1)[0])

    def _squeeze(self, node: Node, index: Position) -> Expr:
        inner_rank = len(self.sizes.of(node.inputs[0]))
        axes = axes_of(node)
        if node.op == "Unsqueeze":
            if axes is None:
                raise NotProvedError
            gone = {a % len(index) for a in axes}
            return self.at(node.inputs[0], tuple(p for i, p in enumerate(index) if i not in gone))
        sizes = self.sizes.of(node.inputs[0])
        gone = {i for i, s in enumerate(sizes) if s == 1} if axes is None else {a % inner_rank for a in axes}
        rest = iter(index)
        return self.at(node.inputs[0], tuple(Poly.of(0) if i in gone else next(rest) for i in range(inner_rank)))

    def _expand(self, node: Node, index: Position) -> Expr:
        inner, outer = self.sizes.of(node.inputs[0]), self.sizes.of(node.outputs[0])
        result = []
        for axis, size in enumerate(inner, len(index) - len(inner)):
            if size == 1:
                result.append(Poly.of(0))
            elif size == outer[axis]:
                result.append(index[axis])
            elif node.op == "Tile":
                result.append(quotient_and_rest(index[axis], size)[1])
            else:
                raise NotProvedError
        return self.at(node.inputs[0], tuple(result))

    def _reshape(self, node: Node, value: Value, index: Position) -> Expr:
        inner, outer = self.sizes.of(node.inputs[0]), self.sizes.of(value)
        return self.at(node.inputs[0], reshaped(inner, outer, index))

    def _slice(self, node: Node, index: Position) -> Expr:
        sizes = self.sizes.of(node.inputs[0])
        result = list(index)
        for axis, (start, _end, step) in self.sizes.slices(node).items():
            size = sizes[axis]
            if step < 0 or start is None:
                raise NotProvedError
            result[axis] = index[axis] * step + self.sizes.clamped(start, size)
        return self.at(node.inputs[0], tuple(result))

    def _gather(self, node: Node, index: Position) -> Expr:
        data, positions = node.inputs[:2]
        rank, inner = len(self.sizes.of(data)), len(self.sizes.of(positions))
        axis = attr(node, "axis", 0) % rank
        where = self.at(positions, index[axis : axis + inner])
        if not isinstance(where, Int) and axis < rank - 1 and self._is_table(data):
            # Unknown rows of a stored table (cos_cached[position_ids]): equal columns are equal in each of them.
            return Elem(node.outputs[0], self._first_equal(data, index))
        picked = self._in_range(where, self.sizes.of(data)[axis])
        return self.at(data, (*index[:axis], picked, *index[axis + inner :]))

    def _in_range(self, where: Expr, size: Poly) -> Poly:
        if isinstance(where, Int):
            if where.poly.never_negative():
                return where.poly
            if (-where.poly - 1).never_negative():
                return where.poly + size
        raise NotProvedError

    def _gather_nd(self, node: Node, index: Position) -> Expr:
        data, positions = node.inputs[:2]
        sizes = self.sizes.of(data)
        inner = self.sizes.of(positions)
        depth = inner[-1].constant
        if depth is None:
            raise NotProvedError
        head = index[: len(inner) - 1]
        picked = [self._in_range(self.at(positions, (*head, Poly.of(i))), sizes[i]) for i in range(depth)]
        return self.at(data, (*picked, *index[len(inner) - 1 :]))

    def _concat(self, node: Node, index: Position) -> Expr:
        axis = attr(node, "axis", 0) % len(index)
        return self._piece(list(node.inputs), axis, index)

    def _piece(self, pieces: list[Value], axis: int, index: Position) -> Expr:
        """The element of the concatenated pieces at an index."""
        position = index[axis]
        for number, piece in enumerate(pieces):
            size = self.sizes.of(piece)[axis]
            if (size - 1 - position).never_negative():
                return self.at(piece, (*index[:axis], position, *index[axis + 1 :]))
            rest = position - size
            if not rest.never_negative():
                if size != 1 or not position.never_negative():
                    raise NotProvedError
                # One element, then the others: its position is 0 exactly when it is chosen.
                first = self.at(piece, (*index[:axis], Poly.of(0), *index[axis + 1 :]))
                others = self._piece(pieces[number + 1 :], axis, (*index[:axis], rest, *index[axis + 1 :]))
                return _first_or(position, first, others)
            position = rest
        raise NotProvedError

    def _cumulative_sum(self, node: Node, index: Position) -> Expr:
        """The running sum of elements that are all the same number."""
        sizes = self.sizes.of(node.inputs[0])
        axis = expr.literal(self.at(node.inputs[1], ()))
        if axis is None:
            raise NotProvedError
        axis = int(axis) % len(index)
        anywhere = Index(f"summed_{len(self._known)}", sizes[axis])
        step = self.at(node.inputs[0], (*index[:axis], Poly.of(anywhere), *index[axis + 1 :]))
        if not isinstance(step, Int) or anywhere in step.poly.atoms():
            raise NotProvedError
        count = sizes[axis] - index[axis] if attr(node, "reverse", 0) else index[axis] + 1
        return Int(step.poly * (count - 1 if attr(node, "exclusive", 0) else count))

    def _split(self, node: Node, value: Value, index: Position) -> Expr:
        axis = attr(node, "axis", 0) % len(index)
        before = Poly.of(0)
        for part in node.outputs:
            if part is value:
                break
            before = before + self.sizes.of(part)[axis]
        return self.at(node.inputs[0], (*index[:axis], index[axis] + before, *index[axis + 1 :]))

    def _trilu(self, node: Node, index: Position) -> Expr:
        shift = self.at(node.inputs[1], ()) if len(node.inputs) > 1 and node.inputs[1].name else expr.num(0)
        if not isinstance(shift, Int):
            raise NotProvedError
        offset = index[-1] - index[-2] - shift.poly
        kept = expr.ge(offset) if attr(node, "upper", 1) else expr.ge(-offset)
        element = self.at(node.inputs[0], index)
        return expr.where(kept, element, expr.FALSE if expr.is_bool(element) else Lit(0.0))

    def _scatter_nd(self, node: Node, index: Position) -> Expr:
        """An assignment to all of a tensor (`x[...] = y`, as exporters spell it) is the assigned tensor."""
        data, positions, updates = node.inputs[:3]
        sizes, where = self.sizes.of(data), self.sizes.of(positions)
        depth = where[-1].constant
        if depth != len(sizes) or len(where) != depth + 1 or any(a != b for a, b in zip(where, sizes, strict=False)):
            raise NotProvedError
        for axis in range(depth):
            if self.at(positions, (*index, Poly.of(axis))) != Int(index[axis]):
                raise NotProvedError
        return self.at(updates, index)


def _rounded(e: Expr, dtype: str | None) -> Expr:
    """Literals as the dtype stores them (float32's lowest number is -inf in float16)."""
    if isinstance(e, Lit) and not isinstance(e.value, bool) and dtype in types.FLOATS:
        with np.errstate(all="ignore"):
            return Lit(float(np.float64(e.value).astype(types.numpy_of(dtype))))
    if isinstance(e, Op) and e.name == "where":
        return expr.where(e.args[0], _rounded(e.args[1], dtype), _rounded(e.args[2], dtype))
    return e


def _quotient(a: Expr, b: Expr) -> Expr:
    """Division of integers, which truncates towards zero."""
    x, y = expr.literal(a), expr.literal(b)
    if x is not None and y:
        whole = abs(int(x)) // abs(int(y))
        return expr.num(whole if (x < 0) == (y < 0) else -whole)
    return expr.arithmetic("Div", a, b)


def _first_or(position: Poly, first: Expr, others: Expr) -> Expr:
    """`first` where the position (≥ 0) is 0, else `others`; just `others` when that has the same value at 0."""
    atoms = position.atoms()
    if isinstance(first, Int) and isinstance(others, Int) and len(atoms) == 1:
        (atom,) = atoms
        if position == Poly.of(atom) and others.poly.substitute({atom: Poly.of(0)}) == first.poly.substitute(
            {atom: Poly.of(0)}
        ):
            return others
    return expr.where(expr.eq(position), first, others)


def _negated(e: Expr) -> Expr:
    if isinstance(e, Lit):
        return Lit(-e.value)
    if isinstance(e, Op) and e.name == "where":
        return expr.where(e.args[0], _negated(e.args[1]), _negated(e.args[2]))
    return Op("Neg", (e,))
