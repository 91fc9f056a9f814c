"""The unfused model decides which inputs are valid; what it refuses is varied."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from onnxfuse.errors import InputDataError, ModelError
from onnxfuse.runtime.feeds import InputSpec
from onnxfuse.runtime.ranges import Range
from onnxfuse.runtime.scenarios import plan, scenarios

INT64, FLOAT = np.dtype(np.int64), np.dtype(np.float32)
TEXT = [InputSpec("input_ids", INT64, ("batch", "seq"), Range(limit=100)),
        InputSpec("attention_mask", INT64, ("batch", "seq"))]
CACHED = [*TEXT[:1], InputSpec("attention_mask", INT64, ("batch", "total_seq")),
          InputSpec("past_key_0", FLOAT, ("batch", 2, "past_seq", "kv_dim"))]


def echo(feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {"y": next(iter(feeds.values()))}


def test_text_models_meet_batches_paddings_and_lengths() -> None:
    sets = plan(TEXT, echo).sets
    masks = [s.feeds["attention_mask"] for s in sets]
    assert {m.shape[0] for m in masks} >= {1, 2, 3}
    assert max(m.shape[1] for m in masks) >= 100
    assert any(not m[:, 0].all() and m[:, -1].all() for m in masks), "left padding"
    assert any(m[:, 0].all() and not m[:, -1].all() for m in masks), "right padding"
    assert any(m.all() for m in masks), "no padding"
    assert any((m.sum(axis=1) == 0).any() for m in masks), "a fully masked row"


def test_cached_models_meet_past_lengths() -> None:
    def run(feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        if feeds["past_key_0"].shape[3] != 24:
            raise ModelError("past_key dimension 3 should be same as head_size, got 16 expected 24")
        return echo(feeds)

    result = plan(CACHED, run)
    assert {s.feeds["past_key_0"].shape[2] for s in result.sets} >= {0, 1, 17}
    assert "kv_dim = 24" in result.learned, "learned from the refusal"
    for s in result.sets:
        assert s.feeds["attention_mask"].shape[1] == s.feeds["input_ids"].shape[1] + s.feeds["past_key_0"].shape[2]


def test_batch_one_only() -> None:
    def run(feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        if feeds["input_ids"].shape[0] != 1:
            raise ModelError("batch must be 1")
        return echo(feeds)

    result = plan(TEXT, run)
    assert "batch 1 only" in result.learned
    assert len(result.sets) >= 4
    last = result.sets[-1]
    assert last.by_row and last.feeds["input_ids"].shape[0] == 2
    assert np.array_equal(last.outputs["y"], last.feeds["input_ids"]), "the rows, one after the other"


def test_a_needed_length_is_found() -> None:
    def run(feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        if feeds["signal"].shape[1] < 500:
            raise ModelError("kernel does not fit")
        return echo(feeds)

    result = plan([InputSpec("signal", FLOAT, ("batch", "samples"))], run)
    assert "sequence length 512" in result.learned


def test_lengths_beyond_a_table_are_dropped() -> None:
    def run(feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        if feeds["input_ids"].shape[1] > 64:
            raise ModelError("index out of range")
        return echo(feeds)

    result = plan(TEXT, run)
    assert list(result.dropped) == ["very long"]
    assert "index out of range" in result.dropped["very long"]


def test_nothing_runs() -> None:
    def run(feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        raise ModelError("never")

    with pytest.raises(InputDataError, match="never") as error:
        plan(TEXT, run)
    assert "--inputs" in (error.value.hint or "")


def test_float_inputs_come_in_several_magnitudes() -> None:
    sets = plan([InputSpec("x", FLOAT, ("batch", 8))], echo, large=1000.0).sets
    sizes = sorted(float(np.abs(s.feeds["x"]).max()) for s in sets)
    assert sizes[0] < 0.1 and sizes[-1] > 100


def test_big_models_get_fewer_sets() -> None:
    small, huge = (scenarios(TEXT, size=s) for s in ("small", "huge"))
    assert len(huge) < len(small)
    assert len(plan(TEXT, echo, limit=2).sets) == 2
