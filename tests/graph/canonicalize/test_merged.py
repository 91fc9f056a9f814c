"""Batch and heads merged for torch.bmm, and sequence-first heads of nn.MultiheadAttention, on four dimensions again."""

from __future__ import annotations

import pytest

from tests.graph.canonicalize.checking import canonical, ops, text

#: Merges batch and heads of queries, keys and values, for batches of any size.
MERGE = """bs = Shape <start=0, end=1> (q) ss = Shape <start=2, end=3> (q) n = Mul (bs, four)
  t = Concat <axis=0> (n, ss, eight) q3 = Reshape (q, t) k3 = Reshape (k, t) v3 = Reshape (v, t)
  kt = Transpose <perm=[0,2,1]> (k3) """
FINISH = """p = Softmax <axis=-1> (a) o = MatMul (p, v3) u = Concat <axis=0> (bs, four, ss, eight) y = Reshape (o, u)"""
CONSTANTS = "int64[1] four = {4}, int64[1] eight = {8}, int64[1] one = {1}, float f = {0.25}"


@pytest.mark.parametrize("batch", ["B", "1"])
@pytest.mark.parametrize(
    ("scores", "mask", "wanted"),
    [
        ("a = MatMul (q3, kt)", "", []),
        ("s = MatMul (q3, kt) a = Mul (s, f)", "", ["Mul"]),
        ("d = Div (q3, f) a = MatMul (d, kt)", "", ["Div"]),
        ("s = MatMul (q3, kt) a = Add (s, m)", ", float[S,S] m", ["Add"]),
        ("s = MatMul (q3, kt) a = Add (s, m)", ", float[1,S,S] m", ["Add"]),
        ("s = MatMul (q3, kt) a = Mul (f, s)", "", ["Mul"]),
        ("s = MatMul (q3, kt) a = Add (m, s)", ", float[S,S] m", ["Add"]),
        (
            "mt = Concat <axis=0> (n, one, ss) m3 = Reshape (m, mt) s = MatMul (q3, kt) a = Add (s, m3)",
            ", float[B,4,1,S] m",
            ["Add"],
        ),
        (
            "mt = Concat <axis=0> (n, one, ss) m3 = Reshape (m, mt) s = MatMul (q3, kt) a = Add (m3, s)",
            ", float[B,4,1,S] m",
            ["Add"],
        ),
    ],
)
def test_attention_with_batch_and_heads_in_one(scores: str, mask: str, wanted: list[str], batch: str) -> None:
    shape = f"float[{batch},4,S,8]"
    mask = mask.replace("B,", f"{batch},")
    model, _ = canonical(
        text(MERGE + scores + " " + FINISH, f"{shape} q, {shape} k, {shape} v{mask}", f"{shape} y", CONSTANTS),
        exact=False,
    )
    assert sorted(ops(model)) == sorted(["Transpose", "MatMul", *wanted, "Softmax", "MatMul"])


def test_a_batch_of_one_taken_off_before_the_mask() -> None:
    """Exports with batch 1 (DeBERTa) take it off the scores and put it back."""
    body = """kt = Transpose <perm=[0,1,3,2]> (k) s = MatMul (q, kt) d = Squeeze (s, zero) e = Div (d, f) a = Add (e, m)
      u = Unsqueeze (a, zero) p = Softmax <axis=-1> (u) y = MatMul (p, v)"""
    shape = "float[1,4,S,8]"
    source = text(
        body, f"{shape} q, {shape} k, {shape} v, float[4,S,S] m", f"{shape} y", "float f = {4}, int64[1] zero = {0}"
    )
    model, _ = canonical(source, exact=False)
    made = ops(model)
    assert "Squeeze" not in made and made.count("MatMul") == 2
    assert made[made.index("MatMul") + 1] == "Div"


def test_scores_that_are_an_output_stay_merged() -> None:
    shape = "float[B,4,S,8]"
    body = MERGE + "a = MatMul (q3, kt) " + FINISH
    outputs = f"{shape} y, float[?,S,S] a"
    model, _ = canonical(text(body, f"{shape} q, {shape} k, {shape} v", outputs, CONSTANTS), exact=False)
    assert model.graph.outputs[1].shape[0] != 4 and "Reshape" in ops(model)


def test_a_mask_for_more_than_the_scores_stays() -> None:
    """[1, 1, S, L] beside [B·H, S, L] would broadcast to four dimensions."""
    shape = "float[B,4,S,8]"
    body = MERGE + "s = MatMul (q3, kt) y = Add (s, m)"
    inputs = f"{shape} q, {shape} k, {shape} v, float[1,1,S,S] m"
    model, _ = canonical(text(body, inputs, "float[1,?,S,S] y", CONSTANTS))
    assert "Reshape" in ops(model)


@pytest.mark.parametrize("perm", ["1,0,2", "1,2,0"])
def test_sequence_first_heads(perm: str) -> None:
    body = f"""bs = Shape <start=1, end=2> (x) ss = Shape <start=0, end=1> (x) n = Mul (bs, four)
      t = Concat <axis=0> (ss, n, eight) h = Reshape (x, t) p = Transpose <perm=[{perm}]> (h)
      d = Mul (p, f) u = Concat <axis=0> (bs, four, {"ss, eight" if perm == "1,0,2" else "eight, ss"})
      y = Reshape (d, u)"""
    wanted = "float[B,4,S,8] y" if perm == "1,0,2" else "float[B,4,8,S] y"
    model, _ = canonical(text(body, "float[S,B,32] x", wanted, CONSTANTS))
    assert ops(model) == ["Reshape", "Transpose", "Mul"]


def test_the_way_back_to_sequence_first() -> None:
    body = """bs = Shape <start=0, end=1> (x) ss = Shape <start=2, end=3> (x) n = Mul (bs, four)
      t = Concat <axis=0> (n, ss, eight) h = Reshape (x, t) p = Transpose <perm=[1,0,2]> (h)
      u = Concat <axis=0> (ss, bs, width) y = Reshape (p, u)"""
    model, _ = canonical(text(body, "float[B,4,S,8] x", "float[S,B,32] y", CONSTANTS + ", int64[1] width = {32}"))
    assert ops(model) == ["Transpose", "Reshape"]
