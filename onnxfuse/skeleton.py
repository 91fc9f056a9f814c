"""A first draft of a rule from a real subgraph: pattern, places for its guards, and the subgraph itself as a test."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import onnx

from onnxfuse import pipeline
from onnxfuse.errors import UsageError
from onnxfuse.graph import consts, view
from onnxfuse.graph.ir import Constant, Node, Value, is_empty
from onnxfuse.graph.types import FLOATS
from onnxfuse.match.attributes import lookup
from onnxfuse.rules.program import DOMAINS

#: Patterns larger than this are no rule; the named inputs probably do not cut the graph.
_MOST_NODES = 40
#: Stage before whose rules the pattern is seen.
_SEEN_AFTER = {"lift": "canonicalize", "fuse": "lift", "lower": "fuse"}
#: Parameters that are constants of integers, by input index: they become attributes of the pattern.
_PARAMETER_INPUTS = {
    "ReduceMean": {1: "axes"}, "ReduceSum": {1: "axes"}, "ReduceMax": {1: "axes"}, "Unsqueeze": {1: "axes"},
    "Squeeze": {1: "axes"}, "Split": {1: "split"}, "Slice": {1: "starts", 2: "ends", 3: "axes", 4: "steps"},
}  # fmt: skip
_SHORT_DOMAIN = {full: short for short, full in DOMAINS.items() if full}
Shape = tuple[Any, ...]

_RESERVED = {"y", "absent", "true", "false", "null", "in", "is"}


def skeleton(
    model: str | os.PathLike[str] | onnx.ModelProto,
    output: str,
    inputs: Sequence[str],
    *,
    rule_id: str = "my-rule",
    stage: str = "lift",
) -> str:
    """The text of a rule file whose pattern is the part of the graph between `inputs` and `output`.

    Args:
        model: a file, or a ModelProto; the pattern is taken as rules of `stage` see it.
        output: name of the value that the pattern computes.
        inputs: names of the values at which it ends. Constants on the way are part of the pattern: numbers by value,
            weights as constant inputs.

    Raises:
        UsageError: a name is unknown, or the inputs do not cut the output off from the rest of the graph.
    """
    built = pipeline.build(model, pipeline.Options(stop_after=_SEEN_AFTER[stage]))
    graph = built.model.graph
    values = {v.name: v for n in graph.nodes for v in (*n.inputs, *n.outputs)} | {v.name: v for v in graph.inputs}
    for name in (output, *inputs):
        if name not in values:
            import difflib

            near = difflib.get_close_matches(name, values, n=1)
            hint = (
                f"did you mean `{near[0]}`?" if near else "rules see the canonical graph, in which some values are gone"
            )
            raise UsageError(f"there is no value `{name}`", hint=hint)
    nodes = _between(values[output], {values[n] for n in inputs}, graph.nodes)
    return _Writer(nodes, values[output], [values[n] for n in inputs], built.model.opset(), rule_id, stage).text()


def _between(output: Value, ends: set[Value], order: list[Node]) -> list[Node]:
    found: set[Node] = set()
    stack = [output]
    while stack:
        value = stack.pop()
        if value in ends or isinstance(value, Constant) or is_empty(value):
            continue
        node = view.producer(value)
        if node is None:
            raise UsageError(
                f"the pattern reaches the graph input `{value.name}`, which is none of the inputs given",
                hint="name it in --inputs",
            )
        if node in found:
            continue
        found.add(node)
        if len(found) > _MOST_NODES:
            raise UsageError(
                f"more than {_MOST_NODES} nodes lie above `{output.name}`",
                hint="name further --inputs to cut the graph",
            )
        stack += node.inputs
    if not found:
        raise UsageError(f"`{output.name}` is one of the inputs: there is nothing between")
    return [n for n in order if n in found]


class _Writer:
    def __init__(
        self, nodes: list[Node], output: Value, inputs: list[Value], opset: int, rule_id: str, stage: str
    ) -> None:
        self.nodes, self.output, self.opset = nodes, output, opset
        self.rule_id, self.stage = rule_id, stage
        self.names: dict[Value, str] = {output: "y"}
        self.given = [v for v in inputs if any(v in n.inputs for n in nodes)]
        self.dims: dict[str, str] = {}
        for index, value in enumerate(self.given):
            plain = "x" if len(self.given) == 1 else f"x{index + 1}"
            self._name(value, plain if not isinstance(value, Constant) else "w")
        self.weights: list[Constant] = []
        for node in nodes:
            for index, value in enumerate(node.inputs):
                if not isinstance(value, Constant) or value in self.names:
                    continue
                if self._literal(node, index, value) is None:
                    self.weights.append(value)
                    self._name(value, "w")
            for value in node.outputs:
                if value is not output and not is_empty(value):
                    self._name(value, re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", node.op).lower())

    def _name(self, value: Value, wish: str) -> None:
        if value in self.names:
            return
        taken = set(self.names.values()) | _RESERVED
        name, number = wish, 2
        while name in taken:
            name, number = f"{wish}_{number}", number + 1
        self.names[value] = name

    def _literal(self, node: Node, index: int, value: Constant) -> Any:
        """The constant as it is written in the pattern, or None for a weight."""
        if index in _PARAMETER_INPUTS.get(node.op, {}):
            return consts.array(value).reshape(-1).tolist()
        if consts.size_of(value) == 1:
            return _number(consts.scalar(value))
        dtype = consts.dtype_of(value) or ""
        if dtype.startswith(("int", "uint")) and consts.size_of(value) <= 8:
            return consts.array(value).reshape(-1).tolist()
        return None

    # -- the file ------------------------------------------------------------------------------------------------------

    def text(self) -> str:
        lines = [
            "# yaml-language-server: $schema=rule.schema.json",
            "schema: 1",
            f"id: {self.rule_id}",
            f"stage: {self.stage}",
            "summary: TODO one line on what this matches",
        ]
        lines += self._inputs()
        lines.append("nodes:")
        lines += [f"  {self._node(node)}" for node in reversed(self.nodes)]
        lines.append("outputs: [y]")
        lines += self._rewrite()
        lines += self._tests()
        return "\n".join(lines) + "\n"

    def _inputs(self) -> list[str]:
        lines = ["inputs:"]
        for value in [*self.given, *self.weights]:
            dtype, shape = self._type(value)
            parts = ["dtype: T" if dtype in FLOATS else f"dtype: {dtype}"]
            if shape is not None:
                parts.append(f"shape: [{', '.join(self._dims(value, shape))}]")
            if isinstance(value, Constant):
                parts.append("const: true")
            lines.append(f"  {self.names[value]}: {{{', '.join(parts)}}}")
        return lines

    def _type(self, value: Value) -> tuple[str, Shape | None]:
        if isinstance(value, Constant):
            return consts.dtype_of(value) or "float32", consts.shape_of(value)
        return value.dtype or "float32", value.shape

    def _dims(self, value: Value, shape: Shape) -> list[str]:
        """Weights by named dims, other tensors by their last one."""
        letters = [self.dims.setdefault(str(d), "KNMFGHIJ"[len(self.dims) % 8]) if d != 1 else "1" for d in shape[-2:]]
        if isinstance(value, Constant):
            return letters[-len(shape) :] if shape else []
        return ["...", letters[-1]] if shape else []

    def _operands(self, node: Node) -> list[str]:
        shown = []
        for index, value in enumerate(node.inputs):
            if index in _PARAMETER_INPUTS.get(node.op, {}):
                continue
            if is_empty(value):
                shown.append("absent")
            elif value in self.names:
                shown.append(self.names[value])
            else:
                shown.append(_yaml(self._literal(node, index, value)))
        if any(index < len(node.inputs) for index in _PARAMETER_INPUTS.get(node.op, {})):
            shown.append("...")
        return shown

    def _attrs(self, node: Node) -> dict[str, str]:
        names = [*node.attrs, *_PARAMETER_INPUTS.get(node.op, {}).values()]
        found = {}
        for name in dict.fromkeys(names):
            value = lookup(node, name, self.opset)
            if isinstance(value, (int, float, str, bytes, list, tuple)):
                found[name] = _yaml(list(value) if isinstance(value, tuple) else value)
        if node.op == "Cast":
            found["to"] = str(node.outputs[0].dtype or found.get("to"))
        return found

    def _node(self, node: Node) -> str:
        domain = view.domain(node)
        parts = [f"op: {node.op}"]
        if domain:
            parts.append(f"domain: {_SHORT_DOMAIN.get(domain, domain)}")
        parts.append(f"in: [{', '.join(self._operands(node))}]")
        attrs = self._attrs(node)
        if attrs:
            parts.append("attrs: {" + ", ".join(f"{k}: {v}" for k, v in attrs.items()) + "}")
        outputs = [self.names.get(v, "_") for v in node.outputs]
        if len(outputs) > 1:
            parts.append(f"out: [{', '.join(outputs)}]")
        return f"{outputs[0]}: {{{', '.join(parts)}}}"

    def _rewrite(self) -> list[str]:
        operands = [self.names[v] for v in [*self.given, *self.weights]]
        return [
            "rewrite:",
            "  # TODO the op that replaces the pattern: standard, com.microsoft (domain: ms), or of your own library",
            f"  node: {{op: TodoOp, domain: my.domain, in: [{', '.join(operands)}], out: [y]}}",
        ]

    # -- the test ------------------------------------------------------------------------------------------------------

    def _tests(self) -> list[str]:
        declared, numbers = self._declarations()
        signature = ", ".join(self._typed(v) for v in self.given if not isinstance(v, Constant))
        lines = [
            "tests:",
            "  match:",
            "    - name: real",
            *([f"      opset: {self.opset}"] if self.opset != 17 else []),
            "      graph: |",
            f"        g ({signature}) => (y)",
        ]
        if declared:
            lines.append(f"        <{', '.join(declared)}>")
        lines.append("        {")
        lines += [f"          {self._statement(node, numbers)}" for node in self.nodes]
        lines += [
            "        }",
            "      numeric: false  # TODO remove this line if the new op is one that can be computed here",
        ]
        inner = [self.names[v] for n in self.nodes for v in n.outputs if v is not self.output and v in self.names]
        if inner:
            lines += [
                "  no_match:",
                f'    - {{from: real, replace: {{"=> (y)": "=> (y, {inner[0]})"}}, because: private.{inner[0]}}}',
                "    # TODO one near miss for each number and attribute of the pattern",
            ]
        return lines

    def _typed(self, value: Value) -> str:
        dtype, shape = self._type(value)
        dims = "" if shape is None else ",".join(str(d) if isinstance(d, int) else f"D{i}" for i, d in enumerate(shape))
        kind = {"float32": "float", "float64": "double"}.get(dtype, dtype)
        return f"{kind}[{dims}] {self.names[value]}"

    def _declarations(self) -> tuple[list[str], dict[Value, str]]:
        declared = [self._typed(v) for v in [*(g for g in self.given if isinstance(g, Constant)), *self.weights]]
        numbers: dict[Value, str] = {}
        for node in self.nodes:
            for value in node.inputs:
                if isinstance(value, Constant) and value not in self.names and value not in numbers:
                    numbers[value] = f"c{len(numbers)}"
                    declared.append(_with_data(value, numbers[value]))
        return declared, numbers

    def _statement(self, node: Node, numbers: dict[Value, str]) -> str:
        domain = view.domain(node)
        operands = ["" if is_empty(v) else numbers.get(v) or self.names[v] for v in node.inputs]
        outputs = [self.names.get(v, f"unused{i}") for i, v in enumerate(node.outputs)]
        attrs = ", ".join(f"{k}={_onnx_text(v)}" for k, v in node.attrs.items())
        shown = f" <{attrs}>" if attrs else ""
        return f"{', '.join(outputs)} = {f'{domain}.' if domain else ''}{node.op}{shown} ({', '.join(operands)})"


def _number(value: Any) -> Any:
    """A float as short as float32 tells it apart; integers as integers."""
    if isinstance(value, float):
        if value == int(value) and abs(value) < 1e6:
            return int(value)
        return float(f"{np.float32(value):.9g}")
    return value


def _yaml(value: Any) -> str:
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, bool):
        return str(int(value))
    if isinstance(value, float):
        text = f"{np.float32(value):.8g}"
        return text if any(c in text for c in ".en") else text + ".0"
    if isinstance(value, list):
        return "[" + ", ".join(map(_yaml, value)) + "]"
    return str(value)


def _onnx_text(value: Any) -> str:
    if isinstance(value, (bytes, str)):
        text = value.decode() if isinstance(value, bytes) else value
        return f'"{text}"'
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_onnx_text, value)) + "]"
    if isinstance(value, float):
        text = f"{value:.9g}"
        return text if any(c in text for c in ".e") else text + ".0"
    return str(int(value)) if isinstance(value, (bool, np.integer)) else str(value)


def _with_data(value: Constant, name: str) -> str:
    array = consts.array(value)
    dtype = consts.dtype_of(value) or "float32"
    if dtype in ("float16", "bfloat16"):
        items: Iterable[Any] = np.ascontiguousarray(array).view(np.uint16).reshape(-1).tolist()  # its text form is bits
    else:
        items = array.reshape(-1).tolist()
    kind = {"float32": "float", "float64": "double"}.get(dtype, dtype)
    shape = ",".join(map(str, array.shape))
    return f"{kind}{f'[{shape}]' if array.shape else ''} {name} = {{{', '.join(_data(i) for i in items)}}}"


def _data(item: Any) -> str:
    if isinstance(item, bool):
        return str(int(item))
    return f"{item:.9g}" if isinstance(item, float) else str(item)
