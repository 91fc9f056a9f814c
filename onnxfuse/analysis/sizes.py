"""Symbolic sizes of the values that index and mask subgraphs are made of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from onnxfuse.analysis.expr import Int
from onnxfuse.analysis.poly import Poly, product
from onnxfuse.graph import consts, types, view
from onnxfuse.graph.dims import Dim, parse
from onnxfuse.graph.ir import Constant, Node, Value

if TYPE_CHECKING:
    from onnxfuse.analysis.elements import Elements

Sized = tuple[Poly, ...]

_LAST = 2**31 - 2
_BROADCAST = {
    *("Add", "Sub", "Mul", "Div", "Min", "Max", "Pow", "Mod", "Less", "LessOrEqual", "Greater", "GreaterOrEqual"),
    *("Equal", "And", "Or", "Xor", "BitwiseAnd", "BitwiseOr", "Where"),
}
_SAME_AS_FIRST = {
    *(
        "Cast",
        "CastLike",
        "Identity",
        "Dropout",
        "Neg",
        "Abs",
        "Not",
        "BitwiseNot",
        "IsNaN",
        "Softmax",
        "Sqrt",
        "Cos",
        "Sin",
    ),
    *(
        "LayerNormalization",
        "RMSNormalization",
        "SimplifiedLayerNormalization",
        "Tanh",
        "Erf",
        "Sigmoid",
        "Relu",
        "Gelu",
    ),
    *("Trilu", "ScatterND", "Exp", "Log", "Reciprocal", "CumSum", "Clip", "Floor", "Ceil"),
}


class UnknownSizeError(Exception):
    """The rank or a size of a value is not known."""


class Sizes:
    """Sizes of the values of one graph, derived from the graph inputs where that is possible.

    Args:
        elements: for sizes that are computed.
        present: sizes taken to be at least 1, because what is asked is about elements along them.
    """

    def __init__(self, elements: Elements, present: frozenset[Poly] = frozenset()) -> None:
        self.present = present
        self._elements = elements
        self._known: dict[int, Sized | None] = {}
        self._alive: list[Value] = []

    def of(self, value: Value) -> Sized:
        """One polynomial an axis. Raises UnknownSizeError."""
        if id(value) not in self._known:
            self._alive.append(value)
            self._known[id(value)] = None  # what a cycle would see
            self._known[id(value)] = self._derive(value)
        found = self._known[id(value)]
        if found is None:
            raise UnknownSizeError(value.name)
        return found

    def _derive(self, value: Value) -> Sized | None:
        if isinstance(value, Constant):
            return tuple(Poly.of(int(d)) for d in consts.shape_of(value))
        plain = self._plain(value)
        if plain is not None:
            return plain
        node = view.producer(value)
        if node is not None and view.domain(node) == "":
            try:
                found = self._through(node, value)
            except UnknownSizeError:
                found = None
            if found is not None:
                return found
        return declared(value)

    def _plain(self, value: Value) -> Sized | None:
        """The inferred sizes, if they are made of named sizes only. What contains more (the smaller of a buffer's and a
        sequence's length, say) is derived anew, with the assumption of `clamped`."""
        if value.shape is None or any((isinstance(d, Dim) and not _named(d)) or d is None for d in value.shape):
            return None
        sizes = [poly_of_dim(d) for d in value.shape]
        return tuple(s for s in sizes if s is not None) if all(s is not None for s in sizes) else None

    def _through(self, node: Node, value: Value) -> Sized | None:
        op, ins = node.op, node.inputs
        if op in _SAME_AS_FIRST:
            return self.of(ins[0])
        if op in _BROADCAST:
            return self.broadcast([self.of(v) for v in ins])
        if op in ("Shape", "Size"):
            return self._shape_size(node)
        if op == "Range":
            start, limit, step = (self._elements.at(v, ()) for v in ins)
            if isinstance(start, Int) and isinstance(limit, Int) and step == Int(Poly.of(1)):
                count = limit.poly - start.poly
                return (count,) if count.never_negative() else None
            return None
        if op == "ConstantOfShape":
            return self.content(ins[0])
        if op == "Unsqueeze":
            axes = axes_of(node)
            inner = list(self.of(ins[0]))
            if axes is None:
                return None
            rank = len(inner) + len(axes)
            for axis in sorted(a % rank for a in axes):
                inner.insert(axis, Poly.of(1))
            return tuple(inner)
        if op == "Squeeze":
            inner = list(self.of(ins[0]))
            axes = axes_of(node)
            if axes is None and any(s.constant is None for s in inner):
                return None
            gone = {i for i, s in enumerate(inner) if s == 1} if axes is None else {a % len(inner) for a in axes}
            return tuple(s for i, s in enumerate(inner) if i not in gone)
        if op == "Transpose":
            before = self.of(ins[0])
            return tuple(before[p] for p in attr(node, "perm", list(range(len(before)))[::-1]))
        if op == "Expand":
            return self.broadcast([self.of(ins[0]), self.content(ins[1])])
        if op == "Reshape":
            return self._reshape(node)
        if op == "Flatten":
            before = self.of(ins[0])
            axis = attr(node, "axis", 1)
            axis = axis + len(before) if axis < 0 else axis
            return product(before[:axis]), product(before[axis:])
        if op == "Slice":
            return self._slice(node)
        if op == "Gather":
            data, positions = self.of(ins[0]), self.of(ins[1])
            axis = attr(node, "axis", 0) % len(data)
            return (*data[:axis], *positions, *data[axis + 1 :])
        if op == "GatherND":
            data, positions = self.of(ins[0]), self.of(ins[1])
            depth = positions[-1].constant
            if depth is None or attr(node, "batch_dims", 0):
                return None
            return (*positions[:-1], *data[depth:])
        if op == "Concat":
            pieces = [self.of(v) for v in ins]
            axis = attr(node, "axis", 0) % len(pieces[0])
            total = Poly.of(0)
            for piece in pieces:
                total = total + piece[axis]
            return (*pieces[0][:axis], total, *pieces[0][axis + 1 :])
        if op == "MatMul":
            a, b = self.of(ins[0]), self.of(ins[1])
            if len(a) < 2 or len(b) < 2:
                return None
            return (*self.broadcast([a[:-2], b[:-2]]), a[-2], b[-1])
        if op == "Gemm":
            a, b = self.of(ins[0]), self.of(ins[1])
            return a[1 if attr(node, "transA", 0) else 0], b[0 if attr(node, "transB", 0) else 1]
        if op == "Split":
            return self._split(node, value)
        if op.startswith("Reduce"):
            before = self.of(ins[0])
            axes = axes_of(node)
            if axes is None or not attr(node, "keepdims", 1):
                return None
            gone = {a % len(before) for a in axes}
            return tuple(Poly.of(1) if i in gone else s for i, s in enumerate(before))
        return None

    def broadcast(self, shapes: list[Sized]) -> Sized:
        """The common shape. Raises UnknownSizeError where two sizes differ and neither is 1."""
        rank = max(len(s) for s in shapes)
        result = []
        for axis in range(-rank, 0):
            sizes = {s[axis] for s in shapes if len(s) >= -axis} - {Poly.of(1)}
            if len(sizes) > 1:
                raise UnknownSizeError
            result.append(sizes.pop() if sizes else Poly.of(1))
        return tuple(result)

    def content(self, value: Value) -> Sized:
        """The numbers in a rank-1 integer tensor. Raises UnknownSizeError."""
        known = consts.ints(value)
        if known is not None:
            return tuple(Poly.of(n) for n in known)
        (length,) = self.of(value)
        if length.constant is None:
            raise UnknownSizeError(value.name)
        numbers = [self._elements.at(value, (Poly.of(i),)) for i in range(length.constant)]
        if not all(isinstance(n, Int) for n in numbers):
            raise UnknownSizeError(value.name)
        return tuple(n.poly for n in numbers if isinstance(n, Int))

    def _shape_size(self, node: Node) -> Sized:
        if node.op == "Size":
            return ()
        rank = len(self.of(node.inputs[0]))
        bounds = [attr(node, "start", 0), attr(node, "end", rank)]
        low, high = (min(max(b + rank if b < 0 else b, 0), rank) for b in bounds)
        return (Poly.of(max(high - low, 0)),)

    def _reshape(self, node: Node) -> Sized:
        inner, wanted = self.of(node.inputs[0]), list(self.content(node.inputs[1]))
        for axis, size in enumerate(wanted):
            if size == 0 and not attr(node, "allowzero", 0):
                wanted[axis] = inner[axis]
        if -1 in [w.constant for w in wanted]:
            open_axis = [w.constant for w in wanted].index(-1)
            rest = product(w for i, w in enumerate(wanted) if i != open_axis)
            quotient = product(inner).divide(rest)
            if quotient is None:
                raise UnknownSizeError(node.outputs[0].name)
            wanted[open_axis] = quotient
        return tuple(wanted)

    def slices(self, node: Node) -> dict[int, tuple[Poly | None, Poly | None, int]]:
        """For each sliced axis: start, end (None: unknown) and step. Raises UnknownSizeError."""
        rank = len(self.of(node.inputs[0]))
        if "starts" in node.attrs:
            parts = [[Poly.of(int(i)) for i in node.attrs[key]] for key in ("starts", "ends")]
            axes = [int(a) for a in node.attrs.get("axes", range(len(parts[0])))]
            steps = [1] * len(axes)
        else:
            parts = [list(self.content(v)) for v in node.inputs[1:3]]
            given = [consts.ints(v) if len(node.inputs) > i and (v := node.inputs[i]).name else None for i in (3, 4)]
            axes = given[0] if given[0] is not None else list(range(len(parts[0])))
            steps = given[1] if given[1] is not None else [1] * len(axes)
        return {a % rank: (s, e, st) for a, s, e, st in zip(axes, parts[0], parts[1], steps, strict=True)}

    def clamped(self, bound: Poly, size: Poly) -> Poly:
        """A slice bound as a position: negative ones count from the end. Raises UnknownSizeError.

        A size that is only known at run time is taken to lie inside a buffer of constant size (a causal mask for 1024
        positions, cut to the sequence): with a longer sequence the result would be too small to be combined with
        anything of that length, and the model would not run at all.
        """
        if bound.constant is not None and bound.constant >= _LAST:
            return size
        if bound.constant is not None and bound.constant <= -_LAST:
            return Poly.of(0)
        if (-bound).never_negative() and bound != 0:  # a run-time size of 0 here belongs to a tensor without elements
            bound = bound + size
            if not bound.never_negative():
                raise UnknownSizeError
        if not bound.never_negative():
            raise UnknownSizeError
        if (size - bound).never_negative() or (bound == 1 and size in self.present):
            return bound
        if (bound - size).never_negative():
            return size
        if bound.constant is None and size.constant is not None and size.constant > 1:
            return bound
        raise UnknownSizeError

    def _split(self, node: Node, value: Value) -> Sized | None:
        inner = list(self.of(node.inputs[0]))
        axis = attr(node, "axis", 0) % len(inner)
        part = next(i for i, v in enumerate(node.outputs) if v is value)
        if "split" in node.attrs:
            inner[axis] = Poly.of(int(node.attrs["split"][part]))
        elif len(node.inputs) > 1 and node.inputs[1].name:
            inner[axis] = self.content(node.inputs[1])[part]
        else:
            share = inner[axis].divide(Poly.of(len(node.outputs)))
            if share is None:
                return None
            inner[axis] = share
        return tuple(inner)

    def _slice(self, node: Node) -> Sized:
        sizes = list(self.of(node.inputs[0]))
        for axis, (start, end, step) in self.slices(node).items():
            if step < 1 or start is None or end is None:
                raise UnknownSizeError(node.outputs[0].name)
            span = self.clamped(end, sizes[axis]) - self.clamped(start, sizes[axis])
            if step != 1:
                if span.constant is None:
                    raise UnknownSizeError(node.outputs[0].name)
                span = Poly.of(-(-span.constant // step))
            sizes[axis] = span
        return tuple(sizes)


def declared(value: Value) -> Sized | None:
    """The sizes that the value is annotated with; an unknown one gets a name of its own."""
    if value.shape is None:
        return None
    sizes = []
    for axis, dim in enumerate(value.shape):
        poly = poly_of_dim(dim)
        sizes.append(Poly.of(f"{value.name}.{axis}") if poly is None else poly)
    return tuple(sizes)


def poly_of_dim(dim: Any) -> Poly | None:
    """An int, a `dims.Dim` or a name as a polynomial; None if it is unknown or could be negative."""
    if isinstance(dim, str):
        dim = parse(dim)
    if isinstance(dim, int):
        return Poly.of(dim)
    if not isinstance(dim, Dim):
        return None
    total = Poly.of(0)
    for monomial, factor in dim.terms:
        term = Poly.of(factor)
        for atom in monomial:
            if atom.low < 0:
                return None
            term = term * Poly.of(atom.args[0] if atom.kind == "symbol" else atom.key)
        total = total + term
    return total


def present_in(value: Value) -> frozenset[Poly]:
    """The named sizes that are at least 1 wherever the value has any elements: a product, a broadcast and a minimum are
    0 as soon as one of their parts is."""
    found: set[Poly] = set()

    def visit(dim: Any) -> None:
        if not isinstance(dim, Dim) or len(dim.terms) != 1:
            return
        ((monomial, _),) = dim.terms
        for atom in monomial:
            if atom.kind == "symbol":
                found.update({Poly.of(str(atom))})
            elif atom.kind in ("broadcast", "min"):
                for part in atom.args:
                    visit(part)

    for dim in value.shape or ():
        visit(dim)
    return frozenset(found)


def _named(dim: Dim) -> bool:
    return all(atom.kind == "symbol" for monomial, _ in dim.terms for atom in monomial)


def attr(node: Node, name: str, default: Any) -> Any:
    return node.attrs.get(name, default)


def axes_of(node: Node) -> list[int] | None:
    """The axes of Squeeze, Unsqueeze or a reduction, whether attribute or constant input."""
    if "axes" in node.attrs:
        return [int(a) for a in node.attrs["axes"]]
    if len(node.inputs) > 1 and node.inputs[1].name:
        return consts.ints(node.inputs[1])
    return None


def dtype_of(value: Value) -> str | None:
    return consts.dtype_of(value) if isinstance(value, Constant) else types.name_of(value.dtype)
