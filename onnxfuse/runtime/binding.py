"""A session whose inputs and outputs are bound to fixed buffers, on the device where it runs: what is timed is the
model, not the copies. Such a session can also be captured as a CUDA graph."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from onnxfuse.errors import ModelError, RuntimeMissingError
from onnxfuse.runtime.session import (
    CPU,
    CUDA,
    _create,
    _from_ort,
    _preload_cuda,
    _reason,
    _to_ort,
    make_options,
    ort,
    provider_name,
    uses_domain,
)


class BoundSession:
    """A session on one set of inputs.

    Args:
        proto: the model; tensors may lie in external files relative to `base_dir`.
        feeds: arrays by input name; names that the model lacks are ignored.
        provider: `cpu` or `cuda`.
        level: graph optimizations of ONNX Runtime.
        cuda_graph: capture the whole run as one CUDA graph. Needs `outputs`, and every node on the GPU.
        outputs: results of an earlier run of an equal model, for the sizes of the output buffers.
        custom_ops: further custom-op libraries.
        options: attributes of `onnxruntime.SessionOptions`.

    Raises:
        ModelError: ONNX Runtime cannot create the session.
        RuntimeMissingError: the provider does not work here.
    """

    def __init__(
        self, proto: onnx.ModelProto, feeds: Mapping[str, np.ndarray], *, provider: str = "cpu", level: str = "all",
        base_dir: Path | None = None, cuda_graph: bool = False, outputs: Mapping[str, np.ndarray] | None = None,
        custom_ops: Iterable[str | Path] = (), **options: Any,
    ) -> None:  # fmt: skip
        runtime = ort()
        settings = make_options(level, quiet=True, custom_ops=custom_ops, with_library=uses_domain(proto), **options)
        # Several sessions take turns when they are timed: idle threads that spin would slow down the next one.
        settings.add_session_config_entry("session.intra_op.allow_spinning", "0")
        if base_dir is not None:
            settings.add_session_config_entry(
                "session.model_external_initializers_file_folder_path", str(Path(base_dir).resolve())
            )
        name = provider_name(provider)
        providers: list[Any] = [name] if name == CPU else [name, CPU]
        if name == CUDA:
            _preload_cuda(runtime)
            if cuda_graph:
                providers[0] = (CUDA, {"enable_cuda_graph": "1"})
        try:
            self.session = _create(runtime, proto, settings, providers)
        except Exception as error:
            raise ModelError(f"ONNX Runtime cannot load the model: {_reason(error)}") from error
        if name not in self.session.get_providers():
            raise RuntimeMissingError(f"ONNX Runtime did not get its `{name}` to work")
        self._device = "cuda" if name == CUDA else "cpu"
        self._binding = self._bind(runtime, feeds, outputs if cuda_graph else None)

    def _bind(self, runtime: Any, feeds: Mapping[str, np.ndarray], outputs: Mapping[str, np.ndarray] | None) -> Any:
        binding = self.session.io_binding()
        self._alive = []
        for spec in self.session.get_inputs():
            if spec.name not in feeds:
                continue
            value = self._on_device(runtime, feeds[spec.name])
            self._alive.append(value)
            binding.bind_ortvalue_input(spec.name, value)
        for spec in self.session.get_outputs():
            if outputs is None:
                binding.bind_output(spec.name, self._device)
            else:
                value = self._on_device(runtime, outputs[spec.name])
                self._alive.append(value)
                binding.bind_ortvalue_output(spec.name, value)
        return binding

    def _on_device(self, runtime: Any, array: np.ndarray) -> Any:
        if self._device == "cpu" or array.dtype.name == "bfloat16":
            return _to_ort(array)  # bfloat16 enters from the host: the Python API moves NumPy's own dtypes only
        return runtime.OrtValue.ortvalue_from_numpy(np.asarray(array, order="C"), self._device, 0)

    def run(self) -> None:
        """Run once; returns when the results are there.

        Raises:
            ModelError: ONNX Runtime failed.
        """
        try:
            self.session.run_with_iobinding(self._binding)
        except Exception as error:
            raise ModelError(f"ONNX Runtime failed: {_reason(error)}") from error

    def outputs(self) -> dict[str, np.ndarray]:
        """What the last run computed."""
        names = [o.name for o in self.session.get_outputs()]
        values = self._binding.get_outputs()
        if self._device == "cpu":
            return {n: _from_ort(v) for n, v in zip(names, values, strict=True)}
        return dict(zip(names, self._binding.copy_outputs_to_cpu(), strict=True))
