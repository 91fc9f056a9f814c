"""Inline cases as models: ONNX text, edits, retyping, seeded weights."""

from __future__ import annotations

import re
import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnx.parser
from onnx import TensorProto, helper, numpy_helper

from onnxfuse.errors import RuleError
from onnxfuse.graph import model as models
from onnxfuse.graph.model import Model
from onnxfuse.graph.types import numpy_of, onnx_of
from onnxfuse.rules import spec
from onnxfuse.rules.program import Program

DEFAULT_OPSET = 17
_DOMAINS = {"onnxfuse": 1, "onnxfuse.std": 1, "com.microsoft": 1}


@dataclass(frozen=True)
class Case:
    """One inline case, with what it takes over from the case it is derived from already filled in."""

    program: Program
    positive: bool
    name: str
    path: str
    text: str
    opset: int
    dtype: str | None
    target: str
    canonicalize: bool
    sizes: dict[str, int]
    given: Any

    @property
    def id(self) -> str:
        return f"{self.program.id}::{self.name}"

    @property
    def line(self) -> int | None:
        return self.program.line(self.path)


def cases(program: Program) -> list[Case]:
    """All cases of a rule.

    Raises:
        RuleError: the tests are malformed, a case refers to none that exists, or an edit's text is not there once.
    """
    tests = program.source.tests()
    by_name: dict[str, Case] = {}
    found: list[Case] = []
    for index, given in enumerate(tests.match):
        case = _case(program, given, by_name, f"tests.match[{index}]", given.name, True)
        if given.name in by_name:
            raise RuleError(f"two cases are called `{given.name}`", where=f"{program.file}:{case.line}")
        by_name[given.name] = case
        found.append(case)
    for index, refusal in enumerate(tests.no_match):
        name = f"no_match[{index}]-{refusal.from_}-{refusal.because}"
        found.append(_case(program, refusal, by_name, f"tests.no_match[{index}]", name, False))
    return found


def _case(
    program: Program,
    given: spec.MatchCase | spec.NoMatchCase,
    known: dict[str, Case],
    path: str,
    name: str,
    positive: bool,
) -> Case:
    where = f"{program.file}:{program.line(path)}"
    base = None
    if given.from_ is not None:
        base = known.get(given.from_)
        if base is None:
            raise RuleError(
                f"`from` names no earlier case: `{given.from_}`", where=where, hint=f"cases: {', '.join(known)}"
            )
    text = getattr(given, "graph", None) or (base.text if base else None)
    if text is None:
        raise RuleError("a case needs `graph` or `from`", where=where)
    for old, new in given.replace.items():
        if text.count(old) != 1:
            times = "not" if old not in text else f"{text.count(old)} times"
            raise RuleError(
                f"the text `{old}` occurs {times} in case `{given.from_ or name}`",
                where=where,
                hint="an edit's text must occur exactly once",
            )
        text = text.replace(old, new)
    keep = given.canonicalize
    return Case(
        program=program,
        positive=positive,
        name=name,
        path=path,
        text=text,
        opset=given.opset or (base.opset if base else DEFAULT_OPSET),
        dtype=given.as_ or (base.dtype if base else None),
        target=given.target or (base.target if base else "cpu"),
        canonicalize=keep
        if keep is not None and (base is None or keep is False)
        else (base.canonicalize if base else True),
        sizes={**(base.sizes if base else {}), **getattr(given, "sizes", {})},
        given=given,
    )


def model_of(case: Case) -> onnx.ModelProto:
    """The case's model.

    Raises:
        RuleError: the text is not ONNX text.
    """
    try:
        proto = parse_graph(case.text, case.opset)
    except onnx.parser.ParseError as error:
        problem = f"case `{case.name}` is not ONNX text: {str(error).strip()}"
        raise RuleError(problem, where=f"{case.program.file}:{case.line}") from error
    if case.dtype is not None:
        _retype(proto.graph, onnx_of(case.dtype))
    return proto


def parse_graph(text: str, opset: int = DEFAULT_OPSET) -> onnx.ModelProto:
    """A model from a graph in ONNX text: all domains imported, typed names without data filled as weights, untyped
    outputs given a stand-in type. ``onnx.parser.ParseError`` if it is not ONNX text."""
    imports = ", ".join(f'"{d}": {v}' for d, v in {"": opset, **_DOMAINS}.items())
    proto = onnx.parser.parse_model(f"<ir_version: 10, opset_import: [{imports}]>\n{text}")
    _fill_weights(proto.graph)
    for output in proto.graph.output:
        kind = output.type.tensor_type
        kind.elem_type = kind.elem_type or TensorProto.FLOAT
        kind.shape.SetInParent()
    return proto


def load(proto: onnx.ModelProto, text: str) -> Model:
    """The parsed model as a `Model`, outputs that the text gives no type without one."""
    model = models.load(proto)
    untyped = _untyped_outputs(text)
    for value in model.graph.outputs:
        if value.name in untyped:
            value.__dict__.pop("declared", None)
            value.dtype = value.shape = None
    return model


def _untyped_outputs(text: str) -> set[str]:
    inside = re.sub(r"\[[^\]]*\]", "", text.split("=>", 1)[1]).split(")", 1)[0].strip(" (")
    return {part.split()[-1] for part in inside.split(",") if len(part.split()) == 1}


def _fill_weights(graph: onnx.GraphProto) -> None:
    """Typed names without data are weights: normal numbers, scaled to keep products near 1; the seed is the name."""
    made = {t.name for t in graph.initializer} | {name for node in graph.node for name in node.output}
    for info in graph.value_info:
        if info.name in made:
            continue
        kind = info.type.tensor_type
        shape = [d.dim_value for d in kind.shape.dim]
        rng = np.random.default_rng(zlib.crc32(info.name.encode()))
        dtype = helper.tensor_dtype_to_np_dtype(kind.elem_type)
        if np.dtype(dtype).kind in "iub":
            content = rng.integers(0, 2, shape).astype(dtype)
        else:
            fan_in = max(min(shape), 1) if len(shape) >= 2 else 1
            content = (rng.normal(size=shape) / np.sqrt(fan_in)).astype(dtype)
        graph.initializer.append(numpy_helper.from_array(np.asarray(content), info.name))
    keep = [info for info in graph.value_info if info.name not in {t.name for t in graph.initializer}]
    del graph.value_info[:]
    graph.value_info.extend(keep)


def _retype(graph: onnx.GraphProto, to: int) -> None:
    dtype = helper.tensor_dtype_to_np_dtype(to)
    for tensor in graph.initializer:
        if tensor.data_type == TensorProto.FLOAT:
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(dtype), tensor.name))
    for info in [*graph.input, *graph.output, *graph.value_info]:
        if info.type.tensor_type.elem_type == TensorProto.FLOAT:
            info.type.tensor_type.elem_type = to


def feeds(proto: onnx.ModelProto, sizes: dict[str, int], seed: int = 0) -> dict[str, np.ndarray]:
    """Input values: normal floats, integers and booleans of 0 and 1. Named dims get small sizes that all differ."""
    initialized = {t.name for t in proto.graph.initializer}
    known = dict(sizes)
    spare = (n for n in (2, 3, 5, 7, 4, 6, 9, 11, 8, 10) if n not in known.values())
    values: dict[str, np.ndarray] = {}
    for info in proto.graph.input:
        if info.name in initialized:
            continue
        kind = info.type.tensor_type
        shape = []
        for dim in kind.shape.dim:
            name = dim.dim_param
            if name and name not in known:
                known[name] = next(spare)
            shape.append(known[name] if name else dim.dim_value)
        rng = np.random.default_rng([seed, zlib.crc32(info.name.encode())])
        dtype: Any = numpy_of("float32")
        dtype = np.dtype(helper.tensor_dtype_to_np_dtype(kind.elem_type))
        if dtype.kind in "iub":
            values[info.name] = np.asarray(rng.integers(0, 2, shape)).astype(dtype)
        else:
            values[info.name] = np.asarray(rng.normal(size=shape)).astype(dtype)
    return values
