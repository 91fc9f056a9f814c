"""Sessions of plain and fused models, and running any dtype."""

from __future__ import annotations

import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import onnxfuse
from onnxfuse.errors import InputDataError, ModelError, RuntimeMissingError
from onnxfuse.runtime.session import Runner, grants_int8, make_options, ort, with_exact_products


def cast_model(source: int, to: int) -> onnx.ModelProto:
    x, y = helper.make_tensor_value_info("x", source, ["n"]), helper.make_tensor_value_info("y", to, ["n"])
    graph = helper.make_graph([helper.make_node("Cast", ["x"], ["y"], to=to)], "g", [x], [y])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def test_bfloat16_in_and_out() -> None:
    values = np.array([1.5, -2.0, 0.0], np.float32)
    narrow = Runner(cast_model(TensorProto.FLOAT, TensorProto.BFLOAT16)).run({"x": values})["y"]
    assert narrow.dtype == ml_dtypes.bfloat16
    back = Runner(cast_model(TensorProto.BFLOAT16, TensorProto.FLOAT)).run({"x": narrow})["y"]
    assert np.array_equal(back, values)
    empty = Runner(cast_model(TensorProto.FLOAT, TensorProto.BFLOAT16)).run({"x": values[:0]})["y"]
    assert empty.shape == (0,)


def test_inputs_that_the_model_lacks_are_ignored() -> None:
    model = cast_model(TensorProto.FLOAT, TensorProto.DOUBLE)
    assert Runner(model).run({"x": np.ones(2, np.float32), "gone": np.ones(1)})["y"].dtype == np.float64


def test_refusals_are_model_errors(tmp_path: Path) -> None:
    model = cast_model(TensorProto.FLOAT, TensorProto.DOUBLE)
    with pytest.raises(ModelError, match="ONNX Runtime failed"):
        Runner(model).run({"x": np.ones((2, 2), np.float32)})
    model.graph.node[0].op_type = "NoSuchOp"
    with pytest.raises(ModelError, match="NoSuchOp"):
        Runner(model)
    onnx.save(model, tmp_path / "bad.onnx")
    with pytest.raises(ModelError, match="NoSuchOp"):
        onnxfuse.session(tmp_path / "bad.onnx", ["cpu"])


def test_session_of_a_file(tmp_path: Path) -> None:
    onnx.save(cast_model(TensorProto.FLOAT, TensorProto.DOUBLE), tmp_path / "m.onnx")
    session = onnxfuse.session(tmp_path / "m.onnx", ["cpu"], intra_op_num_threads=1)
    assert session.get_providers() == ["CPUExecutionProvider"]
    assert session.run(None, {"x": np.ones(1, np.float32)})[0].dtype == np.float64


def test_wrong_arguments(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such file"):
        onnxfuse.session(tmp_path / "missing.onnx")
    onnx.save(cast_model(TensorProto.FLOAT, TensorProto.DOUBLE), tmp_path / "m.onnx")
    with pytest.raises(RuntimeMissingError, match="no provider `NoProvider`"):
        onnxfuse.session(tmp_path / "m.onnx", ["NoProvider"])
    with pytest.raises(InputDataError, match="`no_option` is not an option"):
        onnxfuse.session(tmp_path / "m.onnx", ["cpu"], no_option=1)
    with pytest.raises(InputDataError, match="unknown optimization level `some`"):
        make_options("some")
    with pytest.raises(RuntimeMissingError, match="no custom-op library at"):
        make_options(with_library=False, custom_ops=[tmp_path / "lib.so"])


def test_elements_of_a_sequence_come_one_by_one() -> None:
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 2])
    q = helper.make_tensor_sequence_value_info("q", TensorProto.FLOAT, None)
    graph = helper.make_graph([helper.make_node("SplitToSequence", ["x"], ["q"], axis=0)], "g", [x], [q])
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    values = np.arange(4, dtype=np.float32).reshape(2, 2)
    found = Runner(proto).run({"x": values})
    assert list(found) == ["q[0]", "q[1]"] and np.array_equal(found["q[1]"], values[1:])


def test_an_interrupt_while_the_runtime_is_imported_is_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "onnxruntime.py").write_text("raise ImportError('initialization failed') from KeyboardInterrupt()\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "onnxruntime", raising=False)
    with pytest.raises(KeyboardInterrupt):
        ort()


def test_products_are_exact_wherever_they_stand() -> None:
    def product(level: int) -> onnx.NodeProto:
        return helper.make_node("MatMulNBits", ["x", "q", "s"], ["y"], domain="com.microsoft", accuracy_level=level)

    branch = helper.make_graph([product(4)], "then", [], [])
    function = helper.make_function("own", "F", ["x"], ["y"], [product(3)], [helper.make_opsetid("com.microsoft", 1)])
    nodes = [product(1), helper.make_node("If", ["c"], ["z"], then_branch=branch, else_branch=branch)]
    model = helper.make_model(helper.make_graph(nodes, "g", [], []), functions=[function])
    before = model.SerializeToString()
    assert grants_int8(model)
    exact = with_exact_products(model)
    assert not grants_int8(exact) and model.SerializeToString() == before
    assert exact.graph.node[0] == model.graph.node[0]  # float32 is what level 1 says
    assert with_exact_products(exact) is exact
