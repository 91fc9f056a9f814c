"""Each pass: what it makes of a small graph, and that the results stay what they were."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx
import pytest

from onnxfuse.graph import consts, view
from onnxfuse.graph.canonicalize import canonicalize
from onnxfuse.graph.ir import Constant, Node
from onnxfuse.graph.model import Model
from tests.graph.soundness import disagreements, load_text, run

SIZES = ((2, 3), (1, 1), (3, 5))


def text(body: str, inputs: str, outputs: str, constants: str = "", opset: int = 18) -> str:
    domains = f'"": {opset}, "com.microsoft": 1'
    return f"<ir_version: 9, opset_import: [{domains}]>\ng ({inputs}) => ({outputs}) <{constants}> {{ {body} }}"


def feeds_for(proto: onnx.ModelProto, b: int, s: int) -> dict[str, np.ndarray]:
    """Random feeds for inputs whose dimensions are numbers, B or S."""
    random = np.random.default_rng(b * 10 + s)
    feeds = {}
    for item in proto.graph.input:
        dims = item.type.tensor_type.shape.dim
        shape = [{"B": b, "S": s}[d.dim_param] if d.dim_param else d.dim_value for d in dims]
        dtype = onnx.helper.tensor_dtype_to_np_dtype(item.type.tensor_type.elem_type)
        values = random.standard_normal(shape) if dtype.kind == "f" else random.integers(0, 2, shape)
        feeds[item.name] = np.asarray(values).astype(dtype)
    return feeds


def canonical(
    source: str, sizes: tuple[tuple[int, int], ...] = SIZES, exact: bool = True
) -> tuple[Model, Mapping[str, int]]:
    """Canonicalize, and check results, interface and inferred shapes on the way."""
    proto = onnx.parser.parse_model(source)
    model = load_text(source)
    counts = canonicalize(model)
    after = model.to_proto()
    onnx.checker.check_model(after, full_check=False)
    assert [o.name for o in after.graph.output] == [o.name for o in proto.graph.output]
    assert [i.SerializeToString() for i in after.graph.input] == [i.SerializeToString() for i in proto.graph.input]
    for b, s in sizes:
        feeds = feeds_for(proto, b, s)
        expected, found = run(proto, feeds), run(after, feeds)
        for name, array in expected.items():
            assert found[name].dtype == array.dtype
            assert found[name].shape == array.shape
            if exact:
                np.testing.assert_array_equal(found[name], array)
            else:
                np.testing.assert_allclose(found[name], array, rtol=1e-5, atol=1e-6)
        wrong, _ = disagreements(model, feeds)
        assert not wrong
    assert not any(canonicalize(model).values()), "a second run finds nothing to do"
    return model, counts


def ops(model: Model) -> list[str]:
    return [node.op for node in model.graph.nodes]


def only(model: Model, op: str) -> Node:
    (node,) = [n for n in model.graph.nodes if n.op == op]
    return node


def ints(node: Node, index: int) -> list[int] | None:
    return consts.ints(node.inputs[index])


# -- constants ---------------------------------------------------------------------------------------------------------


def test_constant_nodes_become_initializers() -> None:
    model, counts = canonical(
        text("c = Constant <value_floats = [1.0, 2.0]> () y = Add (x, c)", "float[B,2] x", "float[B,2] y")
    )
    assert ops(model) == ["Add"]
    assert isinstance(model.graph.nodes[0].inputs[1], Constant)
    assert counts["constant-nodes"] == 1


def test_a_constant_that_is_an_output_stays() -> None:
    model, _ = canonical(
        text("y = Constant <value_float = 2.0> () z = Mul (x, y)", "float[B] x", "float y, float[B] z")
    )
    assert sorted(ops(model)) == ["Constant", "Mul"]


def test_a_constant_captured_by_two_branches_reaches_both() -> None:
    body = """c = Constant <value_float = 3.0> ()
      y = If (b) <then_branch = t () => (float[B] p) { p = Add (x, c) },
                  else_branch = e () => (float[B] q) { q = Sub (x, c) }>"""
    model, _ = canonical(text(body, "float[B] x, bool b", "float[B] y"))
    assert ops(model) == ["If"]


def test_shape_arithmetic_of_static_sizes_is_folded() -> None:
    body = """s = Shape (x) d = Gather (s, two) h = Div (d, n) u = Unsqueeze (h, zero)
      t = Concat <axis=0> (keep, n1, u) y = Reshape (x, t)"""
    model, counts = canonical(
        text(
            body,
            "float[B,S,64] x",
            "float[B,S,4,16] y",
            "int64 two = {2}, int64 n = {4}, int64[1] n1 = {4}, int64[1] zero = {0}, int64[2] keep = {0, 0}",
        )
    )
    assert ops(model) == ["Reshape"]
    assert ints(model.graph.nodes[0], 1) == [0, 0, 4, 16]
    assert counts["known-content"] >= 1


def test_small_constant_expressions_are_folded() -> None:
    body = "g = Add (w, one) h = Sqrt (g) i = Cast <to=1> (n) k = Mul (h, i) y = Mul (x, k)"
    model, _ = canonical(
        text(body, "float[B,4] x", "float[B,4] y", "float[4] w = {1,2,3,4}, float one = {1}, int64 n = {3}"),
        exact=False,
    )
    assert ops(model) == ["Mul"]
    np.testing.assert_allclose(
        consts.array(model.graph.nodes[0].inputs[1]), 3 * np.sqrt(np.arange(2.0, 6.0)), rtol=1e-6
    )


def weights(rows: int, columns: int, kind: str = "float") -> str:
    return f"{kind}[{rows},{columns}] w = {{" + ",".join(str(i % 7) for i in range(rows * columns)) + "}"


def test_dequantized_weights_stay_compressed() -> None:
    body = "d = DequantizeLinear (w, scale, zero) t = Transpose <perm=[1,0]> (d) y = MatMul (x, t)"
    model, _ = canonical(
        text(body, "float[B,16] x", "float[B,16] y", weights(16, 16, "int8") + ", float scale = {0.5}, int8 zero = {1}")
    )
    assert ops(model) == ["DequantizeLinear", "Transpose", "MatMul"]


def test_nothing_that_grows_is_folded() -> None:
    body = "e = Expand (w, u) y = Add (x, e) c = ConstantOfShape (t) z = MatMul (c, x)"
    constants = "int64[2] u = {64, 32}, int64[2] t = {64, 64}, float[1,32] w = {" + ",".join(["2"] * 32) + "}"
    model, _ = canonical(text(body, "float[64,32] x", "float[64,32] y, float[64,32] z", constants))
    assert "ConstantOfShape" in ops(model)
    assert "Expand" in ops(model)
    size = sum(
        len(i.raw_data) + 8 * len(i.int64_data) + 4 * len(i.float_data) for i in model.to_proto().graph.initializer
    )
    assert size < 600


# -- nodes that do nothing ---------------------------------------------------------------------------------------------


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


# -- duplicates --------------------------------------------------------------------------------------------------------


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


# -- targets -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "target", "expected"),
    [
        ("B,S,64", "B,S,-1,16", [0, 0, 4, 16]),
        ("B,S,4,16", "B,S,64", [0, 0, 64]),
        ("B,S,64", "-1,64", [-1, 64]),
        ("B,S,64", "BS,64", [-1, 64]),
        ("B,4,S,16", "B4,S,16", [-1, 0, 16]),
        ("2,3,8", "6,8", [6, 8]),
    ],
)
def test_reshape_targets_become_constants(shape: str, target: str, expected: list[int]) -> None:
    pieces = {"B": "b", "S": "s", "BS": "bs", "B4": "b4"}
    parts = []
    constants = ["int64[1] zero = {0}", "int64[1] one = {1}", "int64[1] two = {2}", "int64[1] four = {4}"]
    for i, piece in enumerate(target.split(",")):
        if piece in pieces:
            parts.append(pieces[piece])
        else:
            constants.append(f"int64[1] k{i} = {{{piece}}}")
            parts.append(f"k{i}")
    place = {"B": "zero", "S": "two" if shape.split(",")[1] == "4" else "one"}
    body = (
        f"sh = Shape (x) b = Gather (sh, zero) s = Gather (sh, {place['S']}) bs = Mul (b, s) b4 = Mul (b, four)"
        f" t = Concat <axis=0> ({', '.join(parts)}) r = Reshape (x, t) y = Relu (r)"
    )
    rank = len(target.split(","))
    source = text(body, f"float[{shape}] x", f"float[{','.join('?' * rank)}] y", ", ".join(constants))
    model, _ = canonical(source)
    if expected == [-1, 0, 16]:
        # The middle size may be zero, and then −1 has no answer: the target stays computed.
        assert not isinstance(only(model, "Reshape").inputs[1], Constant)
    else:
        assert ints(only(model, "Reshape"), 1) == expected
        assert ops(model) == ["Reshape", "Relu"]


def test_an_empty_batch_is_reshaped_as_before() -> None:
    body = "s = Shape (x) b = Gather (s, zero) l = Gather (s, one) t = Concat <axis=0> (b, l, h, d) y = Reshape (x, t)"
    source = text(
        body,
        "float[B,S,64] x",
        "float[B,S,4,16] y",
        "int64[1] zero = {0}, int64[1] one = {1}, int64[1] h = {4}, int64[1] d = {16}",
    )
    proto = onnx.parser.parse_model(source)
    model, _ = canonical(source)
    for b, s in ((0, 3), (2, 0)):
        feeds = {"x": np.zeros((b, s, 64), np.float32)}
        assert run(model.to_proto(), feeds)["y"].shape == run(proto, feeds)["y"].shape == (b, s, 4, 16)


def test_allowzero_keeps_its_meaning() -> None:
    body = "y = Reshape <allowzero=1> (x, t)"
    model, _ = canonical(text(body, "float[0,4] x", "float[4,0] y", "int64[2] t = {4, 0}"))
    (node,) = model.graph.nodes
    assert node.attrs.get("allowzero") == 1


def test_expand_targets_become_constants() -> None:
    body = """s = Shape (x) b = Slice (s, zero, one) l = Slice (s, one, two) t = Concat <axis=0> (b, three, l, eight)
      u = Unsqueeze (x, one) y = Expand (u, t)"""
    model, _ = canonical(
        text(
            body,
            "float[B,S,8] x",
            "float[B,3,S,8] y",
            "int64[1] zero = {0}, int64[1] one = {1}, int64[1] two = {2}, int64[1] three = {3}, int64[1] eight = {8}",
        )
    )
    assert ops(model) == ["Unsqueeze", "Expand"]
    assert ints(only(model, "Expand"), 1) == [1, 3, 1, 1]


def test_slices_have_plain_bounds() -> None:
    body = """s = Shape (x) d = Gather (s, two) h = Div (d, n) a = Slice (x, z, h, two, one) b = Slice (x, h, big, m1)
      c = Neg (b) y = Concat <axis=-1> (c, a)"""
    model, _ = canonical(
        text(
            body,
            "float[B,S,16] x",
            "float[B,S,16] y",
            "int64[1] two = {2}, int64[1] n = {2}, int64[1] z = {0}, int64[1] one = {1}, int64[1] m1 = {-1},"
            " int64[1] big = {9223372036854775807}",
        )
    )
    first, second = (n for n in model.graph.nodes if n.op == "Slice")
    assert [ints(first, i) for i in (1, 2, 3)] == [[0], [8], [2]]
    assert [ints(second, i) for i in (1, 2, 3)] == [[8], [16], [2]]
    assert len(first.inputs) == len(second.inputs) == 4


def test_flatten_becomes_reshape() -> None:
    model, _ = canonical(text("y = Flatten <axis=2> (x)", "float[B,S,8] x", "float[?,8] y"))
    assert ints(only(model, "Reshape"), 1) == [-1, 8]


# -- neighbours --------------------------------------------------------------------------------------------------------


def test_reshapes_are_merged() -> None:
    body = "a = Reshape (x, t) b = Reshape (a, u) y = Relu (b)"
    model, _ = canonical(
        text(body, "float[B,S,4,16] x", "float[?,64] y", "int64[3] t = {0, 0, 64}, int64[2] u = {-1, 64}")
    )
    assert ops(model) == ["Reshape", "Relu"]
    assert ints(only(model, "Reshape"), 1) == [-1, 64]


def test_unsqueezes_are_merged() -> None:
    body = "a = Unsqueeze (x, zero) b = Unsqueeze (a, m1) c = Unsqueeze (b, one) y = Relu (c)"
    model, _ = canonical(
        text(body, "float[B,S] x", "float[1,1,B,S,1] y", "int64[1] zero = {0}, int64[1] m1 = {-1}, int64[1] one = {1}")
    )
    assert ops(model) == ["Unsqueeze", "Relu"]
    assert ints(only(model, "Unsqueeze"), 1) == [0, 1, 4]


def test_squeezes_are_merged() -> None:
    body = "a = Squeeze (x, one) b = Squeeze (a, m1) y = Relu (b)"
    model, _ = canonical(text(body, "float[B,1,S,1] x", "float[B,S] y", "int64[1] one = {1}, int64[1] m1 = {-1}"))
    assert ops(model) == ["Squeeze", "Relu"]
    assert ints(only(model, "Squeeze"), 1) == [1, 3]


def test_old_opsets_have_axes_as_attributes() -> None:
    body = "a = Unsqueeze <axes=[0]> (x) b = Unsqueeze <axes=[-1]> (a) y = Relu (b)"
    model, _ = canonical(text(body, "float[B,S] x", "float[1,B,S,1] y", opset=11))
    assert only(model, "Unsqueeze").attrs["axes"] == [0, 3]


def test_transposes_are_merged() -> None:
    body = "a = Transpose <perm=[0,2,1,3]> (x) b = Transpose <perm=[0,1,3,2]> (a) y = Relu (b)"
    model, _ = canonical(text(body, "float[B,S,4,8] x", "float[B,4,8,S] y"))
    assert only(model, "Transpose").attrs["perm"] == [0, 2, 3, 1]


def test_the_detour_over_three_dimensions_is_one_transpose() -> None:
    body = """s = Shape (x) l = Gather (s, two) k = Concat <axis=0> (m1, l, eight) a = Reshape (x, k)
      b = Transpose <perm=[0,2,1]> (a) u = Gather (s, order) c = Reshape (b, u) y = Relu (c)"""
    constants = "int64[1] two = {2}, int64[1] m1 = {-1}, int64[1] eight = {8}, int64[4] order = {0, 1, 3, 2}"
    model, _ = canonical(text(body, "float[B,4,S,8] x", "float[B,4,8,S] y", constants))
    assert ops(model) == ["Transpose", "Relu"]
    assert only(model, "Transpose").attrs["perm"] == [0, 1, 3, 2]


# -- linear layers -----------------------------------------------------------------------------------------------------

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


# -- operands ----------------------------------------------------------------------------------------------------------


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


# -- subgraphs and functions -------------------------------------------------------------------------------------------


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
