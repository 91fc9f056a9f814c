"""Near misses made automatically: every number, attribute and op of a positive case is changed, inner values are
published, operands are swapped. A mutant that a rule still matches must still be computed right; if it is not, the rule
checks too little there.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import onnx
from onnx import AttributeProto, ModelProto, NodeProto, helper, numpy_helper

from onnxfuse.errors import OnnxfuseError
from onnxfuse.graph import canonicalize, shapes
from onnxfuse.graph import model as models
from onnxfuse.rewrite import driver
from onnxfuse.rules.loading import RuleSet
from onnxfuse.rules.program import Program
from onnxfuse.ruletest.cases import Case, cases, load, model_of
from onnxfuse.ruletest.run import inaccuracy

#: Another op of the same operands, which means something else.
_OTHER_OP = {
    "Add": "Sub", "Sub": "Add", "Mul": "Add", "Div": "Mul", "Pow": "Mul", "Sqrt": "Abs", "Reciprocal": "Neg",
    "Neg": "Abs", "Exp": "Tanh", "Erf": "Tanh", "Tanh": "Sigmoid", "Sigmoid": "Tanh", "Relu": "Abs",
    "Softmax": "LogSoftmax",
    "ReduceMean": "ReduceMax", "ReduceSum": "ReduceMax", "Max": "Min", "Min": "Max", "Sin": "Cos", "Cos": "Sin",
    "Gelu": "Relu", "Swish": "Relu", "HardSwish": "Relu",
}  # fmt: skip
_ORDERED = frozenset({"Sub", "Div", "Pow"})
_OTHER_TEXT = {b"none": b"tanh", b"tanh": b"none", b"relu": b"silu", b"silu": b"relu", b"KN": b"NK", b"NK": b"KN"}


@dataclass(frozen=True)
class Mutant:
    """One change of a case, in words, and the changed model."""

    what: str
    model: ModelProto


@dataclass
class MutationReport:
    """What became of a rule's mutants.

    Attributes:
        rejected: the rule did not match them.
        equivalent: it matched, and the result is right: the change does not matter to the rule.
        invalid: no valid model, or one that cannot be computed.
        survivors: it matched, and the result is wrong: (case, change, what is wrong).
    """

    program: Program
    rejected: int = 0
    equivalent: int = 0
    invalid: int = 0
    survivors: list[tuple[Case, str, str]] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return not self.survivors


def mutate_rule(program: Program, limit: int | None = None) -> MutationReport:
    """Try all mutants of a rule's positive cases (at most `limit` cases)."""
    report = MutationReport(program)
    positive = [c for c in cases(program) if c.positive and c.given.numeric]
    for case in positive[:limit]:
        for mutant in mutants(model_of(case)):
            _try(case, mutant, report)
    return report


def _try(case: Case, mutant: Mutant, report: MutationReport) -> None:
    try:
        model = load(mutant.model, case.text)
        if case.canonicalize:
            canonicalize.run(model)
        applied = driver.run(
            model, RuleSet({case.program.id: case.program}), case.program.stage, case.target,
            inference=shapes.infer(model),
        )  # fmt: skip
        if not applied.applied:
            report.rejected += 1
            return
        rewritten = model.to_proto()
        models.load(rewritten)
    except OnnxfuseError:
        report.invalid += 1
        return
    wrong = inaccuracy(case, mutant.model, rewritten)
    if wrong is None:
        report.equivalent += 1
    elif wrong.startswith("the case itself"):
        report.invalid += 1
    else:
        report.survivors.append((case, mutant.what, wrong))


def mutants(model: ModelProto) -> Iterator[Mutant]:
    """All changes of one model, each on its own."""
    for index, node in enumerate(model.graph.node):
        label = f"{node.op_type} `{node.output[0]}`"
        if node.op_type in _OTHER_OP and node.domain == "":
            other = _OTHER_OP[node.op_type]

            def change_op(n: NodeProto, other: str = other) -> None:
                n.op_type = other
                if other in ("Relu", "Abs"):
                    del n.attribute[:]

            yield _with_node(model, index, f"{label} is {other}", change_op)
        if node.op_type in _ORDERED and len(node.input) == 2:
            yield _with_node(model, index, f"{label} has its operands swapped", _swap)
        for position, attribute in enumerate(node.attribute):
            changed = _other_value(attribute)
            if changed is not None:

                def change_attr(n: NodeProto, p: int = position, new: AttributeProto = changed) -> None:
                    n.attribute[p].CopyFrom(new)

                shown = helper.get_attribute_value(changed)
                yield _with_node(model, index, f"{label} has {attribute.name} = {shown}", change_attr)
        yield from _published(model, node)
    for position, tensor in enumerate(model.graph.initializer):
        array = _other_constant(numpy_helper.to_array(tensor))
        if array is not None:
            changed_model = copy.deepcopy(model)
            changed_model.graph.initializer[position].CopyFrom(numpy_helper.from_array(array, tensor.name))
            yield Mutant(f"the constant `{tensor.name}` is {array.reshape(-1).tolist()}", changed_model)


def _with_node(model: ModelProto, index: int, what: str, change: Callable[[NodeProto], None]) -> Mutant:
    changed = copy.deepcopy(model)
    change(changed.graph.node[index])
    return Mutant(what, changed)


def _swap(node: NodeProto) -> None:
    node.input[:] = [node.input[1], node.input[0]]


def _published(model: ModelProto, node: NodeProto) -> Iterator[Mutant]:
    """Inner values as outputs of the graph; what the rule then computes for them must still be right."""
    outputs = {o.name for o in model.graph.output}
    for name in node.output:
        if not name or name in outputs:
            continue
        changed = copy.deepcopy(model)
        kind = changed.graph.output[0].type.tensor_type.elem_type
        try:
            inferred = onnx.shape_inference.infer_shapes(model).graph.value_info
        except onnx.shape_inference.InferenceError:
            inferred = []
        known = next((v for v in inferred if v.name == name), None)
        if known is not None:
            changed.graph.output.append(known)
        else:
            info = helper.make_tensor_value_info(name, kind, None)
            info.type.tensor_type.shape.SetInParent()
            changed.graph.output.append(info)
        yield Mutant(f"`{name}` is an output of the graph", changed)


def _other_value(attribute: AttributeProto) -> AttributeProto | None:
    changed = AttributeProto()
    changed.CopyFrom(attribute)
    if attribute.type == AttributeProto.INT:
        if attribute.name in ("to", "dtype"):
            return None
        changed.i = 1 - attribute.i if attribute.i in (0, 1) else attribute.i + 1
    elif attribute.type == AttributeProto.FLOAT:
        changed.f = attribute.f * 1.5 + 0.25
    elif attribute.type == AttributeProto.INTS and len(attribute.ints) == 1:
        changed.ints[0] = 0 if attribute.ints[0] != 0 else 1
    elif attribute.type == AttributeProto.INTS and len(attribute.ints) > 1:
        rotated = [*attribute.ints[1:], attribute.ints[0]]
        if rotated == list(attribute.ints):
            return None
        changed.ints[:] = rotated
    elif attribute.type == AttributeProto.STRING and attribute.s in _OTHER_TEXT:
        changed.s = _OTHER_TEXT[attribute.s]
    else:
        return None
    return changed


def _other_constant(array: np.ndarray) -> np.ndarray | None:
    """Another value for numbers and short integer lists; weights stay, they are meant to be anything."""
    if array.size == 1 and array.dtype.kind in "fV":
        with np.errstate(over="ignore"):  # the lowest number of a dtype becomes -inf
            return (array.astype(np.float64) * 1.5 + 0.25).astype(array.dtype)
    if array.dtype.kind in "iu" and 0 < array.size <= 8:
        return array + array.dtype.type(1) if array.size == 1 else array[::-1].copy()
    return None
