"""Inputs that a user gives: shapes and .npz files."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from onnxfuse.errors import InputDataError, OutputError
from onnxfuse.runtime.archive import load_npz, parse_shapes, save_npz
from onnxfuse.runtime.feeds import InputSpec

SPECS = [InputSpec("x", np.dtype(np.float32), ("b", 4)), InputSpec("ids", np.dtype(np.int64), ("b",))]


def values(batch: int) -> dict[str, np.ndarray]:
    return {"x": np.full((batch, 4), 0.5, np.float32), "ids": np.arange(batch)}


@pytest.mark.parametrize("text", ["x:1,3,4", "x:[1,3,4]", "x:1x3x4"])
def test_shapes(text: str) -> None:
    assert parse_shapes([text]) == {"x": (1, 3, 4)}


def test_a_name_may_hold_a_colon() -> None:
    assert parse_shapes(["serving:0:2,3"]) == {"serving:0": (2, 3)}


@pytest.mark.parametrize("text", ["x", "x:a,b", ":1,2", "x:1,-1"])
def test_bad_shapes(text: str) -> None:
    with pytest.raises(InputDataError, match=f"`{text}` is not an input shape"):
        parse_shapes([text])


def test_what_was_saved_is_read(tmp_path: Path) -> None:
    save_npz(tmp_path / "one.npz", [values(2)])
    save_npz(tmp_path / "two.npz", [values(2), values(3)])
    assert [v["x"].shape[0] for v in load_npz(tmp_path / "one.npz", SPECS)] == [2]
    assert [v["x"].shape[0] for v in load_npz(tmp_path / "two.npz", SPECS)] == [2, 3]
    with np.load(tmp_path / "two.npz") as stored:
        assert sorted(stored.files) == ["set0/in/ids", "set0/in/x", "set1/in/ids", "set1/in/x"]


def test_bfloat16_survives(tmp_path: Path) -> None:
    spec = InputSpec("x", np.dtype(ml_dtypes.bfloat16), ("b",))
    given = np.arange(5).astype(ml_dtypes.bfloat16)
    save_npz(tmp_path / "x.npz", [{"x": given}])
    (found,) = load_npz(tmp_path / "x.npz", [spec])
    assert found["x"].dtype == ml_dtypes.bfloat16 and np.array_equal(found["x"], given)


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    save_npz(path, [{"x": values(2)["x"]}])
    with pytest.raises(InputDataError, match="no values for input `ids`"):
        load_npz(path, SPECS)
    save_npz(path, [values(2) | {"ids": np.arange(2, dtype=np.int32)}])
    with pytest.raises(InputDataError, match="input `ids` is `int32`, the model needs `int64`"):
        load_npz(path, SPECS)
    save_npz(path, [values(2) | {"x": np.zeros((2, 5), np.float32)}])
    with pytest.raises(InputDataError, match=r"input `x` has shape \[2, 5\]"):
        load_npz(path, SPECS)
    path.write_text("no archive")
    with pytest.raises(InputDataError, match="cannot be read"):
        load_npz(path, SPECS)
    with pytest.raises(InputDataError, match="no such file"):
        load_npz(tmp_path / "missing.npz", SPECS)


def test_a_folder_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="cannot write"):
        save_npz(tmp_path / "no" / "x.npz", [values(1)])


def test_one_array_without_a_name(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros(3))
    with pytest.raises(InputDataError, match="holds one array without a name"):
        load_npz(tmp_path / "x.npy", [])
