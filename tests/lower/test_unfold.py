"""Taking an op apart gives back the constants that fuse folded or packed."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from onnxfuse import pipeline
from onnxfuse.graph import canonicalize
from onnxfuse.graph.ir import Constant
from onnxfuse.graph.model import Model
from onnxfuse.graph.types import numpy_of
from onnxfuse.lower import lower
from onnxfuse.lower.kernels import KernelTable, Target
from onnxfuse.lower.unfold import unscaled
from onnxfuse.rewrite import driver
from onnxfuse.runtime.probe import OrtProbe

HEADER = '<ir_version: 8, opset_import: ["" : 17]>\n'
QKV = """g (float[B,S,16] x) => (float[B,S,16] q, float[B,S,8] k, float[B,S,8] v) {
    n = LayerNormalization <epsilon=1e-6> (x, g1, b1)
    q0 = MatMul (n, wq)  q = Add (q0, bq)
    k = MatMul (n, wk)
    v0 = MatMul (n, wv)  v = Add (v0, bv)
}"""
SWIGLU = """g (float[B,S,16] x) => (float[B,S,24] y) {
    p = Mul (x, x)
    m = ReduceMean <axes=[-1]> (p)
    e = Add (m, eps)
    s = Sqrt (e)
    u = Div (x, s)
    n = Mul (u, g1)
    h = MatMul (n, wg)
    t = Sigmoid (h)
    a = Mul (h, t)
    o = MatMul (n, wu)
    y = Mul (a, o)
}"""


def built(text, shapes, rng):
    proto = onnx.parser.parse_model(HEADER + text)
    arrays = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    if "eps" in arrays:
        arrays["eps"] = np.array(1e-6, np.float32)
    for name, array in arrays.items():
        proto.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    model = Model(proto)
    canonicalize.run(model)
    ruleset = pipeline.rule_set(pipeline.Options())
    for stage in ("lift", "fuse"):
        driver.run(model, ruleset, stage, "cpu")
    return model, arrays


@pytest.mark.parametrize(
    ("text", "shapes", "fused"),
    [
        (QKV, {"wq": (16, 16), "wk": (16, 8), "wv": (16, 8), "g1": (16,), "b1": (16,), "bq": (16,), "bv": (8,)},
         ["Linear", "Split"]),
        (SWIGLU, {"wg": (16, 24), "wu": (16, 24), "g1": (16,), "eps": ()}, ["GatedLinear"]),
    ],
)  # fmt: skip
def test_the_very_tensors_come_back(rng, text, shapes, fused):
    model, arrays = built(text, shapes, rng)
    assert [n.op for n in model.graph.nodes] == fused
    lower(model, KernelTable(Target("cpu"), OrtProbe()))
    written = {t.name: onnx.numpy_helper.to_array(t) for t in model.to_proto().graph.initializer}
    for name in set(arrays) - {"eps"}:
        assert np.array_equal(written[name], arrays[name])
    extra = set(written) - set(arrays)
    # The key product had no bias: the packed bias held zeros for it, and none is added now.
    assert not extra


def test_a_fused_product_keeps_what_was_folded(rng):
    model, arrays = built(SWIGLU, {"wg": (16, 24), "wu": (16, 24), "g1": (16,), "eps": ()}, rng)
    lower(model, KernelTable(Target("cuda", 90)))
    (node,) = model.graph.nodes
    assert node.op == "GatedLinear" and node.attrs["norm"] == "rms"
    (weight,) = [onnx.numpy_helper.to_array(t) for t in model.to_proto().graph.initializer]
    gate_first_block = (arrays["wg"] * arrays["g1"][:, None]).T[:8]
    assert np.allclose(weight[:8], gate_first_block, rtol=1e-6)


@pytest.mark.parametrize(("dtype", "given_back"), [("float16", True), ("bfloat16", False)])
def test_a_scale_that_was_cast_to_few_digits_stays_in_the_weight(dtype, given_back):
    """Gemma's 1 + gamma in float32, cast to bfloat16 for the norm: the folded weight has it in float32."""
    numpy_dtype = numpy_of(dtype)
    weight = Constant("w", np.ones((4, 2), numpy_dtype))
    scale = Constant("s", np.full(4, 1.001, numpy_dtype))
    scale.recipe = ("cast", (Constant("wide", np.full(4, 1.001, np.float32)),), {})
    folded = Constant("f", np.ones((4, 2), numpy_dtype))
    folded.recipe = ("scale_rows", (weight, scale), {})
    found = unscaled(folded, None)
    assert (found is not None and found.weight is weight) is given_back
