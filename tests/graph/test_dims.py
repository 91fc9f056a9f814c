"""Symbolic integers: canonical forms, and that every operation agrees with plain integers."""

from __future__ import annotations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from onnxfuse.graph import dims
from onnxfuse.graph.dims import Dim, bounds, evaluate, parse, symbol

NAMES = ("a", "b", "c")


def expressions() -> st.SearchStrategy[tuple]:
    """Random expression trees: a leaf or (operation, left, right)."""
    leaf = st.one_of(st.sampled_from(NAMES), st.integers(-9, 9))
    operations = ("+", "-", "*", "//", "%", "min", "max", "trunc", "broadcast", "select")
    return st.recursive(leaf, lambda part: st.tuples(st.sampled_from(operations), part, part), max_leaves=7)


def symbolic(tree: object) -> int | Dim:
    if isinstance(tree, str):
        return symbol(tree)
    if isinstance(tree, int):
        return tree
    operation, left, right = tree[0], symbolic(tree[1]), symbolic(tree[2])  # type: ignore[index]
    match operation:
        case "+":
            return left + right
        case "-":
            return left - right
        case "*":
            return left * right
        case "//":
            return dims.floor_divide(left, right)
        case "%":
            return dims.modulo(left, right)
        case "trunc":
            return dims.truncate_divide(left, right)
        case "min":
            return dims.minimum(left, right)
        case "max":
            return dims.maximum(left, right)
        case "broadcast":
            return dims.broadcast(left, right)
    return dims.select(dims.less(left, right), left + 1, dims.select(dims.equal(left, right), 7, right))


class Invalid(Exception):
    """A division by zero, or sizes that do not broadcast."""


def numeric(tree: object, sizes: dict[str, int]) -> int:
    if isinstance(tree, str):
        return sizes[tree]
    if isinstance(tree, int):
        return tree
    operation, left, right = tree[0], numeric(tree[1], sizes), numeric(tree[2], sizes)  # type: ignore[index]
    match operation:
        case "+":
            return left + right
        case "-":
            return left - right
        case "*":
            return left * right
        case "//" | "%" | "trunc":
            if right == 0:
                raise Invalid
            quotient = abs(left) // abs(right) * (1 if (left < 0) == (right < 0) else -1)
            return {"//": left // right, "%": left % right, "trunc": quotient}[operation]
        case "min":
            return min(left, right)
        case "max":
            return max(left, right)
        case "broadcast":
            if left < 0 or right < 0 or (left != right and 1 not in (left, right)):
                raise Invalid
            return right if left == 1 else left
    return left + 1 if left < right else 7 if left == right else right


@settings(max_examples=400, deadline=None)
@given(expressions(), st.fixed_dictionaries({name: st.integers(0, 12) for name in NAMES}))
def test_every_operation_agrees_with_integers(tree: object, sizes: dict[str, int]) -> None:
    try:
        expected = numeric(tree, sizes)
    except Invalid:
        assume(False)
    try:
        value = symbolic(tree)
        found = evaluate(value, sizes)
    except ZeroDivisionError:
        assume(False)
    assert found == expected
    low, high = bounds(value)
    assert low <= expected <= high


@settings(max_examples=200, deadline=None)
@given(expressions(), expressions())
def test_sums_and_products_do_not_depend_on_order(left: object, right: object) -> None:
    try:
        a, b = symbolic(left), symbolic(right)
    except ZeroDivisionError:
        assume(False)
    assert a + b == b + a
    assert a * b == b * a
    assert hash(a * b) == hash(b * a)
    assert (a - b) + b == a
    assert a * (b + 3) == a * b + 3 * a


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from([*NAMES, 2, 3, 16]), min_size=1, max_size=5), st.data())
def test_exact_division_undoes_multiplication(factors: list, data: st.DataObject) -> None:
    sizes = [symbol(f) if isinstance(f, str) else f for f in factors]
    divisor = dims.product(data.draw(st.permutations(sizes))[: data.draw(st.integers(1, len(sizes)))])
    other = symbol("a") + data.draw(st.integers(0, 3))
    for quotient in (other, dims.product(sizes)):
        assert dims.divide_exactly(quotient * divisor, divisor) == quotient


def test_division_by_a_sum() -> None:
    past, seq, batch = symbol("past"), symbol("seq"), symbol("batch")
    total = past + seq
    assert dims.divide_exactly(batch * total * 64, total * 16) == batch * 4
    assert dims.divide_exactly(batch * total, total + 1) is None


def test_constants_stay_plain_integers() -> None:
    a = symbol("a")
    assert a - a == 0 and isinstance(a - a, int)
    assert isinstance(a * 0, int)
    assert (a + 3) - a == 3
    assert 5 - a + a == 5


def test_divisions_simplify_only_where_exact() -> None:
    a = symbol("a")
    assert (4 * a + 3) // 4 == a
    assert (4 * a + 3) % 4 == 3
    assert (6 * a) // 2 == 3 * a
    assert str(a // 2) == "(a)//(2)"
    assert a // 2 == (a + 2 * a - 2 * a) // 2
    assert (a // 2) * 2 != a
    # Towards zero, not down: −1/2 is 0.
    assert evaluate(dims.truncate_divide(a - 1, 2), {"a": 0}) == 0


def test_floors_of_floors_are_one() -> None:
    n = symbol("n")
    assert (n // 5) // 2 == n // 10
    assert ((n - 10) // 5 + 1 - 3) // 2 == (n - 10 - 10) // 10
    for number in range(60):
        assert dims.evaluate(((n - 7) // 3 + 4) // 5, {"n": number}) == ((number - 7) // 3 + 4) // 5


def test_a_size_beside_its_clamped_self() -> None:
    a = symbol("n") // 10
    clamped = dims.minimum(a, dims.maximum(a - 1, 0))
    assert clamped == dims.maximum(a - 1, 0)
    assert dims.broadcast(a - 1, clamped) == a - 1


def test_minimum_and_maximum_know_bounds() -> None:
    past, seq = symbol("past"), symbol("seq")
    assert dims.minimum(past + seq, seq) == seq
    assert dims.maximum(seq, 0) == seq
    assert dims.maximum(past + seq, seq) == past + seq
    assert dims.minimum(past, seq) == dims.minimum(seq, past)
    assert dims.minimum(dims.minimum(past, seq), past) == dims.minimum(past, seq)
    assert dims.minimum(seq, 1) != 1  # the sequence may be empty


def test_broadcasting() -> None:
    a, b = symbol("a"), symbol("b")
    assert dims.broadcast(a, 1) == a
    assert dims.broadcast(1, a) == a
    assert dims.broadcast(a, a) == a
    assert dims.broadcast(a, 16) == 16
    assert dims.broadcast(a, b) == dims.broadcast(b, a) not in (a, b)
    assert dims.broadcast(dims.broadcast(a, b), a) == dims.broadcast(a, b)
    assert dims.broadcast(a, b + 2) == b + 2
    assert evaluate(dims.broadcast(a, b), {"a": 1, "b": 5}) == 5
    assert evaluate(dims.broadcast(a, b), {"a": 0, "b": 1}) == 0


def test_truth_values() -> None:
    a, b = symbol("a"), symbol("b")
    assert dims.equal(a, -1) is False
    assert dims.equal(a + 1, 1 + a) is True
    assert isinstance(dims.equal(a, b), Dim)
    assert dims.less(a, a + 1) is True
    assert dims.select(dims.equal(a, b), b, b) == b
    with pytest.raises(TypeError, match="no truth value"):
        bool(a == a and a)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("batch", symbol("batch")),
        ("past_sequence_length + sequence_length", symbol("past_sequence_length") + symbol("sequence_length")),
        ("2*s0 + 1", 2 * symbol("s0") + 1),
        ("(a + b)*c", (symbol("a") + symbol("b")) * symbol("c")),
        ("sequence length", symbol("sequence length")),
        ("a/2", symbol("a/2")),
        ("a - b", symbol("a - b")),  # could be negative: no size
        ("7", 7),
    ],
)
def test_declared_dimensions(text: str, expected: object) -> None:
    assert parse(text) == expected


def test_long_expressions_stay_short() -> None:
    value: int | Dim = symbol("a")
    for step in range(60):
        value = dims.floor_divide(value * (value if step < 3 else 3) + step, 7 + step)
    assert len(str(value)) < 2000
    assert isinstance(hash(value), int)


def test_absorption() -> None:
    a = symbol("a") + 1
    assert dims.maximum(dims.minimum(a, 4), a) == a
    assert dims.minimum(dims.maximum(a, 4), a) == a
    assert dims.minimum(dims.minimum(a, 4), a) == dims.minimum(a, 4) != a
    assert dims.broadcast(dims.minimum(a, 512), a) == a


def test_sizes_that_are_equal_if_they_broadcast() -> None:
    x, n = dims.symbol("x"), dims.symbol("n", 2)
    assert dims.equal_if_broadcast(x, x)
    assert dims.equal_if_broadcast(dims.minimum(128, x), x)
    assert dims.equal_if_broadcast(dims.minimum(n, x), x)
    # A table of one row broadcasts, and so may one of unknown length; other sizes need not be x at all.
    assert not dims.equal_if_broadcast(dims.minimum(dims.symbol("m"), x), x)
    assert not dims.equal_if_broadcast(dims.minimum(128, n), x)
    assert not dims.equal_if_broadcast(dims.maximum(128, x), x)
    assert not dims.equal_if_broadcast(1, x)


def test_sizes_of_tensors_that_are_added() -> None:
    x, y = dims.symbol("x"), dims.symbol("y")
    for one, other in ((x, x), (dims.minimum(128, x), x), (dims.maximum(x - 1, 0), x - 1), (7, 7)):
        assert dims.same_when_added(one, other) and dims.same_when_added(other, one)
    for one, other in ((x, y), (x, 1), (x, 7), (dims.minimum(1, x), x), (dims.maximum(x, 1), x), (x + 1, x)):
        assert not dims.same_when_added(one, other) and not dims.same_when_added(other, one)
