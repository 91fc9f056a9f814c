"""Hold a model whose key/value cache lies in shared buffers to the original, whose cache grows.

Both generate: a prompt, then token after token. One buffer is bound as past and as present of the rewritten model, as a
user would; the original is given the cache that it gave. Compared are all outputs at every step, and at the end the
rows of the cache that belong to tokens. What the original gives for padding is nobody's, and is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from onnxfuse.errors import InputDataError, ModelError, RuntimeMissingError, VerificationError
from onnxfuse.runtime import feeds, oracle
from onnxfuse.runtime.in_place import InPlaceRunner
from onnxfuse.runtime.session import Runner
from onnxfuse.verify.check import MEDIUM, WIDE_LIMIT, narrowest, weight_bytes
from onnxfuse.verify.compare import Comparison, compare

#: Windows that are longer are not filled.
_LONGEST_WINDOW = 64
#: The size of what does not change from step to step, such as the length of an encoder's output, without an example.
_ELSEWHERE = 5
#: Rows of a buffer that no token needs.
_SPARE_ROWS = 3


@dataclass(frozen=True)
class Caches:
    """How the caches of the rewritten model are fed.

    Attributes:
        names: (past input, present output) of each.
        mask: the input [batch, total] that counts tokens, or None.
        added_inputs: whether the rewritten model has `seqlens_k` and `total_sequence_length` as inputs of its own.
        window: the shortest sliding window, 0 without one.
        new_tokens: the input, and its axis, that says how many tokens are new; None: the first of token ids.
        compact: whether the original itself writes the rows of a sequence without gaps where the mask has padding.
    """

    names: tuple[tuple[str, str], ...]
    mask: str | None
    added_inputs: tuple[str, ...] = ()
    window: int = 0
    new_tokens: tuple[str, int] | None = None
    compact: bool = False


def mask_of(proto: onnx.ModelProto) -> str | None:
    """The input [batch, total] that counts tokens, by its name; for a model that was fused by its exporter."""
    masks = [spec.name for spec in feeds.input_specs(proto) if spec.role == "mask" and len(spec.dims) == 2]
    return masks[0] if masks else None


@dataclass(frozen=True)
class Generation:
    """One course: a prompt of so many tokens, of which the sequences have fewer each when `padded`, then steps."""

    batch: int
    prompt: int
    steps: tuple[int, ...]
    padded: bool = False

    @property
    def name(self) -> str:
        padding = ", right padding" if self.padded else ""
        return f"batch {self.batch}, prompt {self.prompt}{padding}, steps {' '.join(map(str, self.steps))}"


@dataclass
class GenerationVerdict:
    """Whether the rewritten model generates what the original does.

    Attributes:
        status: `passed`, `structure-only` (right, but run in float32), `failed` or `unverified`.
        runs: names of the courses that were compared.
        outputs: per output the worst over all steps: name, error, unfused_error, tolerance.
        problems: what is wrong, in words; notes: what was left out.
    """

    status: str = "passed"
    runs: list[str] = field(default_factory=list)
    outputs: list[dict[str, Any]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return self.status in ("passed", "structure-only")

    def as_dict(self) -> dict[str, Any]:
        return {"status": self.status, "runs": self.runs, "outputs": self.outputs, "problems": self.problems,
                "notes": self.notes}


def generations(window: int, *, masked: bool, small: bool = True) -> list[Generation]:
    """What is tried.

    Args:
        window: of the shortest sliding window. A padded course stays inside it (beyond, rows and columns of the mask
            are counted differently), another one leaves it.
        masked: whether sequences can be of different lengths.
        small: whether the model is so small that all is tried.
    """
    prompt, steps = 6, 4
    if masked and 0 < window < prompt + steps:
        prompt = max(window - steps, 2)
        steps = max(window - prompt, 1)
    long = window + 2 if 0 < window <= _LONGEST_WINDOW else 9
    found = [Generation(2, prompt, (1,) * steps, padded=masked)]
    if small:
        found += [Generation(1, long, (1, 3, 1)), Generation(3, 1, (1, 1))]
    return found


class GenerationCheck:
    """Prepared once for an original model.

    Args:
        proto: the original model, whose cache grows.
        base_dir: folder of its external data.
        provider: `cpu` or `cuda`.
        caches: how they are fed.
        seed: of the generated inputs.
        example: an input set that the original takes; sizes that do not change from step to step are as there.
        quantized: whether the model quantizes activations.
        custom_ops: custom-op libraries that the models need.

    Raises:
        VerificationError: the original does not run here.
    """

    def __init__(
        self, proto: onnx.ModelProto, caches: Caches, *, base_dir: Path | None = None, provider: str = "cpu",
        seed: int = 0, example: Mapping[str, np.ndarray] | None = None, quantized: bool = False,
        custom_ops: Iterable[str | Path] = (),
    ) -> None:
        self._caches = caches
        self._base_dir = base_dir
        self._provider = provider
        self._custom_ops = tuple(custom_ops)
        self._seed = seed
        self._quantized = quantized
        self._dtype = narrowest(proto)
        self._small = weight_bytes(proto) <= MEDIUM
        self._specs = feeds.input_specs(proto)
        self._fixed = _constant_sizes(self._specs, caches, example or {})
        self._wide: str | None = None
        try:
            self._unfused = Runner(proto, provider, base_dir=base_dir, custom_ops=self._custom_ops)
        except ModelError as reason:
            self._wide = "float32"
            try:
                self._unfused = self._widened(proto, "float32")
            except ModelError:
                raise VerificationError(f"the original model does not run on `{provider}`: {reason.message}") from None
        self._truth, self._truth_dtype = self._oracle(proto)

    def _widened(self, proto: onnx.ModelProto, to: str, base_dir: Path | None = None) -> Runner:
        return oracle.runner(proto, to, self._provider, base_dir=base_dir or self._base_dir,
                             custom_ops=self._custom_ops)

    def _oracle(self, proto: onnx.ModelProto) -> tuple[Runner, str | None]:
        """What is taken for the truth, and the dtype that its inputs have to be in."""
        to = "float32" if self._dtype in ("float16", "bfloat16") else "float64"
        if self._wide or self._dtype == "float64" or (to == "float64" and weight_bytes(proto) > WIDE_LIMIT):
            return self._unfused, self._wide
        try:
            return oracle.runner(proto, to, base_dir=self._base_dir, custom_ops=self._custom_ops), to
        except ModelError:
            return self._unfused, None

    # -- checking ------------------------------------------------------------------------------------------------------

    def check(
        self, shared: onnx.ModelProto, *, base_dir: Path | None = None, must_run: bool = True
    ) -> GenerationVerdict:
        """Generate with both.

        Args:
            shared: the rewritten model.
            base_dir: folder of its external data; by default the original's.
            must_run: whether the provider here is the one that the model is meant for.
        """
        verdict = GenerationVerdict()
        try:
            runner, wide = self._shared_runner(shared, base_dir, must_run)
        except (ModelError, RuntimeMissingError) as error:
            verdict.status = "failed" if must_run and isinstance(error, ModelError) else "unverified"
            verdict.problems = [f"does not run: {error.message}"]
            return verdict
        worst: dict[str, Comparison] = {}
        for course in generations(self._caches.window, masked=self._caches.mask is not None, small=self._small):
            self._course(course, runner, wide, verdict, worst)
        verdict.outputs = [{"name": name, "error": c.error, "unfused_error": c.unfused_error, "tolerance": c.tolerance}
                           for name, c in worst.items()]
        if verdict.problems:
            verdict.status = "failed"
        elif not verdict.runs:
            verdict.status = "unverified"
            verdict.problems = ["the original runs none of the courses", *verdict.notes[:1]]
        elif wide:
            verdict.status = "structure-only"
        return verdict

    def _shared_runner(
        self, shared: onnx.ModelProto, base_dir: Path | None, must_run: bool
    ) -> tuple[Runner, str | None]:
        folder = base_dir or self._base_dir
        if self._wide is None:
            try:
                return Runner(shared, self._provider, level="all", base_dir=folder, custom_ops=self._custom_ops), None
            except ModelError:
                if must_run:
                    raise
        return self._widened(shared, "float32", folder), "float32"

    def _course(
        self, course: Generation, runner: Runner, wide: str | None, verdict: GenerationVerdict,
        worst: dict[str, Comparison],
    ) -> None:
        """Generate once; with batch 1 where the original takes no other."""
        inputs = _Inputs(self._specs, self._caches, course, self._seed, self._fixed)
        growing = [_Growing(self._unfused, self._caches, self._wide),
                   _Growing(self._truth, self._caches, self._truth_dtype)]
        in_place: InPlaceRunner | None = None
        for number, new in enumerate((course.prompt, *course.steps)):
            try:
                given = inputs.step(new)
                unfused = growing[0].run(given)
            except (ModelError, InputDataError) as error:
                if number == 0 and course.batch > 1:
                    self._course(replace(course, batch=1), runner, wide, verdict, worst)
                else:
                    verdict.notes.append(f"{course.name}: the original refuses {new} tokens: {error.message[:200]}")
                return
            try:
                truth = growing[1].run(given)
            except ModelError as error:
                verdict.notes.append(f"no oracle in {self._truth_dtype}: {error.message[:200]}")
                self._truth, self._truth_dtype = self._unfused, self._wide
                growing[1], truth = growing[0], unfused
            where = f"{course.name}: {'the prompt' if number == 0 else f'step {number}'}"
            try:
                if in_place is None:
                    in_place = InPlaceRunner(runner, self._caches.names, inputs.buffer_shapes(growing[0].caches))
                got = in_place.run(oracle.cast_feeds(inputs.shared(given), wide) if wide else inputs.shared(given))
            except ModelError as error:
                verdict.problems.append(f"{where}: {error.message}")
                return
            for name, value in unfused.items():
                chosen = inputs.valid(value.shape, new)
                if chosen is not None:
                    self._compare(where, name, got.get(name), (value, truth[name]), chosen, verdict, worst)
            verdict.runs = list(dict.fromkeys([*verdict.runs, course.name]))
        assert in_place is not None
        rows = inputs.rows()
        for past, present in self._caches.names:
            grown = tuple(_rows(one.caches[past], rows if not self._caches.compact else None, inputs.counts)
                          for one in growing)
            own = _rows(in_place.cache(past), None, inputs.counts)
            self._compare(f"{course.name}: the cache", present, own, grown, ..., verdict, worst)

    def _compare(
        self, where: str, name: str, got: np.ndarray | None, wanted: Sequence[np.ndarray], chosen: Any,
        verdict: GenerationVerdict, worst: dict[str, Comparison],
    ) -> None:
        if got is None:
            verdict.problems.append(f"{where}: output `{name}` is missing")
            return
        if got.shape != wanted[0].shape:
            verdict.problems.append(f"{where}: output `{name}` has shape {list(got.shape)}, not "
                                    f"{list(wanted[0].shape)}")
            return
        unfused, truth = (value[chosen] for value in wanted)
        result = compare(got[chosen], unfused, truth, self._dtype, quantized=self._quantized)
        if not result.passed:
            verdict.problems.append(f"{where}: output `{name}`: {result.problem}")
        if name not in worst or result.error - result.tolerance > worst[name].error - worst[name].tolerance:
            worst[name] = result


class _Growing:
    """A model whose cache grows: what it gave is given to it again."""

    def __init__(self, runner: Runner, caches: Caches, dtype: str | None) -> None:
        self._runner = runner
        self._names = caches.names
        self._dtype = dtype
        self.caches: dict[str, np.ndarray] = {}

    def run(self, given: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The outputs but for the caches."""
        values = oracle.cast_feeds(given, self._dtype) if self._dtype else dict(given)
        made = self._runner.run({**values, **self.caches})
        self.caches = {past: made.pop(present) for past, present in self._names}
        return made


class _Inputs:
    """The inputs of one course, step after step."""

    def __init__(
        self, specs: Sequence[feeds.InputSpec], caches: Caches, course: Generation, seed: int, fixed: Mapping[str, int]
    ) -> None:
        self._specs = list(specs)
        self._caches = caches
        self._course = course
        self._scenario = feeds.Scenario(course.name, batch=course.batch, fixed=fixed, seed=seed)
        self._mask = np.zeros((course.batch, 0), bool)
        self._past_names = {past for past, _ in caches.names}

    @property
    def counts(self) -> np.ndarray:
        """Tokens of each sequence so far."""
        return self._mask.sum(axis=1)

    def step(self, new: int) -> dict[str, np.ndarray]:
        """The inputs of the original for so many more tokens, an empty cache among them.

        Raises:
            InputDataError: the model wants something that cannot be generated.
        """
        before, counts = self._mask.shape[1], self.counts
        scenario = self._scenario.having(seq=new, past=before, seed=self._scenario.seed + 101 * before + new)
        given = feeds.generate(self._specs, scenario)
        added = np.ones((self._course.batch, new), bool)
        if before == 0 and self._course.padded:
            for row in range(self._course.batch):
                added[row, new - row * new // (self._course.batch + 1) :] = False
        self._mask = np.concatenate([self._mask, added], axis=1)
        if self._caches.mask is not None:
            given[self._caches.mask] = self._mask.astype(given[self._caches.mask].dtype)
        for spec in self._specs:
            if spec.role == "positions" and given[spec.name].shape == (self._course.batch, new):
                given[spec.name] = (counts[:, None] + np.arange(new)).astype(spec.dtype)
        return given

    def shared(self, given: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The same for the rewritten model."""
        numbers = (self.counts - 1).astype(np.int32), np.array(self._mask.shape[1], np.int32)
        added = dict(zip(self._caches.added_inputs, numbers, strict=False))
        return {**{name: value for name, value in given.items() if name not in self._past_names}, **added}

    def buffer_shapes(self, grown: Mapping[str, np.ndarray]) -> dict[str, tuple[int, ...]]:
        """The shapes of the buffers, from those of grown caches."""
        rows = self._course.prompt + sum(self._course.steps) + _SPARE_ROWS
        return {name: (*value.shape[:2], rows, value.shape[3]) for name, value in grown.items()}

    def valid(self, shape: tuple[int, ...], new: int) -> Any:
        """Which elements of an output belong to tokens: an index; None if that cannot be told."""
        mask = self._mask[:, self._mask.shape[1] - new :]
        if mask.all():
            return ...
        return mask if shape[:2] == mask.shape else None

    def rows(self) -> np.ndarray:
        """Which rows of a cache that grows belong to tokens, [batch, total]."""
        return self._mask


def _constant_sizes(
    specs: Sequence[feeds.InputSpec], caches: Caches, example: Mapping[str, np.ndarray]
) -> dict[str, int]:
    """Sizes by name of the dimensions that stay the same from step to step, but for the batch."""
    by_name = {spec.name: spec for spec in specs}
    past = [by_name[name] for name, _ in caches.names]
    changing = {spec.dims[axis] for spec in past for axis in (0, 2)}
    if caches.mask is not None:
        changing |= set(by_name[caches.mask].dims)
    ids = [(spec.name, 1) for spec in specs if spec.role == "ids"]
    for name, axis in [caches.new_tokens] if caches.new_tokens is not None else ids[:1]:
        changing.add(by_name[name].dims[axis])
    found: dict[str, int] = {}
    for spec in specs:
        for axis, dim in enumerate(spec.dims):
            if not isinstance(dim, str) or not dim.isidentifier() or dim in changing:
                continue
            if spec.name in example:
                found.setdefault(dim, example[spec.name].shape[axis])
            elif spec not in past:
                found.setdefault(dim, _ELSEWHERE)
    return found


def _rows(cache: np.ndarray, chosen: np.ndarray | None, counts: np.ndarray) -> np.ndarray:
    """The rows of all tokens, sequence after sequence: the chosen ones, else the first of each sequence."""
    return np.concatenate([
        cache[b][:, np.flatnonzero(chosen[b]) if chosen is not None else np.arange(count)].swapaxes(0, 1)
        for b, count in enumerate(counts)
    ])
