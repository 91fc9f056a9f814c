"""Rows of benchmarks/results/llama.csv, and what they say."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import result_rows
from result_rows import Row

RESULTS = Path(__file__).resolve().parent / "results" / "llama.csv"
FIELDS = (
    "date", "commit", "gpu", "driver", "cuda", "torch", "onnxruntime", "layers", "tokens", "variant",
    "p20_ms", "median_ms", "p80_ms", "floor_ms", "max_error", "nodes",
)  # fmt: skip
OURS, TUNED, BASELINE = "onnxfuse", "onnxfuse tuned", "ort"
WITHOUT = "onnxfuse without "

EARLIER_MS = {1: 1.038, 16: 1.120, 512: 2.770, 2048: 12.93}
"""What ONNX Runtime took on another day, by tokens: to be beaten on any day."""

ABLATIONS = {
    "norm": ("norm-*",),
    "residual": ("linear-residual*",),
    "gate": ("gated-*",),
    "packing": ("linear-pack",),
    "attention": ("attention",),
}
"""What is left out, one at a time, and the rules (by file name) that make it."""


def rules_of(ablation: str, rules: Path) -> list[str]:
    """The ids of the built-in rules that an ablation switches off.

    Raises:
        KeyError: there is no such ablation, or no rule for it.
    """
    found = sorted({path.stem for pattern in ABLATIONS[ablation] for path in rules.glob(f"*/{pattern}.yaml")
                    if path.parent.name in ("lift", "fuse")})  # fmt: skip
    if not found:
        raise KeyError(f"no rule for `{ablation}`")
    return found


def read(path: Path) -> list[Row]:
    """All rows; none if there is no file."""
    return result_rows.read(path, FIELDS)


def append(path: Path, rows: Sequence[Row]) -> None:
    result_rows.append(path, FIELDS, rows)


def latest(rows: Sequence[Row]) -> dict[int, dict[str, Row]]:
    """By tokens and variant, the rows of the last run (date and commit) that had both ours and the baseline."""
    runs: dict[tuple[str, str, int], dict[str, Row]] = {}
    for row in rows:
        runs.setdefault((row["date"], row["commit"], int(row["tokens"])), {})[row["variant"]] = row
    found: dict[int, dict[str, Row]] = {}
    for (_, _, tokens), variants in runs.items():
        if BASELINE in variants and (OURS in variants or TUNED in variants):
            found[tokens] = variants
    return dict(sorted(found.items()))


def before_and_after(variants: dict[str, Row]) -> tuple[Row, Row]:
    """ONNX Runtime's row and ours, of one run."""
    return variants[BASELINE], variants.get(TUNED) or variants[OURS]


def verdict(rows: Sequence[Row]) -> str:
    """One line a token count: how fast, how much above the floor, and what each fusion brings."""
    lines = []
    for tokens, variants in latest(rows).items():
        before, ours = before_and_after(variants)
        time, floor, base = float(ours["median_ms"]), float(ours["floor_ms"]), float(before["median_ms"])
        beaten = time < min(base, EARLIER_MS.get(tokens, base))
        line = (f"{'met' if beaten else 'missed':7s} {tokens} tokens: {time:.3f} ms, ONNX Runtime {base:.3f} "
                f"(x{base / time:.2f}), floor {floor:.3f} (+{(time / floor - 1) * 100:.0f} %)")  # fmt: skip
        gains = [
            f"{name[len(WITHOUT):]} {float(row['median_ms']) - time:+.3f}"
            for name, row in variants.items() if name.startswith(WITHOUT)
        ]  # fmt: skip
        lines.append(line + (f"; ms more without: {', '.join(gains)}" if gains else ""))
    return "\n".join(lines)
