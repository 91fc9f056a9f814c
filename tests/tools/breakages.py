"""Small damage done to real models, one block at a time, each with the constraint that it breaks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, helper, numpy_helper


class Surgeon:
    """Finds and changes nodes of a model."""

    def __init__(self, model: ModelProto) -> None:
        self.model = copy.deepcopy(model)
        self.graph = self.model.graph
        inferred = onnx.shape_inference.infer_shapes(model).graph
        self.types = {v.name: v for v in [*inferred.value_info, *inferred.output, *inferred.input]}

    def nodes(self, op: str) -> list[NodeProto]:
        return [n for n in self.graph.node if n.op_type == op]

    def maker(self, name: str) -> NodeProto | None:
        return next((n for n in self.graph.node if name in n.output), None)

    def readers(self, name: str) -> list[NodeProto]:
        return [n for n in self.graph.node if name in n.input]

    def number(self, name: str) -> np.ndarray | None:
        """The constant behind a value."""
        for tensor in self.graph.initializer:
            if tensor.name == name:
                return numpy_helper.to_array(tensor)
        node = self.maker(name)
        if node is not None and node.op_type == "Constant":
            return numpy_helper.to_array(node.attribute[0].t)
        if node is not None and node.op_type == "Identity":
            return self.number(node.input[0])
        return None

    def first(self, op: str, accept: Callable[[NodeProto], bool] = lambda node: True) -> NodeProto:
        """The first node of an op that `accept` likes."""
        return next(n for n in self.nodes(op) if accept(n))

    def operand(self, node: NodeProto, accept: Callable[[np.ndarray], bool]) -> int:
        """The index of a constant operand that `accept` likes."""
        for index, name in enumerate(node.input):
            array = self.number(name)
            if array is not None and accept(array):
                return index
        raise LookupError(node.op_type)

    def has_constant(self, value: float) -> Callable[[NodeProto], bool]:
        def accept(node: NodeProto) -> bool:
            arrays = [self.number(n) for n in node.input]
            return any(a is not None and a.size == 1 and abs(float(a.reshape(-1)[0]) - value) < 2e-3 for a in arrays)

        return accept

    def replace(self, node: NodeProto, index: int, array: np.ndarray) -> None:
        """Give one node another constant; other readers keep the old one."""
        name = f"broken_{len(self.graph.initializer)}"
        self.graph.initializer.append(numpy_helper.from_array(array, name))
        node.input[index] = name

    def change(self, node: NodeProto, value: float, new: float) -> None:
        """Change the operand of a node that is the number `value`."""
        index = self.operand(node, lambda a: a.size == 1 and abs(float(a.reshape(-1)[0]) - value) < 2e-3)
        old = self.number(node.input[index])
        assert old is not None
        self.replace(node, index, np.full(old.shape, new, old.dtype))

    def publish(self, name: str) -> None:
        """Make an inner value an output of the graph."""
        self._output(name, name)

    def _output(self, name: str, like: str) -> None:
        info = self.graph.output.add()
        info.CopyFrom(self.types[like])
        info.name = name

    def read(self, name: str, op: str = "Relu") -> None:
        """Let one more node read a value; its result is a graph output."""
        self.graph.node.append(helper.make_node(op, [name], [f"{name}_read"]))
        self._output(f"{name}_read", name)

    def attribute(self, node: NodeProto, name: str, value: object) -> None:
        for old in [a for a in node.attribute if a.name == name]:
            node.attribute.remove(old)
        node.attribute.append(helper.make_attribute(name, value))


@dataclass(frozen=True)
class Breakage:
    """`edit` damages `model`; then `rule` must name a check that starts with one of `checks`."""

    name: str
    model: str
    rule: str
    checks: tuple[str, ...]
    edit: Callable[[Surgeon], None]


def _axes(s: Surgeon) -> None:
    node = s.first("ReduceMean")
    if len(node.input) > 1:
        s.replace(node, 1, np.array([1], np.int64))
    else:
        s.attribute(node, "axes", [1])


def _no_keepdims(s: Surgeon) -> None:
    s.attribute(s.first("ReduceMean"), "keepdims", 0)


def _epsilon(s: Surgeon) -> None:
    node = next(n for n in s.nodes("Add") if (m := s.maker(n.input[0])) is not None and m.op_type == "ReduceMean")
    old = s.number(node.input[1])
    assert old is not None
    s.replace(node, 1, np.full(old.shape, 0.5, old.dtype))


def _exponent(s: Surgeon) -> None:
    node = s.first("Pow")
    old = s.number(node.input[1])
    assert old is not None
    s.replace(node, 1, np.full(old.shape, 3, old.dtype))


def _gamma(s: Surgeon, array: Callable[[np.ndarray], np.ndarray]) -> None:
    """The scale of the first RMSNorm: a vector in a Mul after the norm."""
    node = s.first("Mul", lambda n: any((a := s.number(i)) is not None and a.shape == (64,) for i in n.input))
    index = s.operand(node, lambda a: a.shape == (64,))
    old = s.number(node.input[index])
    assert old is not None
    s.replace(node, index, array(old))


def _gamma_computed(s: Surgeon) -> None:
    node = s.first("Mul", lambda n: any((a := s.number(i)) is not None and a.shape == (64,) for i in n.input))
    index = s.operand(node, lambda a: a.shape == (64,))
    s.graph.input.append(helper.make_tensor_value_info("gamma_in", onnx.TensorProto.FLOAT16, [64]))
    node.input[index] = "gamma_in"


def _unit_read(s: Surgeon) -> None:
    """Something else reads the mean of squares."""
    s.read(s.first("ReduceMean").output[0])


def _root_published(s: Surgeon) -> None:
    s.publish(s.first("Sqrt", lambda n: s.maker(n.input[0]).op_type == "Add").output[0])  # type: ignore[union-attr]


def _erf_scale(s: Surgeon) -> None:
    erf = s.first("Erf")
    scale = s.maker(erf.input[0])
    assert scale is not None
    index = s.operand(scale, lambda a: a.size == 1)
    old = s.number(scale.input[index])
    assert old is not None
    s.replace(scale, index, np.full(old.shape, 1.5, old.dtype))


def _erf_shift(s: Surgeon) -> None:
    shift = s.readers(s.first("Erf").output[0])[0]
    s.change(shift, 1.0, 2.0)


def _erf_read(s: Surgeon) -> None:
    s.read(s.first("Erf").output[0])


def _gelu_half(s: Surgeon) -> None:
    """The 0.5 of the first GELU: what it multiplies is read by a product with what comes out of Erf."""
    after_erf = _downstream(s, s.first("Erf").output[0], 3)
    half = s.has_constant(0.5)
    s.change(
        s.first("Mul", lambda n: half(n) and any(after_erf & set(r.input) for r in s.readers(n.output[0]))), 0.5, 0.6
    )


def _cubic(s: Surgeon) -> None:
    s.change(s.first("Mul", s.has_constant(0.044715)), 0.044715, 0.06)


def _tanh_scale(s: Surgeon) -> None:
    s.change(s.first("Mul", s.has_constant(0.7978846)), 0.7978846, 0.9)


def _cube(s: Surgeon) -> None:
    s.change(s.first("Pow", s.has_constant(3.0)), 3.0, 2.5)


def _bias_of(s: Surgeon) -> tuple[NodeProto, int]:
    node = s.first(
        "Add",
        lambda n: (
            any((m := s.maker(i)) is not None and m.op_type == "MatMul" for i in n.input)
            and any((a := s.number(i)) is not None and a.ndim == 1 for i in n.input)
        ),
    )
    return node, s.operand(node, lambda a: a.ndim == 1)


def _bias_computed(s: Surgeon) -> None:
    node, index = _bias_of(s)
    old = s.number(node.input[index])
    assert old is not None
    kind = helper.np_dtype_to_tensor_dtype(old.dtype)
    s.graph.input.append(helper.make_tensor_value_info("bias_in", kind, list(old.shape)))
    node.input[index] = "bias_in"


def _product_read(s: Surgeon) -> None:
    node, _ = _bias_of(s)
    s.read(next(i for i in node.input if (m := s.maker(i)) is not None and m.op_type == "MatMul"))


def _sigmoid_scaled(s: Surgeon) -> None:
    """Swish becomes x · sigmoid(1.2 x), which GatedLinear has not."""
    node = s.first("Sigmoid")
    array = np.array(1.2, np.float32)
    s.graph.initializer.append(numpy_helper.from_array(array, "slope"))
    index = list(s.graph.node).index(node)
    s.graph.node.insert(index, helper.make_node("Mul", [node.input[0], "slope"], ["sloped"]))
    s.graph.node[index + 1].input[0] = "sloped"


def _gate_read(s: Surgeon) -> None:
    """Something else reads the activated gate."""
    gate = s.readers(s.first("Sigmoid").output[0])[0]
    s.read(gate.output[0])


def _softmax_axis(s: Surgeon) -> None:
    s.attribute(s.first("Softmax"), "axis", 1)


def _scores_read(s: Surgeon) -> None:
    s.publish(s.first("Softmax").input[0])


def _weight_computed(s: Surgeon) -> None:
    """The weight of a product comes in as an input of the graph."""
    node = s.first("MatMul", lambda n: (a := s.number(n.input[1])) is not None and a.shape == (64, 64))
    old = s.number(node.input[1])
    assert old is not None
    kind = helper.np_dtype_to_tensor_dtype(old.dtype)
    s.graph.input.append(helper.make_tensor_value_info("weight_in", kind, list(old.shape)))
    node.input[1] = "weight_in"


def _weight_batched(s: Surgeon) -> None:
    """The weight of a product gets a batch dim."""
    node = s.first("MatMul", lambda n: (a := s.number(n.input[1])) is not None and a.shape == (64, 64))
    old = s.number(node.input[1])
    assert old is not None
    s.replace(node, 1, old[None])


def _downstream(s: Surgeon, name: str, steps: int) -> set[str]:
    found = {name}
    for _ in range(steps):
        found |= {o for n in s.graph.node if found & set(n.input) for o in n.output}
    return found


def _gemm_computed(s: Surgeon, index: int) -> None:
    """The weight or the bias of a Gemm comes in as an input of the graph."""
    node = s.first("Gemm")
    old = s.number(node.input[index])
    assert old is not None
    kind = helper.np_dtype_to_tensor_dtype(old.dtype)
    s.graph.input.append(helper.make_tensor_value_info("gemm_in", kind, list(old.shape)))
    node.input[index] = "gemm_in"


LLAMA, LLAMA5 = "llama-ts17-f16-eager", "llama-dyn20-f32-sdpa-tf5"
BERT, GPT2, VIT = "bert-ts17-f16-eager", "gpt2-past-dyn18-f32-sdpa", "vit-dyn18-f32-sdpa"
T5, QWEN = "t5_encoder-dyn20-f32-eager", "qwen2-past-dyn20-f16-eager"

BREAKAGES = [
    Breakage("gemm-weight-computed", BERT, "linear-gemm", ("inputs.w.const",), lambda s: _gemm_computed(s, 1)),
    Breakage("gemm-bias-computed", BERT, "linear-gemm", ("inputs.b.const",), lambda s: _gemm_computed(s, 2)),
    Breakage("axes", LLAMA, "rms-norm", ("nodes.mean.any_of[0].attrs.axes",), _axes),
    Breakage("axes-input", LLAMA5, "rms-norm", ("nodes.mean.any_of[0].attrs.axes",), _axes),
    Breakage("keepdims", T5, "rms-norm", ("nodes.mean.any_of[0].attrs.keepdims",), _no_keepdims),
    Breakage("epsilon", LLAMA, "rms-norm", ("captures.eps.range",), _epsilon),
    Breakage("exponent", LLAMA5, "rms-norm", ("nodes.square.any_of[0].in[1]",), _exponent),
    Breakage("exponent-f16", LLAMA, "rms-norm", ("nodes.square.any_of[0].in[1]",), _exponent),
    Breakage("gamma-computed", LLAMA, "rms-norm", ("inputs.gamma.const",), _gamma_computed),
    Breakage("extra-reader-f16", LLAMA, "rms-norm", ("private.mean",), _unit_read),
    Breakage("extra-reader", LLAMA5, "rms-norm", ("private.mean",), _unit_read),
    Breakage("graph-output", LLAMA, "rms-norm", ("private.rms",), _root_published),
    Breakage("erf-scale", BERT, "gelu-erf", ("nodes.scaled",), _erf_scale),
    Breakage("erf-shift", VIT, "gelu-erf", ("nodes.cdf2.in[1]",), _erf_shift),
    Breakage("erf-reader", BERT, "gelu-erf", ("private.erf",), _erf_read),
    Breakage("half", VIT, "gelu-erf", ("nodes.y.any_of[0].of[1]",), _gelu_half),
    Breakage("cubic", GPT2, "gelu-tanh", ("nodes.cubic",), _cubic),
    Breakage("tanh-scale", T5, "gelu-tanh", ("nodes.arg",), _tanh_scale),
    Breakage("cube", GPT2, "gelu-tanh", ("nodes.cube.in[1]", "nodes.cubic"), _cube),
    Breakage("bias-computed-vit", VIT, "linear-bias", ("inputs.b.const",), _bias_computed),
    Breakage("bias-computed", BERT, "linear-bias", ("inputs.b.const",), _bias_computed),
    Breakage("product-read", QWEN, "linear-bias", ("private.lin",), _product_read),
    Breakage("sigmoid-scaled", LLAMA5, "gated-linear", ("nodes.act",), _sigmoid_scaled),
    Breakage("gate-read", LLAMA5, "gated-linear", ("private.act",), _gate_read),
    Breakage("softmax-axis", BERT, "attention", ("nodes.probs.attrs.axis",), _softmax_axis),
    Breakage("scores-published", LLAMA, "attention", ("private.",), _scores_read),
    Breakage("weight-computed", LLAMA5, "linear-matmul", ("inputs.w.const",), _weight_computed),
    Breakage("weight-batched", BERT, "linear-matmul", ("inputs.w.shape", "inputs.w.rank"), _weight_batched),
]
