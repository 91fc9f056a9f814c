"""Sequences whose members are known."""

from __future__ import annotations

import pytest

from tests.graph.canonicalize.checking import canonical, ints, only, ops, text

NUMBERS = "int64 zero = {0}, int64 last = {-1}, int64 four = {4}, int64 five = {5}, int64[2] sizes = {3, 5}"


@pytest.mark.parametrize(
    ("split", "opset", "sizes"),
    [("four", 18, [4, 4]), ("five", 18, [5, 3]), ("sizes", 18, [3, 5]), ("four", 11, [4, 4])],
)
def test_a_split_whose_parts_are_taken(split: str, opset: int, sizes: list[int]) -> None:
    body = f"""s = SplitToSequence <axis=-1> (x, {split}) a = SequenceAt (s, zero) b = SequenceAt (s, last)
      p = Relu (a) q = Neg (b) y = Concat <axis=-1> (p, q)"""
    model, counts = canonical(text(body, "float[B,S,8] x", "float[B,S,8] y", NUMBERS, opset=opset))
    assert sorted(ops(model)) == ["Concat", "Neg", "Relu", "Split"]
    assert counts["sequences"] == 3
    node = only(model, "Split")
    assert (node.attrs.get("split") or ints(node, 1)) == sizes


@pytest.mark.parametrize(
    ("body", "inputs"),
    [
        ("s = SplitToSequence <axis=-1> (x, four) y = SequenceAt (s, i)", "float[B,S,8] x, int64 i"),
        ("s = SplitToSequence <axis=1> (x, four) y = SequenceAt (s, zero)", "float[B,S,8] x"),
    ],
    ids=["some-part", "unknown-size"],
)
def test_what_stays(body: str, inputs: str) -> None:
    model, _ = canonical(text(body, inputs, "float[?,?,?] y", NUMBERS), sizes=((1, 1),))
    assert "SplitToSequence" in ops(model)


def test_members_of_a_list() -> None:
    body = "a = Relu (x) b = Neg (x) s = SequenceConstruct (a, b) c = SequenceAt (s, last) y = Exp (c)"
    model, _ = canonical(text(body, "float[B,S,8] x", "float[B,S,8] y", NUMBERS))
    assert ops(model) == ["Neg", "Exp"]


@pytest.mark.parametrize(
    ("attributes", "shape", "opset"),
    [("axis=1", "B,D,8", 18), ("axis=0, new_axis=1", "2,B,S,8", 18), ("axis=-1, new_axis=1", "B,S,8,2", 18),
     ("axis=1, new_axis=1", "B,2,S,8", 11)],
)  # fmt: skip
def test_a_list_that_is_joined(attributes: str, shape: str, opset: int) -> None:
    body = f"a = Relu (x) b = Neg (x) s = SequenceConstruct (a, b) y = ConcatFromSequence <{attributes}> (s)"
    model, _ = canonical(text(body, "float[B,S,8] x", f"float[{shape}] y", NUMBERS, opset=opset))
    assert "ConcatFromSequence" not in ops(model)
    assert "Concat" in ops(model)
