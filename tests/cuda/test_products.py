"""Linear and GatedLinear on the GPU against float64, over every regime of the dispatch."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from onnxfuse.ops.activations import ACTIVATIONS
from onnxfuse.ops.norms import NORMS
from tests.cuda.gpu_case import LIMIT, GpuCase
from tests.ops.cases import one_node_model, relative_error

DTYPES = ("float32", "float16", "bfloat16")
OPS = ("Linear", "GatedLinear")


def check(case: GpuCase, rows: tuple[int, ...]) -> None:
    session = case.session()
    for count in rows:
        inputs = case.inputs(count)
        actual = session.run(None, case.feeds(inputs))[0]
        expected = case.reference(inputs)
        assert actual.shape == expected.shape
        if expected.size:
            assert relative_error(actual, expected) <= LIMIT[case.dtype], f"{count} rows"


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPS)
def test_every_epilogue(name: str, dtype: str, norm: str, activation: str) -> None:
    attrs: dict[str, Any] = {"norm": norm, "activation": activation}
    case = GpuCase(name, dtype, 264, 136, attrs, residual=name == "Linear", mean=2.0 if norm == "layer" else 0.0)
    check(case, (1, 5, 17, 40, 130, 300))


@pytest.mark.parametrize("layout", ("NK", "KN"))
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPS)
def test_odd_sizes_and_layouts(name: str, dtype: str, norm: str, layout: str) -> None:
    attrs = {"norm": norm, "activation": "silu", "layout": layout}
    check(GpuCase(name, dtype, 37, 22, attrs, residual=name == "Linear", constant=layout == "NK"), (1, 3, 0, 67))
    check(GpuCase(name, dtype, 64, 96, attrs, bias=False, colsum=False), (2, 70))


@pytest.mark.parametrize("dtype", ("float16", "bfloat16"))
@pytest.mark.parametrize("interleave", (1, 8, 32, 64, 128))
def test_interleaved_gates(interleave: int, dtype: str) -> None:
    attrs = {"norm": "rms", "interleave": interleave}
    check(GpuCase("GatedLinear", dtype, 320, 384, attrs), (1, 16, 64, 200))


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("dtype", ("float16", "bfloat16"))
@pytest.mark.parametrize("name", OPS)
def test_weights_that_are_no_constants(name: str, dtype: str, norm: str) -> None:
    """They are not read before the preceding kernel has ended."""
    attrs = {"norm": norm, "activation": "silu"}
    check(GpuCase(name, dtype, 264, 136, attrs, residual=name == "Linear", constant=False), (1, 17, 130, 300))


@pytest.mark.parametrize("activation", ("silu", "gelu_tanh", "quick_gelu"))
@pytest.mark.parametrize("rows", (1, 16, 300))
def test_infinities_stay_in_their_columns(rows: int, activation: str) -> None:
    """Four values share a reciprocal: none may see another's infinity."""
    case = GpuCase("Linear", "float16", 264, 136, {"activation": activation})
    assert case.bias is not None
    case.weight[:] = 0
    case.bias[:] = np.resize(np.array([-np.inf, np.inf, -100.0, 1.0, -20.0], np.float16), 136)
    case.model = one_node_model(case.op, case.inputs(2), case.attrs, constants=case.constants,
                                shapes={"x": ["rows", 264], "residual": ["rows", 136]})
    found = case.session().run(None, case.feeds(case.inputs(rows)))[0]
    assert np.isnan(found[:, 0::5]).all() and (found[:, 1::5] == np.inf).all()
    assert np.isfinite(found[:, 2::5]).all() and np.isfinite(found[:, 3::5]).all() and np.isfinite(found[:, 4::5]).all()
    np.testing.assert_allclose(found[:, 3::5], found[0, 3], rtol=1e-3)


@pytest.mark.parametrize("requested", ("0", "1"))
def test_tf32_only_on_request(requested: str) -> None:
    """In a process of its own: the library reads the variable once."""
    program = (
        "from tests.cuda.gpu_case import GpuCase; from tests.ops.cases import one_node_model, relative_error\n"
        "case = GpuCase('Linear', 'float32', 1024, 512, {})\n"
        "inputs = case.inputs(256)\n"
        "print(relative_error(case.session().run(None, case.feeds(inputs))[0], case.reference(inputs)))"
    )
    environment = {**os.environ, "ONNXFUSE_TF32": requested, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=True)
    error = float(done.stdout.split()[-1])
    assert LIMIT["float32"] < error < 2e-3 if requested == "1" else error <= LIMIT["float32"]


@pytest.mark.parametrize("norm", ("none", "rms", "layer"))
def test_large_products(norm: str) -> None:
    attrs = {"norm": norm, "activation": "gelu"}
    check(GpuCase("Linear", "float16", 4096, 1536, attrs, residual=True), (1, 16, 32, 128, 1000))
    check(GpuCase("GatedLinear", "float16", 2048, 1408, attrs), (8, 100, 700))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ("none", "gelu_tanh", "relu", "silu"))
def test_large_products_that_no_tile_fits(dtype: str, activation: str) -> None:
    """Unaligned K and N, and N-major weights: cuBLASLt with a kernel before and after."""
    for norm, layout in (("rms", "NK"), ("none", "KN")):
        attrs = {"norm": norm, "activation": activation, "layout": layout}
        check(GpuCase("Linear", dtype, 1001, 515, attrs, residual=activation != "gelu_tanh"), (64, 300))
        check(GpuCase("GatedLinear", dtype, 520, 384, attrs, bias=False), (130,))


def test_very_many_rows() -> None:
    check(GpuCase("Linear", "float16", 64, 64, {"norm": "rms"}), (70_001,))
    check(GpuCase("Linear", "float16", 33, 17, {"norm": "rms"}), (200_003,))


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("norm", NORMS)
def test_no_more_error_than_unfused(name: str, norm: str) -> None:
    attrs = {"norm": norm, "activation": "silu", "epsilon": 1e-6}
    case = GpuCase(name, "float16", 1024, 512, attrs, residual=name == "Linear")
    fused, unfused = case.session(), case.unfused_session()
    for rows in (1, 16, 200, 600):
        inputs = case.inputs(rows)
        expected = case.reference(inputs)
        error = relative_error(fused.run(None, case.feeds(inputs))[0], expected)
        assert error <= case.op.tolerance.factor * relative_error(
            np.asarray(unfused.run(None, case.feeds(inputs))[0], np.float64), expected
        ) + case.op.tolerance.floor["float16"]
