"""The kernel table: which ops, with which dtypes and ranks, a target can really run.

For ONNX Runtime's own ops the installed ONNX Runtime is asked (the probe is handed in, since only `onnxfuse.runtime`
may import it). Where there is no device to ask, a shipped table answers. For our own ops the op registry answers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from onnxfuse.match.scope import Target
from onnxfuse.ops import registry
from onnxfuse.ops.opdef import FUSED_DOMAIN

__all__ = ["MICROSOFT", "SHIPPED_CUDA", "KernelTable", "Probe", "Query", "Target"]

MICROSOFT = "com.microsoft"


@dataclass(frozen=True)
class Query:
    """One question to the table: a kernel for `domain::op` with element type `dtype` and a first input of `rank`.

    `opset` is the version of ONNX's own domain in the model. `attrs` are those that a kernel may refuse. `inputs`, if
    given, are the dtypes and ranks of all inputs (None: omitted), and `outputs` the number of outputs of a whole node.
    """

    domain: str
    op: str
    dtype: str
    opset: int
    rank: int = 3
    attrs: tuple[tuple[str, Any], ...] = ()
    inputs: tuple[tuple[str, int | None] | None, ...] = ()
    outputs: int = 1

    @property
    def key(self) -> str:
        """A text that is the same for equal questions, for caches."""
        attrs = ",".join(f"{name}={value}" for name, value in self.attrs)
        text = f"{self.domain}::{self.op}/{self.dtype}/opset{self.opset}/rank{self.rank}/{attrs}"
        return f"{text}/{self.inputs}/{self.outputs}" if self.inputs else text


Probe = Callable[[Target, Query], "bool | None"]
"""Asks the installed runtime: True, False, or None when it cannot be asked (no such device here)."""

_F32, _F16, _BF16 = "float32", "float16", "bfloat16"
_ALL = frozenset({_F32, _F16, _BF16})

#: What ONNX Runtime ≥ 1.31 has on CUDA (its docs/OperatorKernels.md), used where there is no GPU to ask.
#: Ops of ONNX's own domain that are not listed have a kernel for every dtype in `_ALL`.
SHIPPED_CUDA: Mapping[tuple[str, str], frozenset[str]] = {
    ("", "LayerNormalization"): _ALL,
    ("", "RMSNormalization"): _ALL,
    ("", "SimplifiedLayerNormalization"): _ALL,
    ("", "Gelu"): _ALL,
    ("", "Swish"): frozenset(),
    ("", "RotaryEmbedding"): _ALL,
    ("", "Attention"): _ALL,
    ("", "ReduceMean"): frozenset({_F32, _F16}),
    ("", "Reciprocal"): frozenset({_F32, _F16}),
    (MICROSOFT, "SkipLayerNormalization"): _ALL,
    (MICROSOFT, "SkipSimplifiedLayerNormalization"): _ALL,
    (MICROSOFT, "Gelu"): _ALL,
    (MICROSOFT, "FastGelu"): _ALL,
    (MICROSOFT, "BiasGelu"): _ALL,
    (MICROSOFT, "QuickGelu"): _ALL,
    (MICROSOFT, "FusedMatMul"): _ALL,
    (MICROSOFT, "RotaryEmbedding"): _ALL,
    (MICROSOFT, "MultiHeadAttention"): _ALL,
    (MICROSOFT, "GroupQueryAttention"): frozenset({_F16, _BF16}),
}

#: Which input ranks an op's kernels take, where that is less than "any".
_RANKS: Mapping[tuple[str, str], frozenset[int]] = {
    (MICROSOFT, "SkipLayerNormalization"): frozenset({2, 3}),
    (MICROSOFT, "SkipSimplifiedLayerNormalization"): frozenset({2, 3}),
    ("", "Gemm"): frozenset({2}),
}

#: The opset of ONNX's own domain from which an op exists there; ONNX Runtime knows two of them earlier.
_SINCE: Mapping[str, int] = {
    "Gelu": 20, "Swish": 24, "HardSwish": 14, "RMSNormalization": 23, "RotaryEmbedding": 23, "Attention": 23,
}


@dataclass
class KernelTable:
    """Answers whether a kernel exists on `target`; every answer is kept.

    Args:
        target: the execution provider (and architecture).
        probe: asks the installed runtime; None: the shipped table only.
        custom_ops: whether the custom-op library is there, so that ops of the `onnxfuse` domain can run.
    """

    target: Target
    probe: Probe | None = None
    custom_ops: bool = True
    _answers: dict[Query, bool] = field(default_factory=dict)

    def has(
        self, op: str, dtype: str | None, *, opset: int, domain: str = "", rank: int | None = 3, **attrs: Any
    ) -> bool:
        """Whether the target has this kernel. Unknown dtype or rank: no, where it matters."""
        if dtype is None:
            return False
        allowed = _RANKS.get((domain, op))
        if allowed is not None and rank not in allowed:
            return False
        query = Query(domain, op, dtype, opset, 3 if rank is None else rank, tuple(sorted(attrs.items())))
        if query not in self._answers:
            self._answers[query] = self._ask(query)
        return self._answers[query]

    def runs(self, query: Query) -> bool:
        """Whether the target can run a whole node; yes where nobody can be asked."""
        if query not in self._answers:
            answer = self.probe(self.target, query) if self.probe is not None else None
            self._answers[query] = answer is not False
        return self._answers[query]

    def has_custom(self, op: str, dtype: str | None) -> bool:
        """Whether the custom-op library has a kernel for `onnxfuse::op` on this provider."""
        definition = registry.find(FUSED_DOMAIN, op)
        if definition is None or not self.custom_ops:
            return False
        return dtype in definition.kernels.get(self.target.provider, frozenset())

    def _ask(self, query: Query) -> bool:
        if query.domain == "" and query.opset < _SINCE.get(query.op, 0):
            return False
        if self.probe is not None:
            answer = self.probe(self.target, query)
            if answer is not None:
                return answer
        return self._shipped(query)

    def _shipped(self, query: Query) -> bool:
        if self.target.provider != "cuda":
            # Without a runtime to ask, only ONNX's float32 ops are sure to run.
            return query.domain == "" and query.dtype == _F32 and query.op != "SimplifiedLayerNormalization"
        dtypes = SHIPPED_CUDA.get((query.domain, query.op))
        if dtypes is None:
            dtypes = _ALL if query.domain == "" else frozenset()
        return query.dtype in dtypes
