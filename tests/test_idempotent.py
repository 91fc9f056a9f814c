"""What `optimize` wrote, it writes again: byte for byte, whatever was fused, taken apart or left."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import onnx
import pytest

import onnxfuse

MODELS = sorted((Path(__file__).parents[1] / "models").glob("*.onnx"))


def written(model: Path, out: Path, target: str, external_data: bool | None = None) -> tuple[bytes, onnxfuse.Result]:
    result = onnxfuse.optimize(model, out, target=target, verify=False, external_data=external_data)
    return out.read_bytes(), result


@pytest.mark.parametrize("target", ["cpu", "cuda:sm90"])
@pytest.mark.parametrize("model", MODELS, ids=lambda path: path.stem)
def test_a_second_run_changes_nothing(model: Path, target: str, tmp_path: Path) -> None:
    first, result = written(model, tmp_path / "first.onnx", target)
    again, repeated = written(tmp_path / "first.onnx", tmp_path / "second.onnx", target)
    assert result.fused and first == again
    assert repeated.report["fusions"] == [] and repeated.report["nodes"]["before"] == repeated.report["nodes"]["after"]
    assert repeated.report["ops_after"] == result.report["ops_after"]


def test_a_second_run_keeps_external_data(tmp_path: Path) -> None:
    llama = next(path for path in MODELS if path.stem.startswith("llama"))
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    first, _ = written(llama, tmp_path / "first" / "m.onnx", "cpu", external_data=True)
    again, _ = written(tmp_path / "first" / "m.onnx", tmp_path / "second" / "m.onnx", "cpu")
    assert first == again
    assert (tmp_path / "first" / "m.onnx.data").read_bytes() == (tmp_path / "second" / "m.onnx.data").read_bytes()


def test_what_was_changed_since_is_optimized(tmp_path: Path) -> None:
    """Here a bias and an activation that were added to the written file."""
    llama = next(path for path in MODELS if path.stem.startswith("llama"))
    written(llama, tmp_path / "first.onnx", "cuda:sm90")
    proto = onnx.load(tmp_path / "first.onnx")
    output = proto.graph.output[0]
    maker = next(node for node in proto.graph.node if output.name in node.output)
    maker.output[list(maker.output).index(output.name)] = "plain"
    width = output.type.tensor_type.shape.dim[-1].dim_value
    bias = onnx.helper.make_tensor("added_bias", onnx.TensorProto.FLOAT, [width], [0.5] * width)
    proto.graph.initializer.append(bias)
    proto.graph.node.append(onnx.helper.make_node("Add", ["plain", "added_bias"], ["biased"]))
    proto.graph.node.append(onnx.helper.make_node("Relu", ["biased"], [output.name]))
    onnx.save(proto, tmp_path / "edited.onnx")
    _, result = written(tmp_path / "edited.onnx", tmp_path / "out.onnx", "cuda:sm90")
    assert {"linear-bias", "linear-activation"} <= {fusion["rule"] for fusion in result.report["fusions"]}


def test_another_target_is_another_result(tmp_path: Path) -> None:
    llama = next(path for path in MODELS if path.stem.startswith("llama"))
    written(llama, tmp_path / "cpu.onnx", "cpu")
    _, result = written(tmp_path / "cpu.onnx", tmp_path / "cuda.onnx", "cuda:sm90")
    direct, _ = written(llama, tmp_path / "direct.onnx", "cuda:sm90")
    assert result.fused
    assert result.report["ops_after"]["onnxfuse::Linear"] == sum(
        node.op_type == "Linear" for node in onnx.load_from_string(direct).graph.node
    )


def test_the_result_does_not_depend_on_the_hash_seed(tmp_path: Path) -> None:
    bert = next(path for path in MODELS if path.stem.startswith("bert"))
    shutil.copy(bert, tmp_path / "m.onnx")
    code = "import onnxfuse; onnxfuse.optimize('m.onnx', 'out.onnx', target='cuda:sm90', verify=False)"
    results = set()
    for seed in ("1", "2"):
        path = os.pathsep.join([str(Path(onnxfuse.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
        environment = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": path}
        subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, check=True)
        results.add((tmp_path / "out.onnx").read_bytes())
    assert len(results) == 1
