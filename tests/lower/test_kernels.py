"""The kernel table: what the installed runtime says, what is shipped, what is our own."""

from __future__ import annotations

import json

import pytest

from onnxfuse.errors import UsageError
from onnxfuse.lower.kernels import MICROSOFT, KernelTable, Query, Target
from onnxfuse.runtime.probe import OrtProbe

CPU = Target("cpu")
CUDA = Target("cuda", 90)


def test_target_text_round_trips_and_rejects_what_is_none():
    assert [str(Target.parse(t)) for t in ("cpu", "cuda", "cuda:sm90")] == ["cpu", "cuda", "cuda:sm90"]
    for text in ("gpu", "cuda:90", "cuda:smx", ""):
        with pytest.raises(UsageError, match="unknown target"):
            Target.parse(text)


@pytest.mark.parametrize(
    ("op", "domain", "dtype", "opset", "expected"),
    [
        ("LayerNormalization", "", "float32", 14, True),  # ONNX Runtime has it from opset 1
        ("LayerNormalization", "", "float32", 17, True),
        ("RMSNormalization", "", "float32", 22, False),  # not in ONNX yet
        ("RMSNormalization", "", "float32", 23, True),
        ("SimplifiedLayerNormalization", "", "float32", 17, True),
        ("Gelu", MICROSOFT, "float32", 17, True),
        ("Gelu", MICROSOFT, "float16", 17, False),  # a function body, no kernel
        ("BiasGelu", MICROSOFT, "float16", 17, False),  # runs only between Casts
        ("MatMul", "", "bfloat16", 17, False),
        ("NoSuchOp", MICROSOFT, "float32", 17, False),
    ],
)
def test_the_installed_runtime_is_asked(op, domain, dtype, opset, expected, tmp_path):
    table = KernelTable(CPU, OrtProbe(tmp_path))
    assert table.has(op, dtype, opset=opset, domain=domain) is expected


def test_ranks_that_no_kernel_takes_are_not_asked_about():
    asked: list[Query] = []
    table = KernelTable(CPU, lambda target, query: asked.append(query) or True)
    assert not table.has("SkipLayerNormalization", "float32", opset=17, domain=MICROSOFT, rank=4)
    assert not table.has("Gemm", "float32", opset=17, rank=None)
    assert not table.has("MatMul", None, opset=17)
    assert asked == []
    assert table.has("SkipLayerNormalization", "float32", opset=17, domain=MICROSOFT, rank=3)


def test_every_question_is_asked_once():
    asked: list[Query] = []
    table = KernelTable(CPU, lambda target, query: asked.append(query) or True)
    for _ in range(3):
        table.has("MatMul", "float32", opset=17)
    assert len(asked) == 1


def test_the_shipped_table_answers_where_there_is_no_gpu():
    table = KernelTable(CUDA, lambda target, query: None)
    assert table.has("GroupQueryAttention", "float16", opset=17, domain=MICROSOFT)
    assert not table.has("GroupQueryAttention", "float32", opset=17, domain=MICROSOFT)
    assert not table.has("ReduceMean", "bfloat16", opset=18)
    assert table.has("Softmax", "bfloat16", opset=17)
    assert not table.has("Unheard", "float32", opset=17, domain=MICROSOFT)


def test_own_ops_need_the_library():
    assert KernelTable(CPU).has_custom("Linear", "bfloat16")
    assert not KernelTable(CPU).has_custom("Linear", "float64")
    assert not KernelTable(CPU, custom_ops=False).has_custom("Linear", "float32")
    assert not KernelTable(CPU).has_custom("NoSuchOp", "float32")


def test_answers_are_kept_in_a_file_and_read_again(tmp_path, monkeypatch):
    first = OrtProbe(tmp_path)
    assert first(CPU, Query("", "MatMul", "float32", 17)) is True
    (file,) = tmp_path.glob("kernels-*-cpu.json")
    assert json.loads(file.read_text()) == {"::MatMul/float32/opset17/rank3/": True}
    monkeypatch.setattr("onnxfuse.runtime.probe._try", lambda provider, query: pytest.fail("asked again"))
    assert OrtProbe(tmp_path)(CPU, Query("", "MatMul", "float32", 17)) is True


@pytest.mark.parametrize("content", ["{", "[1]", '{"a": "yes"}'])
def test_a_damaged_file_is_made_anew(tmp_path, content):
    OrtProbe(tmp_path)(CPU, Query("", "MatMul", "float32", 17))
    (file,) = tmp_path.glob("kernels-*-cpu.json")
    file.write_text(content)
    assert OrtProbe(tmp_path)(CPU, Query("", "MatMul", "float32", 17)) is True
    assert json.loads(file.read_text())


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert OrtProbe(blocked)(CPU, Query("", "MatMul", "float32", 17)) is True
