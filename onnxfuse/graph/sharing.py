"""Constants that several graphs of a model hold alike are stored once."""

from __future__ import annotations

from collections.abc import Hashable

from onnxfuse.graph import view
from onnxfuse.graph.canonicalize.duplicates import constant_key
from onnxfuse.graph.ir import Constant, Deferred
from onnxfuse.graph.model import Model


def share_constants(model: Model) -> int:
    """Let the branches of an If (and other subgraphs) read one constant where each has its own.

    Both branches of a merged decoder read the same captured weights, and what a rewrite makes of a weight in one of
    them is made again in the other. Constants that come from the same sources in the same way, or have the same small
    content, become one, which the main graph then stores.

    Returns:
        how many operands were replaced.
    """
    graphs = list(view.all_graphs(model.graph))
    if len(graphs) == 1:
        return 0
    first: dict[Hashable, Constant] = {}
    count = 0
    for graph in graphs:
        for node in graph.nodes:
            for index, value in enumerate(node.inputs):
                if not isinstance(value, Constant):
                    continue
                kept = first.setdefault(_key(value), value)
                if kept is not value:
                    node.inputs[index] = kept
                    count += 1
    return count


def _key(value: Constant) -> Hashable:
    if value.recipe is None or not isinstance(value._values, Deferred):
        return constant_key(value)
    function, sources, params = value.recipe
    made_of = tuple(None if source is None else _key(source) for source in sources)
    return function, made_of, str(value._values.dtype), tuple(value._values.shape), repr(sorted(params.items()))
