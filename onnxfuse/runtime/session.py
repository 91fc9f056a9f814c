"""ONNX Runtime sessions for a model, fused or not, and one way to run them whatever the dtypes."""

from __future__ import annotations

import ctypes
import functools
import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import onnx

from onnxfuse.errors import InputDataError, ModelError, RuntimeMissingError

if TYPE_CHECKING:
    import onnxruntime

log = logging.getLogger(__name__)

FUSED_DOMAIN = "onnxfuse"
CPU = "CPUExecutionProvider"
CUDA = "CUDAExecutionProvider"
#: Above this many bytes of weights a model should be handed to ONNX Runtime as a file.
IN_MEMORY_LIMIT = 500_000_000
#: Protobuf messages end at 2 GiB.
PROTOBUF_LIMIT = 2_000_000_000

_SHORT_NAMES = {"cpu": CPU, "cuda": CUDA}
_LEVELS = {"none": "ORT_DISABLE_ALL", "basic": "ORT_ENABLE_BASIC", "extended": "ORT_ENABLE_EXTENDED",
           "all": "ORT_ENABLE_ALL"}


def ort() -> Any:
    """The `onnxruntime` module, imported when it is first needed.

    Raises:
        RuntimeMissingError: it is not installed.
    """
    try:
        import onnxruntime
    except ImportError as error:
        if isinstance(error.__cause__, KeyboardInterrupt):  # as an extension module reports it
            raise error.__cause__ from None
        raise RuntimeMissingError(
            f"ONNX Runtime cannot be imported: {error}", hint="pip install onnxruntime-gpu (or onnxruntime)"
        ) from error
    return onnxruntime


def provider_name(name: str) -> str:
    """`cpu` and `cuda` stand for their execution providers; other names are taken as they are."""
    return _SHORT_NAMES.get(name.lower(), name)


@functools.cache
def cuda_works() -> bool:
    """Whether ONNX Runtime can really run something on a GPU here: the provider is built in, loads, and finds a
    device. Tried once per process, with a session of one Identity node."""
    runtime = ort()
    if CUDA not in runtime.get_available_providers() or not _may_have_gpu():
        return False
    x = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [1])
    y = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [1])
    graph = onnx.helper.make_graph([onnx.helper.make_node("Neg", ["x"], ["y"])], "probe", [x], [y])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8)
    options = runtime.SessionOptions()
    options.log_severity_level = 4
    try:
        _preload_cuda(runtime)
        session = runtime.InferenceSession(model.SerializeToString(), options, providers=[CUDA])
        return CUDA in session.get_providers()
    except Exception as error:  # any failure means "no"
        log.debug("CUDA provider does not work: %s", error)
        return False


def _may_have_gpu() -> bool:
    """A cheap look for a device node or driver, so that machines without a GPU do not load the CUDA libraries."""
    return os.name == "nt" or Path("/dev/nvidiactl").exists() or Path("/dev/dxg").exists()


def _preload_cuda(runtime: Any) -> None:
    preload = getattr(runtime, "preload_dlls", None)
    if preload is not None:
        preload()


def register(session_options: onnxruntime.SessionOptions) -> None:
    """Add the `onnxfuse` ops to a session's options, so that it can load fused models.

    Raises:
        RuntimeMissingError: the library was not built or does not fit this ONNX Runtime.
    """
    from onnxfuse.runtime import library

    library.register(session_options)


def make_options(
    level: str = "all", *, quiet: bool = False, custom_ops: Iterable[str | Path] = (), with_library: bool = True,
    **options: Any,
) -> onnxruntime.SessionOptions:
    """Session options with the custom-op library registered.

    Args:
        level: graph optimizations of ONNX Runtime: none, basic, extended or all.
        quiet: log fatal errors only; for sessions whose failure is expected and handled.
        custom_ops: further custom-op libraries to register.
        with_library: whether the model needs the `onnxfuse` library.
        options: attributes of `onnxruntime.SessionOptions`, such as `intra_op_num_threads`.
    """
    runtime = ort()
    result = runtime.SessionOptions()
    if level not in _LEVELS:
        raise InputDataError(f"unknown optimization level `{level}`", hint=f"one of {', '.join(_LEVELS)}")
    result.graph_optimization_level = getattr(runtime.GraphOptimizationLevel, _LEVELS[level])
    result.log_severity_level = 4 if quiet else 3
    for name, value in options.items():
        if not hasattr(result, name):
            raise InputDataError(
                f"`{name}` is not an option of onnxruntime.SessionOptions",
                hint="see onnxruntime.SessionOptions for the names",
            )
        setattr(result, name, value)
    if with_library:
        register(result)
    for path in custom_ops:
        if not Path(path).is_file():
            raise RuntimeMissingError(f"no custom-op library at `{path}`", hint="check --custom-ops")
        try:
            result.register_custom_ops_library(str(path))
        except Exception as error:
            raise RuntimeMissingError(f"the custom-op library `{path}` does not load: {error}") from error
    return result


def session(
    path: str | os.PathLike[str] | onnx.ModelProto,
    providers: Sequence[str] | None = None,
    *,
    level: str = "all",
    custom_ops: Iterable[str | Path] = (),
    **options: Any,
) -> onnxruntime.InferenceSession:
    """A plain ONNX Runtime session that can run fused models.

    Args:
        path: a model file, or a ModelProto.
        providers: execution providers (`cpu` and `cuda` will do); by default CUDA where a GPU works, then CPU.
        level: graph optimizations of ONNX Runtime: none, basic, extended or all.
        custom_ops: further custom-op libraries.
        options: attributes of `onnxruntime.SessionOptions`.

    Raises:
        ModelError: ONNX Runtime cannot load the model; the text is ONNX Runtime's.
        RuntimeMissingError: the model holds fused ops and their library is missing.
    """
    runtime = ort()
    chosen = [provider_name(p) for p in providers] if providers else ([CUDA] if cuda_works() else [])
    if CPU not in chosen:
        chosen.append(CPU)
    unknown = [p for p in chosen if p not in runtime.get_available_providers()]
    if unknown:
        raise RuntimeMissingError(
            f"this ONNX Runtime has no provider `{unknown[0]}`",
            hint=f"it has {', '.join(runtime.get_available_providers())}",
        )
    source: bytes | str
    if isinstance(path, onnx.ModelProto):
        source, where = path.SerializeToString(), None
    else:
        if not Path(path).is_file():
            raise ModelError(f"no such file: `{path}`", hint="check the path")
        source = where = os.fspath(path)
    settings = make_options(level, custom_ops=custom_ops, with_library=False, **options)
    try:
        register(settings)
    except RuntimeMissingError:
        # Only a fused model needs the library.
        proto = path if isinstance(path, onnx.ModelProto) else onnx.load(os.fspath(path), load_external_data=False)
        if uses_domain(proto):
            raise
    try:
        return runtime.InferenceSession(source, settings, providers=chosen)
    except Exception as error:
        raise ModelError(f"ONNX Runtime cannot load the model: {_reason(error)}", where=where) from error


def uses_domain(proto: onnx.ModelProto, domain: str = FUSED_DOMAIN) -> bool:
    """Whether the model imports the domain of the fused ops."""
    return any(opset.domain == domain for opset in proto.opset_import)


def grants_int8(proto: onnx.ModelProto) -> bool:
    """Whether a MatMulNBits may round its activations (`accuracy_level` 2 to 4: to float16, bfloat16, int8)."""
    return any(granted.i > 1 for granted in accuracy_levels(proto))


def grants_more(proto: onnx.ModelProto, original: onnx.ModelProto) -> bool:
    """Whether more products of the first model may round their activations, or some to fewer bits."""
    mine, given = (sorted((a.i for a in accuracy_levels(p) if a.i > 1), reverse=True) for p in (proto, original))
    return len(mine) > len(given) or any(m > g for m, g in zip(mine, given, strict=False))


def with_exact_products(proto: onnx.ModelProto) -> onnx.ModelProto:
    """The model, or a copy in which no MatMulNBits may round its activations."""
    if not grants_int8(proto):
        return proto
    exact = onnx.ModelProto()
    exact.CopyFrom(proto)
    for granted in accuracy_levels(exact):
        granted.i = min(granted.i, 1)
    return exact


def accuracy_levels(proto: onnx.ModelProto) -> Iterator[onnx.AttributeProto]:
    """The attributes by which products of few-bit weights (MatMulNBits and what is made of it) may be less exact."""
    for node in every_node(proto):
        if node.domain == "com.microsoft":
            yield from (attribute for attribute in node.attribute if attribute.name == "accuracy_level")


def every_node(proto: onnx.ModelProto) -> Iterator[onnx.NodeProto]:
    """The nodes of all graphs and functions of a model."""
    for nodes in (proto.graph.node, *(function.node for function in proto.functions)):
        yield from with_subgraphs(nodes)


def with_subgraphs(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """The nodes and those of their subgraphs."""
    for node in nodes:
        yield node
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                yield from with_subgraphs(attribute.g.node)


def _reason(error: Exception) -> str:
    """ONNX Runtime's message without its numeric prefix."""
    text = str(error).strip()
    parts = text.split(" : ", 3)
    return parts[3] if len(parts) == 4 and parts[0] == "[ONNXRuntimeError]" else text


class Runner:
    """Runs one model on NumPy arrays of any dtype, bfloat16 (from ml_dtypes) included.

    Args:
        proto: the model; tensors may lie in external files relative to `base_dir`.
        provider: `cpu` or `cuda`.
        level: graph optimizations of ONNX Runtime.
        base_dir: folder of the model's external data.
        custom_ops: further custom-op libraries.
        exact: products with 4- and 8-bit weights take the activations as they are. ONNX Runtime rounds them to int8
            where the `accuracy_level` of a MatMulNBits grants it, and where it makes one of a dequantized weight.

    Raises:
        ModelError: ONNX Runtime cannot create the session.
        RuntimeMissingError: there is no GPU that ONNX Runtime can use.
    """

    def __init__(
        self, proto: onnx.ModelProto, provider: str = "cpu", *, level: str = "none", base_dir: Path | None = None,
        custom_ops: Iterable[str | Path] = (), threads: int = 0, exact: bool = True,
    ) -> None:
        runtime = ort()
        options = make_options(
            level, quiet=True, custom_ops=custom_ops, with_library=uses_domain(proto), intra_op_num_threads=threads
        )
        if exact:
            options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "0")
            proto = with_exact_products(proto)
        # Several sessions take turns here; idle ones must not keep the cores busy.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        if base_dir is not None:
            options.add_session_config_entry(
                "session.model_external_initializers_file_folder_path", str(Path(base_dir).resolve())
            )
        name = provider_name(provider)
        if name == CUDA:
            if not cuda_works():
                raise RuntimeMissingError("ONNX Runtime cannot use a GPU here", hint="`onnxfuse doctor` says why")
            _preload_cuda(runtime)
        try:
            self._session = _create(runtime, proto, options, [name] if name == CPU else [name, CPU])
        except Exception as error:
            raise ModelError(f"ONNX Runtime cannot load the model: {_reason(error)}") from error
        self.provider = "cuda" if CUDA in self._session.get_providers() else "cpu"
        self._inputs = {i.name: i for i in self._session.get_inputs()}
        self._outputs = [o.name for o in self._session.get_outputs()]
        self._plain = not any(
            i.type == "tensor(bfloat16)" for i in [*self._session.get_inputs(), *self._session.get_outputs()]
        )

    @property
    def inputs(self) -> list[str]:
        """Names of the inputs that must be fed."""
        return list(self._inputs)

    @property
    def session(self) -> onnxruntime.InferenceSession:
        return self._session

    def run(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Run once; inputs that the model lacks are ignored (a rewrite may have left an input without readers).

        Elements of a sequence or a map come one by one, as `name[0]`, `name[1]`, …; an absent optional does not come.

        Raises:
            ModelError: ONNX Runtime refused the inputs or failed.
        """
        known = {name: value for name, value in feeds.items() if name in self._inputs}
        try:
            if self._plain:
                results = zip(self._outputs, self._session.run(None, known), strict=True)
                return dict(item for name, value in results for item in _tensors(name, value))
            values = {name: _to_ort(value) for name, value in known.items()}
            results = self._session.run_with_ort_values(None, values)
            return {name: _from_ort(v) for name, v in zip(self._outputs, results, strict=True)}
        except Exception as error:
            raise ModelError(f"ONNX Runtime failed: {_reason(error)}") from error


def _tensors(name: str, value: Any) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors that an output of any type holds, each with a name of its own."""
    if isinstance(value, np.ndarray):
        yield name, value
    elif isinstance(value, Mapping):
        for key, element in value.items():
            yield from _tensors(f"{name}[{key}]", element)
    elif isinstance(value, list | tuple):
        for index, element in enumerate(value):
            yield from _tensors(f"{name}[{index}]", element)
    elif value is not None:
        yield name, np.asarray(value)


def _create(runtime: Any, proto: onnx.ModelProto, options: Any, providers: list[str]) -> Any:
    inside = sum(len(t.raw_data) for t in proto.graph.initializer)
    if inside > PROTOBUF_LIMIT:
        raise ModelError("the model is too big to be run from memory", hint="save it with external data")
    return runtime.InferenceSession(proto.SerializeToString(), options, providers=providers)


def _to_ort(value: np.ndarray) -> Any:
    runtime = ort()
    # Not `ascontiguousarray`, which makes a vector of a scalar.
    if value.dtype == ml_dtypes.bfloat16:
        bits = np.asarray(value, order="C").view(np.uint16)
        return runtime.OrtValue.ortvalue_from_numpy_with_onnx_type(bits, onnx.TensorProto.BFLOAT16)
    return runtime.OrtValue.ortvalue_from_numpy(np.asarray(value, order="C"))


def _from_ort(value: Any) -> np.ndarray:
    if value.data_type() != "tensor(bfloat16)":
        return value.numpy()
    # NumPy has no bfloat16, so ONNX Runtime does not convert it; the bits are copied out of host memory.
    shape = tuple(value.shape())
    size = int(np.prod(shape, dtype=np.int64)) * 2
    if size == 0:
        return np.empty(shape, ml_dtypes.bfloat16)
    raw = ctypes.string_at(value.data_ptr(), size)
    return np.frombuffer(raw, dtype=ml_dtypes.bfloat16).reshape(shape).copy()
