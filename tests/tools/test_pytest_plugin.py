"""The fixture for users' own suites, run in a suite of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest_plugins = ["pytester"]
MODEL = Path(__file__).parents[2] / "models" / "llama-ts17-f16-eager.onnx"


def test_in_a_users_suite(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        f"""
        import pytest
        MODEL = {str(MODEL)!r}

        @pytest.fixture(scope="module")
        def shared():
            return {{}}

        @pytest.fixture
        def llama(onnxfuse_model, shared):
            if not shared:
                shared["fused"] = onnxfuse_model(MODEL, verify_sets=1)
            return shared["fused"]

        def test_fuses(llama):
            llama.assert_fusions({{"rms-norm": 5, "gated-linear": ">=2"}})
            llama.assert_blocks({{"rmsnorm": 5}})
            llama.assert_ops({{"ai.onnx::Pow": 0}})
            llama.assert_equal(tolerance=0.05)
            assert llama.model.graph.node

        def test_lost(llama):
            llama.assert_fusions({{"rms-norm": 6, "gelu-erf": 1}})

        def test_op(llama):
            llama.assert_ops({{"ai.onnx::Softmax": 99}})

        def test_too_tight(llama):
            llama.assert_equal(tolerance=1e-12)
        """
    )
    result = pytester.runpytest_inprocess("-p", "onnxfuse.pytest_plugin", "-p", "no:cacheprovider")
    result.assert_outcomes(passed=1, failed=3)
    result.stdout.fnmatch_lines([
        "*rms-norm applied 5 times, expected 6*",
        "*gelu-erf applied 0 times, expected 1*",
        "*gelu-erf at *: rules/lift/gelu-erf.yaml:*",
        "*ops: * ai.onnx::Softmax, expected 99*",
        "*output `logits`: error *, allowed 1e-12*",
    ])  # fmt: skip
