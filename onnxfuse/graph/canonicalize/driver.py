"""The passes in their order, run until nothing changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from onnxfuse.graph import edit, view
from onnxfuse.graph.canonicalize import (
    conditionals,
    cuts,
    duplicates,
    einsum,
    folding,
    gathers,
    linear,
    merged,
    operands,
    reductions,
    redundant,
    reshapes,
    sequences,
    sizes,
    targets,
    transposes,
)
from onnxfuse.graph.canonicalize.scope import Scope
from onnxfuse.graph.ir import Graph
from onnxfuse.graph.shapes import Inference

if TYPE_CHECKING:
    from onnxfuse.graph.model import Model

Pass = Callable[[Scope], int]

#: Every pass, in the order in which a round runs them; each returns how many changes it made to a graph.
PASSES: dict[str, Pass] = {
    "constant-nodes": folding.constant_nodes,
    "known-content": folding.known_content,
    "redundant-nodes": redundant.remove_redundant,
    "sequences": sequences.members_of_sequences,
    "redundant-casts": redundant.remove_casts,
    "duplicate-constants": duplicates.merge_constants,
    "duplicate-nodes": duplicates.merge_nodes,
    "root-sizes": sizes.root_sizes,
    "duplicate-sizes": duplicates.merge_sizes,
    "fold-constants": folding.fold_constants,
    "fold-parts": folding.fold_parts,
    "reshape-targets": targets.reshape_targets,
    "expand-targets": targets.expand_targets,
    "slice-bounds": targets.slice_bounds,
    "flatten-to-reshape": targets.flatten_to_reshape,
    "einsum": einsum.einsum_to_products,
    "gathered-rows": gathers.gather_nd_of_rows,
    "no-op-shapes": redundant.remove_no_op_shapes,
    "flattened-products": linear.unflatten_products,
    "split-biases": linear.bias_before_split,
    "batched-products": linear.unflatten_batched_products,
    "batched-transposes": transposes.transposes_of_flattened,
    "merged-heads": merged.sink_merged_heads,
    "split-heads": merged.split_merged_heads,
    "reshape-to-unsqueeze": reshapes.reshape_to_unsqueeze,
    "merge-reshapes": reshapes.merge_reshapes,
    "merge-unsqueezes": reshapes.merge_unsqueezes,
    "split-columns": cuts.slice_split_columns,
    "parts-of-concats": cuts.operands_of_concats,
    "reduction-axes": reductions.reduction_axes,
    "kept-dims": reductions.keep_reduced_dims,
    "merge-transposes": transposes.merge_transposes,
    "sum-transposes": transposes.sink_equal_transposes,
    "raised-transposes": transposes.raise_transposes,
    "constant-transposes": transposes.fold_constant_transposes,
    "operand-order": operands.constants_second,
    "scalar-constants": operands.scalar_constants,
    "filled-operands": operands.filled_operands,
    "neutral-operands": operands.remove_neutral,
    "unexpanded-operands": operands.unexpanded_operands,
    "known-conditions": operands.known_conditions,
    "known-branches": conditionals.inline_known_branches,
}

#: Rounds are bounded, in case two passes should ever undo each other's work.
MAX_ROUNDS = 12


def canonicalize(model: Model, engine: Inference | None = None) -> dict[str, int]:
    """Bring the model to the canonical form, in place.

    Args:
        engine: infers the model's shapes; afterwards it is ready for single nodes.

    Returns:
        The number of changes by pass, and ``dead-nodes``. Shapes and contents of all values are inferred at the end.
    """
    counts = dict.fromkeys((*PASSES, "dead-nodes"), 0)
    engine = engine or Inference(model)
    for graph in _roots(model):
        edit.sort(graph)
    for _ in range(MAX_ROUNDS):
        engine.run()
        before = sum(counts.values())
        for scope in _scopes(model, engine):
            for name, apply in PASSES.items():
                changes = apply(scope)
                scope.place_insertions()
                if changes:
                    counts[name] += changes
                    counts["dead-nodes"] += edit.remove_dead(scope.graph)
                    scope.changed()
        for root in _roots(model):
            counts["dead-nodes"] += edit.remove_dead(root)
        if sum(counts.values()) == before:
            break
    else:
        engine.run()
    return counts


def _roots(model: Model) -> list[Graph]:
    return [model.graph, *model.functions]


def _scopes(model: Model, engine: Inference) -> Iterator[Scope]:
    for graph in list(view.all_graphs(model.graph)):
        yield Scope(graph, model.names, engine, model.opsets)
    for function in model.functions:
        with engine.inside(function) as opsets:
            graphs = list(view.all_graphs(function))
            names = edit.Names(graphs)
            for graph in graphs:
                yield Scope(graph, names, engine, opsets)
