"""Order, conflicts, fixpoint, exclusions, and the cost of a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from onnxfuse import rules
from onnxfuse.errors import RewriteError, RuleError
from onnxfuse.graph import shapes
from onnxfuse.graph.model import Model
from onnxfuse.match.search import Search
from onnxfuse.match.trace import Kind, Tracer
from onnxfuse.rewrite import driver
from onnxfuse.rules.loading import builtin_folder
from onnxfuse.ruletest.cases import load, parse_graph


def one(op: str, to: str, extra: str = "") -> str:
    return f"""
inputs: {{x: {{}}}}
nodes:
  y: {{op: {op}, in: [x]}}
outputs: [y]
{extra}
rewrite:
  node: {{op: {to}, in: [x], out: [y]}}
"""


def two(first: str, second: str, to: str, extra: str = "") -> str:
    return f"""
inputs: {{x: {{}}}}
nodes:
  a: {{op: {first}, in: [x]}}
  y: {{op: {second}, in: [a]}}
outputs: [y]
{extra}
rewrite:
  node: {{op: {to}, in: [x], out: [y]}}
"""


def test_the_larger_pattern_wins_and_the_loser_is_told_by_whom(attempt) -> None:
    tried = attempt([one("Neg", "Abs"), two("Neg", "Exp", "Relu")], "a = Neg (x)\ny = Exp (a)")
    assert tried.ops == ["Relu"] and [a.rule for a in tried.report.applied] == ["second"]
    lost = next(a for (rule, _), a in tried.tracer.attempts.items() if rule == "first")
    assert lost.failure.kind is Kind.PREEMPTED and lost.failure.found == "second"


def test_priority_overrides_the_size_and_ties_go_by_id(attempt) -> None:
    tried = attempt([one("Neg", "Abs", "priority: 9"), two("Neg", "Exp", "Relu")], "a = Neg (x)\ny = Exp (a)")
    assert tried.ops == ["Abs", "Exp"]
    tried = attempt([one("Neg", "Abs"), one("Neg", "Sin")], "y = Neg (x)")
    assert tried.ops == ["Abs"] and tried.report.counts() == {"first": 1}


def test_a_rule_waits_for_what_a_better_one_may_make_of_a_change(attempt) -> None:
    """When Neg has become Abs, the pair of it and Exp is worth more than Exp alone, which matched from the start."""
    rules = [one("Neg", "Abs", "priority: 9"), two("Abs", "Exp", "Relu", "priority: 8"),
             one("Exp", "Sin", "priority: 7")]
    assert attempt(rules, "a = Neg (x)\ny = Exp (a)").ops == ["Relu"]
    # Where nothing better comes of it, it applies a round later.
    rules[1] = two("Abs", "Sqrt", "Relu", "priority: 8")
    assert attempt(rules, "a = Neg (x)\ny = Exp (a)").ops == ["Abs", "Sin"]


def test_what_waits_keeps_its_nodes_from_lesser_rules(attempt) -> None:
    rules = [one("Neg", "Abs", "priority: 9"),
             two("Exp", "Tanh", "Relu", "priority: 8"),
             one("Tanh", "Sin", "priority: 7")]
    assert attempt(rules, "a = Neg (x)\nb = Exp (a)\ny = Tanh (b)").ops == ["Abs", "Relu"]


def test_overlapping_matches_of_one_rule_are_not_both_applied(attempt) -> None:
    tried = attempt(two("Neg", "Neg", "Abs"), "a = Neg (x)\nb = Neg (a)\nc = Neg (b)\ny = Neg (c)")
    assert tried.ops == ["Abs", "Abs"] and tried.count == 2
    tried = attempt(two("Neg", "Neg", "Abs"), "a = Neg (x)\nb = Neg (a)\ny = Neg (b)")
    assert sorted(tried.ops) == ["Abs", "Neg"]


def test_rules_feed_each_other_until_nothing_changes(attempt) -> None:
    tried = attempt(
        [one("Neg", "Exp"), two("Exp", "Tanh", "Sin"), two("Sin", "Relu", "Cos")],
        "a = Neg (x)\nb = Tanh (a)\ny = Relu (b)",
    )
    assert tried.ops == ["Cos"] and [a.rule for a in tried.report.applied] == ["first", "second", "third"]


def test_a_value_becomes_private_when_its_other_reader_goes(attempt) -> None:
    # The second Exp keeps `a` visible until the first rule has taken it.
    shared = """
inputs: {x: {}}
nodes:
  a: {op: Neg, in: [x]}
  y: {op: Exp, in: [a]}
outputs: [y]
shared: {a: [Tanh]}
rewrite:
  node: {op: Cos, in: [x], out: [y]}
"""
    tried = attempt([shared, two("Neg", "Tanh", "Sin")], "a = Neg (x)\nb = Exp (a)\nc = Tanh (a)\ny = Add (b, c)")
    assert sorted(tried.ops) == ["Add", "Cos", "Sin"]


def test_rules_that_undo_each_other_are_an_error(attempt) -> None:
    with pytest.raises(RewriteError, match="`first`, `second` keep undoing each other"):
        attempt([one("Neg", "Exp"), one("Exp", "Neg")], "y = Neg (x)")


def test_disabled_rules_and_excluded_nodes(attempt) -> None:
    nodes = "a = Neg (x)\ny = Neg (a)"
    assert attempt([one("Neg", "Abs")], nodes, disable=["first"]).count == 0
    with pytest.raises(RuleError) as caught:
        attempt([one("Neg", "Abs")], nodes, disable=["frist"])
    assert caught.value.hint == "did you mean `first`?"
    tried = attempt([one("Neg", "Abs")], nodes, exclude_nodes=["a"])
    assert tried.ops == ["Neg", "Abs"] and tried.failure.kind is Kind.EXCLUDED


def test_a_rule_may_not_call_what_does_not_exist(attempt) -> None:
    extra = "where:\n  - {fn: equal_constnts, of: [x, x]}"
    with pytest.raises(RuleError) as caught:
        attempt([one("Neg", "Abs", extra)], "y = Neg (x)")
    assert (
        caught.value.message == "predicate `equal_constnts` is not defined"
        and caught.value.hint == "did you mean `equal_constants`?"
    )
    with pytest.raises(RuleError, match="`flatten` has no parameter `axis`"):
        attempt(
            [one("Neg", "Abs").replace("rewrite:", "rewrite:\n  weights: {f: {fn: flatten, of: [x], axis: 1}}")],
            "y = Neg (x)",
        )


def test_the_report_names_what_was_removed_and_added(attempt) -> None:
    tried = attempt([two("Neg", "Exp", "Relu")], "a = Neg (x)\nb = Exp (a)\ny = Tanh (b)")
    applied = tried.report.applied[0]
    assert (applied.rule, applied.stage, applied.root) == ("first", "fuse", "b")
    assert applied.removed == ("Neg `a`", "Exp `b`") and applied.added == ("Relu `b`",)


def test_a_refused_match_leaves_its_root_to_the_next_rule(attempt) -> None:
    wrong = """
inputs: {x: {}}
nodes:
  y: {op: Neg, in: [x]}
outputs: [y]
priority: 5
rewrite:
  node: {op: ReduceMean, in: [x], attrs: {keepdims: 0}, out: [y]}
"""
    tried = attempt([wrong, one("Neg", "Abs")], "y = Neg (x)")
    assert tried.ops == ["Abs"] and [a.rule for a in tried.report.applied] == ["second"]


def test_a_refusal_is_taken_back_when_its_reason_goes(attempt) -> None:
    scale = """
inputs:
  x: {shape: [..., K]}
  w: {const: true, shape: [K, N]}
nodes:
  s: {op: Mul, in: [x, 2]}
  y: {op: MatMul, in: [s, w]}
outputs: [y]
rewrite:
  weights: {folded: {fn: scale, of: [w], value: 2.0}}
  node: {op: MatMul, in: [x, folded], out: [y]}
"""
    other = """
inputs: {x: {}, w: {}}
nodes:
  r: {op: Relu, in: [x]}
  y: {op: MatMul, in: [r, w]}
outputs: [y]
rewrite:
  node: {op: Relu, in: [x], out: [y]}
"""
    nodes = "s = Mul (x, two)\ny = MatMul (s, w)\nr = Relu (x)\nz = MatMul (r, w)"
    weights = "float two = {2}, float[128,128] w"
    alone = attempt(scale, nodes, inputs="float[4,128] x", outputs="y, z", weights=weights)
    assert alone.count == 0 and [a.failure.id for a in alone.report.refused] == ["rewrite.weights.folded"]
    both = attempt([scale, other], nodes, inputs="float[4,128] x", outputs="y, z", weights=weights)
    assert both.report.counts() == {"first": 1, "second": 1} and both.report.refused == []


def test_tracing_changes_nothing(rule_set) -> None:
    found = rule_set(one("Neg", "Exp"), two("Exp", "Tanh", "Sin"))
    text = "g (float[4] x) => (y) { a = Neg (x) b = Tanh (a) y = Relu (b) }"
    texts = []
    for tracer in (None, Tracer()):
        model = load(parse_graph(text), text)
        driver.run(model, found, "fuse", tracer=tracer)
        texts.append([(n.op, [v.name for v in n.inputs], n.outputs[0].name, n.name) for n in model.graph.nodes])
    assert texts[0] == texts[1]


def test_functions_are_optimized_with_their_own_opset(rule_set) -> None:
    import onnx

    function = onnx.helper.make_function(
        "local",
        "F",
        ["p"],
        ["q"],
        [onnx.helper.make_node("Neg", ["p"], ["n"]), onnx.helper.make_node("Exp", ["n"], ["q"])],
        [onnx.helper.make_opsetid("", 13)],
    )
    graph = onnx.parser.parse_graph("g (float[4] x) => (float[4] y) { y = local.F (x) }")
    imports = [onnx.helper.make_opsetid("", 17), onnx.helper.make_opsetid("local", 1)]
    from onnxfuse.graph import model as models

    model = models.load(onnx.helper.make_model(graph, functions=[function], opset_imports=imports, ir_version=8))
    report = driver.run(model, rule_set(two("Neg", "Exp", "Relu", "opset: '13'")), "fuse")
    assert len(report.applied) == 1 and [n.op_type for n in model.to_proto().functions[0].node] == ["Relu"]
    to_gelu = one("Relu", "Gelu").replace("op: Gelu", "op: Gelu, domain: std")
    driver.run(model, rule_set(to_gelu), "fuse")
    written = model.to_proto().functions[0]
    assert [n.op_type for n in written.node] == ["Gelu"]
    assert {o.domain: o.version for o in written.opset_import} == {"": 13, "onnxfuse.std": 1}


# -- cost --------------------------------------------------------------------------------------------------------------

LAYER = """
  s{i} = Pow ({x}, two)  m{i} = ReduceMean <axes=[-1]> (s{i})  v{i} = Add (m{i}, eps)
  r{i} = Sqrt (v{i})  d{i} = Div (one, r{i})
  u{i} = Mul ({x}, d{i})  n{i} = Mul (u{i}, g)  q{i} = MatMul (n{i}, w)  k{i} = MatMul (n{i}, w2)  a{i} = Sigmoid (q{i})
  b{i} = Mul (q{i}, a{i})  c{i} = Mul (b{i}, k{i})  h{i} = Add ({x}, c{i})
"""


def layers(count: int) -> Model:
    x, parts = "x", []
    for i in range(count):
        parts.append(LAYER.format(i=i, x=x))
        x = f"h{i}"
    weights = "float two = {2}, float one = {1}, float eps = {1e-5}, float[8] g, float[8,8] w, float[8,8] w2"
    text = f"g (float[B,S,8] x) => ({x}) <{weights}> {{ {''.join(parts)} }}"
    return load(parse_graph(text), text)


def test_the_cost_is_linear_in_the_number_of_layers(monkeypatch) -> None:
    found = rules.load()
    steps = []
    solve = Search.solve
    run_search = Search.run

    def counting(self: Search, *args: object) -> bool:
        matched = run_search(self, *args)
        total[0] += self.steps
        return matched

    monkeypatch.setattr(Search, "run", counting)
    assert Search.solve is solve
    for count in (8, 16):
        total = [0]
        model = layers(count)
        inference = shapes.infer(model)
        passes = [driver.run(model, found, stage, inference=inference).passes for stage in ("lift", "fuse")]
        steps.append((total[0], passes))
    (small, few), (large, many) = steps
    assert few == many, "the number of passes grows with the number of layers"
    assert small > 100 and large <= 2.1 * small


def test_the_builtin_rules_load_fast_enough_to_be_loaded_on_every_run() -> None:
    files = sorted(Path(builtin_folder()).glob("*/*.yaml"))
    assert len(files) > 10
    first = rules.load()
    assert rules.load().programs == first.programs
