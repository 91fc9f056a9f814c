"""`verify`, `run`, `doctor`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import onnxfuse
from onnxfuse.runtime.session import cuda_works

MODELS = Path(__file__).parents[2] / "models"
LLAMA = MODELS / "llama-dyn20-f32-sdpa-tf5.onnx"


def scaled(source: Path, out: Path, name: str, factor: float) -> Path:
    proto = onnx.load(source)
    tensor = next(t for t in proto.graph.initializer if t.name == name)
    tensor.CopyFrom(numpy_helper.from_array((numpy_helper.to_array(tensor) * factor).astype(np.float32), name))
    onnx.save(proto, out)
    return out


def test_verify_right(cli, tiny: Path, tmp_path: Path) -> None:
    fused = onnxfuse.optimize(tiny, tmp_path / "f.onnx", target="cpu").path
    outcome = cli("verify", tiny, fused, "--json", "--iterations", 2, "--save-inputs", tmp_path / "in.npz")
    assert outcome.code == 0 and outcome.data["status"] == "passed", outcome.err
    entry = outcome.data["outputs"][0]
    assert entry["oracle"]["max_abs"] < 1e-4 and entry["oracle"]["cosine"] > 0.99999
    assert (tmp_path / "in.npz").is_file()
    assert cli("verify", tiny, fused, "--inputs", tmp_path / "in.npz").code == 0


def test_verify_wrong(cli, tiny: Path, tmp_path: Path) -> None:
    wrong = scaled(tiny, tmp_path / "w.onnx", "weight", 1.01)
    outcome = cli("verify", tiny, wrong)
    assert outcome.code == 1 and "wrong: set" in outcome.out and "status: failed" in outcome.out
    assert cli("verify", tiny, wrong, "--rtol", "0.1", "--atol", "y:0.1").code == 0, "own limits replace the criterion"
    assert cli("verify", tiny, wrong, "--rtol", "1e-4").code == 1
    outcome = cli("verify", tiny, wrong, "--atol", "z:1")
    assert outcome.code == 2 and "no output `z`" in outcome.err


def test_verify_another_model(cli) -> None:
    outcome = cli("verify", MODELS / "vit-dyn18-f32-sdpa.onnx", LLAMA)
    assert outcome.code == 1 and "inputs that the original lacks: `input_ids`, `attention_mask`" in outcome.out


@pytest.mark.skipif(cuda_works(), reason="there is a GPU")
def test_a_gpu_that_is_not_there(cli, tiny: Path) -> None:
    for arguments in (("run", tiny), ("verify", tiny, tiny)):
        outcome = cli(*arguments, "--provider", "cuda")
        assert outcome.code == 2 and outcome.err.startswith("error[runtime-missing]: "), outcome.err


def test_verify_bisects_and_cuts_out_a_repro(cli, tmp_path: Path) -> None:
    proto = onnxfuse.optimize(LLAMA, target="cpu").model
    matrix = [t for t in proto.graph.initializer if len(t.dims) == 2 and min(t.dims) >= 32][3]
    onnx.save(proto, tmp_path / "right.onnx")
    wrong = scaled(tmp_path / "right.onnx", tmp_path / "wrong.onnx", matrix.name, 1.02)
    outcome = cli("verify", LLAMA, wrong, "--bisect", "--repro", tmp_path / "repro", "--json")
    assert outcome.code == 1, outcome.err
    found = outcome.data["divergence"]
    assert found is not None and found["runs"] <= 7
    assert (tmp_path / "repro").is_dir() and any((tmp_path / "repro").iterdir())


def test_run(cli, tiny: Path, tmp_path: Path) -> None:
    outcome = cli("run", tiny, "--input-shapes", "x:1,2,16", "--save-outputs", tmp_path / "o.npz",
                  "--save-inputs", tmp_path / "i.npz", "--json")
    assert outcome.code == 0 and outcome.data["outputs"][0]["shape"] == "1x2x32", outcome.err
    with np.load(tmp_path / "o.npz") as first:
        again = cli("run", tiny, "--inputs", tmp_path / "i.npz", "--save-outputs", tmp_path / "o2.npz")
        assert again.code == 0 and "float32" in again.out
        with np.load(tmp_path / "o2.npz") as second:
            assert np.array_equal(first["y"], second["y"])


def test_run_a_model_that_does_not_run(cli, tmp_path: Path) -> None:
    proto = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 17]> g (float[n, 3] x) => (float[n, 2] y)
        <float[2, 2] w = {1, 2, 3, 4}> { y = MatMul (x, w) }"""
    )
    onnx.save(proto, tmp_path / "m.onnx")
    outcome = cli("run", tmp_path / "m.onnx")
    assert outcome.code == 2 and "error[bad-" in outcome.err


def test_doctor(cli) -> None:
    outcome = cli("doctor", "--json")
    facts = outcome.data["facts"]
    assert "CPUExecutionProvider" in facts["providers"] and facts["onnx"]
    assert (outcome.code == 0) == (not outcome.data["problems"])
    assert "what" in cli("doctor").out


def test_doctor_says_what_is_missing(cli, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ONNXFUSE_LIBRARY", str(tmp_path / "no.so"))
    outcome = cli("doctor")
    assert outcome.code == 1 and "problem: the custom-op library was not found" in outcome.out


def test_bench_says_which_sizes_the_model_refused(cli) -> None:
    outcome = cli("bench", MODELS / "gpt2-past-dyn18-f32-sdpa.onnx", "--shapes", "seq=4000", "--quiet")
    assert outcome.code == 2
    assert "the model was given input_ids 1x" in outcome.err and "--shapes gives other sizes" in outcome.err
