"""One more token after a cache: as exported, optimized, and with the cache in place.

    python benchmarks/bench_kv_cache.py FOLDER [--factor 6] [--past 128,512] [--models gpt2,llama] [--provider cpu|cuda]

Models of the corpus whose cache can be shared, made wider (see bench_cpu.py). In all forms inputs and outputs are bound
on the device; the caches of the first two grow, so ONNX Runtime allocates them in each step. The forms take turns; on
CPU with one thread the time is that of the process. Logits are compared before anything is timed.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from bench_cpu import widen

import onnxfuse
from onnxfuse.errors import KvCacheError
from onnxfuse.runtime.session import ort, provider_name

#: Rows of a buffer behind the tokens.
ROOM = 64
LIMIT = {"float32": 1e-3, "float16": 3e-2}
_NUMPY = {"tensor(float)": np.float32, "tensor(float16)": np.float16}


class Step:
    """One form of a model, bound to the inputs of one step.

    Args:
        proto: the form.
        caches: (past, present) names.
        feeds: of the step, the caches (as long as they are before it) among them.
        in_place: whether a past and its present are one buffer.
        provider: `cpu` or `cuda`.
    """

    def __init__(
        self, proto: onnx.ModelProto, caches: list[tuple[str, str]], feeds: dict[str, np.ndarray], in_place: bool,
        provider: str,
    ) -> None:
        self.session = onnxfuse.session(proto, [provider], intra_op_num_threads=1 if provider == "cpu" else 0)
        self._binding = self.session.io_binding()
        pasts = {past for past, _ in caches}
        held = {name: self._put(_roomy(v) if in_place and name in pasts else v, provider) for name, v in feeds.items()}
        for name, value in held.items():
            self._binding.bind_ortvalue_input(name, value)
        presents = {present: past for past, present in caches}
        self._names = [output.name for output in self.session.get_outputs()]
        for name in self._names:
            if in_place and name in presents:
                self._binding.bind_ortvalue_output(name, held[presents[name]])
            else:
                self._binding.bind_output(name, provider)

    @staticmethod
    def _put(array: np.ndarray, provider: str) -> Any:
        return ort().OrtValue.ortvalue_from_numpy(array, provider, 0)

    def run(self) -> None:
        self.session.run_with_iobinding(self._binding)
        self._binding.synchronize_outputs()

    def logits(self) -> np.ndarray:
        self.run()
        values = dict(zip(self._names, self._binding.copy_outputs_to_cpu(), strict=True))
        return next(v for n, v in values.items() if "logits" in n).astype(np.float64)


def _roomy(cache: np.ndarray) -> np.ndarray:
    return np.concatenate([cache, np.zeros((*cache.shape[:2], ROOM, cache.shape[3]), cache.dtype)], axis=2)


def feeds_for(session: Any, caches: list[tuple[str, str]], past: int) -> dict[str, np.ndarray]:
    """One token of one sequence after `past` cached ones."""
    rng = np.random.default_rng(0)
    pasts = {name for name, _ in caches}
    feeds: dict[str, np.ndarray] = {}
    for given in session.get_inputs():
        if given.name in pasts:
            shape = (1, given.shape[1], past, given.shape[3])
            feeds[given.name] = rng.standard_normal(shape).astype(_NUMPY[given.type])
        elif "mask" in given.name:
            feeds[given.name] = np.ones((1, past + 1), np.int64)
        elif "position" in given.name:
            feeds[given.name] = np.full((1, 1), past, np.int64)
        else:
            feeds[given.name] = rng.integers(0, 200, (1, 1))
    return feeds


def race(forms: dict[str, Step], seconds: float, clock: Callable[[], float]) -> dict[str, float]:
    """Milliseconds per step, the median of turns."""
    times: dict[str, list[float]] = {name: [] for name in forms}
    for form in forms.values():
        for _ in range(3):
            form.run()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times[next(iter(times))]) < 15:
        for name, form in forms.items():
            started = clock()
            form.run()
            times[name].append(clock() - started)
    return {name: 1e3 * float(np.median(values)) for name, values in times.items()}


def forms_of(proto: onnx.ModelProto, provider: str) -> tuple[dict[str, onnx.ModelProto], list[tuple[str, str]]]:
    """The three forms, and the names of the caches.

    Raises:
        KvCacheError: the cache cannot be shared.
    """
    shared = onnxfuse.optimize(proto, target=provider, verify=False, kv_cache="shared")
    separate = onnxfuse.optimize(proto, target=provider, verify=False)
    caches = [(entry["past"], entry["present"]) for entry in shared.report["kv_cache"]["caches"]]
    return {"exported": proto, "separate": separate.model, "shared": shared.model}, caches


def rows_of(path: Path, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Measures one model at all lengths.

    Raises:
        KvCacheError: its cache cannot be shared.
    """
    wide = widen(onnx.load(path), options.factor)
    protos, caches = forms_of(wide, options.provider)
    clock = time.process_time if options.provider == "cpu" else time.perf_counter
    plain = ort().InferenceSession(wide.SerializeToString(), providers=[provider_name("cpu")])
    dtype = "float16" if any(i.type == "tensor(float16)" for i in plain.get_inputs()) else "float32"
    for past in (int(p) for p in options.past.split(",")):
        feeds = feeds_for(plain, caches, past)
        forms = {name: Step(proto, caches, feeds, name == "shared", options.provider) for name, proto in protos.items()}
        logits = {name: form.logits() for name, form in forms.items()}
        scale = np.abs(logits["exported"]).max()
        worst = max(float(np.abs(value - logits["exported"]).max() / scale) for value in logits.values())
        if not worst <= LIMIT[dtype]:
            raise SystemExit(f"{path.name} after {past} tokens: logits differ by {worst:.1e}")
        ms = race(forms, options.seconds, clock)
        yield {"model": path.name, "provider": options.provider, "factor": options.factor, "past": past,
               **{f"{name}_ms": round(value, 4) for name, value in ms.items()},
               "ratio": round(ms["shared"] / ms["separate"], 3), "ort": ort().__version__}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--factor", type=int, default=6)
    parser.add_argument("--past", default="128,512")
    parser.add_argument("--models", default="")
    parser.add_argument("--provider", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--seconds", type=float, default=0.6)
    parser.add_argument("--csv", type=Path)
    options = parser.parse_args(arguments)
    names = [name for name in options.models.split(",") if name]
    rows: list[dict[str, Any]] = []
    for record in json.loads((options.folder / "manifest.json").read_text())["models"]:
        cached = any("past" in value["name"] for value in record["inputs"]) and not record.get("already_fused")
        if not cached or (names and not any(name in record["file"] for name in names)):
            continue
        try:
            for row in rows_of(options.folder / record["file"], options):
                rows.append(row)
                print(f"{row['model']:34} {row['past']:5} cached  exported {row['exported_ms']:7.3f}  separate "
                      f"{row['separate_ms']:7.3f}  shared {row['shared_ms']:7.3f} ms  x{row['ratio']:.3f}", flush=True)
        except KvCacheError as error:
            print(f"not timed: {record['file']}: {error.message}")
    if options.csv and rows:
        with options.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    return 0 if rows else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
