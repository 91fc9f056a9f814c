"""The tuner without a GPU: what it measures, what it keeps, how it resumes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from onnxfuse import tune
from onnxfuse.errors import ModelError, UsageError
from onnxfuse.runtime.kernels import Plan, Shape, Variant

VARIANTS = [
    Variant("stream", 0, 8, 64, False, 24, 8),
    Variant("stream", 10, 8, 16, False, 40, 1),
    Variant("stream", 1, 64, 64, False, 11, 8),
    Variant("tile", 0, 128, 256, False, 4, 1),
    Variant("tile", 1, 128, 256, True, 4, 1),
]
SLOW, FAST, WRONG = Plan(), Plan("stream", 0, 11, 2, 1, 8, 0, 8), Plan("stream", 0, 11, 4, 1, 8, 0, 8)


class FakeKernels:
    """The plan FAST takes half the time of any other, WRONG none at all but gives a wrong result."""

    architecture = 90
    opened: list[Shape]

    def __init__(self) -> None:
        type(self).opened = []

    def variants(self) -> list[Variant]:
        return VARIANTS

    def chosen(self, shape: Shape) -> Plan:
        return SLOW

    def modelled(self, shape: Shape, plan: Plan) -> float | None:
        return None

    @contextmanager
    def bench(self, shape: Shape) -> Iterator[FakeKernels]:
        self.opened.append(shape)
        yield self

    def measure(self, plan: Plan, seconds: float) -> tuple[float, float] | None:
        if plan == WRONG:
            return 0.1, 0.5
        if plan.path == "vendor":
            return None
        return (5.0 if plan == FAST else 10.0), 2e-4


@pytest.fixture
def model(tmp_path: Path) -> Path:
    def weight(name: str, rows: int, k: int) -> onnx.TensorProto:
        return numpy_helper.from_array(np.zeros((rows, k), np.float16), name)

    nodes = [
        helper.make_node("Linear", ["x", "w0"], ["a"], domain="onnxfuse", norm="rms"),
        helper.make_node("Linear", ["a", "w1"], ["b"], domain="onnxfuse"),
        helper.make_node("Linear", ["b", "w2", "", "x"], ["c"], domain="onnxfuse"),
        helper.make_node("GatedLinear", ["c", "w3"], ["y"], domain="onnxfuse"),
    ]
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes, "g", [value("x", TensorProto.FLOAT16, ["n", 64])], [value("y", TensorProto.FLOAT16, ["n", 32])],
        [weight("w0", 64, 64), weight("w1", 64, 64), weight("w2", 64, 64), weight("w3", 64, 64)],
    )  # fmt: skip
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("onnxfuse", 1)]
    path = tmp_path / "model.onnx"
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10), path)
    return path


def test_shapes_are_the_products_of_the_model(model: Path) -> None:
    shapes = tune.shapes_of(model, (1, 16))
    assert len(shapes) == 8
    assert Shape(16, 64, 64, norm="rms") in shapes
    assert Shape(1, 64, 64, residual=True) in shapes
    assert Shape(1, 32, 64, gated=True, activation="silu") in shapes


def test_a_model_without_fused_ops_is_refused(tmp_path: Path) -> None:
    graph = helper.make_graph([], "g", [], [])
    onnx.save(helper.make_model(graph), tmp_path / "empty.onnx")
    with pytest.raises(ModelError, match="no onnxfuse op"):
        tune.shapes_of(tmp_path / "empty.onnx", (1,))


@pytest.mark.parametrize("rows", (1, 100, 4096))
def test_candidates_fit_the_shape(rows: int) -> None:
    plans = tune.candidates(Shape(rows, 256, 1024, norm="rms"), VARIANTS)
    by_index = {(v.path, v.index): v for v in VARIANTS}
    for plan in plans:
        if plan.path == "vendor":
            continue
        variant = by_index[plan.path, plan.variant]
        assert not variant.gated
        assert plan.stages <= variant.max_stages
        assert variant.rows <= max(8, 2 * rows)
        if plan.path == "stream":
            assert plan.cluster_m <= variant.split
            assert plan.stages * (variant.rows + variant.columns) * 128 <= 110 * 1024
    own = {1: {"stream"}, 100: {"stream", "tile"}, 4096: {"tile"}}
    assert {plan.path for plan in plans} == own[rows] | {"vendor"}


TILES_OF = {2048: {16}, 4096: {32}, 6144: {48}, 1024: {16, 32}, 32000: {96, 128}}


@pytest.mark.parametrize(("n", "columns"), TILES_OF.items())
def test_skinny_tiles_fill_the_multiprocessors(n: int, columns: set[int]) -> None:
    """Where one of them gives a CTA to nearly every one it is tried alone, else the two nearest."""
    variants = [Variant("stream", i, 8, 16 * slabs, False, 20, 1) for i, slabs in enumerate((1, 2, 3, 4, 6, 8))]
    plans = [plan for plan in tune.candidates(Shape(1, n, 4096), variants) if plan.path == "stream"]
    assert len(plans) <= 24
    assert {variants[plan.variant].columns for plan in plans} == columns
    assert {plan.cluster_m for plan in plans} == {1}


def test_the_fastest_right_plan_is_kept_and_a_run_resumes(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tune, "Kernels", FakeKernels)
    monkeypatch.setattr(tune, "candidates", lambda shape, variants: [FAST, WRONG, Plan("vendor")])
    path = tmp_path / "tuning.json"
    results = tune.tune(model, path, rows=(3,))
    assert [(t.plan, t.microseconds, t.default_microseconds) for t in results] == [(FAST, 5.0, 10.0)] * len(results)
    stored = json.loads(path.read_text())
    entry = stored["entries"][0]
    assert entry["rows"] == 3
    assert (entry["path"], entry["variant"], entry["stages"], entry["cluster_m"], entry["lead"]) == (1, 0, 11, 2, 8)
    # Shapes that differ only in what the table does not hold are measured once.
    assert len(stored["entries"]) == len(FakeKernels.opened) == 3

    assert tune.tune(model, path, rows=(3,)) == []
    assert FakeKernels.opened == []
    stored["driver_cuda"] = "another"
    path.write_text(json.dumps(stored))
    assert len(tune.tune(model, path, rows=(3,))) == 3

    monkeypatch.setattr(FakeKernels, "variants", lambda self: VARIANTS[1:])  # the numbers mean other kernels now
    assert len(tune.tune(model, path, rows=(3,))) == 3


def test_what_the_model_finds_far_too_slow_is_not_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = {FAST: 20.0, SLOW: 10.0, WRONG: None}
    measured: list[Plan] = []

    def measure(self: FakeKernels, plan: Plan, seconds: float) -> tuple[float, float]:
        measured.append(plan)
        return 10.0, 2e-4

    monkeypatch.setattr(tune, "Kernels", FakeKernels)
    monkeypatch.setattr(tune, "candidates", lambda shape, variants: list(times))
    monkeypatch.setattr(FakeKernels, "modelled", lambda self, shape, plan: times[plan])
    monkeypatch.setattr(FakeKernels, "measure", measure)
    tune.tune_shapes([Shape(100, 64, 64)], tmp_path / "tuning.json")
    assert set(measured) == {SLOW, WRONG}
    measured.clear()
    tune.tune_shapes([Shape(16, 64, 64)], tmp_path / "tuning.json")
    assert FAST in measured


def test_a_plan_that_is_not_faster_is_not_taken(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "Kernels", FakeKernels)
    monkeypatch.setattr(tune, "candidates", lambda shape, variants: [Plan("tile"), WRONG])
    assert {t.plan for t in tune.tune(model, tmp_path / "tuning.json", rows=(1,))} == {SLOW}


@pytest.mark.parametrize("drift", (0.01, -0.01, -0.004))
@pytest.mark.parametrize(("other", "expected"), ((10.0, SLOW), (9.9, SLOW), (9.0, FAST)))
def test_a_clock_that_wanders_does_not_decide(
    other: float, expected: Plan, drift: float, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Wandering(FakeKernels):
        def __init__(self) -> None:
            super().__init__()
            self.factor = 1.0

        def measure(self, plan: Plan, seconds: float) -> tuple[float, float] | None:
            self.factor *= 1.0 + drift
            return (other if plan == FAST else 10.0) * self.factor, 2e-4

    monkeypatch.setattr(tune, "Kernels", Wandering)
    monkeypatch.setattr(tune, "candidates", lambda shape, variants: [FAST, SLOW])
    assert tune.tune(model, tmp_path / "tuning.json", rows=(1,))[0].plan == expected


def test_a_plan_that_is_wrong_once_is_not_taken(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Racy(FakeKernels):
        calls = 0

        def measure(self, plan: Plan, seconds: float) -> tuple[float, float] | None:
            type(self).calls += plan == FAST
            return (5.0, 0.5 if self.calls % 7 == 3 else 2e-4) if plan == FAST else (10.0, 2e-4)

    monkeypatch.setattr(tune, "Kernels", Racy)
    monkeypatch.setattr(tune, "candidates", lambda shape, variants: [FAST])
    assert {t.plan for t in tune.tune(model, tmp_path / "tuning.json", rows=(1,))} == {SLOW}


def test_where_the_default_fails_the_fastest_plan_is_taken(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slower = Plan("tile")

    class Refusing(FakeKernels):
        def measure(self, plan: Plan, seconds: float) -> tuple[float, float] | None:
            return None if plan == SLOW else (5.0 if plan == FAST else 9.0, 2e-4)

    monkeypatch.setattr(tune, "Kernels", Refusing)
    monkeypatch.setattr(tune, "candidates", lambda shape, variants: [slower, FAST])
    assert {t.plan for t in tune.tune(model, tmp_path / "tuning.json", rows=(1,))} == {FAST}


def test_an_interrupted_run_loses_one_shape_at_most(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Interrupted(FakeKernels):
        def measure(self, plan: Plan, seconds: float) -> tuple[float, float] | None:
            if len(self.opened) == 2:
                raise KeyboardInterrupt
            return super().measure(plan, seconds)

    monkeypatch.setattr(tune, "candidates", lambda shape, variants: [FAST])
    monkeypatch.setattr(tune, "Kernels", FakeKernels)
    tune.tune(model, tmp_path / "whole.json", rows=(1, 16))
    whole = json.loads((tmp_path / "whole.json").read_text())
    path = tmp_path / "tuning.json"
    monkeypatch.setattr(tune, "Kernels", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        tune.tune(model, path, rows=(1, 16))
    assert json.loads(path.read_text())["entries"] == whole["entries"][:1]
    assert [p.name for p in tmp_path.glob("*.part")] == []

    monkeypatch.setattr(tune, "Kernels", FakeKernels)
    assert len(tune.tune(model, path, rows=(1, 16))) == len(FakeKernels.opened) == len(whole["entries"]) - 1
    assert json.loads(path.read_text()) == whole


def test_no_shape_is_begun_after_the_given_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter((0.0, 0.0, 4.0, 11.0))
    monkeypatch.setattr(tune.time, "monotonic", lambda: next(times))
    monkeypatch.setattr(tune, "Kernels", FakeKernels)
    shapes = [Shape(rows, 64, 64) for rows in (1, 2, 4, 8)]
    results = tune.tune_shapes(shapes, tmp_path / "tuning.json", seconds=10.0)
    assert [result.shape.rows for result in results] == [1, 2]


def test_stored_plans_are_found_by_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "Kernels", FakeKernels)
    monkeypatch.setattr(tune, "candidates", lambda shape, variants: [FAST])
    path = tmp_path / "tuning.json"
    tune.tune_shapes([Shape(16, 64, 64, norm="rms")], path)
    find = tune.stored_plans(path, 90)
    assert find(Shape(9, 64, 64, norm="rms", bias=True)) == FAST  # as 9 is rounded up to 16
    assert find(Shape(9, 64, 64, norm="layer")) is None
    assert find(Shape(8, 64, 64, norm="rms")) is None
    assert find(Shape(16, 64, 64)) is None
    assert find(Shape(16, 64, 64, "bfloat16", norm="rms")) is None
    assert tune.stored_plans(path, 90, either_dtype=True)(Shape(16, 64, 64, "bfloat16", norm="rms")) == FAST
    assert tune.stored_plans(path, 80)(Shape(16, 64, 64, norm="rms")) is None

    monkeypatch.setattr(tune, "candidates", lambda shape, variants: [])
    tune.tune_shapes([Shape(9, 64, 64, norm="rms")], path)
    find = tune.stored_plans(path, 90)
    assert find(Shape(9, 64, 64, norm="rms")) == SLOW  # measured with just so many rows
    assert find(Shape(10, 64, 64, norm="rms")) == FAST


@pytest.mark.parametrize("content", (None, "{", "[]", '{"entries": [{"path": 1}]}'))
def test_what_is_no_tuning_file_is_refused(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "tuning.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UsageError, match=r"tuning\.json"):
        tune.stored_plans(path, 90)
