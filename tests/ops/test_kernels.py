"""The CPU kernels of the custom-op library, against the float64 references of the registry."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from onnx import helper
from onnx.reference import ReferenceEvaluator

from onnxfuse.ops import functions, registry
from onnxfuse.ops.activations import ACTIVATIONS
from onnxfuse.ops.norms import NORMS
from onnxfuse.ops.opdef import OpDef
from onnxfuse.runtime import library
from tests.ops.cases import NUMPY, as_feed, library_session, normal, one_node_model, relative_error, through_float32

DTYPES = ("float32", "float16", "bfloat16")
LAYOUTS = ("NK", "KN")
ROWS = (1, 5, 16, 0)
SIZES = ((37, 22), (64, 96))  # (K, N): odd, and aligned


class Case:
    """One node of an op with any number of rows: the fused model, its unfused form, and inputs for both."""

    def __init__(
        self,
        op: OpDef,
        dtype: str,
        attrs: dict[str, Any],
        size: tuple[int, int],
        *,
        bias: bool = True,
        residual: bool = False,
        constant: bool = True,
        scale: float = 1.0,
    ) -> None:
        self.op, self.dtype, self.attrs = op, dtype, attrs
        self.k, self.n = size
        self.residual, self.scale = residual, scale
        rng = np.random.default_rng(7)
        shape = (self.n, self.k) if attrs.get("layout", "NK") == "NK" else (self.k, self.n)
        self.weight = normal(rng, shape, dtype, max(self.k, 1) ** -0.5)
        self.bias = normal(rng, (self.n,), dtype) if bias else None
        self.constants = ("weight", "bias") if constant else ()
        shapes: dict[str, Sequence[int | str]] = {"x": ["rows", self.k], "residual": ["rows", self.n]}
        self.model = one_node_model(op, self.inputs(2), attrs, constants=self.constants, shapes=shapes)

    def inputs(self, rows: int, seed: int = 0) -> list[np.ndarray | None]:
        rng = np.random.default_rng(100 + seed)
        result = [normal(rng, (rows, self.k), self.dtype, self.scale), self.weight, self.bias]
        if self.op.name == "Linear":
            result.append(normal(rng, (rows, self.n), self.dtype, self.scale) if self.residual else None)
        return result

    def feeds(self, inputs: Sequence[np.ndarray | None]) -> dict[str, np.ndarray]:
        named = zip(self.op.inputs, inputs, strict=False)
        return {s.name: as_feed(a) for s, a in named if a is not None and s.name not in self.constants}

    def session(self, threads: int = 1) -> ort.InferenceSession:
        return library_session(through_float32(self.model), threads)

    def unfused(self, inputs: Sequence[np.ndarray | None]) -> np.ndarray:
        """The function body in T: by ONNX Runtime, or for bfloat16 (no CPU kernels there) by ONNX's reference."""
        model = functions.attach_functions(self.model)
        feeds = self.feeds(inputs)
        if self.dtype == "bfloat16":
            typed = {name: array.astype(NUMPY[self.dtype]) for name, array in feeds.items()}
            return np.asarray(ReferenceEvaluator(model).run(None, typed)[0]).astype(np.float64)
        options = ort.SessionOptions()
        options.log_severity_level = 4
        options.intra_op_num_threads = 1
        session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        return np.asarray(session.run(None, feeds)[0]).astype(np.float64)

    def check(self, session: ort.InferenceSession, rows: int) -> None:
        inputs = self.inputs(rows)
        expected = self.op.reference(inputs, self.attrs)[0]
        actual = session.run(None, self.feeds(inputs))[0]
        assert actual.shape == expected.shape
        if expected.size == 0:
            return
        error = relative_error(actual, expected)
        allowed = self.op.tolerance.factor * relative_error(self.unfused(inputs), expected)
        assert error <= allowed + self.op.tolerance.floor[self.dtype]


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_linear(dtype: str, activation: str, norm: str) -> None:
    op = registry.get("onnxfuse", "Linear")
    for i, (layout, bias, residual) in enumerate(itertools.product(LAYOUTS, (False, True), (False, True))):
        attrs = {"layout": layout, "activation": activation, "norm": norm, "epsilon": 1e-6}
        case = Case(op, dtype, attrs, SIZES[i % 2], bias=bias, residual=residual, constant=i % 3 != 0)
        session = case.session()
        for rows in ROWS:
            case.check(session, rows)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gated_linear(dtype: str, activation: str, norm: str) -> None:
    op = registry.get("onnxfuse", "GatedLinear")
    for i, (layout, bias, interleave) in enumerate(itertools.product(LAYOUTS, (False, True), (0, 1, 8))):
        attrs = {"layout": layout, "activation": activation, "norm": norm, "interleave": interleave}
        case = Case(op, dtype, attrs, (37, 22) if interleave < 8 else (64, 96), bias=bias, constant=i % 2 == 0)
        session = case.session()
        for rows in ROWS:
            case.check(session, rows)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("name", "interleave"), [("Linear", 0), ("GatedLinear", 0), ("GatedLinear", 600), ("GatedLinear", 1500)]
)
def test_several_threads_and_wide_rows(name: str, interleave: int, dtype: str, layout: str) -> None:
    attrs: dict[str, Any] = {"layout": layout, "activation": "gelu", "norm": "rms"}
    if name == "GatedLinear":
        attrs["interleave"] = interleave
    case = Case(registry.get("onnxfuse", name), dtype, attrs, (130, 6000), residual=name == "Linear")
    session = case.session(threads=3)
    for rows in (1, 7, 67):
        case.check(session, rows)


@pytest.mark.parametrize("name", ["Linear", "GatedLinear"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_empty_dimensions(name: str, layout: str) -> None:
    op = registry.get("onnxfuse", name)
    for k, n in ((0, 6), (5, 0), (0, 0)):
        for norm in NORMS:
            case = Case(op, "float32", {"layout": layout, "norm": norm}, (k, n), residual=name == "Linear")
            inputs = case.inputs(3)
            actual = case.session().run(None, case.feeds(inputs))[0]
            np.testing.assert_allclose(actual, op.reference(inputs, case.attrs)[0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("shape", [(37,), (2, 37), (2, 3, 37), (1, 2, 3, 37), (2, 0, 37)])
def test_any_rank(shape: tuple[int, ...]) -> None:
    op = registry.get("onnxfuse", "Linear")
    rng = np.random.default_rng(3)
    x, weight = normal(rng, shape, "float32"), normal(rng, (22, 37), "float32")
    session = library_session(one_node_model(op, [x, weight], {}))
    actual = session.run(None, {"x": x, "weight": weight})[0]
    expected = op.reference([x, weight])[0]
    assert actual.shape == expected.shape == (*shape[:-1], 22)
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("norm", ["rms", "layer"])
@pytest.mark.parametrize(
    ("dtype", "scale"), [("float16", 2e4), ("bfloat16", 1e18), ("float32", 1e18), ("float16", 6e-8)]
)
def test_huge_and_tiny_rows_keep_their_norm(dtype: str, scale: float, norm: str) -> None:
    op = registry.get("onnxfuse", "Linear")
    rng = np.random.default_rng(5)
    x = normal(rng, (4, 64), dtype, scale)
    weight = normal(rng, (96, 64), dtype, 0.1)
    attrs = {"norm": norm, "epsilon": 1e-5}
    model = through_float32(one_node_model(op, [x, weight], attrs, constants=["weight"]))
    actual = library_session(model).run(None, {"x": as_feed(x)})[0]
    assert relative_error(actual, op.reference([x, weight], attrs)[0]) <= 2 * op.tolerance.floor[dtype]


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_activations_over_their_whole_range(dtype: str, activation: str) -> None:
    # With an identity weight the op is the activation alone; the unfused form decides about the infinities and NaN.
    op = registry.get("onnxfuse", "Linear")
    values = np.concatenate([np.linspace(-12, 12, 4001), [-6e4, -100, -20, 0, -0.0, 1e-7, 20, 100, 6e4]])
    special = np.array([np.inf, -np.inf, np.nan])
    x = np.concatenate([values, special]).astype(NUMPY[dtype])[:, None]
    weight = np.ones((1, 1), NUMPY[dtype])
    attrs = {"activation": activation}
    actual = library_session(one_node_model(op, [x, weight], attrs)).run(None, {"x": x, "weight": weight})[0]
    expected = op.reference([x, weight], attrs)[0]
    np.testing.assert_array_equal(np.isnan(actual[-3:]), np.isnan(expected[-3:]))
    np.testing.assert_array_equal(actual[-3:][~np.isnan(expected[-3:])], expected[-3:][~np.isnan(expected[-3:])])
    ulp = {"float32": 2.0**-23, "float16": 2.0**-10}[dtype]
    # Absolute below 1, relative above: 1 + erf(x) and its like cancel, in any form of these functions.
    error = np.abs(actual[:-3].astype(np.float64) - expected[:-3]) / np.maximum(np.abs(expected[:-3]), 1)
    assert error.max() <= 8 * ulp


@pytest.mark.parametrize("name", ["Linear", "GatedLinear"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nan_and_infinity_stay_in_their_row(name: str, bad: float) -> None:
    case = Case(registry.get("onnxfuse", name), "float32", {"activation": "relu", "layout": "KN"}, (64, 96))
    inputs = case.inputs(16)
    session = case.session()
    clean = session.run(None, case.feeds(inputs))[0]
    assert inputs[0] is not None
    inputs[0][3, 5] = bad
    dirty = session.run(None, case.feeds(inputs))[0]
    expected = case.op.reference(inputs, case.attrs)[0]
    np.testing.assert_array_equal(np.isnan(dirty), np.isnan(expected))
    assert not np.isfinite(dirty[3]).all()
    np.testing.assert_array_equal(np.delete(dirty, 3, 0), np.delete(clean, 3, 0))


def test_runs_are_identical() -> None:
    case = Case(registry.get("onnxfuse", "Linear"), "float16", {"activation": "gelu", "norm": "layer"}, (64, 96))
    session, feeds = case.session(threads=3), case.feeds(case.inputs(200))
    first = session.run(None, feeds)[0]
    for _ in range(20):
        np.testing.assert_array_equal(session.run(None, feeds)[0], first)


@pytest.mark.parametrize("name", ["Linear", "GatedLinear"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_one_session_on_eight_threads(name: str, dtype: str) -> None:
    case = Case(registry.get("onnxfuse", name), dtype, {"activation": "silu", "norm": "rms"}, (64, 96))
    session = case.session(threads=2)
    feeds = [case.feeds(case.inputs(rows, rows)) for rows in range(1, 9)]
    expected = [session.run(None, f)[0] for f in feeds]
    wrong: list[int] = []

    def work(index: int) -> None:
        for _ in range(40):
            if not np.array_equal(session.run(None, feeds[index])[0], expected[index]):
                wrong.append(index)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def bad_model(name: str, shapes: dict[str, list[Any] | None], attrs: dict[str, Any], dtypes: dict[str, int]) -> Any:
    inputs = [helper.make_tensor_value_info(n, dtypes.get(n, 1), s) for n, s in shapes.items()]
    order = [s.name for s in registry.get("onnxfuse", name).inputs]
    names = [n if n in shapes else "" for n in order[: 1 + max(order.index(n) for n in shapes)]]
    node = helper.make_node(name, names, ["y"], name="culprit", domain="onnxfuse", **attrs)
    graph = helper.make_graph([node], "g", inputs, [helper.make_tensor_value_info("y", 1, None)])
    return helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 18), helper.make_opsetid("onnxfuse", 1)], ir_version=10
    )


BAD_SHAPES: list[tuple[str, dict[str, list[Any]], dict[str, Any], str]] = [
    ("Linear", {"x": [2, 3], "weight": [4, 5]}, {}, "last dim of `x`"),
    ("Linear", {"x": [2, 3], "weight": [4, 3]}, {"layout": "KN"}, "last dim of `x`"),
    ("Linear", {"x": [2, 3], "weight": [4, 3, 1]}, {}, "`weight` must have rank 2"),
    ("Linear", {"x": [2, 3], "weight": [4, 3], "bias": [3]}, {}, "`bias` must have one element"),
    ("Linear", {"x": [2, 3], "weight": [4, 3], "bias": [1, 4]}, {}, "`bias` must have rank 1"),
    ("Linear", {"x": [2, 3], "weight": [4, 3], "residual": [1, 4]}, {}, "`residual` must have exactly"),
    ("Linear", {"x": [2, 3], "weight": [4, 3], "residual": [4]}, {}, "`residual` must have exactly"),
    ("Linear", {"x": [2, 3], "weight": [4, 3], "colsum": [5]}, {}, "`colsum` must have one element"),
    ("GatedLinear", {"x": [2, 3], "weight": [5, 3]}, {}, "even number"),
    ("GatedLinear", {"x": [2, 3], "weight": [8, 3]}, {"interleave": 3}, "not divisible by interleave"),
    ("GatedLinear", {"x": [2, 3], "weight": [8, 3], "bias": [4]}, {}, "`bias` must have one element"),
]


@pytest.mark.parametrize(("name", "shapes", "attrs", "why"), BAD_SHAPES)
def test_bad_shapes_are_refused_when_the_session_is_created(
    name: str, shapes: dict[str, list[Any]], attrs: dict[str, Any], why: str
) -> None:
    with pytest.raises(Exception, match=rf"onnxfuse::{name} node `culprit`.*{why}.*x float32\[2,3\]"):
        library_session(bad_model(name, dict(shapes), attrs, {}))


@pytest.mark.parametrize(("name", "shapes", "attrs", "why"), BAD_SHAPES)
def test_bad_shapes_are_refused_when_it_runs(
    name: str, shapes: dict[str, list[Any]], attrs: dict[str, Any], why: str
) -> None:
    session = library_session(bad_model(name, dict.fromkeys(shapes), attrs, {}))
    feeds = {n: np.zeros(s, np.float32) for n, s in shapes.items()}
    with pytest.raises(Exception, match=rf"onnxfuse::{name} node `culprit`.*{why}.*x float32\[2,3\]"):
        session.run(None, feeds)


def test_scalar_is_refused_when_it_runs() -> None:
    session = library_session(bad_model("Linear", {"x": None, "weight": None}, {}, {}))
    with pytest.raises(Exception, match="`x` must have rank 1 or more"):
        session.run(None, {"x": np.zeros((), np.float32), "weight": np.zeros((4, 1), np.float32)})


@pytest.mark.parametrize(
    ("attrs", "why"),
    [
        ({"activation": "swish"}, "attribute `activation` is `swish`"),
        ({"activation": 3}, "attribute `activation` has the wrong type"),
        ({"layout": "nk"}, "attribute `layout` is `nk`"),
        ({"norm": "batch"}, "attribute `norm` is `batch`"),
        ({"epsilon": -1.0}, "attribute `epsilon` is negative"),
        ({"epsilon": 1}, "attribute `epsilon` has the wrong type"),
    ],
)
def test_bad_attributes_are_refused(attrs: dict[str, Any], why: str) -> None:
    with pytest.raises(Exception, match=f"node `culprit`.*{why}"):
        library_session(bad_model("Linear", {"x": [2, 3], "weight": [4, 3]}, attrs, {}))


@pytest.mark.parametrize("dtypes", [{"weight": 10}, {"x": 11, "weight": 11}, {"x": 7, "weight": 7}])
def test_dtypes_without_a_kernel_are_refused(dtypes: dict[str, int]) -> None:
    with pytest.raises(Exception, match="Linear"):
        library_session(bad_model("Linear", {"x": [2, 3], "weight": [4, 3]}, {}, dtypes))


def test_output_shape_keeps_the_names_of_dims() -> None:
    model = bad_model("Linear", {"x": ["batch", "length", 3], "weight": [4, 3]}, {}, {})
    assert library_session(model).get_outputs()[0].shape == ["batch", "length", 4]


def test_unknown_dims_without_a_name_do_not_become_sizes() -> None:
    model = bad_model("Linear", {"x": [None, None, 3], "weight": [4, 3]}, {}, {})
    shape = helper.make_node("Shape", ["y"], ["shape"])
    again = helper.make_node("Reshape", ["y", "shape"], ["z"])
    model.graph.node.extend([shape, again])
    model.graph.output[0].name = "z"
    x, weight = np.ones((2, 5, 3), np.float32), np.ones((4, 3), np.float32)
    assert library_session(model).run(None, {"x": x, "weight": weight})[0].shape == (2, 5, 4)


@pytest.mark.parametrize("op", registry.fused_ops(), ids=lambda op: op.name)
def test_every_dtype_of_the_registry_has_a_cpu_kernel(op: OpDef) -> None:
    for dtype in op.kernels["cpu"]:
        case = Case(op, dtype, {}, (8, 6))
        assert case.session().run(None, case.feeds(case.inputs(2)))[0].shape[0] == 2


def test_registry_and_library_have_the_same_kernels() -> None:
    provider_of = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
    built = {(o["name"], o["provider"], o["dtype"]) for o in library.build_info()["ops"]}
    promised = {
        (op.name, provider_of[target], dtype)
        for op in registry.fused_ops()
        for target, dtypes in op.kernels.items()
        for dtype in dtypes
    }
    # A library built without CUDA lacks those kernels as a whole, and nothing else.
    providers = {provider for _, provider, _ in built}
    assert built == {entry for entry in promised if entry[1] in providers}
    assert "CPUExecutionProvider" in providers
