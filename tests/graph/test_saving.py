"""What stands in the folder after a model was written, or half written: links, read-only folders, killed processes."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from onnxfuse.errors import OutputError
from onnxfuse.graph import saving
from onnxfuse.replacement import write_text

#: Bytes of tensors, enough to be kept outside.
SIZE = 4096


def proto(value: int) -> onnx.ModelProto:
    """A model whose tensor and whose name tell the same number."""
    weight = numpy_helper.from_array(np.full(SIZE // 4, value, np.float32), "w")
    graph = helper.make_graph(
        [helper.make_node("Add", ["x", "w"], ["y"])], f"number {value}",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [SIZE // 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [SIZE // 4])], [weight],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def save(value: int, path: Path, external: bool = True) -> None:
    saving.write(proto(value), path, path.parent, external)


def number(path: Path) -> int:
    """Which model a file is, after ONNX Runtime has run it: the tensor must say what the name says."""
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    values = session.run(None, {"x": np.zeros(SIZE // 4, np.float32)})[0]
    named = int(onnx.load(path, load_external_data=False).graph.name.removeprefix("number "))
    assert (values == named).all(), f"{path.name} is number {named} and reads the data of number {values[0]}"
    return named


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def interrupted(action: Callable[[], None], step: int) -> bool:
    """Run it in another process that is killed before its `step`-th change of the folder; whether it was."""
    child = os.fork()
    if child == 0:
        left = [step]

        def counted(function: Callable[..., object]) -> Callable[..., object]:
            def call(*arguments: object, **options: object) -> object:
                if left[0] == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                left[0] -= 1
                return function(*arguments, **options)

            return call

        for name in ("replace", "link", "unlink", "fsync", "symlink", "chmod"):
            setattr(os, name, counted(getattr(os, name)))
        try:
            action()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


@pytest.mark.parametrize("old", ["nothing", "inside", "pair", "other data"])
def test_a_kill_at_any_step_leaves_the_old_or_the_new_pair(tmp_path: Path, old: str) -> None:
    """The processes that follow clean up."""
    out = tmp_path / "m.onnx"
    seen = set()
    for step in range(100):
        out.unlink(missing_ok=True)
        if old == "other data":
            (tmp_path / "m.onnx.data").write_bytes(b"of nobody")
        elif old != "nothing":
            save(1, out, external=old == "pair")
            assert number(out) == 1
        if not interrupted(lambda: save(2, out), step):
            break
        seen.add(number(out) if out.exists() else 0)
    else:
        pytest.fail("it never ended")
    assert step > 5 and seen <= {0 if old in ("nothing", "other data") else 1, 2}
    assert number(out) == 2 and names(tmp_path) == ["m.onnx", "m.onnx.data"]


def test_kills_at_random_moments(tmp_path: Path) -> None:
    out = tmp_path / "m.onnx"
    save(0, out)
    for _ in range(20):
        child = os.fork()
        if child == 0:
            for value in range(10**6):
                save(value, out)
        time.sleep(random.uniform(0.0, 0.03))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        number(out)
    save(7, out)
    assert number(out) == 7 and names(tmp_path) == ["m.onnx", "m.onnx.data"]


def test_writers_at_the_same_time_leave_one_pair(tmp_path: Path) -> None:
    out = tmp_path / "m.onnx"
    children = []
    for first in (100, 200, 300):
        child = os.fork()
        if child == 0:
            try:
                for value in range(first, first + 30):
                    save(value, out)
            except BaseException:
                os._exit(1)
            os._exit(0)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0, 0]
    assert number(out) in (129, 229, 329) and names(tmp_path) == ["m.onnx", "m.onnx.data"]


def test_a_failure_leaves_the_old_pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "m.onnx"
    save(1, out)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OutputError, match="No space left"):
        save(2, out)
    assert number(out) == 1 and names(tmp_path) == ["m.onnx", "m.onnx.data"]


def test_file_systems_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    for value in (1, 2):
        save(value, tmp_path / "m.onnx")
        assert number(tmp_path / "m.onnx") == value and names(tmp_path) == ["m.onnx", "m.onnx.data"]


def test_files_with_similar_names_stay(tmp_path: Path) -> None:
    others = [".m.onnx.swp", "m.onnx.bak", ".m.onnx.onnxfuse-notes", "x.m.onnx.onnxfuse-abcdefgh"]
    for name in others:
        (tmp_path / name).write_text("mine")
    (tmp_path / ".m.onnx.onnxfuse-abcdefgh").write_text("of a killed process")
    save(1, tmp_path / "m.onnx")
    assert names(tmp_path) == sorted([*others, "m.onnx", "m.onnx.data"])


@pytest.mark.parametrize("external", [False, True])
def test_a_link_is_written_through(tmp_path: Path, external: bool) -> None:
    (tmp_path / "store").mkdir()
    save(1, tmp_path / "store" / "v1.onnx", external)
    link = tmp_path / "latest.onnx"
    link.symlink_to("store/v1.onnx")
    for value in (2, 3):
        save(value, link, external)
        assert link.is_symlink() and os.readlink(link) == "store/v1.onnx"
        assert number(tmp_path / "store" / "v1.onnx") == number(link) == value
    assert names(tmp_path / "store") == ["v1.onnx", "v1.onnx.data"] if external else ["v1.onnx"]
    assert names(tmp_path) == ["latest.onnx", "store", "v1.onnx.data"] if external else ["latest.onnx", "store"]


def test_a_link_within_the_folder(tmp_path: Path) -> None:
    save(1, tmp_path / "v1.onnx")
    (tmp_path / "latest.onnx").symlink_to("v1.onnx")
    save(2, tmp_path / "latest.onnx")
    assert number(tmp_path / "latest.onnx") == 2 and names(tmp_path) == ["latest.onnx", "v1.onnx", "v1.onnx.data"]


def test_a_data_file_that_is_a_link_is_written_through(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    stored = tmp_path / "disk" / "tensors.bin"
    stored.write_bytes(b"old")
    (tmp_path / "m.onnx.data").symlink_to(stored)
    for value in (1, 2):
        save(value, tmp_path / "m.onnx")
        assert np.frombuffer(stored.read_bytes(), np.float32).tolist() == [value] * (SIZE // 4)
        assert (tmp_path / "m.onnx.data").readlink() == stored
        assert names(tmp_path) == ["disk", "m.onnx", "m.onnx.data"] and names(tmp_path / "disk") == ["tensors.bin"]


def test_a_file_in_the_place_of_the_data_beside_a_link(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    save(1, tmp_path / "store" / "v1.onnx")
    (tmp_path / "latest.onnx").symlink_to("store/v1.onnx")
    (tmp_path / "v1.onnx.data").write_bytes(b"mine")
    with pytest.raises(OutputError, match="is no link to the data"):
        save(2, tmp_path / "latest.onnx")
    assert (tmp_path / "v1.onnx.data").read_bytes() == b"mine" and number(tmp_path / "store" / "v1.onnx") == 1


@pytest.mark.parametrize("target", ["nowhere.onnx", "loop.onnx"])
def test_a_link_to_nothing(tmp_path: Path, target: str) -> None:
    link = tmp_path / "loop.onnx"
    link.symlink_to(target)
    with pytest.raises(OutputError, match=f"is a link to `{target}`, which does not exist"):
        save(1, link)
    with pytest.raises(OutputError, match="which does not exist"):
        write_text(link, "report")
    assert link.is_symlink() and names(tmp_path) == ["loop.onnx"]


def test_a_data_link_to_nothing(tmp_path: Path) -> None:
    (tmp_path / "m.onnx.data").symlink_to("nowhere")
    with pytest.raises(OutputError, match="which does not exist"):
        save(1, tmp_path / "m.onnx")
    save(1, tmp_path / "m.onnx", external=False)
    assert number(tmp_path / "m.onnx") == 1


def test_texts_are_written_through_links(tmp_path: Path) -> None:
    (tmp_path / "real.json").write_text("old")
    (tmp_path / "link.json").symlink_to("real.json")
    write_text(tmp_path / "link.json", "new")
    assert (tmp_path / "real.json").read_text() == "new" and (tmp_path / "link.json").is_symlink()
    assert names(tmp_path) == ["link.json", "real.json"]


def test_tensors_of_subgraphs_stay_in_the_model(tmp_path: Path) -> None:
    """They were outside, and the new file lies elsewhere."""
    weight = np.arange(SIZE // 4, dtype=np.float32)
    branches = {}
    for branch in ("then_branch", "else_branch"):
        tensor = numpy_helper.from_array(weight, f"w_{branch}")
        onnx.external_data_helper.set_external_data(tensor, "w.bin", 0, SIZE)
        tensor.ClearField("raw_data")
        tensor.data_location = TensorProto.EXTERNAL
        out = helper.make_tensor_value_info(f"o_{branch}", TensorProto.FLOAT, [SIZE // 4])
        node = helper.make_node("Neg", [f"w_{branch}"], [f"o_{branch}"])
        branches[branch] = helper.make_graph([node], branch, [], [out], [tensor])
    graph = helper.make_graph(
        [helper.make_node("If", ["c"], ["y"], **branches)], "g",
        [helper.make_tensor_value_info("c", TensorProto.BOOL, [])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [SIZE // 4])],
    )
    (tmp_path / "w.bin").write_bytes(weight.tobytes())
    (tmp_path / "out").mkdir()
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    saving.write(model, tmp_path / "out" / "m.onnx", tmp_path, external_data=True)
    session = onnxruntime.InferenceSession(tmp_path / "out" / "m.onnx", providers=["CPUExecutionProvider"])
    assert (session.run(None, {"c": np.array(True)})[0] == -weight).all()
