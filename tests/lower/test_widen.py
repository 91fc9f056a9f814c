"""bfloat16 on a provider without bfloat16 arithmetic: float32 between Casts."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from onnxfuse.lower.kernels import KernelTable, Target
from onnxfuse.runtime.session import Runner

TEXT = """g (bfloat16[B,8] x, bfloat16[B,8] z) => (bfloat16[B,8] y, bfloat16[B,8] s) {
    a = Add (x, z)
    s = Softmax <axis=-1> (a)
    t = Mul (s, x)
    u = Transpose <perm=[0,1]> (t)
    y = Mul (u, u)
}"""


def test_a_model_that_does_not_load_runs_and_rounds_after_each_node(case, rng):
    made = case(TEXT, {}).lower()
    assert made.ops["Transpose"] == 1
    # x, z, a, s, t are widened once each (u is t), and four results are rounded.
    assert made.ops["Cast"] == 9
    x, z = (rng.standard_normal((3, 8)).astype(ml_dtypes.bfloat16) for _ in range(2))
    y, s = Runner(made.model.to_proto()).run({"x": x, "z": z}).values()

    def rounded(array):
        return array.astype(ml_dtypes.bfloat16).astype(np.float32)

    wide = x.astype(np.float32)
    total = rounded(wide + z.astype(np.float32))
    shares = np.exp(total - total.max(-1, keepdims=True))
    shares = rounded(shares / shares.sum(-1, keepdims=True))
    product = rounded(shares * wide)
    assert np.allclose(s.astype(np.float32), shares, rtol=2**-7)
    assert np.allclose(y.astype(np.float32), rounded(product * product), rtol=2**-5)
    assert {e["op"]: e["count"] for e in made.report.to_json()["taken_apart"]} == {"Add": 1, "Softmax": 1, "Mul": 2}


def test_nothing_is_asked_about_a_model_without_bfloat16(case):
    asked = []
    table = KernelTable(Target("cpu"), lambda target, query: asked.append(query) or True)
    case(TEXT.replace("bfloat16", "float"), {}).lower(kernels=table)
    assert asked == []


def test_what_runs_in_neither_type_stays(case):
    refuses = KernelTable(Target("cpu"), lambda target, query: False)
    made = case("g (bfloat16[B,8] x) => (bfloat16[B,8] y) { y = Neg (x) }", {}).lower(kernels=refuses)
    assert made.ops == {"Neg": 1}
    assert made.report.taken_apart[0].reason == "no-kernel: neither in bfloat16 nor in float32"


def test_fused_ops_in_bfloat16_keep_their_own_kernels(case):
    text = 'g (bfloat16[B,S,16] x) => (bfloat16[B,S,24] y) { y = onnxfuse.Linear <activation="silu"> (x, w) }'
    made = case(text, {"w": np.zeros((24, 16), ml_dtypes.bfloat16)}).lower()
    assert made.ops == {"onnxfuse.Linear": 1}
