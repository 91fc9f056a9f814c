"""Parts of a product's columns, parts of a Concat, operands that are expanded, and biases behind a split."""

from __future__ import annotations

import pytest

from onnxfuse.graph import consts
from tests.graph.canonicalize.checking import canonical, ints, ops, text, weights

CONSTANTS = (
    weights(4, 12)
    + ", int64[4] halves = {0, 0, 2, 6}, int64[4] pairs = {0, 0, 6, 2}, int64 first = {0}, int64 last = {-1}"
    + ", int64[1] zero = {0}, int64[1] one = {1}, int64[1] two = {2}, int64[1] three = {3}, int64[2] ones = {1, 1}"
)


def cut(body: str, target: str = "halves", columns: int = 6) -> tuple[list[str], list[list[int] | None]]:
    """The ops left, and starts, ends and steps of the Slices."""
    source = text(
        f"h = MatMul (x, w) r = Reshape (h, {target}) {body} y = Mul (g, u)", "float[B,S,4] x",
        f"float[B,S,{columns}] y", CONSTANTS,
    )  # fmt: skip
    model, _ = canonical(source)
    slices = [n for n in model.graph.nodes if n.op == "Slice"]
    return ops(model), [[(ints(n, i) or [1])[0] if i < len(n.inputs) else 1 for i in (1, 2, 4)] for n in slices]


@pytest.mark.parametrize(
    "body",
    [
        "g = Gather <axis=2> (r, first) u = Gather <axis=-2> (r, last)",
        "a, b = Split <axis=2> (r, ones) g = Squeeze (a, two) u = Squeeze (b, two)",
        "a = Slice (r, zero, one, two) g = Squeeze (a, two) b = Slice (r, one, two, two) u = Squeeze (b, two)",
        "t = Transpose <perm=[2,0,1,3]> (r) g = Gather <axis=0> (t, first) u = Gather <axis=0> (t, last)",
    ],
    ids=["gather", "split", "slice", "transposed"],
)
def test_parts_of_split_columns_are_slices(body: str) -> None:
    left, slices = cut(body)
    assert left == ["MatMul", "Slice", "Slice", "Mul"]
    assert slices == [[0, 6, 1], [6, 12, 1]]


def test_alternating_columns_are_slices_in_steps() -> None:
    left, slices = cut("g = Gather <axis=3> (r, last) u = Gather <axis=3> (r, first)", "pairs")
    assert left == ["MatMul", "Slice", "Slice", "Mul"]
    assert slices == [[1, 12, 2], [0, 12, 2]]


def test_what_is_not_a_single_part_stays() -> None:
    left, _ = cut("g = Slice (r, zero, two, three) u = Slice (r, two, three, three)", columns=1)
    assert "Reshape" in left, "ranges of columns of heads"


def test_only_of_products() -> None:
    source = text("r = Reshape (x, halves) g = Gather <axis=2> (r, first) y = Neg (g)", "float[B,S,12] x",
                  "float[B,S,6] y", CONSTANTS)  # fmt: skip
    assert ops(canonical(source)[0]) == ["Reshape", "Gather", "Neg"]


def test_a_bias_behind_the_split_is_added_before() -> None:
    bias = "float[2,6] b = {" + ",".join(map(str, range(12))) + "}"
    for shape, value in (("float[2,6] b", bias), ("float[1,2,6] b", bias.replace("[2,6]", "[1,2,6]"))):
        source = text("h = MatMul (x, w) r = Reshape (h, halves) y = Add (r, b)", "float[B,S,4] x",
                      "float[B,S,2,6] y", f"{CONSTANTS}, {value}")  # fmt: skip
        model, counts = canonical(source)
        assert counts["split-biases"] == 1, shape
        assert ops(model) == ["MatMul", "Add", "Reshape"]
        assert consts.shape_of(model.graph.nodes[1].inputs[1]) == (12,)


def test_a_constant_for_each_part_alone_stays() -> None:
    source = text("h = MatMul (x, w) r = Reshape (h, halves) y = Add (r, b)", "float[B,S,4] x", "float[B,S,2,6] y",
                  f"{CONSTANTS}, float[6] b = {{0,1,2,3,4,5}}")  # fmt: skip
    assert ops(canonical(source)[0]) == ["MatMul", "Reshape", "Add"]


def test_operands_that_the_op_broadcasts_anyway() -> None:
    body = "l = ReduceMax (x, last1) s = Shape (x) e = Expand (l, s) y = Sub (x, e)"
    model, _ = canonical(text(body, "float[B,S,4] x", "float[B,S,4] y", "int64[1] last1 = {-1}"))
    assert ops(model) == ["ReduceMax", "Sub"]


def test_an_operand_that_gives_the_result_its_size_stays_expanded() -> None:
    body = "s = Shape (x) e = Expand (z, s) y = Add (e, z)"
    model, _ = canonical(text(body, "float[B,S,4] x, float[4] z", "float[B,S,4] y"))
    assert "Expand" in ops(model)


def test_a_weight_that_is_repeated_over_the_batch() -> None:
    body = "s = Shape (x) b = Slice (s, zero, one) t = Concat <axis=0> (b, sizes) e = Expand (w, t) y = MatMul (x, e)"
    constants = weights(4, 12) + ", int64[1] zero = {0}, int64[1] one = {1}, int64[2] sizes = {4, 12}"
    model, _ = canonical(text(body, "float[B,S,4] x", "float[B,S,12] y", constants), exact=False)
    assert ops(model) == ["MatMul"]


def test_a_sum_of_tensors_that_are_transposed_alike() -> None:
    body = """a = Relu (x) ta = Transpose <perm=[0,2,1]> (a) tz = Transpose <perm=[0,2,1]> (z) s = Add (ta, tz)
      y = Transpose <perm=[0,2,1]> (s) c = Exp (ta)"""
    model, counts = canonical(text(body, "float[B,S,4] x, float[B,S,4] z", "float[B,S,4] y, float[B,4,S] c"))
    assert counts["sum-transposes"] == 1
    assert sorted(ops(model)) == ["Add", "Exp", "Relu", "Transpose"]


def test_tensors_that_are_transposed_otherwise_or_read_again() -> None:
    for body in (
        "ta = Transpose <perm=[0,2,1]> (x) tz = Transpose <perm=[2,1,0]> (z) y = Add (ta, tz)",
        "ta = Transpose <perm=[0,2,1]> (x) tz = Transpose <perm=[0,2,1]> (z) s = Add (ta, tz) a = Exp (ta) b = Exp (tz)"
        " t = Add (a, b) y = Add (s, t)",
    ):
        model, _ = canonical(text(body, "float[B,4,4] x, float[4,4,B] z", "float[B,4,4] y"), sizes=((4, 3),))
        assert ops(model).count("Transpose") == 2, body


def test_a_transposed_sum_of_which_one_operand_was_transposed_back() -> None:
    body = """a = Relu (x) t = Transpose <perm=[0,2,1]> (a) e = Exp (t) s = Sub (z, t)
      y = Transpose <perm=[0,2,1]> (s)"""
    model, counts = canonical(text(body, "float[B,S,4] x, float[B,4,S] z", "float[B,S,4] y, float[B,4,S] e"))
    assert counts["raised-transposes"] == 1
    by_name = {node.outputs[0].name: node for node in model.graph.nodes}
    assert by_name["y"].op == "Sub"
    assert [value.inputs[0].op for value in by_name["y"].inputs] == ["Transpose", "Relu"]


def test_a_sum_that_others_read_is_transposed_as_it_is() -> None:
    body = "t = Transpose <perm=[0,2,1]> (x) s = Add (z, t) y = Transpose <perm=[0,2,1]> (s)"
    _, counts = canonical(text(body, "float[B,S,4] x, float[B,4,S] z", "float[B,S,4] y, float[B,4,S] s"))
    assert counts["raised-transposes"] == 0


def test_residuals_with_merged_leading_dims_are_not_taken_for_masks() -> None:
    """Windows of an image: [B, P, S, C] merged to [B·P, S, C] before the first residual."""
    body = """t = Transpose <perm=[0,3,2,1]> (x) m = Reshape (t, merged) h = MatMul (m, v) y = Add (m, h)"""
    constants = weights(4, 4).replace(" w ", " v ") + ", int64[3] merged = {-1, 3, 4}"
    model, _ = canonical(text(body, "float[B,4,3,2] x", "float[C,3,4] y", constants), exact=False)
    assert ops(model) == ["Transpose", "Reshape", "MatMul", "Add"]


def test_a_row_that_is_repeated_to_a_matrix_stays_one() -> None:
    row = "float[1,3] w = {1, 2, 3}, int64[2] size = {400, 3}"
    model, _ = canonical(text("e = Expand (w, size) y = MatMul (x, e)", "float[B,S,400] x", "float[B,S,3] y", row))
    assert "Expand" in ops(model) or consts.shape_of(model.graph.nodes[0].inputs[1]) == (400, 3)


JOINED = (
    "int64[1] a0 = {0}, int64[1] a4 = {4}, int64[1] a6 = {6}, int64[1] a9 = {9}, int64[1] m3 = {-3}, int64[1] ax = {2}"
    + ", int64[1] s1 = {1}, int64[1] s2 = {2}, int64[1] last = {9223372036854775807}"
)


@pytest.mark.parametrize(("cut", "size", "left"), [
    ("a0, a4, ax", 4, ["Neg"]), ("a4, a6, ax", 2, ["Abs", "Neg"]), ("m3, last, ax", 3, ["Neg"]),
    ("a6, a9, ax, s1", 3, ["Neg"]), ("a0, a6, ax", 6, ["Abs", "Concat", "Slice", "Neg"]),
    ("a4, a9, ax", 5, ["Abs", "Concat", "Slice", "Neg"]), ("a0, a4, ax, s2", 2, ["Abs", "Concat", "Slice", "Neg"]),
])
@pytest.mark.parametrize("axis", [2, -1])
def test_an_operand_is_not_sliced_from_a_concat(cut: str, size: int, left: list[str], axis: int) -> None:
    source = text(
        f"h = Abs (u) c = Concat <axis={axis}> (x, h, z) p = Slice (c, {cut}) y = Neg (p)",
        "float[B,S,4] x, float[B,S,2] u, float[B,S,3] z", f"float[B,S,{size}] y", JOINED,
    )  # fmt: skip
    assert ops(canonical(source)[0]) == left


def test_slices_along_other_axes_and_of_unknown_sizes_stay() -> None:
    for inputs, axis, rows in (("float[B,4,9] x, float[B,4,9] z", 1, 8), ("float[B,4,S] x, float[B,4,9] z", 2, 4)):
        source = text(
            f"c = Concat <axis={axis}> (x, z) y = Slice (c, a0, a4, ax)", inputs, f"float[B,{rows},4] y", JOINED
        )
        assert ops(canonical(source)[0]) == ["Concat", "Slice"]
