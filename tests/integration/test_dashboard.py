"""The page at /dashboard in a browser, and the lines of the log that it shows."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import requests
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from tests.browser import WebPage, complaints, open_browser
from tests.clients import kill_stub, tensor
from tests.conftest import DEADLINE, RepositoryBuilder, RunningHost, Serve, wait_until
from tests.openai_models import LETTERS, LETTERS_CONFIG

MARKUP = "no <img src=x onerror=alert(1)> today"


@pytest.fixture(scope="module")
def host(module_repository: RepositoryBuilder, module_serve: Serve) -> RunningHost:
    module_repository.copy("identity", "script")
    module_repository.add("letters", LETTERS, LETTERS_CONFIG)
    module_repository.add("broken", f"raise ValueError('{MARKUP}')")
    module_repository.add("<b>odd", files={"1/model.py": "class TritonPythonModel: pass"})
    flags = ("--model-control-mode=explicit", "--exit-on-error=false")
    loads = [f"--load-model={name}" for name in ("identity", "letters", "broken")]
    return module_serve(module_repository, *flags, *loads).wait_started()


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    with open_browser(tmp_path_factory.mktemp("browser")) as browser:
        yield browser


@pytest.fixture(autouse=True)
def the_browser_has_nothing_to_complain_of(
    request: pytest.FixtureRequest, serve: Serve
) -> Iterator[None]:
    """Scripts ran, and what the policy forbids was not tried.

    With `serve`, this ends before a host does, which the page would then ask.
    """
    yield
    if "browser" in request.fixturenames:
        browser = request.getfixturevalue("browser")
        browser.get("about:blank")
        assert not complaints(browser)


class Dashboard(WebPage):
    """The dashboard of a host, about one of its models or all of them."""

    def __init__(self, browser: webdriver.Chrome, host: RunningHost, model: str = "") -> None:
        super().__init__(browser, host, "/dashboard")
        if model:
            self.wait_for("#models tbody", re.escape(model))
            browser.find_element(By.PARTIAL_LINK_TEXT, model).click()
            self.wait_for("#chosen", re.escape(model))

    def wait_for_row(self, model: str, pattern: str) -> str:
        """The text of the row of a model, once it matches."""
        rows = self.browser.find_elements(By.CSS_SELECTOR, "#models tbody tr")
        place = 1 + next(at for at, row in enumerate(rows) if row.text.startswith(model))
        return self.wait_for(f"#models tbody tr:nth-child({place})", pattern)

    def wait_for_plot(self, title: str, pattern: str) -> str:
        """What a plot tells to those who do not see it, once it matches."""

        def label() -> str:
            pictures = self.browser.find_elements(By.CSS_SELECTOR, "#plots svg")
            labels = [picture.get_attribute("aria-label") or "" for picture in pictures]
            return next((text for text in labels if text.startswith(f"{title}:")), "")

        wait_until(lambda: bool(re.search(pattern, label())), f"{title} {pattern}", state=label)
        return label()


def lines(host: RunningHost, after: object = 0, status: int = 200) -> Any:
    response = requests.get(
        f"http://{host.http_url}/v2/logging/lines", {"after": str(after)}, timeout=DEADLINE
    )
    assert response.status_code == status, response.text
    return response.json()


@contextmanager
def requests_in_progress(host: RunningHost) -> Iterator[None]:
    """Requests follow each other, so that every interval has some."""
    ended = threading.Event()

    def send() -> None:
        with host.client() as client:
            while not ended.wait(0.1):
                client.infer("identity", [tensor("INPUT0", np.zeros(4, np.float32))])

    sender = threading.Thread(target=send)
    sender.start()
    try:
        yield
    finally:
        ended.set()
        sender.join(DEADLINE)


# The lines of the log


def test_the_last_lines_of_the_log_can_be_read_one_after_the_other(host: RunningHost) -> None:
    before = lines(host)
    assert before["missed"] == 0
    assert before["last"] == len(before["lines"])
    assert any("Started HTTPService" in line for line in before["lines"])
    with host.client() as client:
        client.unload_model("identity")
        client.load_model("identity")
    after = lines(host, before["last"])
    assert after["last"] == before["last"] + len(after["lines"])
    assert any("identity" in line for line in after["lines"])
    assert not set(before["lines"]) & set(after["lines"])
    # A client that knows lines of an earlier server gets all of them.
    assert len(lines(host, 10**9)["lines"]) >= after["last"]


@pytest.mark.parametrize("after", ["-1", "x", "1e3", "9" * 30, "1\n"])
def test_the_number_of_a_line_is_checked(host: RunningHost, after: str) -> None:
    assert lines(host, after, 400)["error"].startswith("'after' must be the number of a line")


def test_only_the_last_lines_are_kept(repository: RepositoryBuilder, serve: Serve) -> None:
    repository.copy("identity")
    host = serve(repository, "--log-tail-lines=3").wait_started()
    host.wait_for("Started Metrics Service")
    wait_until(lambda: "Metrics" in lines(host)["lines"][-1], "the last line")
    kept = lines(host)
    assert len(kept["lines"]) == 3
    assert kept["missed"] == kept["last"] - 3 > 0


def test_the_log_and_the_page_can_be_turned_off(
    repository: RepositoryBuilder, serve: Serve
) -> None:
    host = serve(repository, "--log-tail-lines=0", "--http-dashboard=false").wait_started()
    assert "--log-tail-lines" in lines(host, status=503)["error"]
    assert requests.get(f"http://{host.http_url}/dashboard", timeout=DEADLINE).status_code == 404
    assert "/dashboard" not in host.output


@pytest.fixture(scope="module")
def restricted(
    host: RunningHost, module_repository: RepositoryBuilder, module_serve: Serve
) -> RunningHost:
    return module_serve(
        module_repository,
        *("--model-control-mode=explicit", "--load-model=identity"),
        "--http-restricted-api=statistics,model-repository:admin-key=the secret",
        "--http-restricted-api=logging:log-key=another one",
    ).wait_started()


def test_the_log_can_be_restricted(restricted: RunningHost) -> None:
    assert "log-key" in lines(restricted, status=403)["error"]


# The page


def test_the_page_needs_nothing_from_elsewhere(
    host: RunningHost, browser: webdriver.Chrome
) -> None:
    response = requests.get(f"http://{host.http_url}/dashboard", timeout=DEADLINE)
    policy = response.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", response.text)
    Dashboard(browser, host).wait_for("#models", "identity")
    names = browser.execute_script(
        "return performance.getEntriesByType('resource').map((entry) => entry.name)"
    )
    assert names
    assert all(name.startswith(f"http://{host.http_url}/") for name in names)


def test_the_log_has_the_address_of_the_page(host: RunningHost) -> None:
    host.wait_for(f"can be watched at http://{host.http_url}/dashboard")


def test_models_are_listed_with_their_numbers(host: RunningHost, browser: webdriver.Chrome) -> None:
    page = Dashboard(browser, host)
    page.wait_for("#models tbody", "letters")
    with requests_in_progress(host):
        row = page.wait_for_row("identity:1", r"^identity:1 READY 1/1 [\d.]*[1-9]")
    assert row.split()[-1] == "0"  # restarts
    assert page.text("#about").startswith("version ")


def test_failed_and_unloaded_models_are_listed_and_names_are_no_html(
    host: RunningHost, browser: webdriver.Chrome
) -> None:
    page = Dashboard(browser, host)
    listed = page.wait_for("#models tbody", "odd")
    assert MARKUP in listed
    assert "<b>odd" in listed
    assert "script" in listed
    (reason,) = browser.find_elements(By.CSS_SELECTOR, "#models .reason.bad:not(:empty)")
    assert MARKUP in reason.text
    assert not browser.find_elements(By.CSS_SELECTOR, "img, b")


def test_a_model_has_plots_of_its_own(host: RunningHost, browser: webdriver.Chrome) -> None:
    page = Dashboard(browser, host, "identity")
    with requests_in_progress(host):
        page.wait_for_plot("Requests per second", r"answered [\d.]*[1-9]\S*, failed 0$")
    page.wait_for_plot("Memory", r"identity_0 [\d.]+ MiB")
    page.wait_for_plot("Restarts", "identity_0 0")
    assert re.match(r"identity_0 serving \d+ \S+ % [\d.]+ MiB 0", page.text("#instances tbody"))
    assert "Time to first token" not in page.text("#plots")


def test_token_times_of_language_models_are_plotted(
    host: RunningHost, browser: webdriver.Chrome
) -> None:
    page = Dashboard(browser, host, "letters")
    page.wait_for_plot("Requests per second", "answered")
    body: dict[str, Any] = {"model": "letters", "prompt": "a|b|c", "stream": True}
    url = f"http://{host.http_url}/v1/completions"
    assert requests.post(url, json=body, timeout=DEADLINE).ok
    page.wait_for("#plots", "Time to first token")
    assert "Time between tokens" in page.text("#plots")
    overview = requests.get(f"http://{host.http_url}/v2/overview", timeout=DEADLINE).json()
    (model,) = [one for one in overview["models"] if one["name"] == "letters"]
    assert sum(count for _, count in model["first_token"]) >= 1
    assert sum(count for _, count in model["inter_token"]) >= 2


def test_a_plot_can_be_read_with_the_keyboard(host: RunningHost, browser: webdriver.Chrome) -> None:
    page = Dashboard(browser, host, "identity")
    page.wait_for_plot("Queue", "waiting 0, running 0$")
    wait_until(lambda: browser.execute_script("return samples().length") > 2, "three samples")
    picture = browser.find_element(By.CSS_SELECTOR, "#plots svg[aria-label^=Queue]")
    browser.execute_script("arguments[0].focus()", picture)
    picture.send_keys(Keys.ARROW_LEFT, Keys.ARROW_LEFT)
    page.wait_for_plot("Queue", r"waiting 0, running 0, \d+ s ago$")


def test_models_are_searched_and_sorted(host: RunningHost, browser: webdriver.Chrome) -> None:
    page = Dashboard(browser, host)
    page.wait_for("#models tbody", "letters")
    page.press("Model")
    first = "return document.querySelector('#models tbody tr:not([hidden]) a').textContent"
    assert browser.execute_script(first) == "script"
    assert browser.find_elements(By.CSS_SELECTOR, "th[aria-sort=descending]")
    page.fill("Search", "LETT")
    assert browser.execute_script(first) == "letters:1"
    assert "identity" not in page.text("#models tbody")
    page.wait_for("#count", "^1 of ")


def test_models_are_loaded_and_unloaded(host: RunningHost, browser: webdriver.Chrome) -> None:
    page = Dashboard(browser, host, "script")
    page.press("Load")
    page.wait_for("#control", r"^Loaded\.$")
    page.wait_for("#chosen", "^script:1$")
    page.wait_for("#state", "^READY$")
    page.press("Unload")
    browser.switch_to.alert.accept()
    page.wait_for("#control", r"^Unloading has begun\.$")
    page.wait_for("#state", "^UNAVAILABLE: unloaded$")


def test_a_load_that_fails_says_why(host: RunningHost, browser: webdriver.Chrome) -> None:
    page = Dashboard(browser, host, "<b>odd")
    page.press("Load")
    page.wait_for("#control.bad", "odd")
    page.wait_for("#state.bad", "^UNAVAILABLE: ")


def test_a_crash_is_shown_with_its_record(
    repository: RepositoryBuilder, serve: Serve, browser: webdriver.Chrome
) -> None:
    repository.copy("identity")
    host = serve(repository).wait_started()
    (stub,) = host.stubs("identity_0")
    os.kill(stub.pid, signal.SIGABRT)
    host.wait_for("restarted")
    page = Dashboard(browser, host)
    page.wait_for("#crashes summary", "identity:1 · identity_0 · .*SIGABRT")
    browser.find_element(By.CSS_SELECTOR, "#crashes summary").click()
    page.wait_for("#crashes pre", r"Signal: SIGABRT[\s\S]*Stacks:")
    page.wait_for_row("identity:1", " 1$")
    assert not browser.find_element(By.ID, "load").is_displayed()  # not in this mode


def test_requests_in_quarantine_are_shown_with_their_tensors_and_can_be_lifted(
    repository: RepositoryBuilder, serve: Serve, browser: webdriver.Chrome, tmp_path: Path
) -> None:
    repository.copy("misbehave")
    host = serve(
        repository, f"--crash-directory={tmp_path}", "--crash-tensor-byte-size=100",
        "--allow-recording=true", "--http-restricted-api=recording:record-key=the secret",
    ).wait_started()  # fmt: skip
    for _ in range(2):
        kill_stub(host, "aborts", request_id="culprit")
    page = Dashboard(browser, host)
    page.wait_for("#quarantine li", r"misbehave:1 · culprit · COMMAND BYTES \[1\] · until ")
    browser.find_element(By.CSS_SELECTOR, "#crashes summary").click()
    page.wait_for("#crashes .tensors", "expecting header 'record-key'")
    page.fill("record-key", "the secret")
    page.press("Use")
    page.wait_for(
        "#crashes .tensors", r"Request culprit\nCOMMAND BYTES \[1\], 10 bytes:\n\['aborts"
    )
    page.press("Lift")
    browser.switch_to.alert.accept()
    shown = browser.find_element(By.ID, "quarantine")
    wait_until(lambda: not shown.is_displayed(), "the end of the list")
    kill_stub(host, "aborts")


def test_the_log_is_shown_and_searched(host: RunningHost, browser: webdriver.Chrome) -> None:
    page = Dashboard(browser, host)
    page.wait_for("#lines", "Started HTTPService")
    assert browser.find_elements(By.CSS_SELECTOR, "#lines .bad")
    page.fill("Lines with", "started grpc")
    assert re.fullmatch(r"I\d{4} .*Started GRPCInferenceService.*", page.text("#lines"))


def test_the_page_requests_keys(restricted: RunningHost, browser: webdriver.Chrome) -> None:
    page = Dashboard(browser, restricted)
    page.wait_for("#trouble", "expecting header 'admin-key'")
    page.wait_for("#log-note", "expecting header 'log-key'")
    page.fill("admin-key", "the secret")
    page.press("Use")
    page.wait_for("#models tbody", "identity:1")
    page.fill("log-key", "another one")
    page.press("Use")
    page.wait_for("#lines", "Started HTTPService")
    assert "secret" not in browser.current_url


def test_the_page_requests_the_key_of_a_client(
    repository: RepositoryBuilder, serve: Serve, browser: webdriver.Chrome, tmp_path: Path
) -> None:
    repository.copy("identity")
    (tmp_path / "keys").write_text("ops ops-admin-key allow=all\n")
    host = serve(repository, f"--api-key-file={tmp_path / 'keys'}").wait_started()
    page = Dashboard(browser, host)
    page.wait_for("#keyfields", "^API key$")
    page.fill("API key", "ops-admin-key")
    page.press("Use")
    page.wait_for("#models tbody", "identity:1")
    page.wait_for("#lines", "Started HTTPService")


def test_nothing_is_asked_while_the_page_pauses(
    host: RunningHost, browser: webdriver.Chrome
) -> None:
    page = Dashboard(browser, host)
    page.wait_for("#models tbody", "identity")
    page.press("Pause")
    wait_until(lambda: not browser.execute_script("return asking"), "the end of the last poll")
    browser.execute_script(
        "window.asked = 0; const send = fetch;"
        "window.fetch = (...all) => { window.asked += 1; return send(...all); };"
        "document.dispatchEvent(new Event('visibilitychange')); schedule();"
    )
    assert browser.execute_script("return [asked, timer]") == [0, 0]
    page.press("Continue")
    wait_until(lambda: browser.execute_script("return asked") > 1, "the next poll")


def test_the_page_fits_a_phone(host: RunningHost, browser: webdriver.Chrome) -> None:
    size = browser.get_window_size()
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": 360, "height": 740, "deviceScaleFactor": 1, "mobile": True},
    )
    try:
        page = Dashboard(browser, host, "identity")
        page.wait_for_plot("Memory", "MiB")
        width = "return [document.documentElement.scrollWidth, innerWidth]"
        assert browser.execute_script(width) == [360, 360]
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    assert browser.get_window_size() == size


def test_the_page_is_dark_where_the_system_is(host: RunningHost, browser: webdriver.Chrome) -> None:
    brightness = {}
    for scheme in ("light", "dark"):
        media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
        Dashboard(browser, host).wait_for("#models tbody", "identity")
        colours = [
            browser.execute_script(f"return getComputedStyle(document.body).{name}")
            for name in ("backgroundColor", "color")
        ]
        brightness[scheme] = [sum(map(int, re.findall(r"\d+", one)[:3])) for one in colours]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    ground, text = brightness["light"]
    assert ground > 600 > 200 > text
    ground, text = brightness["dark"]
    assert ground < 200 < 600 < text
