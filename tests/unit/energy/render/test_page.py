"""The page in a real browser: no console errors, the numbers of the JSON, sorting, both themes, nothing fetched."""

from __future__ import annotations

import html.parser
import json
import re
import shutil
import subprocess

import numpy as np
import pytest
from random_models import PLUS, random_shape
from random_runs import make_run

import energy
from energy.render.page import report_page, tables_page
from energy.render.raster import raster_html
from energy.render.tables import costs_document, report_tables

CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
)
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium found; on Debian: apt-get install chromium")

# Runs inside the page after its own script: what a reader would do, and what it did.
PROBE = """<script>
const probe = { errors: window.pageErrors, before: [], after: [], down: [] };
const body = () => getComputedStyle(document.body).backgroundColor;
const table = document.querySelector("#components table");
const column = [...table.tHead.rows[0].cells].findIndex((cell) => cell.textContent.startsWith("Energy"));
const values = () => [...table.tBodies[0].rows].map((row) => parseFloat(row.cells[column].dataset.value));
const button = table.tHead.rows[0].cells[column].querySelector("button");
probe.before = values(); button.click(); probe.after = values(); button.click(); probe.down = values();
const first = body(); document.getElementById("theme").click(); probe.themes = [first, body()];
document.getElementById("theme").click(); probe.back = body() === first;
const raster = document.getElementById("raster-choice");
probe.rasters = raster ? [...document.querySelectorAll(".rasterbox")].filter((box) => !box.hidden).length : null;
probe.bars = [...document.querySelectorAll(".bar i")].map((bar) => bar.getBoundingClientRect().width);
const right = document.documentElement.clientWidth;
const outside = (item) => !item.closest(".scroll") && item.getBoundingClientRect().right > right + 0.5;
probe.cut = [...document.querySelectorAll("button, .bar, .tile, h1, figure")].filter(outside).map((i) => i.outerHTML);
probe.charts = [...document.querySelectorAll("svg")].map((svg) => svg.getBoundingClientRect().height > 100);
probe.wide = document.documentElement.scrollWidth <= innerWidth;
const out = document.createElement("pre");
out.id = "probe"; out.textContent = JSON.stringify(probe); document.body.append(out);
</script></body>"""
EARLY = '<head><script>window.pageErrors = []; addEventListener("error", (e) => pageErrors.push(e.message));</script>'


class Page(html.parser.HTMLParser):
    """Cells with raw values, by section and key; the probe; the embedded JSON."""

    def __init__(self) -> None:
        super().__init__()
        self.cells: dict[str, list[tuple[str, float, str]]] = {}
        self.texts: dict[str, str] = {}
        self.section, self._target, self._cell = "", "", None

    def handle_starttag(self, tag: str, attrs: list) -> None:
        named = dict(attrs)
        if tag == "section":
            self.section = named.get("id") or ""
        if tag in ("td", "div") and "data-value" in named:
            self._cell = (self.section, named["data-key"], named["data-value"])
        if named.get("id") in ("report", "probe"):
            self._target = named["id"]

    def handle_endtag(self, tag: str) -> None:
        if tag in ("script", "pre"):
            self._target = ""

    def handle_data(self, data: str) -> None:
        if self._target:
            self.texts[self._target] = self.texts.get(self._target, "") + data
        elif self._cell is not None:
            section, key, raw = self._cell
            self.cells.setdefault(section, []).append((key, float("nan") if raw == "None" else float(raw), data))
            self._cell = None


def browse(path, *flags: str) -> tuple[Page, str]:
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--v=0",
               "--window-size=1200,2000", "--virtual-time-budget=2000", f"--user-data-dir={path.parent / 'profile'}",
               *flags, "--dump-dom", path.as_uri()]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    page = Page()
    page.feed(done.stdout)
    return page, done.stderr


@pytest.fixture(scope="module", params=[{}, PLUS], ids=["paper", "plus"])
def report(request) -> energy.Report:
    shape = random_shape(heads=4, head_dim=8, layers=3, ffn=64, vocab=128, positions=64, **request.param)
    run = make_run(shape, prompts=(8, 5), generated=(9, 6), drive=1.5)
    return energy.report(run, costs="loihi", memory="dram", hops=(1, 1), name="a <b>run</b> & more")


@pytest.fixture(scope="module")
def raster(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("trace") / "trace.npz"
    rng = np.random.default_rng(0)
    np.savez(path, **{f"0/{layer}.{site}": rng.random((13, 4, 32)) < 0.2 for layer in range(3) for site in "qh"})
    return raster_html(path, random_shape(heads=4, head_dim=8, layers=3))


def test_the_page_fetches_nothing(report: energy.Report, raster: str) -> None:
    page = report_page(report, raster)
    outside = page.replace(json.dumps(report.data, ensure_ascii=False).replace("<", "\\u003c"), "")
    assert not re.findall(r"""(?:src|href|url)\s*[=(]\s*["']?(?!data:)[a-z]+:""", outside)
    assert "default-src 'none'" in page
    assert "<b>run</b>" not in outside and "&lt;b&gt;run&lt;/b&gt; &amp; more" in outside
    assert json.loads(re.search(r'id="report">(.*?)</script>', page, re.S)[1]) == json.loads(json.dumps(report.data))


@needs_browser
@pytest.mark.slow
def test_in_a_browser(report: energy.Report, raster: str, tmp_path) -> None:
    text = report_page(report, raster)
    path = tmp_path / "page.html"
    path.write_text(text.replace("<head>", EARLY, 1).replace("</body>", PROBE, 1), encoding="utf-8")
    page, log = browse(path)
    assert "CONSOLE" not in log, log
    probe = json.loads(page.texts["probe"])
    assert probe["errors"] == []
    assert probe["after"] == sorted(probe["before"]) and probe["down"] == sorted(probe["before"], reverse=True)
    assert len(set(probe["themes"])) == 2 and probe["back"]
    assert probe["rasters"] == 1 and len(probe["charts"]) == 5 and all(probe["charts"])
    assert probe["wide"] and probe["cut"] == [] and len(probe["bars"]) >= 14

    shown = json.loads(page.texts["report"])
    assert shown == json.loads(json.dumps(report.data))
    tables = {table.name: table for table in report_tables(shown)}
    for name, table in tables.items():
        numeric = [column for column in table.columns if column.kind != "text"]
        due = [(c.key, float(row[c.key]), table.cell(row, c)) for row in table.rows for c in numeric
               if row.get(c.key) is not None]  # fmt: skip
        # The components were sorted by the probe, so order does not count there.
        assert sorted(page.cells.get(name, [])) == sorted(due), name
    tiles = {key: value for key, value, _ in page.cells[""] if value == value}
    whole = shown["summary"][-1]
    assert tiles["energy_per_token_pj"] == whole["energy_per_token_pj"]
    assert tiles["teacher_over_student"] == whole["teacher_over_student"]


HOSTILE = (
    "<!--<script>x</script>--><img src=x onerror=alert(1)>\u2028\x1b]0;a\x07\u202e</script><script>alert(1)</script>"
)


@needs_browser
@pytest.mark.slow
def test_hostile_text_is_only_text(tmp_path) -> None:
    """The name of a run, here, stands for any text of a file: the page's own script runs, the text's does not."""
    run = make_run(random_shape(), prompts=(3,), generated=(3,))
    path = tmp_path / "page.html"
    text = report_page(energy.report(run, name=HOSTILE))
    path.write_text(text.replace("<head>", EARLY, 1).replace("</body>", PROBE, 1), encoding="utf-8")
    page, log = browse(path)
    probe = json.loads(page.texts["probe"])
    assert "CONSOLE" not in log and probe["errors"] == [] and len(set(probe["themes"])) == 2
    assert json.loads(page.texts["report"])["source"]["name"] == HOSTILE


def test_no_tag_of_the_embedded_json_reaches_the_parser() -> None:
    page = report_page(energy.report(make_run(random_shape(), prompts=(3,), generated=(3,)), name=HOSTILE))
    (raw,) = re.findall(r'id="report">(.*?)</script>\n<script>', page, re.S)
    assert "<" not in raw and json.loads(raw)["source"]["name"] == HOSTILE
    assert page.count("<script") == 2 and "<img" not in page and "<!--" not in page.removeprefix("<!doctype html>")


@needs_browser
@pytest.mark.slow
def test_on_a_telephone(report: energy.Report, raster: str, tmp_path) -> None:
    """390 px, in a frame because a window cannot be so narrow: nothing is cut, nothing but tables scrolls sideways."""
    page = report_page(report, raster).replace("<head>", EARLY, 1).replace("</body>", PROBE, 1)
    tell = '<script>parent.document.body.innerHTML = `<pre id="probe">${out.textContent}</pre>`</script></body>'
    (tmp_path / "inner.html").write_text(page.replace("</body>", tell, 1), encoding="utf-8")
    outer = tmp_path / "outer.html"
    outer.write_text('<body><iframe src="inner.html" width="390" height="3000" frameborder="0"></iframe></body>')
    probe = json.loads(browse(outer, "--allow-file-access-from-files")[0].texts["probe"])
    assert probe["wide"] and probe["cut"] == [] and min(probe["bars"]) >= 1 and max(probe["bars"]) > 150


@needs_browser
@pytest.mark.slow
def test_dark_mode_is_followed(report: energy.Report, tmp_path) -> None:
    path = tmp_path / "page.html"
    path.write_text(report_page(report).replace("<head>", EARLY, 1).replace("</body>", PROBE, 1), "utf-8")
    light = json.loads(browse(path)[0].texts["probe"])["themes"]
    dark = json.loads(browse(path, "--blink-settings=preferredColorScheme=0")[0].texts["probe"])["themes"]
    assert light == dark[::-1]


def test_pages_of_tables() -> None:
    page = tables_page(costs_document())
    assert page.count("<table>") == 5 and "23.60" in page and "never as free" in page
