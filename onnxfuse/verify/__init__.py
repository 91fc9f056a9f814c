"""Is the fused model right? Comparison with an oracle, search for the fusion that is not."""

from onnxfuse.verify.check import Verdict, Verifier

__all__ = ["Verdict", "Verifier"]
