"""Hold models to what they fused to before: counts, numbers, speed. For CI."""

from onnxfuse.regress.config import Config, Expectation, load
from onnxfuse.regress.run import Check, ModelResult, run_model

__all__ = ["Check", "Config", "Expectation", "ModelResult", "load", "run_model"]
