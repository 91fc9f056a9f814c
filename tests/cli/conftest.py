"""Runs the command line in this process, as a user would see it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import pytest

from onnxfuse.cli.main import main

MODELS = Path(__file__).parents[2] / "models"


@dataclass
class Outcome:
    """Exit code, stdout and stderr."""

    code: int
    out: str
    err: str

    @property
    def data(self) -> Any:
        return json.loads(self.out)


Cli = Callable[..., Outcome]


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    def run(*arguments: object) -> Outcome:
        capsys.readouterr()
        with pytest.raises(SystemExit) as stopped:
            main([str(a) for a in arguments])
        captured = capsys.readouterr()
        return Outcome(int(stopped.value.code or 0), captured.out, captured.err)

    return run


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """A model with one fusable block: RMSNorm, Linear, bias and GELU."""
    proto = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 17]>
        g (float[batch, seq, 16] x) => (float[batch, seq, 32] y)
        <float two = {2}, float eps = {1e-6}, float one = {1}, float half = {0.5}, float root = {1.4142135}> {
          square = Pow (x, two)
          mean = ReduceMean <axes = [-1]> (square)
          var = Add (mean, eps)
          rms = Sqrt (var)
          unit = Div (x, rms)
          normed = Mul (unit, gamma)
          product = MatMul (normed, weight)
          h = Add (product, bias)
          scaled = Div (h, root)
          erf = Erf (scaled)
          cdf = Add (erf, one)
          wide = Mul (h, cdf)
          y = Mul (wide, half)
        }"""
    )
    import numpy as np

    rng = np.random.default_rng(0)
    for name, shape in (("gamma", (16,)), ("weight", (16, 32)), ("bias", (32,))):
        values = rng.standard_normal(shape).astype(np.float32)
        proto.graph.initializer.append(onnx.numpy_helper.from_array(values, name))
    path = tmp_path / "tiny.onnx"
    onnx.save(proto, path)
    return path
