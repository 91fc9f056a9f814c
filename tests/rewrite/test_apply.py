"""What a rewrite makes, and what it refuses to make."""

from __future__ import annotations

import numpy as np
import pytest

from onnxfuse.graph import consts
from onnxfuse.graph import model as models
from onnxfuse.match.trace import Kind
from onnxfuse.ruletest import numeric

BIAS = """
inputs:
  b: {dtype: T, shape: [1..., N], const: true}
nodes:
  lin: {op: Linear, domain: onnxfuse, in: [_, _, absent, ...], attrs: {activation: none}, dtype: T, shape: [..., N]}
  y: {op: Add, in: [lin, b], same_shape: lin}
outputs: [y]
rewrite:
  weights:
    flat: {fn: flatten, of: [b]}
  nodes:
    - {extend: lin, inputs: {bias: flat}, out: [y]}
"""
PACK = """
inputs:
  x: {dtype: T, shape: [..., K]}
  w: {dtype: T, shape: [N, K], const: true}
  b: {dtype: T, const: true}
nodes:
  y: {op: Linear, domain: onnxfuse, in: [x, w, b?, absent, ...], attrs: {layout: NK, norm: $norm, activation: $act}}
outputs: [y]
siblings: {share: [x, $norm, $act], min: 2}
rewrite:
  weights:
    packed: {fn: concat, of: [w*], axis: 0}
    bias: {fn: concat, of: [b*], axis: 0, missing: N}
  nodes:
    - {op: Linear, domain: onnxfuse, in: [x, packed, bias], attrs: {norm: $norm, activation: $act}, out: [all]}
    - {op: Split, in: [all], attrs: {axis: -1, split: ["N*"]}, out: [y*]}
"""
QKV = "q = onnxfuse.Linear (x, wq)\nk = onnxfuse.Linear (x, wk{})\nv = onnxfuse.Linear (x, wv)"
WEIGHTS = "float[6,8] wq, float[4,8] wk, float[2,8] wv, float[4] bk"


def check_outputs(tried, feeds: dict[str, np.ndarray], original) -> None:
    rewritten = tried.model.to_proto()
    models.load(rewritten)  # the checker's opinion
    for have, want in zip(numeric.run(rewritten, feeds), numeric.run(original, feeds), strict=True):
        np.testing.assert_allclose(have, want, rtol=1e-5, atol=1e-6)


def test_extend_copies_the_node_with_named_inputs_replaced(attempt) -> None:
    nodes = 'h = onnxfuse.Linear <norm="rms", epsilon=1e-3> (x, w, , r)\ny = Add (b, h)'
    tried = attempt(
        BIAS.replace("absent, ...", "absent, _, ..."),
        nodes,
        inputs="float[B,S,8] x, float[B,S,4] r",
        weights="float[4,8] w, float[4] b",
    )
    (node,) = tried.model.graph.nodes
    assert [v.name for v in node.inputs] == ["x", "w", "b", "r"]
    assert node.attrs["norm"] == "rms" and node.attrs["epsilon"] == pytest.approx(1e-3)
    assert node.origin == "first" and node.outputs[0].name == "y" and node.outputs[0] is tried.model.graph.outputs[0]


def test_a_flattened_bias_is_a_new_constant_and_the_old_one_goes(attempt) -> None:
    tried = attempt(BIAS, "h = onnxfuse.Linear (x, w)\ny = Add (h, b)", weights="float[4,8] w, float[1,1,4] b")
    bias = tried.model.graph.nodes[0].inputs[2]
    assert consts.shape_of(bias) == (4,) and bias.name == "b_flat"
    assert {t.name for t in tried.model.to_proto().graph.initializer} == {"w", "b_flat"}


def test_new_names_are_free(attempt) -> None:
    nodes = "h = onnxfuse.Linear (x, w)\nb_flat = Add (h, b)\ng = onnxfuse.Linear (b_flat, v)\ny = Add (g, b)"
    tried = attempt(BIAS, nodes, weights="float[8,8] w, float[8,8] v, float[1,1,8] b")
    proto = tried.model.to_proto()
    models.load(proto)
    names = [t.name for t in proto.graph.initializer] + [name for node in proto.graph.node for name in node.output]
    assert tried.count == 2 and len(set(names)) == len(names) and "b_flat_1" in names


def test_an_attribute_equal_to_the_default_is_left_out(attempt) -> None:
    rule = BIAS.replace("out: [y]}", "attrs: {activation: none, norm: none}, out: [y]}")
    tried = attempt(rule, "h = onnxfuse.Linear (x, w)\ny = Add (h, b)", weights="float[4,8] w, float[4] b")
    assert tried.model.graph.nodes[0].attrs == {}


# -- siblings ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", ["", ", bk"])
@pytest.mark.parametrize("opset", [11, 13, 18])
def test_siblings_become_one_product_and_a_split(attempt, bias: str, opset: int) -> None:
    from onnxfuse.ruletest.cases import parse_graph

    nodes = QKV.format(bias)
    tried = attempt(PACK, nodes, outputs="q, k, v", weights=WEIGHTS, opset=opset)
    assert tried.ops == ["Linear", "Split"] and tried.count == 1
    linear, split = tried.model.graph.nodes
    assert len(linear.inputs) == (3 if bias else 2) and [v.name for v in split.outputs] == ["q", "k", "v"]
    assert [v.shape[-1] for v in split.outputs] == [6, 4, 2]
    assert ("split" in split.attrs) == (opset < 13)
    text = f"g (float[B,S,8] x) => (q, k, v) <{WEIGHTS}> {{ {nodes} }}"
    check_outputs(
        tried, {"x": np.random.default_rng(0).normal(size=(2, 3, 8)).astype(np.float32)}, parse_graph(text, opset)
    )


def test_siblings_share_what_the_rule_says(attempt) -> None:
    nodes = QKV.format("").replace("Linear (x, wk", 'Linear <activation="relu"> (x, wk')
    tried = attempt(PACK, nodes, outputs="q, k, v", weights=WEIGHTS)
    assert [v.name for v in tried.model.graph.nodes[1].outputs] == ["q", "v"] or sorted(tried.ops) == [
        "Linear",
        "Linear",
        "Split",
    ]
    other = attempt(
        PACK,
        QKV.format("").replace("Linear (x, wk", "Linear (z, wk"),
        inputs="float[B,S,8] x, float[B,S,8] z",
        outputs="q, k, v",
        weights=WEIGHTS,
    )
    split = next(n for n in other.model.graph.nodes if n.op == "Split")
    assert [v.name for v in split.outputs] == ["q", "v"]


def test_a_single_member_is_no_group(attempt) -> None:
    tried = attempt(PACK, "q = onnxfuse.Linear (x, wq)", outputs="q", weights=WEIGHTS)
    assert tried.count == 0 and (tried.failure.id, tried.failure.kind) == ("siblings", Kind.GROUP_SIZE)


def test_the_reader_of_one_member_may_come_before_another_member(attempt) -> None:
    nodes = "q = onnxfuse.Linear (x, wq)\nr = Relu (q)\nk = onnxfuse.Linear (x, wk)"
    tried = attempt(PACK, nodes, outputs="r, k", weights=WEIGHTS)
    assert tried.ops == ["Linear", "Split", "Relu"]


def test_members_that_depend_on_each_other_are_refused(attempt) -> None:
    rule = """
inputs:
  x: {}
  r: {}
nodes:
  y: {op: Sub, in: [x, r]}
outputs: [y]
siblings: {share: [x], min: 2}
rewrite:
  nodes:
    - {op: Concat, in: [r*], attrs: {axis: 0}, out: [all]}
    - {op: Split, in: [all], attrs: {axis: 0}, out: [y*]}
"""
    nodes = "a = Sub (x, two)\nb = Relu (a)\nc = Sub (x, b)"
    tried = attempt(rule, nodes, outputs="c, a", inputs="float[4] x")
    assert tried.count == 0 and tried.failure.kind is Kind.CYCLE
    assert tried.ops == ["Sub", "Relu", "Sub"]


# -- what is refused ---------------------------------------------------------------------------------------------------

SCALE = """
inputs:
  x: {dtype: T, shape: [..., K]}
  s: {dtype: T, shape: [K], const: true}
  w: {dtype: T, shape: [N, K], const: true}
nodes:
  m: {op: Mul, in: [x, s]}
  y: {op: Linear, domain: onnxfuse, in: [m, w]}
outputs: [y]
rewrite:
  weights:
    folded: {fn: scale_rows, of: [w, s], layout: NK}
  nodes:
    - {extend: y, inputs: {x: x, weight: folded}, out: [y]}
"""


@pytest.mark.parametrize(("rows", "refused"), [(2048, True), (16, False)])
def test_a_big_weight_with_other_readers_is_not_stored_twice(attempt, rows: int, refused: bool) -> None:
    nodes = "e = Gather (w, ids)\nm = Mul (x, s)\ny = onnxfuse.Linear (m, w)"
    tried = attempt(
        SCALE, nodes, inputs="float[B,S,8] x, int64[B] ids", outputs="y, e", weights=f"float[{rows},8] w, float[8] s"
    )
    assert tried.count == int(not refused)
    if refused:
        assert (tried.failure.id, tried.failure.kind) == ("rewrite.weights.folded", Kind.WEIGHT_SHARED)
        assert tried.report.refused[0].failure.found == "Gather `e`"
        assert tried.ops == ["Gather", "Mul", "Linear"]
    alone = attempt(SCALE, nodes.split("\n", 1)[1], weights=f"float[{rows},8] w, float[8] s")
    assert alone.ops == ["Linear"]


def test_an_output_of_another_shape_is_refused_and_leaves_no_trace(attempt) -> None:
    rule = """
inputs: {x: {}}
nodes:
  y: {op: ReduceMean, in: [x, ...], attrs: {axes: [-1]}}
outputs: [y]
rewrite:
  node: {op: ReduceMean, in: [x], attrs: {axes: [-1], keepdims: 1}, out: [y]}
"""
    tried = attempt(rule, "y = ReduceMean <axes=[-1], keepdims=0> (x)")
    assert tried.count == 0 and (tried.failure.id, tried.failure.kind) == ("rewrite.outputs.y", Kind.OUTPUT_TYPE)
    assert tried.ops == ["ReduceMean"] and len(tried.model.graph.inputs[0].outputs) == 1


def test_operands_that_an_op_refuses_are_a_failure_of_the_match(attempt) -> None:
    rule = """
inputs: {x: {}, w: {}}
nodes:
  y: {op: MatMul, in: [x, w]}
outputs: [y]
rewrite:
  node: {op: Linear, domain: onnxfuse, in: [x, w], out: [y]}
"""
    tried = attempt(rule, "y = MatMul (x, w)", weights="float[8,5] w")  # Linear reads [N, K] unless told otherwise
    assert tried.failure.kind is Kind.OUTPUT_TYPE and "layout NK" in tried.failure.found


def test_an_alias_makes_the_output_another_value(attempt) -> None:
    nodes = "nodes:\n  n: {op: Neg, in: [x]}\n  y: {op: Neg, in: [n]}\n"
    rule = f"inputs: {{x: {{}}}}\n{nodes}outputs: [y]\nrewrite: {{alias: {{y: x}}}}\n"
    tried = attempt(rule, "a = Relu (x)\nn = Neg (a)\ny = Neg (n)")
    assert tried.ops == ["Relu"] and tried.model.graph.outputs[0].name == "y"
    between_interfaces = attempt(rule, "n = Neg (x)\ny = Neg (n)")
    assert between_interfaces.ops == ["Identity"]
    inside = attempt(rule, "n = Neg (x)\nm = Neg (n)\ny = Relu (m)")
    assert inside.ops == ["Relu"] and inside.model.graph.nodes[0].inputs[0].name == "x"


def test_a_new_domain_is_imported(attempt) -> None:
    rule = """
inputs: {x: {}}
nodes:
  y: {op: Relu, in: [x]}
outputs: [y]
rewrite:
  node: {op: Gelu, domain: ms, in: [x], out: [y]}
"""
    tried = attempt(rule, "y = Relu (x)")
    tried.model.opsets.pop("com.microsoft", None)
    assert {o.domain for o in tried.model.to_proto().opset_import} >= {"", "com.microsoft"}
