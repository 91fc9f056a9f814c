"""The cells are what is claimed of the kernels, each once, the most important first."""

from __future__ import annotations

import op_suites
from op_suites import cells

from onnxfuse.runtime.kernels import Shape


def test_norm_linear_is_a_grid_in_both_dtypes() -> None:
    found = {cell.shape for cell in cells(("norm-linear",))}
    assert found == {
        Shape(m, d, d, dtype, norm="rms")
        for m in (1, 32, 128, 512, 1024) for d in (1024, 2048, 4096) for dtype in ("float16", "bfloat16")
    }  # fmt: skip


def test_activation_has_llama_and_bert_layers_besides_the_square() -> None:
    found = [cell.shape for cell in cells(("activation",), ("float16",))]
    widths = {(s.n, s.k) for s in found}
    assert widths == {(4096, 4096), (6144, 4096), (28672, 4096), (4096, 14336),
                      (3072, 1024), (1024, 1024), (4096, 1024), (1024, 4096)}  # fmt: skip
    assert len(found) == len(set(found)) == len(widths) * 4 * 3
    assert all(s.bias and s.norm == "none" for s in found)


def test_decode_layer_norm_and_swiglu() -> None:
    decode = cells(("decode",), ("float16",))
    assert {cell.weight_bytes for cell in decode} == {2 * n * k for n, k in ((6144, 4096), (4096, 4096), (28672, 4096),
                                                                            (4096, 14336))}  # fmt: skip
    assert {cell.shape.rows for cell in decode} == {1, 2, 4, 8, 16}
    layer = [cell.shape for cell in cells(("layer-norm",), ("float16",))]
    assert {s.rows for s in layer} >= {512, 2048, 197, 577}
    assert all((s.norm, s.activation, s.bias) == ("layer", "gelu", True) for s in layer)
    gated = cells(("swiglu",), ("bfloat16",))
    assert [cell.shape.rows for cell in gated] == [1, 16, 128, 512, 2048]
    assert {cell.packed_columns for cell in gated} == {28672}


def test_the_order_is_that_of_importance() -> None:
    found = cells(op_suites.SUITES)
    assert len(found) == len(set(found))
    assert [cell.priority for cell in found] == sorted(cell.priority for cell in found)
    assert found[0].suite == "norm-linear"
    last_square = max(i for i, c in enumerate(found) if c.suite == "layer-norm")
    first_layer = min(i for i, c in enumerate(found) if c.suite == "activation" and c.shape.k != 4096)
    assert last_square < first_layer
    assert found[-1].suite == "between"
