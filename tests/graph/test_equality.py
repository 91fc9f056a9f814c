"""Two models that differ in names and the order of independent nodes are the same; everything else counts."""

from __future__ import annotations

import onnx
import pytest

from onnxfuse.graph.equality import same_but_for_names
from onnxfuse.graph.model import load

TEXT = """<ir_version: 8, opset_import: ["": 17]>
g (float[B,8] x, bool c) => (float[B,8] y, float[B,8] z)
<float[8] s = {1,2,3,4,5,6,7,8}, float[8] t = {8,7,6,5,4,3,2,1}, float[8] u = {1,2,3,4,5,6,7,8}>
{
  a = Mul (x, s)
  b = Mul (x, t)
  d = LeakyRelu <alpha = 0.1> (b)
  y = Sub (a, d)
  z = If (c) <then_branch = f () => (float[B,8] p) { p = Add (a, s) },
              else_branch = h () => (float[B,8] q) { q = Neg (d) }>
}
"""


def same(text: str) -> bool:
    return same_but_for_names(load(onnx.parser.parse_model(TEXT)), load(onnx.parser.parse_model(text)))


def test_equal_models() -> None:
    assert same(TEXT)


@pytest.mark.parametrize(("old", "new"), [
    ("b = Mul (x, t)\n  d = LeakyRelu <alpha = 0.1> (b)", "r = Mul (x, t)\n  d = LeakyRelu <alpha = 0.1> (r)"),
    ("a = Mul (x, s)\n  b = Mul (x, t)", "b = Mul (x, t)\n  a = Mul (x, s)"),
    ("p = Add (a, s)", "p = Add (a, u)"),  # another constant with the same content
    ("(float[B,8] q) { q = Neg (d) }", "(float[B,8] k) { k = Neg (d) }"),
])
def test_names_and_the_order_of_nodes_do_not_count(old: str, new: str) -> None:
    assert TEXT.replace(old, new) != TEXT and same(TEXT.replace(old, new))


@pytest.mark.parametrize(("old", "new"), [
    ("y = Sub (a, d)", "y = Sub (d, a)"),
    ("alpha = 0.1", "alpha = 0.2"),
    ("LeakyRelu <alpha = 0.1>", "Relu"),
    ("float[8] t = {8,7", "float[8] t = {8,8"),
    ("{ q = Neg (d) }", "{ q = Neg (a) }"),
    ("{ q = Neg (d) }", "{ q = Abs (d) }"),
    ("p = Add (a, s)", "p = Add (a, x)"),
    ("y = Sub (a, d)", "e = Sub (a, d)\n  y = Relu (e)"),
    ("y, float[B,8] z", "w, float[B,8] z"),
    ('"": 17', '"": 16'),
])
def test_everything_else_counts(old: str, new: str) -> None:
    text = TEXT.replace(old, new)
    assert text != TEXT
    if "w, float" in new:
        text = text.replace("y = Sub", "w = Sub")
    assert not same(text)
