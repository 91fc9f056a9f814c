"""Inference op by op: every claim is compared with what ONNX Runtime makes of the same node, zero sizes included."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

from onnxfuse.graph import shapes, view
from onnxfuse.graph.dims import Dim, symbol
from onnxfuse.graph.ir import Variable
from onnxfuse.graph.model import Model
from tests.graph.soundness import disagreements, load_text

B, S, P = symbol("B"), symbol("S"), symbol("P")

HEADER = '<ir_version: 9, opset_import: ["": 18]>\n'


def infer(body: str, inputs: str, constants: str = "", outputs: str = "float y") -> shapes.Inference:
    """Infer a graph given in ONNX's text syntax."""
    text = f"{HEADER}g ({inputs}) => ({outputs}) <{constants}> {{ {body} }}"
    return shapes.infer(load_text(text))


def value(engine: shapes.Inference, name: str) -> Variable:
    return next(v for node in engine.model.graph.nodes for v in node.outputs if v.name == name)


#: (nodes, constants): x is float[B,S,8], p is float[P,4], i is int64[B,S].
CASES = {
    "binary": ("y = Add (x, c)", "float[8] c = {1,2,3,4,5,6,7,8}"),
    "shape arithmetic": (
        "s = Shape (x) b = Gather <axis=0> (s, zero) l = Gather (s, one) n = Mul (b, l) u = Unsqueeze (n, ax)"
        " t = Concat <axis=0> (u, eight) y = Reshape (x, t)",
        "int64 zero = {0}, int64 one = {1}, int64[1] ax = {0}, int64[1] eight = {8}",
    ),
    "reshape splits heads": ("y = Reshape (x, t)", "int64[4] t = {0, 0, -1, 4}"),
    "reshape to rows": ("y = Reshape (x, t)", "int64[2] t = {-1, 8}"),
    "expand as torch spells it": (
        "s = Shape (x) b = Slice (s, zero, one) t = Concat <axis=0> (b, minus, four) r = Reshape (t, flat)"
        " q = Shape (r)"
        " o = ConstantOfShape <value = int64[1] {1}> (q) m = Mul (o, neg) e = Equal (r, m) w = Where (e, o, r)"
        " a = Unsqueeze (p, zero) k = Slice (a, zero, one, axis1) y = Expand (k, w)",
        "int64[1] zero = {0}, int64[1] one = {1}, int64[1] minus = {-1}, int64[1] four = {4}, int64[1] flat = {-1},"
        " int64 neg = {-1}, int64[1] axis1 = {1}",
    ),
    "slices": (
        "a = Slice (x, m3, end, ax1) b = Slice (x, two, m1, ax1) c = Slice (x, m1, lo, ax1, back)"
        " d = Slice (x, zero, big, ax2, two) y = Slice (x, big, end, ax1)",
        "int64[1] m3 = {-3}, int64[1] end = {9223372036854775807}, int64[1] ax1 = {1}, int64[1] two = {2},"
        " int64[1] m1 = {-1}, int64[1] lo = {-9223372036854775807}, int64[1] back = {-2}, int64[1] zero = {0},"
        " int64[1] big = {100}, int64[1] ax2 = {-1}",
    ),
    "range": (
        "s = Shape (x) l = Gather (s, one) t = Shape (p) q = Gather (t, zero) e = Add (q, l) r = Range (q, e, one)"
        " r2 = Range (zero, e, two) r3 = Range (e, zero, minus) y = Cast <to=1> (r)",
        "int64 one = {1}, int64 zero = {0}, int64 two = {2}, int64 minus = {-2}",
    ),
    "products": (
        "t = Transpose <perm=[0,2,1]> (x) a = MatMul (x, t) b = MatMul (a, x) y = MatMul (x, w)",
        "float[8,3] w = {1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1}",
    ),
    "reductions": (
        "a = ReduceMean (x, last) b = ReduceMean <keepdims=0> (x, last) c = ReduceSum (x)"
        " d = ArgMax <axis=1, keepdims=0> (x)"
        " e = ReduceMax <noop_with_empty_axes=1> (x) y = Softmax (x)",
        "int64[1] last = {-1}",
    ),
    "split and concat": (
        "a, b = Split <axis=2, num_outputs=2> (x) c, d = Split <axis=2> (x, parts) y = Concat <axis=1> (a, b)",
        "int64[2] parts = {3, 5}",
    ),
    "gather": ("y = Gather (w, i)", "float[3,2] w = {1,2,3,4,5,6}"),
    "indices": (
        "g = GatherElements <axis=1> (i, i) n = NonZero (i) o = OneHot (i, depth, vals) t, u = TopK <axis=2> (x, k)"
        " y = Relu (t)",
        "int64 depth = {7}, float[2] vals = {0,1}, int64[1] k = {2}",
    ),
    "squeeze": (
        "a = Unsqueeze (x, ax) b = Squeeze (a, ax) y = Identity (b)",
        "int64[2] ax = {-1, 0}",
    ),
    "flatten and tile": ("f = Flatten <axis=2> (x) y = Tile (f, r)", "int64[2] r = {2, 3}"),
    "pad": ("y = Pad (x, pads)", "int64[6] pads = {0,1,0,0,2,0}"),
    "einsum": ('e = Einsum <equation="bsk,btk->bst"> (x, x) y = Einsum <equation="...k,...k->..."> (x, x)', ""),
    "logic": ("a = Greater (x, x) b = Not (a) c = And (a, b) d = IsNaN (x) y = Where (c, x, x)", ""),
    "norm": (
        "y, m, v = LayerNormalization <axis=-1> (x, c)",
        "float[8] c = {1,2,3,4,5,6,7,8}",
    ),
    "count by NonZero": (
        "s = Shape (x) l = Slice (s, one, two) o = ConstantOfShape <value = int64[1] {1}> (l) n = NonZero (o)"
        " t = Transpose <perm=[1,0]> (n) q = Squeeze (t, one) y = Cast <to=1> (q)",
        "int64[1] one = {1}, int64[1] two = {2}",
    ),
    "convolution": (
        "t = Transpose <perm=[0,2,1]> (x) a = Conv <kernel_shape=[3], pads=[1,1], strides=[2]> (t, w)"
        " b = MaxPool <kernel_shape=[2], strides=[2], pads=[1,1]> (t) y = GlobalAveragePool (t)",
        "float[2,8,3] w = {" + ",".join(["1"] * 48) + "}",
    ),
}


#: Cases with nodes that ONNX Runtime refuses to run on empty tensors.
NEVER_EMPTY = {"reshape splits heads", "reductions", "convolution", "indices", "slices", "einsum"}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("sizes", [(2, 7, 3), (1, 1, 1), (3, 4, 0), (1, 12, 7), (0, 5, 2)], ids=str)
def test_claims_hold_when_the_model_runs(name: str, sizes: tuple[int, int, int]) -> None:
    if 0 in sizes and name in NEVER_EMPTY:
        pytest.skip("ONNX Runtime does not run this on empty tensors")
    b, s, p = sizes
    engine = infer(CASES[name][0], "float[B,S,8] x, float[P,4] p, int64[B,S] i", CASES[name][1])
    feeds = {
        "x": np.ones((b, s, 8), np.float32),
        "p": np.ones((p, 4), np.float32),
        "i": np.zeros((b, s), np.int64),
    }
    wrong, checked = disagreements(engine.model, feeds)
    assert not wrong
    assert checked > 0


@pytest.mark.parametrize(("s", "p"), [(7, 7), (1, 5), (5, 1), (1, 0), (0, 0)])
def test_two_names_broadcast_to_whichever_is_not_one(s: int, p: int) -> None:
    engine = infer("y = Add (x, p)", "float[B,S,8] x, float[P,8] p")
    feeds = {"x": np.ones((2, s, 8), np.float32), "p": np.ones((p, 8), np.float32)}
    wrong, checked = disagreements(engine.model, feeds)
    assert not wrong
    assert checked == 3


def test_shape_arithmetic_ends_in_names() -> None:
    body, constants = CASES["shape arithmetic"]
    engine = infer(body, "float[B,S,8] x", constants)
    assert value(engine, "y").shape == (B * S, 8)
    assert value(engine, "t").content == (B * S, 8)
    assert value(engine, "b").content == B


@pytest.mark.parametrize(
    ("bounds", "length"), [((0.5, 4.0, 1.0), 4), ((0.0, 1.0, 0.25), 4), ((1.0, 0.0, 1.0), 0), ((3.0, 0.0, -2.0), 2)]
)
def test_a_range_of_fractions_has_a_known_length(bounds: tuple[float, ...], length: int) -> None:
    named = ", ".join(f"float {n} = {{{v}}}" for n, v in zip("abd", bounds, strict=True))
    engine = infer("r = Range (a, b, d) y = Add (r, one)", "float[B,S,8] x", f"{named}, float one = {{1}}")
    assert value(engine, "y").shape == (length,)
    wrong, checked = disagreements(engine.model, {"x": np.ones((2, 3, 8), np.float32)})
    assert not wrong and checked


def test_a_range_whose_length_depends_on_rounding_is_not_claimed() -> None:
    """0.7 / 0.1 is 7 in one precision and a little less or more in another."""
    named = "float a = {0}, float b = {0.7}, float d = {0.1}"
    engine = infer("r = Range (a, b, d) y = Neg (r)", "float[B,S,8] x", named)
    first, last, step = np.float32(0), np.float32(0.7), np.float32(0.1)
    lengths = {int(np.ceil((last - first) / step)), int(np.ceil(float(last) / float(step)))}
    assert (value(engine, "r").shape[0] in (7, 8)) is (len(lengths) == 1)
    wrong, _ = disagreements(engine.model, {"x": np.ones((2, 3, 8), np.float32)})
    assert not wrong


def test_free_size_of_a_reshape_is_solved() -> None:
    engine = infer("y = Reshape (x, t)", "float[B,S,64] x", "int64[4] t = {0, 0, -1, 16}")
    assert value(engine, "y").shape == (B, S, 4, 16)
    engine = infer(
        "s = Shape (x) b = Gather (s, zero) u = Unsqueeze (b, zero1) t = Concat <axis=0> (u, rest) y = Reshape (x, t)",
        "float[B,S,64] x",
        "int64 zero = {0}, int64[1] zero1 = {0}, int64[2] rest = {-1, 64}",
    )
    assert value(engine, "y").shape == (B, S, 64)


def test_expanding_like_torch_is_seen_through() -> None:
    body, constants = CASES["expand as torch spells it"]
    engine = infer(body, "float[B,S,8] x, float[P,4] p", constants)
    assert value(engine, "w").content == (B, 1, 4)
    assert value(engine, "y").shape[0] == B


def test_length_of_a_range_between_two_sizes() -> None:
    body, constants = CASES["range"]
    engine = infer(body, "float[B,S,8] x, float[P,4] p", constants)
    assert value(engine, "r").shape == (S,)


def test_counting_by_nonzero() -> None:
    body, constants = CASES["count by NonZero"]
    engine = infer(body, "float[B,S,8] x", constants)
    assert value(engine, "y").shape == (S,)


def test_equal_unknown_sizes_are_the_same_symbol_only_for_the_same_value() -> None:
    engine = infer(
        "n = NonZero (i) m = NonZero (j) a = Transpose (n) b = Transpose (m) y = Cast <to=1> (a)",
        "int64[B,S] i, int64[B,S] j",
    )
    first, second = value(engine, "n").shape, value(engine, "m").shape
    assert first[1] != second[1]
    assert value(engine, "a").shape == (first[1], 2)


def test_nameless_dimensions_are_not_taken_for_equal() -> None:
    engine = infer("y = Add (x, z)", "float[?,8] x, float[?,8] z")
    x, z = engine.model.graph.inputs
    assert x.shape[0] != z.shape[0]
    assert value(engine, "y").shape[0] not in (x.shape[0], z.shape[0])


def test_an_input_scalar_is_an_unknown_integer() -> None:
    engine = infer("r = Range (zero, n, one) y = Cast <to=1> (r)", "int64 n", "int64 zero = {0}, int64 one = {1}")
    length = value(engine, "r").shape[0]
    assert isinstance(length, Dim)
    assert "max" in str(length)  # n may be negative


def test_a_target_that_may_hold_minus_one_tells_the_rank_only() -> None:
    engine = infer("y = Reshape (x, t)", "float[B,S,8] x, int64[2] t")
    assert len(value(engine, "y").shape) == 2
    assert not set(map(str, value(engine, "y").shape)) & {"B", "S"}


def test_unknown_ops_fall_back_to_what_is_declared() -> None:
    text = (
        '<ir_version: 9, opset_import: ["": 18, "my": 1]>\n'
        "g (float[B,S] x) => (float[B,S] y) <float[Z,5] h> { h = my.Odd (x) y = Relu (x) }"
    )
    engine = shapes.infer(load_text(text))
    found = value(engine, "h")
    assert found.dtype == "float32"
    assert found.shape[1] == 5
    assert str(found.shape[0]) != "Z"  # names of intermediate sizes are not trusted


def test_ops_outside_the_table_go_through_onnx() -> None:
    engine = infer("y = MaxRoiPool <pooled_shape=[2,3]> (x, r)", "float[B,3,S,S] x, float[7,5] r")
    assert value(engine, "y").shape == (7, 3, 2, 3)


def test_registered_types_are_used() -> None:
    shapes.register_types(
        "Widen", "test.domain", lambda inputs, attrs: [(inputs[0][0], (*inputs[0][1][:-1], attrs["n"]))]
    )
    text = (
        '<ir_version: 9, opset_import: ["": 18, "test.domain": 1]>\n'
        "g (float[B,S,8] x) => (float y) { h = test.domain.Widen <n = 5> (x) y = Relu (h) }"
    )
    assert value(shapes.infer(load_text(text)), "y").shape == (B, S, 5)


def test_a_single_node_can_be_inferred_again() -> None:
    engine = infer("a = Relu (x) y = Transpose <perm=[1,0,2]> (a)", "float[B,S,8] x")
    node = engine.model.graph.nodes[1]
    node.attrs["perm"] = [2, 0, 1]
    engine.infer_node(node)
    assert node.outputs[0].shape == (8, B, S)


def test_convolutions_as_the_runtime_lays_them_out_on_a_cpu(tmp_path: Path) -> None:
    """Saved by ONNX Runtime after all of its optimizations: channels in blocks, an activation in the convolution."""
    weight = "float[32,3,4,4] w = {" + ",".join(["0.5"] * (32 * 48)) + "}"
    body = "a = Conv <kernel_shape=[4,4], strides=[2,2], pads=[1,1,1,1]> (x, w) r = Relu (a) y = Neg (r)"
    text = f"{HEADER}g (float[N,3,16,12] x) => (float[N,32,8,6] y) <{weight}> {{ {body} }}"
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "laid-out.onnx")
    options.log_severity_level = 4
    plain = load_text(text).to_proto()
    session = onnxruntime.InferenceSession(plain.SerializeToString(), options, providers=["CPUExecutionProvider"])
    saved = onnx.load(tmp_path / "laid-out.onnx")
    if not any(node.domain == "com.microsoft.nchwc" for node in saved.graph.node):
        pytest.skip("ONNX Runtime does not do so on this processor")
    x = np.ones((2, 3, 16, 12), np.float32)
    engine = shapes.infer(Model(saved))
    before = view.producer(value(engine, "y")).inputs[0]
    assert before.shape == (symbol("N"), 32, 8, 6) and session.run(None, {"x": x})[0].shape == (2, 32, 8, 6)
