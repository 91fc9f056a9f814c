"""Nodes that do nothing, and computations that are made twice."""

from __future__ import annotations

import pytest

from onnxfuse.graph.canonicalize import canonicalize
from tests.graph.canonicalize.checking import canonical, ops, text, weights
from tests.graph.soundness import load_text


@pytest.mark.parametrize(
    ("body", "constants"),
    [
        ("i = Identity (x) y = Relu (i)", ""),
        ("i = Dropout (x, r) y = Relu (i)", "float r = {0.5}"),
        ("i = Dropout (x, r, t) y = Relu (i)", "float r = {0.5}, bool t = {0}"),
        ("i = Cast <to=1> (x) y = Relu (i)", ""),
        ("i = CastLike (x, f) y = Relu (i)", "float f = {1}"),
        ("i = Cast <to=11> (x) j = Cast <to=1> (i) y = Relu (j)", ""),
        ("i = Reshape (x, t) y = Relu (i)", "int64[3] t = {0, -1, 8}"),
        ("s = Shape (x) i = Expand (x, s) y = Relu (i)", ""),
        ("i = Expand (x, t) y = Relu (i)", "int64[3] t = {1, 1, 8}"),
        (
            "s = Shape (x) l = Gather (s, one) i = Slice (x, z, l, one) y = Relu (i)",
            "int64[1] one = {1}, int64[1] z = {0}",
        ),
        (
            "i = Slice (x, z, e, one) y = Relu (i)",
            "int64[1] one = {1}, int64[1] z = {0}, int64[1] e = {9223372036854775807}",
        ),
        ("i = Transpose <perm=[0,1,2]> (x) y = Relu (i)", ""),
        ("i = Concat <axis=1> (x) y = Relu (i)", ""),
        ("i = Unsqueeze (x, o) j = Squeeze (i, o) y = Relu (j)", "int64[1] o = {1}"),
        ("i = Transpose <perm=[1,0,2]> (x) j = Transpose <perm=[1,0,2]> (i) y = Relu (j)", ""),
        ("i = Mul (x, c) y = Relu (i)", "float c = {1}"),
        ("i = Div (x, c) y = Relu (i)", "float[1] c = {1}"),
        ("i = Sub (x, c) y = Relu (i)", "float c = {0}"),
        ("i = Tile (x, r) y = Relu (i)", "int64[3] r = {1, 1, 1}"),
        ("i = Pad (x, r) y = Relu (i)", "int64[6] r = {0, 0, 0, 0, 0, 0}"),
        ("i = Clip (x) y = Relu (i)", ""),
        ("i = Sum (x) y = Relu (i)", ""),
        ("i = Where (c, x, z) y = Relu (i)", "bool c = {1}, float z = {0}"),
        (
            "s = Shape (x) k = ConstantOfShape <value = bool[1] {1}> (s) i = Where (k, x, z) y = Relu (i)",
            "float z = {0}",
        ),
    ],
)
def test_what_changes_nothing_is_removed(body: str, constants: str) -> None:
    model, _ = canonical(text(body, "float[B,S,8] x", "float[B,S,8] y", constants))
    assert ops(model) == ["Relu"]


@pytest.mark.parametrize(
    ("body", "constants"),
    [
        ("i = Cast <to=10> (x) j = Cast <to=1> (i) y = Relu (j)", ""),  # rounds to float16
        ("i = Transpose <perm=[1,0,2]> (x) y = Reshape (i, t)", "int64[3] t = {-1, 4, 8}"),
        (
            "i = Slice (x, a, b, c, d) y = Relu (i)",
            "int64[1] a = {-1}, int64[1] b = {-9223372036854775807}, int64[1] c = {2}, int64[1] d = {-1}",
        ),
        ("i = Add (x, c) y = Relu (i)", "float c = {2}"),
        ("i = Mul (x, c) y = Squeeze (i, o)", "float[1,1,1,1] c = {1}, int64[1] o = {0}"),  # one more dimension
    ],
)
def test_what_changes_something_stays(body: str, constants: str) -> None:
    model, _ = canonical(text(body, "float[B,S,8] x", "float[?,?,8] y", constants), ((4, 3), (4, 1)))
    assert len(model.graph.nodes) >= 2


def test_training_dropout_stays() -> None:
    source = text("i = Dropout (x, r, t) y = Relu (i)", "float[B,8] x", "float[B,8] y", "float r = {0.5}, bool t = {1}")
    model = load_text(source)
    canonicalize(model)
    assert ops(model) == ["Dropout", "Relu"]


def test_an_input_passed_to_an_output_keeps_both_names() -> None:
    model, _ = canonical(
        text("y = Identity (x) z = Identity (x) r = Relu (x)", "float[B] x", "float[B] y, float[B] z, float[B] r")
    )
    assert sorted(ops(model)) == ["Identity", "Identity", "Relu"]


def test_a_removed_node_may_make_an_output() -> None:
    model, _ = canonical(
        text("a = Relu (x) y = Identity (a) b = Neg (a) z = Cast <to=1> (b)", "float[B] x", "float[B] y, float[B] z")
    )
    assert ops(model) == ["Relu", "Neg"]
    assert [v.name for n in model.graph.nodes for v in n.outputs] == ["y", "z"]


def test_equal_outputs_stay_two_outputs() -> None:
    model, _ = canonical(text("y = Relu (x) z = Relu (x)", "float[B] x", "float[B] y, float[B] z"))
    assert len(model.graph.nodes) == 2


def test_equal_computations_are_made_once() -> None:
    body = """a = Mul (x, c) b = Mul (x, d) e = Exp (a) f = Exp (b) y = Sub (e, f)
      z = Softmax <axis=0> (a) w = Softmax <axis=-1> (b)"""
    model, _ = canonical(
        text(body, "float[B,3] x", "float[B,3] y, float[B,3] z, float[B,3] w", "float c = {2}, float d = {2}")
    )
    assert sorted(ops(model)) == ["Exp", "Mul", "Softmax", "Softmax", "Sub"]


def test_zeros_of_different_sign_are_different() -> None:
    body = "a = Div (x, p) b = Div (x, n) y = Sub (a, b)"
    model = load_text(text(body, "float[B] x", "float[B] y", "float p = {0.0}, float n = {-0.0}"))
    canonicalize(model)
    assert ops(model).count("Div") == 2


def test_tables_that_are_stored_twice_are_merged() -> None:
    table = "{" + ",".join(str(i) for i in range(600)) + "}"
    body = "a = Gather (t, i) b = Gather (u, i) y = Add (a, b) z = Gather (v, i)"
    constants = f"float[300,2] t = {table}, float[300,2] u = {table}, float[2,300] v = {table}"
    model, _ = canonical(text(body, "int64[B] i", "float[B,2] y, float[B,300] z", constants))
    assert sorted(ops(model)) == ["Add", "Gather", "Gather"]
    assert len(model.to_proto().graph.initializer) == 2


def test_random_nodes_are_never_merged() -> None:
    body = "a = RandomNormalLike (x) b = RandomNormalLike (x) y = Sub (a, b)"
    model = load_text(text(body, "float[B,3] x", "float[B,3] y"))
    canonicalize(model)
    assert ops(model).count("RandomNormalLike") == 2


def test_sizes_come_from_the_inputs() -> None:
    body = """h = MatMul (x, w) s = Shape (h) b = Gather (s, zero) u = Unsqueeze (b, ax) k = Relu (h) t = Shape (k)
      c = Gather (t, zero) v = Unsqueeze (c, ax) e = Concat <axis=0> (u, v, one) f = Expand (q, e) y = Add (f, k)"""
    constants = weights(4, 4) + ", float[1,4] q = {1,2,3,4}, int64 zero = {0}, int64[1] ax = {0}, int64[1] one = {1}"
    model, counts = canonical(text(body, "float[B,4] x", "float[B,B,4] y", constants))
    assert counts["root-sizes"] >= 1
    (shape,) = [n for n in model.graph.nodes if n.op == "Shape"]
    assert shape.inputs[0].name == "x"
