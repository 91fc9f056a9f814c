"""Find the node of a fused model at which its values first differ from the original's, and cut it out.

Values that have the same name in both models are made outputs of both, in few runs: first some dozens spread over the
fused graph, then all between the last good and the first bad one. So a model of any depth takes two runs of each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper

from onnxfuse.errors import OutputError
from onnxfuse.runtime import archive, oracle
from onnxfuse.runtime.session import Runner
from onnxfuse.verify.compare import compare

#: How many values are looked at in the first round.
_FIRST_ROUND = 32


@dataclass
class Divergence:
    """Where it goes wrong.

    Attributes:
        node, op: the fused node that makes the value, by name and `domain::Op`.
        value: the first value that differs.
        rule: the rule that made the node, if the model says so.
        error, tolerance: of that value, relative to its largest magnitude.
        runs: session runs that the search took.
        last_good: the value before it that is still right.
    """

    node: str
    op: str
    value: str
    rule: str | None
    error: float
    tolerance: float
    runs: int
    last_good: str | None
    inputs: dict[str, np.ndarray]
    expected: dict[str, np.ndarray]

    def as_dict(self) -> dict[str, Any]:
        return {"node": self.node, "op": self.op, "value": self.value, "rule": self.rule, "error": self.error,
                "tolerance": self.tolerance, "runs": self.runs, "last_good": self.last_good}


def find(
    base: onnx.ModelProto, fused: onnx.ModelProto, feeds: Mapping[str, np.ndarray], *, dtype: str,
    provider: str = "cpu", base_dir: Path | None = None, fused_dir: Path | None = None, widened: bool = False,
    custom_ops: Sequence[str | Path] = (),
) -> Divergence | None:
    """The first node of the fused graph whose value differs from the original's value of that name.

    Args:
        base, fused: the two models.
        feeds: an input set on which their outputs differ.
        dtype: the narrowest float dtype of the original (it picks the tolerance).
        widened: run both in float32, since the provider cannot run them as they are.

    Returns:
        None if no common value differs.
    """
    positions = _common_values(base, fused)
    search = _Search(base, fused, feeds, dtype, provider, base_dir, fused_dir, widened, tuple(custom_ops))
    step = max(1, len(positions) // _FIRST_ROUND)
    sample = positions[step - 1 :: step]
    if positions and (not sample or sample[-1] != positions[-1]):
        sample.append(positions[-1])
    bad = search.first_bad(sample)
    if bad is None:
        return None
    start = positions.index(sample[sample.index(bad) - 1]) + 1 if sample.index(bad) else 0
    between = positions[start : positions.index(bad) + 1]
    first = search.first_bad(between) or bad
    at = positions.index(first)
    return search.describe(first, positions[at - 1] if at else None)


def _common_values(base: onnx.ModelProto, fused: onnx.ModelProto) -> list[str]:
    """Float values that both main graphs compute, in the order of the fused one."""
    theirs, ours = oracle.value_types(base), oracle.value_types(fused)
    made = {name for node in base.graph.node for name in node.output if name}
    floats = {n for n in made if theirs.get(n) in oracle.FLOATS and ours.get(n) in oracle.FLOATS}
    return [name for node in fused.graph.node for name in node.output if name in floats]


class _Search:
    def __init__(
        self, base: onnx.ModelProto, fused: onnx.ModelProto, feeds: Mapping[str, np.ndarray], dtype: str, provider: str,
        base_dir: Path | None, fused_dir: Path | None, widened: bool, custom_ops: tuple[str | Path, ...],
    ) -> None:
        self._models = {"base": (base, base_dir), "fused": (fused, fused_dir)}
        self._feeds = feeds
        self._dtype = dtype
        self._provider = provider
        self._widened = widened
        self._custom_ops = custom_ops
        self._types = {"base": oracle.value_types(base), "fused": oracle.value_types(fused)}
        self.runs = 0
        self._errors: dict[str, tuple[float, float]] = {}

    def values(self, which: str, names: Sequence[str]) -> dict[str, np.ndarray]:
        """Run one of the models with these inner values as outputs."""
        proto, folder = self._models[which]
        opened = onnx.ModelProto()
        opened.CopyFrom(proto)
        present = {o.name for o in opened.graph.output}
        for name in names:
            if name not in present:
                opened.graph.output.append(helper.make_tensor_value_info(name, self._types[which].get(name, onnx.TensorProto.FLOAT), None))
        self.runs += 1
        if self._widened:
            runner = oracle.runner(opened, "float32", self._provider, base_dir=folder, custom_ops=self._custom_ops)
            return runner.run(oracle.cast_feeds(self._feeds, "float32"))
        runner = Runner(opened, self._provider, base_dir=folder, custom_ops=self._custom_ops)
        return runner.run(self._feeds)

    def first_bad(self, names: Sequence[str]) -> str | None:
        if not names:
            return None
        ours, theirs = self.values("fused", names), self.values("base", names)
        for name in names:
            result = compare(ours[name], theirs[name], theirs[name], self._dtype)
            self._errors[name] = (result.error, result.tolerance)
            if not result.passed:
                return name
        return None

    def describe(self, value: str, last_good: str | None) -> Divergence:
        fused = self._models["fused"][0]
        node = next(n for n in fused.graph.node if value in n.output)
        rule = next((p.value for p in node.metadata_props if p.key == "onnxfuse.rule"), None)
        constants = {t.name for t in fused.graph.initializer}
        given = {i.name for i in fused.graph.input}
        wanted = [n for n in dict.fromkeys(node.input) if n and n not in constants and n not in given]
        fed = self.values("fused", wanted) if wanted else {}
        inputs = {n: fed[n] for n in wanted} | {n: self._feeds[n] for n in node.input if n in self._feeds}
        made = set(self._types["base"])
        expected = self.values("base", [n for n in node.output if n in made])
        error, tolerance = self._errors[value]
        return Divergence(
            node.name or value, f"{node.domain or 'ai.onnx'}::{node.op_type}", value, rule, error, tolerance, self.runs,
            last_good, inputs, {n: expected[n] for n in node.output if n in expected},
        )


def write_repro(found: Divergence, fused: onnx.ModelProto, folder: Path, fused_dir: Path | None = None) -> list[Path]:
    """Write the node alone as `repro.onnx`, with the values that went into it and what should have come out as
    `repro.npz` (keys `set0/in/<value>`, `set0/out/<value>`).

    Raises:
        OutputError: the folder cannot be written.
    """
    whole = oracle.self_contained(fused, fused_dir or Path()) if not fused.functions else fused
    node = next(n for n in whole.graph.node if found.value in n.output)
    needed = [t for t in whole.graph.initializer if t.name in node.input]

    def info(name: str, value: np.ndarray) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(value.dtype), list(value.shape))

    graph = helper.make_graph(
        [node], "repro", [info(n, v) for n, v in found.inputs.items()],
        [info(n, v) for n, v in found.expected.items()], initializer=needed,
    )
    model = helper.make_model(graph, opset_imports=list(whole.opset_import), ir_version=whole.ir_version)
    model.functions.extend(whole.functions)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        onnx.save(model, folder / "repro.onnx")
    except OSError as error:
        raise OutputError(f"cannot write `{folder}`: {error.strerror or error}") from error
    arrays = {f"set0/in/{n}": v for n, v in found.inputs.items()} | {
        f"set0/out/{n}": v for n, v in found.expected.items()}
    archive.save_arrays(folder / "repro.npz", arrays)
    return [folder / "repro.onnx", folder / "repro.npz"]

