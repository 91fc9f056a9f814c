"""Symbolic integers: what is known about a dimension, or an element of a shape tensor, before the model runs.

A `Dim` is a polynomial with integer coefficients over *atoms*. An atom is a named size (`batch`), or an operation that
a polynomial cannot express (`min(a, b)`, `a // b`, …) on other symbolic integers. Every operation brings its result to
one canonical form, so two computations of the same number compare equal (and hash alike); what is constant is a plain
``int``. Nothing is ever claimed that could be false for some sizes: a named size is any integer ≥ 0.
"""

from onnxfuse.graph.dims.declared import parse
from onnxfuse.graph.dims.evaluation import evaluate
from onnxfuse.graph.dims.operations import (
    broadcast,
    equal,
    equal_if_broadcast,
    less,
    maximum,
    minimum,
    negate,
    parts_of_broadcast,
    same_when_added,
    select,
)
from onnxfuse.graph.dims.polynomial import (
    Dim,
    SymInt,
    bounds,
    divide_exactly,
    floor_divide,
    is_nonnegative,
    is_positive,
    modulo,
    product,
    symbol,
    truncate_divide,
    unknown_integer,
)

__all__ = [
    "Dim",
    "SymInt",
    "bounds",
    "broadcast",
    "divide_exactly",
    "equal",
    "equal_if_broadcast",
    "evaluate",
    "floor_divide",
    "is_nonnegative",
    "is_positive",
    "less",
    "maximum",
    "minimum",
    "modulo",
    "negate",
    "parse",
    "parts_of_broadcast",
    "product",
    "same_when_added",
    "select",
    "symbol",
    "truncate_divide",
    "unknown_integer",
]
