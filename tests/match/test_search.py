"""What a pattern matches, one small graph per behaviour."""

from __future__ import annotations

import itertools

import pytest

from onnxfuse.match.trace import Kind, Phase

DONE = """
outputs: [y]
rewrite:
  nodes:
    - {op: Identity, in: [x], out: [y]}
"""


def body(nodes: str, inputs: str = "x: {}", extra: str = "") -> str:
    return (
        f"inputs:\n  {inputs}\nnodes:\n" + "".join(f"  {line}\n" for line in nodes.strip().splitlines()) + DONE + extra
    )


# -- operands ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["x, two", "two, x"])
def test_commutative_ops_match_in_either_order(attempt, order: str) -> None:
    assert attempt(body("y: {op: Mul, in: [x, 2]}"), f"y = Mul ({order})").count == 1


@pytest.mark.parametrize(("op", "rule"), [("Div", "op: Div"), ("Mul", "ordered: true, op: Mul")])
def test_other_ops_and_ordered_nodes_do_not(attempt, op: str, rule: str) -> None:
    assert attempt(body(f"y: {{{rule}, in: [x, 2]}}"), f"y = {op} (x, two)").count == 1
    assert attempt(body(f"y: {{{rule}, in: [x, 2]}}"), f"y = {op} (two, x)").count == 0


@pytest.mark.parametrize("shape", ["", "[1]", "[1,1,1]"])
def test_a_number_is_a_constant_with_one_element_of_any_rank(attempt, shape: str) -> None:
    assert attempt(body("y: {op: Mul, in: [x, 2]}"), "y = Mul (x, two)", weights=f"float{shape} two = {{2}}").count == 1


def test_a_number_is_compared_as_the_stored_dtype_sees_it(attempt) -> None:
    # 0.7978845608 is 0.7978515625 (bits 14946) in float16 and 0.796875 (bits 16204) in bfloat16.
    rule = body("y: {op: Mul, in: [x, 0.7978845608]}")
    for dtype, bits in (("float16", 14946), ("bfloat16", 16204)):
        tried = attempt(rule, "y = Mul (x, c)", inputs=f"{dtype}[4] x", weights=f"{dtype} c = {{{bits}}}")
        assert tried.count == 1, dtype
        near = attempt(rule, "y = Mul (x, c)", inputs=f"{dtype}[4] x", weights=f"{dtype} c = {{{bits + 2}}}")
        assert near.count == 0 and near.failure.kind is Kind.CONST_VALUE
    assert attempt(rule, "y = Mul (x, c)", weights="float c = {0.7971}").count == 0


def test_a_list_is_a_constant_tensor(attempt) -> None:
    rule = body("y: {op: Tile, in: [x, [1, 2, 1]]}")
    assert attempt(rule, "y = Tile (x, r)", weights="int64[3] r = {1, 2, 1}").count == 1
    assert attempt(rule, "y = Tile (x, r)", weights="int64[3] r = {1, 1, 1}").failure.kind is Kind.CONST_VALUE


def test_captures_of_one_name_agree(attempt) -> None:
    rule = body("a: {op: Mul, in: [x, $k]}\ny: {op: Add, in: [a, $k]}")
    assert (
        attempt(rule, "a = Mul (x, two)\ny = Add (a, zwei)", weights="float two = {2}, float[1] zwei = {2}").count == 1
    )
    tried = attempt(rule, "a = Mul (x, two)\ny = Add (a, three)", weights="float two = {2}, float three = {3}")
    assert tried.count == 0 and tried.failure.id == "captures.k" and tried.failure.kind is Kind.CAPTURE


@pytest.mark.parametrize(("numbers", "matches"), [("4, 0.5", 1), ("0.5, 4", 1), ("4, 2", 0)])
def test_a_capture_that_a_function_replaced_is_back_for_the_next_try(attempt, numbers: str, matches: int) -> None:
    where = """
where:
  - {fn: positive_ratio, of: [$a, $b], set: {a: ratio}}
  - {fn: product_below, of: [$a, $b], with: {limit: 1}}
"""
    rule = body("y: {op: Add, in: [p, q]}\np: {op: Mul, in: [x, $a]}\nq: {op: Mul, in: [x, $b]}", extra=where)
    first, second = numbers.split(", ")
    weights = f"float m = {{{first}}}, float n = {{{second}}}"
    assert attempt(rule, "u = Mul (x, m) v = Mul (x, n) y = Add (u, v)", weights=weights).count == matches


def test_a_second_use_of_a_name_is_the_same_value(attempt) -> None:
    rule = body("s: {op: Sigmoid, in: [x]}\ny: {op: Mul, in: [x, s]}")
    assert attempt(rule, "s = Sigmoid (x)\ny = Mul (s, x)").count == 1
    tried = attempt(rule, "z = Relu (x)\ns = Sigmoid (z)\ny = Mul (x, s)")
    assert tried.count == 0 and tried.failure.kind is Kind.VALUE_CONFLICT and tried.failure.id == "values.x"


def test_two_pattern_nodes_are_two_graph_nodes(attempt) -> None:
    rule = body("a: {op: Relu, in: [x]}\nb: {op: Relu, in: [x]}\ny: {op: Add, in: [a, b]}")
    assert attempt(rule, "a = Relu (x)\nb = Relu (x)\ny = Add (a, b)").count == 1
    tried = attempt(rule, "a = Relu (x)\ny = Add (a, a)")
    assert tried.count == 0 and tried.failure.kind is Kind.VALUE_CONFLICT


@pytest.mark.parametrize(
    ("operands", "given", "matches"),
    [
        ("x, absent, 6", "x, , six", True),
        ("x, absent, 6", "x, zero, six", False),
        ("x, absent, absent", "x", True),
        ("x, _, 6", "x, zero, six", True),
        ("x, _, 6", "x, , six", True),
        ("x, ...", "x, zero, six", True),
        ("x", "x, zero", False),
        ("x, 0", "x", False),
        ("x, _, _", "x", True),
    ],
)
def test_omitted_and_further_operands(attempt, operands: str, given: str, matches: bool) -> None:
    rule = body(f"y: {{op: Clip, in: [{operands}]}}")
    tried = attempt(rule, f"y = Clip ({given})", weights="float zero = {0}, float six = {6}")
    assert tried.count == int(matches)
    if not matches:
        assert tried.failure.kind is Kind.ARITY


def test_an_optional_operand_is_bound_or_absent(attempt) -> None:
    rule = """
inputs:
  x: {}
  low: {}
nodes:
  z: {op: Clip, in: [x, low?]}
  y: {op: Relu, in: [z]}
outputs: [y]
rewrite:
  node: {op: Clip, in: [x, low], out: [y]}
"""
    assert [n.name for n in attempt(rule, "z = Clip (x, two)\ny = Relu (z)").model.graph.nodes[0].inputs] == [
        "x",
        "two",
    ]
    assert [n.name for n in attempt(rule, "z = Clip (x)\ny = Relu (z)").model.graph.nodes[0].inputs] == ["x"]


# -- chains ------------------------------------------------------------------------------------------------------------


def spellings() -> list[str]:
    found = []
    for a, b, c in itertools.permutations(["x", "half", "s"]):
        found += [f"p = Mul ({a}, {b})\ny = Mul (p, {c})", f"p = Mul ({a}, {b})\ny = Mul ({c}, p)"]
    return found


@pytest.mark.parametrize("text", spellings())
def test_a_chain_matches_any_order_and_association(attempt, text: str) -> None:
    rule = body("s: {op: Sigmoid, in: [x]}\ny: {chain: Mul, of: [x, 0.5, s]}")
    assert attempt(rule, f"s = Sigmoid (x)\n{text}", weights="float half = {0.5}").count == 1


def test_a_chain_may_use_a_value_twice(attempt) -> None:
    rule = body("y: {chain: Mul, of: [x, x, x]}")
    assert attempt(rule, "p = Mul (x, x)\ny = Mul (x, p)").count == 1
    assert attempt(rule, "p = Mul (x, x)\nq = Relu (x)\ny = Mul (q, p)").count == 0


def test_the_inner_products_of_a_chain_are_private(attempt) -> None:
    rule = body("y: {chain: Mul, of: [x, x, 2]}")
    assert attempt(rule, "p = Mul (x, x)\ny = Mul (two, p)", outputs="y, p").count == 0
    assert attempt(rule, "p = Mul (x, x)\ny = Mul (two, p)\nz = Relu (p)", outputs="y, z").count == 0


def test_a_chain_of_four_in_a_balanced_tree(attempt) -> None:
    rule = body("s: {op: Sigmoid, in: [x]}\nt: {op: Tanh, in: [x]}\ny: {chain: Add, of: [x, 2, s, t]}")
    nodes = "s = Sigmoid (x)\nt = Tanh (x)\na = Add (s, x)\nb = Add (two, t)\ny = Add (a, b)"
    assert attempt(rule, nodes).count == 1


# -- alternatives and optional nodes -----------------------------------------------------------------------------------


def test_alternatives_set_captures(attempt) -> None:
    rule = """
inputs:
  x: {}
nodes:
  y:
    any_of:
      - {op: Relu, in: [x], set: {name: relu}}
      - {op: Tanh, in: [x], set: {name: tanh}}
outputs: [y]
rewrite:
  node: {op: Linear, domain: onnxfuse, in: [x, w], attrs: {activation: $name}, out: [y]}
  weights:
    w: {fn: full, shape: [8, 8], value: 1}
"""
    for op, name in (("Relu", "relu"), ("Tanh", "tanh")):
        tried = attempt(rule, f"y = {op} (x)")
        assert tried.model.graph.nodes[0].attrs == {"activation": name}


def test_is_makes_a_value_another_one(attempt) -> None:
    rule = body("n:\n  any_of:\n    - {op: Neg, in: [x]}\n    - {is: x}\ny: {op: Relu, in: [n]}")
    assert attempt(rule, "n = Neg (x)\ny = Relu (n)").ops == ["Identity"]
    assert attempt(rule, "y = Relu (x)").ops == ["Identity"]


def test_an_optional_node_may_be_missing(attempt) -> None:
    rule = body("w: {op: Cast, in: [x], attrs: {to: float32}, optional: true}\ny: {op: Relu, in: [w]}")
    assert (
        attempt(rule, "w = Cast <to=1> (x)\ny = Relu (w)", inputs="float16[4] x").count == 0
    )  # the output's type would change
    assert attempt(rule, "y = Relu (x)").count == 1


def test_a_shared_optional_cast_is_left_outside(attempt) -> None:
    rule = body("w: {op: Cast, in: [x], attrs: {to: float32}, optional: true}\ny: {op: Relu, in: [w]}", "x: {dtype: T}")
    tried = attempt(rule, "w = Cast <to=1> (x)\ny = Relu (w)\nz = Neg (w)", inputs="float16[4] x", outputs="y, z")
    assert tried.ops == ["Cast", "Identity", "Neg"] and tried.count == 1


def test_an_absent_optional_node_is_not_blamed(attempt) -> None:
    rule = body(
        "a: {op: Exp, in: [x]}\nw: {op: Cast, in: [a], attrs: {to: float32}, optional: true}\ny: {op: Relu, in: [w]}"
    )
    tried = attempt(rule, "a = Neg (x)\ny = Relu (a)")
    assert tried.failure.id == "nodes.a.op" and tried.failure.text() == "expected Exp, found Neg on Neg `a`"


# -- attributes --------------------------------------------------------------------------------------------------------

MEAN = "y: {op: ReduceMean, in: [x, ...], attrs: {axes: [-1], keepdims: 1}, shape: [..., 1]}"
MAKE_MEAN = "y: {op: ReduceMax, in: [x], attrs: {axes: [-1], keepdims: 1}, out: [y]}"


@pytest.mark.parametrize(
    ("text", "opset", "matches"),
    [
        ("y = ReduceMean <axes=[-1], keepdims=1> (x)", 17, True),
        ("y = ReduceMean <axes=[2]> (x)", 17, True),
        ("y = ReduceMean <axes=[1]> (x)", 17, False),
        ("y = ReduceMean <axes=[-1], keepdims=0> (x)", 17, False),
        ("y = ReduceMean (x, last)", 18, True),
        ("y = ReduceMean <keepdims=1> (x, two)", 18, True),
        ("y = ReduceMean (x)", 18, False),
        ("y = ReduceMean (x, both)", 18, False),
    ],
)
def test_parameters_are_attributes_or_constant_inputs(attempt, text: str, opset: int, matches: bool) -> None:
    rule = """
inputs:
  x: {}
nodes:
  y: {op: ReduceMean, in: [x, ...], attrs: {axes: [-1], keepdims: 1}}
outputs: [y]
rewrite:
  node: {op: ReduceMax, in: [x], attrs: {axes: [-1], keepdims: 1}, out: [y]}
"""
    weights = "int64[1] last = {-1}, int64[1] two = {2}, int64[2] both = {1, 2}"
    tried = attempt(rule, text, opset=opset, weights=weights)
    assert tried.count == int(matches)
    if matches:
        made = tried.model.graph.nodes[0]
        assert made.op == "ReduceMax"
        # ReduceMax takes its axes as an input from opset 18 on.
        assert len(made.inputs) == (1 if opset == 17 else 2) and ("axes" in made.attrs) == (opset == 17)
    else:
        assert tried.failure.kind is Kind.ATTR and tried.failure.id.startswith("nodes.y.attrs.")


@pytest.mark.parametrize(
    ("wanted", "given", "matches"),
    [
        ("{one_of: [0.5, 0.25]}", "alpha=0.25", True),
        ("{one_of: [0.5, 0.25]}", "alpha=0.3", False),
        ("{not: 0.01}", "alpha=0.3", True),
        ("{not: 0.01}", "", False),
        ("0.01", "", True),
        ("0.3", "alpha=0.3", True),
        ("absent", "alpha=0.3", False),
    ],
)
def test_kinds_of_attribute_checks(attempt, wanted: str, given: str, matches: bool) -> None:
    rule = body(f"y: {{op: LeakyRelu, in: [x], attrs: {{alpha: {wanted}}}}}")
    assert attempt(rule, f"y = LeakyRelu <{given}> (x)" if given else "y = LeakyRelu (x)").count == int(matches)


def test_to_may_be_a_type_variable(attempt) -> None:
    rule = body(
        "w: {op: Cast, in: [x], attrs: {to: float32}}\nr: {op: Relu, in: [w]}\ny: {op: Cast, in: [r], attrs: {to: T}}",
        "x: {dtype: T}",
    )
    nodes = "w = Cast <to=1> (x)\nr = Relu (w)\ny = Cast <to={}> (r)"
    assert attempt(rule, nodes.format(10), inputs="float16[4] x").count == 1
    tried = attempt(rule, nodes.format(16), inputs="float16[4] x")
    assert tried.count == 0 and "T" in str(tried.failure.expected)


# -- several outputs ---------------------------------------------------------------------------------------------------

HALVES = """
inputs:
  x: {}
nodes:
  halves: {op: Split, in: [x, ...], attrs: {axis: -1}, out: [a, b]}
  s: {op: Sigmoid, in: [a]}
  y: {op: Mul, in: [s, b]}
outputs: [y]
rewrite:
  nodes:
    - {op: GatedLinear, domain: onnxfuse, in: [x, w], out: [y]}
  weights:
    w: {fn: full, shape: [8, 8], value: 1}
"""


def test_outputs_of_a_node_have_places(attempt) -> None:
    nodes = "a, b = Split <axis=-1> (x)\ns = Sigmoid ({})\ny = Mul (s, {})"
    assert attempt(HALVES, nodes.format("a", "b")).count == 1
    tried = attempt(HALVES, nodes.format("b", "a"))
    assert tried.count == 0 and tried.failure.id == "nodes.halves.out"


def test_outputs_that_are_not_listed_must_be_unused(attempt) -> None:
    rule = HALVES.replace("out: [a, b]", "out: [a]").replace("in: [s, b]", "in: [s, 2]")
    nodes = "a, b = Split <axis=-1> (x)\ns = Sigmoid (a)\ny = Mul (s, two)"
    assert attempt(rule, nodes).count == 1
    assert attempt(rule, nodes + "\nz = Relu (b)", outputs="y, z").failure.id == "nodes.halves.out"


def test_outputs_that_the_root_does_not_reach_are_found_through_readers(attempt) -> None:
    rule = """
inputs:
  x: {}
nodes:
  y: {op: Relu, in: [x]}
  n: {op: Neg, in: [x]}
  z: {op: Exp, in: [n]}
outputs: [y, z]
rewrite:
  nodes:
    - {op: Split, in: [x], attrs: {axis: 0, num_outputs: 2}, out: [y, z]}
"""
    nodes = "o = Neg (x)\nn = Neg (x)\ny = Relu (x)\nt = Tanh (o)\nz = Exp (n)"
    tried = attempt(rule, nodes, inputs="float[4,8] x", outputs="y, z, t", opset=18)
    assert tried.count == 0 and tried.failure.kind is Kind.OUTPUT_TYPE and tried.failure.phase is Phase.APPLY
    rule = rule.replace("axis: 0, num_outputs: 2", "axis: 0, num_outputs: 1").replace(
        "out: [y, z]}", "out: [y]}\n    - {op: Exp, in: [x], out: [z]}"
    )
    tried = attempt(rule, nodes, outputs="y, z, t", opset=18)
    assert tried.count == 1 and sorted(tried.ops) == ["Exp", "Neg", "Split", "Tanh"]
    assert attempt(rule, "y = Relu (x)\nz = Exp (x)", outputs="y, z").failure.id == "nodes.n.op"


# -- what is visible outside -------------------------------------------------------------------------------------------

TWO = body("a: {op: Neg, in: [x]}\ny: {op: Relu, in: [a]}")


def test_an_interior_value_that_is_a_graph_output(attempt) -> None:
    tried = attempt(TWO, "a = Neg (x)\ny = Relu (a)", outputs="y, a")
    assert (tried.failure.id, tried.failure.kind) == ("private.a", Kind.GRAPH_OUTPUT)


def test_an_interior_value_with_another_reader(attempt) -> None:
    tried = attempt(TWO, "a = Neg (x)\ny = Relu (a)\nz = Exp (a)", outputs="y, z")
    assert (tried.failure.id, tried.failure.kind) == ("private.a", Kind.NOT_PRIVATE)
    assert "Exp `z`" in tried.failure.text()


def test_an_interior_value_that_a_subgraph_captures(attempt) -> None:
    nodes = """
    a = Neg (x)
    y = Relu (a)
    z = If (c) <then_branch = t () => (float[B,S,8] p) { p = Exp (a) },
        else_branch = e () => (float[B,S,8] q) { q = Tanh (x) }>
    """
    tried = attempt(TWO, nodes, inputs="float[B,S,8] x, bool c", outputs="y, z")
    assert (tried.failure.id, tried.failure.kind) == ("private.a", Kind.CAPTURED_BY_SUBGRAPH)


def test_shared_values_may_be_read_by_listed_ops_and_stay_while_they_are(attempt) -> None:
    rule = TWO + "shared: {a: [Exp]}\n"
    tried = attempt(rule, "a = Neg (x)\ny = Relu (a)\nz = Exp (a)", outputs="y, z")
    assert tried.count == 1 and sorted(tried.ops) == ["Exp", "Identity", "Neg"]
    tried = attempt(rule, "a = Neg (x)\ny = Relu (a)\nz = Tanh (a)", outputs="y, z")
    assert tried.count == 0 and tried.failure.id == "private.a"
    assert attempt(rule, "a = Neg (x)\ny = Relu (a)", outputs="y, a").failure.kind is Kind.GRAPH_OUTPUT
    assert attempt(TWO + "shared: {a: any}\n", "a = Neg (x)\ny = Relu (a)", outputs="y, a").count == 1


def test_a_match_inside_of_a_subgraph(attempt) -> None:
    nodes = """
    z = If (c) <then_branch = t () => (float[B,S,8] p) { a = Neg (x)  p = Relu (a) },
        else_branch = e () => (float[B,S,8] q) { q = Tanh (x) }>
    """
    tried = attempt(TWO, nodes, inputs="float[B,S,8] x, bool c", outputs="z")
    then = tried.model.graph.nodes[0].attrs["then_branch"]
    assert tried.count == 1 and [n.op for n in then.nodes] == ["Identity"] and then.outputs[0].name == "p"


def test_a_match_never_crosses_into_an_outer_graph(attempt) -> None:
    nodes = """
    a = Neg (x)
    z = If (c) <then_branch = t () => (float[B,S,8] p) { p = Relu (a) },
        else_branch = e () => (float[B,S,8] q) { q = Tanh (x) }>
    """
    tried = attempt(TWO, nodes, inputs="float[B,S,8] x, bool c", outputs="z")
    assert tried.count == 0 and tried.failure.found == "a value of an outer graph"
