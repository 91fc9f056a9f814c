"""Devices are what the driver says; no driver, no devices."""

from __future__ import annotations

import pytest

from onnxfuse.pipeline import resolve_target
from onnxfuse.runtime import gpu, session


def test_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "_driver", lambda: None)
    gpu.devices.cache_clear()
    assert gpu.devices() == ()
    gpu.devices.cache_clear()


def test_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onnxfuse.pipeline.cuda_works", lambda: False)
    assert str(resolve_target("auto")) == "cpu"
    monkeypatch.setattr("onnxfuse.pipeline.cuda_works", lambda: True)
    monkeypatch.setattr(gpu, "devices", lambda: (gpu.Gpu("a GPU", 90, "13.0"),))
    assert str(resolve_target("auto")) == "cuda:sm90" == str(resolve_target("cuda"))
    assert str(resolve_target("cuda:sm80")) == "cuda:sm80"


@pytest.mark.skipif(bool(gpu.devices()), reason="there is a GPU")
def test_a_provider_without_a_gpu_does_not_count() -> None:
    assert session.cuda_works() is False
