"""A shared form that generates something else is found, whatever is wrong with it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from onnxfuse import pipeline
from onnxfuse.errors import VerificationError
from onnxfuse.lower.kernels import Target
from onnxfuse.verify.generation import Caches, GenerationCheck, generations, mask_of

pytest.importorskip("onnxruntime")
MODELS = Path(__file__).parents[2] / "models"
GPT2 = MODELS / "gpt2-past-dyn18-f32-sdpa.onnx"


@pytest.fixture(scope="module")
def gpt2() -> tuple[GenerationCheck, onnx.ModelProto]:
    build = pipeline.build(GPT2, pipeline.Options(target=Target("cpu"), kv_cache="shared"))
    cache = build.shared_cache
    assert cache is not None
    return GenerationCheck(onnx.load(GPT2), caches_of(cache)), build.model.to_proto()


def caches_of(cache: object) -> Caches:
    return Caches(cache.caches, cache.mask, cache.added_inputs, cache.window, cache.new_tokens)  # type: ignore[attr-defined]


def test_the_form_that_was_made_passes(gpt2: tuple[GenerationCheck, onnx.ModelProto]) -> None:
    verdict = gpt2[0].check(gpt2[1])
    assert verdict.status == "passed" and verdict.ok and not verdict.problems
    assert verdict.runs == [course.name for course in generations(0, masked=True)]
    names = {output["name"] for output in verdict.outputs}
    assert names == {output.name for output in onnx.load(GPT2).graph.output}
    assert all(output["error"] <= output["tolerance"] for output in verdict.outputs)


def attention(proto: onnx.ModelProto, layer: int = 1) -> onnx.NodeProto:
    return [node for node in proto.graph.node if node.op_type == "GroupQueryAttention"][layer]


def set_attribute(proto: onnx.ModelProto, name: str, value: float) -> None:
    node = attention(proto)
    kept = [a for a in node.attribute if a.name != name]
    del node.attribute[:]
    node.attribute.extend([*kept, helper.make_attribute(name, value)])


def shift_lengths(proto: onnx.ModelProto) -> None:
    """Every sequence is taken to be one token shorter in the second layer."""
    node = attention(proto)
    proto.graph.initializer.append(numpy_helper.from_array(np.array(1, np.int32), "one_less"))
    proto.graph.initializer.append(numpy_helper.from_array(np.array(0, np.int32), "at_least"))
    made = [helper.make_node("Sub", [node.input[5], "one_less"], ["shorter"]),
            helper.make_node("Max", ["shorter", "at_least"], ["shorter_still"])]
    node.input[5] = "shorter_still"
    place = list(proto.graph.node).index(node)
    nodes = list(proto.graph.node)
    nodes[place:place] = made
    del proto.graph.node[:]
    proto.graph.node.extend(nodes)


def swap_presents(proto: onnx.ModelProto) -> None:
    """The caches of the layers come out under each other's names."""
    first, second = attention(proto, 0), attention(proto, 1)
    first.output[1], second.output[1] = second.output[1], first.output[1]


@pytest.mark.parametrize("breaks", [
    lambda p: set_attribute(p, "scale", 0.26),
    lambda p: set_attribute(p, "local_window_size", 4),
    lambda p: set_attribute(p, "softcap", 30.0),
    shift_lengths, swap_presents,
], ids=["scale", "window", "softcap", "lengths", "presents"])
def test_a_wrong_form_fails(
    gpt2: tuple[GenerationCheck, onnx.ModelProto], breaks: Callable[[onnx.ModelProto], None]
) -> None:
    wrong = onnx.ModelProto()
    wrong.CopyFrom(gpt2[1])
    breaks(wrong)
    verdict = gpt2[0].check(wrong)
    assert verdict.status == "failed" and verdict.problems
    assert "batch" in verdict.problems[0] and "prompt" in verdict.problems[0]


def test_a_form_that_does_not_run_fails_at_home_only(gpt2: tuple[GenerationCheck, onnx.ModelProto]) -> None:
    wrong = onnx.ModelProto()
    wrong.CopyFrom(gpt2[1])
    attention(wrong).domain = "no.such.domain"
    assert gpt2[0].check(wrong).status == "failed"
    assert gpt2[0].check(wrong, must_run=False).status == "unverified"


def test_an_original_that_does_not_run(tmp_path: Path) -> None:
    proto = onnx.load(GPT2)
    proto.graph.node[0].domain = "no.such.domain"
    proto.opset_import.append(helper.make_opsetid("no.such.domain", 1))
    with pytest.raises(VerificationError, match="does not run on `cpu`"):
        GenerationCheck(proto, Caches((("past_key_0", "present_key_0"),), "attention_mask"))


def in_bfloat16(proto: onnx.ModelProto) -> None:
    """Retype a float16 model."""
    half, brain = onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16

    def tensor(given: onnx.TensorProto) -> None:
        if given.data_type == half:
            values = numpy_helper.to_array(given).astype(np.float32)
            values = np.where(values == np.finfo(np.float16).min, -3e38, values)  # the mask's lowest number
            given.CopyFrom(helper.make_tensor(given.name, brain, given.dims, values.reshape(-1)))

    for given in proto.graph.initializer:
        tensor(given)
    for value in [*proto.graph.input, *proto.graph.output, *proto.graph.value_info]:
        if value.type.tensor_type.elem_type == half:
            value.type.tensor_type.elem_type = brain
    for attribute in (attribute for node in proto.graph.node for attribute in node.attribute):
        if attribute.name in ("to", "dtype") and attribute.i == half:
            attribute.i = brain
        elif attribute.type == onnx.AttributeProto.TENSOR:
            tensor(attribute.t)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_cuda_model_is_checked_on_the_cpu(dtype: str) -> None:
    proto = onnx.load(MODELS / "qwen2-past-dyn20-f16-eager.onnx")
    if dtype == "bfloat16":
        in_bfloat16(proto)
    build = pipeline.build(proto, pipeline.Options(target=Target.parse("cuda:sm90"), kv_cache="shared"))
    assert build.shared_cache is not None
    verdict = GenerationCheck(proto, caches_of(build.shared_cache)).check(build.model.to_proto(), must_run=False)
    # The CPU provider has the kernels for float16; what it has none for is run in float32.
    assert verdict.status == ("passed" if dtype == "float16" else "structure-only"), verdict.problems


@pytest.mark.parametrize("window", [0, 1, 3, 8, 40, 4096])
@pytest.mark.parametrize("masked", [True, False])
def test_courses_stay_in_the_window_when_padded_and_leave_it_when_not(window: int, masked: bool) -> None:
    found = generations(window, masked=masked)
    assert {course.batch for course in found} == {1, 2, 3} and any(max(course.steps) > 1 for course in found)
    for course in found:
        total = course.prompt + sum(course.steps)
        assert course.prompt >= 1 and (course.batch == 1 or all(new == 1 for new in course.steps))
        if course.padded and window >= 3:
            assert total <= max(window, 2)
    if 0 < window <= 64:
        assert any(course.prompt > window for course in found)
    assert len(generations(window, masked=masked, small=False)) == 1


def test_the_mask_of_a_model_that_its_exporter_fused() -> None:
    assert mask_of(onnx.load(MODELS / "mistral-past-genai-int4.onnx")) == "attention_mask"
    assert mask_of(onnx.load(MODELS / "vit-dyn18-f32-sdpa.onnx")) is None
