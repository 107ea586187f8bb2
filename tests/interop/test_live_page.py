"""The live page of spikeopd-serve in a real browser: text with spikes, attention and bill, in both themes and sizes.

Needs Chromium and playwright:  apt-get install chromium  and  pip install playwright  (it drives the installed browser)
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from random_models import PLUS, random_model, random_shape
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import neuro_sim
from export.bundle_writer import BundleOptions, write_bundle

pytestmark = pytest.mark.interop
uvicorn = pytest.importorskip("uvicorn")
playwright = pytest.importorskip("playwright.sync_api")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
if CHROMIUM is None:
    pytest.skip("no Chromium: apt-get install chromium", allow_module_level=True)

HOSTILE = "<img src=x onerror=\"document.title='run'\"><script>document.title='run'</script>"


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server whose every token is a piece of markup that would run if it were taken for markup."""
    from neuro_sim.serve.app import Server

    folder = tmp_path_factory.mktemp("page")
    vocabulary = {"<eos>": 0} | {f"{HOSTILE}{number} ": number for number in range(1, 40)}
    vocabulary |= {letter: 40 + place for place, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
    options = BundleOptions(target="lava", tokenizer=folder / "tokenizer.json", tokens={"bos": 0, "eos": 0})
    model = random_model(random_shape(vocab=len(vocabulary), positions=200, **PLUS), seed=2)
    loaded = neuro_sim.load(write_bundle(model, folder / "bundle", options), threads=1)
    running = uvicorn.Server(uvicorn.Config(Server(loaded, "<b>tiny</b>").app, port=0, log_level="warning", ws="none"))
    thread = threading.Thread(target=running.run, daemon=True)
    thread.start()
    while not running.started:
        time.sleep(0.02)
    yield f"http://127.0.0.1:{running.servers[0].sockets[0].getsockname()[1]}/"
    running.should_exit = True
    thread.join(60)
    loaded.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page(address: str, browser: Any, width: int, scheme: str, tmp_path: Path) -> None:
    page = browser.new_page(viewport={"width": width, "height": 844}, color_scheme=scheme)
    problems: list[str] = []
    page.on("console", lambda message: problems.append(message.text))
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.goto(address)
    page.fill("#prompt", HOSTILE)
    page.fill("#max_tokens", "12")
    page.keyboard.press("Control+Enter")
    page.wait_for_selector("#status:has-text('in all')", timeout=60_000)
    title = page.title()
    assert title.startswith("SpikeOPD") and page.locator("#text img, #text script, h1 b").count() == 0
    assert "<b>tiny</b>" in page.inner_text("h1") and not problems
    tokens = page.locator("#text .token:not(.given)")
    assert tokens.count() >= 1 and page.locator("#text .token.given").count() > 1
    assert page.locator("#rasters canvas").count() == page.locator("#attention canvas").count() == 2
    pixels = "c.getContext('2d').getImageData(0, 0, c.width, c.height).data"
    drawn = page.evaluate(f"() => [...document.querySelectorAll('canvas')].map(c => {pixels}.some(v => v))")
    assert all(drawn[:3]), "rasters and energy are drawn"
    # Keyboard alone: the arrows walk over the tokens, and the bill follows.
    page.locator("#theme").focus()
    page.keyboard.press("ArrowLeft")
    before = page.locator("[aria-selected=true]").get_attribute("title")
    page.keyboard.press("ArrowLeft")
    assert page.locator("[aria-selected=true]").get_attribute("title") != before
    assert page.locator("#bill tbody tr").count() >= 8 and "MACs" in page.inner_text("#bill")
    assert page.evaluate("() => document.documentElement.scrollWidth") <= width, "nothing scrolls sideways"
    assert page.evaluate("() => document.documentElement.dataset.theme") == scheme
    page.keyboard.press("Shift+Tab")
    page.screenshot(path=str(tmp_path / "page.png"), full_page=True)
    page.close()
