"""Counts the transformer blocks of a model that are one op, or the prologue or epilogue of one.

The keys are those of the ``expected`` records of the model corpus: what a perfect fuser would find or keep. A block
counts when nothing of it is left as a separate op, whoever fused it: our ops, ONNX's own or ONNX Runtime's.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from onnxfuse.graph import consts, dims, view
from onnxfuse.graph.ir import Constant, Graph, Node, Value
from onnxfuse.graph.model import Model

_STD = "onnxfuse.std"
_FUSED = "onnxfuse"
_MS = "com.microsoft"

_RMS = {("", "RMSNormalization"), ("", "SimplifiedLayerNormalization"), (_STD, "RMSNormalization"),
        (_MS, "SkipSimplifiedLayerNormalization")}
_LAYER = {("", "LayerNormalization"), (_STD, "LayerNormalization"), (_MS, "SkipLayerNormalization"),
          (_MS, "EmbedLayerNormalization")}
_SKIP = {(_MS, "SkipLayerNormalization"), (_MS, "SkipSimplifiedLayerNormalization")}
_ATTENTION = {("", "Attention"), (_STD, "Attention"), (_FUSED, "Attention"), (_MS, "Attention"),
              (_MS, "MultiHeadAttention"), (_MS, "GroupQueryAttention"), (_MS, "SparseAttention"),
              (_MS, "PagedAttention"), (_MS, "DecoderMaskedMultiHeadAttention")}
_ROTARY = {("", "RotaryEmbedding"), (_STD, "RotaryEmbedding"), (_FUSED, "RotaryEmbedding"), (_MS, "RotaryEmbedding"),
           (_MS, "GemmaRotaryEmbedding")}
_KEY_OF_NORM = {"rms": "rmsnorm", "layer": "layernorm"}
_KEY_OF_ACTIVATION = {"gelu": "gelu_erf", "gelu_tanh": "gelu_tanh", "quick_gelu": "quick_gelu", "silu": "silu",
                      "relu": "relu", "tanh": "tanh"}
_KEY_OF_GATE = {"silu": "swiglu", "gelu": "geglu", "gelu_tanh": "geglu", "relu": "reglu"}


def count(model: Model, *, bias_behind: bool = False) -> dict[str, Any]:
    """The blocks of the main graph and its subgraphs: ``{"rmsnorm": 5, "shared_input_matmul_groups": {"3": 2}, …}``.

    Two things cannot be read from a graph and are left out: whether a norm's scale was stored as 1 + w, and whether a
    norm whose shift was folded into a bias had one (the product then counts as one with bias). A packed product counts
    as several only if a rewrite packed it: one that was exported packed is one linear layer.

    Args:
        model: with inferred shapes.
        bias_behind: also count products whose bias (and activation) is part of the op behind them, which is as far as
            other optimizers go: BiasGelu, FastGelu with a bias, skip norms with a bias, MultiHeadAttention with biases.
    """
    counter = _Counter(bias_behind)
    for graph in view.all_graphs(model.graph):
        counter.graph(graph)
    return counter.result()


class _Counter:
    def __init__(self, bias_behind: bool) -> None:
        self.bias_behind = bias_behind
        self.found: Counter[str] = Counter()
        self.groups: Counter[str] = Counter()
        self._norms: set[tuple[int, str, int]] = set()

    def result(self) -> dict[str, Any]:
        result: dict[str, Any] = {key: self.found[key] for key in sorted(self.found)}
        result["shared_input_matmul_groups"] = {size: self.groups[size] for size in sorted(self.groups)}
        return result

    def graph(self, graph: Graph) -> None:
        for node in graph.nodes:
            key = (view.domain(node), node.op)
            if key in _SKIP and self.bias_behind:
                self._bias_of_skip_norm(node)
            if key in _RMS:
                self._norm("rms", node.inputs[0], _scale_input(node), key in _SKIP)
            elif key in _LAYER:
                new = self._norm("layer", node.inputs[0], _scale_input(node), key in _SKIP)
                shift = 5 if node.op == "EmbedLayerNormalization" else 3 if key in _SKIP else 2
                self._count_unshifted(new and not _present(node, shift))
            elif key in _ATTENTION:
                self._attention(node)
            elif key in _ROTARY:
                self.found["rope"] += 1
            elif key == (_FUSED, "Linear"):
                self._linear(graph, node)
            elif key == (_FUSED, "GatedLinear"):
                self._gated_linear(node)
            else:
                self._plain(node, key)

    def _attention(self, node: Node) -> None:
        self.found["attention"] += 1
        if node.attrs.get("do_rotary"):
            self.found["rope"] += 2
        if view.domain(node) != _MS:
            return
        if node.op == "Attention" and _present(node, 1):
            # Its three projections are part of it, over one packed weight.
            self.found["matmul"] += 3
            self.found["matmul_bias"] += 3 if _present(node, 2) else 0
            self._packed_for_attention()
        elif node.op in ("MultiHeadAttention", "GroupQueryAttention"):
            inputs = [v for v in node.inputs[:3] if v.name]
            if len(inputs) == 1 and _is_plain_product(inputs[0]):
                self.found["matmul"] += 2
                self._packed_for_attention()
            if node.op == "MultiHeadAttention" and _present(node, 3) and self.bias_behind:
                members = 3 if len(inputs) == 1 else 1
                self.found["matmul_bias"] += sum(members for v in inputs if _is_plain_product(v))

    def _packed_for_attention(self) -> None:
        self.groups["3"] += 1
        self.found["qkv_shared_input_groups"] += 1

    # -- norms -----------------------------------------------------------------------------------------------------

    def _norm(self, norm: str, x: Value, scale: Value | None, skip: bool = False) -> bool:
        """One norm of `x`; several products that normalize the same value with the same scale hold one block.

        Returns whether this is the first of them.
        """
        key_of_block = (id(x), norm, id(scale))
        if norm == "none" or key_of_block in self._norms:
            return False
        self._norms.add(key_of_block)
        key = _KEY_OF_NORM[norm]
        self.found[key] += 1
        if x.shape is not None and len(x.shape) == 4:
            self.found[f"qk_norm_{key}"] += 1
        if skip and _is_broadcast_skip(x):
            self.found[f"bcast_add_{key}"] += 1
        elif skip or _is_sum(x):
            self.found[f"skip_{key}"] += 1
        return True

    def _count_unshifted(self, unshifted: bool) -> None:
        self.found["layernorm_no_bias"] += unshifted

    def _bias_of_skip_norm(self, node: Node) -> None:
        index = 4 if node.op == "SkipLayerNormalization" else 3
        if _present(node, index) and any(_is_plain_product(v) for v in node.inputs[:2]):
            self.found["matmul_bias"] += 1

    # -- products --------------------------------------------------------------------------------------------------

    def _linear(self, graph: Graph, node: Node) -> None:
        new = self._norm(_text(node, "norm", "none"), node.inputs[0], _scale(node.inputs[1]))
        self._count_unshifted(new and _unshifted(node))
        members = _packed(graph, node)
        bias = _present(node, 2)
        activation = _text(node, "activation", "none")
        self.found["matmul"] += members
        if bias:
            self.found["matmul_bias"] += members
        if activation != "none":
            self._activated(activation, bias, members)
        if members > 1:
            self.groups[str(members)] += 1
            if members == 3:
                self.found["qkv_shared_input_groups"] += 1

    def _gated_linear(self, node: Node) -> None:
        new = self._norm(_text(node, "norm", "none"), node.inputs[0], _scale(node.inputs[1]))
        self._count_unshifted(new and _unshifted(node))
        activation, bias = _text(node, "activation", "silu"), _present(node, 2)
        # A gate that was exported packed cannot be told from one that a rewrite packed: both are two linear layers.
        self.found["matmul"] += 2
        if bias:
            self.found["matmul_bias"] += 2
        self.groups["2"] += 1
        self._activated(activation, bias, 1)
        if activation in _KEY_OF_GATE:
            self.found[_KEY_OF_GATE[activation]] += 1

    def _activated(self, activation: str, bias: bool, members: int) -> None:
        key = _KEY_OF_ACTIVATION[activation]
        self.found[f"act_{key}"] += members
        self.found[f"matmul_{'bias_' if bias else ''}act_{key}"] += members

    def _plain(self, node: Node, key: tuple[str, str]) -> None:
        if key in (("", "MatMul"), ("", "Gemm"), (_MS, "FusedMatMul"), (_MS, "FusedGemm"), (_MS, "MatMulNBits")):
            if not _is_weight(node.inputs[1]):
                return
            self.found["matmul"] += 1
            bias = node.op in ("Gemm", "FusedGemm") and _present(node, 2)
            bias = bias or (node.op == "MatMulNBits" and _present(node, 5))
            if bias:
                self.found["matmul_bias"] += 1
            fused = _text(node, "activation", "").lower()
            if node.op == "FusedGemm" and fused in ("relu", "tanh"):
                self._activated(fused, bias, 1)
            return
        activation = _activation(node, key)
        if activation is not None:
            self.found[f"act_{_KEY_OF_ACTIVATION[activation]}"] += 1
            biased = node.op in ("BiasGelu", "FastGelu") and _present(node, 1)
            if biased and self.bias_behind and _is_plain_product(node.inputs[0]):
                self.found["matmul_bias"] += 1
                self.found[f"matmul_bias_act_{_KEY_OF_ACTIVATION[activation]}"] += 1


def _scale(weight: Value) -> Value | None:
    """The norm's scale that was folded into a product's weight, if that is known."""
    recipe = weight.recipe if isinstance(weight, Constant) else None
    return recipe[1][1] if recipe is not None and recipe[0] == "scale_rows" else None


def _unshifted(node: Node) -> bool:
    """Whether the LayerNormalization that is part of a product provably had no shift.

    It had none if the product has no bias, or one that was there before the norm's scale went into the weight.
    """
    if _text(node, "norm", "none") != "layer":
        return False
    if not _present(node, 2):
        return True
    weight, bias = node.inputs[1], node.inputs[2]
    folded = isinstance(weight, Constant) and weight.recipe is not None and weight.recipe[0] == "scale_rows"
    return folded and isinstance(bias, Constant) and bias.recipe is None


def _scale_input(node: Node) -> Value:
    return node.inputs[2 if (view.domain(node), node.op) in _SKIP else 1]


def _text(node: Node, name: str, default: str) -> str:
    value = node.attrs.get(name, default)
    return value.decode() if isinstance(value, bytes) else str(value)


def _present(node: Node, index: int) -> bool:
    return index < len(node.inputs) and node.inputs[index].name != ""


def _is_weight(value: Value) -> bool:
    """A constant, or the transpose of one."""
    maker = view.producer(value)
    if maker is not None and maker.op == "Transpose":
        value = maker.inputs[0]
    return isinstance(value, Constant)


def _is_plain_product(value: Value) -> bool:
    """Whether the value is a product with a constant weight, by an op that adds no bias."""
    maker = view.producer(value)
    plain = {("", "MatMul"), (_MS, "FusedMatMul"), (_MS, "MatMulNBits")}
    if maker is None or (view.domain(maker), maker.op) not in plain:
        return False
    return _is_weight(maker.inputs[1])


def _is_broadcast_skip(value: Value) -> bool:
    """Whether a skip norm of this value adds a tensor of another shape to it."""
    readers = [n for n in view.consumers(value) if (view.domain(n), n.op) in _SKIP and n.inputs[0] is value]
    skip = readers[0].inputs[1] if readers else value
    shapes = [_shape(v) for v in (value, skip)]
    if None in shapes:
        return False
    one, other = (shape or () for shape in shapes)
    return len(one) != len(other) or not all(map(dims.same_when_added, one, other))


def _shape(value: Value) -> tuple[Any, ...] | None:
    if isinstance(value, Constant):
        return tuple(consts.shape_of(value))
    return None if value.shape is None else tuple(value.shape)


def _is_sum(value: Value) -> bool:
    """Whether the value is the output of a product with a residual, so that the addition is no op of its own."""
    maker = view.producer(value)
    while maker is not None and maker.op == "Reshape":
        value = maker.inputs[0]
        maker = view.producer(value)
    if maker is None:
        return False
    if (view.domain(maker), maker.op) in _SKIP:
        return len(maker.outputs) > 3 and value is maker.outputs[3]
    return view.domain(maker) == _FUSED and maker.op == "Linear" and _present(maker, 3)


def _packed(graph: Graph, node: Node) -> int:
    """How many linear layers a rewrite packed into this product: the outputs of the Split that it put behind."""
    readers = view.consumers(node.outputs[0])
    if len(readers) != 1 or readers[0].op != "Split" or readers[0].origin is None:
        return 1
    return len(readers[0].outputs)


def _activation(node: Node, key: tuple[str, str]) -> str | None:
    if key in (("", "Gelu"), (_STD, "Gelu")):
        return "gelu" if _text(node, "approximate", "none") == "none" else "gelu_tanh"
    if key in ((_MS, "Gelu"), (_MS, "BiasGelu")):
        return "gelu"
    if key == (_MS, "FastGelu"):
        return "gelu_tanh"
    if key in (("", "Swish"), (_STD, "Swish"), (_MS, "QuickGelu")):
        alpha = float(node.attrs.get("alpha", 1.702 if node.op == "QuickGelu" else 1.0))
        if consts.close(alpha, 1.0, None):
            return "silu"
        return "quick_gelu" if consts.close(alpha, 1.702, "float16") else None
    return {("", "Relu"): "relu", ("", "Tanh"): "tanh"}.get(key)
