"""`Linear` and `GatedLinear`: kept and prepared for our kernels, or taken apart into products of the target's own."""

from __future__ import annotations

from typing import Any

from onnxfuse.graph import consts, view
from onnxfuse.graph.ir import Constant, Node, Value, Variable
from onnxfuse.lower import choices, weights
from onnxfuse.lower.emit import Emitter, dtype_of, operand, rank_of, shape_of
from onnxfuse.lower.kernels import KernelTable
from onnxfuse.lower.report import LoweringReport
from onnxfuse.lower.standard import (
    bias_activation_kernel,
    emit_activation,
    is_layer_norm,
)
from onnxfuse.lower.unfold import packed_parts, unscaled
from onnxfuse.ops import registry
from onnxfuse.ops.opdef import FUSED_DOMAIN, STD_DOMAIN

_NORMS = {"rms": "RMSNormalization", "layer": "LayerNormalization"}


class LinearLowering:
    """Lowers the fused products of one graph.

    Norms that several products share are computed once: `_normed` remembers them.
    """

    def __init__(self, emitter: Emitter, kernels: KernelTable, report: LoweringReport) -> None:
        self.emitter = emitter
        self.kernels = kernels
        self.report = report
        self._normed: dict[tuple[int, str, float, int, int], Value] = {}
        self._done: set[Node] = set()

    def lower(self, node: Node) -> bool:
        """Handle a node of the `onnxfuse` domain, or a Split that belongs to one. False: none of ours."""
        if node in self._done:
            return True
        if view.domain(node) != FUSED_DOMAIN:
            return False
        if node.op == "Linear":
            self._linear(node)
        elif node.op == "GatedLinear":
            self._gated(node)
        else:
            return False
        return True

    # -- choosing --------------------------------------------------------------------------------------------------

    def _linear(self, node: Node) -> None:
        attrs = _attrs(node)
        plain = attrs["norm"] == "none" and attrs["activation"] == "none"
        plain = plain and operand(node, 2) is None and operand(node, 3) is None
        choice = choices.linear(self.kernels, dtype_of(node.inputs[0]), plain=plain)
        name = node.outputs[0].name
        if choice.keep:
            self._prepare(node, attrs)
            return
        split = self._packing_split(node)
        if split is not None and not choices.CPU_PACKED.keep and self.kernels.target.provider == "cpu":
            self.report.take_apart("onnxfuse::Linear", name, choices.CPU_PACKED.reason)
            self._unpack(node, split, attrs)
            return
        if not plain:
            self.report.take_apart("onnxfuse::Linear", name, choice.reason)
        self._linear_apart(node, attrs)

    def _gated(self, node: Node) -> None:
        attrs = _attrs(node)
        choice = choices.gated_linear(self.kernels, dtype_of(node.inputs[0]))
        if choice.keep:
            self._prepare(node, attrs)
            return
        self.report.take_apart("onnxfuse::GatedLinear", node.outputs[0].name, choice.reason)
        self._gated_apart(node, attrs)

    # -- kept ------------------------------------------------------------------------------------------------------

    def _prepare(self, node: Node, attrs: dict[str, Any]) -> None:
        """Bring the constants into the form that the target's kernel wants."""
        if self.kernels.target.provider == "cuda":
            self._to_rows(node, attrs)
            if node.op == "GatedLinear":
                self._interleave(node, attrs)
            self._add_column_sums(node, attrs)
        self.report.keep(f"{FUSED_DOMAIN}::{node.op}")
        self.emitter.keep(node)

    def _to_rows(self, node: Node, attrs: dict[str, Any]) -> None:
        weight = node.inputs[1]
        # A weight with other readers stays as it is: a transposed copy would be a second one.
        if attrs["layout"] == "KN" and isinstance(weight, Constant) and len(view.consumers(weight)) == 1:
            node.inputs[1] = weights.transposed(self.emitter, weight)
            node.attrs["layout"] = attrs["layout"] = "NK"

    def _interleave(self, node: Node, attrs: dict[str, Any]) -> None:
        width, weight, bias = choices.CUDA_INTERLEAVE, node.inputs[1], operand(node, 2)
        if attrs["interleave"] or attrs["layout"] != "NK" or not isinstance(weight, Constant):
            return
        if len(view.consumers(weight)) != 1 or not (bias is None or isinstance(bias, Constant)):
            return
        if consts.shape_of(weight)[0] % (2 * width):
            return
        node.inputs[1] = weights.interleaved(self.emitter, weight, width)
        if bias is not None:
            node.inputs[2] = weights.interleaved(self.emitter, bias, width)
        node.attrs["interleave"] = width

    def _add_column_sums(self, node: Node, attrs: dict[str, Any]) -> None:
        index = registry.get(FUSED_DOMAIN, node.op).input_index("colsum")
        weight = node.inputs[1]
        if attrs["norm"] != "layer" or attrs["layout"] != "NK" or operand(node, index) is not None:
            return
        if not isinstance(weight, Constant):
            return
        while len(node.inputs) < index:
            node.inputs.append(Variable(""))
        while len(node.inputs) > index:
            del node.inputs[-1]
        node.inputs.append(weights.column_sums(self.emitter, weight))

    # -- taken apart -----------------------------------------------------------------------------------------------

    def _packing_split(self, node: Node) -> Node | None:
        """The Split that a rewrite put behind this node when it packed several products, if that is its only reader."""
        out = node.outputs[0]
        readers = view.consumers(out)
        if len(readers) != 1 or view.is_graph_output(self.emitter.graph, out) or operand(node, 3) is not None:
            return None
        split = readers[0]
        if split.op != "Split" or split.origin is None or _split_sizes(split) is None:
            return None
        weight, bias = node.inputs[1], operand(node, 2)
        constant = isinstance(weight, Constant) and (bias is None or isinstance(bias, Constant))
        rank = rank_of(node.inputs[0])
        last = split.attrs.get("axis", 0) in (-1, None if rank is None else rank - 1)
        return split if constant and last and len(view.consumers(weight)) == 1 else None

    def _unpack(self, node: Node, split: Node, attrs: dict[str, Any]) -> None:
        sizes = _split_sizes(split)
        assert sizes is not None
        inputs, _ = self.emitter.replace(node)
        x, weight, bias = inputs[0], inputs[1], inputs[2] if len(inputs) > 2 else None
        assert x is not None
        _, outs = self.emitter.replace(split)
        self._done.add(split)
        x, weight, bias = self._norm(x, weight, bias, attrs)
        for (part, vector), out in zip(self._parts(weight, bias, attrs["layout"], sizes), outs, strict=True):
            self._product(x, part, attrs["layout"], vector, attrs["activation"], None, out)

    def _linear_apart(self, node: Node, attrs: dict[str, Any]) -> None:
        inputs, outputs = self.emitter.replace(node)
        x, weight, bias, residual = [*inputs, None, None][:4]
        assert x is not None
        x, weight, bias = self._norm(x, weight, bias, attrs)
        self._product(x, weight, attrs["layout"], bias, attrs["activation"], residual, outputs[0])

    def _gated_apart(self, node: Node, attrs: dict[str, Any]) -> None:
        weight, bias = node.inputs[1], operand(node, 2)
        constant = isinstance(weight, Constant) and (bias is None or isinstance(bias, Constant))
        if attrs["interleave"] or not constant or len(view.consumers(weight)) != 1:
            self.emitter.expand(node)
            return
        inputs, outputs = self.emitter.replace(node)
        x = inputs[0]
        assert x is not None
        x, weight, bias = self._norm(x, weight, bias, attrs)
        shape = shape_of(weight)
        assert shape is not None
        features = shape[0 if attrs["layout"] == "NK" else 1] // 2
        parts = self._parts(weight, bias, attrs["layout"], [features, features])
        halves = [
            self._product(x, part, attrs["layout"], vector, activation, None, None)
            for (part, vector), activation in zip(parts, (attrs["activation"], "none"), strict=True)
        ]
        self.emitter.op("Mul", halves, out=outputs[0])

    def _parts(
        self, weight: Value, bias: Value | None, layout: str, sizes: list[int]
    ) -> list[tuple[Constant, Constant | None]]:
        assert isinstance(weight, Constant) and (bias is None or isinstance(bias, Constant))
        return packed_parts(self.emitter, weight, bias, layout, sizes)

    def _norm(
        self, x: Value, weight: Value | None, bias: Value | None, attrs: dict[str, Any]
    ) -> tuple[Value, Value, Value | None]:
        """(x normalized, weight, bias): what fuse folded into weight and bias goes back to the norm."""
        assert weight is not None
        if attrs["norm"] == "none":
            return x, weight, bias
        shape, dtype = shape_of(x), dtype_of(x)
        size = shape[-1] if shape else None
        assert isinstance(size, int) and dtype is not None, "K is known from the weight"
        scale: Value = self.emitter.ones(size, dtype)
        shift: Value | None = None
        original = unscaled(weight, bias)
        if original is not None and dtype_of(original.scale) == dtype and consts.size_of(original.scale) == size:
            weight, bias, scale, shift = original.weight, original.bias, original.scale, original.shift
        key = (id(x), attrs["norm"], attrs["epsilon"], id(scale), id(shift))
        if key not in self._normed:
            inputs = [x, scale] if attrs["norm"] == "rms" else [x, scale, shift]
            attributes = {"axis": -1, "epsilon": attrs["epsilon"]}
            self._normed[key] = self.emitter.op(_NORMS[attrs["norm"]], inputs, domain=STD_DOMAIN, attrs=attributes)
        return self._normed[key], weight, bias

    def _product(
        self, x: Value, weight: Value, layout: str, bias: Value | None, activation: str, residual: Value | None,
        out: Value | None,
    ) -> Value:
        """activation(x · W + bias) + residual in ONNX Runtime's own ops."""
        emitter = self.emitter
        leading, columns = shape_of(x), shape_of(weight)
        n = columns[0 if layout == "NK" else 1] if columns else None
        shape = None if leading is None else (*leading[:-1], n)
        steps = [bias is not None, activation != "none", residual is not None]

        def last(index: int) -> Value | None:
            """`out` for the step after which none follows."""
            return None if any(steps[index:]) else out

        two_d = leading is not None and len(leading) == 2
        biased = bias is not None and bias_activation_kernel(emitter, self.kernels, dtype_of(x), activation)
        if two_d and not biased and (bias is not None or layout == "NK"):
            steps[0] = False
            y = emitter.op("Gemm", [x, weight, bias], attrs={"transB": int(layout == "NK")}, out=last(1), shape=shape)
            bias = None
        else:
            y = emitter.op("MatMul", [x, self._as_columns(weight, layout)], out=last(0), shape=shape)
        if biased:
            domain, op = biased
            y = emitter.op(op, [y, bias], domain=domain, out=last(2))
        elif activation == "none" and bias is not None and residual is not None and self._has_sum(x):
            return emitter.op("Sum", [y, bias, residual], out=out)
        else:
            if bias is not None:
                y = emitter.op("Add", [y, bias], out=last(1))
            if activation != "none":
                y = emit_activation(emitter, activation, y, last(2))
        if residual is None:
            return y
        before_norm = out is not None and any(is_layer_norm(reader) for reader in view.consumers(out))
        return emitter.op("Sum" if before_norm and self._has_sum(x) else "Add", [y, residual], out=out)

    def _has_sum(self, x: Value) -> bool:
        return choices.sum_before_layer_norm(self.emitter, self.kernels, dtype_of(x))

    def _as_columns(self, weight: Value, layout: str) -> Value:
        """The weight as [K, N]. A weight with other readers is transposed by a node, which ONNX Runtime folds when it
        loads the model, so that the file holds it once."""
        if layout == "KN":
            return weight
        shape = shape_of(weight)
        if isinstance(weight, Constant) and not view.consumers(weight):
            return weights.transposed(self.emitter, weight)
        return self.emitter.op("Transpose", [weight], attrs={"perm": [1, 0]}, shape=shape[::-1] if shape else None)


def _attrs(node: Node) -> dict[str, Any]:
    return registry.get(FUSED_DOMAIN, node.op).resolve(dict(node.attrs))


def _split_sizes(split: Node) -> list[int] | None:
    if "split" in split.attrs:
        return [int(s) for s in split.attrs["split"]]
    return consts.ints(split.inputs[1]) if len(split.inputs) > 1 else None
