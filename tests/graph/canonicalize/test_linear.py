"""Matrix products on flattened tensors; operands."""

from __future__ import annotations

import pytest

from onnxfuse.graph import consts
from onnxfuse.graph.ir import Constant
from tests.graph.canonicalize.checking import canonical, ints, ops, text, weights

FLAT = "int64[2] flat = {-1, 4}, float[3] bias = {1, 2, 3}, int64[3] back = {-1, 5, 3}, "


@pytest.mark.parametrize(
    ("product", "weight"),
    [
        ("m = Gemm (f, w, bias)", weights(4, 3)),
        ("m = Gemm <transB=1> (f, w, bias)", weights(3, 4)),
        ("n = MatMul (f, w) m = Add (n, bias)", weights(4, 3)),
    ],
)
def test_products_of_flattened_rows(product: str, weight: str) -> None:
    body = f"f = Reshape (x, flat) {product} r = Reshape (m, back) y = Relu (r)"
    model, _ = canonical(text(body, "float[B,5,4] x", "float[B,5,3] y", FLAT + weight), exact=False)
    assert ops(model) == ["MatMul", "Add", "Relu"]
    assert consts.shape_of(model.graph.nodes[0].inputs[1]) == (4, 3)


def test_products_of_merged_heads() -> None:
    body = "f = Reshape (x, flat) m = Gemm (f, w, bias) r = Reshape (m, back) y = Relu (r)"
    model, _ = canonical(text(body, "float[B,5,2,2] x", "float[B,5,3] y", FLAT + weights(4, 3)), exact=False)
    assert ops(model) == ["Reshape", "MatMul", "Add", "Relu"]
    assert ints(model.graph.nodes[0], 1) == [0, 5, 4]


def test_a_length_that_a_table_limits() -> None:
    """The target says min(8, S) (the rows of a table cut to the length), which must be S to be possible."""
    body = """f = Reshape (x, flat) m = Gemm (f, w, bias) s = Shape (x) b = Slice (s, zero, one) l = Slice (s, one, two)
      k = Min (l, eight) t = Concat <axis=0> (b, k, three) r = Reshape (m, t) y = Relu (r)"""
    constants = "int64[1] zero = {0}, int64[1] one = {1}, int64[1] two = {2}, int64[1] three = {3}, "
    constants += "int64[1] eight = {8}, "
    model, _ = canonical(text(body, "float[B,S,4] x", "float[B,S,3] y", constants + FLAT + weights(4, 3)), exact=False)
    assert ops(model) == ["MatMul", "Add", "Relu"]


def test_a_product_that_others_read_stays_flat() -> None:
    body = "f = Reshape (x, flat) m = Gemm (f, w, bias) r = Reshape (m, back) y = Relu (r) z = Neg (m)"
    model, _ = canonical(text(body, "float[B,5,4] x", "float[B,5,3] y, float[?,3] z", FLAT + weights(4, 3)))
    assert "Gemm" in ops(model)


def test_batched_products_of_flattened_heads() -> None:
    body = """a = Reshape (x, t) b = Reshape (z, u) m = MatMul (a, b) r = Reshape (m, v) y = Relu (r)"""
    model, _ = canonical(
        text(
            body,
            "float[B,4,5,8] x, float[B,4,8,5] z",
            "float[B,4,5,5] y",
            "int64[3] t = {-1, 5, 8}, int64[3] u = {-1, 8, 5}, int64[4] v = {-1, 4, 5, 5}",
        ),
        exact=False,
    )
    assert ops(model) == ["MatMul", "Relu"]


def big(name: str = "w") -> str:
    return f"float[40,40] {name} = {{" + ",".join(str(i % 9) for i in range(1600)) + "}"


def test_a_transposed_weight_is_folded() -> None:
    source = text("t = Transpose (w) y = MatMul (x, t)", "float[B,40] x", "float[B,40] y", big())
    model, counts = canonical(source, exact=False)
    assert ops(model) == ["MatMul"]
    assert counts["constant-transposes"] == 1


def test_a_tied_weight_is_not_stored_twice() -> None:
    body = "e = Gather (w, i) t = Transpose <perm=[1,0]> (w) y = MatMul (e, t)"
    model, _ = canonical(text(body, "int64[B] i", "float[B,40] y", big()))
    assert ops(model) == ["Gather", "Transpose", "MatMul"]
    assert len(model.to_proto().graph.initializer) == 1


def test_constants_come_second_and_have_rank_zero() -> None:
    model, _ = canonical(
        text(
            "a = Add (c, x) b = Mul (d, a) e = Sub (c, b) y = Where (m, c, e)",
            "float[B,S] x, bool[B,S] m",
            "float[B,S] y",
            "float[1] c = {2}, float[1,1] d = {3}",
        )
    )
    add, mul, sub, where = model.graph.nodes
    assert isinstance(add.inputs[1], Constant) and isinstance(mul.inputs[1], Constant)
    assert isinstance(sub.inputs[0], Constant)
    constants = [v for n in (add, mul, sub, where) for v in n.inputs if isinstance(v, Constant)]
    assert all(consts.shape_of(v) == () for v in constants)


def test_a_filled_operand_is_a_scalar() -> None:
    body = """s = Shape (x) f = ConstantOfShape <value = int64[1] {5}> (s) a = Min (x, f)
      t = ConstantOfShape <value = bool[1] {1}> (s) b = Equal (a, f) y = And (b, t)"""
    model, _ = canonical(text(body, "int64[B,S] x", "bool[B,S] y"))
    assert ops(model) == ["Min", "Equal"]


def test_a_known_branch_is_inlined() -> None:
    body = """h = Neg (x) y = If (c) <then_branch = t () => (float[B] p) { a = Add (h, x) p = Relu (a) },
      else_branch = e () => (float[B] q) { a = Sub (h, x) q = Exp (a) }> z = Relu (y)"""
    model, _ = canonical(text(body, "float[B] x", "float[B] y, float[B] z", "bool c = {0}"))
    assert ops(model) == ["Neg", "Sub", "Exp", "Relu"]


def test_a_branch_that_returns_an_outer_value_is_inlined() -> None:
    body = """y = If (c) <then_branch = t () => (float[B] p) { p = Identity (x) },
      else_branch = e () => (float[B] q) { q = Exp (x) }>"""
    model, _ = canonical(text(body, "float[B] x", "float[B] y", "bool c = {1}"))
    assert ops(model) == ["Identity"]
