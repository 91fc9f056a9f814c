"""bench: what is wrong is not timed, what is right is timed in turns; per-node times; statistics."""

from __future__ import annotations

import copy

import numpy as np
import onnx
import onnx.parser
import pytest

from onnxfuse.bench import Subject, run_case
from onnxfuse.bench.case import difference
from onnxfuse.errors import ModelError
from onnxfuse.runtime.profiling import by_op, nodes_of
from onnxfuse.runtime.timing import Samples, interleaved, ratio


def network() -> onnx.ModelProto:
    text = """
    <ir_version: 8, opset_import: ["" : 17]>
    g (float[n,32] x) => (float[n,32] y) <float[32,32] w>
    { a = MatMul (x, w)  b = Relu (a)  y = Add (b, x) }
    """
    model = onnx.parser.parse_model(text)
    weight = np.random.default_rng(0).standard_normal((32, 32)).astype(np.float32)
    model.graph.initializer.append(onnx.numpy_helper.from_array(weight, "w"))
    del model.graph.value_info[:]
    return model


@pytest.fixture
def feeds() -> dict[str, np.ndarray]:
    return {"x": np.random.default_rng(1).standard_normal((4, 32)).astype(np.float32)}


def test_right_forms_are_timed_and_profiled(feeds: dict) -> None:
    subjects = [Subject("ort-unoptimized", network(), "none"), Subject("ort", network())]
    seen: list[tuple[int, int]] = []
    case = run_case(subjects, feeds, seconds=0.05, profile_runs=3, progress=lambda *p: seen.append(p))
    assert case.correct and case.sizes == {"x": [4, 32]}
    first, base = case.subjects
    assert first.samples and base.samples and len(first.samples.seconds) == len(base.samples.seconds) >= 10
    assert base.ratio is None and first.ratio is not None and first.ratio.low <= first.ratio.value <= first.ratio.high
    assert {n.op for n in first.nodes} == {"MatMul", "Relu", "Add"}
    assert seen[-1][0] == seen[-1][1] >= 10
    assert case.to_json()["subjects"][0]["ops"]


def test_a_wrong_form_is_not_timed(feeds: dict) -> None:
    wrong = network()
    weight = onnx.numpy_helper.to_array(wrong.graph.initializer[0]) * 1.01
    wrong.graph.initializer[0].CopyFrom(onnx.numpy_helper.from_array(weight.astype(np.float32), "w"))
    case = run_case([Subject("ort", network()), Subject("bad", wrong)], feeds, seconds=0.02)
    bad = case.subject("bad")
    assert bad.status == "wrong" and bad.samples is None and "`y` differs by" in bad.reason
    assert case.subject("ort").samples is not None and not case.correct


def test_a_form_that_does_not_run_is_said(feeds: dict) -> None:
    broken = network()
    broken.graph.node[0].domain = "nowhere"
    broken.opset_import.append(onnx.helper.make_opsetid("nowhere", 1))
    case = run_case([Subject("ort", network()), Subject("bad", broken)], feeds, seconds=0.02)
    assert case.subject("bad").status == "refused" and "nowhere" in case.subject("bad").reason


def test_without_a_reference_nothing_is_measured(feeds: dict) -> None:
    with pytest.raises(ModelError):
        run_case([Subject("ort", network())], {"x": feeds["x"][:, :5]}, seconds=0.02)


def test_half_precision_is_judged_by_a_wide_reference() -> None:
    model = copy.deepcopy(network())
    weight = onnx.numpy_helper.to_array(model.graph.initializer[0]).astype(np.float16)
    model.graph.initializer[0].CopyFrom(onnx.numpy_helper.from_array(weight, "w"))
    for value in [*model.graph.input, *model.graph.output]:
        value.type.tensor_type.elem_type = onnx.TensorProto.FLOAT16
    feeds = {"x": np.random.default_rng(1).standard_normal((4, 32)).astype(np.float16)}
    case = run_case([Subject("ort", model)], feeds, seconds=0.02)
    error = case.subject("ort").error
    assert error is not None and 0 < error < 2e-2


def test_difference() -> None:
    a = np.array([1.0, np.nan, np.inf, -4.0], np.float32)
    assert difference(a, a) == 0
    assert difference(np.array([1.0, np.nan, np.inf, -3.0], np.float32), a) == 0.25
    assert difference(np.array([1.0, 0.0, np.inf, -4.0], np.float32), a) == float("inf")
    assert difference(np.array([1, 2]), np.array([1, 3])) == float("inf")
    assert difference(np.empty((0, 3)), np.empty((0, 3))) == 0


def test_variants_take_turns() -> None:
    order: list[str] = []
    found = interleaved(
        {"a": lambda: order.append("a"), "b": lambda: order.append("b")}, seconds=0, warmup=1, min_rounds=4
    )
    assert order == ["a", "b", "a", "b", "b", "a", "a", "b", "b", "a"]
    assert [len(s.seconds) for s in found.values()] == [4, 4]


def test_the_ratio_cancels_drift() -> None:
    old = Samples(tuple(0.1 * (1 + i) for i in range(40)))
    new = Samples(tuple(0.05 * (1 + i) for i in range(40)))
    found = ratio(old, new)
    assert found.value == pytest.approx(0.5) and found.low == pytest.approx(0.5) and found.high == pytest.approx(0.5)


def test_profile_events() -> None:
    def event(name: str, op: str, dur: int) -> dict:
        args = {"op_name": op, "provider": "CPU", "node_index": "0", "output_type_shape": [{"float": [2, 3]}]}
        return {"cat": "Node", "name": f"{name}_kernel_time", "dur": dur, "args": args}

    events = [event("n", "Relu", duration) for duration in (900, 10, 20, 15, 15, 500)]
    events.append({"cat": "Session", "name": "run"})
    (row,) = nodes_of(events, warmup=1)
    assert (row.op, row.milliseconds, row.output) == ("Relu", pytest.approx(0.015), "float[2, 3]")
    assert by_op([row, row])[0].count == 2
