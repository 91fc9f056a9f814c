"""`--kv-cache shared` in `optimize`: which build is written, and whether it generates what the original does.

The form whose cache grows is verified first, like any other model, and wrong fusions are taken back there. The form
with shared buffers is then built without them, and generates beside the original.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import onnx

from onnxfuse import pipeline
from onnxfuse.errors import UsageError, VerificationError
from onnxfuse.reverting import Builder, Checked
from onnxfuse.verify import Verifier
from onnxfuse.verify.generation import Caches, GenerationCheck, GenerationVerdict, mask_of


def options(given: pipeline.Options, kv_cache: str) -> pipeline.Options | None:
    """The options of the build with shared buffers; None if it was not asked for.

    Raises:
        UsageError: no such form, or one that an earlier stage cannot have.
    """
    if kv_cache not in pipeline.KV_CACHES:
        raise UsageError(f"unknown form of the cache `{kv_cache}`", hint=f"one of {', '.join(pipeline.KV_CACHES)}")
    if kv_cache == "separate":
        return None
    if given.stop_after != "lower":
        raise UsageError(
            f"caches are shared in the stage `lower`, which does not run with --stop-after `{given.stop_after}`",
            hint="leave out one of the two",
        )
    return replace(given, kv_cache=kv_cache)


def settle(
    builder: Builder, original: onnx.ModelProto, built: pipeline.Build, checked: Checked | None,
    verifier: Verifier | None, seed: int, custom_ops: Sequence[str] = (),
) -> tuple[pipeline.Build, GenerationVerdict]:
    """Take over what verification took back, and let the result generate.

    Args:
        original: the model as it was given.
        built: with shared buffers, and with all fusions.
        checked: the verified form whose cache grows, or None; a failure is noted in its verdict.
        verifier: what verified it; None: nothing is run.
        seed: of the generated inputs.
        custom_ops: custom-op libraries that the models need.
    """
    if checked is not None and checked.reverted:
        built = builder.build(replace(checked.options, kv_cache="shared"))
    if checked is None or verifier is None or not checked.verdict.ok:
        return built, GenerationVerdict("skipped" if checked is None else "unverified")
    generation = _generate(builder, original, built, verifier, seed, custom_ops)
    verdict = checked.verdict
    if not generation.ok:
        verdict.status = generation.status
        verdict.problems = [f"with shared caches, {problem}" for problem in generation.problems]
    elif generation.status == "structure-only":
        verdict.status = generation.status
    return built, generation


def _generate(
    builder: Builder, original: onnx.ModelProto, built: pipeline.Build, verifier: Verifier, seed: int,
    custom_ops: Sequence[str],
) -> GenerationVerdict:
    cache = built.shared_cache
    assert cache is not None
    caches = Caches(
        cache.caches, mask_of(original) if cache.grouped else cache.mask, cache.added_inputs, cache.window,
        cache.new_tokens, compact=cache.grouped,
    )
    try:
        check = GenerationCheck(
            original, caches, base_dir=built.model.base_dir, provider=builder.provider, seed=seed,
            example=verifier.sets[0].feeds, quantized=verifier.quantized,
            custom_ops=custom_ops,
        )
    except VerificationError as error:
        return GenerationVerdict("unverified", problems=[error.message])
    return builder.check_generation(check, built)


def as_dict(built: pipeline.Build, generation: GenerationVerdict | None) -> dict[str, Any] | None:
    """How the buffers are fed, and how the model was checked; None without shared buffers."""
    if built.shared_cache is None or generation is None:
        return None
    return {**built.shared_cache.to_json(), "generation": generation.as_dict()}
