"""Matrix products, convolutions, pooling and recurrent layers."""

from __future__ import annotations

from collections.abc import Sequence

from onnxfuse.graph import dims
from onnxfuse.graph.dims import Dim, SymInt
from onnxfuse.graph.shapes.elementwise import broadcast_shapes
from onnxfuse.graph.shapes.structure import agreed
from onnxfuse.graph.shapes.table import Call, Shape, Unknown, of_ops


def matmul_shape(left: Shape, right: Shape) -> Shape:
    """The shape of NumPy's matmul."""
    if not left or not right:
        raise Unknown
    if len(left) == 1 and len(right) == 1:
        return ()
    if len(left) == 1:
        return (*right[:-2], right[-1])
    if len(right) == 1:
        return left[:-1]
    return (*broadcast_shapes(left[:-2], right[:-2]), left[-2], right[-1])


@of_ops("MatMul", "MatMulInteger", "QLinearMatMul")
def _matmul(call: Call) -> None:
    quantized = call.node.op == "QLinearMatMul"
    dtype = {"MatMul": call.dtype(0) or call.dtype(1), "MatMulInteger": "int32"}.get(call.node.op, call.dtype(7))
    call.set(0, dtype)
    call.set(0, None, matmul_shape(call.shape(0), call.shape(3 if quantized else 1)))


@of_ops("Gemm")
def _gemm(call: Call) -> None:
    call.set(0, call.dtype(0) or call.dtype(1))
    left, right = call.shape(0), call.shape(1)
    rows = left[1] if call.attr("transA", 0) else left[0]
    columns = right[0] if call.attr("transB", 0) else right[1]
    call.set(0, None, (rows, columns))


@of_ops("Einsum")
def _einsum(call: Call) -> None:
    call.set(0, call.dtype(0))
    equation = call.attr("equation").replace(" ", "")
    left, arrow, right = equation.partition("->")
    terms = left.split(",")
    if len(terms) != len(call.inputs):
        raise Unknown
    sizes: dict[str, SymInt] = {}
    ellipsis: Shape = ()
    for index, term in enumerate(terms):
        shape = call.shape(index)
        before, dots, after = term.partition("...")
        spare = len(shape) - len(before) - len(after)
        if spare < 0 or (spare and not dots):
            raise Unknown
        if dots:
            ellipsis = broadcast_shapes(ellipsis, shape[len(before) : len(before) + spare])
        for letter, size in [
            *zip(before, shape, strict=False),
            *zip(after, shape[len(shape) - len(after) :], strict=False),
        ]:
            sizes[letter] = dims.broadcast(sizes[letter], size) if letter in sizes else size
    if not arrow:
        once = sorted(letter for letter in sizes if left.count(letter) == 1)
        right = ("..." if "..." in left else "") + "".join(once)
    before, dots, after = right.partition("...")
    call.set(0, None, (*(sizes[x] for x in before), *(ellipsis if dots else ()), *(sizes[x] for x in after)))


def _window(
    size: SymInt, kernel: int, stride: int, dilation: int, pads: tuple[int, int] | None, auto: str, ceil: bool
) -> SymInt:
    """Positions of a sliding window along one axis; `pads` None: computed from `auto`."""
    if auto in ("SAME_UPPER", "SAME_LOWER"):
        return (size + stride - 1) // stride
    begin, end = pads or (0, 0)
    span = size + (begin + end - (dilation * (kernel - 1) + 1))
    if not ceil:
        return span // stride + 1
    positions = (span + stride - 1) // stride + 1
    # The last window must start inside the input or its left padding.
    if isinstance(positions, Dim):
        outside = dims.less((positions - 1) * stride, size + begin)
        return dims.select(outside, positions, positions - 1)
    return positions - 1 if (positions - 1) * stride >= size + begin else positions  # type: ignore[operator]


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _windows(call: Call, spatial: Shape, kernel: Sequence[int]) -> list[SymInt]:
    count = len(spatial)
    strides = call.attr("strides") or [1] * count
    dilations = call.attr("dilations") or [1] * count
    pads = call.attr("pads") or [0] * (2 * count)
    auto = _text(call.attr("auto_pad", "NOTSET"))
    ceil = bool(call.attr("ceil_mode", 0))
    return [
        _window(
            spatial[i], kernel[i], strides[i], dilations[i],
            None if auto not in ("NOTSET", "") else (pads[i], pads[i + count]), auto, ceil,
        )
        for i in range(count)
    ]  # fmt: skip


@of_ops("Conv", "ConvInteger", "QLinearConv")
def _conv(call: Call) -> None:
    quantized = call.node.op == "QLinearConv"
    call.set(0, {"Conv": call.dtype(0), "ConvInteger": "int32"}.get(call.node.op, call.dtype(7)))
    data, weight = call.shape(0), call.shape(3 if quantized else 1)
    kernel = [k for k in call.attr("kernel_shape") or weight[2:] if not isinstance(k, Dim)]
    if len(kernel) != len(data) - 2:
        raise Unknown
    call.set(0, None, (data[0], weight[0], *_windows(call, data[2:], kernel)))


@of_ops("MaxPool", "AveragePool", "LpPool")
def _pool(call: Call) -> None:
    call.set(0, call.dtype(0))
    call.set(1, "int64")
    data = call.shape(0)
    shape = (*data[:2], *_windows(call, data[2:], call.attr("kernel_shape")))
    call.set(0, None, shape)
    call.set(1, None, shape)


@of_ops("GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool")
def _global_pool(call: Call) -> None:
    call.set(0, call.dtype(0))
    data = call.shape(0)
    call.set(0, None, (*data[:2], *[1] * (len(data) - 2)))


@of_ops("ConvTranspose")
def _conv_transpose(call: Call) -> None:
    call.set(0, call.dtype(0))
    data, weight = call.shape(0), call.shape(1)
    count = len(data) - 2
    channels = weight[1] * call.attr("group", 1)
    explicit = call.attr("output_shape")
    if explicit is not None:
        call.set(0, None, (data[0], channels, *explicit[-count:]))
        return
    strides = call.attr("strides") or [1] * count
    dilations = call.attr("dilations") or [1] * count
    extra = call.attr("output_padding") or [0] * count
    pads = call.attr("pads") or [0] * (2 * count)
    kernel = call.attr("kernel_shape") or weight[2:]
    if _text(call.attr("auto_pad", "NOTSET")) in ("SAME_UPPER", "SAME_LOWER"):
        spatial = [data[2 + i] * strides[i] for i in range(count)]
    else:
        spatial = [
            (data[2 + i] - 1) * strides[i] + extra[i] + (kernel[i] - 1) * dilations[i] + 1 - pads[i] - pads[i + count]
            for i in range(count)
        ]
    call.set(0, None, (data[0], channels, *spatial))


@of_ops("LSTM", "GRU", "RNN")
def _recurrent(call: Call) -> None:
    for index in range(3):
        call.set(index, call.dtype(0))
    data, weight = call.shape(0), call.shape(2)
    directions, hidden = weight[0], call.attr("hidden_size") or weight[-1]
    if call.attr("layout", 0):
        batch, steps = data[0], data[1]
        call.set(0, None, (batch, steps, directions, hidden))
        state = (batch, directions, hidden)
    else:
        steps, batch = data[0], data[1]
        call.set(0, None, (steps, directions, batch, hidden))
        state = (directions, batch, hidden)
    call.set(1, None, state)
    call.set(2, None, state)


@of_ops("Attention")
def _attention(call: Call) -> None:
    """`Attention` of ONNX 23: Q, K and V of rank 3 ([batch, length, heads · size]) or 4."""
    for index in range(4):
        call.set(index, call.dtype(0))
    query, key, value = (call.shape(i) for i in range(3))
    if len(query) == 4:
        batch, heads, length, _ = query
        kv_heads, new_length, head_size, value_size = key[1], key[2], key[3], value[3]
        call.set(0, None, (batch, heads, length, value_size))
    else:
        heads, kv_heads = call.attr("q_num_heads"), call.attr("kv_num_heads")
        if not heads or not kv_heads:
            raise Unknown
        batch, length, _ = query
        new_length, head_size, value_size = key[1], key[2] // kv_heads, value[2] // kv_heads
        call.set(0, None, (batch, length, value_size * heads))
    past = call.shape(4)[2] if call.has(4) else 0
    total = past + new_length
    call.set(1, None, (agreed(batch, key[0]), kv_heads, total, head_size))
    call.set(2, None, (agreed(batch, value[0]), kv_heads, total, value_size))
    call.set(3, None, (batch, heads, length, total))
