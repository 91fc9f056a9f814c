"""Writes docs/reference/rules/: a page for each built-in rule and an index: `python docs/rule_pages.py`."""

from __future__ import annotations

from pathlib import Path

from onnxfuse import rules
from onnxfuse.rules.drawing import draw
from onnxfuse.rules.program import Program

OUT = Path(__file__).parent / "reference" / "rules"
STAGES = {
    "lift": "A spelled-out pattern becomes the op that names it. Exact mathematics, the same for every target.",
    "fuse": "Lifted ops grow together, one step a rule.",
    "lower": "What is left is given to the kernels that the target has.",
}
MARK = "<!-- made by docs/rule_pages.py; do not edit -->"


def pages() -> dict[str, str]:
    """Text by file name."""
    programs = sorted(rules.load(), key=lambda p: p.id)
    return {"README.md": index(programs), **{f"{p.id}.md": page(p) for p in programs}}


def index(programs: list[Program]) -> str:
    lines = ["# Built-in rules", "", MARK, ""]
    lines += [
        "`onnxfuse rules show ID` prints the same. How to read and write them: [rule format](../rule-format.md).",
        "",
    ]
    for stage, what in STAGES.items():
        chosen = [p for p in programs if p.stage == stage]
        if not chosen:
            continue
        lines += [f"## {stage}", "", what, "", "| rule | what it does |", "|---|---|"]
        lines += [f"| [{p.id}]({p.id}.md) | {_cell(p.spec.summary)} |" for p in chosen]
        lines.append("")
    return "\n".join(lines)


def page(program: Program) -> str:
    rule, tests = program.spec, program.source.tests()
    path = f"rules/{program.stage}/{program.id}.yaml"
    lines = [f"# `{program.id}`", "", MARK, "", f"{rule.summary}.", ""]
    lines += [f"Stage {program.stage}, priority {program.priority}. [`{path}`](../../../{path})", ""]
    lines += ["## Pattern", "", "```text", draw(program), "```", ""]
    first = tests.match[0]
    lines += [
        "## Example",
        "",
        f"The case `{first.name}`, in ONNX's text form:",
        "",
        "```text",
        (first.graph or "").rstrip(),
        "```",
        "",
    ]
    if len(tests.match) > 1:
        lines += [f"It also matches: {', '.join(f'`{c.name}`' for c in tests.match[1:])}.", ""]
    if tests.no_match:
        lines += ["## Near misses", "", "| change | stopped by |", "|---|---|"]
        for case in tests.no_match:
            changes = [
                f"`{_cell(old)}` → `{_cell(new)}`" if new else f"`{_cell(old)}` removed"
                for old, new in case.replace.items()
            ]
            changes += [f"target `{case.target}`"] if case.target else []
            changes += [f"as `{case.as_}`"] if case.as_ else []
            changes += [f"opset {case.opset}"] if case.opset else []
            lines.append(f"| {case.from_}: {', '.join(changes) or 'as it is'} | `{case.because}` |")
        lines.append("")
    return "\n".join(lines)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def main() -> None:
    OUT.mkdir(parents=True, exist_ok=True)
    wanted = pages()
    for old in OUT.glob("*.md"):
        if old.name not in wanted:
            old.unlink()
    for name, text in wanted.items():
        (OUT / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
