"""Pages in a real browser: they draw, filter and sort, take keys, fit a phone, and ask no network for anything.

MOEBIUS_BROWSER=1 fails where there is no browser, instead of skipping.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from moe_core.view.page import plan_page, report_page, trace_page, write_page
from tests.support.view import REPORT, a_plan, a_trace, changed
from tests.support.view.browser import CONTRAST, NAMELESS, NO_BAR, needs_browser
from tools.browser import Page

pytestmark = needs_browser
READY = "document.getElementById('main')?.getAttribute('aria-busy') === 'false'"
SEARCH = """(() => {
  const box = document.querySelector('#layer input[type=search]');
  box.value = 'word7';
  box.dispatchEvent(new Event('input'));
})()"""

Opened = Callable[..., Page]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with Page(tmp_path_factory.mktemp("browser")) as page:
        yield page


@pytest.fixture
def opened(browser: Page, tmp_path: Path) -> Opened:
    def open_page(text: str, **options: Any) -> Page:
        path = tmp_path / "page.html"
        write_page(path, text)
        browser.open(path, READY, **options)
        return browser

    return open_page


PAGES = {
    "trace": lambda: trace_page([a_trace(text := 60)], text=[f"word{i}" for i in range(text)], sizes=(64, 32)),
    "traces": lambda: trace_page([a_trace(60), changed(a_trace(60))]),
    "report": lambda: report_page([REPORT]),
    "plans": lambda: plan_page([[a_plan(64)], [a_plan(2)]]),
}


@pytest.mark.parametrize("kind", PAGES)
def test_pages_draw_in_light_and_dark_and_on_a_phone(kind: str, opened: Opened) -> None:
    for options in ({}, {"dark": True}, {"width": 390, "height": 800}):
        page = opened(PAGES[kind](), **options)
        assert page.problems == []
        assert page.value(NO_BAR), "the page is wider than the window"
        assert page.value(CONTRAST) >= 4.5
        assert page.value(NAMELESS) == 0
        assert page.value("document.querySelectorAll('table tbody tr').length") > 3


def test_a_trace_is_chosen_filtered_sorted_and_compared(opened: Opened) -> None:
    trace = a_trace(60)
    page = opened(trace_page([trace, changed(trace)], text=[f"word{i}" for i in range(60)]))
    heading = "document.querySelector('#layer h2').textContent"
    assert page.value(heading) == "Layer 0"
    page.value("document.querySelector('canvas.pick').focus()")
    for key in ("ArrowDown", "ArrowRight", "ArrowRight"):
        page.press(key)
    assert page.value(heading) == "Layer 1, expert 2"
    visitors = int((trace[1].ids == 2).any(axis=1).sum())
    found = "document.querySelector('#layer').textContent.match(/([\\d,]+) tokens, page/)[1]"
    assert page.value(found) == str(visitors)
    page.value("document.querySelector('#layer input[type=checkbox]').click()")
    assert page.value(found) == "60"
    page.value(SEARCH)
    assert page.value(found) == "1"
    rows = "[...document.querySelectorAll('[aria-label=Layers] tbody tr')].map((row) => +row.cells[2].textContent)"
    page.value("document.querySelectorAll('[aria-label=Layers] th button')[2].click()")
    sorted_rows = page.value(rows)
    assert sorted_rows == sorted(sorted_rows, reverse=True) and len(set(sorted_rows)) > 1
    assert "33.3 %" in page.value("document.querySelector('main').textContent"), "the changed tokens' share"
    page.value("[...document.querySelectorAll('[aria-label=Trace] button')].at(-1).click()")
    assert page.value("document.querySelector('section h2').textContent").startswith("Load of")
    assert page.problems == []


def test_a_report_shows_what_differs_first(opened: Opened) -> None:
    page = opened(report_page([REPORT]))
    names = "[...document.querySelectorAll('details.case summary b')].map((one) => one.textContent)"
    assert page.value(names) == ["mixtral"], "only what does not agree, at first"
    assert "the first stage that parts: matmul1" in page.value("document.querySelector('main').textContent").lower()
    assert page.value("document.querySelector('tr.first td').textContent") == "matmul1"
    page.value("document.getElementById('only').click()")
    assert page.value(names) == ["mixtral", "olmoe"]
    assert page.value("document.querySelector('code').textContent") == REPORT["cases"][0]["repeat"]


def test_a_large_trace_opens_in_seconds(opened: Opened) -> None:
    text = trace_page([a_trace(4000, layers=48, experts=128, top_k=8)])
    assert len(text) < 10e6
    page = opened(text)
    assert page.value("document.querySelectorAll('canvas').length") > 2 and page.problems == []


def test_text_of_tokens_cannot_run(opened: Opened) -> None:
    """The text of tokens is data, whatever it spells."""
    hostile = "</script><script>window.broken = 1</script><img src=x onerror=broken=1>"
    page = opened(trace_page([a_trace(3)], names=[hostile], text=[hostile, "%STYLE%", json.dumps(hostile)]))
    assert page.value("window.broken === undefined") and page.problems == []
    assert hostile[:20] in page.value("document.querySelector('#layer').textContent")
