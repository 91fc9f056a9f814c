"""Sections on what was found: blocks, rules that applied, the model layer by layer, what was missed and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from onnxfuse.html_report.layers import Group, Step
from onnxfuse.html_report.markup import Html, join, mono, table, tag
from onnxfuse.report import block_name

Miss = Mapping[str, Any]


def blocks(report: Mapping[str, Any]) -> Html:
    """Blocks found, and how many the target runs as one op."""
    found, lowered = report["blocks"], report["blocks_lowered"]
    keys = [k for k in found if isinstance(found[k], int) and found[k]]
    if not keys:
        return Html("")
    rows = []
    for key in keys:
        kept = lowered.get(key, 0)
        state = tag("span", "one op", cls="tag good") if kept >= found[key] else tag(
            "span", f"{kept} of {found[key]} as one op", cls="tag warn")  # fmt: skip
        rows.append((block_name(key), found[key], state))
    reasons = [
        tag("p", mono(e["op"]), f" ×{e['count']} taken apart: {e['reason']}", cls="quiet")
        for e in report.get("lowering", {}).get("taken_apart", ())
    ]
    return tag(
        "section", tag("h2", "Blocks"), table(("block", "found", "on this target"), rows, numeric=(1,)), *reasons
    )


def fusions(report: Mapping[str, Any]) -> Html:
    if not report["fusions"]:
        return tag("section", tag("h2", "What was rewritten"), tag("p", "No rule applied."))
    rows = [(mono(f["rule"]), f["stage"], f["count"]) for f in report["fusions"]]
    return tag("section", tag("h2", "What was rewritten"), table(("rule", "stage", "times"), rows, numeric=(2,)))


def layers(groups: Sequence[Group], misses: Sequence[Miss]) -> Html:
    """The fused model in order, repeated layers folded."""
    if not groups:
        return Html("")
    cards = [_layer(group, index, groups, _by_value(misses)) for index, group in enumerate(groups)]
    legend = tag(
        "p",
        "Main operations in order, with output shapes. Green: fused. Amber: a rule nearly matched here.",
        cls="quiet",
    )
    return tag("section", tag("h2", "The model, block by block"), legend, *cards)


def _by_value(misses: Sequence[Miss]) -> dict[str, list[Miss]]:
    found: dict[str, list[Miss]] = {}
    for miss in misses:
        if not miss.get("in_pieces", True):
            continue  # the op there is fused already; the list of misses has it
        for value in miss.get("values", ()):
            found.setdefault(value, []).append(miss)
    return found


def _layer(group: Group, index: int, groups: Sequence[Group], missed: Mapping[str, list[Miss]]) -> Html:
    moved = sum(s.plumbing for s in group.steps)
    if group.count > 1:
        title = f"Layer, {group.count} times"
    elif len(groups) == 1:
        title = "Whole model"
    else:
        title = "Start" if index == 0 else "End" if index == len(groups) - 1 else "Between"
    facts = f"{len(group.steps)} operations" + (f", {moved} more that move data" if moved else "")
    shown = [_step(step, _of_step(step, group, position, missed)) for position, step in enumerate(group.steps)]
    body: Html = tag("ol", *shown)
    if len(group.steps) > 60:
        body = tag("details", tag("summary", "Show all operations"), body, style="padding:0 .9rem")
    return tag("div", tag("header", tag("b", title), tag("span", facts, cls="quiet")), body, cls="layer")


def _of_step(step: Step, group: Group, position: int, missed: Mapping[str, list[Miss]]) -> list[Miss]:
    """Misses at this step in any of the folded layers, one of each reason."""
    length = len(group.steps)
    values = group.values[position::length] if length else ()
    found: dict[tuple[str, str], Miss] = {}
    for value in values or (step.value,):
        for miss in missed.get(value, ()):
            found.setdefault((miss["rule"], miss["check"]), miss)
    return list(found.values())


def _step(step: Step, misses: Sequence[Miss]) -> Html:
    state = "step fused" if step.fused else "step missed" if misses else "step"
    what: list[object] = [mono(step.op)]
    if step.note:
        what.append(f" {step.note}")
    if step.rule:
        what += [" ", tag("span", step.rule, cls="tag good")]
    why = [
        tag("span", f"{m['rule']}: {m['check']}, expected {m['expected']}, found {m['found']}", cls="why")
        for m in misses[:2]
    ]
    return tag("li", tag("span", *what, cls="what"), tag("span", step.shape, cls="shape"), *why, cls=state)


def missed(misses: Sequence[Miss], report: Mapping[str, Any]) -> Html:
    """Near misses, the nearest first."""
    if not misses:
        return Html("")
    cards = [_miss(m) for m in misses[:12]]
    rest = (
        [tag("details", tag("summary", f"{len(misses) - 12} more"), *map(_miss, misses[12:60]))]
        if len(misses) > 12
        else []
    )
    intro = tag("p", "Rules that matched almost, with the constraint that stopped them.", cls="quiet")
    return tag("section", tag("h2", "Missed, and why"), intro, *cards, *rest)


def _miss(miss: Miss) -> Html:
    head = [mono(miss["rule"]), f" at {miss['node']}"]
    if miss.get("count", 1) > 1:
        head += [" ", tag("span", f"× {miss['count']}", cls="tag")]
    place = f"{miss['file']}:{miss['line']}" if miss.get("line") else miss.get("file", "")
    rows = [("check", join([mono(miss["check"]), " ", tag("span", place, cls="quiet")]))]
    rows += [("expected", miss["expected"]), ("found", miss["found"])]
    if miss.get("hint"):
        rows.append(("hint", miss["hint"]))
    terms = [join([tag("dt", name), tag("dd", value)]) for name, value in rows]
    return tag("div", tag("div", *head), tag("dl", *terms), cls="miss")
