"""The GPU side of bench_llama.py: the model, its export, and what is run and timed (PyTorch and ONNX Runtime)."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import onnxruntime as ort
import torch


def build_model(layers: int, vocab: int) -> torch.nn.Module:
    """A seeded float16 Llama on the GPU; every parameter random, norms near one."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=layers, num_attention_heads=32,
        num_key_value_heads=8, vocab_size=vocab, max_position_embeddings=4096, rms_norm_eps=1e-5,
        rope_theta=500000.0, tie_word_embeddings=False, use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = LlamaForCausalLM(config).half().eval()
    for name, parameter in model.named_parameters():
        with torch.no_grad():
            if "norm" in name:
                parameter.copy_(1 + 0.1 * torch.randn_like(parameter))
            else:
                parameter.copy_(0.02 * torch.randn_like(parameter))
    return model


class Logits(torch.nn.Module):
    """Only the logits, so that the exported graph has one output."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=input_ids, use_cache=False).logits


def export(model: torch.nn.Module, path: Path, opset: int) -> None:
    ids = torch.randint(0, 1000, (2, 9), device="cuda")
    shapes = {"input_ids": {0: torch.export.Dim("batch"), 1: torch.export.Dim("seq")}}
    program = torch.onnx.export(
        Logits(model), (), kwargs={"input_ids": ids}, dynamo=True, opset_version=opset, dynamic_shapes=shapes,
        input_names=["input_ids"], output_names=["logits"], verbose=False,
    )  # fmt: skip
    program.save(str(path), external_data=True)


def results_of(model: torch.nn.Module, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The logits as PyTorch computes them in float16, and in float32 from the same weights."""
    with torch.no_grad():
        half = Logits(model)(torch.from_numpy(ids).cuda()).float().cpu().numpy()
        model.float()
        exact = Logits(model)(torch.from_numpy(ids).cuda()).cpu().numpy()
        model.half()
    return half, exact


def session(path: Path, library: str | None, graph: bool = True) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.log_severity_level = 3
    if library:
        options.register_custom_ops_library(library)
    providers = [("CUDAExecutionProvider", {"enable_cuda_graph": str(int(graph)), "use_tf32": "0"})]
    return ort.InferenceSession(str(path), options, providers=providers)


class Bound:
    """One session and one token count: inputs and outputs on the device, one captured CUDA graph."""

    def __init__(self, owner: ort.InferenceSession, ids: np.ndarray, vocab: int, graph_id: int) -> None:
        self.session = owner
        self.binding = owner.io_binding()
        self.ids = ort.OrtValue.ortvalue_from_numpy(ids, "cuda", 0)
        self.logits = ort.OrtValue.ortvalue_from_shape_and_type([*ids.shape, vocab], np.float16, "cuda", 0)
        self.binding.bind_ortvalue_input("input_ids", self.ids)
        self.binding.bind_ortvalue_output(owner.get_outputs()[0].name, self.logits)
        self.options = ort.RunOptions()
        self.options.add_run_config_entry("gpu_graph_id", str(graph_id))
        self.options.add_run_config_entry("disable_synchronize_execution_providers", "1")
        for _ in range(4):  # two plain runs, the capture, one replay
            self.run()
        torch.cuda.synchronize()

    def run(self) -> None:
        self.session.run_with_iobinding(self.binding, self.options)

    def result(self) -> np.ndarray:
        torch.cuda.synchronize()
        return self.logits.numpy().astype(np.float32)


def open_session(path: Path, library: str | None, vocab: int) -> tuple[ort.InferenceSession, bool]:
    """A session, and whether its runs can be captured; one that cannot is timed launched, and called so."""
    try:
        found = session(path, library)
        Bound(found, np.ones((1, 8), np.int64), vocab, 1000)
    except Exception as error:  # ONNX Runtime raises its own kinds
        print(f"{path.stem}: no CUDA graph ({str(error)[:300]})", flush=True)
        return session(path, library, graph=False), False
    return found, True


class TorchGraph:
    """A PyTorch callable captured as a CUDA graph for one token count."""

    def __init__(self, function: torch.nn.Module, ids: np.ndarray) -> None:
        self.ids = torch.from_numpy(ids).cuda()
        with torch.no_grad():
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                for _ in range(3):
                    function(self.ids)
            torch.cuda.synchronize()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.out = function(self.ids)

    def run(self) -> None:
        self.graph.replay()

    def result(self) -> np.ndarray:
        self.run()
        torch.cuda.synchronize()
        return self.out.float().cpu().numpy()


def eager(model: torch.nn.Module, ids: np.ndarray) -> TorchGraph:
    return TorchGraph(Logits(model), ids)


def compiled(model: torch.nn.Module, ids: np.ndarray) -> TorchGraph:
    return TorchGraph(torch.compile(Logits(model), dynamic=False), ids)


def time_interleaved(variants: dict[str, Bound | TorchGraph], seconds: float) -> dict[str, np.ndarray]:
    """Milliseconds a run: rounds of back-to-back runs per variant, variants taking turns; each round is one sample.

    Returns the 20, 50 and 80 % quantiles.
    """
    samples: dict[str, list[float]] = {name: [] for name in variants}
    per_round = {}
    for name, variant in variants.items():
        start = time.perf_counter()
        for _ in range(5):
            variant.run()
        torch.cuda.synchronize()
        per_round[name] = max(3, min(200, int(0.02 / max((time.perf_counter() - start) / 5, 1e-6))))
    stop = time.perf_counter() + seconds * len(variants)
    while time.perf_counter() < stop or len(next(iter(samples.values()))) < 5:
        for name, variant in variants.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(per_round[name]):
                variant.run()
            torch.cuda.synchronize()
            samples[name].append((time.perf_counter() - start) / per_round[name] * 1e3)
    return {name: np.percentile(values, [20, 50, 80]) for name, values in samples.items()}


def ceilings() -> tuple[float, float]:
    """Copy bandwidth (bytes/s, read plus written) and float16 matrix rate (flop/s) of this GPU, measured."""
    a = torch.empty(1 << 31, dtype=torch.uint8, device="cuda").random_()
    b = torch.empty_like(a)
    x = torch.randn(8192, 8192, device="cuda", dtype=torch.float16)
    y = torch.randn(8192, 8192, device="cuda", dtype=torch.float16)

    def event_time(function, runs: int = 10) -> float:
        for _ in range(3):
            function()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(runs):
            function()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / runs / 1e3

    bandwidth = 2 * a.numel() / event_time(lambda: b.copy_(a))
    rate = 2 * 8192**3 / event_time(lambda: x @ y)
    return bandwidth, rate


def floor_ms(model: torch.nn.Module, tokens: int, bandwidth: float, rate: float) -> float:
    """Each weight read once (one embedding row per token), or all matrix products at full rate."""
    weights = sum(p.numel() for n, p in model.named_parameters() if "embed_tokens" not in n)
    return max(2 * weights / bandwidth, 2 * weights * tokens / rate) * 1e3


def versions() -> list[str]:
    return [torch.cuda.get_device_name(), str(torch.version.cuda), torch.__version__, ort.__version__]
