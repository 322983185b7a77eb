"""The documentation site, built strictly, on a screen as narrow as that of a phone."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium import webdriver

from tests.browser import open_browser
from tests.conftest import DEADLINE, ROOT

pytest.importorskip("mkdocs", reason="make test-all installs what builds the site")
pytestmark = pytest.mark.test_all(reason="builds the site, and opens each of its pages")

PHONE = {"width": 390, "height": 844, "deviceScaleFactor": 2, "mobile": True}
TOO_WIDE = """
const width = document.documentElement.clientWidth;
const scrolls = (element) => ["auto", "scroll"].includes(getComputedStyle(element).overflowX);
const found = [];
for (const element of document.querySelectorAll("article, article *")) {
  if (element.getBoundingClientRect().right <= width + 1) continue;
  let inside = element.parentElement;
  while (inside && !scrolls(inside)) inside = inside.parentElement;
  if (!inside || inside === document.body) found.push(element.outerHTML.slice(0, 100));
}
if (document.documentElement.scrollWidth > width) found.push("the page scrolls");
return found;
"""
"""What reaches beyond the right edge, unless it scrolls inside an element of its own."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=2 * DEADLINE)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def phone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    with open_browser(tmp_path_factory.mktemp("profile")) as browser:
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", PHONE)
        yield browser


@pytest.mark.timeout(900)
def test_no_page_scrolls_sideways_on_a_phone(site: Path, phone: webdriver.Chrome) -> None:
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 50
    wide = {}
    for page in pages:
        phone.get(page.as_uri())
        if found := phone.execute_script(TOO_WIDE):
            wide[str(page.relative_to(site))] = found
    assert wide == {}


def test_what_is_too_wide_is_found(site: Path, phone: webdriver.Chrome) -> None:
    phone.get((site / "index.html").as_uri())
    phone.execute_script(
        "document.querySelector('article').innerHTML = '<p style=\"width: 500px\">wide</p>'"
    )
    assert phone.execute_script(TOO_WIDE)[-1] == "the page scrolls"
