"""Small decoders: what can be shared generates what the growing form does, what cannot is refused by name."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import onnx
import pytest

from onnxfuse.errors import KvCacheError, ModelError
from onnxfuse.lower.kernels import KernelTable, Target
from onnxfuse.lower.shared_cache import SharedCache, share
from onnxfuse.runtime.in_place import InPlaceRunner
from onnxfuse.runtime.session import Runner
from onnxfuse.verify.generation import Caches, GenerationCheck, GenerationVerdict

pytest.importorskip("onnxruntime")
CAUSAL = "q_num_heads = 4, kv_num_heads = 2, is_causal = 1"


def generated(decoder: Any, target: str = "cpu") -> tuple[GenerationVerdict, onnx.ModelProto, SharedCache]:
    proto, cache = decoder.shared(target)
    caches = Caches(cache.caches, cache.mask, cache.added_inputs, cache.window, cache.new_tokens)
    return GenerationCheck(decoder.growing(), caches).check(proto), proto, cache


@pytest.mark.parametrize("mask", ["causal", "padded", "boolean", "sum of two", "product of triangles", "window"])
def test_every_spelling_of_a_mask_generates_the_same(decoder: Any, mask: str) -> None:
    verdict, proto, cache = generated(decoder(mask=mask))
    assert verdict.status == "passed" and len(verdict.runs) == 3, verdict.problems
    ops = Counter(node.op_type for node in proto.graph.node)
    assert ops["GroupQueryAttention"] == 1 and not ops["Softmax"] and not ops["MultiHeadAttention"]
    padded = mask not in ("causal", "product of triangles")
    assert cache.mask == ("attention_mask" if padded else None)
    assert cache.added_inputs == (() if padded else ("seqlens_k", "total_sequence_length"))
    assert cache.window == (4 if mask == "window" else 0)


@pytest.mark.parametrize("changes", [
    {"mask": "", "attrs": CAUSAL},
    {"mask": "", "attrs": CAUSAL + ", window = 3"},
    {"mask": "padding only", "attrs": CAUSAL},
    {"mask": "window", "attrs": CAUSAL + ", window = 3"},
    {"attrs": "q_num_heads = 4, kv_num_heads = 2, scale = 0.7, softcap = 2.0"},
    {"attrs": "q_num_heads = 2, kv_num_heads = 2", "sizes": (32, 32, 32)},
    {"attrs": "q_num_heads = 6, kv_num_heads = 2", "sizes": (144, 48, 48)},
    {"attrs": "q_num_heads = 4, kv_num_heads = 2, nan_guard = 1", "opset": 15},
    {"dtype": "float16", "mask": "boolean"},
    {"sinks": True},
], ids=lambda c: ", ".join(f"{k} {v}" for k, v in c.items()))
def test_forms_of_attention(decoder: Any, changes: dict[str, Any]) -> None:
    verdict, _, cache = generated(decoder(**changes))
    assert verdict.status == "passed", verdict.problems
    assert cache.window == (3 if "window = 3" in changes.get("attrs", "") else 0)


def test_buffers_are_declared_and_the_rest_keeps_its_interface(decoder: Any) -> None:
    given = decoder()
    proto, cache = given.shared()
    onnx.checker.check_model(proto)
    was, now = given.proto().graph, proto.graph
    for before, after in ((was.input, now.input), (was.output, now.output)):
        assert [v.name for v in before] == [v.name for v in after]
        assert [v.type.tensor_type.elem_type for v in before] == [v.type.tensor_type.elem_type for v in after]
    dims = {v.name: [d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim]
            for v in [*now.input, *now.output]}
    for past, present in cache.caches:
        assert dims[past] == dims[present] == ["b", 2, "max_sequence_length", 16]
    assert cache.to_json()["caches"][0] == {"past": "past_k", "present": "present_k"}
    assert not {n.op_type for n in now.node if "past_k" in n.input} - {"GroupQueryAttention"}


def test_a_name_for_the_length_that_is_taken_is_not_used_again(decoder: Any) -> None:
    proto, cache = decoder(inputs="float[max_sequence_length] unused").shared()
    assert cache.length == "max_sequence_length_1"
    assert proto.graph.input[-3].type.tensor_type.shape.dim[2].dim_param == "max_sequence_length_1"


def test_shapes_of_the_caches_are_those_that_they_would_have(decoder: Any) -> None:
    """Whatever asks for them sees the lengths of past and present, not those of the buffers."""
    given = decoder(
        before="asked = Shape (past_k)  some = Shape <start = -3, end = -1> (past_v)"
        "  none = Shape <start = 3, end = 2> (past_v)",
        after="y = Identity (attended)  grown = Shape (present_v)",
        outputs="int64[4] asked, int64[2] some, int64[0] none, int64[4] grown",
    )  # fmt: skip
    proto, cache = given.shared()
    runner = InPlaceRunner(Runner(proto, level="all"), cache.caches, {p: (3, 2, 20, 16) for p, _ in cache.caches})
    rng = np.random.default_rng(0)
    for new, total in ((4, 4), (1, 5), (1, 6)):
        x = rng.standard_normal((3, new, 128)).astype(np.float32)
        made = runner.run({"x": x, "attention_mask": np.ones((3, total), np.int64)})
        assert made["asked"].tolist() == [3, 2, total - new, 16] and made["grown"].tolist() == [3, 2, total, 16]
        assert made["some"].tolist() == [2, total - new] and made["none"].tolist() == []
        assert np.isfinite(made["y"]).all()


def test_another_number_of_sequences_is_refused(decoder: Any) -> None:
    """By ONNX Runtime, which would read past the end of what counts them."""
    proto, cache = decoder().shared()
    x = np.random.default_rng(0).standard_normal((2, 3, 128)).astype(np.float32)
    for rows in (1, 3):
        runner = InPlaceRunner(Runner(proto, level="all"), cache.caches, {p: (2, 2, 8, 16) for p, _ in cache.caches})
        with pytest.raises(ModelError, match=f"must have batch_size .2. elements, got {rows}"):
            runner.run({"x": x, "attention_mask": np.ones((rows, 3), np.int64)})


# What the buffer cannot follow --------------------------------------------------------------------------------------


def poisoned(decoder: Any, masks: list[list[list[int]]]) -> list[list[bool]]:
    """For each run (by its mask) which sequences are NaN; runs take as many new tokens as the mask grows."""
    proto, cache = decoder.shared()
    batch = len(masks[0])
    runner = InPlaceRunner(Runner(proto, level="all"), cache.caches, {p: (batch, 2, 16, 16) for p, _ in cache.caches})
    rng, before, found = np.random.default_rng(1), 0, []
    for rows in masks:
        mask = np.array(rows, np.int64)
        new, before = mask.shape[1] - before, mask.shape[1]
        x = rng.standard_normal((batch, new, 128)).astype(np.float32)
        y = runner.run({"x": x, "attention_mask": mask})["y"]
        found.append([bool(np.isnan(y[b]).all()) for b in range(batch)])
    return found


@pytest.mark.parametrize(("prompt", "nan"), [
    ([0, 0, 1, 1], True), ([1, 0, 1, 1], True), ([1, 1, 0, 1], True), ([0, 1, 1, 1], True),
    ([1, 1, 1, 0], False), ([1, 0, 0, 0], False), ([1, 1, 1, 1], False), ([0, 0, 0, 0], False),
])
def test_padding_that_is_not_on_the_right_gives_nan_in_its_sequence_only(
    decoder: Any, prompt: list[int], nan: bool
) -> None:
    assert poisoned(decoder(), [[prompt, [1, 1, 1, 1]]]) == [[nan, False]]


def test_a_new_token_that_is_hidden_gives_nan(decoder: Any) -> None:
    runs = [[[1, 1, 0], [1, 1, 1]], [[1, 1, 0, 1], [1, 1, 1, 1]], [[1, 1, 0, 1, 1], [1, 1, 1, 1, 0]]]
    assert poisoned(decoder(), runs) == [[False, False], [False, False], [False, True]]


def test_a_gap_in_a_window_gives_nan_once_it_matters(decoder: Any) -> None:
    """The window has 4 keys; it counts columns of the mask in the exported form."""
    runs = [[[1, 0], [1, 1]], [[1, 0, 1], [1, 1, 1]], [[1, 0, 1, 1], [1] * 4], [[1, 0, 1, 1, 1], [1] * 5]]
    assert poisoned(decoder(mask="window"), runs) == [[False, False]] * 3 + [[True, False]]


def test_several_tokens_with_a_cache_go_with_one_sequence(decoder: Any) -> None:
    assert poisoned(decoder(), [[[1, 1, 1]], [[1] * 6], [[1, 1, 1, 1, 1, 1, 1, 0, 1]]]) == [[False], [False], [True]]


# Refusals -----------------------------------------------------------------------------------------------------------


def refusal(decoder: Any, target: str = "cpu") -> str:
    with pytest.raises(KvCacheError) as refused:
        decoder.shared(target)
    assert refused.value.exit_code == 2 and refused.value.hint
    return str(refused.value)


def test_masks_that_say_more(decoder: Any, bad_masks: list[str]) -> None:
    assert len(bad_masks) == 8
    for mask in bad_masks:
        text = refusal(decoder(mask=mask))
        assert text.startswith("Attention `") and "`mask`" in text, mask


@pytest.mark.parametrize(("changes", "words"), [
    ({"after": "y = Identity (attended)  sum = ReduceSum <keepdims = 0> (past_k)", "outputs": "float sum"},
     "ReduceSum `sum`: the cache cannot be shared: `ReduceSum` reads the cache `past_k` too"),
    ({"after": "y = Identity (attended)  sum = ReduceSum <keepdims = 0> (present_v)", "outputs": "float sum"},
     "ReduceSum `sum`: the cache cannot be shared: `ReduceSum` reads the cache `present_v` too"),
    ({"mask": "", "attrs": "q_num_heads = 4, kv_num_heads = 2"}, "is not causal"),
    ({"sizes": (64, 32, 48)}, "has keys of size 16 and values of size 24"),
    ({"sizes": (48, 24, 24)}, "has heads of size 12; GroupQueryAttention wants a multiple of 8"),
    ({"past": "7"}, "reads a cache `past_k` of the fixed length 7"),
    ({"dtype": "bfloat16", "mask": "boolean"}, "is in bfloat16, for which target `cpu` has no GroupQueryAttention"),
    ({"inputs": "float[b, p] other", "after": "size = Shape (other)  y = Identity (attended)",
      "outputs": "int64[2] size"}, "is given `other`, which is as long as the cache"),
    ({"rows_of_mask": "1"}, "is padded by `attention_mask`, which has one row for all sequences"),
    ({"outputs_of_attention": "attended, present_k, present_v, scores", "outputs": "float[b, 4, s, z] scores"},
     "gives its scores"),
])
def test_caches_that_cannot_be_shared(decoder: Any, changes: dict[str, Any], words: str) -> None:
    assert words in refusal(decoder(**changes))


def test_float32_on_cuda_has_no_kernel(decoder: Any) -> None:
    text = refusal(decoder(), target="cuda:sm90")
    assert "is in float32, for which target `cuda:sm90` has no GroupQueryAttention" in text and "float16" in text


def test_a_refused_model_is_as_it_was(decoder: Any) -> None:
    model = decoder(mask="distance").model()
    before = model.to_proto().SerializeToString(deterministic=True)
    with pytest.raises(KvCacheError):
        share(model, KernelTable(Target("cpu")))
    assert model.to_proto().SerializeToString(deterministic=True) == before


def changed(proto: onnx.ModelProto, text: str) -> Any:
    """The decoder with its attention replaced by other nodes."""
    from onnxfuse.graph import canonicalize
    from onnxfuse.graph.model import Model

    graph = onnx.parser.parse_graph(text)
    place = next(i for i, node in enumerate(proto.graph.node) if node.op_type == "Attention")
    kept = list(proto.graph.node)
    kept[place : place + 1] = graph.node
    del proto.graph.node[:]
    proto.graph.node.extend(kept)
    model = Model(proto)
    canonicalize.run(model)
    return model


def test_a_cache_that_is_concatenated_outside_is_named(decoder: Any) -> None:
    model = changed(decoder(mask="").proto(), """g () => () {
        k4 = Reshape (k3, shape)  v4 = Reshape (v3, shape)
        present_k = Concat <axis = 2> (past_k, k4)  present_v = Concat <axis = 2> (past_v, v4)
        attended = Identity (q3)
    }""")
    with pytest.raises(KvCacheError, match="`present_k` is concatenated outside of any that was recognized"):
        share(model, KernelTable(Target("cpu")))


def test_attention_in_a_branch(decoder: Any) -> None:
    given = decoder(mask="", attrs=CAUSAL, inputs="bool again")
    model = changed(given.proto(), """g () => () {
        attended, present_k, present_v = If (again) <
            then_branch = one () => (float[b, s, 64] a, float[b, 2, m, 16] c, float[b, 2, m, 16] d) {
                a, c, d = onnxfuse.std.Attention <q_num_heads = 4, kv_num_heads = 2, is_causal = 1> (
                    q3, k3, v3, , past_k, past_v)
            }, else_branch = two () => (float[b, s, 64] e, float[b, 2, p, 16] f, float[b, 2, p, 16] h) {
                e = Identity (q3)  f = Identity (past_k)  h = Identity (past_v)
            }>
    }""")
    with pytest.raises(KvCacheError, match="reads its cache in a subgraph or a function"):
        share(model, KernelTable(Target("cpu")))


# What does not grow --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("example", [{}, {"memory": np.zeros((2, 7, 16))}], ids=["none", "given"])
def test_the_output_of_an_encoder_keeps_its_length(decoder: Any, example: dict[str, np.ndarray]) -> None:
    """It comes in as states and as keys, which must fit together in every step."""
    given = decoder(
        inputs="float[b, 2, enc, 16] past_cross_k, float[b, enc, 16] memory",
        after="""states = Unsqueeze (memory, a1)  crossed = Add (past_cross_k, states)
                 mean = ReduceMean <keepdims = 0> (crossed)  y = Add (attended, mean)""",
    )
    proto, cache = given.shared()
    assert [past for past, _ in cache.caches] == ["past_k", "past_v"]
    caches = Caches(cache.caches, cache.mask, cache.added_inputs, cache.window, cache.new_tokens)
    verdict = GenerationCheck(given.growing(), caches, example=example).check(proto)
    assert verdict.status == "passed" and len(verdict.runs) == 3, verdict.problems
