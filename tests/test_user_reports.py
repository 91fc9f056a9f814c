"""The shapes of graph that users of fusion tools report: those that defeat a matcher, and those that make it wrong.

Each case is a small graph with what must (or must not) be found in it; every one is also optimized for the CPU, run, and
compared with the graph as it was, against a float64 oracle where that matters.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

import onnxfuse

LAYER_NORM = """
  mean = ReduceMean <axes=[-1], keepdims={keepdims}> (x)
  d = Sub (x, mean)
  sq = Pow (d, two)
  var = ReduceMean <axes=[-1], keepdims={keepdims}> (sq)
  ve = Add (var, eps)
  std = Sqrt (ve)
  n = Div (d, std)
"""
RMS = """
  sq = Pow (x, two)
  ms = ReduceMean <axes=[-1]> (sq)
  me = Add (ms, eps)
  r = Sqrt (me)
"""
SCALARS = "float two = {2}, float eps = {1e-5}, float one = {1}, float half = {0.5}"


@dataclass(frozen=True)
class Case:
    name: str
    inputs: str
    outputs: str
    body: str
    weights: str = ""
    opset: int = 17
    blocks: dict[str, int] = field(default_factory=dict)
    dims: dict[str, int] = field(default_factory=lambda: {"B": 2, "S": 3})
    scale: float = 1.0

    def model(self) -> onnx.ModelProto:
        weights = ", ".join(w for w in (SCALARS, self.weights) if w)
        return parse(
            f"""<ir_version: 8, opset_import: ["": {self.opset}, "com.microsoft": 1]>
            g ({self.inputs}) => ({self.outputs}) <{weights}> {{ {self.body} }}"""
        )


def parse(text: str, seed: int = 0) -> onnx.ModelProto:
    """ONNX text in which typed names without data are weights, filled from the seed."""
    model = onnx.parser.parse_model(text)
    graph = model.graph
    made = {o for n in graph.node for o in n.output} | {i.name for i in graph.input}
    rng = np.random.default_rng(seed)
    for info in [v for v in graph.value_info if v.name not in made]:
        tensor = info.type.tensor_type
        shape = [d.dim_value for d in tensor.shape.dim]
        values = rng.standard_normal(shape) * (0.3 if len(shape) > 1 else 0.2) + (1.0 if "g" in info.name[:1] else 0.0)
        dtype = helper.tensor_dtype_to_np_dtype(tensor.elem_type)
        graph.initializer.append(numpy_helper.from_array(np.asarray(values).astype(dtype), info.name))
        graph.value_info.remove(info)
    inner = [a.g for n in graph.node for a in n.attribute if a.type == onnx.AttributeProto.GRAPH]
    read = {i for n in [*graph.node, *(n for g in inner for n in g.node)] for i in n.input}
    kept = [t for t in graph.initializer if t.name in read]
    del graph.initializer[:]
    graph.initializer.extend(kept)
    return model


def feeds(model: onnx.ModelProto, dims: dict[str, int], scale: float = 1.0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(7)
    result = {}
    for value in model.graph.input:
        tensor = value.type.tensor_type
        shape = [dims.get(d.dim_param, 4) if d.dim_param else d.dim_value for d in tensor.shape.dim]
        dtype = helper.tensor_dtype_to_np_dtype(tensor.elem_type)
        if np.issubdtype(dtype, np.integer):
            result[value.name] = rng.integers(0, 4, shape).astype(dtype)
        elif dtype == np.bool_:
            result[value.name] = np.ones(shape, dtype)
        else:
            result[value.name] = (scale * rng.standard_normal(shape)).astype(dtype)
    return result


def run(model: onnx.ModelProto, inputs: dict[str, np.ndarray], optimized: bool = False) -> list[np.ndarray]:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    onnxfuse.register(options)
    if not optimized:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(None, inputs)


def fused(model: onnx.ModelProto) -> onnxfuse.Result:
    return onnxfuse.optimize(model, target="cpu")


def ops(model: onnx.ModelProto) -> list[str]:
    return [n.op_type for n in model.graph.node]


LIFTED = [
    Case("layernorm-axes-attribute", "float[B,S,8] x", "float[B,S,8] y",
         LAYER_NORM.format(keepdims=1) + "m = Mul (n, gamma) y = Add (m, beta)", "float[8] gamma, float[8] beta",
         blocks={"layernorm": 1}),
    Case("layernorm-axes-input", "float[B,S,8] x", "float[B,S,8] y",
         "mean = ReduceMean <keepdims=1> (x, ax) d = Sub (x, mean) sq = Mul (d, d)"
         "var = ReduceMean <keepdims=1> (sq, ax) ve = Add (eps, var) std = Sqrt (ve) n = Div (d, std)"
         "m = Mul (gamma, n) y = Add (beta, m)", "float[8] gamma, float[8] beta, int64[1] ax = {-1}", opset=18,
         blocks={"layernorm": 1}),
    Case("layernorm-axes-from-constant-node", "float[B,S,8] x", "float[B,S,8] y",
         "ax = Constant <value_ints=[2]> () mean = ReduceMean (x, ax) d = Sub (x, mean) sq = Pow (d, two)"
         "var = ReduceMean (sq, ax) ve = Add (var, eps) std = Sqrt (ve) n = Div (d, std) y = Mul (n, gamma)",
         "float[8] gamma", opset=18, blocks={"layernorm": 1}),
    Case("layernorm-rank-1-input-picks-gamma-by-connection", "float[8] x", "float[8] y",
         LAYER_NORM.format(keepdims=1) + "m = Mul (n, gamma) y = Add (m, beta)", "float[8] gamma, float[8] beta",
         blocks={"layernorm": 1}),
    Case("layernorm-3d-gamma", "float[B,S,8] x, float[B,S,8] s", "float[B,S,8] y",
         "a = Add (x, s) y = LayerNormalization <axis=-1, epsilon=1e-5> (a, gamma, beta)",
         "float[8] gamma, float[8] beta", blocks={"layernorm": 1, "skip_layernorm": 1}),
    Case("layernorm-decomposed-3d-gamma", "float[B,S,8] x", "float[B,S,8] y",
         LAYER_NORM.format(keepdims=1) + "m = Mul (n, gamma) y = Add (m, beta)",
         "float[1,1,8] gamma, float[1,1,8] beta", blocks={"layernorm": 1}),
    Case("layernorm-reciprocal", "float[B,S,8] x", "float[B,S,8] y",
         "mean = ReduceMean <axes=[-1]> (x) d = Sub (x, mean) sq = Mul (d, d) var = ReduceMean <axes=[-1]> (sq)"
         "ve = Add (var, eps) std = Sqrt (ve) i = Reciprocal (std) n = Mul (i, d) y = Mul (gamma, n)",
         "float[8] gamma", blocks={"layernorm": 1}),
    Case("layernorm-doubled-sub", "float[B,S,8] x", "float[B,S,8] y",
         "mean = ReduceMean <axes=[-1]> (x) d = Sub (x, mean) d2 = Sub (x, mean) sq = Pow (d2, two)"
         "var = ReduceMean <axes=[-1]> (sq) ve = Add (var, eps) std = Sqrt (ve) n = Div (d, std)"
         "m = Mul (n, gamma) y = Add (m, beta)", "float[8] gamma, float[8] beta", blocks={"layernorm": 1}),
    Case("layernorm-in-float16-between-casts", "float16[B,S,8] x", "float16[B,S,8] y",
         "c = Cast <to=1> (x) mean = ReduceMean <axes=[-1]> (c) d = Sub (c, mean) sq = Pow (d, two)"
         "var = ReduceMean <axes=[-1]> (sq) ve = Add (var, eps) std = Sqrt (ve) n = Div (d, std)"
         "m = Mul (n, gamma) a = Add (m, beta) y = Cast <to=10> (a)", "float[8] gamma, float[8] beta",
         blocks={"layernorm": 1}),
    *[
        Case(f"rmsnorm-{name}", "float[B,S,8] x", "float[B,S,8] y", RMS + tail, "float[8] gamma", blocks={"rmsnorm": 1})
        for name, tail in {
            "div": "n = Div (x, r) y = Mul (n, gamma)",
            "reciprocal": "i = Reciprocal (r) n = Mul (x, i) y = Mul (n, gamma)",
            "one-over": "i = Div (one, r) n = Mul (i, x) y = Mul (gamma, n)",
            "gamma-first": "i = Div (one, r) w = Mul (x, i) y = Mul (gamma, w)",
        }.items()
    ],
    Case("rmsnorm-power-minus-half", "float[B,S,8] x", "float[B,S,8] y",
         "sq = Mul (x, x) ms = ReduceMean <axes=[-1]> (sq) me = Add (eps, ms) i = Pow (me, mh) n = Mul (x, i)"
         "y = Mul (n, gamma)", "float[8] gamma, float mh = {-0.5}", blocks={"rmsnorm": 1}),
    Case("rmsnorm-reduce-sum", "float[B,S,8] x", "float[B,S,8] y",
         "sq = Mul (x, x) t = ReduceSum <keepdims=1> (sq, ax) ms = Mul (t, inv) me = Add (ms, eps) r = Sqrt (me)"
         "n = Div (x, r) y = Mul (n, gamma)", "float[8] gamma, float inv = {0.125}, int64[1] ax = {-1}",
         blocks={"rmsnorm": 1}),
    Case("rmsnorm-gamma-before-the-cast-back", "float16[B,S,8] x", "float16[B,S,8] y",
         "c = Cast <to=1> (x) sq = Pow (c, two) ms = ReduceMean <axes=[-1]> (sq) me = Add (ms, eps) r = Sqrt (me)"
         "i = Reciprocal (r) n = Mul (c, i) g32 = Cast <to=1> (gamma) m = Mul (n, g32) y = Cast <to=10> (m)",
         "float16[8] gamma", blocks={"rmsnorm": 1}),
    Case("rmsnorm-after-scaled-embedding", "int64[B,S] ids", "float[B,S,8] y",
         "e = Gather (table, ids) x = Mul (e, root)" + RMS + "i = Reciprocal (r) n = Mul (x, i) y = Mul (n, gamma)",
         "float[16,8] table, float root = {2.828427}, float[8] gamma", blocks={"rmsnorm": 1}),
    Case("rmsnorm-one-plus-gamma", "float[B,S,8] x", "float[B,S,8] y",
         RMS + "i = Reciprocal (r) n = Mul (x, i) w = Add (gamma, one) y = Mul (n, w)", "float[8] gamma",
         blocks={"rmsnorm": 1}),
    Case("rmsnorm-gamma-from-constant-identity-cast", "float[B,S,8] x", "float[B,S,8] y",
         RMS + "g1 = Identity (gamma) g2 = Cast <to=1> (g1) n = Div (x, r) y = Mul (n, g2)", "float[8] gamma",
         blocks={"rmsnorm": 1}),
    *[
        Case(f"gelu-erf-{name}", "float[B,S,8] x", "float[B,S,8] y",
             f"s = {scaled} e = Erf (s) c = Add (e, one) {tail}", "float r2 = {1.4142135}, float h2 = {0.70710677}",
             blocks={"act_gelu_erf": 1})
        for name, scaled, tail in [
            ("div-half-last", "Div (x, r2)", "p = Mul (x, c) y = Mul (p, half)"),
            ("mul-half-first", "Mul (h2, x)", "p = Mul (half, x) y = Mul (p, c)"),
            ("half-on-cdf", "Div (x, r2)", "p = Mul (c, half) y = Mul (p, x)"),
        ]
    ],
    Case("gelu-erf-sqrt-node", "float[B,S,8] x", "float[B,S,8] y",
         "r2 = Sqrt (two) s = Div (x, r2) e = Erf (s) c = Add (one, e) p = Mul (x, c) y = Mul (half, p)",
         blocks={"act_gelu_erf": 1}),
    *[
        Case(f"gelu-tanh-{name}", "float[B,S,8] x", "float[B,S,8] y", f"{cube} {tail}",
             "float three = {3}, float c0 = {0.044715}, float c1 = {0.7978846}", blocks={"act_gelu_tanh": 1})
        for name, cube, tail in [
            ("pow", "q = Pow (x, three)", "s = Mul (c0, q) p = Add (x, s) a = Mul (p, c1) t = Tanh (a)"
             "c = Add (t, one) m = Mul (x, c) y = Mul (m, half)"),
            ("cube-by-products", "x2 = Mul (x, x) q = Mul (x2, x)", "s = Mul (q, c0) p = Add (s, x) a = Mul (c1, p)"
             "t = Tanh (a) c = Add (one, t) h = Mul (half, x) y = Mul (h, c)"),
            ("factored", "x2 = Mul (x, x) s = Mul (x2, c0)", "u = Add (s, one) v = Mul (x, c1) a = Mul (v, u)"
             "t = Tanh (a) c = Add (one, t) h = Mul (c, half) y = Mul (x, h)"),
        ]
    ],
    *[
        Case(f"silu-{name}", "float[B,S,8] x", "float[B,S,8] y", body, blocks={"act_silu": 1})
        for name, body in {
            "sigmoid": "s = Sigmoid (x) y = Mul (s, x)",
            "exp": "m = Neg (x) e = Exp (m) d = Add (one, e) y = Div (x, d)",
        }.items()
    ],
    Case("quick-gelu-either-order", "float[B,S,8] x", "float[B,S,8] y",
         "a = Mul (k, x) s = Sigmoid (a) y = Mul (x, s)", "float[1] k = {1.702}", blocks={"act_quick_gelu": 1}),
    Case("bias-gelu-is-counted", "float[B,S,8] x", "float[B,S,16] y",
         "h = MatMul (x, w) a = Add (b, h) s = Div (a, r2) e = Erf (s) c = Add (e, one) p = Mul (a, c) y = Mul (p, half)",
         "float[8,16] w, float[16] b, float r2 = {1.4142135}",
         blocks={"matmul_bias_act_gelu_erf": 1, "act_gelu_erf": 1, "matmul_bias": 1}),
    Case("weight-behind-a-transpose", "float[B,S,8] x", "float[B,S,16] y",
         "t = Transpose <perm=[1,0]> (w) h = MatMul (x, t) y = Add (h, b)", "float[16,8] w, float[16] b",
         blocks={"matmul_bias": 1}),
    Case("two-residuals-and-a-norm", "float[B,S,8] x, float[B,S,8] s", "float[B,S,8] y, float[B,S,8] a",
         "a = Add (x, s) y = LayerNormalization <axis=-1> (a, gamma, beta)", "float[8] gamma, float[8] beta",
         blocks={"layernorm": 1, "skip_layernorm": 1}),
]  # fmt: skip

REFUSED = [
    Case("keepdims-0-normalises-nothing", "float[3,3] x", "float[3,3] y",
         LAYER_NORM.format(keepdims=0) + "y = Mul (n, gamma)", "float[3] gamma", blocks={"layernorm": 0}),
    Case("another-axis-for-the-variance", "float[B,4,4] x", "float[B,4,4] y",
         LAYER_NORM.format(keepdims=1).replace("var = ReduceMean <axes=[-1]", "var = ReduceMean <axes=[1]")
         + "y = Mul (n, gamma)", "float[4] gamma", blocks={"layernorm": 0}),
    Case("rms-over-another-axis", "float[B,4,4] x", "float[B,4,4] y",
         RMS.replace("axes=[-1]", "axes=[1]") + "n = Div (x, r) y = Mul (n, gamma)", "float[4] gamma",
         blocks={"rmsnorm": 0}),
    Case("a-third-power-is-no-square", "float[B,S,8] x", "float[B,S,8] y",
         RMS.replace("(x, two)", "(x, three)") + "n = Div (x, r) y = Mul (n, gamma)",
         "float[8] gamma, float three = {4}", blocks={"rmsnorm": 0}),
    Case("another-gelu-constant", "float[B,S,8] x", "float[B,S,8] y",
         "s = Div (x, r2) e = Erf (s) c = Add (e, one) p = Mul (x, c) y = Mul (p, half)", "float r2 = {1.5}",
         blocks={"act_gelu_erf": 0}),
    Case("sigmoid-of-something-else", "float[B,S,8] x, float[B,S,8] z", "float[B,S,8] y",
         "s = Sigmoid (z) y = Mul (s, x)", blocks={"act_silu": 0}),
    Case("gamma-that-the-caller-may-override", "float[B,S,8] x, float[8] gamma", "float[B,S,16] y",
         RMS + "n = Div (x, r) m = Mul (n, gamma) y = MatMul (m, w)", "float[8,16] w", blocks={"matmul": 1}),
    Case("bias-of-one-row-each", "float[2,3,8] x", "float[2,3,16] y",
         "h = MatMul (x, w) y = Add (h, b)", "float[8,16] w, float[2,1,16] b", blocks={"matmul_bias": 0}),
    Case("bias-that-widens-the-product", "float[1,8] x", "float[4,16] y",
         "h = MatMul (x, w) y = Add (h, b)", "float[8,16] w, float[4,16] b", blocks={"matmul_bias": 0}),
    Case("bias-of-five-dimensions", "float[2,3,8] x", "float[1,1,2,3,16] y",
         "h = MatMul (x, w) y = Add (h, b)", "float[8,16] w, float[1,1,1,1,16] b", blocks={}),
    Case("intermediate-is-an-output", "float[B,S,8] x", "float[B,S,8] y, float[B,S,8] s",
         "a = Mul (x, k) s = Sigmoid (a) y = Mul (x, s)", "float k = {1.702}", blocks={"act_quick_gelu": 0}),
    Case("product-read-twice-is-not-computed-twice", "float[B,S,8] x", "float[B,S,16] y, float[B,S,16] z",
         "h = MatMul (x, w) s = Sigmoid (h) y = Mul (h, s) z = Mul (h, two)", "float[8,16] w", blocks={}),
]  # fmt: skip


def check_same(case: Case, model: onnx.ModelProto, after: onnx.ModelProto, tolerance: float = 2e-5) -> None:
    inputs = feeds(model, case.dims, case.scale)
    before, now = run(model, inputs), run(after, inputs)
    for info, a, b in zip(model.graph.output, before, now, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape, info.name
        limit = tolerance if a.dtype == np.float32 else 5e-3
        scale = max(float(np.abs(a.astype(np.float64)).max(initial=0)), 1e-6)
        assert np.abs(a.astype(np.float64) - b.astype(np.float64)).max(initial=0) <= limit * scale, info.name


@pytest.mark.parametrize("case", LIFTED + REFUSED, ids=lambda c: c.name)
def test_found_and_right(case: Case) -> None:
    model = case.model()
    result = fused(model)
    found = {key: result.report["blocks"].get(key, 0) for key in case.blocks}
    assert found == case.blocks
    check_same(case, model, result.model)


def test_a_product_with_two_readers_stays_one_product() -> None:
    case = next(c for c in REFUSED if c.name.startswith("product-read-twice"))
    after = fused(case.model()).model
    products = [o for o in ops(after) if o in ("MatMul", "Gemm", "Linear", "FusedMatMul")]
    assert len(products) == 1


def test_residual_sum_keeps_its_second_reader() -> None:
    """Pre-norm: the sum feeds the norm and the next sum (GPT-2, Llama)."""
    case = Case("pre-norm", "float[B,S,8] x, float[B,S,8] s", "float[B,S,8] y",
                "a = Add (x, s) n = LayerNormalization <axis=-1> (a, gamma, beta) h = MatMul (n, w) y = Add (a, h)",
                "float[8] gamma, float[8] beta, float[8,8] w")  # fmt: skip
    model = case.model()
    result = fused(model)
    assert {k: result.report["blocks"][k] for k in ("layernorm", "matmul")} == {"layernorm": 1, "matmul": 1}
    check_same(case, model, result.model)


def test_one_shared_weight_in_two_linears_is_stored_once() -> None:
    case = Case("shared", "float[B,S,8] x, float[B,S,8] z", "float[B,S,512] y, float[B,S,512] u",
                "y = MatMul (x, w) u = MatMul (z, w)", "float[8,512] w")  # fmt: skip
    model = case.model()
    after = fused(model).model
    assert after.ByteSize() <= 1.05 * model.ByteSize() + 512
    check_same(case, model, after)


def test_tied_embedding_is_not_duplicated() -> None:
    case = Case("tied", "int64[B,S] ids", "float[B,S,1024] y",
                "x = Gather (table, ids)" + RMS + "n = Div (x, r) m = Mul (n, gamma) t = Transpose <perm=[1,0]> (table)"
                "y = MatMul (m, t)", "float[1024,64] table, float[64] gamma")  # fmt: skip
    model = case.model()
    after = fused(model).model
    assert after.ByteSize() <= 1.05 * model.ByteSize()
    check_same(case, model, after)


def test_two_hits_do_not_share_a_new_name() -> None:
    """Two chains that share one shape tensor, and two norms that share one gamma."""
    body = " ".join(
        f"f{i} = Reshape (x{i}, shape) g{i} = Reshape (f{i}, shape2)"
        + RMS.replace("(x", f"(g{i}")
        .replace("sq", f"sq{i}")
        .replace("ms", f"ms{i}")
        .replace("me", f"me{i}")
        .replace("r =", f"r{i} =")
        + f"n{i} = Div (g{i}, r{i}) y{i} = Mul (n{i}, gamma)"
        for i in (1, 2)
    )
    case = Case("two-hits", "float[B,S,8] x1, float[B,S,8] x2", "float[B,S,8] y1, float[B,S,8] y2", body,
                "float[8] gamma, int64[2] shape = {-1,8}, int64[3] shape2 = {2,-1,8}")  # fmt: skip
    model = case.model()
    after = fused(model).model
    names = [o for n in after.graph.node for o in n.output] + [t.name for t in after.graph.initializer]
    assert len(names) == len(set(names))
    check_same(case, model, after)


def test_a_branch_that_reads_a_value_inside_a_pattern_keeps_it() -> None:
    case = Case("captured", "float[B,S,8] x, bool c", "float[B,S,8] y, float[B,S,8] z",
                "s = Sigmoid (x) y = Mul (x, s) z = If (c) <then_branch = t () => (float[B,S,8] p) { p = Neg (s) },"
                " else_branch = e () => (float[B,S,8] q) { q = Identity (x) }>")  # fmt: skip
    case.dims.update(B=2, S=3)
    model = case.model()
    result = fused(model)
    inputs = {"x": feeds(model, case.dims)["x"]}
    for condition in (True, False):
        before = run(model, {**inputs, "c": np.array(condition)})
        now = run(result.model, {**inputs, "c": np.array(condition)})
        for a, b in zip(before, now, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_patterns_inside_branches_are_fused() -> None:
    gelu = "s = Div (a, r2) e = Erf (s) k = Add (e, one) m = Mul (a, k) p = Mul (m, half)"
    case = Case("inside", "float[B,S,8] x, bool c", "float[B,S,8] y",
                "a = Neg (x) y = If (c) <then_branch = t () => (float[B,S,8] p) { " + gelu + " },"
                " else_branch = e () => (float[B,S,8] q) { q = Identity (a) }>", "float r2 = {1.4142135}")  # fmt: skip
    model = case.model()
    result = fused(model)
    assert result.report["blocks"]["act_gelu_erf"] == 1
    x = feeds(model, case.dims)["x"]
    for condition in (True, False):
        inputs = {"x": x, "c": np.array(condition)}
        np.testing.assert_allclose(run(result.model, inputs)[0], run(model, inputs)[0], rtol=1e-5, atol=1e-6)


def test_node_and_value_names_may_be_the_same() -> None:
    case = Case("names", "float[B,S,8] x", "float[B,S,8] y", "a = Sigmoid (x) y = Mul (a, x)")
    model = case.model()
    model.graph.node[0].name, model.graph.node[1].name = "y", "a"
    check_same(case, model, fused(model).model)


def test_stale_shapes_do_not_come_back() -> None:
    case = Case("value-info", "float[B,S,8] x", "float[B,S,16] y", "h = MatMul (x, w) y = Add (h, b)",
                "float[8,16] w, float[16] b")  # fmt: skip
    model = case.model()
    model.graph.value_info.append(helper.make_tensor_value_info("h", TensorProto.FLOAT, ["B", "S", 16]))
    after = fused(model).model
    made = {o for n in after.graph.node for o in n.output}
    assert all(v.name in made for v in after.graph.value_info)
    check_same(case, model, after)


def large_rows() -> Iterator[tuple[str, onnx.ModelProto, float]]:
    """float16 chains whose squares overflow, where the unfused float16 result is the wrong one."""
    for name, body, scale in [
        ("rms", "a = Add (x, s) c = Cast <to=1> (a) sq = Pow (c, two) ms = ReduceMean <axes=[-1]> (sq)"
         "me = Add (ms, eps) r = Sqrt (me) n = Div (c, r) h = Cast <to=10> (n) y = Mul (h, g16)", 2000.0),
        ("layer", "a = Add (x, s) mean = ReduceMean <axes=[-1]> (a) d = Sub (a, mean) sq = Pow (d, two16)"
         "var = ReduceMean <axes=[-1]> (sq) ve = Add (var, eps16) st = Sqrt (ve) n = Div (d, st) y = Mul (n, g16)", 600.0),
    ]:  # fmt: skip
        text = f"""<ir_version: 8, opset_import: ["": 17]>
        g (float16[B,S,2048] x, float16[B,S,2048] s) => (float16[B,S,2048] y)
        <float two = {{2}}, float eps = {{1e-5}}, float16[1] two16 = {{16384}}, float16[1] eps16 = {{168}},
         float16[2048] g16> {{ {body} }}"""
        yield name, parse(text), scale


@pytest.mark.parametrize(("name", "model", "scale"), list(large_rows()), ids=lambda v: v if isinstance(v, str) else "")
def test_float16_rows_with_large_values(name: str, model: onnx.ModelProto, scale: float) -> None:
    """The oracle is float64 arithmetic, not the unfused float16 graph, which overflows in the square."""
    result = fused(model)
    inputs = feeds(model, {"B": 2, "S": 3}, scale)
    a = (inputs["x"].astype(np.float64) + inputs["s"]).astype(np.float16).astype(np.float64)
    gamma = next(numpy_helper.to_array(t) for t in model.graph.initializer if t.name == "g16").astype(np.float64)
    centred = a - a.mean(-1, keepdims=True) if name == "layer" else a
    expected = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * gamma
    got = run(result.model, inputs)[0].astype(np.float64)
    assert result.report["blocks"]["layernorm" if name == "layer" else "rmsnorm"] == 1
    assert np.isfinite(got).all()
    assert np.abs(got - expected).max() <= 5e-3 * np.abs(expected).max()


@pytest.mark.parametrize("dtype", ["float16", "double"])
def test_no_op_without_a_kernel_is_written(dtype: str) -> None:
    """ONNX Runtime's fused activations and norms lack float16 or float64 kernels on the CPU: those stay as they were."""
    bits = {"float16": (0x3E80, 0x3C00), "double": (1.702, 1.0)}[dtype]
    text = f"""<ir_version: 8, opset_import: ["": 17]>
    g ({dtype}[B,S,8] x) => ({dtype}[B,S,8] y) <{dtype} k = {{{bits[0]}}}>
    {{ a = Mul (x, k) s = Sigmoid (a) y = Mul (x, s) }}"""
    model = parse(text)
    after = fused(model).model
    inputs = feeds(model, {"B": 2, "S": 3})
    np.testing.assert_allclose(run(after, inputs)[0], run(model, inputs)[0], rtol=5e-3, atol=5e-3)


def test_quantize_between_ops_is_respected() -> None:
    """A quantize/dequantize pair inside a pattern is part of the numerics: nothing is fused across it."""
    case = Case("qdq", "float[B,S,8] x", "float[B,S,8] y",
                "h = Add (x, b) q = QuantizeLinear (h, scale, zero) u = DequantizeLinear (q, scale, zero) s = Div (u, r2)"
                "e = Erf (s) c = Add (e, one) p = Mul (u, c) y = Mul (p, half)",
                "float[8] b, float scale = {0.1}, int8 zero = {0}, float r2 = {1.4142135}")  # fmt: skip
    model = case.model()
    result = fused(model)
    assert {"QuantizeLinear", "DequantizeLinear"} <= set(ops(result.model))
    check_same(case, model, result.model)
