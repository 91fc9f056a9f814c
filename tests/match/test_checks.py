"""Predicates, limits, targets, and which failure is reported."""

from __future__ import annotations

import pytest

from onnxfuse.errors import UsageError
from onnxfuse.match.scope import Target
from onnxfuse.match.trace import MEANING, Kind, Phase


def rule(inputs: str, extra: str = "", node: str = "y: {op: MatMul, in: [x, w]}") -> str:
    return f"""
inputs:
  {inputs}
nodes:
  {node}
outputs: [y]
{extra}
rewrite:
  node: {{op: Linear, domain: onnxfuse, in: [x, w], attrs: {{layout: KN}}, out: [y]}}
"""


WEIGHTS = "float[8,16] w"


@pytest.mark.parametrize(
    ("inputs", "failure", "kind"),
    [
        ("x: {shape: [..., K]}\n  w: {shape: [K, N]}", None, None),
        ("x: {shape: [B, S, 8]}\n  w: {shape: [8, _]}", None, None),
        ("x: {shape: [B, S, 9]}\n  w: {}", "inputs.x.shape", Kind.SHAPE),
        ("x: {shape: [K]}\n  w: {}", "inputs.x.shape", Kind.SHAPE),
        ("x: {shape: [..., K]}\n  w: {shape: [N, K]}", "dims.K", Kind.DIM_CONFLICT),
        ("x: {shape: [S, S, K]}\n  w: {}", "dims.S", Kind.DIM_CONFLICT),
        ("x: {shape: [1..., S, K]}\n  w: {}", "inputs.x.shape", Kind.SHAPE),
        ("x: {rank: 3}\n  w: {rank: 2}", None, None),
        ("x: {rank: '>=3'}\n  w: {rank: '1..2'}", None, None),
        ("x: {rank: '<3'}\n  w: {}", "inputs.x.rank", Kind.RANK),
        ("x: {dtype: T}\n  w: {dtype: T}", None, None),
        ("x: {dtype: [float16, float32]}\n  w: {}", None, None),
        ("x: {dtype: float16}\n  w: {}", "inputs.x.dtype", Kind.DTYPE),
        ("x: {}\n  w: {const: true}", None, None),
        ("x: {const: true}\n  w: {}", "inputs.x.const", Kind.NOT_CONST),
        ("x: {}\n  w: {const: false}", "inputs.w.const", Kind.NOT_CONST),
        ("x: {same_shape: w}\n  w: {}", "inputs.x.same_shape", Kind.SHAPE),
        ("x: {broadcastable: w}\n  w: {}", "inputs.x.broadcastable", Kind.SHAPE),
    ],
)
def test_predicates(attempt, inputs: str, failure: str | None, kind: Kind | None) -> None:
    tried = attempt(rule(inputs), "y = MatMul (x, w)", weights=WEIGHTS)
    if failure is None:
        assert tried.count == 1
    else:
        assert tried.count == 0 and (tried.failure.id, tried.failure.kind) == (failure, kind)


def test_a_conflict_names_both_sources(attempt) -> None:
    tried = attempt(rule("x: {shape: [..., K]}\n  w: {shape: [N, K]}"), "y = MatMul (x, w)", weights=WEIGHTS)
    assert tried.failure.expected == "K = 8 (from `x`)" and tried.failure.found == "16 (from `w`)"


def test_what_is_unknown_fails(attempt) -> None:
    tried = attempt(
        rule("x: {shape: [..., K]}\n  w: {}"), "z = com.microsoft.Mystery (x)\ny = MatMul (z, w)", weights=WEIGHTS
    )
    assert tried.failure.kind is Kind.UNKNOWN_TYPE and tried.failure.id == "inputs.x.shape"


@pytest.mark.parametrize(
    ("extra", "failure"),
    [
        ("dims: {K: {multiple_of: 4}, N: {min: 16, max: 16}}", None),
        ("dims: {K: {multiple_of: 3}}", "dims.K.multiple_of"),
        ("dims: {N: {min: 17}}", "dims.N.min"),
        ("dims: {N: {max: 15}}", "dims.N.max"),
        ("dims: {B: {multiple_of: 2}}", "dims.B.multiple_of"),
    ],
)
def test_limits_of_dims(attempt, extra: str, failure: str | None) -> None:
    tried = attempt(rule("x: {shape: [B, _, K]}\n  w: {shape: [K, N]}", extra), "y = MatMul (x, w)", weights=WEIGHTS)
    assert tried.count == (failure is None)
    if failure:
        assert (tried.failure.id, tried.failure.kind, tried.failure.phase) == (
            failure,
            Kind.DIM_LIMIT,
            Phase.PREDICATES,
        )


def test_limits_of_symbolic_dims(attempt) -> None:
    limited = rule("x: {shape: [M, K]}\n  w: {}", "dims: {M: {multiple_of: 2}}")
    nodes = "z = Reshape (x, s)\ny = MatMul (z, w)"
    tried = attempt(limited, nodes, inputs="float[B,2,8] x", weights=WEIGHTS + ", int64[2] s = {-1, 8}")
    assert tried.count == 1  # 2 * B is even
    tried = attempt(limited, nodes, inputs="float[B,3,8] x", weights=WEIGHTS + ", int64[2] s = {-1, 8}")
    assert tried.failure.id == "dims.M.multiple_of"


@pytest.mark.parametrize(
    ("limit", "failure"),
    [
        ("range: [0, 0.1]", None),
        ("range: [0, 0.001]", "captures.e.range"),
        ("one_of: [0.01, 0.02]", None),
        ("one_of: [1]", "captures.e.one_of"),
    ],
)
def test_limits_of_captures(attempt, limit: str, failure: str | None) -> None:
    body = f"""
inputs: {{x: {{}}}}
captures: {{e: {{{limit}}}}}
nodes:
  y: {{op: Add, in: [x, $e]}}
outputs: [y]
rewrite: {{alias: {{y: x}}}}
"""
    tried = attempt(body, "y = Add (x, e)", weights="float e = {0.01}")
    assert tried.count == (failure is None)
    if failure:
        assert (tried.failure.id, tried.failure.kind) == (failure, Kind.CAPTURE)


@pytest.mark.parametrize(
    ("target", "failure"),
    [("cuda:sm90", None), ("cuda", None), ("cuda:sm75", "targets.cuda.sm"), ("cpu", "targets.cpu")],
)
def test_targets(attempt, target: str, failure: str | None) -> None:
    limited = rule("x: {dtype: T}\n  w: {}", "targets: {cuda: {sm: '>=80', T: [float32]}}")
    tried = attempt(limited, "y = MatMul (x, w)", weights=WEIGHTS, target=target)
    assert tried.count == (failure is None)
    if failure:
        assert tried.failure.id == failure and tried.failure.phase is Phase.GATE
    half = attempt(limited, "y = MatMul (x, w)", inputs="float16[2,8] x", weights="float16[8,16] w", target="cuda")
    assert half.failure.id == "targets.cuda.T"


@pytest.mark.parametrize(
    ("condition", "opset", "open_"), [(">=18", 17, False), (">=13,<18", 17, True), ("17", 17, True), ("<17", 17, False)]
)
def test_opset_gate(attempt, condition: str, opset: int, open_: bool) -> None:
    tried = attempt(rule("x: {}\n  w: {}", f"opset: '{condition}'"), "y = MatMul (x, w)", weights=WEIGHTS, opset=opset)
    assert tried.count == int(open_)
    if not open_:
        assert tried.failure.kind is Kind.OPSET


def test_where_functions_refuse_or_give_captures(attempt) -> None:
    body = """
inputs: {x: {shape: [..., K]}}
nodes:
  s: {op: ReduceSum, in: [x, ...], attrs: {axes: [-1], keepdims: 1}}
  y: {op: Mul, in: [s, $factor]}
outputs: [y]
where:
  - {fn: reciprocal_of_dim, of: [$factor, K]}
rewrite:
  node: {op: ReduceMean, in: [x], attrs: {axes: [-1]}, out: [y]}
"""
    nodes = "s = ReduceSum (x, last)\ny = Mul (s, f)"
    weights = "int64[1] last = {{-1}}, float f = {{{}}}"
    tried = attempt(body, nodes, weights=weights.format(0.125))
    assert tried.ops == ["ReduceMean"]
    tried = attempt(body, nodes, weights=weights.format(0.25))
    assert (tried.failure.id, tried.failure.kind, tried.failure.phase) == ("where[0]", Kind.PREDICATE, Phase.RELATIONS)
    assert (tried.failure.expected, tried.failure.found) == (0.125, 0.25)


def test_the_failure_that_got_furthest_is_reported(attempt) -> None:
    body = """
inputs: {x: {}}
nodes:
  y:
    any_of:
      - {op: Relu, in: [a]}
      - {op: Relu, in: [c]}
      - {op: Tanh, in: [a]}
  a: {op: Exp, in: [b]}
  b: {op: Neg, in: [x]}
  c: {op: Abs, in: [x]}
outputs: [y]
rewrite: {alias: {y: x}}
"""
    tried = attempt(body, "b = Sin (x)\na = Exp (b)\ny = Relu (a)")
    assert tried.failure.id == "nodes.b.op" and tried.failure.passed == 2
    assert tried.tracer.near_misses() == [] or tried.tracer.near_misses()[0].failure is tried.failure
    attempts = list(tried.tracer.attempts.values())
    assert attempts[0].bound["a"].name == "a"


def test_ties_are_kept_in_the_order_of_the_file(attempt) -> None:
    body = """
inputs: {x: {}}
nodes:
  y:
    any_of:
      - {op: Relu, in: [a]}
      - {op: Relu, in: [b]}
  a: {op: Exp, in: [x]}
  b: {op: Neg, in: [x]}
outputs: [y]
rewrite: {alias: {y: x}}
"""
    tried = attempt(body, "s = Sin (x)\ny = Relu (s)")
    found = next(iter(tried.tracer.attempts.values()))
    assert [found.failure.id, *(f.id for f in found.ties)] == ["nodes.a.op", "nodes.b.op"]


def test_every_kind_of_failure_is_explained() -> None:
    assert set(MEANING) == set(Kind)


def test_targets_are_parsed() -> None:
    assert Target.parse("cuda:sm90") == Target("cuda", 90) and str(Target("cuda", 90)) == "cuda:sm90"
    assert str(Target.parse("cpu")) == "cpu"
    for text in ("gpu", "cuda:90", "cuda:smx", "cuda:", "cuda:sm9", "cuda:sm090", "cpu:sm90"):
        with pytest.raises(UsageError, match="unknown target"):
            Target.parse(text)
