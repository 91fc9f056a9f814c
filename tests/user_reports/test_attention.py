"""Attention: scales wherever exporters put them, guards, masks with rows that hide everything, ops with many inputs."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import onnxfuse
from tests.user_reports.cases import Case, check_found, feeds, fused, ops, parse, run

HEADS = "float[B,4,S,16] q, float[B,4,S,16] k, float[B,4,S,16] v"
Y = "float[B,4,S,16] y"
KT = "kt = Transpose <perm=[0,1,3,2]> ({0})"
NUMBERS = "float quarter = {0.25}, float half_root = {0.5}, float four = {4}, float nothing = {0}, int64[1] last = {-1}"
ROOT = "sh = Shape (q) d = Gather (sh, last) f = Cast <to=1> (d) root = Sqrt (f)"

CASES = [
    *[
        Case(f"scale-{name}", HEADS, Y, f"{body} p = Softmax <axis=-1> (s) y = MatMul (p, v)", NUMBERS,
             blocks={"attention": 1}, written={"Softmax": 0})
        for name, body in {
            "on-the-scores-by-mul": KT.format("k") + "a = MatMul (q, kt) s = Mul (a, quarter)",
            "on-the-scores-by-div": KT.format("k") + "a = MatMul (q, kt) s = Div (a, four)",
            "on-q": KT.format("k") + "c = Mul (quarter, q) s = MatMul (c, kt)",
            "on-q-by-div": KT.format("k") + "c = Div (q, four) s = MatMul (c, kt)",
            "on-both-as-its-root": "c = Mul (q, half_root) e = Mul (k, half_root)" + KT.format("e")
            + "s = MatMul (c, kt)",
            "from-the-shape-of-q": ROOT + KT.format("k") + "a = MatMul (q, kt) s = Div (a, root)",
            "root-of-root-from-the-shape": ROOT + "i = Div (one, root) r2 = Sqrt (i) c = Mul (q, r2) e = Mul (k, r2)"
            + KT.format("e") + "s = MatMul (c, kt)",
            "none": KT.format("k") + "s = MatMul (q, kt)",
        }.items()
    ],
    Case("softmax-over-another-axis", HEADS, Y,
         KT.format("k") + "a = MatMul (q, kt) s = Mul (a, quarter) p = Softmax <axis=-2> (s) y = MatMul (p, v)",
         NUMBERS, blocks={"attention": 0}),
    Case("weights-that-are-an-output", HEADS, "float[B,4,S,16] y, float[B,4,S,S] p",
         KT.format("k") + "a = MatMul (q, kt) s = Mul (a, quarter) p = Softmax <axis=-1> (s) y = MatMul (p, v)",
         NUMBERS, written={"Softmax": 1}),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_found_and_right(case: Case) -> None:
    check_found(case)


@pytest.mark.parametrize("guard", [True, False])
@pytest.mark.parametrize("hidden", ["-inf", "-3.4028235e38"])
def test_rows_without_a_key_mean_what_they_meant(guard: bool, hidden: str) -> None:
    """Where(IsNaN(p), 0, p) gives zeros for a row that hides every key; without it the row is NaN, or the mean where
    the mask adds a very low number."""
    after = "b = IsNaN (p) w = Where (b, nothing, p)" if guard else "w = Identity (p)"
    case = Case("guard", f"{HEADS}, bool[B,1,S,S] m", "float[B,4,S,16] y",
                f"{KT.format('k')} a = MatMul (q, kt) s = Mul (a, quarter) f = Where (m, nothing, low) t = Add (s, f)"
                f"p = Softmax <axis=-1> (t) {after} y = MatMul (w, v)", f"{NUMBERS}, float low = {{{hidden}}}"
                )  # fmt: skip
    model = case.model()
    result = fused(model)
    assert result.report["blocks"]["attention"] == 1
    inputs = feeds(model, {"B": 3, "S": 5})
    inputs["m"] = np.tril(np.ones((3, 1, 5, 5), bool))
    inputs["m"][1, :, :, 3:] = False  # right padding
    inputs["m"][2, :, :, :2] = False  # left padding: rows 0 and 1 see nothing
    np.testing.assert_allclose(run(result.model, inputs)[0], run(model, inputs)[0], rtol=1e-4, atol=1e-5)


def bert_layer(mask: str) -> onnx.ModelProto:
    """Attention of one BERT layer with a padding mask of 0 and 1, as exporters of different years expand it."""
    masks = {
        "lowest": "u = Unsqueeze (mask, ax) c = Cast <to=1> (u) i = Sub (one, c) bias = Mul (i, low)",
        "ten-thousand": "u = Unsqueeze (mask, ax) c = Cast <to=1> (u) i = Sub (one, c) bias = Mul (i, tenk)",
        "where": "u = Unsqueeze (mask, ax) c = Cast <to=9> (u) bias = Where (c, nothing, low)",
    }
    heads = "".join(
        f"{n}0 = MatMul (x, w{n}) {n}1 = Add ({n}0, b{n}) {n}2 = Reshape ({n}1, split)"
        f"{n} = Transpose <perm=[0,2,1,3]> ({n}2)"
        for n in "qkv"
    )
    weights = ", ".join(f"float[64,64] w{n}, float[64] b{n}" for n in "qkv")
    return parse(
        f"""<ir_version: 8, opset_import: ["": 17]>
        g (float[B,S,64] x, int64[B,S] mask) => (float[B,S,64] y)
        <{weights}, {NUMBERS}, float one = {{1}}, float low = {{-3.4028235e38}}, float tenk = {{-10000}},
         int64[2] ax = {{1, 2}}, int64[4] split = {{0, 0, 4, 16}}, int64[3] merge = {{0, 0, 64}}> {{
          {heads} {KT.format("k")} a = MatMul (q, kt) s = Div (a, four) {masks[mask]} t = Add (s, bias)
          p = Softmax <axis=-1> (t) o = MatMul (p, v) r = Transpose <perm=[0,2,1,3]> (o) y = Reshape (r, merge) }}"""
    )


@pytest.mark.parametrize("mask", ["lowest", "ten-thousand", "where"])
def test_bert_with_padding(mask: str) -> None:
    model = bert_layer(mask)
    result = fused(model)
    blocks = result.report["blocks"]
    assert (blocks["attention"], blocks["qkv_shared_input_groups"]) == (1, 1)
    inputs = feeds(model, {"B": 4, "S": 7})
    inputs["mask"] = np.ones((4, 7), np.int64)
    inputs["mask"][1, 4:] = inputs["mask"][2, :3] = inputs["mask"][3] = 0
    np.testing.assert_allclose(run(result.model, inputs)[0], run(model, inputs)[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("interleaved", [0, 1])
@pytest.mark.parametrize("partial", [0, 8])
@pytest.mark.parametrize("positions", ["ids", "none"])
def test_native_rotary_before_native_attention(interleaved: int, partial: int, positions: str) -> None:
    """Attributes of a native RotaryEmbedding survive: order of pairs, partial rotation, tables without positions."""
    half = (partial or 16) // 2
    table = f"float[32,{half}]" if positions == "ids" else f"float[B,S,{half}]"
    last = ", ids" if positions == "ids" else ""
    attrs = f"<interleaved={interleaved}, rotary_embedding_dim={partial}>"
    model = parse(
        f"""<ir_version: 10, opset_import: ["": 23]>
        g ({HEADS}, {table} cos, {table} sin{", int64[B,S] ids" if last else ""}) => (float[B,4,S,16] y) {{
          qr = RotaryEmbedding {attrs} (q, cos, sin{last}) kr = RotaryEmbedding {attrs} (k, cos, sin{last})
          y = Attention <is_causal=1> (qr, kr, v) }}"""
    )
    result = fused(model)
    assert (result.report["blocks"]["rope"], result.report["blocks"]["attention"]) == (2, 1)
    inputs = feeds(model, {"B": 2, "S": 5})
    np.testing.assert_allclose(run(result.model, inputs)[0], run(model, inputs)[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("extra", ["none", "position_ids", "attention_bias", "head_sink"])
def test_grouped_attention_of_the_source_keeps_all_of_its_inputs(extra: str) -> None:
    """A GroupQueryAttention with up to 12 inputs, whose q and k come from RotaryEmbedding, is not rewritten."""
    tail = {"none": "", "position_ids": ", cosc, sinc, pos", "attention_bias": ", , , , bias",
            "head_sink": ", , , , bias, sink"}[extra]  # fmt: skip
    rotary = "com.microsoft.RotaryEmbedding <num_heads={1}> ({0}, pos, cosc, sinc)"
    before = f"q = {rotary.format('q0', 4)} k = {rotary.format('k0', 2)}"
    if extra == "position_ids":
        before = "q = Identity (q0) k = Identity (k0)"
    model = parse(
        f"""<ir_version: 8, opset_import: ["": 17, "com.microsoft": 1]>
        g (float[1,S,64] q0, float[1,S,32] k0, float[1,S,32] v, float[1,2,P,16] pk, float[1,2,P,16] pv, int64[1,S] pos,
           float[1,1,S,S] bias)
        => (float[1,S,64] y, float[1,2,T,16] nk, float[1,2,T,16] nv)
        <float[32,8] cosc, float[32,8] sinc, float[4] sink, int32[1] lens = {{4}}, int32 total = {{5}}> {{
          {before}
          y, nk, nv = com.microsoft.GroupQueryAttention <num_heads=4, kv_num_heads=2,
                      do_rotary={int(extra == "position_ids")}> (q, k, v, pk, pv, lens, total{tail}) }}"""
    )
    # The lengths are constants here, so no other than this one size of inputs fits.
    result = onnxfuse.optimize(model, target="cpu", verify=False)
    (node,) = [n for n in result.model.graph.node if n.op_type == "GroupQueryAttention"]
    (source,) = [n for n in model.graph.node if n.op_type == "GroupQueryAttention"]
    assert [bool(i) for i in node.input] == [bool(i) for i in source.input] and len(node.output) == 3
    assert ops(result.model).count("RotaryEmbedding") == ops(model).count("RotaryEmbedding")
    inputs = feeds(model, {"S": 5, "P": 0})
    for before_, after in zip(run(model, inputs), run(result.model, inputs), strict=True):
        np.testing.assert_allclose(after, before_, rtol=1e-4, atol=1e-5)
