"""Forward propagation of dtypes, shapes and the symbolic content of small integer tensors over a whole model.

``infer(model)`` fills in, for every value of every graph:

* ``value.dtype``: a dtype name of ``graph.types``, or None;
* ``value.shape``: a tuple of ``int`` and ``dims.Dim``, or None when the rank is unknown;
* ``value.content``: for integer and bool tensors of at most 64 elements, a nested tuple of ``int``, ``bool`` and
  ``Dim`` (a bare one for a scalar), or None.

Every claim holds for all sizes of the named input dimensions (≥ 0) for which the model runs at all, with one exception:
a size that the model computes for a `Reshape` and that turns out zero is taken for zero, although ONNX reads it as
"copy the input's size at this place" (which is the same unless the size moves to another place). Ops outside of the
table go through ONNX's own inference for that node; what is still unknown stays None.
"""

from onnxfuse.graph.shapes import contrib, control, elementwise, indexing, matrix, reduction, resizing, structure  # noqa: F401
from onnxfuse.graph.shapes.engine import Inference, check_outputs, infer
from onnxfuse.graph.shapes.table import Call, Unknown, register, register_types

__all__ = ["Call", "Inference", "Unknown", "check_outputs", "infer", "register", "register_types"]
