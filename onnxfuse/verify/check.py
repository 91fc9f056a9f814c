"""Hold fused models to the original one, on input sets that the original can run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import AttributeProto, TensorProto

from onnxfuse.errors import InputDataError, ModelError, RuntimeMissingError, VerificationError
from onnxfuse.runtime import archive, feeds, oracle, scenarios
from onnxfuse.runtime.session import Runner, every_node, grants_int8, grants_more, with_subgraphs
from onnxfuse.verify.compare import FLOOR, GRANTED_DISPUTED, Comparison, compare
from onnxfuse.verify.nudge import nudged

#: Above this many bytes of weights there is no float64 oracle (it would double them); the unfused model without ONNX
#: Runtime's optimizations is the oracle then.
WIDE_LIMIT = 400_000_000
#: Above these sizes fewer and shorter input sets are run.
MEDIUM, HUGE = 64_000_000, 1_000_000_000
#: So many times the weights are moved before a difference is called wrong, where the original's error tells little.
NUDGES = 8
#: How much of the movement is allowed, and at most: beyond that, wrong and right cannot be told apart.
OF_MOVEMENT, MOST_MOVEMENT = 1.5, 0.1
#: A set in which more than this share of elements is disputed says nothing and is left out.
ILL_CONDITIONED = 0.6

_QUANTIZED = frozenset({
    "QuantizeLinear", "DynamicQuantizeLinear", "DynamicQuantizeMatMul", "DynamicQuantizeLSTM", "MatMulInteger",
    "MatMulIntegerToFloat", "QLinearMatMul", "QAttention", "QLinearConv", "ConvInteger",
})

_RANDOM = frozenset({
    "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Bernoulli", "Multinomial",
})


@dataclass
class Verdict:
    """Whether a fused model is right.

    Attributes:
        status: `passed`; `structure-only` (right, but run in a wider dtype, since the provider here has no kernels for
            the model's own); `failed`; `unverified` (could not be run, or gave no number to compare).
        outputs: per output the worst over all sets: name, error, unfused_error, worst (set, index, values).
        problems: what is wrong, in words.
        failing: names of the input sets that failed.
        sets: names of all input sets.
        notes: dtype of the oracle, what was dropped or learned.
    """

    status: str
    outputs: list[dict[str, Any]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    failing: list[str] = field(default_factory=list)
    sets: list[str] = field(default_factory=list)
    oracle: str = ""
    provider: str = ""
    notes: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return self.status in ("passed", "structure-only")

    def as_dict(self) -> dict[str, Any]:
        return {"status": self.status, "oracle": self.oracle, "provider": self.provider, "sets": self.sets,
                "outputs": self.outputs, "problems": self.problems, "notes": self.notes}


class Verifier:
    """Prepared once for an original model; checks any number of rewrites of it.

    Args:
        proto: the original model.
        base_dir: folder of its external data.
        provider: `cpu` or `cuda`.
        seed: of the generated inputs.
        shapes: input shapes that hold in every set.
        inputs: .npz file with input sets to use instead of generated ones.
        limit: at most so many sets.
        custom_ops: custom-op libraries that the models need.

    Raises:
        VerificationError: the original model does not run here in any dtype, or never twice the same.
        InputDataError: no input set can be made, or the given one does not fit.
    """

    def __init__(
        self, proto: onnx.ModelProto, *, base_dir: Path | None = None, provider: str = "cpu", seed: int = 0,
        shapes: Mapping[str, tuple[int, ...]] | None = None, inputs: str | Path | None = None,
        limit: int | None = None, custom_ops: Iterable[str | Path] = (),
    ) -> None:
        self._proto = proto
        self._base_dir = base_dir
        self._provider = provider
        self._custom_ops = tuple(custom_ops)
        self.dtype = narrowest(proto)
        random = _RANDOM & _ops(proto)
        if random:
            raise VerificationError(
                f"the model draws random numbers (`{min(random)}`), so that no two runs of it agree",
                hint="--no-verify or --allow-unverified writes the result",
            )
        self.quantized = quantizes_activations(proto)
        self.notes: list[str] = []
        if grants_int8(proto):
            self.notes.append("MatMulNBits is compared without the rounding of activations that its accuracy_level "
                              "grants; one set with it, too, on the device that the model is for")
        self.structure_only = False
        self._unfused = self._make_unfused()
        self.specs = feeds.input_specs(proto)
        self.sets = self._make_sets(seed, shapes, inputs, limit)
        self.oracle_dtype = ""
        self._truth = self._make_truth()
        self._movements: dict[str, dict[str, float]] | None = None
        self._granted: dict[str, np.ndarray] | None = None

    # -- preparing -----------------------------------------------------------------------------------------------------

    def _make_unfused(self) -> Runner:
        try:
            return Runner(self._proto, self._provider, base_dir=self._base_dir, custom_ops=self._custom_ops)
        except ModelError as error:
            reason = error.message
        try:
            runner = oracle.runner(
                self._proto, "float32", self._provider, base_dir=self._base_dir, custom_ops=self._custom_ops
            )
        except ModelError as wide:
            also = "" if wide.message == reason else f" (in float32: {wide.message})"
            raise VerificationError(
                f"the original model does not run on `{self._provider}`: {reason}{also}",
                hint="--no-verify writes the result without running it",
            ) from wide
        self.structure_only = True
        self.notes.append(f"compared in float32, since the original does not run in {self.dtype} here: {reason}")
        return runner

    def _run(self, runner: Runner, values: Mapping[str, np.ndarray], to: str | None) -> dict[str, np.ndarray]:
        return runner.run(oracle.cast_feeds(values, to) if to else values)

    def _make_sets(
        self, seed: int, shapes: Mapping[str, tuple[int, ...]] | None, inputs: str | Path | None, limit: int | None
    ) -> list[scenarios.InputSet]:
        to = "float32" if self.structure_only else None

        def run(values: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
            return self._run(self._unfused, values, to)

        if inputs is not None:
            given = archive.load_npz(inputs, self.specs)
            try:
                return [scenarios.InputSet(f"{Path(inputs).name} {i}", v, run(v)) for i, v in enumerate(given)]
            except ModelError as error:
                raise InputDataError(f"the original model refuses the inputs: {error.message}",
                                     where=str(inputs)) from error
        weight = weight_bytes(self._proto)
        size = "huge" if weight > HUGE else "medium" if weight > MEDIUM else "small"
        large = {"float16": 8.0, "bfloat16": 30.0}.get(self.dtype, 100.0)
        plan = scenarios.plan(self.specs, run, seed=seed, shapes=shapes, limit=limit, large=large, size=size)
        self.notes += [f"the original model needs: {fact}" for fact in plan.learned]
        self.notes += [f"set `{name}` left out, the original model refuses it" for name in plan.dropped]
        return plan.sets

    def _make_truth(self) -> dict[str, dict[str, np.ndarray]]:
        """The oracle's outputs by set name. Sets in which the original is too far from it are dropped."""
        own = {s.name: s.outputs for s in self.sets}
        if self.structure_only:
            self.oracle_dtype = "float32"
            return own
        to = "float32" if self.dtype in ("float16", "bfloat16") else "float64"
        if self.dtype == "float64" or (to == "float64" and weight_bytes(self._proto) > WIDE_LIMIT):
            self.oracle_dtype = f"{self.dtype}, unoptimized"
            return own
        try:
            runner = oracle.runner(self._proto, to, base_dir=self._base_dir, custom_ops=self._custom_ops)

            def run(values: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
                return self._run(runner, values, to)

            truth = {s.name: scenarios.run_by_row(run, s.feeds) if s.by_row else run(s.feeds) for s in self.sets}
        except ModelError as error:
            self.oracle_dtype = f"{self.dtype}, unoptimized"
            self.notes.append(f"no {to} oracle: {error.message[:200]}")
            return own
        self.oracle_dtype = to
        for inputs in list(self.sets):
            if self._well_conditioned(inputs, truth[inputs.name]):
                continue
            if to == "float64":
                # Not rounding: an integer choice (a position bucket, a mask) falls differently in float64.
                truth[inputs.name] = inputs.outputs
                self.notes.append(f"set `{inputs.name}`: compared with the unoptimized original, not with {to}")
            elif len(self.sets) > 1:
                self.sets.remove(inputs)
                self.notes.append(f"set `{inputs.name}` left out, the original itself is far from the oracle")
        return truth

    def _well_conditioned(self, inputs: scenarios.InputSet, truth: Mapping[str, np.ndarray]) -> bool:
        shares = [compare(value, value, truth[name], self.dtype).disputed for name, value in inputs.outputs.items()
                  if value.dtype.kind in "fV"]
        return not shares or min(shares) <= ILL_CONDITIONED

    def _movement(self, inputs: scenarios.InputSet, output: str) -> float:
        """How far the original's output moves with the last bits of its weights, relative to its largest value; 0
        where its own error tells how exact it is."""
        if not (self.quantized or self.structure_only):
            return 0.0
        if self._movements is None:
            self._movements = {s.name: dict.fromkeys(s.outputs, 0.0) for s in self.sets}
            if weight_bytes(self._proto) <= WIDE_LIMIT:
                self._nudge()
        return self._movements[inputs.name].get(output, 0.0)

    def _nudge(self) -> None:
        assert self._movements is not None
        inside = oracle.self_contained(self._proto, self._base_dir or Path())
        to = "float32" if self.structure_only else None
        for seed in range(NUDGES):
            other = nudged(inside, seed)
            try:
                if to:
                    runner = oracle.runner(other, to, self._provider, custom_ops=self._custom_ops)
                else:
                    runner = Runner(other, self._provider, custom_ops=self._custom_ops)
            except ModelError:
                continue
            for inputs in self.sets:
                if inputs.by_row:
                    continue
                try:
                    moved, known = self._run(runner, inputs.feeds, to), self._movements[inputs.name]
                except ModelError:  # a size that is computed from a weight, say
                    continue
                for name, value in inputs.outputs.items():
                    if value.dtype.kind in "fV" and name in moved:
                        step = compare(moved[name], value, value, self.dtype).error
                        known[name] = max(known[name], step if np.isfinite(step) else 0.0)

    def truth(self, inputs: scenarios.InputSet) -> dict[str, np.ndarray]:
        """The oracle's outputs for one of the sets."""
        return self._truth[inputs.name]

    # -- checking ------------------------------------------------------------------------------------------------------

    def check(
        self, fused: onnx.ModelProto, *, base_dir: Path | None = None, only: Sequence[str] | None = None,
        must_run: bool = True, keep: dict[str, dict[str, np.ndarray]] | None = None,
    ) -> Verdict:
        """Run a rewrite of the model and compare all outputs.

        Args:
            fused: the rewritten model.
            base_dir: folder of its external data; by default the original's.
            only: names of the sets to run.
            must_run: whether the provider here is the one that the model is meant for; if not, a model that does not
                run is unverified, not wrong.
            keep: filled with the outputs of the rewrite, by set name.
        """
        verdict = Verdict("passed", sets=[s.name for s in self.sets], oracle=self.oracle_dtype,
                          provider=self._unfused.provider, notes=list(self.notes))
        runner, widened = self._runner(fused, base_dir or self._base_dir, must_run, verdict)
        if runner is None:
            return verdict
        strange = [name for name in runner.inputs if name not in {spec.name for spec in self.specs}]
        if strange:
            verdict.status, verdict.failing = "failed", list(verdict.sets)
            verdict.problems = [f"inputs that the original lacks: {', '.join(f'`{name}`' for name in strange)}"]
            return verdict
        if grants_more(fused, self._proto):
            verdict.status, verdict.failing = "failed", list(verdict.sets)
            verdict.problems = ["products may round their activations more than the original's (accuracy_level)"]
            return verdict
        worst: dict[str, tuple[Comparison, str]] = {}
        for inputs in self.sets:
            if only is not None and inputs.name not in only:
                continue
            try:
                got = self._run(runner, inputs.feeds, "float32" if widened else None)
            except ModelError as error:
                if inputs.by_row:  # the original does not run the whole batch either
                    verdict.notes.append("batch 1 only, as the original")
                    continue
                verdict.failing.append(inputs.name)
                verdict.problems.append(f"set `{inputs.name}`: {error.message}")
                continue
            if keep is not None:
                keep[inputs.name] = got
            self._compare(inputs, got, verdict, worst)
        if must_run and not verdict.problems and not widened and grants_int8(self._proto):
            self._check_granted(fused, base_dir or self._base_dir, only, verdict)
        verdict.outputs = [
            {"name": name, "error": c.error, "unfused_error": c.unfused_error, "tolerance": c.tolerance,
             "worst": None if c.worst is None else {"set": label, **c.worst}}
            for name, (c, label) in worst.items()
        ]
        if verdict.problems:
            verdict.status = "failed"
        elif only is None and (blind := self._never_finite()):
            verdict.status = "unverified"
            verdict.problems = [f"output `{name}` of the original is NaN or infinite in every input set, so that no "
                                "number was compared" for name in blind]
        elif widened:
            verdict.status = "structure-only"
        return verdict

    def _check_granted(
        self, fused: onnx.ModelProto, base_dir: Path | None, only: Sequence[str] | None, verdict: Verdict
    ) -> None:
        """One set with the rounding of activations that the model grants its products and that is left out otherwise,
        where the model is meant to run (whose kernels use that or not): what differs by it shows in how far the
        original's own outputs go from the oracle. Both as a user runs them: without its optimizations, ONNX Runtime
        1.31 gives nonsense for a MatMulNBits in float16 with an accuracy_level of 4 on a CPU."""
        inputs = next((s for s in self.sets if not s.by_row), None)
        if inputs is None or (only is not None and inputs.name not in only):
            return

        if self._granted is None:
            try:
                self._granted = self._run_granted(self._proto, self._base_dir, inputs)
            except ModelError as error:
                self._granted = {}
                verdict.notes.append(f"the original does not run with its accuracy_level: {error.message[:200]}")
        try:
            got = self._run_granted(fused, base_dir, inputs) if self._granted else {}
        except ModelError as error:
            verdict.failing.append(inputs.name)
            verdict.problems.append(f"set `{inputs.name}`, with the accuracy_level of its MatMulNBits: {error.message}")
            return
        for name, value in self._granted.items():
            result = compare(got[name], value, self._truth[inputs.name][name], self.dtype, quantized=True,
                             disputed=GRANTED_DISPUTED)
            if not result.passed:
                verdict.failing.append(inputs.name)
                verdict.problems.append(f"set `{inputs.name}`, output `{name}`, with the accuracy_level of its "
                                        f"MatMulNBits: {result.problem}")

    def _run_granted(
        self, proto: onnx.ModelProto, folder: Path | None, inputs: scenarios.InputSet
    ) -> dict[str, np.ndarray]:
        runner = Runner(proto, self._provider, level="all", base_dir=folder, custom_ops=self._custom_ops, exact=False)
        return runner.run(inputs.feeds)

    def _never_finite(self) -> list[str]:
        """Outputs that hold numbers in some set, but in none of them a finite one."""
        truths = [self._truth[inputs.name] for inputs in self.sets]
        found = []
        for name in truths[0] if truths else ():
            values = [truth[name] for truth in truths if truth[name].dtype.kind in "fV" and truth[name].size]
            if values and not any(np.isfinite(value.astype(np.float64)).any() for value in values):
                found.append(name)
        return found

    def _runner(
        self, fused: onnx.ModelProto, base_dir: Path | None, must_run: bool, verdict: Verdict
    ) -> tuple[Runner | None, bool]:
        """A runner for the rewrite, and whether it had to be widened to float32."""
        reason = ""
        if not self.structure_only:
            try:
                # As a user would run it, with all of ONNX Runtime's own optimizations.
                runner = Runner(fused, self._provider, level="all", base_dir=base_dir, custom_ops=self._custom_ops)
                return runner, False
            except RuntimeMissingError as error:
                verdict.status, verdict.problems = "unverified", [error.message]
                return None, False
            except ModelError as error:
                reason = error.message
                if must_run:
                    verdict.status, verdict.problems = "failed", [reason]
                    verdict.failing = [s.name for s in self.sets]
                    return None, False
        try:
            runner = oracle.runner(fused, "float32", self._provider, base_dir=base_dir, custom_ops=self._custom_ops)
        except (ModelError, RuntimeMissingError) as error:
            verdict.status = "failed" if must_run and isinstance(error, ModelError) else "unverified"
            verdict.problems = [f"does not run: {error.message}"]
            verdict.failing = [s.name for s in self.sets]
            return None, True
        if reason:
            verdict.notes.append(f"the fused model was run in float32, since it does not run here as it is: {reason}")
        return runner, True

    def _compare(
        self, inputs: scenarios.InputSet, got: Mapping[str, np.ndarray], verdict: Verdict,
        worst: dict[str, tuple[Comparison, str]],
    ) -> None:
        for name, unfused in inputs.outputs.items():
            if name not in got:
                verdict.problems.append(f"output `{name}` is missing")
                verdict.failing.append(inputs.name)
                continue
            if not self.structure_only and got[name].dtype.kind != unfused.dtype.kind:
                verdict.problems.append(f"output `{name}` is {got[name].dtype}, not {unfused.dtype}")
                verdict.failing.append(inputs.name)
                continue
            result = compare(got[name], unfused, self._truth[inputs.name][name], self.dtype, quantized=self.quantized)
            # Only a difference between finite numbers can come from last bits.
            if not result.passed and np.isfinite(result.error) and (movement := self._movement(inputs, name)):
                allowance = min(OF_MOVEMENT * movement, MOST_MOVEMENT)
                if not self.quantized:  # in float32 only what is folded is rounded, once more: twice the floor at most
                    allowance = min(movement, 2 * FLOOR[self.dtype]) - FLOOR[self.dtype]
                again = compare(got[name], unfused, self._truth[inputs.name][name], self.dtype,
                                quantized=self.quantized, allowance=allowance)
                if again.passed:
                    result = again
                    verdict.notes.append(f"set `{inputs.name}`: output `{name}` of the original itself moves by "
                                         f"{movement:.2g} with the last bits of its weights")
            if not result.passed:
                verdict.failing.append(inputs.name)
                verdict.problems.append(f"set `{inputs.name}`, output `{name}`: {result.problem}")
            if name not in worst or result.error - result.tolerance > worst[name][0].error - worst[name][0].tolerance:
                worst[name] = (result, inputs.name)


def narrowest(proto: onnx.ModelProto) -> str:
    """The narrowest float dtype that the model computes in, from its weights, constants, casts, inputs and outputs.
    What is only cast on its way in or out does not count: the results are as exact as the dtype between allows."""
    nodes = list(with_subgraphs(proto.graph.node))
    read = {name for node in nodes for name in node.input}
    computed_with = {name for node in nodes if node.op_type != "Cast" for name in node.input}
    cast_last = {n.output[0] for n in proto.graph.node if n.op_type == "Cast" and n.output[0] not in read}
    found = {v.type.tensor_type.elem_type for v in proto.graph.input if v.name in computed_with}
    found.update(v.type.tensor_type.elem_type for v in proto.graph.output if v.name not in cast_last)

    def visit(graph: onnx.GraphProto) -> None:
        found.update(t.data_type for t in graph.initializer)
        for node in graph.node:
            for attribute in node.attribute:
                if attribute.type == AttributeProto.TENSOR:
                    found.add(attribute.t.data_type)
                elif attribute.type == AttributeProto.GRAPH:
                    visit(attribute.g)
                elif node.op_type == "Cast" and attribute.name == "to" and node.output[0] not in cast_last:
                    found.add(attribute.i)

    visit(proto.graph)
    for number, name in ((TensorProto.BFLOAT16, "bfloat16"), (TensorProto.FLOAT16, "float16"),
                         (TensorProto.FLOAT, "float32"), (TensorProto.DOUBLE, "float64")):
        if number in found:
            return name
    return "float32"


def quantizes_activations(proto: onnx.ModelProto) -> bool:
    """Whether the model rounds values to a few bits on their way."""
    return bool(_QUANTIZED & _ops(proto))


def weight_bytes(proto: onnx.ModelProto) -> int:
    """Bytes of the weights, wherever they are stored."""
    total = 0
    for tensor in proto.graph.initializer:
        count = int(np.prod(tensor.dims, dtype=np.int64)) if tensor.dims else 1
        try:
            total += count * onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
        except (KeyError, TypeError):
            total += len(tensor.raw_data)
    return total


def _ops(proto: onnx.ModelProto) -> set[str]:
    return {node.op_type for node in every_node(proto)}
