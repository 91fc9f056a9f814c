"""What is proved about a mask is what the mask does: random masks, held against their own numbers."""

from __future__ import annotations

import itertools

import numpy as np
import onnx
import onnx.parser
import pytest

from onnxfuse.graph import canonicalize
from onnxfuse.graph.model import Model
from onnxfuse.lower.emit import shape_of
from onnxfuse.lower.shared_cache.proof import NotProvedError, Visible, visible_keys

ort = pytest.importorskip("onnxruntime")

LOW = float(np.finfo(np.float32).min)
#: Truth values to build masks of: on one side of a diagonal, or kept by the padding.
LEAVES = {
    "seen": "LessOrEqual (k, q)", "after": "Greater (k, q)",
    "near": "Greater (k, edge)", "far": "LessOrEqual (k, edge)",
    "nearer": "Greater (k, inner)", "new": "Greater (k, q_new)", "old": "LessOrEqual (k, q_new)",
    "kept": "Identity (padding)", "hidden": "Not (padding)",
}
WINDOW, INNER = 5, 3


def parsed(body: str, mask: str) -> onnx.ModelProto:
    proto = onnx.parser.parse_model(f"""<ir_version: 9, opset_import: ["": 18]>
        g (float[b, s, 2] x, float[b, 2, p, 8] past_k, int64[b, t] attention_mask) => ({mask} mask)
        <int64 n0 = {{0}}, int64 n1 = {{1}}, int64 window = {{{WINDOW}}}, int64 smaller = {{{INNER}}},
         int64[1] a1 = {{1}}, int64[2] a12 = {{1, 2}}, float zero = {{0}}, float one = {{1}}, float low = {{{LOW:.9e}}},
         bool yes = {{1}}> {{
            new1 = Shape <start = 1, end = 2> (x)
            past1 = Shape <start = 2, end = 3> (past_k)
            n_new = Squeeze (new1)
            n_past = Squeeze (past1)
            total = Add (n_new, n_past)
            k = Range (n0, total, n1)
            row = Range (n_past, total, n1)
            q = Unsqueeze (row, a1)
            row_new = Range (n0, n_new, n1)
            q_new = Unsqueeze (row_new, a1)
            edge = Sub (q, window)
            inner = Sub (q, smaller)
            kept2 = Cast <to = 9> (attention_mask)
            padding = Unsqueeze (kept2, a12)
            {body}
        }}""")
    proto.graph.input[2].type.tensor_type.shape.dim[1].dim_param = "p + s"
    return proto


class Formula:
    """A random mask: nodes for a truth value, then for the mask that is made of it."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.lines: list[str] = []
        # Mostly what exporters write, so that something is left to be proved.
        honest = ["seen", "kept", "near"][: int(self.random.integers(1, 4))]
        chosen = honest if self.random.random() < 0.6 else []
        chosen = [*chosen, *self.random.choice(list(LEAVES), int(self.random.integers(0 if chosen else 1, 3)))]
        truth = self.combined([self.leaf(str(name)) for name in self.random.permutation(chosen)])
        self.mask = self.finished(truth)

    def add(self, expression: str) -> str:
        name = f"v{len(self.lines)}"
        self.lines.append(f"{name} = {expression}")
        return name

    def leaf(self, name: str) -> str:
        return self.add(LEAVES[name])

    def combined(self, parts: list[str]) -> str:
        while len(parts) > 1:
            a, b = parts.pop(), parts.pop()
            kind = self.random.random()
            if kind < 0.6:
                made = self.add(f"And ({a}, {b})")
            elif kind < 0.75:
                made = self.add(f"Or ({a}, {b})")
            else:  # and, by De Morgan
                either = self.add(f"Or ({self.add(f'Not ({a})')}, {self.add(f'Not ({b})')})")
                made = self.add(f"Not ({either})")
            parts.append(made)
        return parts[0]

    def finished(self, truth: str) -> str:
        kind = int(self.random.integers(0, 5))
        if kind == 0:
            self.lines.append(f"mask = And ({truth}, yes)")
            return "bool[n1, n2, n3, n4]"
        number = self.add(f"Where ({truth}, zero, low)")
        if kind == 1:
            after = self.add(f"Where ({self.leaf('after')}, low, zero)")
            self.lines.append(f"mask = Add ({number}, {after})")
        elif kind == 2:
            again = self.add(f"Where ({self.leaf('seen')}, {number}, low)")
            self.lines.append(f"mask = Identity ({again})")
        elif kind == 3:
            given = self.add("Cast <to = 1> (padding)")
            gone = self.add(f"Mul ({self.add(f'Sub (one, {given})')}, low)")
            self.lines.append(f"mask = Add ({gone}, {number})")
        else:
            self.lines.append(f"mask = Mul ({number}, one)")
        return "float[n1, n2, n3, n4]"

    def proto(self) -> onnx.ModelProto:
        # A mask of two or four dims: the output says neither.
        proto = parsed("\n".join(self.lines), self.mask)
        proto.graph.output[0].type.tensor_type.ClearField("shape")
        return proto


def proved(proto: onnx.ModelProto) -> Visible | None:
    model = Model(proto)
    canonicalize.run(model)
    past = next(value for value in model.graph.inputs if value.name == "past_k")
    try:
        return visible_keys(model.graph.outputs[0], shape_of(past)[2])  # type: ignore[index]
    except NotProvedError:
        return None


def shown(proto: onnx.ModelProto, new: int, past: int, padding: np.ndarray) -> np.ndarray:
    """Which keys the mask shows, [batch, new, total], as ONNX Runtime computes it."""
    session = ort.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    feeds = {"x": np.zeros((len(padding), new, 2), np.float32), "attention_mask": padding,
             "past_k": np.zeros((len(padding), 2, past, 8), np.float32)}
    used = {i.name for i in session.get_inputs()}
    (mask,) = session.run(None, {name: value for name, value in feeds.items() if name in used})
    full = np.broadcast_to(mask, (len(padding), 1, new, past + new))[:, 0]
    return full if full.dtype == bool else full > LOW / 2


@pytest.mark.parametrize("block", range(5))
def test_nothing_is_proved_that_is_not_so(block: int) -> None:
    found = 0
    for seed in range(32 * block, 32 * block + 32):
        proto = Formula(seed).proto()
        visible = proved(proto)
        if visible is None:
            continue
        found += 1
        for new, past in itertools.product((1, 4), (0, 3, 9)):
            padding = np.random.default_rng(seed).integers(0, 2, (2, past + new))
            q, k = np.arange(past, past + new)[:, None], np.arange(past + new)
            expected = k <= q
            if visible.window:
                expected = expected & (k > q - visible.window)
            kept = padding.astype(bool)[:, None] if visible.padding is not None else np.ones((2, 1, 1), bool)
            assert np.array_equal(shown(proto, new, past, padding), expected & kept), f"{seed}: {visible}"
    assert found >= 4, "random masks are of use only if something is proved about some"


def test_random_masks_are_of_all_kinds() -> None:
    kinds = set()
    for seed in range(160):
        visible = proved(Formula(seed).proto())
        kinds.add(None if visible is None else (visible.window, visible.padding is not None))
    assert kinds == {None, *itertools.product((0, INNER, WINDOW), (False, True))}
