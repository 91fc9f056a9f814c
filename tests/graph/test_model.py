"""Loading and saving: nothing is lost, nothing is half written, bad files get one clear error."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from onnxfuse.errors import ExternalDataError, ModelError, OutputError
from onnxfuse.graph import consts, edit, model, view
from onnxfuse.graph.ir import Constant, Deferred, Node, Variable

TEXT = """
<ir_version: 8, opset_import: ["": 17]>
g (float[B,S,8] x, bool c) => (float[B,S,8] y, float[B,S,8] z)
<float[8] scale = {1,2,3,4,5,6,7,8}>
{
  a = Mul (x, scale)
  y = Relu (a)
  z = If (c) <then_branch = t () => (float[B,S,8] p) { p = Add (a, scale) },
              else_branch = e () => (float[B,S,8] q) { q = Neg (a) }>
}
"""


def parsed() -> onnx.ModelProto:
    return onnx.parser.parse_model(TEXT)


def big_model(folder: Path, value: float = 1.0) -> Path:
    """A model with one external tensor of 64 KiB."""
    weight = numpy_helper.from_array(np.full((128, 128), value, np.float32), "w")
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["B", 128])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["B", 128])],
        [weight],
    )
    path = folder / "big.onnx"
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]),
        path,
        save_as_external_data=True,
        location="big.bin",
        size_threshold=0,
    )
    return path


def test_round_trip_keeps_everything(tmp_path: Path) -> None:
    proto = parsed()
    proto.graph.node[0].metadata_props.add(key="pkg.torch", value="layer.0")
    proto.graph.node[0].doc_string = "where it came from"
    proto.metadata_props.add(key="author", value="someone")
    proto.producer_name = "exporter"
    loaded = model.load(proto)
    loaded.save(tmp_path / "out.onnx")
    back = onnx.load(tmp_path / "out.onnx")
    assert list(back.graph.node) == list(proto.graph.node)
    assert list(back.graph.input) == list(proto.graph.input)
    assert list(back.graph.output) == list(proto.graph.output)
    assert back.metadata_props == proto.metadata_props
    assert (back.producer_name, back.ir_version) == ("exporter", proto.ir_version)


def test_attribute_types_unknown_to_graphsurgeon_survive(tmp_path: Path) -> None:
    kind = helper.make_tensor_type_proto(TensorProto.FLOAT, ["n"])
    graph = helper.make_graph(
        [helper.make_node("Optional", [], ["o"], type=kind), helper.make_node("OptionalHasElement", ["o"], ["y"])],
        "g",
        [],
        [helper.make_tensor_value_info("y", TensorProto.BOOL, [])],
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)])
    back = model.load(proto).to_proto()
    assert back.graph.node[0].attribute[0].tp == kind


def test_captured_values_count_as_read() -> None:
    loaded = model.load(parsed())
    shared = loaded.graph.nodes[0].outputs[0]
    assert [n.op for n in view.consumers(shared)] == ["Relu", "Add", "Neg"]


def test_overridable_initializers_are_no_constants_and_come_back() -> None:
    proto = parsed()
    proto.graph.input.append(helper.make_tensor_value_info("scale", TensorProto.FLOAT, [8]))
    loaded = model.load(proto)
    value = loaded.graph.nodes[0].inputs[1]
    assert isinstance(value, Variable)
    back = loaded.to_proto()
    assert [t.name for t in back.graph.initializer] == ["scale"]
    assert [i.name for i in back.graph.input] == ["x", "c", "scale"]


def test_initializers_listed_as_inputs_before_ir_4_are_constants() -> None:
    proto = parsed()
    proto.ir_version = 3
    proto.graph.input.append(helper.make_tensor_value_info("scale", TensorProto.FLOAT, [8]))
    loaded = model.load(proto)
    assert isinstance(loaded.graph.nodes[0].inputs[1], Constant)


def test_saving_twice_does_not_grow_the_data_file(tmp_path: Path) -> None:
    loaded = model.load(big_model(tmp_path))
    for _ in range(2):
        loaded.save(tmp_path / "out.onnx")
    assert (tmp_path / "out.onnx.data").stat().st_size == 128 * 128 * 4
    onnx.checker.check_model(str(tmp_path / "out.onnx"))


def test_saving_over_an_old_pair_replaces_both(tmp_path: Path) -> None:
    model.load(big_model(tmp_path, 1.0)).save(tmp_path / "out.onnx")
    model.load(big_model(tmp_path, 2.0)).save(tmp_path / "out.onnx")
    back = onnx.load(tmp_path / "out.onnx")
    assert numpy_helper.to_array(back.graph.initializer[0])[0, 0] == 2.0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["big.bin", "big.onnx", "out.onnx", "out.onnx.data"]


def test_a_failed_save_leaves_the_old_file(tmp_path: Path) -> None:
    loaded = model.load(parsed())
    target = tmp_path / "out.onnx"
    target.write_bytes(b"old")

    def fail() -> np.ndarray:
        raise OSError(28, "No space left on device")

    node = loaded.graph.nodes[0]
    node.inputs[1] = Constant("late", Deferred([8], np.dtype(np.float32), fail))
    with pytest.raises(OSError):
        loaded.save(target)
    assert target.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["out.onnx"]


def test_deferred_weights_are_computed_at_the_end() -> None:
    loaded = model.load(parsed())
    calls = []

    def compute() -> np.ndarray:
        calls.append(1)
        return np.arange(8, dtype=np.float32)

    value = Constant(loaded.names.fresh("scale"), Deferred([8], np.dtype(np.float32), compute))
    assert value.name == "scale_1" and consts.shape_of(value) == (8,)
    edit.replace_uses(loaded.graph, loaded.graph.nodes[0].inputs[1], value)
    assert not calls
    back = loaded.to_proto()
    assert calls == [1]
    assert numpy_helper.to_array(back.graph.initializer[0]).tolist() == list(range(8))


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "no such file"), (b"", "holds no ONNX graph"), (b"\x08\x07not a protobuf", "cannot be read"),
     (b"plain text\n" * 9, "cannot be read|no ONNX graph")],
)
def test_files_that_are_no_models(tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "m.onnx"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ModelError, match=message):
        model.load(path)


def test_truncated_file(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(parsed().SerializeToString()[:-40])
    with pytest.raises(ModelError):
        model.load(path)


def test_invalid_graph_names_the_fault(tmp_path: Path) -> None:
    proto = parsed()
    proto.graph.node[0].input[1] = "nowhere"
    with pytest.raises(ModelError, match="nowhere"):
        model.load(proto)


@pytest.mark.parametrize("location", ["../big.bin", "/etc/passwd"])
def test_external_data_may_not_leave_the_folder(tmp_path: Path, location: str) -> None:
    (tmp_path / "sub").mkdir()
    path = big_model(tmp_path / "sub")
    os.replace(tmp_path / "sub/big.bin", tmp_path / "big.bin")
    proto = onnx.load(path, load_external_data=False)
    proto.graph.initializer[0].external_data[0].value = location
    path.write_bytes(proto.SerializeToString())
    with pytest.raises(ExternalDataError, match="leaves the model's folder"):
        model.load(path)


def test_links_to_a_model_and_its_data(tmp_path: Path) -> None:
    """As download caches lay them out."""
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    big_model(tmp_path, 3.0)
    (tmp_path / "big.onnx").rename(tmp_path / "blobs" / "a1")
    (tmp_path / "big.bin").rename(tmp_path / "blobs" / "b2")
    (tmp_path / "snapshot" / "big.onnx").symlink_to("../blobs/a1")
    (tmp_path / "snapshot" / "big.bin").symlink_to("../blobs/b2")
    model.load(tmp_path / "snapshot" / "big.onnx").save(tmp_path / "out.onnx")
    assert numpy_helper.to_array(onnx.load(tmp_path / "out.onnx").graph.initializer[0])[0, 0] == 3.0
    (tmp_path / "secret").write_bytes(bytes(128 * 128 * 4))
    (tmp_path / "snapshot" / "big.bin").unlink()
    (tmp_path / "snapshot" / "big.bin").symlink_to("../secret")
    with pytest.raises(ExternalDataError, match="is missing"):
        model.load(tmp_path / "snapshot" / "big.onnx")


def test_external_data_missing_or_short(tmp_path: Path) -> None:
    path = big_model(tmp_path)
    (tmp_path / "big.bin").write_bytes(b"123")
    with pytest.raises(ExternalDataError, match="has 3 bytes"):
        model.load(path)
    (tmp_path / "big.bin").unlink()
    with pytest.raises(ExternalDataError, match="is missing"):
        model.load(path)


@pytest.mark.parametrize(("key", "value", "says"), [
    ("offset", "-4", "`-4` is no place"), ("length", "many", "`many` is no place"),
    ("length", "7", "7 bytes of external data, its shape needs 65536"), ("offset", "9", "65545 needed"),
])
def test_external_data_whose_place_is_wrong(tmp_path: Path, key: str, value: str, says: str) -> None:
    path = big_model(tmp_path)
    proto = onnx.load(path, load_external_data=False)
    place = proto.graph.initializer[0].external_data
    next(e for e in place if e.key == key).value = value
    path.write_bytes(proto.SerializeToString())
    with pytest.raises(ExternalDataError, match=says):
        model.load(path)


def test_output_folder_must_exist(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="does not exist"):
        model.load(parsed()).save(tmp_path / "nowhere" / "out.onnx")


def test_ops_that_onnx_runtime_has_in_onnx_domain_are_accepted() -> None:
    proto = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 17]>
        g (float[B,8] x) => (float[B,8] y) <float[8] s = {1,1,1,1,1,1,1,1}>
        { y = SimplifiedLayerNormalization <axis=-1, epsilon=1e-6> (x, s) }"""
    )
    assert model.load(proto).graph.nodes[0].op == "SimplifiedLayerNormalization"


def test_domains_of_onnx_runtime_need_not_be_imported(tmp_path: Path) -> None:
    """Its optimizer's `OptimizedModel.model`, saved as it is, names none; its sessions take it."""
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, ["n"]) for n in "xy")
    for domain, accepted in (("com.microsoft", True), ("com.example", False)):
        node = helper.make_node("Gelu", ["x"], ["y"], domain=domain)
        proto = helper.make_model(helper.make_graph([node], "g", [x], [y]), opset_imports=[helper.make_opsetid("", 17)])
        onnx.save(proto, tmp_path / "m.onnx")
        if accepted:
            assert model.load(tmp_path / "m.onnx").opsets == {"": 17, "com.microsoft": 1}
        else:
            with pytest.raises(ModelError, match="No opset import for domain"):
                model.load(tmp_path / "m.onnx")


def test_a_new_node_brings_its_opset_import() -> None:
    loaded = model.load(parsed())
    relu = loaded.graph.nodes[1]
    relu.op, relu.domain = "Gelu", "com.microsoft"
    imports = {o.domain: o.version for o in loaded.to_proto().opset_import}
    assert imports == {"": 17, "com.microsoft": 1}


def test_names_are_unique_over_nodes_and_values() -> None:
    loaded = model.load(parsed())
    loaded.graph.nodes[0].name = "taken"
    names = edit.Names(loaded.graphs())
    assert names.fresh("taken") == "taken_1"
    assert names.fresh("p") == "p_1"  # a value of a subgraph
    assert names.fresh("new") == "new"


def test_equal_nodes_are_not_the_same() -> None:
    a, b = Node("Relu"), Node("Relu")
    assert a != b and len({a, b}) == 2


FUNCTIONS = """<ir_version: 8, opset_import: ["" : 17, "my" : 1]>
g (float[b,4] x, bool c) => (float[b,4] y) <float[4] s = {1, 2, 3, 4}> {
  z = my.leak <slope = 0.3> (x, s)
  y = If (c) <then_branch = t () => (float[b,4] p) { p = my.twice (z, s) },
              else_branch = e () => (float[b,4] q) { q = Neg (z) }>
}
<domain: "my", opset_import: ["" : 17]> leak <slope> (X, S) => (Y) {
  L = LeakyRelu <alpha: float = @slope> (X)
  Y = Add (L, S)
}
<domain: "my", opset_import: ["" : 17, "my" : 1]> twice (X, S) => (Y) {
  M = my.leak <slope = 0.5> (X, S)
  Y = my.leak <slope = 0.25> (M, S)
}"""


def test_functions_are_put_where_they_are_called() -> None:
    proto = onnx.parser.parse_model(FUNCTIONS)
    kept = model.load(proto)
    assert len(kept.functions) == 2 and [n.op for n in kept.graph.nodes] == ["leak", "If"]
    inlined = model.load(proto, inline=True)
    assert not inlined.functions
    found = [n for graph in view.all_graphs(inlined.graph) for n in graph.nodes]
    assert sorted(n.op for n in found) == ["Add"] * 3 + ["If"] + ["LeakyRelu"] * 3 + ["Neg"]
    slopes = sorted(round(float(n.attrs["alpha"]), 2) for n in found if n.op == "LeakyRelu")
    assert slopes == [0.25, 0.3, 0.5]
    onnx.checker.check_model(inlined.to_proto(), full_check=True)


def test_functions_of_ops_with_kernels_stay() -> None:
    text = FUNCTIONS.replace('"my"', '"com.microsoft"').replace("my.", "com.microsoft.")
    assert len(model.load(onnx.parser.parse_model(text), inline=True).functions) == 2


def test_initializers_that_were_inputs_before_ir_4() -> None:
    proto = parsed()
    proto.ir_version = 3
    proto.graph.input.append(helper.make_tensor_value_info("scale", TensorProto.FLOAT, [8]))
    written = model.load(proto).to_proto()
    assert [i.name for i in written.graph.input] == ["x", "c"] and written.ir_version == 4
    onnx.checker.check_model(written, full_check=True)


def test_tensors_of_any_rank() -> None:
    proto = parsed()
    proto.graph.input[0].type.tensor_type.ClearField("shape")
    proto.graph.output[0].type.tensor_type.ClearField("shape")
    written = model.load(proto).to_proto()
    assert not written.graph.input[0].type.tensor_type.HasField("shape")
    assert not written.graph.output[0].type.tensor_type.HasField("shape")


def test_sequences_and_optionals_keep_their_types() -> None:
    tensor = helper.make_tensor_type_proto(TensorProto.FLOAT, None)
    types = helper.make_optional_type_proto(tensor), helper.make_sequence_type_proto(tensor)
    graph = helper.make_graph(
        [helper.make_node("OptionalGetElement", ["o"], ["x"]), helper.make_node("SplitToSequence", ["x"], ["q"])],
        "g", [helper.make_value_info("o", types[0])], [helper.make_value_info("q", types[1])],
    )  # fmt: skip
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    written = model.load(proto).to_proto()
    assert written.graph.input[0] == proto.graph.input[0] and written.graph.output[0] == proto.graph.output[0]


def test_large_computed_weights_are_written_one_after_the_other(tmp_path: Path) -> None:
    size = consts.KEPT_WHILE_USED // 4
    loaded = model.load(parsed())
    calls: list[int] = []

    def compute() -> np.ndarray:
        calls.append(1)
        return np.arange(size, dtype=np.float32)

    value = Constant(loaded.names.fresh("big"), Deferred([size], np.dtype(np.float32), compute))
    edit.replace_uses(loaded.graph, loaded.graph.nodes[0].inputs[1], value)
    pending: dict[str, Constant] = {}
    proto = loaded.to_proto(pending)
    assert not calls and list(pending) == [value.name]
    assert not proto.graph.initializer[0].raw_data and list(proto.graph.initializer[0].dims) == [size]
    for external in (True, False):
        calls.clear()
        loaded.save(tmp_path / "out.onnx", external_data=external)
        back = onnx.load(tmp_path / "out.onnx")
        assert calls == [1], "computed once for a file, and not kept"
        assert np.array_equal(numpy_helper.to_array(back.graph.initializer[0]), np.arange(size, dtype=np.float32))
    first = consts.array(value)
    assert consts.array(value) is first, "shared while it is in use"
