"""Every command of the guides is run, and prints what the guide says."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from tests.tools.documents import ROOT, blocks, first_missing, run_page

GUIDES = sorted((ROOT / "docs" / "guides").glob("*.md"))


@pytest.mark.parametrize("page", GUIDES, ids=lambda p: p.stem)
def test_guide(page: Path, tmp_path: Path) -> None:
    assert run_page(page, tmp_path) > 0


@pytest.mark.parametrize("page", GUIDES, ids=lambda p: p.stem)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_what_is_not_run_says_why() -> None:
    for page in GUIDES:
        for block in blocks(page):
            if block.marker.startswith("not run:"):
                assert len(block.marker) > len("not run: ")


def test_expected_lines() -> None:
    printed = ["one", "two 2.5", "three", "four"]
    assert first_missing(["one", "two …"], printed) is None
    assert first_missing(["one", "three"], printed) == "three"
    assert first_missing(["one", "…", "four"], printed) is None
    assert first_missing(["…", "four", "one"], printed) == "one"
    assert first_missing(["on"], printed) == "on"


def test_rule_pages_are_up_to_date() -> None:
    spec = importlib.util.spec_from_file_location("rule_pages", ROOT / "docs" / "rule_pages.py")
    assert spec is not None and spec.loader is not None
    generator = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generator)
    wanted = generator.pages()
    found = {p.name: p.read_text(encoding="utf-8") for p in generator.OUT.glob("*.md")}
    stale = sorted(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name))
    assert not stale, f"run `python docs/rule_pages.py`: {', '.join(stale[:5])}"
