"""Generated inputs lie in the range that the model allows, and named sizes agree."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from onnxfuse.errors import InputDataError
from onnxfuse.runtime.feeds import Scenario, generate, has_past, input_specs

DECODER = """<ir_version: 8, opset_import: ["": 17]>
g (int64[batch_size, sequence_length] input_ids,
   int64[batch_size, TOTAL] attention_mask,
   int64[batch_size, sequence_length] position_ids,
   float[batch_size, 2, past_sequence_length, 16] past_key_values_0_key,
   bool[1] use_cache_branch, float16[batch_size, encoder_sequence_length, 64] encoder_hidden_states)
=> (float[a, b, 8] y, float[a, b, 8] p)
<float[50, 8] table, float[40, 8] positions, int64 two = {2}> {
  y = Gather (table, input_ids)
  shifted = Add (position_ids, two)
  p = Gather (positions, shifted)
}"""


def specs_of(text: str) -> list:
    proto = onnx.parser.parse_model(text)
    for value in proto.graph.input:
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param == "TOTAL":  # the parser has no sums
                dim.dim_param = "past_sequence_length + sequence_length"
    given = {i.name for i in proto.graph.initializer}
    for value in proto.graph.value_info:  # typed names without data stand for weights
        if value.name not in given and not any(value.name in n.output for n in proto.graph.node):
            shape = [d.dim_value for d in value.type.tensor_type.shape.dim]
            proto.graph.initializer.append(onnx.numpy_helper.from_array(np.zeros(shape, np.float32), value.name))
    return input_specs(proto)


def test_decoder_with_past_has_consistent_lengths() -> None:
    specs = specs_of(DECODER)
    assert has_past(specs)
    feeds = generate(specs, Scenario("x", batch=3, seq=4, past=17, padding="left"))
    assert feeds["input_ids"].shape == (3, 4)
    assert feeds["attention_mask"].shape == (3, 21)
    assert feeds["past_key_values_0_key"].shape == (3, 2, 17, 16)
    assert feeds["encoder_hidden_states"].dtype == np.float16
    assert feeds["use_cache_branch"].tolist() == [True]


def test_a_name_that_tells_nothing_is_one_size_all_the_same() -> None:
    """An encoder's mask and the keys cached from it, beside a decoder's cache."""
    specs = specs_of(
        """<ir_version: 8, opset_import: ["": 17]> g (int64[batch, dec] decoder_input_ids, int64[batch, enc]
        encoder_attention_mask, float[batch, 4, past, 16] past_key_values_0_decoder_key,
        float[batch, 4, enc, 16] past_key_values_0_encoder_key) => (int64[a, b] y)
        { y = Identity (decoder_input_ids) }"""
    )
    feeds = generate(specs, Scenario("past", 2, 4, 17))
    assert feeds["encoder_attention_mask"].shape[1] == feeds["past_key_values_0_encoder_key"].shape[2]
    assert feeds["past_key_values_0_decoder_key"].shape[2] == 17


def test_ids_and_positions_stay_inside_their_tables() -> None:
    specs = specs_of(DECODER)
    feeds = generate(specs, Scenario("x", batch=2, seq=30, past=25, seed=3))
    assert feeds["input_ids"].min() >= 0 and feeds["input_ids"].max() < 50
    assert len(np.unique(feeds["input_ids"])) > 10
    # The graph adds 2 before it looks up, so 38 positions are left.
    assert feeds["position_ids"].max() == 37
    assert (np.diff(feeds["position_ids"], axis=1) >= 0).all()


def test_an_empty_cache_switches_the_branch_off() -> None:
    feeds = generate(specs_of(DECODER), Scenario("x", past=0))
    assert feeds["past_key_values_0_key"].shape[2] == 0
    assert feeds["use_cache_branch"].tolist() == [False]


@pytest.mark.parametrize("padding", ["none", "left", "right", "masked"])
def test_padding(padding: str) -> None:
    mask = generate(specs_of(DECODER), Scenario("x", batch=3, seq=9, padding=padding))["attention_mask"]
    assert set(np.unique(mask)) <= {0, 1}
    if padding == "none":
        assert mask.all()
        return
    lengths = mask.sum(axis=1)
    assert len(set(lengths)) > 1, "rows are padded differently"
    assert (lengths > 0).sum() == (2 if padding == "masked" else 3)
    side = mask[:, 0] if padding == "right" else mask[:, -1]
    assert side[lengths > 0].all()
    assert (np.abs(np.diff(mask, axis=1)).sum(axis=1) <= 1).all(), "one run of ones per row"


def test_left_padding_shifts_positions() -> None:
    feeds = generate(specs_of(DECODER), Scenario("x", batch=2, seq=6, padding="left"))
    first = int(feeds["attention_mask"][1].argmax())
    assert first > 0
    assert feeds["position_ids"][1, first] == 0
    assert feeds["position_ids"][1, -1] == 5 - first


def test_a_mask_per_query_is_causal() -> None:
    specs = specs_of(
        """<ir_version: 8, opset_import: ["": 17]>
        g (float[batch, 1, seq, total_seq] attention_mask, float[batch, 2, past_seq, 4] past_key) => (float[n] y)
        { y = Identity (attention_mask) }"""
    )
    mask = generate(specs, Scenario("x", batch=1, seq=3, past=2))["attention_mask"]
    assert mask.shape == (1, 1, 3, 5)
    assert (mask[0, 0] == 0).sum(axis=1).tolist() == [3, 4, 5]
    assert mask.min() < -1e4


def test_scalars_that_are_compared_take_a_known_value() -> None:
    specs = specs_of(
        """<ir_version: 8, opset_import: ["": 17]> g (int64 sr, float[b, seq] x) => (bool y)
        <int64 rate = {16000}> { y = Equal (sr, rate) }"""
    )
    assert generate(specs, Scenario("x"))["sr"] == 16000


def test_unnamed_sizes_follow_the_role() -> None:
    specs = specs_of(
        """<ir_version: 8, opset_import: ["": 17]>
        g (float[?, 3, ?, ?] pixel_values, int64[?, ?] input_ids) => (float[a] y)
        { y = Identity (pixel_values) }"""
    )
    feeds = generate(specs, Scenario("x", batch=2, seq=7))
    assert feeds["pixel_values"].shape == (2, 3, 32, 32)
    assert feeds["input_ids"].shape == (2, 7)


def test_same_seed_same_values() -> None:
    specs = specs_of(DECODER)
    one, two = (generate(specs, Scenario("x", past=3, seed=9)) for _ in range(2))
    other = generate(specs, Scenario("x", past=3, seed=10))
    assert all(np.array_equal(one[k], two[k]) for k in one)
    assert not np.array_equal(one["past_key_values_0_key"], other["past_key_values_0_key"])


def test_given_shapes_bind_names_everywhere() -> None:
    specs = specs_of(DECODER)
    feeds = generate(specs, Scenario("x", shapes={"input_ids": (5, 2)}))
    assert feeds["attention_mask"].shape == (5, 2)
    with pytest.raises(InputDataError, match="does not fit input `past_key_values_0_key`"):
        generate(specs, Scenario("x", shapes={"past_key_values_0_key": (1, 3, 4, 16)}))
    with pytest.raises(InputDataError, match="no input `ids`"):
        generate(specs, Scenario("x", shapes={"ids": (1, 3)}))


def test_no_values_for_strings() -> None:
    specs = specs_of(
        """<ir_version: 8, opset_import: ["": 17]> g (string[n] s) => (string[n] y) { y = Identity (s) }"""
    )
    with pytest.raises(InputDataError, match="input `s`"):
        generate(specs, Scenario("x"))


def test_what_has_no_dimensions_is_an_array_too() -> None:
    specs = specs_of(
        """<ir_version: 8, opset_import: ["": 17]> g (float[4,2] x, float s, int64 i, int64 last) => (float y) {
          row = Gather (x, i) scaled = Mul (row, s) y = Gather (scaled, last) }"""
    )
    values = generate(specs, Scenario("x"))
    assert all(isinstance(v, np.ndarray) for v in values.values())
    assert values["s"].shape == () and values["s"].dtype == np.float32 and 0 <= values["i"] < 4


def test_an_input_of_any_rank_takes_any_shape() -> None:
    x = onnx.ValueInfoProto(name="x")
    x.type.tensor_type.elem_type = onnx.TensorProto.FLOAT
    y = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)
    graph = onnx.helper.make_graph([onnx.helper.make_node("Relu", ["x"], ["y"])], "g", [x], [y])
    specs = input_specs(onnx.helper.make_model(graph))
    assert generate(specs, Scenario("x"))["x"].ndim == 2
    assert generate(specs, Scenario("x", shapes={"x": (2, 3, 4)}))["x"].shape == (2, 3, 4)
