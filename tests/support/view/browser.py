"""What every page in a browser must fulfil, as expressions for `tools.browser.Page.value`.

MOEBIUS_BROWSER=1 fails where there is no browser, instead of skipping.
"""

from __future__ import annotations

import os

import pytest

from tools.browser import BROWSER

REQUIRED = os.environ.get("MOEBIUS_BROWSER") == "1"
needs_browser = pytest.mark.skipif(BROWSER is None and not REQUIRED, reason="there is no Chromium here")
#: On a phone, `innerWidth` grows with a page that is too wide.
NO_BAR = "document.documentElement.scrollWidth <= document.documentElement.clientWidth"
#: Contrast of text with its background (WCAG 2.1): the least of all elements with text of their own.
CONTRAST = """(() => {
  const parts = (text) => text.match(/[\\d.]+/g).map(Number);
  const linear = (c) => c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
  const light = (color) => [0.2126, 0.7152, 0.0722].reduce((sum, part, i) => sum + part * linear(color[i] / 255), 0);
  const under = (node) => {
    for (; node; node = node.parentElement) {
      const color = parts(getComputedStyle(node).backgroundColor);
      if (color.length < 4 || color[3] === 1) return color;
    }
    return [255, 255, 255];
  };
  const text = (node) => [...node.childNodes].some((one) => one.nodeType === 3 && one.data.trim());
  const speaks = (node) => node.offsetParent && text(node);
  const contrast = (node) => {
    const pair = [light(parts(getComputedStyle(node).color)), light(under(node))].sort((a, b) => b - a);
    return (pair[0] + 0.05) / (pair[1] + 0.05);
  };
  return Math.min(...[...document.querySelectorAll('body *')].filter(speaks).map(contrast));
})()"""
#: Controls without a name.
NAMELESS = """[...document.querySelectorAll('button, input, textarea, canvas.pick, svg[role], [role=region]')].filter(
  (node) => node.checkVisibility() && !node.closest('[aria-hidden=true]') &&
    !(node.textContent.trim() || node.ariaLabel || node.title || node.labels?.length)).length"""
