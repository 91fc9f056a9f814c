"""Bad input: one clear error each, the right exit code, the old output intact."""

from __future__ import annotations

import json
import os
from pathlib import Path

import onnx
import pytest

from onnxfuse.pipeline import rule_set

RULE = Path(__file__).parents[2] / "rules" / "lift" / "gelu-erf.yaml"


def refused(cli, model: object, tmp_path: Path, *options: object, says: str, error: str, code: int = 2) -> str:
    """The command fails with one message, and the old output stays."""
    out = tmp_path / "out.onnx"
    out.write_bytes(b"old")
    outcome = cli("optimize", model, "-o", out, "--target", "cpu", *options)
    assert outcome.code == code, outcome.err
    assert outcome.err.startswith(f"error[{error}]: "), outcome.err
    assert says in outcome.err
    assert "Traceback" not in outcome.err and outcome.out == ""
    assert out.read_bytes() == b"old"
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")], "no temporary files"
    return outcome.err


def test_missing_file(cli, tmp_path: Path) -> None:
    refused(cli, tmp_path / "no.onnx", tmp_path, says="no such file", error="bad-model")


def test_a_folder(cli, tmp_path: Path) -> None:
    refused(cli, tmp_path, tmp_path, says="is a folder", error="bad-model")


@pytest.mark.parametrize("keep", [0.2, 0.5, 0.9, 0.999])
def test_truncated_file(cli, tiny: Path, tmp_path: Path, keep: float) -> None:
    content = tiny.read_bytes()
    bad = tmp_path / "bad.onnx"
    bad.write_bytes(content[: int(len(content) * keep)])
    refused(cli, bad, tmp_path, says="bad.onnx", error="bad-model")


@pytest.mark.parametrize("content", [b"", b"no protobuf at all", b"\x00" * 100, b"PK\x03\x04zip", os.urandom(256)])
def test_not_a_protobuf(cli, tmp_path: Path, content: bytes) -> None:
    bad = tmp_path / "bad.onnx"
    bad.write_bytes(content)
    refused(cli, bad, tmp_path, says="bad.onnx", error="bad-model")


def test_a_graph_that_the_checker_rejects(cli, tiny: Path, tmp_path: Path) -> None:
    proto = onnx.load(tiny)
    proto.graph.node[3].input[0] = "nowhere"
    onnx.save(proto, tmp_path / "bad.onnx")
    refused(cli, tmp_path / "bad.onnx", tmp_path, says="not a valid ONNX model", error="bad-model")


def test_an_op_of_an_unknown_domain(cli, tiny: Path, tmp_path: Path) -> None:
    proto = onnx.load(tiny)
    proto.graph.node[-1].domain = "com.example"
    proto.opset_import.append(onnx.helper.make_opsetid("com.example", 1))
    onnx.save(proto, tmp_path / "foreign.onnx")
    says = "original model does not run"
    text = refused(cli, tmp_path / "foreign.onnx", tmp_path, says=says, error="not-verified", code=1)
    assert "com.example" in text
    outcome = cli("optimize", tmp_path / "foreign.onnx", "-o", tmp_path / "out.onnx", "--target", "cpu", "--no-verify")
    assert outcome.code == 0, "its other nodes can still be fused"


def external(tiny: Path, folder: Path, location: str = "m.data") -> Path:
    folder.mkdir()
    onnx.save(onnx.load(tiny), folder / "m.onnx", save_as_external_data=True, location="m.data", size_threshold=128)
    proto = onnx.load(folder / "m.onnx", load_external_data=False)
    for tensor in proto.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = location
    (folder / "m.onnx").write_bytes(proto.SerializeToString())
    return folder / "m.onnx"


def test_missing_external_data(cli, tiny: Path, tmp_path: Path) -> None:
    model = external(tiny, tmp_path / "ext")
    (tmp_path / "ext" / "m.data").unlink()
    refused(cli, model, tmp_path, says="`m.data`", error="external-data")


def test_short_external_data(cli, tiny: Path, tmp_path: Path) -> None:
    model = external(tiny, tmp_path / "ext")
    data = tmp_path / "ext" / "m.data"
    data.write_bytes(data.read_bytes()[:100])
    refused(cli, model, tmp_path, says="100 bytes", error="external-data")


@pytest.mark.parametrize("location", ["../secret.data", "/etc/passwd", "sub/../../secret.data"])
def test_external_data_that_leaves_the_folder(cli, tiny: Path, tmp_path: Path, location: str) -> None:
    (tmp_path / "secret.data").write_bytes(b"\0" * 10_000)
    model = external(tiny, tmp_path / "ext", location)
    refused(cli, model, tmp_path, says="leaves the model's folder", error="external-data")


def test_output_is_input(cli, tiny: Path, tmp_path: Path) -> None:
    before = tiny.read_bytes()
    (tmp_path / "link.onnx").symlink_to(tiny)
    for out in (tiny, tmp_path / "link.onnx", tmp_path / "." / "tiny.onnx"):
        outcome = cli("optimize", tiny, "-o", out, "--target", "cpu")
        assert outcome.code == 2 and "same file" in outcome.err
    assert tiny.read_bytes() == before


def test_output_would_overwrite_the_inputs_tensors(cli, tiny: Path, tmp_path: Path) -> None:
    model = external(tiny, tmp_path / "ext")
    data = tmp_path / "ext" / "m.data"
    before = data.read_bytes()
    outcome = cli("optimize", model, "-o", tmp_path / "ext" / "m.data", "--target", "cpu")
    assert outcome.code == 2 and "holds the input's tensors" in outcome.err
    os.rename(data, tmp_path / "ext" / "out.onnx.data")
    model = external(tiny, tmp_path / "ext2", "out.onnx.data")
    os.rename(tmp_path / "ext2" / "m.data", tmp_path / "ext2" / "out.onnx.data")
    outcome = cli("optimize", model, "-o", tmp_path / "ext2" / "out.onnx", "--target", "cpu")
    assert outcome.code == 2 and "holds the input's tensors" in outcome.err
    assert (tmp_path / "ext2" / "out.onnx.data").read_bytes() == before


def test_output_that_cannot_be_written(cli, tiny: Path, tmp_path: Path) -> None:
    outcome = cli("optimize", tiny, "-o", tmp_path / "no" / "folder" / "x.onnx", "--target", "cpu")
    assert outcome.code == 2 and "does not exist" in outcome.err and "error[bad-output]" in outcome.err
    outcome = cli("optimize", tiny, "-o", tmp_path, "--target", "cpu")
    assert outcome.code == 2 and "is a folder" in outcome.err
    outcome = cli("optimize", tiny, "--report", tmp_path / "no" / "r.json", "--target", "cpu", "--dry-run")
    assert outcome.code == 2 and "error[bad-output]" in outcome.err


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_output_folder_without_permission(cli, tiny: Path, tmp_path: Path) -> None:
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o555)
    outcome = cli("optimize", tiny, "-o", locked / "x.onnx", "--target", "cpu")
    assert outcome.code == 2 and "cannot be written" in outcome.err


def test_output_links_that_lead_to_no_file(cli, tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    dangling = ("nowhere.onnx", "is a link to `nowhere.onnx`, which does not exist")
    for target, says in (dangling, ("folder", "is a folder")):
        link = tmp_path / f"to-{target}.onnx"
        link.symlink_to(target)
        for options in (("-o", link), ("-o", tmp_path / "out.onnx", "--report", link)):
            outcome = cli("optimize", tiny, "--target", "cpu", *options)
            assert outcome.code == 2 and outcome.err.startswith("error[bad-output]: ") and says in outcome.err
        assert link.is_symlink() and not (tmp_path / "out.onnx").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_an_output_link_into_a_folder_without_permission(cli, tiny: Path, tmp_path: Path) -> None:
    locked = tmp_path / "locked"
    locked.mkdir()
    (locked / "real.onnx").write_bytes(b"old")
    locked.chmod(0o555)
    (tmp_path / "link.onnx").symlink_to(locked / "real.onnx")
    outcome = cli("optimize", tiny, "-o", tmp_path / "link.onnx", "--target", "cpu")
    assert outcome.code == 2 and "cannot be written" in outcome.err and str(locked) in outcome.err
    assert (locked / "real.onnx").read_bytes() == b"old"


@pytest.mark.parametrize("data", ["--inline-data", "--external-data"])
def test_an_output_link_is_written_through(cli, tiny: Path, tmp_path: Path, data: str) -> None:
    (tmp_path / "store").mkdir()
    real, link, report = tmp_path / "store" / "real.onnx", tmp_path / "link.onnx", tmp_path / "report.json"
    real.write_bytes(b"old")
    link.symlink_to(real)
    (tmp_path / "store" / "report.json").write_text("old")
    report.symlink_to("store/report.json")
    outcome = cli("optimize", tiny, "-o", link, "--target", "cpu", data, "--report", report)
    assert outcome.code == 0, outcome.err
    assert link.is_symlink() and report.is_symlink() and json.loads(report.read_text())["output"] == str(link)
    assert cli("verify", tiny, link).code == 0 and cli("verify", tiny, real).code == 0
    again = cli("optimize", link, "-o", real, "--target", "cpu")
    assert again.code == 2 and "same file" in again.err


def test_a_full_disk(cli, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("onnxfuse.replacement.os.fsync", full)
    refused(cli, tiny, tmp_path, says="No space left on device", error="bad-output")


@pytest.mark.parametrize(("old", "new", "says"), [
    ("stage: lift", "stage: lift\nprioritty: 3", "unknown key `prioritty`"),
    ("stage: lift", "stage: lift\nstage: fuse", "duplicate key"),
])
def test_rule_files_that_do_not_load(cli, tiny: Path, tmp_path: Path, old: str, new: str, says: str) -> None:
    text = RULE.read_text()
    assert old in text
    folder = tmp_path / "rules"
    folder.mkdir()
    (folder / "my-gelu.yaml").write_text(text.replace("id: gelu-erf", "id: my-gelu").replace(old, new, 1))
    text = refused(cli, tiny, tmp_path, "--rules", folder, says=says, error="bad-rule")
    assert "my-gelu.yaml:" in text, "with the line"


def test_a_rule_id_that_exists_twice(cli, tiny: Path, tmp_path: Path) -> None:
    folder = tmp_path / "rules"
    folder.mkdir()
    (folder / "gelu-erf.yaml").write_text(RULE.read_text())
    refused(cli, tiny, tmp_path, "--rules", folder, says="two rules are called `gelu-erf`", error="bad-rule")


def test_a_name_that_the_rule_does_not_define(cli, tiny: Path, tmp_path: Path) -> None:
    folder = tmp_path / "rules"
    folder.mkdir()
    (folder / "lost.yaml").write_text(
        """schema: 1
id: lost
stage: lift
summary: reads a value that nothing defines
inputs:
  x: {}
nodes:
  y: {op: Add, in: [x, nowhere]}
outputs: [y]
rewrite:
  node: {op: Relu, in: [x], out: [y]}
tests:
  match: []
  no_match: []
"""
    )
    refused(cli, tiny, tmp_path, "--rules", folder, says="nowhere", error="bad-rule")


def test_a_number_that_yaml_reads_as_text_means_a_number_or_is_refused(tmp_path: Path) -> None:
    """YAML 1.1 takes 1e-6 for a string. Here it is the number, or an error; never a silent mismatch."""
    from onnxfuse.errors import RuleError
    from onnxfuse.rules import yaml_text

    try:
        document = yaml_text.parse("eps: 1e-6\nflag: no\n", "x.yaml")
    except RuleError as error:
        assert "1e-6" in str(error)
    else:
        assert document["eps"] == 1e-6 and document["flag"] == "no"


def test_rule_paths_that_do_not_exist(cli, tiny: Path, tmp_path: Path) -> None:
    refused(cli, tiny, tmp_path, "--rules", tmp_path / "none.yaml", says="no such rule file", error="bad-rule")
    (tmp_path / "empty").mkdir()
    refused(cli, tiny, tmp_path, "--rules", tmp_path / "empty", says="no rule file", error="bad-rule")


def test_an_unknown_rule(cli, tiny: Path, tmp_path: Path) -> None:
    text = refused(cli, tiny, tmp_path, "--disable", "gelu-erff", says="no rule `gelu-erff`", error="bad-rule")
    assert "did you mean `gelu-erf`" in text


def test_an_unknown_node(cli, tiny: Path, tmp_path: Path) -> None:
    text = refused(cli, tiny, tmp_path, "--exclude-node", "produkt", says="no node `produkt`", error="bad-usage")
    assert "did you mean `product`" in text


@pytest.mark.parametrize("options", [(), ("--no-verify",), ("--allow-unverified",)])
def test_an_output_of_another_dtype_than_declared(cli, tiny: Path, tmp_path: Path, options: tuple[str, ...]) -> None:
    proto = onnx.load(tiny)
    proto.graph.output[0].type.tensor_type.elem_type = onnx.TensorProto.FLOAT16
    onnx.save(proto, tmp_path / "half.onnx")
    refused(cli, tmp_path / "half.onnx", tmp_path, *options, error="bad-model",
            says="output `y` is declared float16 and computed in float32")


@pytest.mark.parametrize("target", ["gpu", "cpu:sm90", "cuda:90", "cuda:sm9", "cuda:sm999", ""])
def test_an_unknown_target(cli, tiny: Path, target: str) -> None:
    outcome = cli("optimize", tiny, "--target", target)
    assert outcome.code == 2 and f"unknown target `{target}`" in outcome.err
    assert "sm80, sm86, sm87, sm89, sm90, sm100" in outcome.err and "Traceback" not in outcome.err


def test_inputs_that_do_not_fit(cli, tiny: Path, tmp_path: Path) -> None:
    refused(cli, tiny, tmp_path, "--input-shapes", "x:1,2,17", says="does not fit input `x`", error="bad-inputs")
    refused(cli, tiny, tmp_path, "--input-shapes", "q:1", says="no input `q`", error="bad-inputs")
    refused(cli, tiny, tmp_path, "--input-shapes", "x=1", says="`x=1` is not an input shape", error="bad-inputs")
    refused(cli, tiny, tmp_path, "--inputs", tmp_path / "no.npz", says="no such file", error="bad-inputs")


def test_the_rules_of_the_package_load() -> None:
    from onnxfuse.pipeline import Options

    assert len(rule_set(Options())) > 20


@pytest.mark.parametrize("command", [
    ("optimize", "{model}", "-o", "{new}", "--report", "{model}"),
    ("optimize", "{model}", "-o", "{new}", "--report", "{new}"),
    ("optimize", "{model}", "-o", "{new}", "--save-inputs", "{link}"),
    ("optimize", "{model}", "-o", "{new}", "--report", "{other}", "--save-inputs", "{other}"),
    ("report", "{model}", "-o", "{model}"),
    ("run", "{model}", "--save-outputs", "{model}"),
    ("run", "{model}", "--save-inputs", "{other}", "--save-outputs", "{other}"),
    ("verify", "{model}", "{model}", "--save-inputs", "{link}"),
])
def test_no_file_takes_the_place_of_another(cli, tiny: Path, tmp_path: Path, command: tuple[str, ...]) -> None:
    link, new = tmp_path / "link.onnx", tmp_path / "new.onnx"
    link.symlink_to(tiny)
    before = tiny.read_bytes()
    outcome = cli(*(part.format(model=tiny, link=link, new=new, other=tmp_path / "other") for part in command))
    assert outcome.code == 2 and outcome.err.startswith("error[bad-output]: "), outcome.err
    assert "are the same file" in outcome.err
    assert tiny.read_bytes() == before and not new.exists() and link.is_symlink()


def test_a_data_file_is_not_taken_for_a_report(cli, tiny: Path, tmp_path: Path) -> None:
    outcome = cli("optimize", tiny, "--report", f"{tiny}.data", "--target", "cpu")
    assert outcome.code == 2 and "same file" in outcome.err


def test_devices_stay_devices(cli, tiny: Path, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe.onnx"
    os.mkfifo(pipe)
    outcome = cli("optimize", tiny, "-o", pipe, "--target", "cpu")
    assert outcome.code == 2 and "is no regular file" in outcome.err
    assert pipe.is_fifo()


def test_a_regress_configuration_that_is_no_text(cli, tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_bytes(b"\x83\x00\xff")
    outcome = cli("regress", tmp_path / "r.yaml")
    assert outcome.code == 2 and "cannot be read as text" in outcome.err and "internal error" not in outcome.err


def test_shapes_that_do_not_fit_together(cli, tmp_path: Path) -> None:
    """The checker lets it pass; inference of the output's shape does not."""
    proto = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 17]> g (float[b,4] x, float[b,4,2] z) => (float[b] y)
        { y = Concat <axis = 0> (z, x) }"""
    )
    onnx.save(proto, tmp_path / "bad.onnx")
    refused(cli, tmp_path / "bad.onnx", tmp_path, says="same rank", error="bad-model")


def test_a_full_disk_leaves_nothing_behind(cli, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    outcome = cli("optimize", tiny, "--dry-run", "--target", "cpu", "--report", tmp_path / "r.json")
    assert outcome.code == 2 and "No space left on device" in outcome.err
    assert [p.name for p in tmp_path.iterdir()] == ["tiny.onnx"]
