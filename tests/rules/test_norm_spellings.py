"""Every way of spelling RMSNorm that exporters are known to use, in all combinations, becomes one op."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from onnxfuse import rules
from onnxfuse.graph import canonicalize
from onnxfuse.graph.types import numpy_of
from onnxfuse.rewrite import driver
from onnxfuse.ruletest import numeric
from onnxfuse.ruletest.cases import load, parse_graph

SQUARE = {"pow": "sq = Pow (w, two)", "mul": "sq = Mul (w, w)"}
MEAN = {
    "mean": ("ms = ReduceMean <axes=[-1], keepdims=1> (sq)", 17),
    "mean-positive-axis": ("ms = ReduceMean <axes=[2]> (sq)", 17),
    "mean-axes-input": ("ms = ReduceMean (sq, last)", 18),
    "sum-times": ("sm = ReduceSum (sq, last)\n ms = Mul (sm, eighth)", 17),
    "sum-over": ("sm = ReduceSum (sq, last)\n ms = Div (sm, eight)", 17),
}
EPSILON = {"second": "v = Add (ms, eps)", "first": "v = Add (eps, ms)"}
SCALE = {
    "div": "r = Sqrt (v)\n u = Div (w, r)",
    "reciprocal": "r = Sqrt (v)\n i = Reciprocal (r)\n u = Mul (w, i)",
    "one-over": "r = Sqrt (v)\n i = Div (one, r)\n u = Mul (i, w)",
    "power": "i = Pow (v, minus_half)\n u = Mul (w, i)",
}
#: dtype of x, what comes before, what comes after.
GAMMA = {
    "float32": ("float", "w = Identity (x)", "y = Mul (u, g)", "float[8] g"),
    "gamma-first": ("float", "w = Identity (x)", "y = Mul (g, u)", "float[8] g"),
    "one-plus": ("float", "w = Identity (x)", "g1 = Add (g, one)\n y = Mul (u, g1)", "float[8] g"),
    "none": ("float", "w = Identity (x)", "y = Identity (u)", "float[8] g"),
    "cast-then-gamma": ("float16", "w = Cast <to=1> (x)", "uc = Cast <to=10> (u)\n y = Mul (g, uc)", "float16[8] g"),
    "gamma-then-cast": ("float16", "w = Cast <to=1> (x)", "ug = Mul (u, g)\n y = Cast <to=10> (ug)", "float[8] g"),
    "gamma-cast-up": (
        "float16",
        "w = Cast <to=1> (x)",
        "gc = Cast <to=1> (g)\n ug = Mul (u, gc)\n y = Cast <to=10> (ug)",
        "float16[8] g",
    ),
    "double-cast": ("float", "c = Cast <to=1> (x)\n w = Cast <to=1> (c)", "y = Mul (u, g)", "float[8] g"),
    "bfloat16": ("bfloat16", "w = Cast <to=1> (x)", "uc = Cast <to=16> (u)\n y = Mul (g, uc)", "bfloat16[8] g"),
    "none-cast": ("float16", "w = Cast <to=1> (x)", "y = Cast <to=10> (u)", "float[8] g"),
}
CONSTANTS = """float two = {2}, float one = {1}, float eps = {1e-6}, float minus_half = {-0.5}, float eighth = {0.125},
 float eight = {8}, int64[1] last = {-1}"""


def text_of(square: str, mean: str, epsilon: str, scale: str, gamma: str) -> tuple[str, int]:
    dtype, before, after, weight = GAMMA[gamma]
    reduce, opset = MEAN[mean]
    lines = "\n ".join([before, SQUARE[square], reduce, EPSILON[epsilon], SCALE[scale], after])
    return f"g ({dtype}[B,S,8] x) => (y) <{weight}, {CONSTANTS}> {{ {lines} }}", opset


@pytest.mark.parametrize("gamma", GAMMA)
def test_rms_norm(gamma: str) -> None:
    missed = []
    found = rules.load()
    for square, mean, epsilon, scale in itertools.product(SQUARE, MEAN, EPSILON, SCALE):
        text, opset = text_of(square, mean, epsilon, scale, gamma)
        model = load(parse_graph(text, opset), text)
        canonicalize.run(model)
        driver.run(model, found, "lift")
        if [n.op for n in model.graph.nodes] != ["RMSNormalization"]:
            missed.append((square, mean, epsilon, scale, [n.op for n in model.graph.nodes]))
    assert not missed, f"{len(missed)} of 80, such as {missed[:3]}"


@pytest.mark.parametrize(("gamma", "scale"), [(g, s) for g in GAMMA for s in ("div", "power")])
def test_rms_norm_is_right(gamma: str, scale: str) -> None:
    text, opset = text_of("mul", "sum-times", "first", scale, gamma)
    proto = parse_graph(text, opset)
    model = load(proto, text)
    canonicalize.run(model)
    driver.run(model, rules.load(), "lift")
    dtype = {"float": "float32"}.get(GAMMA[gamma][0], GAMMA[gamma][0])
    feeds = {"x": (np.random.default_rng(3).normal(size=(2, 3, 8)) * 4).astype(numpy_of(dtype))}
    wrong = numeric.compare(
        numeric.run(model.to_proto(), feeds)[0], numeric.run(proto, feeds)[0], numeric.truth(proto, feeds)[0]
    )
    assert wrong is None
