"""What the names in rules stand for: predicates and weight functions."""

from __future__ import annotations

import inspect

from onnxfuse.match import predicates
from onnxfuse.rewrite import weights
from onnxfuse.rules.lint import Vocabulary


def vocabulary() -> Vocabulary:
    """The predicates and weight functions that exist now."""
    return Vocabulary(
        predicates=frozenset(predicates.REGISTRY),
        weights={name: frozenset(parameters(function)) for name, function in weights.REGISTRY.items()},
    )


def parameters(function: weights.WeightFunction) -> list[str]:
    """The parameters that a rule can give a weight function."""
    given = inspect.signature(function).parameters.values()
    return [p.name for p in given if p.kind is p.KEYWORD_ONLY and p.name not in ("sizes", "dtype")]
