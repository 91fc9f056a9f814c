"""Rotated halves and pairs, however they are spelled, and what is none."""

from __future__ import annotations

import numpy as np
import pytest

from onnxfuse.analysis import rotary
from onnxfuse.analysis.elements import Elements
from onnxfuse.graph import shapes
from onnxfuse.graph.ir import Constant, Value
from onnxfuse.graph.model import Model
from onnxfuse.ruletest.cases import parse_graph

_CONSTANTS = """<int64[1] zero = {0}, int64[1] one = {1}, int64[1] two = {2}, int64[1] half = {4},
  int64[1] end = {9223372036854775807},
  int64[1] last = {-1}, int64[5] pairs = {0, 0, 0, 4, 2}, int64[4] flat = {0, 0, 0, 8}>"""

HALVES = {
    "slices": """hi = Slice (x, half, end, last) n = Neg (hi) lo = Slice (x, zero, half, last)
        r = Concat <axis=-1> (n, lo)""",
    "split": "lo, hi = Split <axis=3, num_outputs=2> (x) n = Neg (hi) r = Concat <axis=3> (n, lo)",
    "by-reshape": """p = Reshape (x, halves) t = Transpose <perm=[3,0,1,2,4]> (p) hi = Gather <axis=0> (t, i1)
        n = Neg (hi) lo = Gather <axis=0> (t, i0) r = Concat <axis=-1> (n, lo)""",
}
PAIRS = {
    "reshape": """p = Reshape (x, pairs) o = Slice (p, one, two, last) n = Neg (o) e = Slice (p, zero, one, last)
        c = Concat <axis=-1> (n, e) r = Reshape (c, flat)""",
    "strides": """o = Slice (x, one, end, last, two) n = Neg (o) e = Slice (x, zero, end, last, two)
        nu = Unsqueeze (n, last) eu = Unsqueeze (e, last) c = Concat <axis=-1> (nu, eu) r = Reshape (c, flat)""",
}
NEITHER = {
    "not-negated": "hi = Slice (x, half, end, last) lo = Slice (x, zero, half, last) r = Concat <axis=-1> (hi, lo)",
    "swapped": """hi = Slice (x, half, end, last) n = Neg (hi) lo = Slice (x, zero, half, last)
        r = Concat <axis=-1> (lo, n)""",
    "whole": "n = Neg (x) r = Identity (n)",
    "half-twice": "lo = Slice (x, zero, half, last) n = Neg (lo) r = Concat <axis=-1> (n, lo)",
}


def values(body: str) -> tuple[Value, Value]:
    constants = _CONSTANTS.replace(">", ", int64[5] halves = {0, 0, 0, 2, 4}, int64 i0 = {0}, int64 i1 = {1}>")
    model = Model(parse_graph(f"g (float[B,3,S,8] x) => (float[B,3,S,8] r) {constants} {{ {body} }}", 18))
    shapes.infer(model)
    return model.graph.inputs[0], model.graph.outputs[0]


@pytest.mark.parametrize("spelling", HALVES)
def test_halves(spelling: str) -> None:
    x, rotated = values(HALVES[spelling])
    assert rotary.rotation(x, rotated, Elements()) == 0


@pytest.mark.parametrize("spelling", PAIRS)
def test_pairs(spelling: str) -> None:
    x, rotated = values(PAIRS[spelling])
    assert rotary.rotation(x, rotated, Elements()) == 1


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ("""hi = Slice (x, half, end, last) lo = Slice (x, zero, half, last) n = Neg (lo)
        r = Concat <axis=-1> (hi, n)""", 0),
        (HALVES["slices"], None),
        (PAIRS["reshape"], None),
    ],
)  # fmt: skip
def test_backwards(body: str, kind: int | None) -> None:
    x, rotated = values(body)
    assert rotary.rotation(x, rotated, Elements(), backwards=True) == kind


@pytest.mark.parametrize("spelling", NEITHER)
def test_neither(spelling: str) -> None:
    x, rotated = values(NEITHER[spelling])
    assert rotary.rotation(x, rotated, Elements()) is None


def test_tables_repeat_in_halves_or_side_by_side() -> None:
    _, halves = values("f = Slice (x, zero, half, last) c = Concat <axis=-1> (f, f) r = Cos (c)")
    assert rotary.repeated(halves, 0, Elements()) and not rotary.repeated(halves, 1, Elements())
    _, pairs = values(
        "f = Slice (x, zero, half, last) u = Unsqueeze (f, last) c = Concat <axis=-1> (u, u) r = Reshape (c, flat)"
    )
    assert rotary.repeated(pairs, 1, Elements()) and not rotary.repeated(pairs, 0, Elements())
    x, _ = values("r = Neg (x)")
    assert not rotary.repeated(x, 0, Elements())


def test_cut_in_two() -> None:
    x, whole = values("a = Slice (x, zero, two, last) b = Slice (x, two, end, last) r = Concat <axis=-1> (a, b)")
    first, rest = whole.inputs[0].inputs
    assert rotary.parts(x, first, rest, Elements()) == 2
    assert rotary.parts(x, rest, first, Elements()) is None


FIRST_ROWS = "n = Shape <start=0, end=1> (x) t = Slice (table, zero, n, zero)"
ANY_ROWS = "t = Gather (table, p)"


def stored_table(columns: list[int], rows: int = 3, read: str = FIRST_ROWS) -> Value:
    """Rows of a stored table."""
    numbers = ", ".join(str(10 * row + column) for row in range(rows) for column in columns)
    model = Model(parse_graph(
        f"""g (float[S,4] x, int64[S] p) => (float[S,4] t) <float[{rows},4] table = {{{numbers}}},
        int64[1] zero = {{0}}> {{ {read} }}""", 18,
    ))  # fmt: skip
    shapes.infer(model)
    return model.graph.outputs[0]


@pytest.mark.parametrize("read", [FIRST_ROWS, ANY_ROWS])
@pytest.mark.parametrize(("columns", "interleaved"), [([1, 2, 1, 2], 0), ([1, 1, 2, 2], 1)])
def test_equal_columns_of_a_stored_table(columns: list[int], interleaved: int, read: str) -> None:
    assert rotary.repeated(stored_table(columns, read=read), interleaved, Elements())
    assert not rotary.repeated(stored_table(columns, read=read), 1 - interleaved, Elements())
    assert not rotary.repeated(stored_table([1, 2, 1, 3], read=read), 0, Elements())


@pytest.mark.parametrize(
    ("body", "signs", "kind"),
    [
        ("hi = Slice (x, half, end, last) lo = Slice (x, zero, half, last) r = Concat <axis=-1> (hi, lo)",
         [-1] * 4 + [1] * 4, 0),
        ("hi = Slice (x, half, end, last) lo = Slice (x, zero, half, last) r = Concat <axis=-1> (hi, lo)",
         [-1, 1] * 4, None),
        ("""p = Reshape (x, pairs) o = Slice (p, one, two, last) e = Slice (p, zero, one, last)
        c = Concat <axis=-1> (o, e) r = Reshape (c, flat)""", [-1, 1] * 4, 1),
        ("r = Identity (x)", [-1] * 4 + [1] * 4, None),
    ],
)  # fmt: skip
def test_swapped_with_signs(body: str, signs: list[int], kind: int | None) -> None:
    x, swapped = values(body)
    vector = Constant("signs", np.array(signs, np.float32))
    assert rotary.rolled(x, swapped, vector, Elements()) == kind


@pytest.mark.parametrize(("repeats", "kind", "holds"), [(2, 0, True), (2, 1, False), (1, 0, False)])
def test_a_tiled_table_holds_every_number_twice(repeats: int, kind: int, holds: bool) -> None:
    model = Model(parse_graph(
        f"g (float[S,4] f) => (t) <int64[2] n = {{1, {repeats}}}> {{ r = Tile (f, n) t = Cos (r) }}", 18))  # fmt: skip
    shapes.infer(model)
    assert rotary.repeated(model.graph.outputs[0], kind, Elements()) is holds
