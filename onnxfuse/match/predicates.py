"""The named predicates of a rule's ``where``: a closed list, each a function with a test.

A predicate gets the `Scope` and the bound values (`Value` or None), captures and dims that the rule names in ``of``,
and literal parameters of ``with`` by keyword. It returns a dict of results, or `Refused`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from onnxfuse.graph import consts, dims, view
from onnxfuse.graph.ir import Constant, Node, Value, is_empty
from onnxfuse.match.scope import Scope
from onnxfuse.match.typing import same_shape, same_when_added, shape_of, show


@dataclass(slots=True)
class Refused:
    """Why a predicate does not hold."""

    expected: Any
    found: Any
    node: Node | None = None


Outcome = dict[str, Any] | Refused
REGISTRY: dict[str, Callable[..., Outcome]] = {}


def predicate(function: Callable[..., Outcome]) -> Callable[..., Outcome]:
    """Register a predicate under its function name. The docstring (`of:`, `holds:`, `results:`) is its reference."""
    REGISTRY[function.__name__] = function
    return function


@predicate
def equal_constants(scope: Scope, first: Value, second: Value) -> Outcome:
    """of: two values
    holds: both are constants with equal shape and content
    """
    if not (isinstance(first, Constant) and isinstance(second, Constant)):
        return Refused("two constants", "a computed value")
    if first is second:
        return {}
    if consts.shape_of(first) != consts.shape_of(second) or not np.array_equal(
        consts.array(first), consts.array(second)
    ):
        return Refused(f"the content of `{first.name}`", f"`{second.name}`")
    return {}


@predicate
def filled_with(scope: Scope, value: Value, *, number: float) -> Outcome:
    """of: a value
    holds: it is a constant whose elements all are `number` (in its dtype)
    """
    if not isinstance(value, Constant):
        return Refused("a constant", f"`{value.name}`")
    content = consts.array(value)
    if content.size == 0:
        return Refused(f"elements equal to {number}", "an empty tensor")
    first = float(content.reshape(-1)[0])
    if not consts.close(first, float(number), consts.dtype_of(value)) or not bool(
        (content == content.reshape(-1)[0]).all()
    ):
        return Refused(f"elements equal to {number}", f"`{value.name}`")
    return {}


@predicate
def equal_shapes(scope: Scope, first: Value, second: Value) -> Outcome:
    """of: two values
    holds: their shapes are provably equal
    """
    one, other = shape_of(first), shape_of(second)
    return {} if same_shape(one, other) else Refused(show(one), show(other))


@predicate
def reciprocal_of_dim(scope: Scope, factor: float, dim: Any) -> Outcome:
    """of: a captured number, a dim
    holds: the number is 1 / the (known) dim
    """
    if not isinstance(dim, int) or dim == 0:
        return Refused("a known size", dim)
    return {} if consts.close(float(factor), 1.0 / dim, "float32") else Refused(1.0 / dim, factor)


@predicate
def equals_dim(scope: Scope, number: float, dim: Any) -> Outcome:
    """of: a captured number, a dim
    holds: the number is the (known) dim
    """
    return {} if isinstance(dim, int) and float(number) == float(dim) else Refused(dim, number)


@predicate
def is_absent(scope: Scope, value: Value | None) -> Outcome:
    """of: an optional value
    holds: it is omitted
    """
    return {} if value is None else Refused("absent", f"`{value.name}`")


@predicate
def is_present(scope: Scope, value: Value | None) -> Outcome:
    """of: an optional value
    holds: it is given
    """
    return {} if value is not None else Refused("a value", "absent")


@predicate
def numbers_equal(scope: Scope, first: float, second: float, *, factor: float = 1.0) -> Outcome:
    """of: two captured numbers
    holds: first = factor × second, within 1e-4 relative
    """
    wanted = float(second) * factor
    return {} if consts.close(float(first), wanted, "float32") else Refused(wanted, first)


@predicate
def last_axes_swapped(scope: Scope, value: Value) -> Outcome:
    """of: a value
    holds: it has a known rank of 2 or more
    results: `perm`: the permutation that exchanges its last two axes
    """
    shape = shape_of(value)
    if shape is None or len(shape) < 2:
        return Refused("two axes or more", show(shape))
    return {"perm": [*range(len(shape) - 2), len(shape) - 1, len(shape) - 2]}


@predicate
def square_root_of_dim(scope: Scope, number: float, dim: Any, *, power: float = 0.5) -> Outcome:
    """of: a captured number, a dim
    holds: the number is the (known) dim to the `power` (default ½)
    """
    if not isinstance(dim, int) or dim <= 0:
        return Refused("a known size", dim)
    return {} if consts.close(float(number), dim**power, "float32") else Refused(dim**power, number)


@predicate
def read_only_as_first_input(scope: Scope, value: Value) -> Outcome:
    """of: a value
    holds: every node that reads it reads it once, as its first input
    """
    for reader in dict.fromkeys(value.outputs):
        places = [index for index, given in enumerate(reader.inputs) if given is value]
        if places != [0]:
            return Refused(f"`{value.name}` as first input only", f"inputs {places}", reader)
    return {}


@predicate
def mean_over_dim(scope: Scope, fraction: float, count: float, dim: Any) -> Outcome:
    """of: a factor, a divisor (0 where there is none), a dim
    holds: a sum times the factor, or over the divisor, is the mean over the (known) dim; 0 and 0 stand for a mean
    """
    if not fraction and not count:
        return {}
    if fraction:
        return reciprocal_of_dim(scope, fraction, dim)
    return equals_dim(scope, count, dim)


@predicate
def halves_of_last_axis(scope: Scope, first: Value, second: Value) -> Outcome:
    """of: two values that Slices of one value make
    holds: they are provably its first and its second half along the last axis
    """
    nodes = [value.inputs[0] for value in (first, second)]
    cuts = [_last_axis_cut(node) for node in nodes]
    whole = shape_of(nodes[0].inputs[0])
    if nodes[0].inputs[0] is not nodes[1].inputs[0] or whole is None or not isinstance(whole[-1], int) or whole[-1] % 2:
        return Refused("two Slices of one value with an even last axis", show(whole), nodes[0])
    half = whole[-1] // 2
    for node, cut, wanted in zip(nodes, cuts, ((0, half, 1), (half, 2 * half, 1)), strict=True):
        if cut != wanted:
            return Refused(f"a Slice of the last axis {wanted[0]}…{wanted[1]}", cut, node)
    return {}


@predicate
def alternating(scope: Scope, first: Value, second: Value) -> Outcome:
    """of: two values that Slices of one value make
    holds: one of them takes the even, the other the odd places of the last axis
    results: `first`, `second`: 0 for the even places, 1 for the odd ones
    """
    nodes = [value.inputs[0] for value in (first, second)]
    whole = shape_of(nodes[0].inputs[0])
    if nodes[0].inputs[0] is not nodes[1].inputs[0] or whole is None or not isinstance(whole[-1], int) or whole[-1] % 2:
        return Refused("two Slices of one value with an even last axis", show(whole), nodes[0])
    starts = []
    for node in nodes:
        cut = _last_axis_cut(node)
        # The last of them stands at the last place or the one before, so that either end takes in all.
        if cut is None or cut[0] not in (0, 1) or cut[1] < whole[-1] - 1 + cut[0] or cut[2] != 2:
            return Refused("a Slice of the last axis in steps of 2", cut, node)
        starts.append(cut[0])
    if starts[0] == starts[1]:
        return Refused("the even and the odd places", f"both times those from {starts[0]} on", nodes[1])
    return {"first": starts[0], "second": starts[1]}


def _last_axis_cut(node: Node) -> tuple[int, int, int] | None:
    """(start, end, step) of a Slice with constant bounds along the last axis only, forwards."""
    shape = shape_of(node.inputs[0])
    bounds = [consts.ints(v) for v in node.inputs[1:]]
    if node.op != "Slice" or shape is None or len(bounds) < 3 or any(b is None or len(b) != 1 for b in bounds):
        return None
    (start,), (end,), (axis,) = bounds[:3]  # type: ignore[misc]
    size = shape[-1]
    step = bounds[3][0] if len(bounds) > 3 and bounds[3] else 1
    if axis not in (-1, len(shape) - 1) or not isinstance(size, int) or step < 1:
        return None
    start, end = (min(max(b + size if b < 0 else b, 0), size) for b in (start, end))
    return start, end, step


@predicate
def one_row_for_the_batch(scope: Scope, row: Value, total: Value) -> Outcome:
    """of: two values
    holds: the first is [S, K] or [1, S, K] where the second, a sum with it, is [B, S, K], provably
    """
    one, whole = shape_of(row), shape_of(total)
    if one is None or whole is None or len(whole) != 3:
        return Refused("[S, K] or [1, S, K] beside [B, S, K]", show(one))
    without = one[1:] if len(one) == 3 and one[0] == 1 else one
    known = None not in without and None not in whole and len(without) == 2
    if known and all(dims.equal_if_broadcast(a, b) for a, b in zip(without, whole[1:], strict=True)):
        return {}
    return Refused(show(whole[1:]), show(one))


@predicate
def equal_when_added(scope: Scope, first: Value, second: Value) -> Outcome:
    """of: two values that are added
    holds: neither is broadcast, provably, as far as they can be added at all
    """
    one, other = shape_of(first), shape_of(second)
    if same_when_added(one, other):
        return {}
    return Refused(show(one), show(other))


@predicate
def made_by_no_product(scope: Scope, *values: Value) -> Outcome:
    """of: values
    holds: none of them is (or is a sum with) the result of a `Linear` that could take a residual, even if its bias, \
factor or activation is still a node of its own
    """
    for value in values:
        product = _open_product(scope, value)
        if product is not None:
            return Refused("no product to take the residual", f"`{value.name}`", product)
    return {}


#: What other rules take into the product before.
_BEHIND_PRODUCTS = frozenset({"Mul", "Div", "Neg", "Gelu", "Swish", "Relu", "Tanh"})


def _foldable(scope: Scope, scaled: Node) -> bool:
    """Whether a factor (a divisor) goes into the product that it stands behind."""
    factor = next((term for term in scaled.inputs if isinstance(term, Constant)), None)
    product = view.producer(scaled.inputs[0])
    if factor is None or product is None:
        return False
    if product.op == "Add":  # its bias
        product = next((view.producer(v) for v in product.inputs if not isinstance(v, Constant)), None)
    if product is None or product.op != "Linear":
        return False
    weight, layout = product.inputs[1], product.attrs.get("layout", "NK")
    outcomes = (
        REGISTRY["read_by_one"](scope, weight),
        REGISTRY["number_or_row"](scope, factor, product.outputs[0]),
        REGISTRY["fits_scaled"](scope, weight, factor, int(scaled.op == "Div"), None, layout),
    )
    return not any(isinstance(outcome, Refused) for outcome in outcomes)


def _open_product(scope: Scope, value: Value) -> Node | None:
    """The `Linear` without a residual that makes the value, or a term of it, for this reader alone."""
    maker = view.producer(value)
    if maker is None or scope.is_output(value) or len(view.consumers(value)) > 1:
        return None
    if maker.op in _BEHIND_PRODUCTS or maker.op == "Add":
        if maker.op in ("Mul", "Div") and not _foldable(scope, maker):
            return None
        found = (_open_product(scope, term) for term in maker.inputs if not isinstance(term, Constant))
        return next((product for product in found if product is not None), None)
    if maker.op != "Linear":
        return None
    return maker if len(maker.inputs) < 4 or is_empty(maker.inputs[3]) else _open_product(scope, maker.inputs[3])
