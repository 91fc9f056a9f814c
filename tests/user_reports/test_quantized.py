"""Quantized weights and activations: they survive, nothing is fused across them, and shared ones stay shared."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from tests.user_reports.cases import RMS, Case, check_same, feeds, fused, ops, run

NUMBERS = "float scale = {0.1}, int8 zero = {0}, uint8 uzero = {128}, float r2 = {1.4142135}, float ws = {0.02}"
X = "float[B,S,32] x"
NORM = RMS + "n = Div (x, r) m = Mul (n, gamma)"


def weight(name: str, shape: tuple[int, ...], dtype: type = np.int8, seed: int = 0) -> onnx.TensorProto:
    info = np.iinfo(dtype)
    values = np.random.default_rng(seed).integers(info.min + 1, info.max, shape).astype(dtype)
    return numpy_helper.from_array(values, name)


def built(case: Case, *tensors: onnx.TensorProto) -> onnx.ModelProto:
    """The case's model with these tensors in place of the (random) initializers of the same name."""
    model = case.model()
    for tensor in tensors:
        for old in [t for t in model.graph.initializer if t.name == tensor.name]:
            model.graph.initializer.remove(old)
        model.graph.initializer.append(tensor)
    return model


def bits4(name: str, rows: int, columns: int, seed: int, block: int = 32) -> list[onnx.TensorProto]:
    """The packed weight of a MatMulNBits (`name`) and its scales (`name`_s), of `columns` x `rows`."""
    rng = np.random.default_rng(seed)
    packed = rng.integers(0, 256, (columns, rows // block, block // 2)).astype(np.uint8)
    scales = rng.uniform(0.01, 0.03, columns * (rows // block)).astype(np.float32)
    return [numpy_helper.from_array(packed, name), numpy_helper.from_array(scales, f"{name}_s")]


def check(case: Case, model: onnx.ModelProto, **kept: int) -> onnx.ModelProto:
    """These ops are written exactly as often, the blocks are found, the file has not grown, the result is right."""
    result = fused(model)
    assert {k: result.report["blocks"].get(k, 0) for k in case.blocks} == case.blocks
    written = ops(result.model)
    assert {op: written.count(op) for op in kept} == kept
    assert result.model.ByteSize() <= 1.05 * model.ByteSize() + 512
    check_same(case, model, result.model)
    return result.model


@pytest.mark.parametrize("between", ["the-bias-and-the-gelu", "the-product-and-the-bias"])
def test_quantize_inside_a_pattern_is_respected(between: str) -> None:
    """A quantize/dequantize pair inside a pattern is part of the numerics: nothing is fused across it."""
    pair = "q = QuantizeLinear ({0}, scale, zero) {1} = DequantizeLinear (q, scale, zero)"
    first = "h = MatMul (x, w) a = Add (h, b)" + pair.format("a", "u")
    if between == "the-product-and-the-bias":
        first = "h = MatMul (x, w)" + pair.format("h", "a") + "u = Add (a, b)"
    case = Case("qdq", X, "float[B,S,16] y",
                f"{first} s = Div (u, r2) e = Erf (s) c = Add (e, one) p = Mul (u, c) y = Mul (p, half)",
                f"float[32,16] w, float[16] b, {NUMBERS}",
                blocks={"act_gelu_erf": 1, "matmul_bias_act_gelu_erf": 0})  # fmt: skip
    check(case, case.model(), QuantizeLinear=1, DequantizeLinear=1)


def test_dequantize_softmax_quantize() -> None:
    """No attention or softmax op of another kind is put between dequantize and quantize."""
    case = Case("softmax", "uint8[B,S,32] x", "uint8[B,S,32] y",
                "d = DequantizeLinear (x, scale, uzero) s = Softmax <axis=-1> (d) y = QuantizeLinear (s, scale, uzero)",
                NUMBERS)  # fmt: skip
    check(case, case.model(), DequantizeLinear=1, Softmax=1, QuantizeLinear=1)


@pytest.mark.parametrize("form", ["int8", "per-channel", "through-a-transpose"])
def test_a_dequantized_weight_stays_quantized(form: str) -> None:
    """The weight is not folded to float: DequantizeLinear stays, and so does the file's size."""
    shape = (256, 32) if form == "through-a-transpose" else (32, 256)
    scale = "ws" if form != "per-channel" else "wsc"
    read = f"f = DequantizeLinear {'<axis=1>' if form == 'per-channel' else ''} (w, {scale})"
    if form == "through-a-transpose":
        read += "t = Transpose <perm=[1,0]> (f)"
    product = "t" if form == "through-a-transpose" else "f"
    case = Case("dq", X, "float[B,S,256] y", f"{NORM} {read} h = MatMul (m, {product}) y = Add (h, b)",
                f"float[32] gamma, float[256] b, int8[{shape[0]},{shape[1]}] w, float[256] wsc, {NUMBERS}",
                blocks={"rmsnorm": 1})  # fmt: skip
    model = built(case, weight("w", shape),
                  numpy_helper.from_array(np.linspace(0.01, 0.03, 256).astype(np.float32), "wsc"))  # fmt: skip
    after = check(case, model, DequantizeLinear=1, MatMul=1)
    assert any(t.name == "w" and t.data_type == TensorProto.INT8 for t in after.graph.initializer)


@pytest.mark.parametrize("shared", ["weight-and-scale", "dequantized-value", "gather-and-product"])
def test_two_readers_of_one_quantized_weight(shared: str) -> None:
    """Tied embeddings: two DequantizeLinear read one weight and scale, or one value has two readers."""
    dq = "DequantizeLinear (w, ws)"
    body = {
        "weight-and-scale": f"{NORM} f = {dq} y = MatMul (m, f) f2 = {dq} z = MatMul (x, f2)",
        "dequantized-value": f"{NORM} f = {dq} y = MatMul (m, f) z = MatMul (x, f)",
        "gather-and-product": f"i = Cast <to=7> (x) j = Clip (i, low, high) f = {dq} t = Transpose <perm=[1,0]> (f)"
        f"e = Gather (t, j) k = ReduceMean <axes=[2], keepdims=0> (e) f2 = {dq} y = MatMul (k, f2)"
        "z = MatMul (x, f2)",
    }[shared]
    weights = f"float[32] gamma, int8[32,256] w, int64 low = {{0}}, int64 high = {{31}}, {NUMBERS}"
    case = Case(shared, X, "float[B,S,256] y, float[B,S,256] z", body, weights)
    model = built(case, weight("w", (32, 256)))
    result = fused(model)
    assert sum(t.data_type == TensorProto.INT8 for t in result.model.graph.initializer) == 1
    assert "DequantizeLinear" in ops(result.model) and result.model.ByteSize() <= 1.05 * model.ByteSize() + 512
    check_same(case, model, result.model)


def test_four_bit_weights_that_two_products_share() -> None:
    """One int4 weight and scale, dequantized twice (blockwise, opset 21)."""
    tensor = helper.make_tensor("w", TensorProto.INT4, (64, 32), [int(v) for v in np.arange(64 * 32) % 15 - 7])
    scales = numpy_helper.from_array(np.full((2, 32), 0.05, np.float32), "s")
    nodes = [
        *(helper.make_node("DequantizeLinear", ["w", "s"], [f"f{i}"], axis=0, block_size=32) for i in (1, 2)),
        helper.make_node("MatMul", ["x", "f1"], ["y"]),
        helper.make_node("Neg", ["x"], ["n"]),
        helper.make_node("MatMul", ["n", "f2"], ["z"]),
    ]
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes, "tied", [value("x", 1, ["B", "S", 64])], [value("y", 1, ["B", "S", 32]), value("z", 1, ["B", "S", 32])],
        [tensor, scales],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    after = fused(model).model
    assert sum(t.data_type == TensorProto.INT4 for t in after.graph.initializer) == 1
    check_same(Case("tied", "", "", ""), model, after)


def test_matmul_nbits_and_its_surroundings() -> None:
    """The product stays; the norm before it and the activation behind it become one op each."""
    product = "com.microsoft.MatMulNBits <K=32, N=64, bits=4, block_size=32>"
    case = Case("nbits", X, "float[B,S,64] y",
                f"{NORM} g = {product} (m, w, w_s) u = {product} (m, v, v_s) s = Sigmoid (g) a = Mul (g, s)"
                "y = Mul (a, u)",
                f"float[32] gamma, uint8[64,1,16] w, float[64] w_s, uint8[64,1,16] v, float[64] v_s, {NUMBERS}",
                blocks={"rmsnorm": 1, "act_silu": 1, "matmul": 2})  # fmt: skip
    check(case, built(case, *bits4("w", 32, 64, 1), *bits4("v", 32, 64, 2)), MatMulNBits=2)


def test_dynamically_quantized_products() -> None:
    """DynamicQuantizeLinear, MatMulInteger, Cast, Mul and a bias, twice over one quantized input."""
    tail = ("i{0} = MatMulInteger (q, w{0}, z, wz) c{0} = Cast <to=1> (i{0})"
            "sc{0} = Mul (qs, ws) {1} = Mul (c{0}, sc{0})")  # fmt: skip
    case = Case("dynamic", X, "float[B,S,64] y, float[B,S,64] u",
                f"{NORM} q, qs, z = DynamicQuantizeLinear (m)" + tail.format(1, "h") + tail.format(2, "u")
                + "a = Add (h, b) s = Div (a, r2) e = Erf (s) c = Add (e, one) p = Mul (a, c) y = Mul (p, half)",
                f"float[32] gamma, int8[32,64] w1, int8[32,64] w2, int8 wz = {{0}}, float[64] b, {NUMBERS}",
                blocks={"rmsnorm": 1, "act_gelu_erf": 1})  # fmt: skip
    model = built(case, weight("w1", (32, 64)), weight("w2", (32, 64), seed=1))
    case = replace(case, scale=1.0)
    result = fused(model)
    written = ops(result.model)
    assert written.count("MatMulInteger") == 2 and written.count("DynamicQuantizeLinear") == 1
    # A rounding of the norm in its last bit may move one element of 256 steps by one.
    inputs = feeds(model, case.dims)
    for before, after in zip(run(model, inputs), run(result.model, inputs), strict=True):
        assert np.abs(before - after).max() <= 2e-2 * np.abs(before).max()


@pytest.mark.parametrize("op", ["DynamicQuantizeMatMul", "MatMulIntegerToFloat"])
def test_the_runtime_s_own_quantized_products(op: str) -> None:
    call = {"DynamicQuantizeMatMul": "com.microsoft.DynamicQuantizeMatMul (m, w, ws, wz, b)",
            "MatMulIntegerToFloat": "com.microsoft.MatMulIntegerToFloat (q, w, qs, ws, z, wz, b)"}[op]  # fmt: skip
    before = "q, qs, z = DynamicQuantizeLinear (m)" if op == "MatMulIntegerToFloat" else ""
    case = Case(op, X, "float[B,S,64] y", f"{NORM} {before} h = {call} y = Relu (h)",
                f"float[32] gamma, int8[32,64] w, int8 wz = {{0}}, float[64] b, {NUMBERS}",
                blocks={"rmsnorm": 1})  # fmt: skip
    model = built(case, weight("w", (32, 64)))
    result = fused(model)
    assert ops(result.model).count(op) == 1 and result.report["blocks"]["rmsnorm"] == 1
    inputs = feeds(model, case.dims)
    (wanted,), (found,) = run(model, inputs), run(result.model, inputs)
    assert np.abs(wanted - found).max() <= 2e-2 * np.abs(wanted).max()


def test_dequantize_then_cast_then_product() -> None:
    """A weight dequantized to float16 and cast to float32 before the product."""
    case = Case("dq-cast", X, "float[B,S,64] y", "f = DequantizeLinear (w, hs) c = Cast <to=1> (f) y = MatMul (x, c)",
                f"int8[32,64] w, float16 hs = {{8192}}, {NUMBERS}", opset=21)  # fmt: skip
    model = built(case, weight("w", (32, 64)))
    check(case, model, DequantizeLinear=1, MatMul=1)
