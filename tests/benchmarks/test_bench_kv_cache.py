"""The benchmark of caches in place runs, and compares what it times."""

from __future__ import annotations

import csv
from pathlib import Path

import onnx
import pytest

pytest.importorskip("onnxruntime")
import bench_kv_cache

MODELS = Path(__file__).parents[2] / "models"


def run(tmp_path: Path, *arguments: str) -> list[dict[str, str]]:
    out = tmp_path / "rows.csv"
    options = ["--factor", "1", "--past", "8", "--seconds", "0.01", "--csv", str(out)]
    assert bench_kv_cache.main([str(MODELS), *options, *arguments]) == 0
    return list(csv.DictReader(out.open()))


def test_all_decoders_of_the_models_are_timed(tmp_path: Path) -> None:
    rows = run(tmp_path)
    assert [row["model"] for row in rows] == ["gpt2-past-dyn18-f32-sdpa.onnx", "qwen2-past-dyn20-f16-eager.onnx"]
    for row in rows:
        times = [float(row[f"{form}_ms"]) for form in ("exported", "separate", "shared")]
        rounding = 1e-4 / min(times) + 1e-3  # of the times as they are written, and of the ratio
        assert min(times) > 0 and float(row["ratio"]) == pytest.approx(times[2] / times[1], rel=rounding)


def test_a_form_that_computes_something_else_is_not_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forms_of = bench_kv_cache.forms_of

    def wrong(proto: onnx.ModelProto, provider: str):  # type: ignore[no-untyped-def]
        forms, caches = forms_of(proto, provider)
        for node in forms["shared"].graph.node:
            if node.op_type == "GroupQueryAttention":
                node.attribute.append(onnx.helper.make_attribute("softcap", 0.01))
        return forms, caches

    monkeypatch.setattr(bench_kv_cache, "forms_of", wrong)
    with pytest.raises(SystemExit, match=r"gpt2-past-dyn18-f32-sdpa\.onnx after 8 tokens: logits differ by"):
        run(tmp_path, "--models", "gpt2")


def test_nothing_to_time(tmp_path: Path) -> None:
    assert bench_kv_cache.main([str(MODELS), "--models", "vit"]) == 1
