"""Runs a model step by step whose key/value caches lie in buffers that stay: each is bound as an input and as the
output that takes its place."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import ml_dtypes
import numpy as np

from onnxfuse.errors import ModelError
from onnxfuse.runtime.session import CUDA, Runner, _from_ort, _reason, _to_ort, ort

_DTYPES = {"tensor(float)": np.float32, "tensor(float16)": np.float16, "tensor(bfloat16)": ml_dtypes.bfloat16,
           "tensor(double)": np.float64}


class InPlaceRunner:
    """A model with its buffers, empty at first.

    Args:
        runner: the model's session.
        caches: (input, output) names of one buffer each.
        shapes: of the buffers, by the name of the input.

    Raises:
        ModelError: a cache is of a dtype that no cache has.
    """

    def __init__(
        self, runner: Runner, caches: Iterable[tuple[str, str]], shapes: Mapping[str, tuple[int, ...]]
    ) -> None:
        self._session = runner.session
        self._caches = list(caches)
        types = {given.name: given.type for given in self._session.get_inputs()}
        unknown = [past for past, _ in self._caches if types.get(past) not in _DTYPES]
        if unknown:
            raise ModelError(f"the cache `{unknown[0]}` is of type `{types.get(unknown[0])}`")
        self._on_gpu = CUDA in self._session.get_providers()
        self._buffers = {past: self._allocate(shapes[past], _DTYPES[types[past]]) for past, _ in self._caches}
        presents = {present for _, present in self._caches}
        self._outputs = [made.name for made in self._session.get_outputs() if made.name not in presents]
        self._inputs = set(types)

    def _allocate(self, shape: tuple[int, ...], dtype: type) -> Any:
        empty: np.ndarray = np.zeros(shape, dtype)
        if self._on_gpu and empty.dtype.name != "bfloat16":  # the Python API moves NumPy's own dtypes only
            return ort().OrtValue.ortvalue_from_numpy(empty, "cuda", 0)
        return _to_ort(empty)

    def run(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """One step: the outputs but for the caches, which are written in place. Names that the model lacks are ignored.

        Raises:
            ModelError: ONNX Runtime refused the inputs or failed.
        """
        binding = self._session.io_binding()
        given = {name: _to_ort(value) for name, value in feeds.items() if name in self._inputs - set(self._buffers)}
        try:
            for name, value in given.items():
                binding.bind_ortvalue_input(name, value)
            for name in self._outputs:
                binding.bind_output(name, "cpu")
            for past, present in self._caches:
                binding.bind_ortvalue_input(past, self._buffers[past])
                binding.bind_ortvalue_output(present, self._buffers[past])
            self._session.run_with_iobinding(binding)
            # They come in the order in which they were bound.
            return {name: _from_ort(v) for name, v in zip(self._outputs, binding.get_outputs(), strict=False)}
        except Exception as error:
            raise ModelError(f"ONNX Runtime failed: {_reason(error)}") from error

    def cache(self, past: str) -> np.ndarray:
        """What a buffer holds now."""
        return np.array(_from_ort(self._buffers[past]))
