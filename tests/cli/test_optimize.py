"""`onnxfuse optimize`: what it writes, prints and returns."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import onnx
import pytest

import onnxfuse
from onnxfuse import pipeline, reverting
from onnxfuse.rewrite import apply as rewriting
from onnxfuse.runtime.session import Runner, uses_domain

MODELS = Path(__file__).parents[2] / "models"
LLAMA = MODELS / "llama-dyn20-f32-sdpa-tf5.onnx"


def test_weights_that_a_caller_may_replace_are_pointed_out(cli, tmp_path: Path) -> None:
    model = onnx.load(MODELS / "vit-dyn18-f32-sdpa.onnx")
    count = len(model.graph.initializer)
    for tensor in model.graph.initializer:
        kind = onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
        model.graph.input.append(kind)
    path, report = tmp_path / "m.onnx", tmp_path / "report.json"
    for version, replaceable in ((8, count), (3, 0)):  # before 4 all weights were inputs, and constants
        model.ir_version = version
        onnx.save(model, path)
        outcome = cli("optimize", path, "--target", "cpu", "--report", report)
        assert outcome.code == 0, outcome.err
        assert json.loads(report.read_text())["weights"] == {"count": count, "replaceable": replaceable}
        assert (f"{count} of {count} weights are inputs of the graph, too" in outcome.out) == bool(replaceable)


def test_a_llama_comes_out_fused_and_verified(cli, tmp_path: Path) -> None:
    out, report = tmp_path / "fused.onnx", tmp_path / "report.json"
    outcome = cli("optimize", LLAMA, "-o", out, "--target", "cpu", "--report", report)
    assert outcome.code == 0, outcome.err
    assert "verified on" in outcome.out and str(out) in outcome.out
    written = json.loads(report.read_text())
    assert written["schema"] == 1 and written["verify"]["status"] == "passed" and not written["reverted"]
    blocks = written["blocks"]
    expected = {"rmsnorm": 5, "skip_rmsnorm": 4, "rope": 4, "attention": 2, "swiglu": 2, "qkv_shared_input_groups": 2}
    assert {key: blocks.get(key) for key in expected} == expected
    assert sum(f["count"] for f in written["fusions"]) >= 20
    assert sum(written["ops_after"].values()) == written["nodes"]["after"]
    with np.load(MODELS / "llama-dyn20-f32-sdpa-tf5.npz") as stored:
        feeds = {k[8:]: stored[k] for k in stored.files if k.startswith("set1/in/")}
        got = Runner(onnx.load(out), level="all").run(feeds)
        for name, value in got.items():
            reference = stored[f"set1/out/{name}"]
            assert np.abs(value - reference).max() <= 2e-4 * np.abs(reference).max()


def test_a_plain_session_runs_a_fused_model(tmp_path: Path) -> None:
    import onnxruntime

    out = tmp_path / "fused.onnx"
    onnxfuse.optimize(MODELS / "bert-ts17-f16-eager.onnx", out, target="cpu")
    options = onnxruntime.SessionOptions()
    onnxfuse.register(options)
    session = onnxruntime.InferenceSession(str(out), options, providers=["CPUExecutionProvider"])
    assert session.get_outputs()
    assert onnxfuse.session(out, ["cpu"]).get_inputs()


def test_the_default_output_lies_beside_the_model(cli, tiny: Path) -> None:
    outcome = cli("optimize", tiny, "--target", "cpu")
    assert outcome.code == 0 and (tiny.parent / "tiny.fused.onnx").is_file()


def test_dry_run_writes_nothing(cli, tiny: Path) -> None:
    outcome = cli("optimize", tiny, "--target", "cpu", "--dry-run", "--json")
    assert outcome.code == 0 and outcome.data["output"] is None and outcome.data["fusions"]
    assert os.listdir(tiny.parent) == ["tiny.onnx"]


@pytest.mark.parametrize("stage", pipeline.STAGES)
def test_every_stage_gives_a_model_that_runs(cli, tiny: Path, stage: str) -> None:
    out = tiny.parent / f"{stage}.onnx"
    outcome = cli("optimize", tiny, "-o", out, "--target", "cpu", "--stop-after", stage, "--json")
    assert outcome.code == 0 and outcome.data["verify"]["status"] == "passed", outcome.err
    proto = onnx.load(out)
    if stage != "lower":  # ONNX Runtime's own RMSNorm kernel lies in ONNX's domain, where the checker does not know it
        onnx.checker.check_model(proto)
    x = np.random.default_rng(0).standard_normal((2, 3, 16)).astype(np.float32)
    base, fused = Runner(onnx.load(tiny)).run({"x": x})["y"], Runner(proto, level="all").run({"x": x})["y"]
    assert np.allclose(base, fused, atol=1e-5)


def test_the_fused_ops_of_the_tiny_model(tiny: Path) -> None:
    fused = onnxfuse.optimize(tiny, target="cpu", stop_after="fuse")
    (node,) = fused.model.graph.node
    assert (node.domain, node.op_type) == ("onnxfuse", "Linear")
    attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    assert attributes["norm"] == b"rms" and attributes["activation"] == b"gelu"
    assert attributes["epsilon"] == pytest.approx(1e-6)
    assert fused.report["blocks"]["matmul_bias_act_gelu_erf"] == 1 and fused.fused > 0


def test_disabled_rules_and_excluded_nodes(tiny: Path) -> None:
    every = {f["rule"] for f in onnxfuse.optimize(tiny, target="cpu", verify=False).report["fusions"]}
    less = onnxfuse.optimize(tiny, target="cpu", verify=False, disable=["gelu-erf"]).report
    assert "gelu-erf" in every and "gelu-erf" not in {f["rule"] for f in less["fusions"]}
    spared = onnxfuse.optimize(tiny, target="cpu", verify=False, exclude_nodes=["erf"]).report
    assert "gelu-erf" not in {f["rule"] for f in spared["fusions"]} and spared["ops_after"]["ai.onnx::Erf"] == 1


def test_nothing_fused(cli, tmp_path: Path) -> None:
    proto = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 17]> g (float[n] x) => (float[n] y) { y = Sin (x) }"""
    )
    onnx.save(proto, tmp_path / "plain.onnx")
    assert cli("optimize", tmp_path / "plain.onnx", "--target", "cpu").code == 0
    outcome = cli("optimize", tmp_path / "plain.onnx", "--target", "cpu", "--fail-on-none")
    assert outcome.code == 1 and "nothing was fused" in outcome.err


def test_a_second_time_changes_nothing_that_matters(cli, tmp_path: Path) -> None:
    once, twice = tmp_path / "once.onnx", tmp_path / "twice.onnx"
    assert cli("optimize", MODELS / "bert-ts17-f16-eager.onnx", "-o", once, "--target", "cpu").code == 0
    outcome = cli("optimize", once, "-o", twice, "--target", "cpu", "--json")
    assert outcome.code == 0, outcome.err
    assert outcome.data["verify"]["status"] == "passed"
    assert outcome.data["nodes"]["after"] <= outcome.data["nodes"]["before"]


def test_a_model_that_others_fused(cli, tmp_path: Path) -> None:
    model = MODELS / "mistral-past-genai-int4.onnx"
    outcome = cli("optimize", model, "-o", tmp_path / "x.onnx", "--target", "cpu", "--json")
    assert outcome.code == 0 and outcome.data["verify"]["status"] == "passed", outcome.err
    assert outcome.data["ops_after"]["com.microsoft::GroupQueryAttention"] == 2


def test_external_data_stays_external(cli, tiny: Path, tmp_path: Path) -> None:
    source = tmp_path / "ext" / "m.onnx"
    source.parent.mkdir()
    onnx.save(onnx.load(tiny), source, save_as_external_data=True, location="m.data", size_threshold=256)
    out = tmp_path / "out" / "m.onnx"
    out.parent.mkdir()
    outcome = cli("optimize", source, "-o", out, "--target", "cpu")
    assert outcome.code == 0, outcome.err
    assert (out.parent / "m.onnx.data").is_file()
    x = np.ones((1, 2, 16), np.float32)
    fused = onnxfuse.session(out, ["cpu"]).run(None, {"x": x})[0]
    assert np.allclose(fused, Runner(onnx.load(tiny)).run({"x": x})["y"], atol=1e-5)
    inline = out.parent / "inline.onnx"
    assert cli("optimize", source, "-o", inline, "--target", "cpu", "--inline-data").code == 0
    assert not (out.parent / "inline.onnx.data").exists()


def test_given_and_saved_inputs(cli, tiny: Path, tmp_path: Path) -> None:
    saved = tmp_path / "in.npz"
    shape = ("--input-shapes", "x:4,9,16")
    outcome = cli("optimize", tiny, "--target", "cpu", "--save-inputs", saved, "--seed", 5, *shape)
    assert outcome.code == 0, outcome.err
    with np.load(saved) as stored:
        assert stored["set0/in/x"].shape == (4, 9, 16)
    outcome = cli("optimize", tiny, "--target", "cpu", "--inputs", saved, "--json")
    assert outcome.code == 0 and outcome.data["verify"]["sets"][0].startswith("in.npz")


def _sabotage(monkeypatch: pytest.MonkeyPatch, hit) -> None:
    """Let the rewriter scale the output of some new nodes by 1.01, as a wrong rule would."""
    original = rewriting.commit

    def commit(built, scope):
        for node in built.nodes:
            if hit(built, node) and node.domain in ("onnxfuse", "onnxfuse.std") and "epsilon" in node.attrs:
                node.attrs["epsilon"] = 0.5
        return original(built, scope)

    monkeypatch.setattr("onnxfuse.rewrite.driver.commit", commit)


def test_a_wrong_rule_is_found_and_taken_back(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _sabotage(monkeypatch, lambda built, node: node.op == "RMSNormalization")
    result = onnxfuse.optimize(LLAMA, tmp_path / "x.onnx", target="cpu")
    assert result.verdict is not None and result.verdict.status == "passed"
    reverted = result.report["reverted"]
    assert reverted[0]["rule"] == "rms-norm" and reverted[0]["sites"] is None, "everywhere"
    assert all(entry["rule"].startswith("rms-norm") for entry in reverted), "and what stepped in for it"
    assert not {f["rule"] for f in result.report["fusions"]} & {entry["rule"] for entry in reverted}
    assert {"gated-linear", "linear-pack"} <= {f["rule"] for f in result.report["fusions"]}, "the rest stays"


def test_one_wrong_site_is_found_and_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    norms = [a.root for a in pipeline.build(LLAMA, pipeline.Options()).applied if a.rule == "rms-norm"]
    _sabotage(
        monkeypatch,
        lambda built, node: built.match.rule == "rms-norm" and built.match.output_values()[0].name == norms[2],
    )
    result = onnxfuse.optimize(LLAMA, target="cpu")
    assert result.report["verify"]["status"] == "passed"
    assert result.report["reverted"] and result.report["reverted"][0]["rule"] == "rms-norm"
    assert result.report["reverted"][0]["sites"] == [norms[2]]
    assert next(f["count"] for f in result.report["fusions"] if f["rule"] == "rms-norm") == len(norms) - 1


def test_what_cannot_be_verified_is_not_written(cli, monkeypatch, tiny: Path, tmp_path: Path) -> None:
    monkeypatch.setattr(reverting.Builder, "_offenders", lambda *_: [])
    _sabotage(monkeypatch, lambda built, node: True)
    out, report = tmp_path / "out.onnx", tmp_path / "report.json"
    out.write_bytes(b"old")
    outcome = cli("optimize", tiny, "-o", out, "--target", "cpu", "--report", report)
    assert outcome.code == 1 and "error[not-verified]" in outcome.err and "elements wrong" in outcome.err
    assert out.read_bytes() == b"old"
    assert json.loads(report.read_text())["verify"]["status"] == "failed"
    outcome = cli("optimize", tiny, "-o", out, "--target", "cpu", "--allow-unverified")
    assert outcome.code == 0 and out.read_bytes() != b"old" and "verification failed" in outcome.out


def test_an_interrupted_run_leaves_the_old_file(tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.onnx"
    out.write_bytes(b"old")
    code = (
        "import signal, sys, time, onnxfuse.replacement as f\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # it is ignored by what runs in the background
        "def slow(*a):\n    print('writing', flush=True); time.sleep(30)\n"
        "f.os.fsync = slow\n"  # the last step before the new file takes the place of the old one
        "from onnxfuse.cli.main import main\n"
        f"main(['optimize', {str(tiny)!r}, '-o', {str(out)!r}, '--target', 'cpu', '-q'])"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline().strip() == "writing"
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130 and "interrupted" in err
    assert out.read_bytes() == b"old"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out.onnx", "tiny.onnx"], "nothing is left lying about"


def test_models_in_memory(tiny: Path) -> None:
    proto = onnx.load(tiny)
    before = proto.SerializeToString()
    result = onnxfuse.optimize(proto, target="cpu")
    assert proto.SerializeToString() == before and result.path is None
    assert Runner(result.model).run({"x": np.ones((1, 2, 16), np.float32)})["y"].shape == (1, 2, 32)
    assert result.save(tiny.parent / "saved.onnx").is_file()


def test_unfuse_gives_a_model_without_our_ops(cli, tiny: Path, tmp_path: Path) -> None:
    proto = onnxfuse.optimize(tiny, target="cpu", stop_after="fuse")
    del proto.model.functions[:]
    onnx.save(proto.model, tmp_path / "fused.onnx")
    assert uses_domain(proto.model)
    outcome = cli("unfuse", tmp_path / "fused.onnx", "-o", tmp_path / "plain.onnx", "--json")
    assert outcome.code == 0 and not any("onnxfuse" in op for op in outcome.data["ops"]), outcome.err
    plain = onnx.load(tmp_path / "plain.onnx")
    assert not uses_domain(plain)
    x = np.ones((1, 2, 16), np.float32)
    assert np.allclose(Runner(plain).run({"x": x})["y"], Runner(onnx.load(tiny)).run({"x": x})["y"], atol=1e-5)


def test_big_models_are_verified_from_a_file(monkeypatch: pytest.MonkeyPatch, tiny: Path, tmp_path: Path) -> None:
    monkeypatch.setattr(reverting, "IN_MEMORY_LIMIT", 100)
    result = onnxfuse.optimize(tiny, tmp_path / "out.onnx", target="cuda:sm90", external_data=True)
    assert result.verdict is not None and result.verdict.status == "passed" and result.fused
    assert (tmp_path / "out.onnx.data").is_file()
    assert onnxfuse.session(tmp_path / "out.onnx", ["cpu"]).run(None, {"x": np.ones((1, 1, 16), np.float32)})


def test_the_summary_says_what_was_taken_apart_and_where_it_ran(cli) -> None:
    bert = MODELS / "bert-ts17-f16-eager.onnx"
    lines = cli("optimize", bert, "--dry-run", "--target", "cpu").out.splitlines()
    apart = next(line for line in lines if "taken apart again for the target: " in line)
    assert "Linear " in apart and "SkipLayerNormalization 1" in apart
    outcome = cli("optimize", bert, "--dry-run", "--target", "cuda:sm90")
    provider = cli("optimize", bert, "--dry-run", "--target", "cuda:sm90", "--json").data["verify"]["provider"]
    assert (", run on CPU" in outcome.out) == (provider == "cpu")
