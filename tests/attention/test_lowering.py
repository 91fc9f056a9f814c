"""Lowered Attention and RotaryEmbedding compute what the lifted ops mean, in every layout and with every mask."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from onnxfuse.graph import shapes
from onnxfuse.graph.model import Model
from onnxfuse.lower.kernels import KernelTable, Target
from onnxfuse.lower.lower import lower
from onnxfuse.ops import registry
from onnxfuse.ops.opdef import STD_DOMAIN
from onnxfuse.ruletest.cases import parse_graph
from onnxfuse.runtime.probe import OrtProbe

ort = pytest.importorskip("onnxruntime")

B, S, L, P, H, G, D = 2, 3, 5, 4, 4, 2, 8
SIZES = {"B": B, "S": S, "L": L, "P": P}


def lowered(text: str, opset: int = 18, target: str = "cpu") -> Model:
    model = Model(parse_graph(text, opset))
    shapes.infer(model)
    probe = OrtProbe() if target == "cpu" else None
    lower(model, KernelTable(Target.parse(target), probe, custom_ops=False))
    return model


def ops_of(model: Model) -> list[str]:
    return [node.op for node in model.graph.nodes]


def run(model: Model, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    proto = model.to_proto().SerializeToString()
    return ort.InferenceSession(proto, options, providers=["CPUExecutionProvider"]).run(None, feeds)


def random_feeds(model: Model, seed: int = 0) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    feeds = {}
    for value in model.graph.inputs:
        shape = [d if isinstance(d, int) else SIZES[str(d)] for d in value.shape]
        if value.dtype == "bool":
            feeds[value.name] = random.random(shape) < 0.6
        elif value.dtype == "int64":
            feeds[value.name] = random.integers(0, 6, shape)
        else:
            feeds[value.name] = random.standard_normal(shape).astype(np.float32)
    return feeds


def reference(op: str, inputs: list[np.ndarray | None], attrs: dict[str, Any]) -> list[np.ndarray]:
    return registry.get(STD_DOMAIN, op).reference(inputs, attrs)


def attention_text(packed: bool, kv: int, keys: str, mask: str, past: bool, attrs: str) -> str:
    if packed:
        q, k = f"float[B,S,{H * D}] q", f"[B,{keys},{kv * D}]"
        attrs += f", q_num_heads={H}, kv_num_heads={kv}"
        y = f"float[B,S,{H * D}] y"
    else:
        q, k, y = f"float[B,{H},S,{D}] q", f"[B,{kv},{keys},{D}]", f"float[B,{H},S,{D}] y"
    inputs = [q, f"float{k} k", f"float{k} v", *([mask] if mask else [])]
    operands = ["q", "k", "v", "m" if mask else ""]
    outputs, results = [y], ["y"]
    if past:
        inputs += [f"float[B,{kv},P,{D}] pk", f"float[B,{kv},P,{D}] pv"]
        operands += ["pk", "pv"]
        outputs += [f"float[B,{kv},N,{D}] nk", f"float[B,{kv},N,{D}] nv"]
        results += ["nk", "nv"]
    arguments = ", ".join(operands).rstrip(", ")
    call = f"{', '.join(results)} = onnxfuse.std.Attention <scale=0.25{attrs}> ({arguments})"
    return f"g ({', '.join(inputs)}) => ({', '.join(outputs)}) {{ {call} }}"


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("kv", [H, G])
@pytest.mark.parametrize(
    "mask", ["", "float[S,L] m", "float[B,1,S,L] m", "float[B,1,1,L] m", f"float[1,{H},S,L] m", "bool[B,1,S,L] m"]
)
def test_masks_and_layouts(packed: bool, kv: int, mask: str) -> None:
    attrs = ", nan_guard=1" if "bool" in mask else ""
    model = lowered(attention_text(packed, kv, "L", mask, False, attrs))
    assert "MultiHeadAttention" in ops_of(model) and "Softmax" not in ops_of(model)
    feeds = random_feeds(model)
    if "bool" in mask:
        feeds["m"][0, 0, 0] = False  # a query that sees nothing
    heads = {"q_num_heads": H, "kv_num_heads": kv} if packed else {}
    wanted = reference("Attention", [feeds[n] for n in ("q", "k", "v")] + [feeds.get("m")],
                       {"scale": 0.25, "nan_guard": int("bool" in mask), **heads})[0]  # fmt: skip
    np.testing.assert_allclose(run(model, feeds)[0], wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("length", [1, L])
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("kv", [H, G])
def test_a_mask_whose_length_is_not_proved(packed: bool, kv: int, length: int) -> None:
    model = lowered(attention_text(packed, kv, "L", "float[B,1,S,M] m", False, ""))
    assert "MultiHeadAttention" in ops_of(model)
    SIZES["M"] = length
    feeds = random_feeds(model)
    heads = {"q_num_heads": H, "kv_num_heads": kv} if packed else {}
    wanted = reference("Attention", [feeds[n] for n in "qkvm"], {"scale": 0.25, **heads})[0]
    np.testing.assert_allclose(run(model, feeds)[0], wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("past", [False, True])
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("kv", [H, G])
def test_values_of_another_size_than_keys(packed: bool, kv: int, past: bool) -> None:
    size = 12
    text = attention_text(packed, kv, "S", "", past, "")
    of_keys, of_values = (f"float[B,S,{kv * d}]" if packed else f"float[B,{kv},S,{d}]" for d in (D, size))
    text = text.replace(f"{of_keys} v", f"{of_values} v").replace(
        f"float[B,{kv},P,{D}] pv", f"float[B,{kv},P,{size}] pv"
    )
    text = text.replace(f"[B,{kv},N,{D}] nv", f"[B,{kv},N,{size}] nv")
    y = (f"float[B,S,{H * D}] y", f"float[B,S,{H * size}] y") if packed else (f"S,{D}] y", f"S,{size}] y")
    model = lowered(text.replace(*y))
    feeds = random_feeds(model)
    heads = {"q_num_heads": H, "kv_num_heads": kv} if packed else {}
    operands = [feeds["q"], feeds["k"], feeds["v"], None, feeds.get("pk"), feeds.get("pv")]
    wanted = reference("Attention", operands, {"scale": 0.25, **heads})
    for found, w in zip(run(model, feeds), wanted, strict=False):
        np.testing.assert_allclose(found, w, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("kv", [H, G])
@pytest.mark.parametrize("past", [0, 1, P])
def test_caches_grow(packed: bool, kv: int, past: int) -> None:
    model = lowered(attention_text(packed, kv, "S", "", True, ""))
    assert "MultiHeadAttention" in ops_of(model)
    feeds = random_feeds(model)
    for name in ("pk", "pv"):
        feeds[name] = feeds[name][:, :, :past]
    heads = {"q_num_heads": H, "kv_num_heads": kv} if packed else {}
    operands = [feeds["q"], feeds["k"], feeds["v"], None, feeds["pk"], feeds["pv"]]
    wanted = reference("Attention", operands, {"scale": 0.25, **heads})
    for found, w in zip(run(model, feeds), wanted, strict=False):
        np.testing.assert_allclose(found, w, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("past", [False, True])
@pytest.mark.parametrize("kv", [H, G])
def test_causal(kv: int, past: bool) -> None:
    model = lowered(attention_text(True, kv, "S", "", past, ", is_causal=1"))
    feeds = random_feeds(model)
    operands = [feeds["q"], feeds["k"], feeds["v"], None, feeds.get("pk"), feeds.get("pv")]
    attrs = {"scale": 0.25, "is_causal": 1, "q_num_heads": H, "kv_num_heads": kv}
    np.testing.assert_allclose(run(model, feeds)[0], reference("Attention", operands, attrs)[0], rtol=1e-5, atol=1e-5)


def test_a_row_without_keys_is_uniform_for_a_finite_mask_and_nan_for_an_infinite_one() -> None:
    model = lowered(attention_text(True, H, "L", "float[B,1,S,L] m", False, ""))
    feeds = random_feeds(model)
    feeds["m"][:] = 0
    feeds["m"][0] = np.finfo(np.float32).min
    feeds["m"][1, 0, 0] = -np.inf
    (y,) = run(model, feeds)
    mean = feeds["v"][0].mean(axis=0)
    np.testing.assert_allclose(y[0], np.broadcast_to(mean, y[0].shape), rtol=1e-5, atol=1e-5)
    assert np.isnan(y[1, 0]).all() and not np.isnan(y[1, 1:]).any()


STRUCTURES: dict[str, dict[str, Any]] = {
    "causal": {"is_causal": 1}, "window": {"is_causal": 1, "window": 2}, "window-alone": {"window": 2},
}  # fmt: skip


@pytest.mark.parametrize("structure", list(STRUCTURES))
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("kv", [H, G])
@pytest.mark.parametrize("mask", ["", "float[B,1,S,N] m", "float[N] m", "bool[B,1,1,N] m"])
@pytest.mark.parametrize("past", [None, 0, 4])
@pytest.mark.parametrize("sink", [False, True])
def test_what_the_kernel_does_not_hide_is_a_bias(
    structure: str, packed: bool, kv: int, mask: str, past: int | None, sink: bool
) -> None:
    attrs = {"scale": 0.25, "nan_guard": int("bool" in mask), **STRUCTURES[structure]}
    if mask == "float[N] m":
        mask = "float[1,N] m"
    given = "".join(f", {name}={value}" for name, value in attrs.items() if name != "scale")
    text = attention_text(packed, kv, "S", mask, past is not None, given)
    if sink:
        text = text.replace(") => (", f", float[{H}] sink) => (", 1)
        head, operands = text.rsplit("(", 1)
        listed = operands.split(")")[0].split(", ")
        text = f"{head}({', '.join([*listed, *[''] * (7 - len(listed)), 'sink'])}) }}"
    model = lowered(text)
    assert "MultiHeadAttention" in ops_of(model) and "Softmax" not in ops_of(model)
    SIZES["N"] = S + (past or 0)
    feeds = random_feeds(model)
    for name in ("pk", "pv") if past is not None else ():
        feeds[name] = feeds[name][:, :, :past]
    if "bool" in mask:
        feeds["m"][0, 0, 0] = False  # queries that see nothing
    names = ("q", "k", "v", "m", "pk", "pv", "", "sink")
    heads = {"q_num_heads": H, "kv_num_heads": kv} if packed else {}
    wanted = reference("Attention", [feeds.get(n) for n in names], {**attrs, **heads})
    for found, w in zip(run(model, feeds), wanted, strict=False):
        np.testing.assert_allclose(found, w, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kv", [H, G])
@pytest.mark.parametrize("mask", ["", "float[B,1,S,L] m", f"float[{H},1,L] m"])
def test_sinks_without_a_causal_mask(kv: int, mask: str) -> None:
    text = attention_text(True, kv, "L", mask, False, "").replace(") => (", f", float[{H}] sink) => (", 1)
    given = "m" if mask else ""
    model = lowered(text.replace("(q, k, v, m)" if mask else "(q, k, v)", f"(q, k, v, {given}, , , , sink)"))
    feeds = random_feeds(model)
    wanted = reference("Attention", [feeds.get(n) for n in ("q", "k", "v", "m", "", "", "", "sink")],
                       {"scale": 0.25, "q_num_heads": H, "kv_num_heads": kv})[0]  # fmt: skip
    np.testing.assert_allclose(run(model, feeds)[0], wanted, rtol=1e-5, atol=1e-5)


def test_sinks_of_a_causal_model_on_cuda_go_into_one_kernel() -> None:
    text = attention_text(True, G, "S", "", False, ", is_causal=1, window=2").replace("float", "float16")
    text = text.replace(") => (", f", float16[{H}] sink) => (", 1).replace("(q, k, v)", "(q, k, v, , , , , sink)")
    model = lowered(text, target="cuda:sm90")
    (node,) = [n for n in model.graph.nodes if n.op == "GroupQueryAttention"]
    assert [v.name for v in node.inputs[7:]] == ["", "", "", "", "sink"] and node.attrs["local_window_size"] == 2


@pytest.mark.parametrize("structure", [{}, {"window": 2}])
@pytest.mark.parametrize("kv", [H, G])
@pytest.mark.parametrize("target", ["cpu", "cuda:sm90"])
@pytest.mark.parametrize("softcap", [0.0, 5.0])
@pytest.mark.parametrize("sink", [False, True])
def test_group_query_attention(structure: dict[str, int], kv: int, target: str, softcap: float, sink: bool) -> None:
    """In float16, which both providers' kernels take; run by the one for CPU."""
    attrs = {"is_causal": 1, "softcap": softcap, **structure}
    written = "".join(f", {name}={value}" for name, value in attrs.items())
    text = attention_text(True, kv, "S", "", False, written).replace("float", "float16")
    if sink:
        text = text.replace(") => (", f", float16[{H}] sink) => (", 1).replace("(q, k, v)", "(q, k, v, , , , , sink)")
    model = lowered(text, target=target)
    needed = softcap or (target != "cpu" and (kv != H or structure or sink))
    assert ("GroupQueryAttention" in ops_of(model)) is bool(needed)
    if target != "cpu" and not needed:
        return  # MultiHeadAttention in float16, which only CUDA has
    feeds = {name: value.astype(np.float16) for name, value in random_feeds(model).items()}
    names = ("q", "k", "v", "", "", "", "", "sink")
    wanted = reference("Attention", [feeds.get(n) for n in names],
                       {"scale": 0.25, "q_num_heads": H, "kv_num_heads": kv, **attrs})[0]  # fmt: skip
    np.testing.assert_allclose(run(model, feeds)[0].astype(np.float32), wanted, rtol=4e-3, atol=4e-3)


@pytest.mark.parametrize("given", [{"softcap": 5.0}, {"softcap": 5.0, "window": 2}])
def test_what_no_kernel_takes_is_spelled_out(given: dict[str, Any]) -> None:
    attrs = "".join(f", {name}={value}" for name, value in given.items())
    model = lowered(attention_text(True, H, "S", "", False, attrs))
    assert "Softmax" in ops_of(model)
    feeds = random_feeds(model)
    wanted = reference("Attention", [feeds[n] for n in ("q", "k", "v")],
                       {"scale": 0.25, "q_num_heads": H, "kv_num_heads": H, **given})[0]  # fmt: skip
    np.testing.assert_allclose(run(model, feeds)[0], wanted, rtol=1e-5, atol=1e-5)


def test_softcap_of_a_causal_grouped_attention_on_cuda() -> None:
    text = attention_text(True, G, "S", "", False, ", is_causal=1, softcap=5.0, window=2").replace("float", "float16")
    model = lowered(text, target="cuda:sm90")
    (node,) = [n for n in model.graph.nodes if n.op == "GroupQueryAttention"]
    assert node.attrs["softcap"] == 5.0 and node.attrs["local_window_size"] == 2
    assert node.attrs["kv_num_heads"] == G and "Expand" not in ops_of(model)[ops_of(model).index(node.op) + 1 :]


def test_layers_share_what_is_made_of_one_mask() -> None:
    model = lowered(
        f"""g (float[B,S,{H * D}] x, float[B,1,1,S] m) => (float[B,S,{H * D}] y) {{
          a = onnxfuse.std.Attention <scale=0.25, q_num_heads={H}, kv_num_heads={H}> (x, x, x, m)
          y = onnxfuse.std.Attention <scale=0.25, q_num_heads={H}, kv_num_heads={H}> (a, a, a, m)
        }}"""
    )
    assert ops_of(model).count("Expand") == 1 and ops_of(model).count("MultiHeadAttention") == 2


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("tables", ["1,S", "B,S", "A,S"])
@pytest.mark.parametrize(("size", "interleaved"), [(D, 0), (4, 0), (D, 1)])
@pytest.mark.parametrize("opset", [18, 23])
def test_rotary_tables(packed: bool, tables: str, size: int, interleaved: int, opset: int) -> None:
    x = f"float[B,S,{H * D}]" if packed else f"float[B,{H},S,{D}]"
    attrs = {
        "interleaved": interleaved,
        "num_heads": H if packed else 0,
        "rotary_embedding_dim": size if size < D else 0,
    }
    written = ", ".join(f"{k}={v}" for k, v in attrs.items())
    model = lowered(
        f"""g ({x} x, float[{tables},{size // 2}] c, float[{tables},{size // 2}] s) => ({x} y) {{
          y = onnxfuse.std.RotaryEmbedding <{written}> (x, c, s)
        }}""",
        opset,
    )
    assert "RotaryEmbedding" in ops_of(model) and "Mul" not in [n.op for n in model.graph.nodes if "sin" in n.name]
    for batch in (1, B) if tables.startswith("A") else (None,):
        SIZES["A"] = batch or 1
        feeds = random_feeds(model)
        (wanted,) = reference("RotaryEmbedding", [feeds["x"], feeds["c"], feeds["s"]], attrs)
        np.testing.assert_allclose(run(model, feeds)[0], wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("positions", ["B,S", "1,S"])
def test_rotary_positions(positions: str) -> None:
    model = lowered(
        f"""g (float[B,{H},S,{D}] x, float[9,4] c, float[9,4] s, int64[{positions}] p) => (float[B,{H},S,{D}] y) {{
          y = onnxfuse.std.RotaryEmbedding (x, c, s, p)
        }}"""
    )
    assert "RotaryEmbedding" in ops_of(model)
    feeds = random_feeds(model)
    (wanted,) = reference("RotaryEmbedding", [feeds[n] for n in "xcsp"], {})
    np.testing.assert_allclose(run(model, feeds)[0], wanted, rtol=1e-5, atol=1e-5)
