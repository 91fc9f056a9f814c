"""Inference inside of If, Loop and Scan."""

from __future__ import annotations

import numpy as np

from onnxfuse.graph import shapes, view
from onnxfuse.graph.dims import symbol
from tests.graph.soundness import disagreements, load_text

B, S = symbol("B"), symbol("S")
HEADER = '<ir_version: 9, opset_import: ["": 18]>\n'


def outputs(text: str) -> dict[str, tuple]:
    engine = shapes.infer(load_text(HEADER.replace("]", ', "com.microsoft": 1]') + text))
    return {v.name: v.shape for graph in view.all_graphs(engine.model.graph) for n in graph.nodes for v in n.outputs}


def test_branches_are_merged() -> None:
    found = outputs(
        """g (float[B,S,8] x, bool c) => (float[B,S,8] y, float[?,?,8] z, float[?,?] r) {
          y = If (c) <then_branch = t () => (float p) { p = Relu (x) }, else_branch = e () => (float q) { q = Neg (x) }>
          z = If (c) <then_branch = t () => (float p) { p = Relu (x) },
                      else_branch = e () => (float q) { q = Transpose <perm=[1,0,2]> (x) }>
          w = If (c) <then_branch = t () => (float p) { p = Relu (x) },
                      else_branch = e () => (float q) { q = Flatten (x) }>
          r = Relu (w)
        }"""
    )
    assert found["y"] == (B, S, 8)
    assert found["z"][2] == 8
    assert not {B, S} & set(found["z"])
    assert found["w"] is None


LOOP = (
    HEADER
    + """g (float[B,S] x, int64 n) => (float y, float z)
<int64[1] one = {1}> {
  t = Cast <to=9> (n)
  y, z = Loop (n, t, x) <body = b (int64 i, bool go, float[?,?] v) => (bool more, float grown, float step)
    { more = Identity (go) grown = Concat <axis=1> (v, v) step = ReduceSum (v) }>
}"""
)


def test_a_size_that_grows_in_a_loop_is_unknown() -> None:
    engine = shapes.infer(load_text(LOOP))
    loop = engine.model.graph.nodes[1]
    y, z = loop.outputs
    assert y.shape[0] == B
    assert y.shape[1] != S
    assert z.shape[1:] == (1, 1)
    for trips in (1, 3):
        wrong, checked = disagreements(engine.model, {"x": np.ones((2, 3), np.float32), "n": np.array(trips)})
        assert not wrong
        assert checked


def test_scan_takes_its_axis_away_and_puts_it_back() -> None:
    found = outputs(
        """g (float[S,B,4] x, float[B,4] h) => (float last, float all) {
          last, all = Scan <num_scan_inputs = 1, body = b (float[?,4] state, float[?,4] row) => (float next, float out)
            { next = Add (state, row) out = Concat <axis=1> (next, row) }> (h, x)
        }"""
    )
    assert found["last"] == (B, 4)
    assert found["all"] == (S, B, 8)


SIBLINGS = (
    HEADER
    + """g (int64[B,S] x, bool c) => (int64 y) {
  y = If (c) <then_branch = t () => (int64 p) { n = NonZero (x) p = Identity (n) },
              else_branch = e () => (int64 q) {
                n = Unique (x) zero = Constant <value_ints=[0]> () q = Unsqueeze (n, zero) }>
}"""
)


def test_equal_names_in_sibling_branches_are_different_values() -> None:
    engine = shapes.infer(load_text(SIBLINGS))
    then, other = view.subgraphs(engine.model.graph.nodes[0])
    sizes = [then.nodes[0].outputs[0].shape[1], other.nodes[0].outputs[0].shape[0]]
    assert sizes[0] != sizes[1]


def test_bodies_that_do_not_fit_their_node_are_left_to_the_runtime() -> None:
    found = outputs(
        """g (float[B,S] x, int64 n, bool c) => (float[B,S] end) {
          y, z = Loop (n, c) <body = b (int64 i, bool go, float[?,?] v) => (bool more, float grown, float step)
            { more = Identity (go) grown = Relu (v) step = ReduceSum (v) }>
          p, q = If (c) <then_branch = t () => (float a) { a = Relu (x) },
                         else_branch = e () => (float d) { d = Neg (x) }>
          s, r = Scan (x) <num_scan_inputs = 1, body = k (float[?] u) => (float w) { w = Relu (u) }>
          end = Neg (x)
        }"""
    )
    assert found["y"] is None and found["z"] is None
    assert found["p"] is None and found["s"] is None


def test_nodes_that_no_checker_looks_at_may_lack_anything() -> None:
    found = outputs(
        """g (float[B,S,8] x, float[B,S] z) => (float[B,S] end) {
          y, k, l = com.microsoft.GroupQueryAttention <num_heads = 2> (x)
          w = com.microsoft.MultiHeadAttention <num_heads = 2> (z, z, z)
          v = com.microsoft.Attention (z)
          end = Neg (z)
        }"""
    )
    assert found["y"] is None and found["w"] is None and found["v"] is None
