"""A model as a reader sees it: its main ops in order, repeated layers folded, data movement counted.

Layers are found by structure alone: the longest stretch of ops that repeats. A layer that differs from its neighbours,
for example because one fusion was missed there, breaks the repetition and so stands out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import onnx
from onnx import ModelProto, NodeProto

from onnxfuse.graph.ir import RULE_KEY
from onnxfuse.inspection.model import node_cost, op_name
from onnxfuse.inspection.sizes import Sizes
from onnxfuse.ops.opdef import FUSED_DOMAIN, TensorType

#: Ops that arrange data; shown as a number, not one by one.
_PLUMBING = frozenset({
    "Shape", "Size", "Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity", "Transpose", "Slice", "Concat", "Split",
    "Expand", "Tile", "Gather", "GatherND", "GatherElements", "ScatterND", "ScatterElements", "Cast", "CastLike",
    "Constant", "ConstantOfShape", "Range", "Pad", "Trilu", "Where", "Dropout",
})  # fmt: skip
#: Fused ops that ONNX itself, or ONNX Runtime in ONNX's domain, has.
_NATIVE = frozenset({
    "Attention", "Gelu", "GroupNormalization", "HardSwish", "LayerNormalization", "RMSNormalization",
    "RotaryEmbedding", "SimplifiedLayerNormalization", "Swish",
})  # fmt: skip
_FLOATS = frozenset({"float32", "float16", "bfloat16", "float64", None})
#: Whole-number attributes worth showing.
_TELLING = frozenset({"num_heads", "kv_num_heads", "q_num_heads", "is_causal", "unidirectional", "do_rotary"})
#: A layer has at least so many main ops; shorter repetitions (three equal projections) are not layers.
_SHORTEST_LAYER = 2
_LONGEST_LAYER = 120
#: A value whose readers lie further apart than this share of the graph's depth belongs to no single layer.
_SHARED_SPAN = 0.3


Signature = tuple[str, str, str]
"""Op, note and shape: what makes two steps alike."""


@dataclass(frozen=True)
class Step:
    """One main op. `note` lists attributes that say something; `flops` is of one run; `rule` made the node, if any."""

    op: str
    value: str
    note: str
    shape: str
    fused: bool
    rule: str | None
    flops: int
    plumbing: int = 0

    @property
    def signature(self) -> Signature:
        return self.op, self.note, self.shape


@dataclass(frozen=True)
class Group:
    """`steps` occur `count` times in a row; `values` are the outputs of all of them, for looking up misses."""

    steps: tuple[Step, ...]
    count: int
    values: tuple[str, ...] = field(default=())


def layers(model: ModelProto, sizes: Sizes, rules: Mapping[str, str] | None = None) -> list[Group]:
    """The model's main graph as groups of steps.

    Args:
        sizes: of all values, for shapes and operations.
        rules: rule id by value name, for nodes without metadata.
    """
    steps = _steps(model, sizes, rules or {})
    return _fold(steps)


def _steps(model: ModelProto, sizes: Sizes, rules: Mapping[str, str]) -> list[Step]:
    found: list[Step] = []
    plumbing = 0
    for node in _reading_order(model):
        if _is_plumbing(node, sizes):
            plumbing += node.op_type != "Constant"
            continue
        cost = node_cost(node, sizes)
        value = node.output[0]
        rule = next((m.value for m in node.metadata_props if m.key == RULE_KEY), rules.get(value))
        found.append(
            Step(
                op=op_name(node), value=value, note=_note(node), shape=_shape(sizes.types.get(value)),
                fused=node.domain not in ("", "ai.onnx") or node.op_type in _NATIVE, rule=rule,
                flops=cost.flops if cost else 0, plumbing=plumbing,
            )
        )  # fmt: skip
        plumbing = 0
    return found


def _reading_order(model: ModelProto) -> list[NodeProto]:
    """Nodes in an order that follows from the structure, so that equal layers read equally: what many layers share
    (rotary tables, masks) first, then depth first from the outputs."""
    nodes = list(model.graph.node)
    maker = {name: index for index, node in enumerate(nodes) for name in node.output if name}
    needs = [[maker[n] for n in node.input if n in maker] for node in nodes]
    depth = [0] * len(nodes)
    readers: dict[int, list[int]] = {}
    for index, above in enumerate(needs):
        depth[index] = 1 + max((depth[i] for i in above), default=0)
        for i in above:
            readers.setdefault(i, []).append(index)
    tallest = max(depth, default=0)
    shared = [
        index for index, below in readers.items()
        if max(depth[i] for i in below) - min(depth[i] for i in below) > _SHARED_SPAN * tallest
    ]  # fmt: skip
    ends = [maker[o.name] for o in model.graph.output if o.name in maker]
    done: set[int] = set()
    ordered: list[NodeProto] = []
    for root in [*sorted(shared, key=lambda i: depth[i]), *ends, *range(len(nodes))]:
        stack = [(root, iter(needs[root]))]
        while stack:
            index, waiting = stack[-1]
            if index in done:
                stack.pop()
                continue
            following = next((i for i in waiting if i not in done), None)
            if following is None:
                done.add(index)
                ordered.append(nodes[index])
                stack.pop()
            else:
                stack.append((following, iter(needs[following])))
    return ordered


def _is_plumbing(node: NodeProto, sizes: Sizes) -> bool:
    if node.domain == FUSED_DOMAIN:
        return False
    if node.op_type in _PLUMBING:
        return True
    dtypes = {sizes.types.get(name, TensorType()).dtype for name in node.output if name}
    return not dtypes & _FLOATS  # computes sizes, positions or masks


def _note(node: NodeProto) -> str:
    """Attributes that say which member of its family the op is; numbers such as epsilon do not."""
    shown = []
    for attribute in node.attribute:
        value = onnx.helper.get_attribute_value(attribute)
        if isinstance(value, bytes):
            text = value.decode(errors="replace")
            if text not in ("none", "NK", "KN", "NOTSET") and attribute.name != "layout":
                shown.append(f"{attribute.name} {text}")
        elif attribute.name in _TELLING and value:
            shown.append(f"{attribute.name} {value}")
    if node.domain == FUSED_DOMAIN:
        operands = ("x", "weight", "bias", "residual") if node.op_type == "Linear" else ("x", "weight", "bias")
        shown += [f"+ {name}" for name, given in zip(operands, node.input, strict=False) if given][2:]
    return ", ".join(shown)


def _shape(tensor: TensorType | None) -> str:
    if tensor is None or tensor.shape is None:
        return ""
    return "×".join("?" if d is None else str(d) for d in tensor.shape)


def _fold(steps: Sequence[Step], known: frozenset[tuple[Signature, ...]] = frozenset()) -> list[Group]:
    """The longest repetition first, then what is before and after it, cut where layers already found begin."""
    best = _longest_repetition([s.signature for s in steps], known)
    if best is None:
        return [_group(steps, 1)] if steps else []
    start, length, count = best
    end = start + length * count
    known |= {tuple(s.signature for s in steps[start : start + length])}
    return [
        *_fold(steps[:start], known),
        _group(steps[start : start + length], count, steps[start:end]),
        *_fold(steps[end:], known),
    ]


def _group(steps: Sequence[Step], count: int, covered: Sequence[Step] = ()) -> Group:
    return Group(tuple(steps), count, tuple(s.value for s in covered or steps))


def _longest_repetition(
    signatures: Sequence[Signature], known: frozenset[tuple[Signature, ...]]
) -> tuple[int, int, int] | None:
    """(start, length, count) of the repetition that covers most steps; of equal ones the shortest layer, then first."""
    best: tuple[int, int, int] | None = None
    covered = 0
    total = len(signatures)
    for length in range(_SHORTEST_LAYER, min(_LONGEST_LAYER, total // 2) + 1):
        run = 0
        for index in range(length, total + 1):
            if index < total and signatures[index] == signatures[index - length]:
                run += 1
                continue
            count = run // length + 1
            if count > 1 and length * count > covered:
                first = index - run - length
                # A repetition can be cut at any of these places; a layer that was seen before says where.
                cuts = range(first, first + run % length + 1)
                start = next((c for c in cuts if tuple(signatures[c : c + length]) in known), first)
                best, covered = (start, length, count), length * count
            run = 0
    return best
