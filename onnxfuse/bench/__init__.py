"""Measure models against each other: correctness first, then interleaved, warmed runs."""

from onnxfuse.bench.case import CaseResult, Subject, SubjectResult, run_case
from onnxfuse.bench.machine import describe_machine

__all__ = ["CaseResult", "Subject", "SubjectResult", "describe_machine", "run_case"]
