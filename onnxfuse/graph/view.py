"""Read-only questions about a graph."""

from __future__ import annotations

from collections.abc import Iterator

import onnx_graphsurgeon as gs

from onnxfuse.graph.ir import Graph, Node, Value


def producer(value: Value) -> Node | None:
    """The node that makes the value; None for graph inputs, constants and omitted values."""
    return value.inputs[0] if value.inputs else None


def consumers(value: Value) -> list[Node]:
    """The distinct nodes that read the value, in this graph and in subgraphs that capture it."""
    readers = value.outputs
    return list(dict.fromkeys(readers)) if len(readers) > 1 else list(readers)


def domain(node: Node) -> str:
    """The node's domain, with ONNX's own spelled as the empty string."""
    return "" if node.domain in (None, "ai.onnx") else node.domain


def subgraphs(node: Node) -> list[Graph]:
    """The node's own subgraphs (branches of If, bodies of Loop and Scan), not nested ones."""
    return [a for a in node.attrs.values() if isinstance(a, gs.Graph)]


def all_graphs(graph: Graph) -> Iterator[Graph]:
    """The graph and, recursively, every subgraph in it."""
    yield graph
    for node in graph.nodes:
        for attr in node.attrs.values():
            if isinstance(attr, gs.Graph):
                yield from all_graphs(attr)


def is_graph_output(graph: Graph, value: Value) -> bool:
    return any(value is output for output in graph.outputs)


def describe(node: Node) -> str:
    """How messages name a node: op and output, since node names are often empty."""
    name = node.outputs[0].name if node.outputs else node.name
    return f"{node.op} `{name}`"
