"""Gives every lifted and fused op to the best kernel that the target really has."""

from __future__ import annotations

from onnxfuse.lower.lower import lower
from onnxfuse.lower.report import LoweringReport

__all__ = ["LoweringReport", "lower"]
