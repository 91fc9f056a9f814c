"""A self-contained HTML page on what happened to a model."""

from onnxfuse.html_report.layers import Group, Step, layers
from onnxfuse.html_report.page import Content, render

__all__ = ["Content", "Group", "Step", "layers", "render"]
