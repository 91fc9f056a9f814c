"""What changed between two models, in blocks and ops, not in names."""

from onnxfuse.diff.model import ModelDiff, diff_models
from onnxfuse.diff.regions import Region

__all__ = ["ModelDiff", "Region", "diff_models"]
