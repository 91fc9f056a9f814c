"""The graph IR: GraphSurgeon's nodes and tensors, compared by identity.

GraphSurgeon compares nodes by content and tensors by name, which makes every edit of a consumer list a comparison of
whole nodes, and takes two equal nodes for one. Here an object equals only itself, so edits are cheap and exact and
nodes and values can be dictionary keys.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs
from onnx_graphsurgeon.ir.tensor import LazyValues

Graph = gs.Graph
Tensor = gs.Tensor


#: Key of the node metadata that names the rule a node comes from.
RULE_KEY = "onnxfuse.rule"


class Node(gs.Node):
    """A node. ``source`` is the ``NodeProto`` that it was read from, or None for one made by a rewrite;
    ``origin`` says which rule made it (rule id), or is None; ``made_for`` is the origin of the node that lowering put
    it in the place of. Either is written to the file, as node metadata under `RULE_KEY`."""

    source: Any = None
    origin: str | None = None
    made_for: str | None = None

    # `object`'s own, not a function: taking a reader out of a long list compares it with all before it.
    __hash__ = object.__hash__
    __eq__ = object.__eq__


class _Identity:
    """What Variable and Constant add: equality by identity, and the value's symbolic knowledge.

    ``content`` is the symbolic content of a small integer tensor, a (nested) tuple of int or Dim, filled in by
    ``shapes.infer``; None if unknown.
    """

    content: Any = None

    __hash__ = object.__hash__
    __eq__ = object.__eq__


class Variable(_Identity, gs.Variable):
    """A value computed at run time. ``dtype`` is a name such as ``float16`` (None if unknown); ``shape`` a tuple of
    int or ``Dim`` (None if the rank is unknown)."""


class Constant(_Identity, gs.Constant):
    """A value known before run time. Use ``consts.array`` to read it.

    ``recipe`` says how a rewrite made it: (weight function, sources, parameters), or is None for one that was read.
    """

    recipe: tuple[str, tuple[Any, ...], dict[str, Any]] | None = None


Value = Variable | Constant


class Deferred(LazyValues):
    """Tensor content that is computed when it is first read (or saved), from other constants.

    Folding weights of a large model is then paid once per tensor, at the end, and only for what is kept.
    """

    def __init__(self, shape: Sequence[int], dtype: np.dtype, compute: Callable[[], np.ndarray]) -> None:
        self.shape = list(shape)
        self.dtype = dtype
        self.nbytes = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        self._compute = compute
        self._loaded: weakref.ref[np.ndarray] | None = None

    def shared(self) -> np.ndarray:
        """The content, computed once for all who use it at the same time."""
        array = self._loaded() if self._loaded is not None else None
        if array is None:
            array = self.load()
            self._loaded = weakref.ref(array)
        return array

    def load(self) -> np.ndarray:
        array = np.asarray(self._compute(), order="C")  # not ascontiguousarray, which makes a number a vector
        if list(array.shape) != self.shape or array.dtype != self.dtype:
            raise AssertionError(
                f"deferred tensor: declared {self.dtype}{self.shape}, computed {array.dtype}{list(array.shape)}"
            )
        return array


def is_empty(value: Value) -> bool:
    """Whether this stands for an omitted optional input or output."""
    return value.name == ""
