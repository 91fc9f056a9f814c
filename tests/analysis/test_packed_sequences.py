"""The mask of a decoder without a padding mask: exporters look for packed sequences in the positions, which the graph
itself counts up, so nothing is hidden but the future."""

from __future__ import annotations

import numpy as np
import onnx
from onnx.reference import ReferenceEvaluator

from onnxfuse.analysis import masks
from onnxfuse.analysis.masks import Causal
from onnxfuse.analysis.poly import Poly
from onnxfuse.graph import canonicalize, shapes
from onnxfuse.graph.model import Model
from onnxfuse.ruletest.cases import parse_graph

GRAPH = """
g (int64[B,S] ids) => (bool[B,S,S] m)
<int64 n0 = {0}, int64 n1 = {1}, int64[1] a0 = {0}, int64[1] a1 = {1}, int64[1] a2 = {2},
 int64[1] last = {9223372036854775807}, int64[1] minus = {-1}>
{
  s1 = Shape <start=1, end=2> (ids)
  s = Squeeze (s1, a0)
  k = Range (n0, s, n1)
  row = Unsqueeze (k, a0)
  b1 = Shape <start=0, end=1> (ids)
  wide = Concat <axis=0> (b1, a1)
  pos = Expand (row, wide)
  first = Slice (pos, a0, a1, a1)
  before = Sub (first, STEP)
  with = Concat <axis=1> (before, pos)
  low = Slice (with, a0, minus, a1)
  high = Slice (with, a1, last, a1)
  jump = Sub (high, low)
  same = Equal (jump, n1)
  differs = Not (same)
  marks = Cast <to=7> (differs)
  sequence = CumSum (marks, n1)
  mine = Unsqueeze (sequence, a2)
  theirs = Unsqueeze (sequence, a1)
  together = Equal (mine, theirs)
  q = Unsqueeze (k, a1)
  past = LessOrEqual (k, q)
  m = And (past, together)
}"""


def analysed(step: str) -> tuple[onnx.ModelProto, masks.MaskFacts | None]:
    proto = parse_graph(GRAPH.replace("STEP", step), 18)
    model = Model(proto)
    canonicalize.run(model)
    shapes.infer(model)
    return proto, masks.analyze(model.graph.outputs[0])


def test_positions_that_count_up_are_one_sequence() -> None:
    proto, facts = analysed("n1")
    assert facts is not None
    assert [type(c) for c in facts.conditions()] == [Causal]
    assert facts.causal_offset() == Poly.of(0)
    for rows, length in [(1, 1), (2, 5), (3, 9)]:
        ids = np.zeros((rows, length), np.int64)
        (real,) = ReferenceEvaluator(proto).run(None, {"ids": ids})
        assert (real == np.tril(np.ones((length, length), bool))).all()


def test_a_jump_at_the_first_position_is_not_proved_away() -> None:
    """Here the first position differs by 0 from the one before it: a running sum of unequal elements, left as it is."""
    proto, facts = analysed("n0")
    ids = np.zeros((2, 5), np.int64)
    (real,) = ReferenceEvaluator(proto).run(None, {"ids": ids})
    assert facts is not None
    assert [type(c) for c in facts.conditions() if isinstance(c, Causal)] == [Causal]
    assert len(facts.conditions()) > 1
    assert (real == np.tril(np.ones((5, 5), bool))).all()  # equal here, but not by what the proof looks at
