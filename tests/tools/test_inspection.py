"""Inspection: sizes against ONNX Runtime's own, costs and memory against numbers worked out by hand."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest

from onnxfuse.errors import InputDataError
from onnxfuse.inspection import inspect_model
from onnxfuse.inspection.costs import of_standard_op
from onnxfuse.inspection.sizes import bind, infer, inlined
from onnxfuse.ops.opdef import TensorType

MLP = """
<ir_version: 8, opset_import: ["" : 17]>
mlp (float[batch,seq,64] x) => (float[batch,seq,64] y)
<float[64,256] w1, float[256] b1, float[256,64] w2>
{
  a = MatMul (x, w1)
  b = Add (a, b1)
  c = Relu (b)
  y = MatMul (c, w2)
}
"""


def parse(text: str) -> onnx.ModelProto:
    """A model whose typed names without data become zero weights."""
    model = onnx.parser.parse_model(text)
    for info in list(model.graph.value_info):
        dims = [d.dim_value for d in info.type.tensor_type.shape.dim]
        dtype = onnx.helper.tensor_dtype_to_np_dtype(info.type.tensor_type.elem_type)
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.zeros(dims, dtype), info.name))
    del model.graph.value_info[:]
    return model


def test_costs_of_a_small_network() -> None:
    found = inspect_model(parse(MLP), dims={"batch": 2, "seq": 8})
    rows = {r.op: r for r in found.ops}
    assert rows["MatMul"].flops == 2 * (2 * 16 * 64 * 256)
    assert rows["Add"].flops == rows["Relu"].flops == 16 * 256
    assert rows["Relu"].bytes == 2 * 16 * 256 * 4
    assert rows["MatMul"].bytes == 4 * 2 * (16 * 64 + 64 * 256 + 16 * 256)
    assert found.parameters.count == 64 * 256 + 256 + 256 * 64
    assert found.parameters.bytes == 4 * found.parameters.count
    # While Add (then Relu) runs, its operand and its result live together.
    assert found.peak.bytes == 2 * 16 * 256 * 4
    assert found.input_bytes == found.output_bytes == 16 * 64 * 4
    assert json.loads(json.dumps(found.to_json()))["schema"] == 1


def test_a_view_shares_its_source() -> None:
    text = MLP.replace("c = Relu (b)", "s = Shape (b)\n  r = Reshape (b, s)\n  c = Relu (r)")
    plain, viewed = inspect_model(parse(MLP)), inspect_model(parse(text))
    assert viewed.peak.bytes == plain.peak.bytes


def test_fused_ops_have_a_cost() -> None:
    text = """
    <ir_version: 8, opset_import: ["" : 17, "onnxfuse" : 1]>
    g (float[batch,seq,64] x) => (float[batch,seq,256] y) <float[256,64] w, float[256] b>
    { y = onnxfuse.Linear <activation="relu", norm="rms"> (x, w, b) }
    """
    found = inspect_model(parse(text), dims={"batch": 1, "seq": 4})
    row = found.ops[0]
    assert row.op == "onnxfuse::Linear" and row.unknown == 0
    assert 2 * 4 * 64 * 256 < row.flops < 2.1 * 4 * 64 * 256
    assert row.bytes == 4 * (4 * 64 + 256 * 64 + 256 + 4 * 256)


def test_shape_arithmetic_is_followed() -> None:
    text = """
    <ir_version: 8, opset_import: ["" : 17]>
    g (float[batch,seq,64] x) => (float[batch,heads,seq,16] y)
    <int64 zero = {0}, int64 one = {1}, int64[1] axis = {0}, int64[2] tail = {4, 16}>
    {
      s = Shape (x)
      b = Gather <axis=0> (s, zero)
      n = Gather <axis=0> (s, one)
      b1 = Unsqueeze (b, axis)
      n1 = Unsqueeze (n, axis)
      to = Concat <axis=0> (b1, n1, tail)
      r = Reshape (x, to)
      y = Transpose <perm=[0,2,1,3]> (r)
    }
    """
    model = onnx.parser.parse_model(text)
    sizes = infer(model, bind(model, {}, {"batch": 3, "seq": 5}))
    assert sizes.types["y"].shape == (3, 4, 5, 16)


def test_a_branch_that_sizes_rule_out_costs_nothing() -> None:
    text = """
    <ir_version: 8, opset_import: ["" : 17]>
    g (float[n] x) => (float[n] y) <int64[1] one = {1}>
    {
      s = Shape (x)
      is_one = Equal (s, one)
      y = If (is_one) <
        then_branch = t () => (float[n] a) { a = Exp (x) },
        else_branch = e () => (float[n] b) { b = Neg (x) }
      >
    }
    """
    ops = {r.op for r in inspect_model(onnx.parser.parse_model(text), dims={"n": 7}).ops}
    assert "Neg" in ops and "Exp" not in ops


@pytest.mark.parametrize(
    ("shapes", "dims", "message"),
    [
        ({"z": [1]}, {}, "no input `z`"),
        ({"x": [1, 2]}, {}, "rank 3"),
        ({"x": [1, 2, 65]}, {}, "fixed to 64"),
        ({}, {"bach": 2}, "no dim `bach`"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(shapes: dict, dims: dict, message: str) -> None:
    with pytest.raises(InputDataError, match=message):
        inspect_model(parse(MLP), shapes=shapes, dims=dims)


@pytest.mark.parametrize(
    ("op", "domain", "inputs", "outputs", "attrs", "flops"),
    [
        ("Gemm", "", [(4, 8), (16, 8), (16,)], [(4, 16)], {"transB": 1}, 2 * 4 * 8 * 16 + 64),
        ("Conv", "", [(1, 3, 8, 8), (5, 3, 3, 3), (5,)], [(1, 5, 6, 6)], {}, 2 * 180 * 27 + 180),
        ("Attention", "", [(2, 4, 6, 8), (2, 4, 9, 8), (2, 4, 9, 8)], [(2, 4, 6, 8)], {}, 2 * 4 * 6 * 9 * 37),
        ("MatMulNBits", "com.microsoft", [(1, 3, 32), (16, 1, 16), (16,)], [(1, 3, 16)], {"K": 32}, 2 * 48 * 32),
        ("LSTM", "", [(7, 1, 16), (1, 32, 16), (1, 32, 8)], [(7, 1, 1, 8)], {"hidden_size": 8}, 2 * 7 * 32 * 24),
        ("Transpose", "", [(4, 8)], [(8, 4)], {}, 0),
    ],
)
def test_flops(op: str, domain: str, inputs: list, outputs: list, attrs: dict, flops: int) -> None:
    cost = of_standard_op(
        op, domain, [TensorType("float32", s) for s in inputs], [TensorType("float32", s) for s in outputs], attrs
    )
    assert cost is not None and cost.flops == flops


def test_an_unknown_size_is_said() -> None:
    text = """
    <ir_version: 8, opset_import: ["" : 17]>
    g (float[n] x) => (int64[1,m] y) { y = NonZero (x) }
    """
    found = inspect_model(onnx.parser.parse_model(text))
    assert found.ops[0].unknown == 1 and found.peak.unknown == 1
    assert found.to_json()["unknown_sizes"] == 1


def _corpus() -> list[Path]:
    folder = os.environ.get("ONNXFUSE_CORPUS")
    return sorted(Path(folder).glob("*.onnx")) if folder else []


@pytest.mark.skipif(not _corpus(), reason="ONNXFUSE_CORPUS names no folder of models")
def test_all_sizes_of_the_corpus_are_known() -> None:
    for path in _corpus():
        model = inlined(onnx.load(path))
        sizes = infer(model, bind(model, {}, {}))
        unknown = [
            name for node in model.graph.node for name in node.output
            if name and (sizes.types[name].shape is None or None in sizes.types[name].shape)
        ]  # fmt: skip
        assert not unknown, f"{path.name}: {unknown[:3]}"


@pytest.mark.parametrize(("rows", "columns", "present"), [(512, 9, 512), (8, 9, 9), (0, 1, 1)])
def test_a_cache_in_place_keeps_its_size(rows: int, columns: int, present: int) -> None:
    """Keys and values of GroupQueryAttention lie in the buffer that is given, or in one that holds all tokens."""
    model = parse("""
<ir_version: 8, opset_import: ["" : 17, "com.microsoft" : 1]>
g (float[batch,1,16] q, float[batch,1,8] k, float[batch,1,8] v, float[batch,1,rows,8] past, int64[batch,total] mask,
   int32[batch] last) => (float[batch,1,16] y, float[batch,1,n,8] pk, float[batch,1,n,8] pv)
{
  shape = Shape <start = 1, end = 2> (mask)
  columns = Cast <to = 6> (shape)
  y, pk, pv = com.microsoft.GroupQueryAttention <num_heads = 2, kv_num_heads = 1> (q, k, v, past, past, last, columns)
}
""")
    types = infer(model, bind(model, {}, {"batch": 2, "rows": rows, "total": columns})).types
    assert types["pk"].shape == types["pv"].shape == (2, 1, present, 8)
