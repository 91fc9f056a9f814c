"""Decoders whose input names tell nothing: what is a cache, and what counts its tokens, is read from the graph."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from onnxfuse.runtime import caches, feeds
from onnxfuse.verify import Verifier


def decoder(*, axis: int = 2, total: str = "K", through_identity: bool = False, head: float = 1.0) -> onnx.ModelProto:
    """Attention with a cache `k0`; keys that `am` does not choose are hidden with -inf."""
    made = "grown" if through_identity else "k1"
    nodes = [
        helper.make_node("Gather", ["table", "ids"], ["x3"]),
        helper.make_node("Unsqueeze", ["x3", "one"], ["x"]),
        helper.make_node("Concat", ["k0", "x"], [made], axis=axis),
        helper.make_node("Transpose", [made], ["kt"], perm=[0, 1, 3, 2]),
        helper.make_node("MatMul", ["x", "kt"], ["s"]),
        helper.make_node("Unsqueeze", ["am", "one_two"], ["m4"]),
        helper.make_node("Equal", ["m4", "one_number"], ["seen"]),
        helper.make_node("Where", ["seen", "s", "lowest"], ["hidden"]),
        helper.make_node("Softmax", ["hidden"], ["p"], axis=-1),
        helper.make_node("MatMul", ["p", made], ["a"]),
        helper.make_node("Mul", ["a", "head"], ["y"]),
    ]
    if through_identity:
        nodes.append(helper.make_node("Identity", [made], ["k1"]))
    constants = {
        "table": np.random.default_rng(0).standard_normal((50, 8)).astype(np.float32), "one": np.array([1]),
        "one_two": np.array([1, 2]), "one_number": np.array(1), "lowest": np.float32(-np.inf), "head": np.float32(head),
    }  # fmt: skip
    whole = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes, "decoder",
        [whole("ids", TensorProto.INT64, ["B", "T"]), whole("am", TensorProto.INT64, ["B", total]),
         whole("k0", TensorProto.FLOAT, ["B", 1, "P", 8])],
        [whole("y", TensorProto.FLOAT, ["B", 1, "T", 8]), whole("k1", TensorProto.FLOAT, ["B", 1, total, 8])],
        [numpy_helper.from_array(np.asarray(v), n) for n, v in constants.items()],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


@pytest.mark.parametrize("through_identity", [False, True])
@pytest.mark.parametrize("axis", [2, -2])
def test_a_cache_is_what_is_given_back_longer(axis: int, through_identity: bool) -> None:
    model = decoder(axis=axis, through_identity=through_identity)
    assert caches.grown_dims(model) == {"k0": "K"}
    assert {s.name: s.role for s in feeds.input_specs(model)} == {"ids": "ids", "am": "mask", "k0": "past"}


def test_what_grows_along_another_axis_is_no_cache() -> None:
    assert caches.grown_dims(decoder(axis=0)) == {}


def test_the_mask_has_a_column_for_each_token_and_hides_some() -> None:
    specs = feeds.input_specs(decoder())
    made = feeds.generate(specs, feeds.Scenario("", batch=2, seq=4, past=17, padding="left"))
    assert {name: value.shape for name, value in made.items()} == {"ids": (2, 4), "am": (2, 21), "k0": (2, 1, 17, 8)}
    assert set(made["am"].reshape(-1).tolist()) == {0, 1}


def test_a_wrong_rewrite_is_found() -> None:
    verifier = Verifier(decoder())
    assert verifier.check(decoder()).status == "passed"
    assert not any("sequence length" in note for note in verifier.notes)
    assert verifier.check(decoder(head=1.01)).status == "failed"
    assert np.isfinite(np.concatenate([verifier.truth(s)["y"].reshape(-1) for s in verifier.sets])).all()
