"""Build a model, hold it to the original, and take back the fusions that make it wrong."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onnx

from onnxfuse import pipeline
from onnxfuse.graph import saving
from onnxfuse.graph.ir import Constant
from onnxfuse.ops import functions
from onnxfuse.rules.loading import RuleSet
from onnxfuse.runtime import oracle
from onnxfuse.runtime.session import IN_MEMORY_LIMIT, cuda_works
from onnxfuse.verify import Verdict, Verifier, offenders
from onnxfuse.verify.check import weight_bytes
from onnxfuse.verify.generation import GenerationCheck, GenerationVerdict

#: Rounds of "find what is wrong, take it back, check again".
MAX_ROUNDS = 5
#: More wrong sites than this of one rule: the whole rule is taken back.
MAX_SITES = 8
#: Builds spent on telling the sites of one rule apart.
SITE_BUDGET = 24


@dataclass
class Reverted:
    """A rule that was taken back.

    Attributes:
        rule: its id.
        sites: the names of the first outputs at which it was wrong; None: everywhere.
        problem: what was wrong, in words.
    """

    rule: str
    sites: list[str] | None
    problem: str

    def as_dict(self) -> dict[str, Any]:
        return {"rule": self.rule, "sites": self.sites, "problem": self.problem}


@dataclass
class Checked:
    """A build with its verification, and what had to be taken back for it; `options` are those of the build."""

    built: pipeline.Build
    verdict: Verdict
    options: pipeline.Options
    reverted: list[Reverted] = field(default_factory=list)


class Builder:
    """Builds variants of one model.

    Args:
        source: a file or a ModelProto.
        options: what was asked for.
        ruleset: the rules.
        progress: told the name of each stage.
    """

    def __init__(
        self, source: Path | onnx.ModelProto, options: pipeline.Options, ruleset: RuleSet,
        progress: pipeline.Progress | None = None,
    ) -> None:
        self.source = source
        self.options = options
        self._ruleset = ruleset
        self._progress = progress
        # On a machine without the target's device the structure is what can be checked, on the CPU.
        on_device = options.target.provider == "cuda" and cuda_works()
        self.provider = "cuda" if on_device else "cpu"
        self.at_home = self.provider == options.target.provider

    def build(self, options: pipeline.Options | None = None) -> pipeline.Build:
        return pipeline.build(self.source, options or self.options, ruleset=self._ruleset, progress=self._progress)

    def proto(self, built: pipeline.Build, pending: dict[str, Constant] | None = None) -> onnx.ModelProto:
        """The model to run or write. One that stops between the stages gets the bodies of its lifted and fused ops.

        Args:
            pending: takes up large tensors that are still to be computed, for `saving.write`.
        """
        between = self.options.stop_after in ("lift", "fuse")
        proto = built.model.to_proto(None if between else pending)
        if between:
            inside = oracle.self_contained(proto, built.model.base_dir, inline=False)
            return functions.attach_functions(inside, pipeline.value_types(built.model))
        return proto

    def check(self, verifier: Verifier, built: pipeline.Build, only: Sequence[str] | None = None) -> Verdict:
        with self._to_run(built) as (proto, base_dir):
            return verifier.check(proto, base_dir=base_dir, only=only, must_run=self.at_home)

    def check_generation(self, check: GenerationCheck, built: pipeline.Build) -> GenerationVerdict:
        """Hold a build whose caches lie in shared buffers to the original."""
        with self._to_run(built) as (proto, base_dir):
            return check.check(proto, base_dir=base_dir, must_run=self.at_home)

    @contextmanager
    def _to_run(self, built: pipeline.Build) -> Iterator[tuple[onnx.ModelProto, Path]]:
        """The model for ONNX Runtime, and the folder of its data."""
        pending: dict[str, Constant] = {}
        proto, base_dir = self.proto(built, pending), built.model.base_dir
        if weight_bytes(proto) <= IN_MEMORY_LIMIT:
            yield (self.proto(built) if pending else proto), base_dir
            return
        # ONNX Runtime maps a file, where a model in memory would be held several times.
        with tempfile.TemporaryDirectory(prefix="onnxfuse-") as folder:
            path = Path(folder) / "model.onnx"
            saving.write(proto, path, base_dir, external_data=True, pending=pending)
            del proto
            yield onnx.load(path, load_external_data=False), Path(folder)

    def checked(self, verifier: Verifier, built: pipeline.Build) -> Checked:
        """Check a build, and take back what is wrong until the rest is right, or nothing more can be taken back."""
        result = Checked(built, self.check(verifier, built), self.options)
        options = self.options
        for _ in range(MAX_ROUNDS):
            if result.verdict.status != "failed":
                break
            found = self._offenders(verifier, result, options)
            if not found:
                break
            result.reverted += found
            for entry in found:
                if entry.sites is None:
                    options = options.without([entry.rule])
                else:
                    options = options.without(exclude_sites=[(entry.rule, site) for site in entry.sites])
            result.options, result.built = options, self.build(options)
            result.verdict = self.check(verifier, result.built)
        return result

    def _offenders(self, verifier: Verifier, wrong: Checked, options: pipeline.Options) -> list[Reverted]:
        """Rules that are wrong, with the sites at which they are. Nothing, if it is wrong without any rule too."""
        failing = sorted(set(wrong.verdict.failing))[:2] or None
        order = list(dict.fromkeys(a.rule for a in wrong.built.applied))

        def breaks(variant: pipeline.Options) -> bool:
            return self.check(verifier, self.build(variant), failing).status == "failed"

        def breaks_with(active: Sequence[str]) -> bool:
            # All others are off, also those that did not apply: they may step in for one that is.
            return breaks(options.without({program.id for program in self._ruleset} - set(active)))

        if not order or breaks_with([]):
            return []
        problem = wrong.verdict.problems[0]
        found = []
        for rule in offenders.offenders(order, breaks_with):
            sites = [a.root for a in wrong.built.applied if a.rule == rule]

            def breaks_at(active: Sequence[str], rule: str = rule, sites: Sequence[str] = sites) -> bool:
                return breaks(options.without(exclude_sites=[(rule, site) for site in sites if site not in active]))

            bad = sites
            if len(sites) > 1 and not breaks_at([]):
                bad = offenders.offenders(sites, breaks_at, budget=SITE_BUDGET)
            everywhere = len(bad) == len(sites) or len(bad) > MAX_SITES
            found.append(Reverted(rule, None if everywhere else bad, problem))
        return found
