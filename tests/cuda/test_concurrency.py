"""CUDA graphs, threads, sessions side by side."""

from __future__ import annotations

import threading

import numpy as np
import onnxruntime as ort
import pytest

from onnxfuse.runtime import gpu
from tests.cuda.gpu_case import LIMIT, GpuCase
from tests.ops.cases import relative_error


def repeat_in_threads(times: int, work: list[tuple[ort.InferenceSession, dict[str, np.ndarray], np.ndarray]]) -> None:
    """One thread for each (session, feeds, expected bits)."""
    failures: list[str] = []

    def repeat(index: int) -> None:
        session, feeds, expected = work[index]
        try:
            for _ in range(times):
                if not np.array_equal(session.run(None, feeds)[0], expected):
                    failures.append(f"thread {index}: other bits")
                    return
        except Exception as error:  # a thread's exception would not fail the test
            failures.append(f"thread {index}: {error}")

    threads = [threading.Thread(target=repeat, args=(i,)) for i in range(len(work))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


@pytest.mark.parametrize("rows", (1, 16, 130, 300))
@pytest.mark.parametrize("norm", ("none", "rms", "layer"))
def test_cuda_graph_follows_its_inputs(norm: str, rows: int) -> None:
    case = GpuCase("Linear", "float16", 512, 256, {"norm": norm, "activation": "silu"})
    session = case.session(graph=True)
    x = ort.OrtValue.ortvalue_from_numpy(case.inputs(rows)[0], "cuda", 0)
    y = ort.OrtValue.ortvalue_from_shape_and_type([rows, 256], np.float16, "cuda", 0)
    binding = session.io_binding()
    binding.bind_ortvalue_input("x", x)
    binding.bind_ortvalue_output(session.get_outputs()[0].name, y)
    for seed in range(5):
        inputs = case.inputs(rows, seed)
        x.update_inplace(inputs[0])
        session.run_with_iobinding(binding)
        assert relative_error(y.numpy(), case.reference(inputs)) <= LIMIT["float16"], f"replay {seed}"


def test_eight_threads_on_one_session() -> None:
    case = GpuCase("Linear", "float16", 512, 384, {"norm": "layer", "activation": "gelu"})
    session = case.session()
    work = [case.feeds(case.inputs(rows, rows)) for rows in (1, 7, 16, 33, 64, 130, 200, 300)]
    expected = [session.run(None, feeds)[0] for feeds in work]
    repeat_in_threads(200, [(session, feeds, y) for feeds, y in zip(work, expected, strict=True)])


def test_two_sessions_at_once() -> None:
    cases = [GpuCase(name, "float16", 1024, 512, {"norm": "rms"}) for name in ("Linear", "GatedLinear")]
    sessions = [case.session() for case in cases]
    feeds = [case.feeds(case.inputs(200)) for case in cases]
    expected = [session.run(None, feed)[0] for session, feed in zip(sessions, feeds, strict=True)]
    repeat_in_threads(100, list(zip(sessions, feeds, expected, strict=True)))


@pytest.mark.parametrize("rows", (1, 16, 130, 300))
def test_two_gpus_in_one_process(rows: int) -> None:
    """The same bits on both, one after the other and at once; what is kept for a device is kept for each."""
    if len(gpu.devices()) < 2:
        pytest.skip("there is one GPU only")
    cases = [GpuCase(name, "float16", 1024, 512, {"norm": "layer"}) for name in ("Linear", "GatedLinear")]
    for case in cases:
        feed = case.feeds(case.inputs(rows))
        sessions = [case.session(device=device) for device in (0, 1)]
        found = [session.run(None, feed)[0] for session in sessions]
        assert relative_error(found[1], case.reference(case.inputs(rows))) <= LIMIT["float16"]
        assert np.array_equal(found[0], found[1])
        repeat_in_threads(100, [(session, feed, found[0]) for session in sessions])


@pytest.mark.parametrize("rows", (1, 130))
def test_first_runs_at_the_same_time(rows: int) -> None:
    """Nothing that is set up on first use may depend on who comes first."""
    cases = [GpuCase("Linear", "bfloat16", 640 + 64 * i, 256, {"norm": "rms"}) for i in range(4)]
    feeds = [case.feeds(case.inputs(rows)) for case in cases]
    expected = [case.reference(case.inputs(rows)) for case in cases]
    sessions = [case.session() for case in cases]
    errors = [1.0] * len(cases)

    def first(index: int) -> None:
        errors[index] = relative_error(sessions[index].run(None, feeds[index])[0], expected[index])

    threads = [threading.Thread(target=first, args=(i,)) for i in range(len(cases))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(errors) <= LIMIT["bfloat16"]


def test_a_chain_of_ops_reads_each_others_results() -> None:
    """Kernels start before their predecessors end; a value must not be read before it is written."""
    from onnx import TensorProto, helper, numpy_helper

    rng = np.random.default_rng(5)
    nodes, initializers, name = [], [], "x"
    for i in range(24):
        weight = (rng.standard_normal((512, 512)) / 512**0.5).astype(np.float16)
        initializers.append(numpy_helper.from_array(weight, f"w{i}"))
        nodes.append(helper.make_node("Linear", [name, f"w{i}"], [f"h{i}"], domain="onnxfuse", norm="rms"))
        name = f"h{i}"
    value = helper.make_tensor_value_info
    graph = helper.make_graph(nodes, "chain", [value("x", TensorProto.FLOAT16, ["rows", 512])],
                              [value(name, TensorProto.FLOAT16, ["rows", 512])], initializers)
    model = helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 20),
                                                                   helper.make_opsetid("onnxfuse", 1)])
    from tests.cuda.gpu_case import cuda_session

    session = cuda_session(model)
    for rows in (1, 16, 130, 300):
        x = rng.standard_normal((rows, 512)).astype(np.float16)
        expected = x.astype(np.float64)
        for tensor in initializers:
            expected = expected / np.sqrt((expected**2).mean(1, keepdims=True) + 1e-5)
            expected = (expected @ numpy_helper.to_array(tensor).astype(np.float64).T).astype(np.float16).astype(float)
        for _ in range(10):
            assert relative_error(session.run(None, {"x": x})[0], expected) <= 2e-2
