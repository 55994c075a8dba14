"""Opens every page of the built site in chromium, without a network.

The site is built by `make site`. Under `CI=true` a missing site or browser is a failure, else a skip.
"""

import functools
import http.server
import os
import shutil
import threading
from pathlib import Path
from urllib.parse import unquote, urldefrag, urljoin

import pytest


pytestmark = pytest.mark.browser

SITE = Path(__file__).parents[1] / "docs" / "_build" / "html"
BROWSERS = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")
PHONE = {"width": 390, "height": 844}
DESKTOP = {"width": 1280, "height": 900}

# What a reader would see as broken, found by one script in one look at a page.
INSPECT = r"""
() => {
  const found = [];
  const article = document.querySelector('article') || document.body;
  const formulas = [...document.querySelectorAll('span.math, div.math')];
  for (const f of formulas)
    if (!f.querySelector('mjx-container')) found.push('formula not rendered: ' + f.textContent.slice(0, 80));
  for (const e of document.querySelectorAll('[data-mjx-error], mjx-merror'))
    found.push('formula error: ' + (e.getAttribute('data-mjx-error') || e.textContent).slice(0, 120));
  const walker = document.createTreeWalker(article, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode;
    if (/\$/.test(node.textContent) && !node.parentElement.closest('pre, code, script, style, mjx-container, .bibtex'))
      found.push('raw $ in text: ' + node.textContent.trim().slice(0, 80));
  }
  for (const image of document.querySelectorAll('img'))
    if (!(image.getAttribute('alt') || '').trim() && !image.closest('[aria-hidden=true]'))
      found.push('image without alt: ' + image.src);
    else if (image.complete && !image.naturalWidth && !image.classList.contains('only-dark')
             && !image.classList.contains('only-light'))
      found.push('image does not load: ' + image.src);
  for (const svg of article.querySelectorAll('svg'))
    if (!svg.closest('mjx-container, [aria-hidden=true], button, summary')
        && !(svg.getAttribute('aria-label') || svg.getAttribute('aria-labelledby') || svg.querySelector('title')))
      found.push('svg without aria-label');
  for (const error of article.querySelectorAll('.traceback, .output.stderr, .problematic, .system-message'))
    found.push('error shown to the reader: ' + error.textContent.trim().slice(0, 120));
  return found;
}
"""

ANCHORS = """
() => [
  [...document.querySelectorAll('a[href]')].map(a => a.getAttribute('href')),
  [...document.querySelectorAll('[id], a[name]')].map(e => e.id || e.name),
]
"""

# In either theme the text of figures has the contrast of WCAG AA on the page.
CONTRAST = r"""
() => {
  const rgb = c => c.match(/[\d.]+/g).slice(0, 3).map(Number);
  const luminance = c => {
    const [r, g, b] = rgb(c).map(v => v / 255).map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = e => {  // the first ancestor that is not transparent
    for (; e; e = e.parentElement) {
      const color = getComputedStyle(e).backgroundColor;
      if (!/, 0\)$/.test(color) && color !== 'transparent') return color;
    }
    return 'rgb(255, 255, 255)';
  };
  const found = new Set();
  for (const text of document.querySelectorAll('.diloco-figure text')) {
    const page = luminance(behind(text.closest('.diloco-figure')));
    const own = luminance(getComputedStyle(text).fill);
    const ratio = (Math.max(own, page) + 0.05) / (Math.min(own, page) + 0.05);
    if (ratio < 4.5) found.add('figure text ' + getComputedStyle(text).fill + ' has contrast ' + ratio.toFixed(1));
  }
  return [...found];
}
"""

# Past the right edge, and not inside a box that scrolls by itself.
SIDEWAYS = """
() => {
  const root = document.scrollingElement;
  if (root.scrollWidth <= root.clientWidth) return [];
  const scrolls = e => { for (let p = e.parentElement; p && p !== document.body; p = p.parentElement) {
    if (getComputedStyle(p).overflowX !== 'visible') return true; } return false; };
  const wide = [...document.querySelectorAll('main *')]
    .filter(e => e.getBoundingClientRect().right > root.clientWidth + 1 && !scrolls(e)).slice(0, 3)
    .map(e => e.tagName.toLowerCase() + '.' + e.className);
  return ['page is ' + root.scrollWidth + ' px wide at ' + root.clientWidth + ': ' + wide.join(', ')];
}
"""


def missing(what: str) -> None:
    """Skips on a laptop, fails in CI."""
    if os.environ.get("CI"):
        pytest.fail(what)
    pytest.skip(what)


def pages() -> list[str]:
    """Lists the built pages, relative to the site."""
    return sorted(
        str(p.relative_to(SITE)) for p in SITE.rglob("*.html") if "_static" not in p.parts
    )


@pytest.fixture(scope="module")
def address():
    """Serves the site on a free port of this machine."""
    if not (SITE / "index.html").exists():
        missing("the site is not built; run: make site")

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args):
            pass

    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Quiet, directory=SITE)
    )
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def browser(address):
    """Starts one browser for all pages; it finds no other host than this machine."""
    executable = next(filter(None, map(shutil.which, BROWSERS)), None)
    if executable is None:
        missing("no chromium found; install it, on Debian with: apt-get install chromium")
    from playwright.sync_api import sync_playwright

    offline = "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=executable, args=["--no-sandbox", offline]
        )
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def visits(browser, address):
    """Opens every page: light, then dark, then as wide as a phone.

    Returns what is wrong with each page, its links and its anchors.
    """
    problems, links, anchors, seen = [], {}, {}, []
    page = browser.new_page(color_scheme="light", viewport=DESKTOP)
    page.on("console", lambda m: m.type == "error" and seen.append(f"console: {m.text}"))
    page.on("pageerror", lambda e: seen.append(f"script error: {e}"))
    page.on("requestfailed", lambda r: seen.append(f"request failed: {r.url}"))
    for name in pages():
        seen.clear()
        page.emulate_media(color_scheme="light")
        page.set_viewport_size(DESKTOP)
        page.goto(address + name, wait_until="load")
        page.evaluate("() => window.MathJax && MathJax.startup && MathJax.startup.promise")
        found = page.evaluate(INSPECT)
        links[name], anchors[name] = page.evaluate(ANCHORS)
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            page.wait_for_function("s => document.documentElement.dataset.theme === s", arg=scheme)
            found += [f"{scheme}: {f}" for f in page.evaluate(CONTRAST)]
        page.set_viewport_size(PHONE)
        found += page.evaluate(SIDEWAYS)
        problems += [f"{name}: {f}" for f in found + seen]
    page.close()
    return problems, links, anchors


def test_no_page_shows_an_error(visits):
    """No console error, unrendered formula, raw dollar sign, bare image or sideways scroll."""
    problems, _, _ = visits
    assert not problems, "\n" + "\n".join(problems)


def test_internal_links_lead_somewhere(visits):
    """Every link inside the site has its page, and its anchor on that page."""
    _, links, anchors = visits
    broken = []
    for name, targets in links.items():
        for target in targets:
            if target.startswith(("http:", "https:", "mailto:", "javascript:", "data:")):
                continue
            path, anchor = urldefrag(urljoin("/" + name, target))
            path = unquote(path).removeprefix("/").split("?")[0] or "index.html"
            if not (SITE / path).exists():
                broken.append(f"{name}: {target} has no file")
            elif anchor and path in anchors and unquote(anchor) not in anchors[path]:
                broken.append(f"{name}: {target} has no anchor")
    assert not broken, "\n" + "\n".join(broken)


def test_formulas_are_there(browser, address):
    """A wrong formula is seen as an error, so that a clean site means clean formulas."""
    page = browser.new_page()
    page.goto(address + "reference/notation.html", wait_until="load")
    page.evaluate("() => MathJax.startup.promise")
    assert page.locator("mjx-container").count() >= 10
    error = page.evaluate(
        r"() => MathJax.tex2chtml('\\undefinedcommand').querySelector('mjx-merror') !== null"
    )
    assert error
    page.close()
