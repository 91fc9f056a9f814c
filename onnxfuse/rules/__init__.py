"""The rule language: format, loading, compiling and linting. No graph is touched here."""

from onnxfuse.rules.loading import RuleSet, load

__all__ = ["RuleSet", "load"]
