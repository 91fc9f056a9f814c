"""Group what was removed and what was added into changed regions, and fold equal regions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from onnxfuse.diff import keys
from onnxfuse.diff.align import Alignment
from onnxfuse.graph import consts, view
from onnxfuse.graph.ir import Constant, Node

Signature = tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]
"""Ops removed, ops added, changes: what makes two regions alike."""

Join = Callable[[Node | None, Node | None], None]


@dataclass(frozen=True)
class Region:
    """A place where the models differ, `count` times in the same way.

    `removed` and `added` are op names in order; `changes` lists attributes of a node that stayed the same op;
    `example` names a value there in the first model (or in the second, when nothing was removed).
    """

    removed: tuple[str, ...]
    added: tuple[str, ...]
    changes: tuple[str, ...]
    count: int
    example: str


def op_name(node: Node) -> str:
    domain = view.domain(node)
    return f"{domain}::{node.op}" if domain else node.op


def changed_regions(alignment: Alignment, opset_before: int, opset_after: int) -> list[Region]:
    """All differences, equal ones folded, most frequent first (file order among equals)."""
    groups = _connected(alignment)
    folded: dict[Signature, list[str]] = {}
    for removed, added in groups:
        changes: tuple[str, ...] = ()
        if len(removed) == len(added) == 1 and op_name(removed[0]) == op_name(added[0]):
            changes = _changes(removed[0], added[0], opset_before, opset_after)
        signature = (tuple(map(op_name, removed)), tuple(map(op_name, added)), changes)
        folded.setdefault(signature, []).append((removed or added)[0].outputs[0].name)
    regions = [Region(*key, count=len(names), example=names[0]) for key, names in folded.items()]
    return sorted(regions, key=lambda r: -r.count)


def _changes(a: Node, b: Node, opset_before: int, opset_after: int) -> tuple[str, ...]:
    found = []
    first, second = keys.attributes(a, opset_before), keys.attributes(b, opset_after)
    for name in sorted(first.keys() | second.keys()):
        if first.get(name) != second.get(name):
            found.append(f"{name}: {first.get(name, 'default')} → {second.get(name, 'default')}")
    for index in range(max(len(a.inputs), len(b.inputs))):
        mine, theirs = _operand(a, index), _operand(b, index)
        if mine != theirs:
            found.append(f"operand {index}: {mine} → {theirs}")
    return tuple(found)


def _operand(node: Node, index: int) -> str:
    if index >= len(node.inputs) or node.inputs[index].name == "":
        return "absent"
    constant = keys.constant_of(node.inputs[index])
    if constant is None:
        return "computed"
    text, _, content = keys.constant_key(constant, content=False).partition(":")
    if content:
        array = consts.array(constant) if isinstance(constant, Constant) else constant
        return f"constant {text} {array.reshape(-1).tolist() if array.ndim else array.item()}"
    return f"constant {text}"


def _connected(alignment: Alignment) -> list[tuple[list[Node], list[Node]]]:
    """Components of changed nodes: joined by an edge, or by standing between the same unchanged neighbours."""
    parent: dict[Node, Node] = {}
    removed, added = alignment.removed(), alignment.added()
    for node in [*removed, *added]:
        parent[node] = node

    def find(node: Node) -> Node:
        while parent[node] is not node:
            parent[node] = parent[parent[node]]
            node = parent[node]
        return node

    def join(a: Node | None, b: Node | None) -> None:
        if a is not None and b is not None and a in parent and b in parent:
            parent[find(a)] = find(b)

    for node in [*removed, *added]:
        for value in node.inputs:
            join(node, view.producer(value))
    for a, b in alignment.partner.items():
        for first, second in zip(a.inputs, b.inputs, strict=False):
            join(view.producer(first), view.producer(second))
    _join_outputs(alignment, join)
    _join_inputs(removed, added, alignment, join)
    groups: dict[Node, tuple[list[Node], list[Node]]] = {}
    for side, nodes in enumerate((removed, added)):
        for node in nodes:
            groups.setdefault(find(node), ([], []))[side].append(node)
    return list(groups.values())


def _join_outputs(alignment: Alignment, join: Join) -> None:
    for a, b in zip(alignment.before_graph.outputs, alignment.after_graph.outputs, strict=False):
        join(view.producer(a), view.producer(b))


def _join_inputs(removed: list[Node], added: list[Node], alignment: Alignment, join: Join) -> None:
    """A removed and an added node that read the same unchanged value, when nothing downstream joined them."""
    readers: dict[int, Node] = {}
    for node in removed:
        for value in node.inputs:
            maker = view.producer(value)
            if maker in alignment.partner:
                other = alignment.partner[maker]
                readers.setdefault(id(other.outputs[_index(maker, value)]), node)
    for node in added:
        for value in node.inputs:
            join(node, readers.get(id(value)))


def _index(node: Node, value: object) -> int:
    return next(i for i, v in enumerate(node.outputs) if v is value)


def op_changes(before: list[Node], after: list[Node]) -> list[tuple[str, int, int]]:
    """(op, count before, count after) for every op whose count changed, largest change first."""
    first, second = Counter(map(op_name, before)), Counter(map(op_name, after))
    rows = [(op, first[op], second[op]) for op in first.keys() | second.keys() if first[op] != second[op]]
    return sorted(rows, key=lambda r: (-abs(r[2] - r[1]), r[0]))
