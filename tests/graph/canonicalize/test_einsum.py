"""Einsum as Transpose, MatMul and Mul."""

from __future__ import annotations

import pytest

from onnxfuse.graph.canonicalize import canonicalize
from tests.graph.canonicalize.checking import canonical, ops, text
from tests.graph.soundness import load_text

SIZES = {"b": "B", "t": "S", "s": "S", "q": "S", "k": "S", "h": 3, "g": 2, "d": 4, "e": 5, "m": 6, "n": 7, "f": 8}


def shape(letters: str) -> str:
    return ",".join(str(SIZES[c]) for c in letters)


def einsum(equation: str) -> str:
    """`y` is Relu of the Einsum, so that no graph output is in the way."""
    left, result = equation.split("->")
    terms = left.split(",")
    inputs = ", ".join(f"float[{shape(term)}] x{i}" for i, term in enumerate(terms))
    operands = ", ".join(f"x{i}" for i in range(len(terms)))
    body = f'e = Einsum <equation="{equation}"> ({operands}) y = Relu (e)'
    return text(body, inputs, f"float[{shape(result)}] y")


@pytest.mark.parametrize(
    ("equation", "wanted"),
    [
        ("bhqd,bhkd->bhqk", ["Transpose", "MatMul", "Relu"]),
        ("bhqk,bhkd->bhqd", ["MatMul", "Relu"]),
        ("bqhd,bkhd->bhqk", ["Transpose", "Transpose", "MatMul", "Relu"]),
        ("bhqk,bkhd->bqhd", ["Transpose", "MatMul", "Transpose", "Relu"]),
        ("bqhgd,bkhd->bhgqk", ["Transpose", "Transpose", "Unsqueeze", "MatMul", "Relu"]),
        ("bhgqk,bkhd->bqhgd", ["Transpose", "Unsqueeze", "MatMul", "Transpose", "Relu"]),
        ("bqd,dn->bqn", ["MatMul", "Relu"]),
        ("bqd,nd->bqn", ["Transpose", "MatMul", "Relu"]),
        ("bqd,dhe->bqhe", ["Reshape", "MatMul", "Reshape", "Relu"]),
        ("bqd,dhe->bhqe", ["Reshape", "MatMul", "Reshape", "Transpose", "Relu"]),
        ("bqhd,hdm->bqm", ["Reshape", "Reshape", "MatMul", "Relu"]),
        ("bqhd,dhm->bqm", ["Reshape", "Transpose", "Reshape", "MatMul", "Relu"]),
        ("bd,bd->b", ["Unsqueeze", "Unsqueeze", "MatMul", "Squeeze", "Relu"]),
        ("d,bqd->bq", ["Transpose", "Unsqueeze", "MatMul", "Squeeze", "Relu"]),
        ("bqd,bq->bd", ["Transpose", "Unsqueeze", "MatMul", "Squeeze", "Relu"]),
        ("bq,d->bqd", ["Unsqueeze", "Mul", "Relu"]),
        ("bqd,d->bqd", ["Mul", "Relu"]),
        ("qd,bq->dbq", ["Transpose", "Unsqueeze", "Mul", "Relu"]),
        ("bqhd->bhqd", ["Transpose", "Relu"]),
        ("bqhd->bqhd", ["Relu"]),
    ],
)  # fmt: skip
def test_what_rules_know(equation: str, wanted: list[str]) -> None:
    model, counts = canonical(einsum(equation), exact=False)
    assert sorted(ops(model)) == sorted(wanted) and counts["einsum"]


@pytest.mark.parametrize(
    ("left", "right", "equation", "result"),
    [
        ("bhqd", "hde", "...d,...de->...e", "bhqe"),
        ("bqd", "de", "...d,de", "bqe"),
        ("bqd", "bqd", "...,...->...", "bqd"),
    ],
)
def test_dots_and_no_arrow(left: str, right: str, equation: str, result: str) -> None:
    source = einsum(f"{left},{right}->{result}").replace(f'"{left},{right}->{result}"', f'"{equation}"')
    if equation == "...d,...de->...e":  # rows stand between
        source = (
            source.replace(f"float[{shape('hde')}]", f"float[{shape('bhde')}]")
            .replace(f"float[{shape('bhqd')}]", f"float[{shape('bhd')}]")
            .replace(f"float[{shape('bhqe')}]", f"float[{shape('bhe')}]")
        )
    _, counts = canonical(source, exact=False)
    assert counts["einsum"]


@pytest.mark.parametrize("equation", ["bqq->bq", "bq,qd,dn->bn", "bqd->bq", "bqhd,khd->bqk"])
def test_what_stays(equation: str) -> None:
    """Diagonals, sums over one operand, three operands; `hd` summed is no single axis unless its sizes are known."""
    source = einsum(equation).replace("[S,3,4]", "[S,N,4]").replace("[B,S,3,4]", "[B,S,N,4]")
    if "N" in source:
        model = load_text(source)
        canonicalize(model)
        assert "Einsum" in ops(model)
    else:
        model, _ = canonical(source, exact=False)
        assert "Einsum" in ops(model)


def test_a_sum_whose_sizes_may_differ_stays() -> None:
    """Einsum may repeat an operand of size 1 there, MatMul does not."""
    model = load_text(einsum("bqd,dn->bqn").replace("float[4,7] x1", "float[D,7] x1"))
    canonicalize(model)
    assert "Einsum" in ops(model)
