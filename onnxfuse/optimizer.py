"""`optimize`: rewrite a model, hold the result to the original, take back what is wrong, write it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onnx

from onnxfuse import pipeline, report
from onnxfuse.errors import InputDataError, OutputError, UsageError, VerificationError
from onnxfuse.graph import files
from onnxfuse.graph import model as models
from onnxfuse.ops import functions
from onnxfuse.rules.loading import RuleSet
from onnxfuse.runtime import archive
from onnxfuse.verify import Verdict, Verifier, offenders
from onnxfuse.verify.check import weight_bytes

#: Rounds of "find what is wrong, take it back, check again".
_MAX_ROUNDS = 5
#: More wrong sites than this of one rule: the whole rule is taken back.
_MAX_SITES = 8


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
    path: Path | None = None
    _model: models.Model = field(repr=False, default=None)  # type: ignore[assignment]
    _proto: onnx.ModelProto | None = field(repr=False, default=None)

    @property
    def model(self) -> onnx.ModelProto:
        """The fused model, all of its tensors inside."""
        if self._proto is None:
            self._proto = models_inside(self._model)
        return self._proto

    @property
    def fused(self) -> int:
        """How many fusions it holds."""
        return sum(f["count"] for f in self.report["fusions"])

    def save(self, path: str | os.PathLike, external_data: bool | None = None) -> Path:
        """Write the fused model (`graph.model.Model.save`)."""
        target = Path(path)
        _check_output(target, self._model.path, self._model.had_external_data)
        self._model.save(target, external_data)
        self.path = target
        return target


def models_inside(model: models.Model) -> onnx.ModelProto:
    """The model as a ModelProto with its external tensors read in."""
    proto = model.to_proto()
    if model.had_external_data:
        onnx.external_data_helper.load_external_data_for_model(proto, str(model.base_dir))
    return proto


def optimize(
    model: str | os.PathLike | onnx.ModelProto,
    out: str | os.PathLike | None = None,
    *,
    target: str = "auto",
    rules: Iterable[str | os.PathLike] = (),
    disable: Iterable[str] = (),
    exclude_nodes: Iterable[str] = (),
    verify: bool = True,
    allow_unverified: bool = False,
    input_shapes: Mapping[str, tuple[int, ...]] | Iterable[str] = (),
    inputs: str | os.PathLike | None = None,
    save_inputs: str | os.PathLike | None = None,
    seed: int = 0,
    verify_sets: int | None = None,
    stop_after: str | None = None,
    dry_run: bool = False,
    external_data: bool | None = None,
    custom_ops: Iterable[str | os.PathLike] = (),
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
        dry_run: do everything but write.
        external_data: keep big tensors in `<out>.data`; by default as the source does, or when they do not fit.
        custom_ops: custom-op libraries that the model or the rules need.
        progress: called with the name of each step when it begins.

    Raises:
        VerificationError: the result could not be shown to be right (nothing was written).
        OnnxfuseError: bad input; see docs/reference/errors.md.
    """
    source = None if isinstance(model, onnx.ModelProto) else Path(model)
    if out is not None:
        _check_writable(Path(out))
    if stop_after is not None and stop_after not in pipeline.STAGES:
        raise UsageError(f"unknown stage `{stop_after}`", hint=f"one of {', '.join(pipeline.STAGES)}")
    options = pipeline.Options(
        target=pipeline.resolve_target(target), rules=tuple(os.fspath(r) for r in rules), disable=frozenset(disable),
        exclude_nodes=frozenset(exclude_nodes), stop_after=stop_after or "lower",
    )
    libraries = tuple(os.fspath(library) for library in custom_ops)
    ruleset = pipeline.rule_set(options)
    proto = files.read_proto(source) if source is not None else model
    base_dir = source.resolve().parent if source is not None else None
    if out is not None:
        _check_output(Path(out), source, _has_external(proto))
    pipeline.check_node_names(proto, options.exclude_nodes)
    shapes = dict(input_shapes) if isinstance(input_shapes, Mapping) else archive.parse_shapes(input_shapes)

    job = _Job(model if source is None else source, proto, options, ruleset, progress)
    built = job.build(options)
    verdict = None
    reverted: list[dict[str, Any]] = []
    seconds = dict(built.seconds)
    failure: VerificationError | None = None
    if verify:
        if progress is not None:
            progress("verify")
        started = time.perf_counter()
        try:
            verifier = Verifier(
                proto, base_dir=base_dir, provider=job.provider, seed=seed, shapes=shapes, inputs=inputs,
                limit=verify_sets, custom_ops=libraries,
            )
            if save_inputs is not None:
                archive.save_npz(save_inputs, [s.feeds for s in verifier.sets])
            built, verdict, reverted = job.verified(verifier, built, base_dir)
        except VerificationError as error:
            failure, verdict = error, Verdict("unverified", problems=[error.message])
        except InputDataError as error:
            if inputs is not None or shapes:
                raise
            failure = VerificationError(error.message, hint=error.hint)
            verdict = Verdict("unverified", problems=[error.message])
        seconds["verify"] = round(time.perf_counter() - started, 6)
    finished = job.finish(built, options.stop_after)
    accepted = verdict is None or verdict.ok or allow_unverified
    destination = Path(out) if out is not None and not dry_run and accepted else None
    result = Result({}, verdict, None, built.model, finished)
    if destination is not None:
        started = time.perf_counter()
        if progress is not None:
            progress("save")
        if finished is None:
            built.model.save(destination, external_data)
        else:
            files.write(finished, destination, base_dir or Path(), bool(external_data))
        result.path = destination
        seconds["save"] = round(time.perf_counter() - started, 6)
    light = finished if finished is not None else built.model.to_proto()
    result.report = report.build(
        model=str(source) if source is not None else proto.graph.name or "<model>",
        output=str(result.path) if result.path is not None else None,
        target=str(options.target), proto=light, nodes_before=built.nodes_before,
        applied=[(a.rule, a.stage) for a in built.applied], blocks=built.blocks, blocks_lowered=built.blocks_lowered,
        lowering=built.lowering, verify={"status": "skipped"} if verdict is None else verdict.as_dict(),
        reverted=reverted, seconds=seconds, sizes=_sizes(source, proto, light, result.path),
        options={"disable": sorted(options.disable), "exclude_nodes": sorted(options.exclude_nodes), "seed": seed,
                 "stop_after": options.stop_after, "rules": list(options.rules)},
    )
    if not accepted:
        assert verdict is not None
        error = failure or VerificationError(
            "the fused model is not right: " + "; ".join(verdict.problems[:3]),
            hint="--allow-unverified writes it nevertheless",
        )
        error.report = result.report  # type: ignore[attr-defined]
        raise error
    return result


class _Job:
    """One model and one set of rules; builds variants and searches for the fusions that are wrong."""

    def __init__(
        self, source: Path | onnx.ModelProto, proto: onnx.ModelProto, options: pipeline.Options, ruleset: RuleSet,
        progress: pipeline.Progress | None,
    ) -> None:
        self._source = source
        self._proto = proto
        self._options = options
        self._ruleset = ruleset
        self._progress = progress
        # On a machine without the target's device the structure is what can be checked, on the CPU.
        on_device = options.target.provider == "cuda" and pipeline.cuda_works()
        self.provider = "cuda" if on_device else "cpu"
        self.at_home = self.provider == options.target.provider

    def build(self, options: pipeline.Options) -> pipeline.Build:
        return pipeline.build(self._source, options, ruleset=self._ruleset, progress=self._progress)

    def finish(self, built: pipeline.Build, stop_after: str) -> onnx.ModelProto | None:
        """A model that stops early gets the bodies of its lifted and fused ops; None: it needs none."""
        if stop_after in ("canonicalize", "lower"):
            return None
        return functions.attach_functions(models_inside(built.model), pipeline.value_types(built.model))

    def check(
        self, verifier: Verifier, built: pipeline.Build, base_dir: Path | None, only: list[str] | None = None
    ) -> Verdict:
        proto = self.finish(built, self._options.stop_after) or built.model.to_proto()
        return verifier.check(proto, base_dir=base_dir, only=only, must_run=self.at_home)

    def verified(
        self, verifier: Verifier, built: pipeline.Build, base_dir: Path | None
    ) -> tuple[pipeline.Build, Verdict, list[dict[str, Any]]]:
        """Check, and take back what is wrong until the rest is right."""
        reverted: list[dict[str, Any]] = []
        options = self._options
        verdict = self.check(verifier, built, base_dir)
        for _ in range(_MAX_ROUNDS):
            if verdict.status != "failed":
                break
            found = self._offenders(verifier, built, options, verdict, base_dir)
            if not found:
                break
            for rule, sites in found:
                reverted.append({"rule": rule, "sites": sites, "problem": verdict.problems[0]})
                options = options.without([rule]) if sites is None else options.without(exclude_sites=[(rule, s) for s in sites])
            built = self.build(options)
            verdict = self.check(verifier, built, base_dir)
        return built, verdict, reverted

    def _offenders(
        self, verifier: Verifier, built: pipeline.Build, options: pipeline.Options, verdict: Verdict,
        base_dir: Path | None,
    ) -> list[tuple[str, list[str] | None]]:
        """Rules that are wrong, with the sites at which they are (None: everywhere)."""
        failing = sorted(set(verdict.failing))[:2] or None
        order = list(dict.fromkeys(a.rule for a in built.applied))

        def breaks(variant: pipeline.Options) -> bool:
            return self.check(verifier, self.build(variant), base_dir, failing).status == "failed"

        def breaks_with(active: Any) -> bool:
            return breaks(options.without(set(order) - set(active)))

        if not order or breaks_with([]):
            return []
        found: list[tuple[str, list[str] | None]] = []
        for rule in offenders.offenders(order, breaks_with):
            sites = [a.root for a in built.applied if a.rule == rule]

            def breaks_at(active: Any, rule: str = rule, sites: list[str] = sites) -> bool:
                return breaks(options.without(exclude_sites=[(rule, s) for s in sites if s not in active]))

            wrong = sites
            if len(sites) > 1 and not breaks_at([]):
                wrong = offenders.offenders(sites, breaks_at, budget=24)
            found.append((rule, None if len(wrong) == len(sites) or len(wrong) > _MAX_SITES else wrong))
        return found


def _has_external(proto: onnx.ModelProto) -> bool:
    return any(t.data_location == onnx.TensorProto.EXTERNAL for t in proto.graph.initializer)


def _check_writable(out: Path) -> None:
    if out.is_dir():
        raise OutputError(f"`{out}` is a folder", hint="name the .onnx file to write")
    if not out.parent.is_dir():
        raise OutputError(f"the folder `{out.parent}` does not exist", hint="create it first")
    if not os.access(out.parent, os.W_OK) or (out.exists() and not os.access(out, os.W_OK)):
        raise OutputError(f"`{out}` cannot be written", hint="check the permissions of the folder")


def _check_output(out: Path, source: Path | None, external: bool) -> None:
    """The output must not overwrite what it is made from."""
    if source is None or not source.exists():
        return
    if out.exists() and out.samefile(source):
        raise OutputError(f"output and input are the same file: `{out}`", hint="choose another -o")
    if external:
        proto = onnx.load(source, load_external_data=False)
        data = {source.parent / e.value for t in proto.graph.initializer for e in t.external_data
                if e.key == "location"}
        for mine in (out, out.with_name(out.name + ".data")):
            if mine.exists() and any(mine.samefile(file) for file in data if file.exists()):
                raise OutputError(f"`{mine}` holds the input's tensors", hint="choose another -o")


def _sizes(
    source: Path | None, proto: onnx.ModelProto, fused: onnx.ModelProto, path: Path | None
) -> dict[str, int]:
    """Bytes of weights and, where there are files, of the files with their data."""
    sizes = {"weights_before": weight_bytes(proto), "weights_after": weight_bytes(fused)}
    if source is not None:
        sizes["file_before"] = _file_bytes(source)
    if path is not None:
        sizes["file_after"] = _file_bytes(path)
    return sizes


def _file_bytes(path: Path) -> int:
    total = path.stat().st_size
    data = path.with_name(path.name + ".data")
    return total + (data.stat().st_size if data.is_file() else 0)


def unfuse(model: str | os.PathLike | onnx.ModelProto, out: str | os.PathLike | None = None) -> onnx.ModelProto:
    """Give every op of the `onnxfuse` domain back as standard ONNX ops.

    Args:
        model: a fused model.
        out: the file to write, or None.

    Raises:
        OpError: the model's opset is too old for a body.
    """
    source = None if isinstance(model, onnx.ModelProto) else Path(model)
    if out is not None:
        _check_writable(Path(out))
        _check_output(Path(out), source, False)
    loaded = models.load(model)
    pipeline.expand_fused(loaded)
    if out is not None:
        loaded.save(Path(out))
    return models_inside(loaded)


