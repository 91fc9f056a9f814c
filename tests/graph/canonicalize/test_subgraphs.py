"""Subgraphs, functions, and what is dead."""

from __future__ import annotations

from onnxfuse.graph import view
from onnxfuse.graph.canonicalize import canonicalize
from tests.graph.canonicalize.checking import canonical, only, ops, text
from tests.graph.soundness import load_text


def test_captured_values_keep_their_producers() -> None:
    body = """a = Identity (x) h = Mul (a, two) k = Relu (h)
      y = If (c) <then_branch = t () => (float[B] p) { i = Identity (h) p = Exp (i) },
                  else_branch = e () => (float[B] q) { q = Cast <to=1> (k) }>"""
    model, _ = canonical(text(body, "float[B] x, bool c", "float[B] y", "float two = {2}"))
    assert ops(model) == ["Mul", "Relu", "If"]
    then, other = view.subgraphs(model.graph.nodes[-1])
    assert [n.op for n in then.nodes] == ["Exp"]
    assert [n.op for n in other.nodes] == ["Cast"]  # a branch's output cannot be an outer value


def test_equal_nodes_of_two_graphs_are_not_merged() -> None:
    body = """y = If (c) <then_branch = t () => (float[B] p) { a = Exp (x) p = Neg (a) },
      else_branch = e () => (float[B] q) { a2 = Exp (x) q = Relu (a2) }>"""
    model, _ = canonical(text(body, "float[B] x, bool c", "float[B] y"))
    then, other = view.subgraphs(model.graph.nodes[0])
    assert [n.op for n in then.nodes] == ["Exp", "Neg"]
    assert [n.op for n in other.nodes] == ["Exp", "Relu"]


def test_loop_bodies_are_canonicalized() -> None:
    body = """y = Loop (n, go, x) <body = b (int64 i, bool g, float[?] v) => (bool h, float[?] w)
      { h = Identity (g) a = Identity (v) c = Constant <value_float = 1.0> () d = Mul (a, c) w = Add (d, d) }>"""
    source = text(body, "float[B] x", "float[B] y", "int64 n = {3}, bool go = {1}")
    model, _ = canonical(source)
    (inner,) = view.subgraphs(model.graph.nodes[0])
    assert [n.op for n in inner.nodes] == ["Identity", "Add"]


FUNCTION = """<ir_version: 9, opset_import: ["": 18, "my": 1]>
g (float[B,S] x) => (float[B,S] y) { y = my.scaled <factor = 3.0> (x) }
<opset_import: ["": 18], domain: "my">
scaled <factor> (v) => (w) {
  f = Constant <value_float: float = @factor> ()
  two = Constant <value_float = 2.0> ()
  i = Identity (v)
  a = Mul (two, i)
  w = Mul (a, f)
}"""


def test_function_bodies_are_canonicalized() -> None:
    model, _ = canonical(FUNCTION)
    (function,) = model.functions
    assert [n.op for n in function.nodes] == ["Constant", "Mul", "Mul"]


def test_an_overridable_initializer_is_no_constant() -> None:
    source = text("a = Mul (x, k) y = Relu (a)", "float[B] x, float k", "float[B] y", "float k = {1}")
    model = load_text(source)
    canonicalize(model)
    assert ops(model) == ["Mul", "Relu"]


def test_nothing_dead_is_left() -> None:
    body = "a = Exp (x) b = Neg (a) y = Relu (x) c, d = Split <axis=1, num_outputs=2> (x) z = Abs (c)"
    model, _ = canonical(text(body, "float[B,4] x", "float[B,4] y, float[B,2] z"))
    assert sorted(ops(model)) == ["Abs", "Relu", "Split"]
    assert len(only(model, "Split").outputs) == 2
