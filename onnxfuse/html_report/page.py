"""One self-contained HTML page about one optimized model. Pure: data in, text out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from onnxfuse.html_report import measured, structure
from onnxfuse.html_report.layers import Group
from onnxfuse.html_report.markup import Html, amount, join, mono, tag, text
from onnxfuse.html_report.style import CSS


@dataclass
class Content:
    """What the page shows; every part but `optimized` may be missing.

    Attributes:
        optimized: the JSON report of `optimize`.
        before, after: the JSON of `inspect` for both models.
        ops_before: op counts of the original.
        layers: the fused model, folded.
        misses: near misses of `explain`, each as its JSON.
        bench: `{"machine": …, "cases": […]}` of `bench`.
        version: of onnxfuse.
    """

    optimized: Mapping[str, Any]
    before: Mapping[str, Any] | None = None
    after: Mapping[str, Any] | None = None
    ops_before: Mapping[str, int] = field(default_factory=dict)
    layers: Sequence[Group] = ()
    misses: Sequence[Mapping[str, Any]] = ()
    bench: Mapping[str, Any] | None = None
    version: str = ""


def render(content: Content) -> str:
    """The whole page. It loads nothing: no script, no font, no image, no address."""
    report = content.optimized
    name = str(report["model"]).rsplit("/", 1)[-1]
    body = join([
        tag("h1", name),
        tag("p", "Fused for ", mono(report["target"]), f" by onnxfuse {content.version}".rstrip(), cls="quiet"),
        _tiles(content),
        structure.blocks(report),
        structure.fusions(report),
        structure.layers(content.layers, content.misses),
        structure.missed(content.misses, report),
        measured.verification(report["verify"], report["reverted"]),
        measured.times(content.bench),
        measured.ops(content.ops_before, report["ops_after"]),
        measured.cost(content.before, content.after),
        _footer(report),
    ])  # fmt: skip
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n<link rel="icon" href="data:,">\n'
        f"<title>{text(name)}: fusion report</title>\n<style>{CSS}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def _tile(value: str, label: str, mood: str = "") -> Html:
    return tag("div", tag("b", value), tag("span", label), cls=f"tile {mood}".strip())


def _tiles(content: Content) -> Html:
    report = content.optimized
    nodes = report["nodes"]
    tiles = [_tile(f"{nodes['before']} → {nodes['after']}", "nodes")]
    speed = measured.speedup(content.bench)
    if speed is not None:
        tiles.append(_tile(f"{speed:.2f}×", "speed of ONNX Runtime alone", "good" if speed >= 1 else "bad"))
    status = report["verify"]["status"]
    moods = {"passed": ("verified", "good"), "structure-only": ("verified", "good"), "skipped": ("not verified", "")}
    word, mood = moods.get(status, (status, "bad"))
    errors = [o["error"] for o in report["verify"].get("outputs", ())]
    tiles.append(_tile(word, f"largest error {max(errors):.1e}" if errors else "against the oracle", mood))
    fused = sum(f["count"] for f in report["fusions"])
    tiles.append(_tile(str(fused), "rewrites applied"))
    if content.before and content.after:
        tiles.append(
            _tile(
                f"{amount(content.after['memory']['peak_activation_bytes'], 'B')}",
                f"peak activations, was {amount(content.before['memory']['peak_activation_bytes'], 'B')}",
            )
        )
        tiles.append(
            _tile(
                f"{amount(content.after['bytes'], 'B')}", f"memory traffic, was {amount(content.before['bytes'], 'B')}"
            )
        )
    return tag("section", *tiles, cls="tiles")


def _footer(report: Mapping[str, Any]) -> Html:
    steps = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in report["seconds"].items())
    return tag("footer", "Time spent: ", steps or "not recorded", ".")
