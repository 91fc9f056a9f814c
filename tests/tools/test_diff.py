"""diff: names never count, everything else does."""

from __future__ import annotations

import copy

import numpy as np
import onnx
import onnx.parser

from onnxfuse.diff import ModelDiff, diff_models
from onnxfuse.graph.model import load

LAYER = """
    m{i} = MatMul (x{i}, w{i})
    s{i} = Softmax <axis=-1> (m{i})
    e{i} = Erf (s{i})
    x{n} = Add (e{i}, x{i})
"""


def network(layers: int = 3, edit: tuple[str, str] | None = None, seed: int = 0) -> onnx.ModelProto:
    rng = np.random.default_rng(seed)
    body = "".join(LAYER.format(i=i, n=i + 1) for i in range(layers))
    if edit:
        assert edit[0] in body
        body = body.replace(*edit)
    weights = ", ".join(f"float[8,8] w{i}" for i in range(layers))
    text = f"""<ir_version: 8, opset_import: ["" : 17]>
    g (float[n,8] x0) => (float[n,8] x{layers}) <{weights}> {{ {body} }}"""
    model = onnx.parser.parse_model(text)
    del model.graph.value_info[:]
    for i in range(layers):
        model.graph.initializer.append(onnx.numpy_helper.from_array(rng.random((8, 8), np.float32), f"w{i}"))
    return model


def diff(a: onnx.ModelProto, b: onnx.ModelProto) -> ModelDiff:
    return diff_models(load(a), load(b))


def renamed(model: onnx.ModelProto) -> onnx.ModelProto:
    result = copy.deepcopy(model)
    names: dict[str, str] = {}

    def new(name: str) -> str:
        return names.setdefault(name, f"v{len(names)}") if name else ""

    for value in [*result.graph.output, *result.graph.input, *result.graph.initializer]:
        value.name = new(value.name)
    for node in result.graph.node:
        node.name = ""
        node.input[:] = [new(n) for n in node.input]
        node.output[:] = [new(n) for n in node.output]
    return result


def test_names_do_not_count() -> None:
    found = diff(network(), renamed(network()))
    assert found.same and found.unchanged == 12 and not found.ops


def test_a_constant_node_is_an_initializer() -> None:
    model = network()
    tensor = model.graph.initializer.pop(0)
    model.graph.node.insert(0, onnx.helper.make_node("Constant", [], ["w0"], value=tensor))
    assert diff(network(), model).same


def test_a_default_attribute_may_be_spelled() -> None:
    assert diff(network(), network(edit=("Softmax <axis=-1>", "Softmax"))).same


def test_equal_changes_are_folded() -> None:
    edited = network()
    for node in edited.graph.node:
        if node.op_type == "Erf":
            node.op_type = "Tanh"
    found = diff(network(), edited)
    assert [(r.removed, r.added, r.count) for r in found.regions] == [(("Erf",), ("Tanh",), 3)]
    assert found.ops == (("Erf", 3, 0), ("Tanh", 0, 3))
    assert found.unchanged == 9


def test_an_attribute_change_is_named() -> None:
    found = diff(network(), network(edit=("s1 = Softmax <axis=-1>", "s1 = Softmax <axis=0>")))
    (region,) = found.regions
    assert region.count == 1 and region.changes == ("axis: default → 0",) and region.example == "s1"


def test_changed_weights_are_not_a_change_of_structure() -> None:
    found = diff(network(), network(seed=1))
    assert not found.regions and found.weights == (("MatMul", 3),) and not found.same


def test_one_fusion_in_the_middle() -> None:
    edited = network(edit=("s1 = Softmax <axis=-1> (m1)\n    e1 = Erf (s1)", "e1 = LogSoftmax (m1)"))
    (region,) = diff(network(), edited).regions
    assert region.removed == ("Softmax", "Erf") and region.added == ("LogSoftmax",)


def test_interface_and_json() -> None:
    edited = network()
    edited.graph.output.append(copy.deepcopy(edited.graph.output[0]))
    edited.graph.output[1].name = "m1"
    edited.opset_import[0].version = 18
    found = diff(network(), edited)
    assert found.interface == ("opset ai.onnx: 17 → 18", "outputs: 1 → 2")
    assert found.to_json()["same"] is False and found.to_json()["schema"] == 1
