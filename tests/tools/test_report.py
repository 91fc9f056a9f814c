"""The HTML report: what it says, that it loads nothing, and that a browser opens it without an error."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import onnx
import onnx.parser
import pytest

from onnxfuse import __version__
from onnxfuse.cli import main
from onnxfuse.html_report import Content, layers, render
from onnxfuse.html_report.gather import gather
from onnxfuse.html_report.markup import Html, amount, tag
from onnxfuse.inspection.sizes import bind, infer

MODEL = Path(__file__).parents[2] / "models" / "llama-dyn20-f32-sdpa-tf5.onnx"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
         "--disable-background-networking", "--disable-component-update", "--host-resolver-rules=MAP * ~NOTFOUND",
         "--enable-logging=stderr", "--hide-scrollbars"]  # fmt: skip


@pytest.fixture(scope="module")
def content() -> Content:
    return gather(MODEL, shapes=["batch=1,seq=16"], seconds=0.05, version=__version__)


@pytest.fixture(scope="module")
def page(content: Content) -> str:
    return render(content)


class _Outline(HTMLParser):
    """Tags that are open and must be closed, and attributes that could load something."""

    def __init__(self) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.loads: list[str] = []
        self.headings: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "link", "br", "img"):
            self.stack.append(tag)
        self.loads += [v or "" for k, v in attrs if k in ("src", "href", "srcset", "action", "data", "poster")]

    def handle_endtag(self, tag: str) -> None:
        assert self.stack.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.stack and self.stack[-1] == "h2":
            self.headings.append(data)


def test_sections(page: str) -> None:
    outline = _Outline()
    outline.feed(page)
    assert outline.stack == []
    assert outline.headings == [
        "Blocks", "What was rewritten", "The model, block by block", "Missed, and why", "Verification", "Times",
        "Operations, before and after", "Cost and memory",
    ]  # fmt: skip
    assert outline.loads == ["data:,"], "nothing is loaded from anywhere"
    assert "<script" not in page and "@import" not in page and "url(" not in page and "http" not in page


def test_it_is_for_phones_and_for_both_colour_schemes(page: str) -> None:
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in page
    assert "prefers-color-scheme: dark" in page and 'content="light dark"' in page


def test_what_it_says(page: str, content: Content) -> None:
    nodes = content.optimized["nodes"]
    assert f"{nodes['before']} → {nodes['after']}" in page
    assert "Layer, 2 times" in page and "rms-norm" in page and ">verified<" in page
    assert ">ONNX Runtime alone<" in page
    first = content.misses[0]
    assert f"{first['file']}:{first['line']}" in page


def test_text_is_escaped() -> None:
    assert tag("p", "<b>", cls='"') == '<p class="&quot;">&lt;b&gt;</p>'
    assert tag("p", Html("<b></b>")) == "<p><b></b></p>"
    assert amount(1_234_000, "B") == "1.23 MB" and amount(None) == "?"


def test_layers_fold_by_structure() -> None:
    body = "".join(
        f"n{i} = LayerNormalization (x{i}, g)  e{i} = Erf (n{i})  x{i + 1} = Add (e{i}, x{i})\n" for i in range(6)
    )
    model = onnx.parser.parse_model(
        f"""<ir_version: 8, opset_import: ["" : 17]> g (float[b,8] x) => (float[b,8] y)
        <float[8] g = {{1,1,1,1,1,1,1,1}}> {{ x0 = Neg (x)  {body.replace("Erf (n3)", "Tanh (n3)")}  y = Exp (x6) }}"""
    )
    groups = layers(model, infer(model, bind(model, {}, {})))
    shown = [(g.count, [s.op for s in g.steps]) for g in groups]
    layer = ["LayerNormalization", "Erf", "Add"]
    odd = ["LayerNormalization", "Tanh", "Add"]
    assert shown == [(1, ["Neg"]), (3, layer), (1, odd), (2, layer), (1, ["Exp"])], "the odd layer stands out"


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "page.html"
    with pytest.raises(SystemExit) as stop:
        main.main(["report", str(MODEL), "-o", str(target), "--no-bench", "--no-verify", "--json"])
    assert stop.value.code == 0 and target.read_text().startswith("<!doctype html>")
    assert json.loads(capsys.readouterr().out)["page"] == str(target)


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
@pytest.mark.parametrize("width", [500, 1200])
def test_in_a_browser(page: str, tmp_path: Path, width: int) -> None:
    """No console message, no request for anything but the file itself, no sideways scrolling."""
    path = tmp_path / "page.html"
    # The widest element is reported through the title; the page itself has no script.
    probe = "<script>document.title = document.documentElement.scrollWidth + ' of ' + innerWidth</script>"
    path.write_text(page.replace("</body>", probe + "</body>"))
    log = tmp_path / "net.json"
    arguments = [str(CHROMIUM), *FLAGS, f"--user-data-dir={tmp_path / 'profile'}", f"--log-net-log={log}"]
    arguments += [f"--window-size={width},900", "--dump-dom", path.as_uri()]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=120, check=True)
    assert "CONSOLE" not in done.stderr
    title = re.search(r"<title>(\d+) of (\d+)</title>", done.stdout)
    assert title is not None and int(title[1]) <= int(title[2])
    # What the browser asks its maker for at every start is not the page's doing.
    own = re.compile(r"https?://([\w-]+\.)*(google|googleapis|gstatic)\.com/")
    urls = set(re.findall(r'"url":"(https?://[^"]+)"', log.read_text()))
    assert [u for u in urls if not own.match(u)] == []


def _corpus() -> list[Path]:
    folder = os.environ.get("ONNXFUSE_CORPUS")
    return sorted(Path(folder).glob("*.onnx")) if folder else []


@pytest.mark.corpus
@pytest.mark.slow
@pytest.mark.skipif(not _corpus(), reason="ONNXFUSE_CORPUS names no folder of models")
def test_every_model_of_the_corpus_has_a_page() -> None:
    for path in _corpus():
        found = gather(path, measure=False, verify=False)
        assert render(found).endswith("</html>\n")
        assert found.before is not None and found.after is not None
        assert (found.before["unknown_sizes"], found.after["unknown_sizes"]) == (0, 0), path.name
