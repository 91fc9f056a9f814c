"""The generated parts of the reference pages and the JSON schema.

``python -m onnxfuse.rewrite.reference`` writes them.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from onnxfuse.match import predicates, trace
from onnxfuse.rewrite import weights
from onnxfuse.rules import lint, schema

_ROOT = Path(__file__).resolve().parents[2]
RULE_FORMAT = _ROOT / "docs" / "reference" / "rule-format.md"
LINT = _ROOT / "docs" / "reference" / "lint.md"
SCHEMA = _ROOT / "rules" / "rule.schema.json"


def predicate_rows() -> str:
    """One table row for each predicate, from its docstring."""
    rows = ["| function | `of` | holds when | results |", "|---|---|---|---|"]
    for name, function in sorted(predicates.REGISTRY.items()):
        fields = _fields(inspect.getdoc(function) or "")
        given = [p.name for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY]
        of = fields.get("of", "")
        if given:
            of += f"; with `{'`, `'.join(given)}`"
        rows.append(f"| `{name}` | {of} | {fields.get('holds', '')} | {fields.get('results', '')} |")
    return "\n".join(rows)


def _fields(doc: str) -> dict[str, str]:
    found: dict[str, str] = {}
    key = ""
    for line in doc.splitlines():
        match = re.match(r"^(of|holds|results):\s*(.*)", line)
        if match:
            key = match.group(1)
            found[key] = match.group(2).strip()
        elif key and line.strip():
            found[key] += " " + line.strip()
    return found


def weight_rows() -> str:
    """One table row for each weight function, from the first paragraph of its docstring."""
    rows = ["| function | result |", "|---|---|"]
    for name, function in sorted(weights.REGISTRY.items()):
        text = " ".join((inspect.getdoc(function) or "").split("\n\n")[0].split())
        rows.append(f"| `{name}` | {text} |")
    return "\n".join(rows)


def kind_rows() -> str:
    return "\n".join(
        ["| kind | means |", "|---|---|", *(f"| `{kind}` | {trace.MEANING[kind]} |" for kind in trace.Kind)]
    )


def lint_rows() -> str:
    return "\n".join(
        ["| id | rejects |", "|---|---|", *(f"| `{name}` | {text} |" for name, text in lint.MEANING.items())]
    )


def filled(page: str) -> str:
    """The page with its generated parts as they should be."""
    tables = {"predicates": predicate_rows, "weights": weight_rows, "kinds": kind_rows, "lint": lint_rows}

    def fill(match: re.Match[str]) -> str:
        return f"<!-- {match.group(1)}: generated -->\n{tables[match.group(1)]()}\n<!-- end -->"

    return re.sub(r"<!-- (\w+): generated -->\n.*?<!-- end -->", fill, page, flags=re.DOTALL)


def stale() -> dict[Path, str]:
    """The files that are not as generated, with what they should be."""
    wanted = {SCHEMA: schema.text()}
    for page in (RULE_FORMAT, LINT):
        wanted[page] = filled(page.read_text(encoding="utf-8"))
    return {
        path: text for path, text in wanted.items() if not path.exists() or path.read_text(encoding="utf-8") != text
    }


if __name__ == "__main__":
    for path, text in stale().items():
        path.write_text(text, encoding="utf-8")
