"""`optimize`: rewrite a model, hold the result to the original, take back what is wrong, write it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onnx

from onnxfuse import destination, in_place_cache, pipeline, report
from onnxfuse.errors import InputDataError, UsageError, VerificationError
from onnxfuse.graph import files, saving
from onnxfuse.graph import model as models
from onnxfuse.graph.ir import Constant
from onnxfuse.reverting import Builder, Checked
from onnxfuse.runtime import archive, oracle
from onnxfuse.verify import Verdict, Verifier
from onnxfuse.verify.check import weight_bytes

PathText = str | os.PathLike[str]


@dataclass
class Result:
    """What `optimize` made.

    Attributes:
        report: the JSON report (schema 1).
        verdict: the verification, or None if it was not asked for.
        path: where it was written, or None.
    """

    report: dict[str, Any]
    verdict: Verdict | None
    path: Path | None
    _make: Callable[[dict[str, Constant] | None], onnx.ModelProto] = field(repr=False)
    _original: onnx.ModelProto = field(repr=False)
    _source: Path | None = field(repr=False)

    @property
    def model(self) -> onnx.ModelProto:
        """The fused model, with all of its tensors inside."""
        return oracle.self_contained(self._make(None), self._base_dir, inline=False)

    @property
    def _base_dir(self) -> Path:
        return self._source.resolve().parent if self._source is not None else Path()

    @property
    def fused(self) -> int:
        """How many rewrites it holds."""
        return sum(f["count"] for f in self.report["fusions"])

    def save(self, path: PathText, external_data: bool | None = None) -> Path:
        """Write the fused model beside `path` and rename it into place.

        Args:
            path: the file to write.
            external_data: keep big tensors in `<path>.data`; by default as the source did, or when they do not fit.

        Raises:
            OutputError: `path` cannot be written, or is what the model is made from.
        """
        target = Path(path)
        destination.check_writable(target)
        destination.check_apart(target, self._source, self._original)
        pending: dict[str, Constant] = {}
        proto = self._make(pending)
        if external_data is None:
            external_data = destination.has_external_data(self._original) or weight_bytes(proto) > saving.INLINE_LIMIT
        saving.write(proto, target, self._base_dir, external_data, pending)
        self.path = target
        return target


def optimize(
    model: PathText | onnx.ModelProto,
    out: PathText | None = None,
    *,
    target: str = "auto",
    rules: Iterable[PathText] = (),
    disable: Iterable[str] = (),
    exclude_nodes: Iterable[str] = (),
    verify: bool = True,
    allow_unverified: bool = False,
    input_shapes: Mapping[str, tuple[int, ...]] | Iterable[str] = (),
    inputs: PathText | None = None,
    save_inputs: PathText | None = None,
    seed: int = 0,
    verify_sets: int | None = None,
    stop_after: str | None = None,
    kv_cache: str = "separate",
    dry_run: bool = False,
    external_data: bool | None = None,
    custom_ops: Iterable[PathText] = (),
    progress: pipeline.Progress | None = None,
) -> Result:
    """Fuse a model's transformer blocks, verify the result, and write it.

    Args:
        model: a file, or a ModelProto (which is not changed).
        out: the file to write; None: nothing is written, `Result.save` does it.
        target: `cpu`, `cuda`, `cuda:smNN`, or `auto` (CUDA where ONNX Runtime can use a GPU, else CPU).
        rules: rule files and folders besides the built-in ones.
        disable: ids of rules that must not fire.
        exclude_nodes: names of nodes, or of their outputs, that no rule may touch.
        verify: compare with the original; wrong fusions are found and taken back.
        allow_unverified: write the model even if it could not be verified.
        input_shapes: shapes of inputs for verification, `{"x": (1, 3)}` or `["x:1,3"]`.
        inputs: .npz file with input sets for verification.
        save_inputs: .npz file to write the input sets to.
        seed: of the generated inputs.
        verify_sets: at most so many input sets.
        stop_after: `canonicalize`, `lift`, `fuse` or `lower`; the ops of earlier stages come with their function
            bodies, so that the model runs.
        kv_cache: `separate`: a key/value cache keeps its inputs and outputs as they are; `shared`: past and present lie
            in one buffer, which the model writes in place (docs/guides/kv-cache.md).
        dry_run: do everything but write.
        external_data: keep big tensors in `<out>.data`; by default as the source does, or when they do not fit.
        custom_ops: custom-op libraries that the model or the rules need.
        progress: called with the name of each step when it begins.

    Raises:
        VerificationError: the result could not be shown to be right (nothing was written). Its attribute `report` holds
            the report.
        KvCacheError: `kv_cache="shared"`, and the model's cache cannot be kept in place; the text says why.
        OnnxfuseError: bad input; see docs/reference/errors.md.
    """
    source = None if isinstance(model, onnx.ModelProto) else Path(model)
    if out is not None:
        destination.check_writable(Path(out))
    if stop_after is not None and stop_after not in pipeline.STAGES:
        raise UsageError(f"unknown stage `{stop_after}`", hint=f"one of {', '.join(pipeline.STAGES)}")
    options = pipeline.Options(
        target=pipeline.resolve_target(target), rules=tuple(os.fspath(r) for r in rules), disable=frozenset(disable),
        exclude_nodes=frozenset(exclude_nodes), stop_after=stop_after or "lower",
    )
    in_place_options = in_place_cache.options(options, kv_cache)
    shapes = dict(input_shapes) if isinstance(input_shapes, Mapping) else archive.parse_shapes(input_shapes)
    ruleset = pipeline.rule_set(options)
    original = model if isinstance(model, onnx.ModelProto) else files.read_proto(Path(model))
    if out is not None:
        destination.check_apart(Path(out), source, original)
    pipeline.check_node_names(original, options.exclude_nodes)
    libraries = [os.fspath(library) for library in custom_ops]

    builder = Builder(original if source is None else source, options, ruleset, progress)
    # First, so that a model whose cache cannot be shared is refused at once.
    in_place = builder.build(in_place_options) if in_place_options is not None else None
    built = builder.build()
    seconds = dict(built.seconds)
    checked, failure, verifier = None, None, None
    if verify:
        started = _begin(progress, "verify")
        inputs_file = None if inputs is None else Path(inputs)
        try:
            verifier = Verifier(
                original, base_dir=source.resolve().parent if source is not None else None, provider=builder.provider,
                seed=seed, shapes=shapes, inputs=inputs_file, limit=verify_sets,
                custom_ops=libraries,
            )
            if save_inputs is not None:
                archive.save_npz(save_inputs, [s.feeds for s in verifier.sets])
            checked = builder.checked(verifier, built)
        except (VerificationError, InputDataError) as error:
            if isinstance(error, InputDataError) and (inputs is not None or shapes):
                raise
            failure = VerificationError(error.message, where=error.where, hint=error.hint)
            checked = Checked(built, Verdict("unverified", problems=[error.message]), options)
        built = checked.built
        seconds["verify"] = _elapsed(started)
    generation = None
    if in_place is not None:
        started = _begin(progress, "verify")
        built, generation = in_place_cache.settle(builder, original, in_place, checked, verifier, seed, libraries)
        seconds["verify"] = round(seconds.get("verify", 0.0) + _elapsed(started), 6)
    final = built
    verdict = checked.verdict if checked else None
    result = Result({}, verdict, None, lambda pending: builder.proto(final, pending), original, source)
    accepted = result.verdict is None or result.verdict.ok or allow_unverified
    if out is not None and accepted and not dry_run:
        started = _begin(progress, "save")
        result.save(out, external_data)
        seconds["save"] = _elapsed(started)
    light = builder.proto(built, {})
    result.report = report.build(
        model=str(source) if source is not None else original.graph.name or "<model>",
        output=str(result.path) if result.path is not None else None,
        target=str(options.target), proto=light, nodes_before=built.nodes_before,
        applied=[(a.rule, a.stage) for a in built.applied], blocks=built.blocks, blocks_lowered=built.blocks_lowered,
        lowering=built.lowering, verify=result.verdict.as_dict() if result.verdict else {"status": "skipped"},
        reverted=[entry.as_dict() for entry in checked.reverted] if checked else [], seconds=seconds,
        sizes=_sizes(source, original, light, result.path), weights=_weights(original),
        options={"disable": sorted(options.disable), "exclude_nodes": sorted(options.exclude_nodes), "seed": seed,
                 "stop_after": options.stop_after, "rules": list(options.rules), "kv_cache": kv_cache},
        kv_cache=in_place_cache.as_dict(built, generation),
    )
    if not accepted:
        assert result.verdict is not None
        known_wrong = result.verdict.status == "failed"
        refusal = failure or VerificationError(
            f"the fused model {'is not right' if known_wrong else 'could not be verified'}: "
            + "; ".join(result.verdict.problems[:3]),
            hint=("" if known_wrong else "--inputs FILE.npz gives values that make sense to the model; ")
            + "--allow-unverified writes it nevertheless",
        )
        refusal.report = result.report
        raise refusal
    return result


def _begin(progress: pipeline.Progress | None, step: str) -> float:
    if progress is not None:
        progress(step)
    return time.perf_counter()


def _elapsed(since: float) -> float:
    return round(time.perf_counter() - since, 6)


def _weights(original: onnx.ModelProto) -> dict[str, int]:
    """How many weights there are, and how many of them a caller may replace."""
    return {"count": len(original.graph.initializer), "replaceable": len(models.overridable(original))}


def _sizes(
    source: Path | None, original: onnx.ModelProto, fused: onnx.ModelProto, path: Path | None
) -> dict[str, int]:
    """Bytes of weights and, where there are files, of the files with their data."""
    sizes = {"weights_before": weight_bytes(original), "weights_after": weight_bytes(fused)}
    if source is not None:
        sizes["file_before"] = destination.file_bytes(source, original)
    if path is not None:
        sizes["file_after"] = destination.file_bytes(path)
    return sizes


def unfuse(model: PathText | onnx.ModelProto, out: PathText | None = None) -> onnx.ModelProto:
    """Give every op of the `onnxfuse` domain back as standard ONNX ops.

    Args:
        model: a fused model.
        out: the file to write, or None.

    Raises:
        OpError: the model's opset is too old for a body.
    """
    loaded = models.load(model)
    if out is not None:
        destination.check_writable(Path(out))
        if not isinstance(model, onnx.ModelProto):
            destination.check_apart(Path(out), Path(model), files.read_proto(Path(model)))
    pipeline.expand_fused(loaded)
    if out is not None:
        loaded.save(Path(out))
    return oracle.self_contained(loaded.to_proto(), loaded.base_dir)
