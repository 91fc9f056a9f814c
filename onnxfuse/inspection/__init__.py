"""What a model is, statically: sizes, parameters, operations, bytes, activation memory."""

from onnxfuse.inspection.model import Inspection, OpRow, Parameters, inspect_model
from onnxfuse.inspection.sizes import bind, default_size

__all__ = ["Inspection", "OpRow", "Parameters", "bind", "default_size", "inspect_model"]
