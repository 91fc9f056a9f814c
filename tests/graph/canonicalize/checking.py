"""Canonicalize a model given as text, and check on the way that its results and interface stay."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx

from onnxfuse.graph import consts
from onnxfuse.graph.canonicalize import canonicalize
from onnxfuse.graph.ir import Node
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


def weights(rows: int, columns: int, kind: str = "float") -> str:
    return f"{kind}[{rows},{columns}] w = {{" + ",".join(str(i % 7) for i in range(rows * columns)) + "}"
