"""Runs the inline cases of rules; used by `onnxfuse rules test` and by pytest."""

from onnxfuse.ruletest.cases import Case, cases
from onnxfuse.ruletest.run import Outcome, Result, RuleReport, run_case, run_rule

__all__ = ["Case", "Outcome", "Result", "RuleReport", "cases", "run_case", "run_rule"]
