"""Every choice between a fused op and the target's own kernels, in one place, with its reason.

Measured with ``benchmarks/bench_cpu.py`` and ``benchmarks/bench_model.py``; change a line here together with a new
measurement.
"""

from __future__ import annotations

from dataclasses import dataclass

from onnxfuse.lower.emit import Emitter
from onnxfuse.lower.kernels import KernelTable


@dataclass(frozen=True)
class Choice:
    """Whether the fused op stays, and why; the reason of a "no" goes into the report."""

    keep: bool
    reason: str = ""


NO_KERNEL = Choice(False, "no-kernel")

#: On the CPU provider. Hidden sizes 384 and 768, 1 to 256 rows, one thread, ONNX Runtime 1.31.1.
_CPU_LINEAR = {
    "float32": Choice(
        False,
        "does-not-pay: measured, a MatMul of ONNX Runtime (weights packed once) with its own bias, GELU and norm "
        "kernels takes as long",
    ),
    "float16": Choice(
        False, "does-not-pay: ONNX Runtime multiplies float16 on CPU in float32 with weights converted once"
    ),
    "bfloat16": Choice(True),
}
_CPU_GATED = {
    **_CPU_LINEAR,
    "float32": Choice(
        False,
        "does-not-pay: measured, one product over packed gate and up weights is 2 to 4% slower than two: "
        "halving its output is a copy",
    ),
}
CPU_PACKED = Choice(
    False,
    "does-not-pay: measured, one product over packed weights and a Split is 1 to 5% slower than separate products: "
    "the Split is a copy",
)

#: On CPU (384 features, 256 rows): 0.43 ms against 0.05 ms for Add and LayerNormalization, 0.07 against 0.03 ms for Add
#: and SimplifiedLayerNormalization.
_CPU_SKIP_NORM = Choice(
    False, "does-not-pay: measured, ONNX Runtime's skip norms on CPU take 2 to 8 times as long as addition and norm"
)

#: On CUDA a product with nothing fused around it is left to cuBLAS.
_CUDA_PLAIN = Choice(False, "does-not-pay: a product with nothing fused around it is left to cuBLAS")

#: Blocks of gate and up columns that our CUDA kernels want to alternate.
CUDA_INTERLEAVE = 8


def skip_norm(kernels: KernelTable) -> Choice:
    """Whether an addition and the norm behind it become (or stay) one op of ONNX Runtime."""
    return _CPU_SKIP_NORM if kernels.target.provider == "cpu" else Choice(True)


def sum_before_layer_norm(emitter: Emitter, kernels: KernelTable, dtype: str | None) -> bool:
    """Whether an addition before a LayerNormalization is better spelled Sum: ONNX Runtime's optimizer puts a slow
    SkipLayerNormalization in place of Add and LayerNormalization, but not of Sum and LayerNormalization."""
    return kernels.target.provider == "cpu" and kernels.has("Sum", dtype, opset=emitter.opset)


def linear(kernels: KernelTable, dtype: str | None, *, plain: bool) -> Choice:
    """Whether an `onnxfuse::Linear` stays. `plain`: no norm, bias, activation or residual."""
    if not kernels.has_custom("Linear", dtype):
        return NO_KERNEL
    if kernels.target.provider == "cpu":
        return _CPU_LINEAR.get(dtype or "", NO_KERNEL)
    return _CUDA_PLAIN if plain else Choice(True)


def gated_linear(kernels: KernelTable, dtype: str | None) -> Choice:
    """Whether an `onnxfuse::GatedLinear` stays."""
    if not kernels.has_custom("GatedLinear", dtype):
        return NO_KERNEL
    if kernels.target.provider == "cpu":
        return _CPU_GATED.get(dtype or "", NO_KERNEL)
    return Choice(True)
