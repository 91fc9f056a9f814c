"""Caches in place on a GPU; skipped without one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import onnxfuse
from onnxfuse.runtime.in_place import InPlaceRunner
from onnxfuse.runtime.session import Runner, cuda_works
from onnxfuse.verify.generation import Caches, GenerationCheck

pytest.importorskip("onnxruntime")
pytestmark = pytest.mark.skipif(not cuda_works(), reason="ONNX Runtime has no CUDA device here")

MODELS = Path(__file__).parents[3] / "models"
SIZES = (256, 128, 128)
CAUSAL = "q_num_heads = 4, kv_num_heads = 2, is_causal = 1"


def test_a_decoder_generates_the_same(tmp_path: Path) -> None:
    result = onnxfuse.optimize(
        MODELS / "qwen2-past-dyn20-f16-eager.onnx", tmp_path / "shared.onnx", target="cuda", kv_cache="shared"
    )
    assert result.report["verify"]["status"] == "passed" and result.report["verify"]["provider"] == "cuda"
    assert result.report["kv_cache"]["generation"]["status"] == "passed"


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("changes", [
    {"mask": "boolean"},
    {"mask": "boolean", "attrs": "q_num_heads = 4, kv_num_heads = 2, softcap = 5.0"},
    {"mask": "boolean", "attrs": CAUSAL + ", window = 4"},
    {"mask": "", "attrs": CAUSAL},
    {"mask": "boolean", "attrs": "q_num_heads = 2, kv_num_heads = 2", "sizes": (128, 128, 128)},
], ids=["padded", "softcap", "window", "no mask", "one head a group"])
def test_forms_of_attention(decoder: Any, changes: dict[str, Any], dtype: str) -> None:
    given = decoder(**{"sizes": SIZES, **changes}, dtype=dtype)
    proto, cache = given.shared("cuda:sm90")
    caches = Caches(cache.caches, cache.mask, cache.added_inputs, cache.window, cache.new_tokens)
    verdict = GenerationCheck(given.growing(), caches, provider="cuda").check(proto)
    assert verdict.ok and len(verdict.runs) == 3, verdict.problems


def test_left_padding_gives_no_numbers(decoder: Any) -> None:
    proto, cache = decoder(mask="boolean", sizes=SIZES, dtype="float16").shared("cuda:sm90")
    shapes = {past: (2, 2, 16, 64) for past, _ in cache.caches}
    runner = InPlaceRunner(Runner(proto, "cuda", level="all"), cache.caches, shapes)
    x = np.random.default_rng(0).standard_normal((2, 3, 512)).astype(np.float16)
    y = runner.run({"x": x, "attention_mask": np.array([[0, 1, 1], [1, 1, 0]])})["y"]
    assert np.isnan(y[0]).all() and np.isfinite(y[1, :2]).all()
