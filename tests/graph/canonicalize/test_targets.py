"""Targets and bounds as constants; neighbouring shape ops as one."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from onnxfuse.graph.ir import Constant
from tests.graph.canonicalize.checking import canonical, ints, only, ops, text
from tests.graph.soundness import run


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
