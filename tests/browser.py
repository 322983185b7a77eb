"""Chromium without a window, and the web pages of a host in it."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from selenium import webdriver
from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

from tests.conftest import DEADLINE, RunningHost


@contextmanager
def open_browser(profile: Path) -> Iterator[webdriver.Chrome]:
    """A browser with its profile in a folder; skips the test if there is none."""
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("needs the programs chromium and chromedriver")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    for flag in (
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--disable-extensions",
        "--process-per-site",
        "--renderer-process-limit=1",
        "--disable-site-isolation-trials",
        "--disable-features=SpareRendererForSitePerProcess,IsolateOrigins,site-per-process,BackForwardCache,OptimizationHints,Translate,MediaRouter",
        "--disable-background-timer-throttling",
        "--mute-audio",
        "--window-size=1200,1200",
        f"--user-data-dir={profile}",
    ):
        options.add_argument(flag)
    browser = webdriver.Chrome(options=options, service=Service(driver))
    try:
        yield browser
    finally:
        browser.quit()


def complaints(browser: webdriver.Chrome) -> list[str]:
    """What the browser has logged: errors of scripts, and what a policy has forbidden.

    Refusals of the server are left out.
    """
    lines = [entry["message"] for entry in browser.get_log("browser")]  # type: ignore[no-untyped-call]  # of selenium
    return [line for line in lines if "the server responded with" not in line]


class WebPage:
    """A page of a host; `path` may have a fragment."""

    def __init__(self, browser: webdriver.Chrome, host: RunningHost, path: str) -> None:
        self.browser = browser
        browser.get("about:blank")
        browser.get(f"http://{host.http_url}{path}")

    def text(self, selector: str) -> str:
        return self.browser.find_element(By.CSS_SELECTOR, selector).text

    def wait_for(self, selector: str, pattern: str) -> str:
        """The text of the first such element, once it matches."""
        replaced = [StaleElementReferenceException]  # between being found and being read
        wait = WebDriverWait(self.browser, DEADLINE, 0.05, ignored_exceptions=replaced)

        def matching(browser: webdriver.Chrome) -> str:
            found = browser.find_elements(By.CSS_SELECTOR, selector)
            text = found[0].text if found else ""
            return text if re.search(pattern, text) else ""

        return wait.until(matching, f"{selector} never matched {pattern!r}")

    def fill(self, label: str, value: str) -> None:
        """Writes a value into the field that begins with this label."""
        for element in self.browser.find_elements(By.TAG_NAME, "label"):
            if element.text == label or element.text.startswith(f"{label} "):
                field = self.browser.find_element(By.ID, element.get_attribute("for") or "")
                field.clear()
                field.send_keys(value)
                return
        pytest.fail(f"no field is labelled {label}")

    def press(self, name: str) -> None:
        for button in self.browser.find_elements(By.TAG_NAME, "button"):
            if button.text == name:
                button.click()
                return
        pytest.fail(f"no button is called {name}")
