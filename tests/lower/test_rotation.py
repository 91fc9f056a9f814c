"""GroupQueryAttention takes rotary embeddings and packed projections in where they are what it can do, only there."""

from __future__ import annotations

import numpy as np
import pytest

from onnxfuse.graph import shapes
from onnxfuse.graph.model import Model
from onnxfuse.lower.kernels import KernelTable, Target
from onnxfuse.lower.lower import lower
from onnxfuse.ops import registry
from onnxfuse.ops.opdef import STD_DOMAIN
from onnxfuse.ruletest.cases import parse_graph

ort = pytest.importorskip("onnxruntime")

H, G = 4, 2


def graph(d: int, order: str = "q, k, v", tables: tuple[str, str] = ("c", "s"), interleaved: int = 0) -> str:
    sizes = {"q": H * d, "k": G * d, "v": G * d}
    cut = ", ".join(str(sizes[name.strip()]) for name in order.split(","))
    rotary = f"<interleaved={interleaved}, num_heads="
    table = f"float16[1,S,{d // 2}]"
    return f"""g (float16[B,S,{(H + 2 * G) * d}] x, {table} c, {table} s, {table} c2)
        => (float16[B,S,{H * d}] y) <int64[3] cut = {{{cut}}}>
    {{
      {order} = Split <axis=-1> (x, cut)
      rq = onnxfuse.std.RotaryEmbedding {rotary}{H}> (q, c, s)
      rk = onnxfuse.std.RotaryEmbedding {rotary}{G}> (k, {", ".join(tables)})
      y = onnxfuse.std.Attention <is_causal=1, scale=0.2, q_num_heads={H}, kv_num_heads={G}> (rq, rk, v)
    }}"""


def lowered(text: str) -> Model:
    model = Model(parse_graph(text, 18))
    shapes.infer(model)
    lower(model, KernelTable(Target.parse("cuda:sm90"), None, custom_ops=False))
    return model


def check(model: Model, d: int, order: str = "q, k, v", interleaved: int = 0, second: str = "c") -> None:
    """Run the lowered graph and compare with the lifted ops' own references."""
    random = np.random.default_rng(0)
    b, s = 2, 5
    x = random.standard_normal((b, s, (H + 2 * G) * d)).astype(np.float32)
    angle = random.standard_normal((1, s, d // 2)).astype(np.float32)
    feeds = {"x": x, "c": np.cos(angle), "s": np.sin(angle), "c2": np.cos(angle + 1)}
    feeds = {name: value.astype(np.float16) for name, value in feeds.items()}
    wide = {name: value.astype(np.float32) for name, value in feeds.items()}
    sizes = {"q": H * d, "k": G * d, "v": G * d}
    names = [name.strip() for name in order.split(",")]
    ends = np.cumsum([sizes[name] for name in names])
    parts = dict(zip(names, np.split(wide["x"], ends[:-1], axis=-1), strict=True))
    rotate = registry.get(STD_DOMAIN, "RotaryEmbedding").reference
    q = rotate([parts["q"], wide["c"], wide["s"]], {"num_heads": H, "interleaved": interleaved})[0]
    k = rotate([parts["k"], wide[second], wide["s"]], {"num_heads": G, "interleaved": interleaved})[0]
    attrs = {"is_causal": 1, "scale": 0.2, "q_num_heads": H, "kv_num_heads": G}
    expected = registry.get(STD_DOMAIN, "Attention").reference([q, k, parts["v"]], attrs)[0]
    options = ort.SessionOptions()
    options.log_severity_level = 4
    session = ort.InferenceSession(model.to_proto().SerializeToString(), options, providers=["CPUExecutionProvider"])
    wanted = {i.name for i in session.get_inputs()}
    (got,) = session.run(None, {name: value for name, value in feeds.items() if name in wanted})
    assert np.abs(got.astype(np.float32) - expected).max() < 4e-3 * np.abs(expected).max()


@pytest.mark.parametrize("interleaved", [0, 1])
@pytest.mark.parametrize("d", [16, 64])
def test_rotation_and_split_go_inside(d: int, interleaved: int) -> None:
    model = lowered(graph(d, interleaved=interleaved))
    ops = [n.op for n in model.graph.nodes]
    assert "GroupQueryAttention" in ops and not {"Split", "RotaryEmbedding"} & set(ops)
    (attention,) = [n for n in model.graph.nodes if n.op == "GroupQueryAttention"]
    assert attention.inputs[0].name == "x" and attention.attrs["do_rotary"] == 1
    check(model, d, interleaved=interleaved)


def test_counts_reach_the_device_without_a_copy() -> None:
    """seqlens_k must not be computed in host memory: a copy to the device forbids capturing a CUDA graph."""
    model = lowered(graph(16))
    (attention,) = [n for n in model.graph.nodes if n.op == "GroupQueryAttention"]
    expand = attention.inputs[5].inputs[0]
    assert (expand.op, expand.inputs[0].inputs[0].op) == ("Expand", "Range")


def test_another_order_stays_split() -> None:
    model = lowered(graph(16, order="k, q, v"))
    ops = [n.op for n in model.graph.nodes]
    assert "Split" in ops and "RotaryEmbedding" not in ops
    check(model, 16, order="k, q, v")


def test_small_heads_are_rotated_outside() -> None:
    """The kernel's tables have a multiple of 8 columns."""
    model = lowered(graph(8))
    assert [n.op for n in model.graph.nodes].count("RotaryEmbedding") == 2
    check(model, 8)


def test_different_tables_are_not_mixed_up() -> None:
    model = lowered(graph(16, tables=("c2", "s")))
    assert [n.op for n in model.graph.nodes].count("RotaryEmbedding") == 2
    check(model, 16, second="c2")


def test_one_row_for_all_positions_is_expanded() -> None:
    """Kernels do not broadcast rows over the sequence, the spelled-out rotation does."""
    model = lowered("""g (float16[B,S,64] x, float16[1,1,8] c, float16[1,1,8] s) => (float16[B,S,64] y)
    { y = onnxfuse.std.RotaryEmbedding <num_heads=4> (x, c, s) }""")
    assert "RotaryEmbedding" not in [n.op for n in model.graph.nodes]
