"""`onnxfuse optimize --kv-cache shared`: what it writes and prints, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import onnx
import pytest

import onnxfuse
from onnxfuse import in_place_cache, pipeline
from onnxfuse.errors import KvCacheError, UsageError
from onnxfuse.lower.kernels import Target
from onnxfuse.rewrite import apply as rewriting
from onnxfuse.verify.generation import GenerationVerdict

MODELS = Path(__file__).parents[2] / "models"
GPT2 = MODELS / "gpt2-past-dyn18-f32-sdpa.onnx"
LLAMA = MODELS / "llama-dyn20-f32-sdpa-tf5.onnx"


def test_a_decoder_comes_out_with_buffers(cli: Any, tmp_path: Path) -> None:
    out, report = tmp_path / "shared.onnx", tmp_path / "report.json"
    outcome = cli("optimize", GPT2, "-o", out, "--target", "cpu", "--kv-cache", "shared", "--report", report)
    assert outcome.code == 0, outcome.err
    assert "cache: 4 buffers of `max_sequence_length` rows" in outcome.out
    assert "tokens counted by `attention_mask`; generates as the original in 3 runs" in outcome.out
    written = json.loads(report.read_text())
    assert written["options"]["kv_cache"] == "shared" and written["verify"]["status"] == "passed"
    cache = written["kv_cache"]
    assert [c["past"] for c in cache["caches"]] == ["past_key_0", "past_value_0", "past_key_1", "past_value_1"]
    assert [c["present"].replace("present", "past") for c in cache["caches"]] == [c["past"] for c in cache["caches"]]
    assert (cache["mask"], cache["added_inputs"], cache["window"], cache["grouped"]) == ("attention_mask", [], 0, False)
    assert cache["generation"]["status"] == "passed" and len(cache["generation"]["runs"]) == 3
    assert written["ops_after"]["com.microsoft::GroupQueryAttention"] == 2
    shape = next(i for i in onnx.load(out).graph.input if i.name == "past_key_0").type.tensor_type.shape
    assert [d.dim_param or d.dim_value for d in shape.dim] == ["batch", 4, "max_sequence_length", 16]


def test_the_page_describes_every_key(cli: Any) -> None:
    outcome = cli("optimize", GPT2, "--target", "cpu", "--kv-cache", "shared", "--dry-run", "--json")
    page = (MODELS.parent / "docs" / "reference" / "report.md").read_text().split("## `kv_cache`")[1]
    cache = outcome.data["kv_cache"]
    keys = [*cache, *cache["caches"][0], *cache["generation"], *cache["generation"]["outputs"][0]]
    assert not [key for key in keys if key not in page.replace("`", " ").replace("{", " ").replace("}", " ")]


def test_the_default_is_unchanged(cli: Any) -> None:
    outcome = cli("optimize", GPT2, "--target", "cpu", "--dry-run", "--json")
    assert outcome.data["kv_cache"] is None and outcome.data["options"]["kv_cache"] == "separate"
    assert "com.microsoft::GroupQueryAttention" not in outcome.data["ops_after"]


def test_without_verification_nothing_is_generated(cli: Any, tmp_path: Path) -> None:
    out = tmp_path / "shared.onnx"
    outcome = cli("optimize", GPT2, "-o", out, "--target", "cpu", "--kv-cache", "shared", "--no-verify")
    assert outcome.code == 0 and out.is_file()
    assert "not verified" in outcome.out and "cache: 4 buffers" in outcome.out and "generates" not in outcome.out


def test_a_refusal_names_the_node_and_leaves_the_old_file(cli: Any, tmp_path: Path) -> None:
    out = tmp_path / "old.onnx"
    out.write_bytes(b"old")
    proto = onnx.load(GPT2)
    proto.graph.node.append(onnx.helper.make_node("ReduceMax", ["past_value_1"], ["top"], name="reader", keepdims=0))
    proto.graph.output.append(onnx.helper.make_tensor_value_info("top", onnx.TensorProto.FLOAT, []))
    onnx.save(proto, tmp_path / "reader.onnx")
    outcome = cli("optimize", tmp_path / "reader.onnx", "-o", out, "--target", "cpu", "--kv-cache", "shared")
    assert outcome.code == 2 and out.read_bytes() == b"old" and not outcome.out
    assert "error[kv-cache]: the cache cannot be shared: `ReduceMax` reads the cache `past_value_1` too" in outcome.err
    assert "ReduceMax `top`" in outcome.err and "hint: " in outcome.err


@pytest.mark.parametrize(("arguments", "words"), [
    ((LLAMA,), "the model has no attention that reads a cache"),
    ((GPT2, "--disable", "attention-past"), "is concatenated outside of any that was recognized"),
    ((GPT2, "--disable", "attention"), "is concatenated outside of any that was recognized"),
    ((GPT2, "--stop-after", "fuse"), "--stop-after `fuse`"),
    ((GPT2, "--target", "cuda:sm90"), "is in float32, for which target `cuda:sm90` has no GroupQueryAttention"),
])
def test_what_cannot_be_done(cli: Any, tmp_path: Path, arguments: tuple[object, ...], words: str) -> None:
    out = tmp_path / "out.onnx"
    target = () if "--target" in arguments else ("--target", "cpu")
    outcome = cli("optimize", *arguments, *target, "-o", out, "--kv-cache", "shared")
    assert outcome.code == 2 and words in outcome.err and not out.exists()


def test_an_unknown_form(cli: Any) -> None:
    assert cli("optimize", GPT2, "--kv-cache", "paged").code == 2
    with pytest.raises(UsageError, match="unknown form of the cache `paged`"):
        onnxfuse.optimize(GPT2, target="cpu", kv_cache="paged")


def test_a_wrong_result_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Any) -> None:
    """The growing form is right, the shared one is not: a defect of this step alone."""
    build = pipeline.build

    def broken(*arguments: Any, **options: Any) -> pipeline.Build:
        built = build(*arguments, **options)
        for node in built.model.graph.nodes:
            if node.op == "GroupQueryAttention":
                node.attrs["scale"] = 0.3
        return built

    monkeypatch.setattr(pipeline, "build", broken)
    out, report = tmp_path / "out.onnx", tmp_path / "report.json"
    outcome = cli("optimize", GPT2, "-o", out, "--target", "cpu", "--kv-cache", "shared", "--report", report)
    assert outcome.code == 1 and not out.exists()
    assert "with shared caches, batch 2, prompt 6, right padding" in outcome.err
    written = json.loads(report.read_text())
    assert written["verify"]["status"] == "failed" and written["kv_cache"]["generation"]["status"] == "failed"
    outcome = cli("optimize", GPT2, "-o", out, "--target", "cpu", "--kv-cache", "shared", "--allow-unverified")
    assert outcome.code == 0 and out.exists()


def test_what_verification_took_back_stays_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong fusion that the growing form showed is not in the shared form either."""
    original = rewriting.commit

    def commit(built: Any, *rest: Any) -> Any:
        if built.match.rule == "gelu-tanh":
            for node in built.nodes:
                node.op, node.domain = "Softplus", None
                node.attrs.clear()
        return original(built, *rest)

    monkeypatch.setattr("onnxfuse.rewrite.driver.commit", commit)
    result = onnxfuse.optimize(GPT2, target="cpu", kv_cache="shared")
    assert [entry["rule"] for entry in result.report["reverted"]] == ["gelu-tanh"]
    assert result.report["verify"]["status"] == "passed"
    assert result.report["kv_cache"]["generation"]["status"] == "passed"
    assert "gelu-tanh" not in {f["rule"] for f in result.report["fusions"]}
    ops = result.report["ops_after"]
    assert ops["com.microsoft::GroupQueryAttention"] == 2
    assert ops["ai.onnx::Tanh"] == 2 and "ai.onnx::Softplus" not in ops


def test_as_data_only_with_buffers() -> None:
    build = pipeline.build(GPT2, pipeline.Options(target=Target("cpu")))
    assert in_place_cache.as_dict(build, None) is None
    shared = pipeline.build(GPT2, pipeline.Options(target=Target("cpu"), kv_cache="shared"))
    data = in_place_cache.as_dict(shared, GenerationVerdict("skipped"))
    assert data is not None and data["generation"]["status"] == "skipped"
    with pytest.raises(KvCacheError):
        pipeline.build(LLAMA, pipeline.Options(target=Target("cpu"), kv_cache="shared"))
