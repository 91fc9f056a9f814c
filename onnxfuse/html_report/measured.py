"""Sections with numbers: verification, times, op counts, cost and memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from onnxfuse.html_report.markup import Html, amount, bars, join, milliseconds, mono, table, tag

#: Names of bench subjects for people.
_SUBJECTS = {
    "ort": "ONNX Runtime alone",
    "ort-unoptimized": "without optimizations",
    "onnxfuse": "fused",
}


def verification(verify: Mapping[str, Any], reverted: Sequence[Mapping[str, Any]]) -> Html:
    status = verify["status"]
    if status == "skipped":
        return tag("section", tag("h2", "Verification"), tag("p", "The result was not compared with the original."))
    rows = []
    for output in verify.get("outputs", ()):
        worst = output.get("worst") or {}
        where = f"{worst.get('set', '')} {worst.get('index', '')}".strip()
        rows.append((mono(output["name"]), _number(output["error"]), _number(output["unfused_error"]),
                     _number(output.get("tolerance")), where))  # fmt: skip
    intro = tag(
        "p", f"Errors are relative to the largest value of the {verify.get('oracle', '')} oracle, over "
        f"{len(verify.get('sets', ()))} input sets. The unfused model's own error is beside it.", cls="quiet",
    )  # fmt: skip
    problems = [tag("p", tag("span", "problem", cls="tag bad"), " ", p) for p in verify.get("problems", ())[:10]]
    taken_back = [
        tag("p", tag("span", "taken back", cls="tag warn"), " ", mono(r["rule"]), f": {r['problem']}") for r in reverted
    ]
    notes = [tag("p", n, cls="quiet") for n in verify.get("notes", ())[:6]]
    header = ("output", "error", "unfused error", "allowed", "worst at")
    body = table(header, rows, numeric=(1, 2, 3, 4)) if rows else Html("")
    return tag("section", tag("h2", "Verification"), intro, body, *problems, *taken_back, *notes)


def _number(value: Any) -> str:
    return "" if value is None else f"{value:.2e}" if isinstance(value, float) else str(value)


def speedup(bench: Mapping[str, Any] | None) -> float | None:
    """Baseline time over fused time, the geometric mean of all cases; None if it was not measured."""
    ratios = []
    for case in (bench or {}).get("cases", ()):
        for subject in case["subjects"]:
            if subject["name"] == "onnxfuse" and "ratio" in subject:
                ratios.append(1 / subject["ratio"]["value"])
    if not ratios:
        return None
    product = 1.0
    for r in ratios:
        product *= r
    return float(product ** (1 / len(ratios)))


def times(bench: Mapping[str, Any] | None) -> Html:
    """Medians and spread of every case, then time by op before and after."""
    if not bench:
        return Html("")
    machine = bench["machine"]
    sections: list[object] = [
        tag("h2", "Times"),
        tag("p", f"{machine.get('gpu') or machine['processor']}, {machine['cores']} cores, ONNX Runtime "
            f"{machine['onnxruntime']}. ONNX Runtime alone means the unfused model with all of its "
            "optimizations on. Medians of interleaved runs; the spread is from the 20% to the 80% quantile.",
            cls="quiet"),
    ]  # fmt: skip
    for case in bench["cases"]:
        sizes = ", ".join(f"{n} {'×'.join(map(str, s))}" for n, s in list(case["inputs"].items())[:3])
        sections.append(tag("p", sizes, cls="mono"))
        sections.append(_case(case))
        sections.append(_by_op(case))
    return tag("section", *sections)


def _case(case: Mapping[str, Any]) -> Html:
    largest = max((s.get("median_ms", 0.0) for s in case["subjects"]), default=0.0)
    rows = []
    for subject in case["subjects"]:
        name = _SUBJECTS.get(subject["name"], subject["name"])
        if subject["status"] != "ok":
            rows.append((name, tag("span", subject["status"], cls="tag bad"), subject.get("reason", "")[:120], ""))
            continue
        ratio = subject.get("ratio")
        shown = f"{1 / ratio['value']:.2f}×" if ratio else "1.00×"
        width = 100 * subject["median_ms"] / largest if largest else 0
        kind = "bar new" if subject["name"] == "onnxfuse" else "bar"
        label = join(
            [f"{milliseconds(subject['median_ms'])} ", tag("span", f"±{50 * subject['spread']:.0f}%", cls="quiet")]
        )
        rows.append((name, label, _bar(kind, width), shown))
    return table(("form", "time", "", "speed"), rows, numeric=(3,))


def _bar(kind: str, width: float) -> Html:
    return tag("div", Html(f'<span class="{kind}" style="width:{width:.1f}%"></span>'), cls="bars")


def _by_op(case: Mapping[str, Any]) -> Html:
    subjects = {s["name"]: {o["op"]: o for o in s.get("ops", ())} for s in case["subjects"]}
    before, after = subjects.get(case["baseline"], {}), subjects.get("onnxfuse", {})
    if not before or not after:
        return Html("")
    both = sorted(
        before.keys() | after.keys(),
        key=lambda op: -max(before.get(op, {}).get("milliseconds", 0), after.get(op, {}).get("milliseconds", 0)),
    )
    largest = max([o["milliseconds"] for o in [*before.values(), *after.values()]], default=0.0)
    rows = []
    for op in both[:15]:
        old, new = before.get(op), after.get(op)
        rows.append((
            mono(op), _share(old), _share(new),
            tag("div", bars(old["milliseconds"] if old else 0, new["milliseconds"] if new else 0, largest), cls="bars"),
        ))  # fmt: skip
    return tag(
        "details",
        tag("summary", "Time by operation, before and after"),
        table(("operation", "before", "after", ""), rows, numeric=(1, 2)),
    )


def _share(row: Mapping[str, Any] | None) -> str:
    return f"{row['milliseconds']:.3f} ms ×{row['count']}" if row else "–"


def ops(before: Mapping[str, int], after: Mapping[str, int]) -> Html:
    """Counts of every op, before and after."""
    if not before:
        return Html("")
    names = sorted(before.keys() | after.keys(), key=lambda op: (-max(before.get(op, 0), after.get(op, 0)), op))
    largest = max([*before.values(), *after.values(), 1])
    rows = [
        (mono(op.removeprefix("ai.onnx::")), before.get(op, 0), after.get(op, 0),
         tag("div", bars(before.get(op, 0), after.get(op, 0), largest), cls="bars"))
        for op in names
    ]  # fmt: skip
    header = ("operation", "before", "after", "")
    first = table(header, rows[:18], numeric=(1, 2))
    rest = [tag("details", tag("summary", f"{len(rows) - 18} more"), table(header, rows[18:], numeric=(1, 2)))]
    return tag("section", tag("h2", "Operations, before and after"), first, *(rest if len(rows) > 18 else []))


def cost(before: Mapping[str, Any] | None, after: Mapping[str, Any] | None) -> Html:
    if not before or not after:
        return Html("")
    rows = [
        ("operations", amount(before["flops"], "FLOP"), amount(after["flops"], "FLOP")),
        ("memory traffic", amount(before["bytes"], "B"), amount(after["bytes"], "B")),
        ("peak activations", amount(before["memory"]["peak_activation_bytes"], "B"),
         amount(after["memory"]["peak_activation_bytes"], "B")),
        ("parameters", amount(before["parameters"]["count"]), amount(after["parameters"]["count"])),
        ("weights", amount(before["parameters"]["bytes"], "B"), amount(after["parameters"]["bytes"], "B")),
    ]  # fmt: skip
    dims = ", ".join(f"{k} = {v}" for k, v in before["dims"].items())
    note = tag("p", f"Worked out from shapes{' at ' + dims if dims else ''}; not measured.", cls="quiet")
    return tag("section", tag("h2", "Cost and memory"), note, table(("", "before", "after"), rows, numeric=(1, 2)))
