"""Results as JUnit XML and as Markdown."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Sequence

from onnxfuse.regress.run import ModelResult

#: Characters that XML 1.0 cannot hold.
_NOT_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def junit(results: Sequence[ModelResult]) -> str:
    """One test suite a model, one test case a check."""
    root = ET.Element("testsuites", name="onnxfuse regress")
    for result in results:
        failed = sum(c.status == "failed" for c in result.checks)
        skipped = sum(c.status == "skipped" for c in result.checks)
        suite = ET.SubElement(
            root, "testsuite", name=_clean(result.name), tests=str(len(result.checks)), failures=str(failed),
            errors="0", skipped=str(skipped), time=f"{sum(c.seconds for c in result.checks):.3f}",
        )  # fmt: skip
        for check in result.checks:
            case = ET.SubElement(
                suite, "testcase", classname=_clean(f"onnxfuse.{result.name}"), name=check.name,
                time=f"{check.seconds:.3f}",
            )  # fmt: skip
            if check.status == "failed":
                failure = ET.SubElement(case, "failure", message=_clean(check.message.partition("\n")[0]))
                failure.text = _clean(check.message)
            elif check.status == "skipped":
                ET.SubElement(case, "skipped", message=_clean(check.message))
    everything = [c for r in results for c in r.checks]
    root.set("tests", str(len(everything)))
    root.set("failures", str(sum(c.status == "failed" for c in everything)))
    ET.indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ET.tostring(root, encoding="unicode") + "\n"


def _clean(text: str) -> str:
    return _NOT_XML.sub("\ufffd", text)


_COLUMNS = ("fusions", "blocks", "ops", "verify", "speed")
_WORDS = {"passed": "ok", "failed": "**failed**", "skipped": "–"}


def markdown(results: Sequence[ModelResult]) -> str:
    """A table of models and checks, then what failed; for a CI summary page."""
    bad = [r for r in results if not r.passed]
    lines = [f"### onnxfuse regress: {len(results) - len(bad)} of {len(results)} models as expected", ""]
    lines.append("| model | nodes | " + " | ".join(_COLUMNS) + " |")
    lines.append("|---|---|" + "---|" * len(_COLUMNS))
    for result in results:
        states = {c.name: c.status for c in result.checks}
        cells = [_WORDS[states.get(column, "skipped")] for column in _COLUMNS]
        lines.append(f"| {_cell(result.name)} | {result.found.get('nodes', '?')} | " + " | ".join(cells) + " |")
    for result in bad:
        lines += ["", f"**{_cell(result.name)}**", ""]
        lines += [f"- {c.name}: {_cell(c.message)}" for c in result.checks if c.status == "failed"]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
