"""Every decoder of the corpus with a cache generates in shared buffers what the exported file generates.

Only ONNX Runtime and NumPy take part: the exported model without optimizations and with its cache growing, the other
one with every optimization and one buffer bound as past and as present.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import onnxfuse
from onnxfuse import pipeline
from onnxfuse.lower.kernels import Target

ort = pytest.importorskip("onnxruntime")

CORPUS = Path(os.environ.get("ONNXFUSE_CORPUS") or Path(__file__).parents[2] / "models")
RECORDS = [r for r in json.loads((CORPUS / "manifest.json").read_text())["models"]
           if any("past" in value["name"] for value in r["inputs"])]
NAMES = {"ids": lambda r: r["file"].removesuffix(".onnx")}
TOLERANCE = {"float32": 2e-4, "float16": 2e-2}
INTEGER_TOLERANCE = 3e-2  # roundings of activations to eight bits, which depend on the order of sums
ROWS = 24


def build(record: dict[str, Any], target: str = "cpu") -> tuple[onnx.ModelProto, onnx.ModelProto, Any]:
    exported = onnx.load(CORPUS / record["file"])
    made = pipeline.build(exported, pipeline.Options(target=Target.parse(target), kv_cache="shared"))
    return exported, made.model.to_proto(), made.shared_cache


def session(proto: onnx.ModelProto, optimized: bool) -> Any:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    if not optimized:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return ort.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])


class Growing:
    def __init__(self, exported: onnx.ModelProto, caches: Any, batch: int) -> None:
        self.session = session(exported, optimized=False)
        self.caches = caches
        self.kept = {past: empty(self.session, past, batch, 0) for past, _ in caches}

    def step(self, feeds: dict[str, np.ndarray]) -> np.ndarray:
        names = [o.name for o in self.session.get_outputs()]
        made = dict(zip(names, self.session.run(None, {**feeds, **self.kept}), strict=True))
        self.kept = {past: made[present] for past, present in self.caches}
        return made["logits"]


class InPlace:
    def __init__(self, shared: onnx.ModelProto, caches: Any, batch: int) -> None:
        self.session = session(shared, optimized=True)
        self.caches = caches
        # What is behind the tokens is never read: let it be seen if it is.
        self.buffers = {past: ort.OrtValue.ortvalue_from_numpy(empty(self.session, past, batch, ROWS) + 77)
                        for past, _ in caches}

    def step(self, feeds: dict[str, np.ndarray]) -> np.ndarray:
        binding = self.session.io_binding()
        for name, value in feeds.items():
            binding.bind_cpu_input(name, value)
        binding.bind_output("logits")
        for past, present in self.caches:
            binding.bind_ortvalue_input(past, self.buffers[past])
            binding.bind_ortvalue_output(present, self.buffers[past])
        self.session.run_with_iobinding(binding)
        return binding.get_outputs()[0].numpy()


def empty(made: Any, name: str, batch: int, rows: int) -> np.ndarray:
    given = next(i for i in made.get_inputs() if i.name == name)
    dtype = {"tensor(float)": np.float32, "tensor(float16)": np.float16}[given.type]
    size = given.shape[3] if isinstance(given.shape[3], int) else 16
    return np.zeros((batch, given.shape[1], rows, size), dtype)


def feeds(made: Any, mask: np.ndarray, new: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
    counted = mask.sum(axis=1, keepdims=True)
    positions = np.maximum(counted - new, 0) + np.arange(new) if mask.shape[1] > new else np.arange(new)
    values = {
        "input_ids": rng.integers(0, 250, (len(mask), new)), "attention_mask": mask,
        "position_ids": np.broadcast_to(positions, (len(mask), new)).astype(np.int64).copy(),
    }
    return {i.name: values[i.name] for i in made.get_inputs() if i.name in values}


#: Lengths of the prompts, what they are padded to, and how many tokens come in each later run.
COURSES = {
    "one sequence": ([7], 7, (1, 1, 1)),
    "two prompts of different lengths": ([6, 3], 6, (1, 1, 1, 1)),
    "two equal prompts": ([4, 4], 4, (1, 1)),
    "several tokens with a cache": ([5], 5, (3, 1, 4)),
    "several tokens after a padded prompt": ([4], 9, (3, 1, 2)),
    "from one token on": ([1, 1], 1, (1, 1, 1)),
    "all prompts padded": ([2, 5, 3], 8, (1, 1)),
}


@pytest.mark.parametrize("record", [r for r in RECORDS if r["dtype"] in TOLERANCE], **NAMES)
@pytest.mark.parametrize("course", COURSES)
def test_the_same_is_generated(record: dict[str, Any], course: str) -> None:
    lengths, width, steps = COURSES[course]
    exported, shared, cache = build(record)
    growing, in_place = (kind(proto, cache.caches, len(lengths)) for kind, proto in
                         ((Growing, exported), (InPlace, shared)))
    mask = (np.arange(width) < np.array(lengths)[:, None]).astype(np.int64)
    rng = np.random.default_rng(3)
    for number, new in enumerate((width, *steps)):
        if number:
            mask = np.concatenate([mask, np.ones((len(lengths), new), np.int64)], axis=1)
        given = feeds(growing.session, mask, new, rng)
        wanted, got = growing.step(given), in_place.step(given)
        kept = mask[:, mask.shape[1] - new :].astype(bool)
        assert got.shape == wanted.shape and got.dtype == wanted.dtype
        difference = np.abs(got[kept].astype(np.float64) - wanted[kept]).max() / np.abs(wanted[kept]).max()
        limit = INTEGER_TOLERANCE if "int" in record["file"] else TOLERANCE[record["dtype"]]
        assert difference <= limit, f"{course}, run {number}"


@pytest.mark.parametrize("record", RECORDS, **NAMES)
@pytest.mark.parametrize("target", ["cpu", "cuda:sm90"])
def test_what_the_graph_becomes(record: dict[str, Any], target: str) -> None:
    if target != "cpu" and record["dtype"] == "float32" and not record.get("already_fused"):
        pytest.skip("the CUDA provider has no GroupQueryAttention in float32")
    exported, shared, cache = build(record, target)
    layers = record["expected"]["attention"]
    assert len(cache.caches) == 2 * layers
    ops = Counter(node.op_type for node in shared.graph.node)
    assert ops["GroupQueryAttention"] == layers and not ops["MultiHeadAttention"] and not ops["Softmax"]
    for before, after in ((exported.graph.input, shared.graph.input), (exported.graph.output, shared.graph.output)):
        assert [v.name for v in before] == [v.name for v in after]
    dims = {v.name: [d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim]
            for v in [*shared.graph.input, *shared.graph.output]}
    read = {name for node in shared.graph.node for name in node.input}
    for past, present in cache.caches:
        assert dims[past] == dims[present] and dims[past][2] == "max_sequence_length"
        readers = [node for node in shared.graph.node if past in node.input]
        assert [node.op_type for node in readers] == ["GroupQueryAttention"]
        assert present in readers[0].output and present not in read
        assert list(readers[0].input).index(past) + 2 == list(readers[0].output).index(present) + 4
    assert "attention_mask" in read and not cache.added_inputs


@pytest.mark.parametrize("record", [r for r in RECORDS if not r.get("already_fused") and r["dtype"] in TOLERANCE],
                         **NAMES)
def test_left_padding_gives_no_numbers(record: dict[str, Any]) -> None:
    _, shared, cache = build(record)
    in_place = InPlace(shared, cache.caches, 2)
    mask = np.array([[0, 0, 1, 1, 1], [1, 1, 1, 1, 0]])
    logits = in_place.step(feeds(in_place.session, mask, 5, np.random.default_rng(0)))
    assert np.isnan(logits[0]).all() and np.isfinite(logits[1, :4]).all()
    mask = np.concatenate([mask, np.ones((2, 1), np.int64)], axis=1)
    logits = in_place.step(feeds(in_place.session, mask, 1, np.random.default_rng(0)))
    assert np.isnan(logits[0]).all() and np.isfinite(logits[1]).all()


@pytest.mark.parametrize("record", [r for r in RECORDS if r["dtype"] in TOLERANCE][:1], **NAMES)
def test_more_tokens_than_rows_are_refused(record: dict[str, Any]) -> None:
    _, shared, cache = build(record)
    in_place = InPlace(shared, cache.caches, 1)
    mask = np.ones((1, ROWS), np.int64)
    in_place.step(feeds(in_place.session, mask, ROWS, np.random.default_rng(0)))
    before = {past: buffer.numpy().copy() for past, buffer in in_place.buffers.items()}
    mask = np.ones((1, ROWS + 1), np.int64)
    with pytest.raises(Exception, match=r"GroupQueryAttention|total_sequence_length"):
        in_place.step(feeds(in_place.session, mask, 1, np.random.default_rng(0)))
    assert all(np.array_equal(before[past], buffer.numpy()) for past, buffer in in_place.buffers.items())


def test_rewriting_twice_changes_nothing() -> None:
    record = next(r for r in RECORDS if not r.get("already_fused"))
    _, once, cache = build(record)
    again = pipeline.build(once, pipeline.Options(target=Target("cpu"), kv_cache="shared"))
    assert again.shared_cache is not None and again.shared_cache.grouped
    assert again.shared_cache.caches == cache.caches and again.shared_cache.length == cache.length
    assert Counter(n.op_type for n in again.model.to_proto().graph.node) == Counter(n.op_type for n in once.graph.node)


def test_weights_in_int8(tmp_path: Path) -> None:
    quantization = pytest.importorskip("onnxruntime.quantization")
    record = next(r for r in RECORDS if r["dtype"] == "float32" and not r.get("already_fused"))
    quantization.quantize_dynamic(CORPUS / record["file"], tmp_path / "int8.onnx")
    exported = onnx.load(tmp_path / "int8.onnx")
    assert any("Integer" in node.op_type for node in exported.graph.node)
    result = onnxfuse.optimize(tmp_path / "int8.onnx", tmp_path / "shared.onnx", target="cpu", kv_cache="shared")
    assert result.report["kv_cache"]["generation"]["status"] == "passed"
    assert result.report["ops_after"]["com.microsoft::GroupQueryAttention"] == record["expected"]["attention"]
    assert any("Integer" in op for op in result.report["ops_after"])
