"""The stages, one after the other: canonical form, lift, fuse, lower. `optimize`, `explain` and verification's search
for a wrong fusion all run this."""

from __future__ import annotations

import difflib
import gc
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import onnx

from onnxfuse import blocks, quirks, rules
from onnxfuse.errors import ModelError, OnnxfuseError, RuntimeMissingError, UsageError
from onnxfuse.graph import canonicalize, edit, files, shapes, view
from onnxfuse.graph import model as models
from onnxfuse.graph.equality import same_but_for_names
from onnxfuse.graph.ir import RULE_KEY
from onnxfuse.graph.sharing import share_constants
from onnxfuse.lower import emit
from onnxfuse.lower.kernels import KernelTable, Target
from onnxfuse.lower.lower import lower
from onnxfuse.lower.shared_cache import SharedCache, lift_attention, share
from onnxfuse.ops.opdef import FUSED_DOMAIN, STD_DOMAIN, TensorType
from onnxfuse.rewrite import driver
from onnxfuse.rules.loading import RuleSet
from onnxfuse.runtime import gpu, library
from onnxfuse.runtime.probe import OrtProbe
from onnxfuse.runtime.session import cuda_works

#: In order; `--stop-after` names one of them.
STAGES = ("canonicalize", "lift", "fuse", "lower")

#: What may become of a key/value cache: it grows from run to run, or lies in buffers that past and present share.
KV_CACHES = ("separate", "shared")

#: How often at most the rules of the stage `lift` run again after another canonicalization.
MAX_LIFT_ROUNDS = 3

Progress = Callable[[str], None]
"""Called with the name of the step that begins."""


@dataclass(frozen=True)
class Options:
    """What shapes the result. Hashable parts only, so that a variant is one `replace` away.

    Attributes:
        target: provider and architecture.
        rules: rule files and folders besides the built-in ones.
        builtin: whether the built-in rules take part.
        disable: ids of rules that do not.
        exclude_nodes: names of nodes (or of their outputs) that no rule may touch.
        exclude_sites: single applications to leave out: (rule, name of the first output).
        stop_after: one of `STAGES`.
        kv_cache: one of `KV_CACHES`; `shared` needs the stage lower.
    """

    target: Target = field(default_factory=lambda: Target("cpu"))
    rules: tuple[str, ...] = ()
    builtin: bool = True
    disable: frozenset[str] = frozenset()
    exclude_nodes: frozenset[str] = frozenset()
    exclude_sites: frozenset[tuple[str, str]] = frozenset()
    stop_after: str = "lower"
    kv_cache: str = "separate"

    def without(self, disable: Iterable[str] = (), exclude_sites: Iterable[tuple[str, str]] = ()) -> Options:
        return replace(self, disable=self.disable | set(disable), exclude_sites=self.exclude_sites | set(exclude_sites))


@dataclass
class Build:
    """A model that went through the stages.

    Attributes:
        model: the result.
        applied: the rewrites, in order (`rewrite.driver.Applied`).
        nodes_before: nodes of the original without constants, subgraphs included.
        blocks: counted after fuse; `blocks_lowered` after lower.
        lowering: what lower kept and took apart (its JSON form).
        seconds: per stage.
        shared_cache: how the caches are fed, if they lie in shared buffers.
    """

    model: models.Model
    applied: list[Any] = field(default_factory=list)
    nodes_before: int = 0
    blocks: dict[str, Any] = field(default_factory=dict)
    blocks_lowered: dict[str, Any] = field(default_factory=dict)
    lowering: dict[str, Any] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    shared_cache: SharedCache | None = None


def resolve_target(text: str) -> Target:
    """A target from its text; `auto` is CUDA with the first GPU's architecture where ONNX Runtime can use it, else CPU.

    Raises:
        UsageError: the text names no target.
    """
    if text != "auto":
        target = Target.parse(text)
        if target.provider == "cuda" and target.sm is None and gpu.devices():
            return Target("cuda", gpu.devices()[0].sm)
        return target
    if cuda_works():
        found = gpu.devices()
        return Target("cuda", found[0].sm if found else None)
    return Target("cpu")


def rule_set(options: Options) -> RuleSet:
    """The rules that take part.

    Raises:
        RuleError: a rule file is wrong, or a disabled rule does not exist.
    """
    found = rules.load(options.rules, builtin=options.builtin)
    for name in sorted(options.disable):
        found.get(name)
    return found


def check_node_names(proto: onnx.ModelProto, names: Iterable[str]) -> None:
    """Whether all names in `exclude_nodes` name a node, or an output of one.

    Raises:
        UsageError: one does not; with the nearest name that does.
    """
    known: set[str] = set()

    def visit(graph: onnx.GraphProto) -> None:
        for node in graph.node:
            known.update([node.name, *node.output])
            for attribute in node.attribute:
                if attribute.type == onnx.AttributeProto.GRAPH:
                    visit(attribute.g)

    visit(proto.graph)
    for name in sorted(names):
        if name not in known:
            near = difflib.get_close_matches(name, known - {""}, n=1)
            raise UsageError(
                f"the model has no node `{name}`",
                hint=f"did you mean `{near[0]}`?" if near else "name a node, or one of its outputs",
            )


def build(
    source: str | os.PathLike[str] | onnx.ModelProto, options: Options, *, ruleset: RuleSet | None = None,
    tracer: Any = None, progress: Progress | None = None,
) -> Build:
    """Run the stages on a model. The source is not changed.

    Args:
        source: a file, or a ModelProto.
        ruleset: rules that were loaded already.
        tracer: records what each rule tried (`match.trace`).
        progress: told the name of each stage when it begins.

    Raises:
        OnnxfuseError: the model cannot be read or contradicts itself, or a rewrite failed.
    """
    collecting = gc.isenabled()
    gc.disable()  # a graph is many small objects of one long life; collecting in between costs more the more there are
    try:
        return _build(source, options, ruleset if ruleset is not None else rule_set(options), tracer, _Clock(progress))
    except OnnxfuseError:
        raise
    except Exception as error:
        # The checker looks at one node at a time; a graph whose shapes do not fit together only shows when it is used.
        proto = source if isinstance(source, onnx.ModelProto) else files.read_proto(Path(source))
        problem = files.contradiction(proto)
        if problem is None:
            raise
        raise ModelError(
            f"not a valid ONNX model: {problem}", where=_name_of(source), hint="no runtime can run it"
        ) from error
    finally:
        if collecting:
            gc.enable()


def _name_of(source: str | os.PathLike[str] | onnx.ModelProto) -> str:
    return "<model>" if isinstance(source, onnx.ModelProto) else os.fspath(source)


def _build(
    source: str | os.PathLike[str] | onnx.ModelProto, options: Options, ruleset: RuleSet, tracer: Any, clock: _Clock
) -> Build:
    clock.begin("load")
    model = models.load(source, inline=True)
    result = Build(model, nodes_before=count_nodes(model), seconds=clock.seconds)
    optimized_before = any(p.key == RULE_KEY for n in model.graph.nodes for p in n.source.metadata_props)
    clock.begin("canonicalize")
    engine = shapes.Inference(model)
    canonicalize.run(model, engine)
    shapes.check_outputs(model, _name_of(source))
    if options.kv_cache == "shared":
        lift_attention(model)
        engine.run()
    for stage in ("lift", "fuse"):
        if STAGES.index(options.stop_after) < STAGES.index(stage):
            break
        clock.begin(stage)
        applied = _apply(result, ruleset, stage, options, tracer, engine)
        # What lifting leaves (pairs of Transposes, equal tables per layer) is brought to the canonical form, which may
        # bring more together.
        for _ in range(MAX_LIFT_ROUNDS if stage == "lift" else 0):
            if not applied:
                break
            changed = any(canonicalize.run(model, engine).values())
            applied = _apply(result, ruleset, stage, options, tracer, engine) if changed else 0
        if applied and stage == "lift":
            engine.run()
    result.blocks = blocks.count(model)
    result.blocks_lowered = result.blocks
    if options.stop_after == "lower":
        clock.begin("lower")
        kernels = KernelTable(options.target, OrtProbe(), custom_ops=library_exists())
        if options.kv_cache == "shared":
            result.shared_cache = share(model, kernels)
        report = lower(
            model, kernels, apply_rules=lambda m: _apply(result, ruleset, "lower", options, tracer),
        )
        canonicalize.run(model)  # lowering leaves pairs of Transposes and Reshapes, too
        result.lowering = report.to_json()
        result.blocks_lowered = blocks.count(model)
    share_constants(model)
    if options.stop_after in ("canonicalize", "lower"):
        quirks.settle(model)
    if optimized_before:
        original = models.load(source)
        if same_but_for_names(original, model):  # then its names stay, too
            result.model, result.applied = original, []
    clock.end()
    return result


def _apply(
    result: Build, ruleset: RuleSet, stage: str, options: Options, tracer: Any, engine: shapes.Inference | None = None
) -> int:
    """Run the rules of a stage; returns how often one applied.

    Args:
        engine: has inferred the model as it is.
    """
    report = driver.run(
        result.model, ruleset, stage, str(options.target), disable=options.disable,
        exclude_nodes=options.exclude_nodes, exclude_sites=options.exclude_sites, tracer=tracer,
        inference=engine,
    )
    result.applied.extend(report.applied)
    return len(report.applied)


def library_exists() -> bool:
    """Whether the custom-op library was built."""
    try:
        library.library_path()
    except RuntimeMissingError:
        return False
    return True


def count_nodes(model: models.Model) -> int:
    """Nodes that compute something: all graphs, without constants."""
    return sum(1 for graph in view.all_graphs(model.graph) for node in graph.nodes if node.op != "Constant")


def value_types(model: models.Model) -> dict[str, TensorType]:
    """Dtype and shape of every value by name, as far as inference tells."""
    types = {}
    for graph in model.graphs():
        for value in [*graph.inputs, *(v for node in graph.nodes for v in (*node.inputs, *node.outputs))]:
            if value.name and value.name not in types:
                types[value.name] = emit.tensor_type(value)
    return types


def expand_fused(model: models.Model) -> int:
    """Replace every op of our domains by its function body, in place; returns how many there were.

    Raises:
        OpError: the model's opset is too old for a body.
    """
    shapes.infer(model)
    expanded = 0
    for graph in list(model.graphs()):
        emitter = emit.Emitter(model, graph)
        for node in list(graph.nodes):
            if view.domain(node) in (FUSED_DOMAIN, STD_DOMAIN):
                emitter.expand(node)
                expanded += 1
            else:
                emitter.keep(node)
        graph.nodes[:] = emitter.nodes
        edit.remove_dead(graph)
    for domain in (FUSED_DOMAIN, STD_DOMAIN):
        model.opsets.pop(domain, None)
    return expanded


class _Clock:
    """Seconds per step."""

    def __init__(self, progress: Progress | None) -> None:
        self.seconds: dict[str, float] = {}
        self._progress = progress
        self._name = ""
        self._since = 0.0

    def begin(self, name: str) -> None:
        self.end()
        if self._progress is not None:
            self._progress(name)
        self._name, self._since = name, time.perf_counter()

    def end(self) -> None:
        if self._name:
            elapsed = time.perf_counter() - self._since
            self.seconds[self._name] = round(self.seconds.get(self._name, 0.0) + elapsed, 6)
            self._name = ""
