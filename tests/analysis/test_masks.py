"""Masks built in many ways mean what the graph computes: each proof is held against the computed mask."""

from __future__ import annotations

import math

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator

from onnxfuse.analysis import masks
from onnxfuse.analysis.masks import Bias, Causal, Choice, Padding, Window
from onnxfuse.analysis.poly import Poly
from onnxfuse.graph import canonicalize, shapes
from onnxfuse.graph.model import Model
from onnxfuse.ruletest.cases import parse_graph

LOW = float(np.finfo(np.float32).min)
S, P = Poly.of("S"), Poly.of("P")

#: name: (graph, opset). The mask is the output `m`.
GRAPHS = {
    "range-compare": """
        g (int64[B,S] ids, int64[B,S] pad) => (float[B,1,S,S] m) <float low = {-3.4028234663852886e38},
          float zero = {0}, int64 n0 = {0}, int64 n1 = {1}, int64[1] a0 = {0}, int64[1] a1 = {1},
          int64[2] a12 = {1, 2}>
        {
          s1 = Shape <start=1, end=2> (ids)
          s = Squeeze (s1, a0)
          k = Range (n0, s, n1)
          q = Unsqueeze (k, a1)
          c = LessOrEqual (k, q)
          p = Cast <to=9> (pad)
          p4 = Unsqueeze (p, a12)
          a = And (c, p4)
          m = Where (a, zero, low)
        }""",
    "flat-gather": """
        g (int64[B,S] ids, int64[B,S] pad) => (bool[B,1,1,S] m) <int64 n0 = {0}, int64 n1 = {1}, int64[1] a0 = {0},
          int64[3] a123 = {1, 2, 3}, int64[3] a012 = {0, 1, 2}, int64[1] rest = {-1}>
        {
          p = Cast <to=9> (pad)
          f = Flatten <axis=2> (p)
          b1 = Shape <start=0, end=1> (ids)
          b = Squeeze (b1, a0)
          rb = Range (n0, b, n1)
          b4 = Unsqueeze (rb, a123)
          t1 = Shape <start=1, end=2> (p)
          bt = Mul (b4, t1)
          t = Squeeze (t1, a0)
          rk = Range (n0, t, n1)
          k4 = Unsqueeze (rk, a012)
          i = Add (k4, bt)
          g1 = Gather <axis=0> (f, i)
          g2 = Reshape (g1, rest)
          sh = Shape (i)
          m = Reshape (g2, sh)
        }""",
    "gather-nd": """
        g (int64[B,S] ids, int64[B,S] pad) => (bool[B,1,1,S] m) <int64 n0 = {0}, int64 n1 = {1}, int64[1] a0 = {0},
          int64[1] a1 = {1}, int64[2] a12 = {1, 2}, int64[1] last = {-1}>
        {
          p = Cast <to=9> (pad)
          b1 = Shape <start=0, end=1> (ids)
          b = Squeeze (b1, a0)
          rb = Range (n0, b, n1)
          bc = Unsqueeze (rb, a1)
          s1 = Shape <start=1, end=2> (ids)
          s = Squeeze (s1, a0)
          rk = Range (n0, s, n1)
          mx = Max (bc, rk)
          sh = Shape (mx)
          be = Expand (bc, sh)
          bu = Unsqueeze (be, last)
          ke = Expand (rk, sh)
          ku = Unsqueeze (ke, last)
          i = Concat <axis=-1> (bu, ku)
          g1 = GatherND (p, i)
          m = Unsqueeze (g1, a12)
        }""",
    "inverted-product": """
        g (int64[B,S] ids, int64[B,S] pad) => (float[B,1,1,S] m) <float low = {-3.4028234663852886e38},
          float one = {1}, int64[2] a12 = {1, 2}>
        {
          p4 = Unsqueeze (pad, a12)
          pf = Cast <to=1> (p4)
          i = Sub (one, pf)
          h = Cast <to=9> (i)
          m = Where (h, low, i)
        }""",
    "triu-product": """
        g (int64[B,S] ids) => (float[S,S] m) <float low = {-3.4028234663852886e38}, int64 n0 = {0}, int64 n1 = {1},
          int64[1] a0 = {0}, int64[2] col = {-1, 1}>
        {
          s1 = Shape <start=1, end=2> (ids)
          s = Squeeze (s1, a0)
          ss = Concat <axis=0> (s1, s1)
          f = Expand (low, ss)
          t = Trilu <upper=1> (f, n1)
          k = Range (n0, s, n1)
          q = Reshape (k, col)
          g1 = Greater (k, q)
          gf = Cast <to=1> (g1)
          m = Mul (t, gf)
        }""",
    "past-window": """
        g (int64[B,S] ids, float[B,2,P,4] past) => (float[S,T] m) <float low = {-inf}, float zero = {0},
          int64 n0 = {0}, int64 n1 = {1}, int64 w = {3}, int64[1] a0 = {0}, int64[1] a1 = {1}>
        {
          s1 = Shape <start=1, end=2> (ids)
          p1 = Shape <start=2, end=3> (past)
          s = Squeeze (s1, a0)
          p = Squeeze (p1, a0)
          t = Add (p, s)
          k = Range (n0, t, n1)
          q0 = Range (p, t, n1)
          q = Unsqueeze (q0, a1)
          c = LessOrEqual (k, q)
          b = Sub (q, w)
          v = Greater (k, b)
          a = And (v, c)
          m = Where (a, zero, low)
        }""",
    "sum-of-two": """
        g (int64[B,S] ids, int64[B,S] pad) => (float[B,1,S,S] m) <float low = {-3.4028234663852886e38},
          float zero = {0}, int64 n0 = {0}, int64 n1 = {1}, int64[1] a0 = {0}, int64[1] a1 = {1},
          int64[2] a12 = {1, 2}>
        {
          s1 = Shape <start=1, end=2> (ids)
          s = Squeeze (s1, a0)
          k = Range (n0, s, n1)
          q = Unsqueeze (k, a1)
          c = Less (q, k)
          cf = Where (c, low, zero)
          p = Cast <to=9> (pad)
          p4 = Unsqueeze (p, a12)
          pf = Where (p4, zero, low)
          m = Add (cf, pf)
        }""",
    "opaque-bias": """
        g (int64[B,S] ids, float[S,S] table) => (float[S,S] m) <float half = {0.5}>
        {
          m = Mul (table, half)
        }""",
}


def model_of(name: str) -> Model:
    return Model(parse_graph(GRAPHS[name], 18))


def facts_of(name: str, canonical: bool) -> masks.MaskFacts:
    model = model_of(name)
    if canonical:
        canonicalize.run(model)
    else:
        shapes.infer(model)
    facts = masks.analyze(model.graph.outputs[0])
    assert facts is not None
    return facts


def feeds_for(model: onnx.ModelProto, sizes: dict[str, int], seed: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    feeds = {}
    for value in model.graph.input:
        shape = [d.dim_value or sizes[d.dim_param] for d in value.type.tensor_type.shape.dim]
        if value.type.tensor_type.elem_type == onnx.TensorProto.FLOAT:
            feeds[value.name] = random.standard_normal(shape).astype(np.float32)
        else:
            feeds[value.name] = random.integers(0, 2, shape)
    return feeds


@pytest.mark.parametrize("canonical", [False, True])
@pytest.mark.parametrize("name", GRAPHS)
def test_the_proof_computes_the_mask(name: str, canonical: bool) -> None:
    model = model_of(name)
    proto = model.to_proto()
    facts = facts_of(name, canonical)
    evaluator = ReferenceEvaluator(proto)
    for seed, (b, s, p) in enumerate([(1, 1, 0), (2, 7, 0), (3, 5, 4), (2, 12, 1)]):
        feeds = feeds_for(proto, {"B": b, "S": s, "P": p, "T": p + s}, seed)
        (wanted,) = evaluator.run(None, feeds)
        found = facts.evaluate({"B": b, "S": s, "P": p, "T": p + s}, lambda v, f=feeds: f[v.name])
        assert np.array_equal(found, wanted)


@pytest.mark.parametrize(
    ("name", "conditions", "fill"),
    [
        ("range-compare", {"Causal", "Padding"}, LOW),
        ("flat-gather", {"Padding"}, -math.inf),
        ("gather-nd", {"Padding"}, -math.inf),
        ("inverted-product", {"Padding"}, LOW),
        ("triu-product", {"Causal"}, LOW),
        ("past-window", {"Causal", "Window"}, -math.inf),
    ],
)
def test_what_is_found(name: str, conditions: set[str], fill: float) -> None:
    facts = facts_of(name, canonical=True)
    (choice,) = facts.terms
    assert isinstance(choice, Choice)
    assert {type(c).__name__ for c in choice.conditions} == conditions
    assert choice.fill == fill


def test_offsets_and_window_sizes() -> None:
    facts = facts_of("past-window", canonical=True)
    assert facts.structural
    assert facts.causal_offset() == P
    assert facts.window() == Window(3, P)
    assert facts.implies_causal(P) and not facts.implies_causal(Poly.of(0))


def test_padding_is_not_structural_and_names_its_source() -> None:
    facts = facts_of("range-compare", canonical=True)
    assert not facts.structural
    (padding,) = [c for c in facts.conditions() if isinstance(c, Padding)]
    assert padding.source.name == "pad"
    assert [v.name for v in facts.sources()] == ["pad"]
    assert Causal(Poly.of(0)) in facts.conditions()


def test_two_masks_may_add_up_to_minus_infinity() -> None:
    assert facts_of("range-compare", canonical=True).finite()
    assert not facts_of("sum-of-two", canonical=True).finite()
    assert len(facts_of("sum-of-two", canonical=True).terms) == 2


def test_what_is_not_understood_is_a_bias() -> None:
    facts = facts_of("opaque-bias", canonical=True)
    (bias,) = facts.terms
    assert isinstance(bias, Bias) and bias.indices == {"q", "k"}
    assert not facts.finite() and not facts.structural


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("c = LessOrEqual (k, q)", "c = Less (k, q)"),
        ("c = LessOrEqual (k, q)", "c = LessOrEqual (q, k)"),
        ("b = Sub (q, w)", "b = Add (q, w)"),
    ],
)
def test_a_different_mask_is_seen_as_different(old: str, new: str) -> None:
    text = GRAPHS["past-window"]
    assert text.count(old) == 1
    model = Model(parse_graph(text.replace(old, new), 18))
    shapes.infer(model)
    facts = masks.analyze(model.graph.outputs[0])
    assert facts is not None
    assert (facts.causal_offset(), facts.window()) != (P, Window(3, P))


@pytest.mark.parametrize(
    ("body", "holds"),
    [
        ("m = Cast <to=1> (seen)", True),
        ("t = Cast <to=1> (seen) m = Sub (one, t)", True),
        ("m = Slice (band, zero, end, axes)", True),
        ("m = Slice (other, zero, end, axes)", False),
        ("m = Slice (any, zero, end, axes)", True),
        ("t = Cast <to=1> (seen) m = Add (one, t)", False),
        ("m = Cast <to=1> (numbers)", False),
    ],
)
def test_zeros_and_ones(body: str, holds: bool) -> None:
    """What a boolean becomes, and tables of zeros and ones, with or without a pattern."""
    graph = f"""g (bool[B,1,S,S] seen, int64[B,1,S,S] numbers, int64[1] s) => (m)
        <float one = {{1}}, int64[1] zero = {{0}}, int64[1] axes = {{0}}, float[3,2] band = {{1, 0, 1, 1, 1, 1}},
         float[3,2] any = {{1, 0, 0, 1, 1, 1}}, float[3,2] other = {{1, 0, 2, 1, 1, 1}}, int64[1] end = {{2}}>
        {{ {body} }}"""
    model = Model(parse_graph(graph, 18))
    shapes.infer(model)
    (mask,) = model.graph.outputs
    assert masks.zero_or_one(mask) is holds


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ("t = Tanh (x) b = MatMul (t, w)", False),
        ("l = LayerNormalization <axis=-1> (x, gamma) b = MatMul (l, w)", False),
        ("e = Gather (w, i) b = MatMul (e, w)", False),
        ("b = MatMul (x, w)", True),
        ("e = Gather (w, i) c = Cast <to=1> (i) d = Mul (c, low) u = Unsqueeze (d, last) b = Add (e, u)", True),
        ("""e = Gather (w, i) c = Cast <to=1> (i) d = Mul (c, low) s = Softmax (d) u = Unsqueeze (s, last)
        b = Add (e, u)""", False),
    ],
)  # fmt: skip
def test_what_could_hide_a_key(body: str, found: bool) -> None:
    """Numbers below -1000 and float inputs, up to what keeps its results small."""
    graph = f"""g (float[B,S,4] x, int64[B,S] i) => (b) <float[4,4] w = {{{", ".join(["0.5"] * 16)}}},
        float[4] gamma = {{1, 1, 1, 1}}, float low = {{-10000}}, int64[1] last = {{-1}}> {{ {body} }}"""
    model = Model(parse_graph(graph, 18))
    shapes.infer(model)
    assert (masks.low_number_behind(model.graph.outputs[0]) is not None) is found
