"""Decoders of one attention, in the lifted form that caches are shared in, with masks and readers to choose."""

from __future__ import annotations

from dataclasses import dataclass

import onnx
import onnx.parser
import pytest

from onnxfuse import pipeline
from onnxfuse.graph import canonicalize
from onnxfuse.graph.model import Model
from onnxfuse.lower import lower
from onnxfuse.lower.kernels import KernelTable, Target
from onnxfuse.lower.shared_cache import SharedCache, share
from onnxfuse.runtime.probe import OrtProbe

#: Positions of the keys [total] and of the queries [new, 1]; `seen`: k ≤ q.
POSITIONS = """
    new1 = Shape <start = 1, end = 2> (x)
    past1 = Shape <start = 2, end = 3> (past_k)
    new = Squeeze (new1)
    past = Squeeze (past1)
    total = Add (new, past)
    k = Range (n0, total, n1)
    q_row = Range (past, total, n1)
    q = Unsqueeze (q_row, a1)
    seen = LessOrEqual (k, q)
"""
PADDING = """
    kept2 = Cast <to = 9> (attention_mask)
    kept = Unsqueeze (kept2, a12)
"""
WINDOW = """
    edge = Sub (q, n4)
    inside = Greater (k, edge)
    near = And (seen, inside)
"""
#: What makes `mask`, by a name for it.
MASKS = {
    "causal": "mask = Where (seen, zero, low)",
    "padded": PADDING + "both = And (seen, kept)  mask = Where (both, zero, low)",
    "boolean": PADDING + "mask = And (seen, kept)",
    "sum of two": """
        causal = Where (seen, zero, low)
        given2 = Cast <to = 1> (attention_mask)
        given = Unsqueeze (given2, a12)
        hidden = Sub (one, given)
        padding = Mul (hidden, low)
        mask = Add (causal, padding)
    """,
    "product of triangles": """
        row = Range (n0, new, n1)
        q_new = Unsqueeze (row, a1)
        after_new = Greater (k, q_new)
        low_after_new = Where (after_new, low, zero)
        after = Greater (k, q)
        one_after = Where (after, one, zero)
        mask = Mul (low_after_new, one_after)
    """,
    "window": PADDING + WINDOW + "both = And (near, kept)  mask = Where (both, zero, low)",
    # From here on they say what the kernel does not.
    "distance": """
        distance = Sub (k, q)
        slope = Cast <to = 1> (distance)
        hidden = Where (seen, zero, low)
        mask = Add (hidden, slope)
    """,
    "padding only": PADDING + "mask = Where (kept, zero, low)",
    "one key too far": "next = Add (q, n1)  further = LessOrEqual (k, next)  mask = Where (further, zero, low)",
    "weak": "mask = Where (seen, zero, minus_one)",
    "two inputs": PADDING + """
        other2 = Cast <to = 9> (other_mask)
        other = Unsqueeze (other2, a12)
        first = And (seen, kept)
        both = And (first, other)
        mask = Where (both, zero, low)
    """,
    "backwards": """
        turned = Slice (attention_mask, last, front, a1, last)
        kept2 = Cast <to = 9> (turned)
        kept = Unsqueeze (kept2, a12)
        both = And (seen, kept)
        mask = Where (both, zero, low)
    """,
    "padding shown": PADDING + "hidden = Not (kept)  both = And (seen, hidden)  mask = Where (both, zero, low)",
    "far keys only": "edge = Sub (q, n4)  far = LessOrEqual (k, edge)  mask = Where (far, zero, low)",
}
CONSTANTS = """
    int64 n0 = {0}, int64 n1 = {1}, int64 n4 = {4}, int64[1] a0 = {0}, int64[1] a1 = {1}, int64[2] a12 = {1, 2},
    int64[1] last = {-1}, int64[1] front = {-1000000}, float zero = {0}, float one = {1}, float minus_one = {-1},
    float low = {-3.4028234663852886e38}, float[4] sinks = {0.5, -1, 2, 0}
"""


@dataclass
class Decoder:
    """A decoder of one attention with 2 key heads; queries, keys and values are parts of its input `x`.

    Attributes:
        mask: a key of `MASKS`; empty: there is none.
        attrs: of the attention.
        sizes: what x is split into: queries, keys, values.
        before, after: nodes before and behind the attention; the latter make `y` of `attended`.
        inputs, outputs: of the graph, beside the usual ones.
        outputs_of_attention: their names.
        past: the length of the cache.
        rows_of_mask: the first size of the mask.
        sinks: whether each head has one.
        dtype, opset: of the model.
    """

    mask: str = "padded"
    attrs: str = "q_num_heads = 4, kv_num_heads = 2"
    sizes: tuple[int, int, int] = (64, 32, 32)
    before: str = ""
    after: str = "y = Identity (attended)"
    inputs: str = ""
    outputs: str = ""
    outputs_of_attention: str = "attended, present_k, present_v"
    past: str = "p"
    rows_of_mask: str = "b"
    sinks: bool = False
    dtype: str = "float"
    opset: int = 18

    def proto(self) -> onnx.ModelProto:
        t, (_, keys, values) = self.dtype, self.sizes
        mask = POSITIONS + MASKS[self.mask] if self.mask else ""
        inputs = [f"{t}[b, s, {sum(self.sizes)}] x"]
        inputs += [f"int64[{self.rows_of_mask}, t] {name}" for name in ("attention_mask", "other_mask") if name in mask]
        caches = [f"[b, 2, {{0}}, {keys // 2}] {{1}}_k", f"[b, 2, {{0}}, {values // 2}] {{1}}_v"]
        inputs += [t + cache.format(self.past, "past") for cache in caches] + ([self.inputs] if self.inputs else [])
        outputs = [f"{t}[b, s, n] y", *(t + cache.format("m", "present") for cache in caches)]
        outputs += [self.outputs] if self.outputs else []
        proto = onnx.parser.parse_model(
            f"""<ir_version: 9, opset_import: ["": {self.opset}, "onnxfuse.std": 1, "com.microsoft": 1]>
            decoder ({', '.join(inputs)}) => ({', '.join(outputs)})
            <{CONSTANTS}, int64[3] parts = {{{', '.join(map(str, self.sizes))}}}> {{
                {mask}
                {self.before}
                q3, k3, v3 = Split <axis = 2> (x, parts)
                {self.outputs_of_attention} = onnxfuse.std.Attention <{self.attrs}> (
                    q3, k3, v3, {'mask' if self.mask else ''}, past_k, past_v{', , sinks' if self.sinks else ''})
                {self.after}
            }}"""
        )
        for value in proto.graph.input:
            if value.name.endswith("_mask"):
                value.type.tensor_type.shape.dim[1].dim_param = "p + s"
        return proto

    def model(self) -> Model:
        """With inferred shapes, in the canonical form."""
        model = Model(self.proto())
        canonicalize.run(model)
        return model

    def growing(self) -> onnx.ModelProto:
        """In ONNX's own ops, as exported."""
        model = self.model()
        pipeline.expand_fused(model)
        return model.to_proto()

    def shared(self, target: str = "cpu") -> tuple[onnx.ModelProto, SharedCache]:
        """Rewritten and lowered.

        Raises:
            KvCacheError: it cannot be done.
        """
        kernels = KernelTable(Target.parse(target), OrtProbe())
        model = self.model()
        found = share(model, kernels)
        lower(model, kernels)
        return model.to_proto(), found


@pytest.fixture
def decoder() -> type[Decoder]:
    return Decoder


@pytest.fixture
def bad_masks() -> list[str]:
    names = list(MASKS)
    return names[names.index("distance") :]
