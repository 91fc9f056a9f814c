"""Named parameters, whether attribute or input, over opsets."""

from __future__ import annotations

import numpy as np
import pytest

from onnxfuse.graph import params
from onnxfuse.graph.ir import Constant, Node, Variable
from onnxfuse.graph.params import MISSING


def node(op: str, *inputs: object, domain: str = "", **attrs: object) -> Node:
    """A node; arrays become constants, None an omitted input, a string a computed one."""
    values = [
        Variable("") if i is None else Variable(i) if isinstance(i, str) else Constant(f"c{n}", np.asarray(i))
        for n, i in enumerate(inputs)
    ]
    return Node(op, domain=domain, attrs=attrs, inputs=values, outputs=[Variable("y")])


ONE = np.array([1])
LAST = np.array([-1])


@pytest.mark.parametrize(
    ("made", "name", "opset", "expected"),
    [
        # The same parameter, as attribute and as input.
        (node("ReduceMean", "x", axes=[-1]), "axes", 17, [-1]),
        (node("ReduceMean", "x", LAST), "axes", 18, [-1]),
        (node("ReduceSum", "x", axes=[0, 1]), "axes", 11, [0, 1]),
        (node("ReduceSum", "x", np.array([0, 1])), "axes", 13, [0, 1]),
        (node("Unsqueeze", "x", axes=[2]), "axes", 12, [2]),
        (node("Unsqueeze", "x", np.array([2])), "axes", 13, [2]),
        (node("Split", "x", split=[3, 5]), "split", 12, [3, 5]),
        (node("Split", "x", np.array([3, 5])), "split", 13, [3, 5]),
        (node("Slice", "x", starts=[0], ends=[5]), "ends", 9, [5]),
        (node("Slice", "x", np.array([0]), np.array([5])), "ends", 13, [5]),
        (node("Clip", "x", min=0.0, max=6.0), "max", 6, 6.0),
        (node("Clip", "x", np.float32(0), np.float32(6)), "max", 13, 6.0),
        (node("Dropout", "x", ratio=0.1), "ratio", 7, pytest.approx(0.1)),
        (node("Dropout", "x", np.float32(0.25)), "ratio", 13, 0.25),
        (node("TopK", "x", k=3), "k", 1, 3),
        (node("TopK", "x", np.array([3])), "k", 11, [3]),
        # Defaults of the schema.
        (node("Softmax", "x"), "axis", 13, -1),
        (node("Softmax", "x"), "axis", 11, 1),
        (node("Gelu", "x"), "approximate", 20, "none"),
        (node("Gelu", "x", approximate=b"tanh"), "approximate", 20, "tanh"),
        (node("ReduceMean", "x"), "keepdims", 17, 1),
        (node("Gemm", "x", "w"), "alpha", 13, 1.0),
        (node("LayerNormalization", "x", "s"), "epsilon", 17, pytest.approx(1e-5)),
        (node("Trilu", "x"), "k", 14, 0),
        (node("Dropout", "x"), "ratio", 13, 0.5),
        (node("Dropout", "x", None, None), "training_mode", 13, False),
        # Left out: None.
        (node("Slice", "x", np.array([0]), np.array([5])), "axes", 13, None),
        (node("Clip", "x", None, np.float32(6)), "min", 13, None),
        (node("Transpose", "x"), "perm", 13, None),
        (node("ReduceMean", "x"), "axes", 13, None),
        # Nothing that could be told.
        (node("ReduceMean", "x", "a"), "axes", 18, MISSING),
        (node("Reshape", "x", "t"), "shape", 13, MISSING),
        (node("Relu", "x"), "alpha", 13, MISSING),
        (node("Mystery", "x", domain="my", factor=2), "factor", 1, 2),
        (node("Mystery", "x", domain="my"), "other", 1, MISSING),
        (node("Softmax", "x"), "axes", 13, MISSING),
        (node("Add", "x", np.zeros(5000)), "B", 13, MISSING),
    ],
    ids=lambda p: p.op if isinstance(p, Node) else str(p),
)
def test_parameters(made: Node, name: str, opset: int, expected: object) -> None:
    found = params.get(made, name, opset)
    if expected is MISSING or expected is None:
        assert found is expected
    else:
        assert found == expected
        assert type(found) is type(expected) or not isinstance(expected, (bool, str))


def test_missing_is_false_and_no_value() -> None:
    assert not MISSING
    assert repr(MISSING) == "MISSING"


@pytest.mark.parametrize(
    ("made", "opset", "expected"),
    [
        (node("ReduceMean", "x", np.array([-1])), 18, (2,)),
        (node("ReduceMean", "x", axes=[1, -1]), 13, (1, 2)),
        (node("Squeeze", "x", np.array(0)), 13, (0,)),
        (node("ReduceMean", "x"), 18, None),
        (node("ReduceMean", "x", "a"), 18, MISSING),
    ],
)
def test_axes_are_counted_from_the_front(made: Node, opset: int, expected: object) -> None:
    assert params.axes(made, opset, rank=3) == expected
