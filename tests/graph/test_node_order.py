"""Models whose nodes are not in topological order: ONNX Runtime takes them, and converters to float16 write them."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import onnxfuse
from onnxfuse.errors import ModelError
from onnxfuse.graph import model
from tests.graph.soundness import run

HEAD = '<ir_version: 9, opset_import: ["": 17]> g (float[B,4] x, bool c) => (float[B,4] y)'
TEXT = f"{HEAD} {{ a = Relu (x) b = Neg (a) d = Exp (b) y = Add (d, x) }}"
BRANCH = f"""{HEAD} {{
  a = Relu (x)
  b = Neg (a)
  y = If (c) <then_branch = t () => (float[B,4] p) {{ p = Exp (b) }},
              else_branch = e () => (float[B,4] q) {{ q = Abs (a) }}>
}}"""


def backwards(text: str) -> onnx.ModelProto:
    proto = onnx.parser.parse_model(text)
    nodes = [onnx.NodeProto.FromString(n.SerializeToString()) for n in reversed(proto.graph.node)]
    del proto.graph.node[:]
    proto.graph.node.extend(nodes)
    return proto


def test_nodes_in_any_order() -> None:
    proto = backwards(TEXT)
    with pytest.raises(onnx.checker.ValidationError, match="topologically"):
        onnx.checker.check_model(proto)
    result = onnxfuse.optimize(proto, target="cpu").model
    onnx.checker.check_model(result)
    feeds = {"x": np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32), "c": np.array(True)}
    np.testing.assert_array_equal(run(result, feeds)["y"], run(onnx.parser.parse_model(TEXT), feeds)["y"])


def test_what_a_branch_reads_must_come_before_it() -> None:
    with pytest.raises(ModelError, match="topologically"):
        model.load(backwards(BRANCH))


def test_a_cycle_is_no_model() -> None:
    proto = onnx.parser.parse_model(TEXT)
    proto.graph.node[0].input[0] = "y"
    with pytest.raises(ModelError, match="topologically"):
        model.load(proto)
