"""Measures what an open dashboard costs the server.

    python -m benchmarks.dashboard [--models 200] [--seconds 40]

Starts a host with many models, sends each of them requests, and prints the CPU time of the host
without a page, with the page open in Chromium, and without it again. Needs chromium and
chromedriver.
"""

from __future__ import annotations

import argparse
import re
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import tritonclient.http as client
from selenium.webdriver.support.ui import WebDriverWait

from tests.browser import open_browser
from tests.conftest import RepositoryBuilder, RunningHost

_REQUESTS = 30  # per model, so that there are latencies to send
_SETTLED = 4  # polls of the page before it is measured


def main() -> None:
    """Prints three measurements."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=40.0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        repository = RepositoryBuilder(Path(folder, "models"))
        repository.path.mkdir()
        names = [f"identity_{number:03}" for number in range(arguments.models)]
        for name in names:
            repository.copy("identity")
            (repository.path / "identity").rename(repository.path / name)
        ports = ("--http-port=0", "--grpc-port=0", "--metrics-port=0")
        host = RunningHost(
            f"--model-repository={repository.path}", "--http-address=127.0.0.1",
            "--grpc-address=127.0.0.1", *ports,
        )  # fmt: skip
        try:
            _send_requests(host.wait_started(), names)
            _measure(host, "no page", arguments.seconds)
            _measure_with_page(host, Path(folder, "browser"), arguments.seconds)
            _measure(host, "no page", arguments.seconds)
        finally:
            host.stop()


def _send_requests(host: RunningHost, names: list[str]) -> None:
    with client.InferenceServerClient(host.http_url) as server:
        tensor = client.InferInput("INPUT0", [4], "FP32")
        tensor.set_data_from_numpy(np.zeros(4, np.float32))
        for name in names * _REQUESTS:
            server.infer(name, [tensor])


def _measure_with_page(host: RunningHost, profile: Path, seconds: float) -> None:
    with open_browser(profile) as browser:
        browser.get(f"http://{host.http_url}/dashboard")
        WebDriverWait(browser, 60).until(
            lambda page: page.execute_script("return polls") >= _SETTLED
        )
        before = browser.execute_script("return polls")
        _measure(host, "page open", seconds)
        print(f"           {browser.execute_script('return polls') - before} polls")


def _measure(host: RunningHost, what: str, seconds: float) -> None:
    process = psutil.Process(host.process.pid)
    before, start = _cpu_seconds(process), time.monotonic()
    threading.Event().wait(seconds)
    share = (_cpu_seconds(process) - before) / (time.monotonic() - start)
    load = psutil.getloadavg()[0]
    print(f"{what:10} {100 * share:.2f} % of a core (load average {load:.1f})")


def _cpu_seconds(process: psutil.Process) -> float:
    """CPU time of all threads. `/proc/PID/stat` counts in hundredths, which is too coarse."""
    total = 0
    for thread in process.threads():
        text = Path(f"/proc/{process.pid}/task/{thread.id}/schedstat").read_text()
        total += int(re.split(r"\s", text)[0])
    return total / 1e9


if __name__ == "__main__":
    main()
