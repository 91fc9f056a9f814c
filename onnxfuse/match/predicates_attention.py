"""Named predicates about attention masks and rotary embeddings: the rules' door to `onnxfuse.analysis`."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from onnxfuse.analysis import masks, rotary
from onnxfuse.analysis.elements import Elements
from onnxfuse.analysis.sizes import poly_of_dim
from onnxfuse.graph import types, view
from onnxfuse.graph.ir import Constant, Value
from onnxfuse.match.predicates import Outcome, Refused, predicate
from onnxfuse.match.scope import Scope
from onnxfuse.match.typing import dtype_of, shape_of, show


def _elements(scope: Scope) -> Elements:
    """One for a pass over the graph: a rewrite in between does not change what an element is."""
    found = scope.__dict__.get("_elements")
    if found is None:
        found = scope.__dict__["_elements"] = Elements()
    return found


@predicate
def positive_ratio(scope: Scope, first: float, second: float, third: float = 1.0) -> Outcome:
    """of: two captured numbers, or three
    holds: first × third / second is a positive finite number
    results: `ratio`: that number
    """
    if not float(second):
        return Refused("a divisor other than 0", second)
    ratio = float(first) * float(third) / float(second)
    return {"ratio": ratio} if 0 < ratio < math.inf else Refused("a positive number", ratio)


@predicate
def one_per_head(scope: Scope, value: Value) -> Outcome:
    """of: a value
    holds: its last two axes have size 1, or it is one number that is only known at run time
    """
    shape = shape_of(value)
    if shape is None or any(size != 1 for size in shape[-2:]):
        return Refused("a number of each head", show(shape))
    if isinstance(value, Constant) and all(size == 1 for size in shape):
        return Refused("a number of each head", "one constant, which is taken into the scale")
    return {}


@predicate
def hiding_number(scope: Scope, scores: Value, yes: float, no: float) -> Outcome:
    """of: a value with the scores' dtype; two captured numbers, one of them 0
    holds: the other one absorbs every score that it is added to, or is -inf
    results: `yes`, `no`: the numbers, with a merely very low one replaced by the lowest of the dtype (either way a
        hidden key has weight 0 beside a visible one, and in a row without any all keys weigh the same)
    """
    low = float(yes) + float(no)
    dtype = dtype_of(scores)
    if low == -math.inf:
        return {"yes": float(yes), "no": float(no)}
    # In float16 the lowest number is so near to scores that a kernel computing in float32 would tell them apart.
    if dtype not in ("float32", "float64", "bfloat16") or low > -1e4 or 0 not in (float(yes), float(no)):
        return Refused("-inf, or a number below -1e4 in float32 or bfloat16", low)
    lowest = -3.3895313892515355e38 if dtype == "bfloat16" else float(np.finfo(types.numpy_of(dtype)).min)
    return {"yes": lowest if yes else 0.0, "no": lowest if no else 0.0}


@predicate
def product_below(scope: Scope, first: float, second: float, *, limit: float) -> Outcome:
    """of: two captured numbers; with `limit`
    holds: their product is below the limit
    results: `product`: it
    """
    product = float(first) * float(second)
    return {"product": product} if product < limit else Refused(f"a number below {limit}", product)


@predicate
def zero_or_one(scope: Scope, value: Value) -> Outcome:
    """of: a value
    holds: every element provably is 0 or 1
    """
    if masks.zero_or_one(value, _elements(scope)):
        return {}
    return Refused("only zeros and ones", f"`{value.name}`")


@predicate
def hides_altogether(scope: Scope, low: float) -> Outcome:
    """of: a captured number
    holds: no key with this score weighs anything beside a visible one
    results: `infinity`: -inf, which hides as well
    """
    return {"infinity": -math.inf} if float(low) <= -1e4 else Refused("a number below -1e4", low)


@predicate
def no_low_numbers(scope: Scope, value: Value | None) -> Outcome:
    """of: an optional value
    holds: it is omitted, or is computed from weights and integer inputs without any number below -1000
    """
    low = None if value is None else masks.low_number_behind(value)
    return {} if low is None else Refused("no number that could hide a key", low)


@predicate
def hides_in_float32(scope: Scope, yes: float, no: float) -> Outcome:
    """of: two captured numbers, one of them 0
    holds: the other one is finite, and as low as masks in half precision are
    results: `yes`, `no`: 1 in its place, and 0
    """
    low = float(yes) + float(no)
    if 0 not in (float(yes), float(no)) or not -math.inf < low <= -1e4:
        return Refused("a finite number below -1e4", low)
    return {"yes": 1.0 if yes else 0.0, "no": 1.0 if no else 0.0}


@predicate
def structural_mask(scope: Scope, mask: Value, queries: Any, keys: Any, past: Any) -> Outcome:
    """of: a mask; the dims of the queries, of all keys, and of the cached keys (0: no cache)
    holds: the mask provably hides exactly the keys after each query, or besides those before a sliding window
    results: `causal`: 1; `window`: its size, or 0
    """
    elements = _elements(scope)
    facts = masks.analyze(mask, elements)
    if facts is None or len(facts.sizes) < 2:
        return Refused("a mask of known sizes", f"`{mask.name}`")
    q_size, k_size, offset = (poly_of_dim(d) for d in (queries, keys, past))
    if q_size is None or k_size is None or offset is None or facts.sizes[-2:] != (q_size, k_size):
        return Refused(f"a mask of [{queries}, {keys}]", str(facts.sizes))
    if not facts.structural:
        return Refused("only causal and window conditions", ", ".join(map(str, facts.terms))[:200])
    window = facts.window()
    if facts.causal_offset() != offset:
        return Refused(f"causal from key {past}", str(facts.causal_offset()))
    if len({type(c) for c in facts.conditions()}) != len(set(facts.conditions())):
        return Refused("one causal and one window condition", "more")
    if window is not None and (window.offset != offset or window.size < 1):
        return Refused(f"a window from key {past}", str(window))
    return {"causal": 1, "window": window.size if window is not None else 0}


@predicate
def hides_causally_again(scope: Scope, condition: Value, mask: Value) -> Outcome:
    """of: a condition for seeing a key, a mask that is added afterwards
    holds: the condition provably hides exactly the keys after each query (or after some later key); the mask hides
        those as well, and adds nothing but 0 or one low number
    """
    elements = _elements(scope)
    facts, again = masks.analyze(condition, elements), masks.analyze(mask, elements)
    single = facts is not None and facts.boolean and facts.structural and len(set(facts.conditions())) == 1
    offset = facts.causal_offset() if facts is not None and single else None
    if offset is None or not offset.never_negative():
        return Refused("a causal condition in which each query sees a key", f"`{condition.name}`")
    if again is None or again.boolean or len(again.terms) != 1 or not isinstance(again.terms[0], masks.Choice):
        return Refused("a mask of 0 and one low number", f"`{mask.name}`")
    if not again.implies_causal(offset):
        return Refused("a mask that hides what the condition hides", f"`{mask.name}`")
    return {}


@predicate
def maybe_other_size(scope: Scope, mask: Value, size: Any, wanted: Any) -> Outcome:
    """of: a mask; two dims
    holds: the dims are not provably equal, the first is not the constant 1, and the mask was not repeated and reshaped
        to the second already
    """
    reshape = view.producer(mask)
    before = view.producer(reshape.inputs[0]) if reshape is not None and reshape.op == "Reshape" else None
    if before is not None and before.op == "Expand":
        return Refused("a mask as the model computes it", f"`{mask.name}`", reshape)
    if size == wanted or size == 1:
        return Refused(f"a size that may differ from {wanted}", size)
    return {}


@predicate
def finite_mask(scope: Scope, mask: Value) -> Outcome:
    """of: a mask
    holds: no element is -inf, whatever the inputs are
    """
    facts = masks.analyze(mask, _elements(scope))
    if facts is None or not facts.finite():
        return Refused("a mask that never hides with -inf", f"`{mask.name}`")
    return {}


@predicate
def rotation(scope: Scope, x: Value, rotated: Value) -> Outcome:
    """of: two values
    holds: the second is [-x₂, x₁] of the halves x₁, x₂ of the first, or -x₁, x₀, -x₃, x₂, … of its elements
    results: `interleaved`: 0 or 1; `ends`, `step`: where a table's first of two equal numbers stand along the last axis
    """
    kind = rotary.rotation(x, rotated, _elements(scope))
    if kind is None:
        return Refused(f"`{x.name}` with halves or pairs rotated", f"`{rotated.name}`")
    return _of_kind(x, kind)


@predicate
def rotation_backwards(scope: Scope, x: Value, rotated: Value) -> Outcome:
    """of: two values
    holds: the negative of the second is the first, rotated as for `rotation`
    results: as of `rotation`
    """
    kind = rotary.rotation(x, rotated, _elements(scope), backwards=True)
    if kind is None:
        return Refused(f"`{x.name}` with halves or pairs rotated backwards", f"`{rotated.name}`")
    return _of_kind(x, kind)


def _of_kind(x: Value, kind: int) -> dict[str, Any]:
    size = x.shape[-1]
    return {"interleaved": kind, "ends": [size if kind else size // 2], "step": [2 if kind else 1]}


@predicate
def rolled_with_signs(scope: Scope, x: Value, rolled: Value, signs: Value) -> Outcome:
    """of: two values, a constant vector
    holds: the second, times the vector, is the first with its halves, or the numbers of its pairs, rotated
    results: as of `rotation`
    """
    kind = rotary.rolled(x, rolled, signs, _elements(scope))
    if kind is None:
        return Refused(f"`{x.name}` with halves or pairs swapped, and their signs", f"`{rolled.name}`")
    return _of_kind(x, kind)


@predicate
def repeated(scope: Scope, table: Value, interleaved: int) -> Outcome:
    """of: a value, captured 0 or 1
    holds: its last axis holds every number twice: in both halves (0), or side by side (1)
    """
    known = scope.__dict__.setdefault("_repeated", {})
    key = (table, interleaved)
    if key not in known:
        known[key] = rotary.repeated(table, interleaved, _elements(scope))
    return {} if known[key] else Refused("every number twice", f"`{table.name}`")


@predicate
def every_second(scope: Scope, x: Value, even: Value, odd: Value) -> Outcome:
    """of: three values
    holds: the second and the third are the even and the odd elements of the first's last axis
    """
    if rotary.every_second(x, even, odd, _elements(scope)):
        return {}
    return Refused(f"even and odd elements of `{x.name}`", f"`{even.name}`, `{odd.name}`")


@predicate
def cut_in_two(scope: Scope, x: Value, first: Value, rest: Value) -> Outcome:
    """of: three values
    holds: the second and the third are the first, cut along its last axis
    results: `size`: where
    """
    size = rotary.parts(x, first, rest, _elements(scope))
    return {"size": size} if size is not None else Refused(f"two parts of `{x.name}`", f"`{first.name}`, `{rest.name}`")


#: Transpositions of heads: of [B, S, H, D], and of [B, S, 3, H, D].
_OF_HEADS = ([0, 2, 1, 3], [0, 3, 2, 1, 4])


@predicate
def before_heads_transposed(scope: Scope, perm: list[int], axes: Any) -> Outcome:
    """of: the `perm` of a Transpose, axes of its result (a list or one)
    holds: it transposes heads: [0, 2, 1, 3] or [0, 3, 2, 1, 4]
    results: `axes`: the same axes in its operand; `kept`: the `perm` without the (one) axis
    """
    if list(perm) not in _OF_HEADS:
        return Refused(" or ".join(map(str, _OF_HEADS)), list(perm))
    many = [axis % len(perm) for axis in (axes if isinstance(axes, (list, tuple)) else [axes])]
    mapped = [perm[axis] for axis in many]
    kept = [p - (p > mapped[0]) for axis, p in enumerate(perm) if axis != many[0]]
    return {"axes": mapped if isinstance(axes, (list, tuple)) else mapped[0], "kept": kept}


@predicate
def split_sizes(scope: Scope, first: Value, second: Value, third: Value, axis: int) -> Outcome:
    """of: three values, an axis
    holds: their sizes along it are known
    results: `sizes`: the list of them
    """
    sizes = [value.shape[axis] if value.shape is not None else None for value in (first, second, third)]
    if not all(isinstance(size, int) for size in sizes):
        return Refused("known sizes", sizes)
    return {"sizes": sizes}
