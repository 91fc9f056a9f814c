"""The rule language: format, loading, compiling and linting. No graph is touched here."""

from onnxfuse.rules.load import RuleSet, load

__all__ = ["RuleSet", "load"]
