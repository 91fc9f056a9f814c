"""Weight functions against NumPy in float64, their rounding and their contracts."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from onnxfuse.graph import consts
from onnxfuse.graph.ir import Constant
from onnxfuse.rewrite import weights
from onnxfuse.rewrite.weights import Unfit

RNG = np.random.default_rng(7)
W = RNG.normal(size=(6, 4)).astype(np.float32)  # [K, N]
S6, S4 = (RNG.normal(size=n).astype(np.float32) for n in (6, 4))


def constant(array: np.ndarray) -> Constant:
    return Constant("c", array)


def compute(name: str, *arrays: np.ndarray | None, **params: object) -> np.ndarray:
    sources = [None if a is None else constant(a) for a in arrays]
    result = weights.REGISTRY[name](*sources, **params)
    made = result if isinstance(result, Constant) else Constant("r", result.deferred())
    array = consts.array(made)
    assert array.shape == consts.shape_of(made)
    return array


CASES = [
    ("every_nth", (W,), {"axis": 0, "parts": 2, "part": 1}, W[1::2]),
    ("every_nth", (W,), {"axis": 1, "parts": 4}, W[:, ::4]),
    ("transpose", (W,), {}, W.T),
    ("transpose", (W[None],), {"perm": [2, 0, 1]}, W[None].transpose(2, 0, 1)),
    ("concat", (W, W[:2]), {"axis": 0}, np.concatenate([W, W[:2]])),
    ("concat", (W, W[:, :1]), {"axis": -1}, np.concatenate([W, W[:, :1]], 1)),
    ("concat", (S4, None, S6), {"sizes": [4, 3, 6]}, np.concatenate([S4, np.zeros(3), S6])),
    (
        "interleave",
        (W, 2 * W),
        {"axis": 1, "block": 2},
        np.concatenate([W[:, :2], 2 * W[:, :2], W[:, 2:], 2 * W[:, 2:]], 1),
    ),
    ("interleave", (S4, 2 * S4), {}, np.stack([S4, 2 * S4], 1).reshape(-1)),
    ("split", (W,), {"axis": 0, "parts": 3, "part": 1}, W[2:4]),
    ("split", (W,), {"axis": 1, "parts": [1, 3], "part": 1}, W[:, 1:]),
    ("reshape", (W,), {"shape": [3, -1]}, W.reshape(3, 8)),
    ("flatten", (S4[None, None],), {}, S4),
    ("squeeze", (S4[None, None],), {}, S4),
    ("expand", (S4[:1],), {"shape": [4]}, np.repeat(S4[0], 4)),
    ("expand", (S4[None],), {"shape": [4]}, S4),
    ("pad", (W,), {"axis": 1, "before": 1, "after": 2}, np.pad(W, [(0, 0), (1, 2)])),
    ("scale_rows", (W, S6), {}, W.astype(float) * S6[:, None]),
    ("scale_rows", (W.T, S6), {"layout": "NK"}, W.T.astype(float) * S6[None]),
    ("scale_rows", (W, S6[None, :1]), {}, W.astype(float) * float(S6[0])),
    ("scale_cols", (W, S4[None]), {}, W.astype(float) * S4[None]),
    ("scale_cols", (W.T, S4), {"layout": "NK"}, W.T.astype(float) * S4[:, None]),
    ("scale", (W,), {"value": 0.125}, W * 0.125),
    ("add", (S4, S4[None, :]), {}, (S4 + S4)[None]),
    ("add", (None, S4), {}, S4),
    ("add", (S4, None), {}, S4),
    ("mul", (S4, S4), {}, S4.astype(float) ** 2),
    ("matmul_bias", (W, S6, S4), {}, S6.astype(float) @ W + S4),
    ("matmul_bias", (W.T, S6, None), {"layout": "NK"}, S6.astype(float) @ W),
    ("matmul_bias", (W, None, S4), {}, S4),
    ("column_sum", (W,), {}, W.astype(float).sum(0)),
    ("column_sum", (W.T,), {"layout": "NK"}, W.astype(float).sum(0)),
    ("one_plus", (S4,), {}, 1.0 + S4.astype(float)),
    ("negate", (S4,), {}, -S4),
    ("reciprocal", (S4,), {}, 1.0 / S4.astype(float)),
    ("full", (), {"shape": [3], "value": 2.5}, np.full(3, 2.5)),
]


@pytest.mark.parametrize(
    ("name", "arrays", "params", "wanted"), CASES, ids=[f"{i}-{c[0]}" for i, c in enumerate(CASES)]
)
def test_values(name: str, arrays: tuple, params: dict, wanted: np.ndarray) -> None:
    found = compute(name, *arrays, **params)
    assert found.dtype == np.float32 and found.shape == wanted.shape
    np.testing.assert_array_equal(found, np.asarray(wanted, dtype=np.float64).astype(np.float32))


def test_every_function_is_tested() -> None:
    assert {case[0] for case in CASES} | {"cast"} == set(weights.REGISTRY)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_half_precision_is_rounded_once(dtype: type) -> None:
    w, s, b = W.astype(dtype), S6.astype(dtype), S4.astype(dtype)
    found = compute("scale_rows", w, s)
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, (w.astype(np.float64) * s.astype(np.float64)[:, None]).astype(dtype))
    exact = s.astype(np.float64) @ w.astype(np.float64) + b.astype(np.float64)
    np.testing.assert_array_equal(compute("matmul_bias", w, s, b), exact.astype(dtype))
    # The sums belong to the weight as stored, so that the kernel's correction fits the product that it computes.
    sums = compute("column_sum", w)
    assert sums.dtype == np.float32
    np.testing.assert_allclose(sums, w.astype(np.float64).sum(0), rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "arrays", "params"),
    [
        ("transpose", (W,), {"perm": [0, 0]}),
        ("concat", (W, S4), {}),
        ("concat", (W, W[:, :2]), {"axis": 0}),
        ("concat", (W, W), {"axis": 2}),
        ("concat", (W, W.astype(np.float16)), {}),
        ("concat", (S4, None), {}),
        ("interleave", (W, W[:2]), {}),
        ("interleave", (W, W), {"block": 4}),
        ("split", (W,), {"parts": 4}),
        ("split", (W,), {"parts": [1, 2]}),
        ("reshape", (W,), {"shape": [5, -1]}),
        ("expand", (S6,), {"shape": [4]}),
        ("pad", (W,), {"before": -1}),
        ("scale_rows", (W, S4), {}),
        ("scale_cols", (W, S6), {}),
        ("scale_rows", (S6, S6), {}),
        ("add", (S4, S6), {}),
        ("matmul_bias", (W, S4, None), {}),
        ("matmul_bias", (W, S6, S6), {}),
        ("column_sum", (S4,), {}),
    ],
)
def test_contracts(name: str, arrays: tuple, params: dict) -> None:
    with pytest.raises(Unfit):
        compute(name, *arrays, **params)


def test_nothing_is_computed_before_it_is_read() -> None:
    calls = []

    class Watched(Constant):
        pass

    source = Watched("w", W)
    plan = weights.REGISTRY["transpose"](source)
    deferred = plan.deferred()
    plan_compute = plan.compute
    plan.compute = lambda: calls.append(1) or plan_compute()  # type: ignore[func-returns-value]
    result = Constant("r", deferred)
    assert consts.shape_of(result) == (4, 6) and consts.dtype_of(result) == "float32" and not calls
    consts.array(result)
    consts.array(result)
    assert calls == [1]


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_a_scale_that_a_rule_cast_is_not_rounded_before(dtype: type) -> None:
    """Gemma's norms: 1 + gamma in float32 beside half-precision weights."""
    gamma = constant((1 + 0.1 * S6).astype(np.float32))
    narrow = Constant("n", consts.array(gamma).astype(dtype))
    narrow.recipe = ("cast", (gamma,), {})
    w = W.astype(dtype)
    folded = weights.REGISTRY["scale_rows"](constant(w), narrow).deferred().load()
    exact = w.astype(np.float64) * consts.array(gamma).astype(np.float64)[:, None]
    np.testing.assert_array_equal(folded, exact.astype(dtype))
    shift = weights.REGISTRY["matmul_bias"](constant(w), narrow, None).deferred().load()
    np.testing.assert_array_equal(shift, exact.sum(axis=0).astype(dtype))
