"""Which input sets a model is tried with, and which of them its own unfused graph can run.

Names of dimensions promise more than a graph keeps: some exports run with batch 1 only, some need so many samples,
some hide a head size behind a name. The unfused model decides what is a valid input; what it refuses is varied, and
what is learned on the way holds for all sets.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from onnxfuse.errors import InputDataError, ModelError
from onnxfuse.runtime.feeds import InputSpec, Scenario, generate, has_past, unknown_dims

#: Longer than any sliding window of the usual small models, and longer than that of most.
LONG = 40
VERY_LONG = 130
_HEAD_SIZES = (16, 32, 64, 128, 80, 96, 8, 256)
_LENGTHS = (32, 16, 64, 77, 128, 512, 576, 640, 1024, 2, 1)
_MAX_TRIES = 40

Run = Callable[[Mapping[str, np.ndarray]], dict[str, np.ndarray]]


@dataclass
class InputSet:
    """One valid input set: its circumstances, its values, and what the unfused model gives for them.

    `by_row`: the unfused model runs with batch 1 only; its outputs are those of the rows, one after the other. What a
    rewrite makes of the whole batch must be the same, if it runs it.
    """

    name: str
    feeds: dict[str, np.ndarray]
    outputs: dict[str, np.ndarray]
    scenario: Scenario | None = None
    by_row: bool = False


@dataclass
class Plan:
    """The sets to compare with, and what could not be run.

    Attributes:
        sets: valid input sets.
        dropped: `{scenario: ONNX Runtime's reason}` of those that the unfused model refuses.
        learned: constraints found, in words.
    """

    sets: list[InputSet] = field(default_factory=list)
    dropped: dict[str, str] = field(default_factory=dict)
    learned: list[str] = field(default_factory=list)


def scenarios(specs: Sequence[InputSpec], *, large: float = 100.0, size: str = "small") -> list[Scenario]:
    """The circumstances to try, most telling first.

    Args:
        specs: the model's inputs.
        large: factor for float inputs in the set of large magnitudes.
        size: `small`, `medium` or `huge` models; larger ones get fewer and shorter sets.
    """
    masked = any(spec.role == "mask" for spec in specs)
    roles = {spec.role for spec in specs}
    dynamic = {d for spec in specs for d in spec.dims if not isinstance(d, int)}
    wanted: list[Scenario]
    if has_past(specs):
        wanted = [
            Scenario("past 17, left padding", 2, 4, 17, "left"),
            Scenario("past 0, right padding", 3, 7, 0, "right"),
            Scenario("past 1, one token", 2, 1, 1),
            Scenario("past 17, one token", 1, 1, 17),
            Scenario("past 17, right padding", 2, 3, 17, "right"),
            Scenario(f"past {LONG}", 1, 5, LONG),
        ]
    elif roles & {"ids", "mask"}:
        wanted = [
            Scenario("left padding", 2, 7, 0, "left"),
            Scenario("right padding", 3, 12, 0, "right"),
            Scenario("no padding", 1, 5),
            Scenario("long, left padding", 2, LONG, 0, "left"),
            Scenario("a masked row", 2, 6, 0, "masked"),
            Scenario("very long", 1, VERY_LONG),
        ]
    else:
        wanted = [Scenario("batch 2", 2, 7), Scenario("batch 3", 3, 12), Scenario("batch 1", 1, 5)]
    if not masked:
        wanted = [s for s in wanted if "masked" not in s.name]
    if "data" in roles:
        wanted.insert(2, Scenario("large magnitudes", 2, 7, 0, scale=large))
        wanted.insert(3, Scenario("small magnitudes", 2, 7, 0, scale=1.0 / large))
    if not dynamic:
        # Every size is fixed: only values and padding differ.
        wanted = [s for s in wanted if s.name != "very long"]
    if size == "medium":
        wanted = [s for s in wanted if s.name != "very long"][:5]
    elif size == "huge":
        wanted = wanted[:2]
    return wanted


def plan(
    specs: Sequence[InputSpec], run: Run, *, seed: int = 0, shapes: Mapping[str, tuple[int, ...]] | None = None,
    limit: int | None = None, large: float = 100.0, size: str = "small",
) -> Plan:
    """Make the input sets that the unfused model can run.

    Args:
        specs: the model's inputs.
        run: the unfused model.
        seed: of all random values.
        shapes: given input shapes, which hold in every set.
        limit: at most so many sets.

    Raises:
        InputDataError: no set runs.
    """
    result = Plan()
    wanted = [s.having(seed=seed + i, shapes=dict(shapes or {})) for i, s in enumerate(
        scenarios(specs, large=large, size=size))]
    if limit is not None:
        wanted = wanted[: max(1, limit)]
    changes = _learn(specs, run, wanted[0], result)
    seen = set()
    for scenario in wanted:
        made, reason = None, ""
        for variant in _variants(scenario.having(**changes)):
            made, refusal = _attempt(specs, run, variant)
            if made is not None:
                break
            reason = reason or refusal
        if made is None:
            result.dropped[scenario.name] = reason
            continue
        fingerprint = _fingerprint(made.feeds)
        if fingerprint not in seen:
            seen.add(fingerprint)
            result.sets.append(made)
    if max(s.batch for s in wanted) > 1 and all(s.scenario is None or s.scenario.batch == 1 for s in result.sets):
        result.learned.append("batch 1 only")
        whole = generate(specs, wanted[0].having(**changes))
        try:
            result.sets.append(InputSet("batch 2, row by row", whole, run_by_row(run, whole), by_row=True))
        except ModelError as error:
            result.dropped["batch 2, row by row"] = error.message
    return result


def run_by_row(run: Run, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Run each row of a batch by itself and put the outputs together along the first axis.

    Raises:
        ModelError: a row does not run, or an output has no batch axis.
    """
    batch = max(value.shape[0] for value in feeds.values() if value.ndim)
    rows = [run({n: v[i : i + 1] if v.ndim and v.shape[0] == batch else v for n, v in feeds.items()})
            for i in range(batch)]
    if any(value.ndim == 0 or value.shape[0] != 1 for value in rows[0].values()):
        raise ModelError("an output has no batch axis")
    return {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}


def _variants(scenario: Scenario) -> Iterator[Scenario]:
    """The scenario, and what to try when the model refuses it: other padding, then batch 1."""
    yield scenario
    if scenario.padding in ("left", "masked"):
        yield scenario.having(padding="right", name=f"{scenario.name} (on the right)")
    if scenario.batch > 1:
        yield scenario.having(batch=1, name=f"{scenario.name} (batch 1)")
        if scenario.padding != "none":
            yield scenario.having(batch=1, padding="none", name=f"{scenario.name} (batch 1, no padding)")


def _learn(specs: Sequence[InputSpec], run: Run, first: Scenario, plan_: Plan) -> dict[str, Any]:
    """Find a variant of the first scenario that runs; return the sizes that it needed, which all others take over."""
    refusals: list[str] = []
    for changes in itertools.islice(_candidates(specs, refusals), _MAX_TRIES):
        for variant in _variants(first.having(**changes)):
            made, refusal = _attempt(specs, run, variant)
            if made is not None:
                plan_.learned += [f"{name} = {value}" for name, value in changes.get("fixed", {}).items()]
                if "seq" in changes:
                    plan_.learned.append(f"sequence length {changes['seq']}")
                return changes
            refusals.append(refusal)
    raise InputDataError(
        f"no input set runs in the unfused model; ONNX Runtime says: {refusals[0] if refusals else 'nothing'}",
        hint="give shapes with --input-shapes or values with --inputs FILE.npz",
    )


def _candidates(specs: Sequence[InputSpec], refusals: list[str]) -> Iterator[dict[str, Any]]:
    yield {}
    features = unknown_dims(specs)
    if features:
        named = [int(n) for n in re.findall(r"\b\d{1,4}\b", refusals[-1] if refusals else "") if 2 <= int(n) <= 512]
        for value in dict.fromkeys([*named, *_HEAD_SIZES]):
            yield {"fixed": dict.fromkeys(features, value)}
    for length in _LENGTHS:
        yield {"seq": length}


def _attempt(specs: Sequence[InputSpec], run: Run, scenario: Scenario) -> tuple[InputSet | None, str]:
    feeds = generate(specs, scenario)
    try:
        outputs = run(feeds)
    except ModelError as error:
        return None, error.message
    return InputSet(scenario.name, feeds, outputs, scenario), ""


def _fingerprint(feeds: Mapping[str, np.ndarray]) -> tuple[tuple[str, tuple[int, ...], bytes], ...]:
    return tuple((name, value.shape, value.tobytes()) for name, value in sorted(feeds.items()))
