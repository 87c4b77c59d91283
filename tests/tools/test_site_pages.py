"""Every page of the built site in a real browser, on a screen of 1280 px and on a phone of 390.

It runs with MOEBIUS_BROWSER=1, on what `make docs` built into build/site, or on the folder that MOEBIUS_SITE names.
"""

from __future__ import annotations

import functools
import http.server
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.view.browser import CONTRAST, NAMELESS, NO_BAR, REQUIRED
from tools.browser import Page

SITE = Path(os.environ.get("MOEBIUS_SITE", ROOT / "build" / "site"))
PAGES = sorted(path.relative_to(SITE).as_posix() for path in SITE.rglob("*.html")) or ["index.html"]
pytestmark = pytest.mark.skipif(not REQUIRED and "MOEBIUS_SITE" not in os.environ, reason="MOEBIUS_BROWSER is not 1")
LOADED = "document.readyState === 'complete' && document.fonts.status === 'loaded'"
#: Nothing moves, and nothing fades in: a page is measured at once.
STILL = "document.head.insertAdjacentHTML('beforeend', '<style>*{transition:none!important}</style>')"
#: What assistive technology stumbles over.
STUMBLES = """((all) => ({
  headings: document.querySelectorAll('h1').length !== 1,
  language: !document.documentElement.lang,
  title: !document.title,
  pictures: all('img').filter((one) => !one.hasAttribute('alt')).map((one) => one.src),
  links: all('a[href]').filter((one) => !(one.textContent.trim() || one.title || one.ariaLabel ||
    one.querySelector('[alt]'))).map((one) => one.href),
  twice: all('[id]').map((one) => one.id).filter((id, place, ids) => ids.indexOf(id) < place),
  dialogs: all('[role=dialog]:not([aria-label])').length,
}))((selector) => [...document.querySelectorAll(selector)])"""


class Quiet(http.server.SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=SITE)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with Page(tmp_path_factory.mktemp("browser")) as page:
        yield page


def test_the_site_is_walked_whole() -> None:
    assert len(PAGES) > 80 and {"index.html", "errors.html", "api/index.html", "user/layers.html"} <= set(PAGES)


@pytest.mark.parametrize("name", PAGES)
def test_pages_fit_screens_and_speak(name: str, page: Page, address: str) -> None:
    page.open(address + name, LOADED)
    page.value(STILL)
    assert page.value(NO_BAR), "wider than 1280 px"
    assert page.value(CONTRAST) >= 4.5
    assert page.value(NAMELESS) == 0
    assert not {key: value for key, value in page.value(STUMBLES).items() if value}
    page.resize(390)
    assert page.value(NO_BAR), "wider than 390 px"
    assert page.problems == []


@pytest.mark.parametrize("name", ["index.html", "errors.html", "user/layers.html", "api/moe_torch.html"])
def test_dark_pages_can_be_read(name: str, page: Page, address: str) -> None:
    page.open(address + name, LOADED, dark=True)
    page.value(STILL + "; document.body.dataset.mdColorScheme = 'slate'")
    assert page.value(CONTRAST) >= 4.5


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("token_rounding", "TokenRounding"),
        ("capacity_factor", "MoELayerSpec"),
        ("must be row-major contiguous", "row-major contiguous"),
        ("pass the whole array", "must have two rows for each rank"),
    ],
)
def test_the_search_finds_options_and_messages(words: str, found: str, page: Page, address: str) -> None:
    page.open(f"{address}index.html", LOADED)
    page.value("document.querySelector('[data-md-toggle=search]').click()")
    box = "document.querySelector('[data-md-component=search-query]')"
    results = "document.querySelector('.md-search-result__list').textContent"
    page.value(f"{box}.focus(), {box}.value = {json.dumps(words)}, {box}.dispatchEvent(new Event('keyup'))")
    page.until(f"{results}.includes({json.dumps(found)})")


def test_a_pasted_message_finds_its_entry(page: Page, address: str) -> None:
    page.open(f"{address}errors.html", LOADED)
    message = "InvalidInput: x must be row-major contiguous, got strides (1, 64); make it contiguous first"
    page.value(f"(box.value = {json.dumps(message)}, box.dispatchEvent(new Event('input')))")
    assert "{name} must be row-major contiguous" in page.value("best.firstChild.textContent")
    page.value("(box.value = 'qqq zzz', box.dispatchEvent(new Event('input')))")
    assert page.value("best.childNodes.length") == 0
