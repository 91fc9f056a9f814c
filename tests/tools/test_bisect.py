"""A planted error is found in few session runs, and its repro fails alone."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import ModelProto, helper

from onnxfuse.cli import main
from onnxfuse.graph.ir import RULE_KEY
from onnxfuse.ops import functions
from onnxfuse.verify import repro
from onnxfuse.verify.bisect import bisect

LAYERS = 24
PLANTED = 17


def original() -> ModelProto:
    body = "".join(
        f"""
        m{i} = MatMul (x{i}, w{i})
        s{i} = Add (m{i}, b{i})
        a{i} = Relu (s{i})
        x{i + 1} = Add (a{i}, x{i})
        """
        for i in range(LAYERS)
    )
    declared = ", ".join(f"float[16,16] w{i}, float[16] b{i}" for i in range(LAYERS))
    model = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["" : 18]>
        g (float[n,16] x0) => (float[n,16] y) <{declared}> {{ {body} y = Tanh (x{LAYERS}) }}"""
    )
    rng = np.random.default_rng(0)
    del model.graph.value_info[:]
    for i in range(LAYERS):
        for name, shape in ((f"w{i}", (16, 16)), (f"b{i}", (16,))):
            array = (rng.standard_normal(shape) / 12).astype(np.float32)
            model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return model


def fused() -> ModelProto:
    """Every layer as one Linear, which runs anywhere by its function body."""
    model = copy.deepcopy(original())
    del model.graph.node[:]
    for i in range(LAYERS):
        node = helper.make_node(
            "Linear", [f"x{i}", f"w{i}", f"b{i}", f"x{i}"], [f"x{i + 1}"], domain="onnxfuse", layout="KN",
            activation="relu",
        )  # fmt: skip
        node.metadata_props.add(key=RULE_KEY, value="linear-residual")
        model.graph.node.append(node)
    model.graph.node.append(helper.make_node("Tanh", [f"x{LAYERS}"], ["y"]))
    model.opset_import.append(helper.make_opsetid("onnxfuse", 1))
    return model


def runnable(model: ModelProto) -> ModelProto:
    x = functions.TensorType("float32", (None, 16))
    return functions.attach_functions(model, {f"x{i}": x for i in range(LAYERS + 1)})


def with_bad_kernel(layer: int) -> ModelProto:
    """The Linear of one layer computes its activation as if it were twice as steep."""
    model = runnable(fused())
    node = model.graph.node[layer]
    bad = copy.deepcopy(next(f for f in model.functions if f.overload == node.overload))
    bad.overload = node.overload = "planted"
    last = next(n for n in bad.node if n.op_type == "Relu")
    result, last.output[0] = last.output[0], "steep"
    index = list(bad.node).index(last)
    bad.node.insert(index + 1, helper.make_node("Mul", ["steep", "two"], [result]))
    two = onnx.numpy_helper.from_array(np.array(2, np.float32), "two")
    bad.node.insert(0, helper.make_node("Constant", [], ["two"], value=two))
    model.functions.append(bad)
    return model


@pytest.fixture(autouse=True)
def no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """The custom-op library's kernels would be preferred to function bodies, and so to the planted error."""
    monkeypatch.setattr("onnxfuse.runtime.session.uses_domain", lambda proto, domain="": False)


@pytest.fixture
def feeds() -> dict[str, np.ndarray]:
    return {"x0": np.random.default_rng(3).standard_normal((5, 16)).astype(np.float32)}


def test_a_right_model_has_no_divergence(feeds: dict) -> None:
    assert bisect(original(), runnable(fused()), feeds, dtype="float32") is None


@pytest.mark.parametrize("probes", [256, 4])
def test_a_planted_kernel_error(feeds: dict, tmp_path: Path, probes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onnxfuse.verify.bisect.PROBES_PER_ROUND", probes)
    model = with_bad_kernel(PLANTED)
    found = bisect(original(), model, feeds, dtype="float32")
    assert found is not None
    assert (found.value, found.op, found.rule) == (f"x{PLANTED + 1}", "onnxfuse::Linear", "linear-residual")
    assert found.cause == "kernel"
    assert found.runs <= (7 if probes == 256 else 14)
    folder = repro.write(model, found, tmp_path / "repro")
    alone = onnx.load(folder / "model.onnx")
    assert [n.op_type for n in alone.graph.node] == ["Linear"]
    onnx.checker.check_model(alone)
    assert repro.fails(folder, "float32")


def test_a_repro_of_a_right_kernel_does_not_fail(feeds: dict, tmp_path: Path) -> None:
    bad = with_bad_kernel(PLANTED)
    found = bisect(original(), bad, feeds, dtype="float32")
    assert found is not None and found.node is not None
    good = runnable(fused())
    found.node = good.graph.node[PLANTED]
    assert not repro.fails(repro.write(good, found, tmp_path), "float32")


def test_a_wrong_rewrite_is_told_from_a_wrong_kernel(feeds: dict) -> None:
    model = fused()
    weight = next(t for t in model.graph.initializer if t.name == "w5")
    array = onnx.numpy_helper.to_array(weight).T.copy()  # as if the rule had the layout wrong
    weight.CopyFrom(onnx.numpy_helper.from_array(array, "w5"))
    found = bisect(original(), runnable(model), feeds, dtype="float32")
    assert found is not None and found.value == "x6" and found.cause == "rewrite"
    np.testing.assert_allclose(found.expected["x6"].shape, found.found["x6"].shape)


def test_in_half_precision(feeds: dict) -> None:
    def half(model: ModelProto) -> ModelProto:
        for tensor in model.graph.initializer:
            array = onnx.numpy_helper.to_array(tensor).astype(np.float16)
            tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))
        for value in [*model.graph.input, *model.graph.output]:
            value.type.tensor_type.elem_type = onnx.TensorProto.FLOAT16
        return model

    types = {f"x{i}": functions.TensorType("float16", (None, 16)) for i in range(LAYERS + 1)}
    model = half(fused())
    right = functions.attach_functions(model, types)
    values = {"x0": feeds["x0"].astype(np.float16)}
    assert bisect(half(original()), right, values, dtype="float16") is None
    next(a for a in model.graph.node[9].attribute if a.name == "activation").s = b"silu"
    found = bisect(half(original()), functions.attach_functions(model, types), values, dtype="float16")
    assert found is not None and found.value == "x10" and found.cause == "rewrite" and found.runs <= 7


def test_the_command(feeds: dict, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base, wrong, inputs, folder = (tmp_path / n for n in ("base.onnx", "fused.onnx", "in.npz", "repro"))
    onnx.save(original(), base)
    onnx.save(with_bad_kernel(PLANTED), wrong)
    np.savez(inputs, **feeds)
    arguments = ["verify", str(base), str(wrong), "--inputs", str(inputs), "--bisect", "--repro", str(folder), "--json"]
    with pytest.raises(SystemExit) as stop:
        main.main(arguments)
    found = json.loads(capsys.readouterr().out)
    assert stop.value.code == 1 and found["status"] == "failed"
    place = found["divergence"]
    assert (place["value"], place["rule"], place["cause"]) == (f"x{PLANTED + 1}", "linear-residual", "kernel")
    assert place["runs"] <= 7 and repro.fails(folder, "float32")
