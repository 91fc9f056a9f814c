"""Each named predicate, where it holds and where it refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from onnxfuse import rules
from onnxfuse.graph import shapes
from onnxfuse.graph.ir import Constant, Value
from onnxfuse.match import predicates
from onnxfuse.match.predicates import REGISTRY, Refused
from onnxfuse.match.scope import Scope, Target
from onnxfuse.ruletest.cases import load, parse_graph

TEXT = """
g (float[B,S,8] x, float[B,S,8] z, float[B,7] odd, float[1,S,8] row)
 => (y, lo, hi, hi2, step, up, u, v, r, o1, o2, moved, done, ev, od)
<float two = {2}, float[2] pair = {2, 2}, float[2] other = {2, 3}, int64[1] zero = {0}, int64[1] four = {4},
 int64[1] eight = {8}, int64[1] three = {3}, int64[1] last = {-1},
 int64[1] first = {0}, int64[1] two1 = {2}, int64[1] one = {1}, float[8,8] w, float[8] b>
{
  y = Add (x, z)
  lo = Slice (x, zero, four, last)
  hi = Slice (x, four, eight, last)
  hi2 = Slice (x, three, eight, last)
  step = Slice (x, zero, four, first)
  up = Slice (z, four, eight, last)
  ev = Slice (x, zero, eight, last, two1)
  od = Slice (x, one, eight, last, two1)
  o1 = Slice (odd, zero, three, last)
  o2 = Slice (odd, three, eight, last)
  h = onnxfuse.Linear (x, w)
  u = Add (h, b)
  q = onnxfuse.Linear (z, w, , y)
  v = Relu (q)
  moved = Neg (row)
  k = onnxfuse.Linear (x, w)
  kb = Add (k, b)
  sum = Add (kb, z)
  after = onnxfuse.Linear (x, w, , sum)
  done = Relu (after)
  r = Sub (z, x)
}
"""


@pytest.fixture(scope="module")
def scope() -> Scope:
    model = load(parse_graph(TEXT), TEXT)
    shapes.infer(model)
    return Scope.of(model, model.graph, Target())


def value(scope: Scope, name: str) -> Value:
    for node in scope.graph.nodes:
        for found in [*node.inputs, *node.outputs]:
            if found.name == name:
                return found
    raise KeyError(name)


def call(scope: Scope, name: str, *arguments: Any, **params: Any) -> bool:
    resolved = [value(scope, a) if isinstance(a, str) else a for a in arguments]
    outcome = REGISTRY[name](scope, *resolved, **params)
    if isinstance(outcome, Refused):
        assert outcome.expected is not None or outcome.found is not None
        return False
    return True


TWO, PAIR, OTHER = (Constant(n, np.asarray(v, np.float32)) for n, v in (("a", 2), ("b", [2, 2]), ("c", [2, 3])))
HALF = Constant("d", np.asarray([2, 2], np.float16))
EMPTY = Constant("e", np.zeros(0, np.float32))


@pytest.mark.parametrize(
    ("name", "arguments", "params", "holds"),
    [
        ("equal_constants", (PAIR, Constant("p", np.asarray([2, 2], np.float32))), {}, True),
        ("equal_constants", (PAIR, OTHER), {}, False),
        ("equal_constants", (TWO, PAIR), {}, False),
        ("equal_constants", ("x", PAIR), {}, False),
        ("filled_with", (PAIR,), {"number": 2}, True),
        ("filled_with", (HALF,), {"number": 2}, True),
        ("filled_with", (OTHER,), {"number": 2}, False),
        ("filled_with", (PAIR,), {"number": 3}, False),
        ("filled_with", (EMPTY,), {"number": 2}, False),
        ("filled_with", ("x",), {"number": 2}, False),
        ("equal_shapes", ("x", "z"), {}, True),
        ("equal_shapes", ("x", "lo"), {}, False),
        ("reciprocal_of_dim", (0.125, 8), {}, True),
        ("reciprocal_of_dim", (0.25, 8), {}, False),
        ("reciprocal_of_dim", (0.25, None), {}, False),
        ("equals_dim", (8.0, 8), {}, True),
        ("equals_dim", (8.0, 9), {}, False),
        ("equals_dim", (8.0, None), {}, False),
        ("is_absent", (None,), {}, True),
        ("is_absent", ("x",), {}, False),
        ("is_present", ("x",), {}, True),
        ("is_present", (None,), {}, False),
        ("numbers_equal", (1.0, 1.00001), {}, True),
        ("numbers_equal", (2.0, 1.0), {"factor": 2.0}, True),
        ("numbers_equal", (2.0, 1.0), {}, False),
        ("square_root_of_dim", (8.0, 64), {}, True),
        ("square_root_of_dim", (0.125, 64), {"power": -0.5}, True),
        ("square_root_of_dim", (0.125, 64), {}, False),
        ("square_root_of_dim", (8.0, None), {}, False),
        ("read_only_as_first_input", ("h",), {}, True),
        ("read_only_as_first_input", ("z",), {}, False),
        ("mean_over_dim", (0, 0, 8), {}, True),
        ("mean_over_dim", (0.125, 0, 8), {}, True),
        ("mean_over_dim", (0, 8, 8), {}, True),
        ("mean_over_dim", (0.5, 0, 8), {}, False),
        ("mean_over_dim", (0, 7, 8), {}, False),
        ("halves_of_last_axis", ("lo", "hi"), {}, True),
        ("halves_of_last_axis", ("hi", "lo"), {}, False),
        ("halves_of_last_axis", ("lo", "hi2"), {}, False),
        ("halves_of_last_axis", ("lo", "up"), {}, False),
        ("halves_of_last_axis", ("step", "hi"), {}, False),
        ("halves_of_last_axis", ("o1", "o2"), {}, False),
        ("maybe_other_size", ("x", 7, 8), {}, True),
        ("maybe_other_size", ("x", 8, 8), {}, False),
        ("maybe_other_size", ("x", 1, 8), {}, False),
        ("made_by_no_product", ("y", "r"), {}, True),
        ("one_row_for_the_batch", ("row", "y"), {}, True),
        ("one_row_for_the_batch", ("b", "y"), {}, False),
        ("one_row_for_the_batch", ("z", "y"), {}, False),
        ("one_row_for_the_batch", ("odd", "odd"), {}, False),
        ("made_by_no_product", ("h",), {}, False),
        ("made_by_no_product", ("x", "u"), {}, True),  # an output of the graph stays
        ("made_by_no_product", ("x", "kb"), {}, False),
        ("made_by_no_product", ("sum",), {}, False),
        ("made_by_no_product", ("after",), {}, False),
        ("last_axes_swapped", ("x",), {}, True),
        ("last_axes_swapped", ("b",), {}, False),
        ("alternating", ("ev", "od"), {}, True),
        ("alternating", ("od", "ev"), {}, True),
        ("alternating", ("ev", "ev"), {}, False),
        ("alternating", ("lo", "hi"), {}, False),
        ("alternating", ("ev", "up"), {}, False),
        ("made_by_no_product", ("q",), {}, True),
    ],
)
def test_predicate(scope: Scope, name: str, arguments: tuple, params: dict, holds: bool) -> None:
    assert call(scope, name, *arguments, **params) is holds


def test_every_predicate_is_documented_and_used_or_tested_here() -> None:
    here = {mark.args[1][i][0] for mark in test_predicate.pytestmark for i in range(len(mark.args[1]))}
    used = {where.fn for program in rules.load() for where in program.spec.where}
    assert set(REGISTRY) <= here | used
    for function in REGISTRY.values():
        assert "of:" in (function.__doc__ or "") and "holds:" in (function.__doc__ or ""), function.__name__
    assert predicates.predicate(REGISTRY["is_absent"]) is REGISTRY["is_absent"]
