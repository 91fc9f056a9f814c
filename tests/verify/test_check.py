"""A verifier passes a faithful rewrite and fails a wrong one, on models of real exporters."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from onnxfuse.errors import InputDataError, VerificationError
from onnxfuse.runtime import archive
from onnxfuse.runtime.session import Runner
from onnxfuse.verify import Verdict, Verifier
from onnxfuse.verify.check import narrowest
from onnxfuse.verify.nudge import nudged

MODELS = Path(__file__).parents[2] / "models"


def load(name: str) -> onnx.ModelProto:
    return onnx.load(MODELS / f"{name}.onnx")


def changed(proto: onnx.ModelProto, change: Callable[[np.ndarray], np.ndarray], rank: int = 2) -> onnx.ModelProto:
    """A copy in which one big weight is another."""
    copy = onnx.ModelProto()
    copy.CopyFrom(proto)
    biggest = max((t for t in copy.graph.initializer if len(t.dims) == rank), key=lambda t: len(t.raw_data))
    array = numpy_helper.to_array(biggest)
    biggest.CopyFrom(numpy_helper.from_array(change(array.astype(np.float32)).astype(array.dtype), biggest.name))
    return copy


@pytest.mark.parametrize(("name", "oracle"), [
    ("llama-dyn20-f32-sdpa-tf5", "float64"), ("qwen2-past-dyn20-f16-eager", "float32"),
    ("vit-dyn18-f32-sdpa", "float64"), ("gpt2-past-dyn18-f32-sdpa", "float64"),
])
def test_the_model_itself_passes_and_a_changed_one_fails(name: str, oracle: str) -> None:
    proto = load(name)
    verifier = Verifier(proto)
    verdict = verifier.check(proto)
    assert verdict.status == "passed" and verdict.oracle == oracle and len(verdict.sets) >= 4
    assert verdict.outputs and all(o["error"] <= o["tolerance"] for o in verdict.outputs)
    wrong = verifier.check(changed(proto, lambda w: w * 1.01))
    assert wrong.status == "failed" and wrong.failing and wrong.problems


def test_bfloat16_is_compared_in_float32() -> None:
    proto = load("llama-ts17-f16-eager")
    for tensor in proto.graph.initializer:
        if tensor.data_type == onnx.TensorProto.FLOAT16:
            array = numpy_helper.to_array(tensor).astype(np.float32)
            tensor.CopyFrom(onnx.helper.make_tensor(
                tensor.name, onnx.TensorProto.BFLOAT16, tensor.dims, array.reshape(-1)))
    for node in proto.graph.node:
        for attribute in node.attribute:
            if attribute.name == "to" and attribute.i == onnx.TensorProto.FLOAT16:
                attribute.i = onnx.TensorProto.BFLOAT16
            elif attribute.type == onnx.AttributeProto.TENSOR and attribute.t.data_type == onnx.TensorProto.FLOAT16:
                array = numpy_helper.to_array(attribute.t).astype(np.float32)
                attribute.t.CopyFrom(onnx.helper.make_tensor(
                    attribute.t.name, onnx.TensorProto.BFLOAT16, attribute.t.dims, array.reshape(-1)))
    del proto.graph.value_info[:]
    for value in proto.graph.output:
        value.type.tensor_type.elem_type = onnx.TensorProto.BFLOAT16
    assert narrowest(proto) == "bfloat16"
    verifier = Verifier(proto)
    verdict = verifier.check(proto)
    assert verdict.status == "structure-only" and verdict.ok
    assert any("float32" in note for note in verdict.notes)
    assert verifier.check(changed(proto, lambda w: w * 1.5)).status == "failed"


ROUNDED_LAST = """<ir_version: 8, opset_import: ["": 17]>
    g (float[n, 16] x, float16[n, 16] narrow) => (float16[n, 16] y, float[n, 16] wide)
    {
      widened = Cast <to = 1> (narrow)
      product = MatMul (x, weight)
      wide = Add (product, widened)
      y = Cast <to = 10> (wide)
    }"""


def rounded_last(factor: float = 1.0) -> onnx.ModelProto:
    """A float32 model with a float16 input and a float16 output."""
    proto = onnx.parser.parse_model(ROUNDED_LAST)
    weight = np.random.default_rng(0).standard_normal((16, 16)).astype(np.float32) * np.float32(factor)
    proto.graph.initializer.append(numpy_helper.from_array(weight, "weight"))
    return proto


def test_an_output_that_is_only_cast_leaves_the_others_exact() -> None:
    proto = rounded_last()
    assert narrowest(proto) == "float32"
    verifier = Verifier(proto)
    verdict = verifier.check(proto)
    assert verdict.status == "passed" and verdict.oracle == "float64"
    tolerance = {o["name"]: o["tolerance"] for o in verdict.outputs}
    assert tolerance["wide"] < 1e-4 and 9e-4 < tolerance["y"] < 4e-3
    wrong = verifier.check(rounded_last(1.0005))
    assert wrong.status == "failed" and all("`wide`" in problem for problem in wrong.problems)
    assert {problem.split("`")[3] for problem in verifier.check(rounded_last(1.05)).problems} == {"wide", "y"}


def test_a_cast_within_the_model_makes_it_half_precision() -> None:
    proto = rounded_last()
    proto.graph.node.append(onnx.helper.make_node("Add", ["y", "y"], ["twice"]))
    proto.graph.output.append(onnx.helper.make_tensor_value_info("twice", onnx.TensorProto.FLOAT16, ["n", 16]))
    assert narrowest(proto) == "float16"


def test_a_left_padding_error_is_seen() -> None:
    """The mask of row 1 is dropped; right padding under a causal mask would not show it."""
    proto = load("llama-dyn20-f32-sdpa-tf5")
    wrong = onnx.ModelProto()
    wrong.CopyFrom(proto)
    ones = onnx.helper.make_node("Mul", ["attention_mask", "zero_"], ["masked_"])
    add = onnx.helper.make_node("Add", ["masked_", "one_"], ["all_ones_"])
    for node in wrong.graph.node:
        for index, name in enumerate(node.input):
            if name == "attention_mask":
                node.input[index] = "all_ones_"
    wrong.graph.node.insert(0, add)
    wrong.graph.node.insert(0, ones)
    wrong.graph.initializer.append(numpy_helper.from_array(np.array(0), "zero_"))
    wrong.graph.initializer.append(numpy_helper.from_array(np.array(1), "one_"))
    verdict = Verifier(proto).check(wrong)
    assert verdict.status == "failed"
    assert "left padding" in verdict.failing


def test_missing_outputs_and_models_that_do_not_load() -> None:
    proto = load("vit-dyn18-f32-sdpa")
    verifier = Verifier(proto, limit=1)
    less = onnx.ModelProto()
    less.CopyFrom(proto)
    del less.graph.output[-1]
    if less.graph.output:
        assert "is missing" in verifier.check(less).problems[0]
    broken = onnx.ModelProto()
    broken.CopyFrom(proto)
    broken.graph.node[0].op_type = "NoSuchOp"
    assert verifier.check(broken).status == "failed"
    assert verifier.check(broken, must_run=False).status == "unverified"


def test_given_inputs(tmp_path: Path) -> None:
    proto = load("llama-dyn20-f32-sdpa-tf5")
    verifier = Verifier(proto, inputs=MODELS / "llama-dyn20-f32-sdpa-tf5.npz")
    assert [s.feeds["input_ids"].shape for s in verifier.sets] == [(2, 7), (3, 12)]
    assert verifier.check(proto).status == "passed"
    bad = tmp_path / "bad.npz"
    archive.save_npz(bad, [{"input_ids": np.full((1, 3), 10**6), "attention_mask": np.ones((1, 3), np.int64)}])
    with pytest.raises(InputDataError, match="refuses the inputs"):
        Verifier(proto, inputs=bad)


def test_an_original_that_does_not_run() -> None:
    proto = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 17, "nowhere": 1]> g (float[n] x) => (float[n] y)
        { y = nowhere.Something (x) }"""
    )
    with pytest.raises(VerificationError, match="original model does not run"):
        Verifier(proto)


def test_random_numbers_cannot_be_verified() -> None:
    proto = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 17]> g (float[n,4] x) => (float[n,4] y)
        { r = RandomNormalLike (x) y = Add (x, r) }"""
    )
    with pytest.raises(VerificationError, match="draws random numbers"):
        Verifier(proto)


def test_weights_of_four_bits_are_held_to_the_graph() -> None:
    """ONNX Runtime makes MatMulNBits of it, with activations of 8 bits unless it is told otherwise."""
    rng = np.random.default_rng(0)
    packed = rng.integers(-8, 8, (64, 32)).tolist()
    weight = onnx.helper.make_tensor("q", onnx.TensorProto.INT4, [64, 32], [v for row in packed for v in row])
    scale = numpy_helper.from_array(np.full((2, 32), 0.1, np.float32), "s")
    nodes = [
        onnx.helper.make_node("DequantizeLinear", ["q", "s"], ["w"], axis=0, block_size=32),
        onnx.helper.make_node("MatMul", ["x", "w"], ["y"]),
    ]
    x = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["n", 64])
    y = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["n", 32])
    graph = onnx.helper.make_graph(nodes, "g", [x], [y], [weight, scale])
    proto = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 21)], ir_version=10)
    assert Verifier(proto).check(proto).status == "passed"


def test_numbers_that_are_never_finite_verify_nothing() -> None:
    """Log of what is below zero: NaN agrees with NaN whatever else is wrong."""
    proto = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 17]> g (float[n,4] x) => (float[n,4] y, float[n,4] z)
        <float one = {1.0}> { a = Abs (x) b = Add (a, one) c = Neg (b) y = Log (c) z = Relu (x) }"""
    )
    verdict = Verifier(proto).check(proto)
    assert verdict.status == "unverified"
    assert verdict.problems == [
        "output `y` of the original is NaN or infinite in every input set, so that no number was compared"
    ]
    assert verdict.failing == []


def test_one_finite_number_is_enough() -> None:
    proto = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 17]> g (float[n,4] x) => (float[n,4] y) { y = Log (x) }"""
    )
    assert Verifier(proto).check(proto).status == "passed"


# Quantized activations ------------------------------------------------------------------------------------------------


def four_bits(accuracy_level: int, scale: float = 1.0) -> onnx.ModelProto:
    """y = x · W for a W of 4 bits; `scale` stands for a mistake."""
    rng = np.random.default_rng(0)
    packed = rng.integers(0, 256, (16, 2, 16), dtype=np.uint8)
    scales = (scale * rng.uniform(0.1, 0.2, (16, 2))).astype(np.float32)
    product = onnx.helper.make_node("MatMulNBits", ["x", "q", "s"], ["y"], domain="com.microsoft", K=64, N=16, bits=4,
                                    block_size=32, accuracy_level=accuracy_level)
    return model_of([product], ["n", 64], ["n", 16], {"q": packed, "s": scales})


def stepping(steps: float = 10.0, weight: float = 0.05) -> onnx.ModelProto:
    """y = x · w, rounded to multiples of 1 / `steps`, with products that lie halfway between two of them."""
    nodes = [
        onnx.helper.make_node("Mul", ["x", "w"], ["p"]),
        onnx.helper.make_node("QuantizeLinear", ["p", "scale", "zero"], ["q"]),
        onnx.helper.make_node("DequantizeLinear", ["q", "scale", "zero"], ["y"]),
    ]
    scale = np.array(1 / steps, np.float32)
    given = {"w": np.full(8, weight, np.float32), "scale": scale, "zero": np.array(0, np.int8)}
    return model_of(nodes, ["n", 8], ["n", 8], given)


def model_of(
    nodes: list[onnx.NodeProto], x: list[str | int], y: list[str | int], given: dict[str, np.ndarray]
) -> onnx.ModelProto:
    graph = onnx.helper.make_graph(
        nodes, "g", [onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, x)],
        [onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, y)],
        [numpy_helper.from_array(value, name) for name, value in given.items()],
    )  # fmt: skip
    opsets = [onnx.helper.make_opsetid("", 17), onnx.helper.make_opsetid("com.microsoft", 1)]
    return onnx.helper.make_model(graph, opset_imports=opsets, ir_version=9)


@pytest.mark.parametrize("level", [0, 1, 4])
def test_products_of_four_bits_are_held_to_float32(level: int) -> None:
    """Whatever rounding they grant a kernel: int8 activations would hide a mistake of one percent."""
    verifier = Verifier(four_bits(level))
    right = verifier.check(nudged(four_bits(level), 0))
    assert right.status == "passed" and all(o["tolerance"] < 1e-4 for o in right.outputs)
    assert any("accuracy_level" in note for note in right.notes) == (level == 4)
    wrong = verifier.check(four_bits(level, scale=1.001))
    assert wrong.status == "failed" and len(wrong.failing) == len(wrong.sets)


def test_what_the_accuracy_level_grants_is_run_too() -> None:
    verifier = Verifier(four_bits(4))
    inputs = verifier.sets[0]
    exact, granted = (Runner(four_bits(4), exact=e).run(inputs.feeds)["y"] for e in (True, False))
    assert np.array_equal(exact, inputs.outputs["y"]) and np.abs(granted - exact).max() > 1e-4
    for scale, expected in ((1.0, []), (1.3, [inputs.name])):
        verdict = Verdict("passed")
        verifier._check_granted(four_bits(4, scale), None, None, verdict)
        assert verdict.failing == expected and all("accuracy_level" in problem for problem in verdict.problems)


def test_products_may_not_round_more_than_the_original_s() -> None:
    for given, made in ((0, 4), (0, 2), (2, 4)):
        verdict = Verifier(four_bits(given)).check(four_bits(made))
        assert verdict.status == "failed" and "accuracy_level" in verdict.problems[0]
    assert Verifier(four_bits(4)).check(four_bits(2)).ok


def test_where_last_bits_move_everything_wrong_is_still_wrong() -> None:
    """A chain of roundings of growing values moves by as much as it is large; all zeros are not right for that."""
    rng = np.random.default_rng(0)
    nodes, given = [], {}
    for i in range(16):
        source = "x" if i == 0 else f"t{i - 1}"
        given[f"w{i}"] = (rng.standard_normal((16, 16)) * 2).astype(np.float32)
        nodes += [onnx.helper.make_node("DynamicQuantizeLinear", [source], [f"q{i}", f"s{i}", f"z{i}"]),
                  onnx.helper.make_node("DequantizeLinear", [f"q{i}", f"s{i}", f"z{i}"], [f"d{i}"]),
                  onnx.helper.make_node("MatMul", [f"d{i}", f"w{i}"], [f"p{i}"]),
                  onnx.helper.make_node("Tanh", [f"p{i}"], ["y" if i == 15 else f"t{i}"])]  # fmt: skip
    model = model_of(nodes, ["n", 16], ["n", 16], given)
    verifier = Verifier(model)
    assert any(verifier._movement(s, "y") > 0.5 for s in verifier.sets)
    zeros = onnx.ModelProto.FromString(model.SerializeToString())
    last = next(t for t in zeros.graph.initializer if t.name == "w15")
    last.CopyFrom(numpy_helper.from_array(np.zeros((16, 16), np.float32), "w15"))
    assert verifier.check(zeros).status == "failed" and verifier.check(model).status == "passed"


def test_a_model_that_does_not_run_with_other_last_bits_has_a_verdict() -> None:
    """Its sizes are computed from a weight."""
    nodes = [onnx.helper.make_node("QuantizeLinear", ["x", "scale", "zero"], ["q"]),
             onnx.helper.make_node("DequantizeLinear", ["q", "scale", "zero"], ["d"]),
             onnx.helper.make_node("Ceil", ["size"], ["up"]), onnx.helper.make_node("Cast", ["up"], ["dims"], to=7),
             onnx.helper.make_node("Reshape", ["d", "dims"], ["r"]), onnx.helper.make_node("Mul", ["r", "w"], ["y"])]
    given = {"scale": np.array(0.1, np.float32), "zero": np.array(0, np.int8), "w": np.array(1.5, np.float32),
             "size": np.array([-1.0, 3.9999998], np.float32)}  # fmt: skip
    verifier = Verifier(model_of(nodes, ["n", 4], ["n", 4], given))
    wrong = model_of(nodes, ["n", 4], ["n", 4], {**given, "w": np.array(2.5, np.float32)})
    assert verifier.check(wrong).status == "failed"


def test_steps_that_the_original_itself_takes_are_allowed(tmp_path: Path) -> None:
    file = tmp_path / "in.npz"
    np.savez(file, x=np.tile(np.arange(17, 33, 2, dtype=np.float32), (3, 1)))
    verifier = Verifier(stepping(), inputs=file)
    other = nudged(stepping(), 99)
    moved = Runner(other).run(verifier.sets[0].feeds)["y"]
    assert np.abs(moved - verifier.sets[0].outputs["y"]).max() == pytest.approx(0.1)  # of 1.5
    right = verifier.check(other)
    assert right.status == "passed" and any("the original itself moves" in note for note in right.notes)
    assert verifier.check(stepping(weight=0.09)).status == "failed"
    np.savez(file, x=np.full((3, 8), 1.2, np.float32))  # between the steps, where last bits do not matter
    verifier = Verifier(stepping(), inputs=file)
    assert verifier.check(stepping()).status == verifier.check(other).status == "passed"
    assert verifier.check(stepping(weight=0.2)).status == "failed"


def test_a_weight_that_is_rounded_again_is_right_where_half_precision_cannot_be_run() -> None:
    """bfloat16, which the CPU runs in float32: the original's own error there says nothing about its exactness."""
    rng = np.random.default_rng(0)
    given = {n: rng.standard_normal((64, 64)).astype(ml_dtypes.bfloat16) for n in ("u", "v", "w")}
    nodes = [onnx.helper.make_node("MatMul", [a, b], [c]) for a, b, c in zip("xhg", "uvw", "hgy", strict=True)]
    model = model_of(nodes, ["n", 64], ["n", 64], given)
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.elem_type = onnx.TensorProto.BFLOAT16
    verifier = Verifier(model)
    assert verifier.structure_only and verifier.check(model).status == "structure-only"
    other = verifier.check(nudged(model, 99))
    assert other.status == "structure-only", other.problems
    wrong = verifier.check(changed(model, lambda w: w * 1.2))
    assert wrong.status == "failed" and len(wrong.failing) == len(wrong.sets)
