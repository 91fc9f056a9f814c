"""What optimizing must give on real exports, one test a promise.

Rotary tables made for batch 1 serve every batch; quantized models and those whose embedding is also their last product
do not grow; and every fused op is one whose fault `verify` would see.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper, numpy_helper

import onnxfuse
from onnxfuse.runtime.session import Runner
from onnxfuse.verify.check import Verifier

CORPUS = Path(os.environ.get("ONNXFUSE_CORPUS") or Path(__file__).parent.parent / "models").resolve()
RECORDS = json.loads((CORPUS / "manifest.json").read_text())["models"]


# Rotary tables of batch 1 -------------------------------------------------------------------------------------------


def one_by_one(runner: Runner, feeds: dict[str, np.ndarray], batch: int) -> dict[str, np.ndarray]:
    """Each sequence on its own, which is all that such an export can run."""
    rows = [runner.run({name: value[i : i + 1] for name, value in feeds.items()}) for i in range(batch)]
    return {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}


def check_batches(exported: onnx.ModelProto, feeds: dict[str, np.ndarray], tolerance: float) -> None:
    """`feeds` has several sequences, with a first axis in every input."""
    batch = len(next(iter(feeds.values())))
    fused = Runner(onnxfuse.optimize(exported, target="cpu", verify=False).model, level="all")
    wanted = one_by_one(Runner(exported), feeds, batch)
    for name, value in fused.run(feeds).items():
        assert value.shape == wanted[name].shape and np.isfinite(wanted[name]).all()
        assert np.abs(value - wanted[name]).max() <= tolerance * np.abs(wanted[name]).max(), name


BATCH_1_ONLY = [r for r in RECORDS if r.get("ort_batch_gt1_error")]


@pytest.mark.corpus
@pytest.mark.parametrize("record", BATCH_1_ONLY, ids=lambda r: r["file"].removesuffix(".onnx"))
def test_batch_1_only_exports_run_at_batch_2(record: dict[str, Any]) -> None:
    exported = onnx.load(CORPUS / record["file"])
    random = np.random.default_rng(1)
    mask = np.ones((2, 9), np.int64)
    mask[1, :3] = 0  # left padding
    made = {"input_ids": random.integers(3, 250, (2, 9)), "attention_mask": mask,
            "position_ids": np.arange(9)[None].repeat(2, 0)}  # fmt: skip
    feeds = {value.name: made[value.name] for value in exported.graph.input}
    with pytest.raises(onnxfuse.errors.ModelError, match="RotaryEmbedding"):
        Runner(exported).run(feeds)
    check_batches(exported, feeds, 2e-4)


@pytest.mark.parametrize("heads", [0, 4])
@pytest.mark.parametrize("positions", [False, True])
def test_one_rotary_embedding_with_tables_of_batch_1(heads: int, positions: bool) -> None:
    """The op as exporters write it at opset 23, packed or not, with tables or with positions of one sequence."""
    x = "float[B,S,64] x" if heads else "float[B,4,S,16] x"
    attrs = " <num_heads=4>" if heads else ""
    tables = "float[8,8] c, float[8,8] s" if positions else "float[1,S,8] c, float[1,S,8] s"
    given, operands = (", int64[1,S] p", "(x, c, s, p)") if positions else ("", "(x, c, s)")
    text = f"""<ir_version: 10, opset_import: ["": 23]>
    g ({x}, {tables}{given}) => (float[B,S,N,M] y) {{ r = RotaryEmbedding{attrs} {operands} y = Identity (r) }}"""
    exported = onnx.parser.parse_model(text.replace("float[B,S,N,M] y", x[:-1] + "y"))
    random = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return random.standard_normal(shape).astype(np.float32)

    feeds = {"x": normal(3, 5, 64) if heads else normal(3, 4, 5, 16)}
    shared = {"c": normal(8, 8), "s": normal(8, 8)} if positions else {"c": normal(1, 5, 8), "s": normal(1, 5, 8)}
    if positions:
        shared["p"] = np.array([[0, 3, 1, 7, 2]])
    fused = Runner(onnxfuse.optimize(exported, target="cpu", verify=False).model, level="all")
    plain = Runner(exported)
    wanted = np.concatenate([plain.run({"x": row[None], **shared})["y"] for row in feeds["x"]])
    np.testing.assert_allclose(fused.run({**feeds, **shared})["y"], wanted, rtol=1e-5, atol=1e-5)


# Size ---------------------------------------------------------------------------------------------------------------


def is_quantized(model: onnx.ModelProto) -> bool:
    """Products of integers, or weights of 8 bits or less."""
    return any(t.data_type in (2, 3, 21, 22) and len(t.dims) > 1 for t in model.graph.initializer)


def is_tied(model: onnx.ModelProto) -> bool:
    """One table is read by a Gather and, perhaps transposed, by a product."""
    producer = {name: node for node in model.graph.node for name in node.output}

    def root(name: str) -> str:
        while name in producer and producer[name].op_type in ("Transpose", "Identity", "Cast", "DequantizeLinear"):
            name = producer[name].input[0]
        return name

    tables = {root(n.input[0]) for n in model.graph.node if n.op_type == "Gather"}
    weights = {root(n.input[1]) for n in model.graph.node if n.op_type in ("MatMul", "Gemm")}
    return bool(tables & weights & {t.name for t in model.graph.initializer})


def dynamically_quantized(record: dict[str, Any], folder: Path) -> Path:
    """The model with int8 weights, as ONNX Runtime's tool makes it."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    path = folder / f"int8-{record['file']}"
    quantize_dynamic(CORPUS / record["file"], path, weight_type=QuantType.QInt8)
    return path


def check_size(path: Path, target: str) -> None:
    report = onnxfuse.optimize(path, path.parent / f"fused-{path.name}", target=target, verify=False).report
    scalars = 2048  # bounds, axes and numbers that rewrites need
    assert report["bytes"]["weights_after"] <= report["bytes"]["weights_before"] + scalars
    if onnxfuse.verify.check.narrowest(onnx.load(path)) != "bfloat16":  # which the CPU computes between Casts
        assert (path.parent / f"fused-{path.name}").stat().st_size <= path.stat().st_size


KINDS = {"quantized": is_quantized, "tied": is_tied}
PRESENT = [r for r in RECORDS if (CORPUS / r["file"]).exists()]
OF_KIND = [(kind, r["file"]) for r in PRESENT for kind, holds in KINDS.items() if holds(onnx.load(CORPUS / r["file"]))]


@pytest.mark.corpus
@pytest.mark.parametrize("target", ["cpu", "cuda:sm90"])
@pytest.mark.parametrize(("kind", "name"), OF_KIND)
def test_quantized_and_tied_models_do_not_grow(kind: str, name: str, target: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes((CORPUS / name).read_bytes())
    check_size(path, target)


TO_QUANTIZE = [r for r in PRESENT if r["dtype"] == "float32" and r["opset"] == 18 and r.get("npz")][:4]


@pytest.mark.parametrize("record", TO_QUANTIZE, ids=lambda r: r["file"].removesuffix(".onnx"))
def test_models_quantized_now_do_not_grow_and_stay_right(record: dict[str, Any], tmp_path: Path) -> None:
    path = dynamically_quantized(record, tmp_path)
    assert is_quantized(onnx.load(path))
    check_size(path, "cpu")
    result = onnxfuse.optimize(path, target="cpu")
    assert result.report["verify"]["status"] == "passed" and not result.report["reverted"]


FLOAT32 = [r for r in PRESENT if r["dtype"] == "float32" and r.get("npz") and "genai" not in r["exporter"]]


@pytest.mark.corpus
@pytest.mark.parametrize("record", FLOAT32[::9], ids=lambda r: r["file"].removesuffix(".onnx"))
def test_models_of_four_bits_now_are_fused_and_right(record: dict[str, Any], tmp_path: Path) -> None:
    """With int8 activations granted, as model builders do by default."""
    quantizer = pytest.importorskip("onnxruntime.quantization.matmul_nbits_quantizer")
    quantizer.logger.setLevel("WARNING")
    made = quantizer.MatMulNBitsQuantizer(
        onnx.load(CORPUS / record["file"]), block_size=32, is_symmetric=True, accuracy_level=4
    )
    made.process()
    path = tmp_path / record["file"]
    made.model.save_model_to_file(str(path), False)
    if not any(n.op_type == "MatMulNBits" for n in onnx.load(path).graph.node):
        pytest.skip("no product of it can be quantized")
    report = onnxfuse.optimize(path, target="cpu").report
    assert report["verify"]["status"] == "passed" and not report["reverted"] and report["fusions"]
    assert all(output["tolerance"] < 1e-3 for output in report["verify"]["outputs"])


def blocks_before_and_after(record: dict[str, Any], changed: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The blocks found in the model as exported, and in what was made of it, whose fusions must be right."""
    before = onnxfuse.optimize(CORPUS / record["file"], target="cpu", verify=False, dry_run=True).report
    after = onnxfuse.optimize(changed, changed.parent / "out.onnx", target="cpu").report
    assert after["verify"]["status"] == "passed" and not after["reverted"]
    return before["blocks"], after["blocks"]


HALVED = [r for i, r in enumerate(FLOAT32) if i % 9 == 7 or r["file"].startswith(("gpt2-ts14", "mistral-dyn18"))]


@pytest.mark.corpus
@pytest.mark.parametrize("record", HALVED, ids=lambda r: r["file"].removesuffix(".onnx"))
def test_models_in_half_precision_now_keep_their_blocks(record: dict[str, Any], tmp_path: Path) -> None:
    from onnxruntime.transformers.float16 import convert_float_to_float16

    path = tmp_path / record["file"]
    onnx.save(convert_float_to_float16(onnx.load(CORPUS / record["file"])), path)
    before, after = blocks_before_and_after(record, path)
    assert after == before


#: In other words after ONNX Runtime's own fusions: a bias in a skip norm, a first norm without positions beside it.
ELSEWHERE = {"matmul_bias", "bcast_add_layernorm"}
#: A sample, and those in which it moves a factor across a tanh or lays out a convolution.
MOVED = {"gemma2", "nanogpt_tanh", "siglip_vision"}
OPTIMIZED = [r for i, r in enumerate(FLOAT32) if i % 9 == 4 or r["family"] in MOVED]


@pytest.mark.corpus
@pytest.mark.parametrize("level", ["ORT_ENABLE_EXTENDED", "ORT_ENABLE_ALL"])
@pytest.mark.parametrize("record", OPTIMIZED, ids=lambda r: r["file"].removesuffix(".onnx"))
def test_models_that_the_runtime_optimized_keep_their_blocks(
    record: dict[str, Any], level: str, tmp_path: Path
) -> None:
    path = tmp_path / record["file"]
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
    options.optimized_model_filepath, options.log_severity_level = str(path), 4
    onnxruntime.InferenceSession(CORPUS / record["file"], options, providers=["CPUExecutionProvider"])
    before, after = blocks_before_and_after(record, path)
    fewer = {b: n for b, n in before.items() if isinstance(n, int) and after.get(b, 0) < n}
    assert not fewer.keys() - ELSEWHERE


# What verification sees ---------------------------------------------------------------------------------------------

#: Ops that only rewrites (or exporters that fuse) make; one that is wrong must be seen.
FUSED = {"LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization", "Attention", "RotaryEmbedding",
         "Gelu", "Swish", "HardSwish"}  # fmt: skip


def fused_outputs(model: onnx.ModelProto) -> list[str]:
    return [n.output[0] for n in model.graph.node if n.domain in ("com.microsoft", "onnxfuse") or n.op_type in FUSED]


def broken(model: onnx.ModelProto, name: str) -> onnx.ModelProto:
    """The model with one value half as large again, and a number more."""
    result = onnx.ModelProto()
    result.CopyFrom(model)
    nodes = list(result.graph.node)
    index = next(i for i, node in enumerate(nodes) if name in node.output)
    nodes[index].output[list(nodes[index].output).index(name)] = f"{name}__right"
    dtype = {v.name: v.type.tensor_type.elem_type for v in [*model.graph.value_info, *model.graph.output]}.get(name, 1)
    kind = helper.tensor_dtype_to_np_dtype(dtype)
    result.graph.initializer.append(numpy_helper.from_array(np.array(1.5, kind), f"{name}__factor"))
    result.graph.initializer.append(numpy_helper.from_array(np.array(0.25, kind), f"{name}__more"))
    inserted = [helper.make_node("Mul", [f"{name}__right", f"{name}__factor"], [f"{name}__scaled"]),
                helper.make_node("Add", [f"{name}__scaled", f"{name}__more"], [name])]  # fmt: skip
    del result.graph.node[:]
    result.graph.node.extend([*nodes[: index + 1], *inserted, *nodes[index + 1 :]])
    return result


WATCHED = [name for kind, name in OF_KIND] + [r["file"] for r in BATCH_1_ONLY]


@pytest.mark.corpus
@pytest.mark.parametrize("name", sorted(set(WATCHED)))
def test_no_output_depends_on_a_fusion_that_verify_does_not_see(name: str) -> None:
    exported = onnx.load(CORPUS / name)
    result = onnxfuse.optimize(CORPUS / name, target="cpu")
    assert {o["name"] for o in result.report["verify"]["outputs"]} == {o.name for o in exported.graph.output}
    fused = onnx.shape_inference.infer_shapes(result.model)
    verifier = Verifier(exported, base_dir=CORPUS)
    assert verifier.check(fused).ok
    watched = fused_outputs(fused)
    assert watched
    unseen = [value for value in watched if verifier.check(broken(fused, value)).ok]
    assert not unseen
