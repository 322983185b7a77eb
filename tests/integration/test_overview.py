"""What a server tells about its models in numbers: over HTTP, and by `pbhost top`."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from typing import Any

import numpy as np
import pytest
import requests

from tests.clients import Client, tensor
from tests.conftest import (
    DEADLINE,
    ROOT,
    RepositoryBuilder,
    RunningHost,
    Serve,
    run_pbhost,
    wait_until,
)

BROKEN = "raise ValueError('not today')"


@pytest.fixture(scope="module")
def host(module_repository: RepositoryBuilder, module_serve: Serve) -> RunningHost:
    module_repository.copy("identity", "script")
    module_repository.add("broken", BROKEN)
    flags = ("--model-control-mode=explicit", "--load-model=*", "--exit-on-error=false")
    return module_serve(module_repository, *flags).wait_started()


def overview(host: RunningHost) -> Any:
    response = requests.get(f"http://{host.http_url}/v2/overview", timeout=DEADLINE)
    assert response.status_code == 200, response.text
    return response.json()


def find_model(host: RunningHost, name: str) -> Any:
    (model,) = [one for one in overview(host)["models"] if one["name"] == name]
    return model


def send(client: Client, count: int, model: str = "identity") -> None:
    array = np.zeros(4, np.float32)
    for _ in range(count):
        client.infer(model, [tensor("INPUT0", array)])


def top(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run_pbhost("top", *arguments)


def test_the_overview_counts_requests_and_latencies(host: RunningHost) -> None:
    before = find_model(host, "identity")
    with host.client() as client:
        send(client, 5)
    wait_until(
        lambda: find_model(host, "identity")["success"] == before["success"] + 5,
        "the requests in the overview",
    )
    after = find_model(host, "identity")
    assert (after["state"], after["version"], after["reason"]) == ("READY", 1, "")
    assert after["executions"] - before["executions"] == 5
    assert after["inferences"] - before["inferences"] == 5
    assert sum(count for _, count in after["latency"]) == after["success"]
    bounds = [bound for bound, _ in after["latency"]]
    assert bounds == sorted(bounds)
    # Each latency is at most its bucket's bound, so the sum of the bounds is no less.
    assert sum(bound * count for bound, count in after["latency"]) >= after["request_us"]
    assert after["request_us"] >= after["queue_us"] >= 0
    assert (after["pending"], after["in_flight"], after["failure"]) == (0, 0, before["failure"])


def test_the_overview_describes_instances_and_the_server(host: RunningHost) -> None:
    (instance,) = find_model(host, "script")["instances"]
    (stub,) = host.stubs("script_0")
    assert (instance["name"], instance["pid"]) == ("script_0", stub.pid)
    assert (instance["state"], instance["restarts"]) == ("serving", 0)
    assert instance["resident_bytes"] > 1 << 20
    server = overview(host)
    assert server["resident_bytes"] > 1 << 20
    assert server["name"] == "triton"
    assert server["model_control"] is True


def test_the_overview_says_why_a_model_is_not_loaded(host: RunningHost) -> None:
    broken = find_model(host, "broken")
    assert broken["state"] == "UNAVAILABLE"
    assert "not today" in broken["reason"]
    assert broken["instances"] == []


def test_the_overview_counts_restarts(repository: RepositoryBuilder, serve: Serve) -> None:
    repository.copy("identity")
    host = serve(repository).wait_started()
    (stub,) = host.stubs("identity_0")
    stub.kill()

    def restarted() -> bool:
        (instance,) = find_model(host, "identity")["instances"]
        return (instance["restarts"], instance["state"]) == (1, "serving")

    wait_until(restarted, "the restart in the overview")
    (instance,) = find_model(host, "identity")["instances"]
    assert instance["pid"] != stub.pid
    with host.client() as client:
        send(client, 1)
    shown = top(f"http://{host.http_url}", "--once", "--interval=1").stdout
    assert re.search(r"^identity:1 +1/1 .* 1$", shown, re.MULTILINE)


def test_the_counters_of_a_model_continue_over_a_reload(
    repository: RepositoryBuilder, serve: Serve
) -> None:
    repository.copy("identity")
    host = serve(
        repository, "--model-control-mode=explicit", "--load-model=identity"
    ).wait_started()
    with host.client() as client:
        send(client, 3)
        (repository.path / "identity" / "1" / "model.py").touch()
        client.load_model("identity")
        send(client, 2)
    wait_until(lambda: find_model(host, "identity")["success"] == 5, "all five requests")
    assert sum(count for _, count in find_model(host, "identity")["latency"]) == 5


def test_the_overview_can_be_restricted(repository: RepositoryBuilder, serve: Serve) -> None:
    repository.copy("identity")
    host = serve(repository, "--http-restricted-api=statistics:key=secret").wait_started()
    url = f"http://{host.http_url}"
    assert requests.get(f"{url}/v2/overview", timeout=DEADLINE).status_code == 403
    refused = top(url, "--once")
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "expecting header 'key'" in refused.stderr
    allowed = top(url, "--once", "--interval=1", "--header=key:secret")
    assert "identity:1" in allowed.stdout


def test_top_prints_one_table(host: RunningHost) -> None:
    done = top(f"http://{host.http_url}", "--once", "--interval=1")
    assert done.returncode == 0, done.stderr
    head, titles, *rows = done.stdout.splitlines()
    assert re.match(
        r"triton, pbhost \S+: up 0:\d\d:\d\d, 3 models, [\d.]+ requests/s, 0 wait", head
    )
    assert titles.split() == [
        *("MODEL", "INST", "QUEUE", "BATCH", "REQ/S", "FAIL/S", "P50", "P99", "MEMORY"),
        "RESTARTS",
    ]
    broken, identity, script = rows
    assert re.match("broken(:1)? +UNAVAILABLE .*not today", broken)
    assert identity.split()[:3] == ["identity:1", "1/1", "0"]
    assert script.split()[-1] == "0"
    only = top(f"http://{host.http_url}", "--once", "--interval=1", "--model=ident")
    assert len(only.stdout.splitlines()) == 3


def test_top_shows_rates_since_the_start_first(host: RunningHost) -> None:
    """Without a terminal, the first table comes at once."""
    with host.client() as client:
        send(client, 1)
    wait_until(lambda: find_model(host, "identity")["success"] > 0, "the request in the overview")
    running = subprocess.Popen(
        [sys.executable, "-m", "pbhost", "top", f"http://{host.http_url}", "--sort=rate"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    with running:
        assert running.stdout is not None
        head, _, first = (running.stdout.readline() for _ in range(3))
        running.stdout.close()  # as `head -3` does
        assert "\x1b" not in head
        assert re.match(r"identity:1 +1/1 +0 +1\.0 +[\d.]+ +0\.0 +[\d.]+[mu]?s ", first)
        assert running.wait(DEADLINE) == 0


class Terminal:
    """`pbhost top` in a terminal of a size."""

    def __init__(self, columns: int, lines: int, *arguments: str) -> None:
        self._end, terminal = pty.openpty()
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        self.before = termios.tcgetattr(terminal)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "pbhost", "top", *arguments],
            cwd=ROOT, stdin=terminal, stdout=terminal, stderr=terminal, start_new_session=True,
        )  # fmt: skip
        self._terminal = terminal
        self.output = ""

    def read_until(self, pattern: str) -> str:
        end = time.monotonic() + DEADLINE
        while not re.search(pattern, self.output):
            assert time.monotonic() < end, self.output
            if select.select([self._end], [], [], 0.1)[0]:
                self.output += os.read(self._end, 1 << 16).decode()
        return self.output

    def read_table(self) -> list[str]:
        """The lines of the first table."""
        screen = self.read_until(r"\x1b\[H\x1b\[J[^\x1b]*\x1b\[H")
        return screen.split("\x1b[H\x1b[J")[1].split("\x1b[H")[0].split("\r\n")

    def press(self, keys: str) -> None:
        os.write(self._end, keys.encode())

    def settings(self) -> list[Any]:
        return termios.tcgetattr(self._terminal)

    def close(self) -> None:
        self.process.kill()
        self.process.wait(DEADLINE)
        os.close(self._end)
        os.close(self._terminal)


@pytest.mark.parametrize(("columns", "lines"), [(120, 30), (80, 24), (40, 4), (10, 2)])
def test_top_fits_the_terminal_and_gives_it_back(
    host: RunningHost, columns: int, lines: int
) -> None:
    terminal = Terminal(columns, lines, f"http://{host.http_url}")
    try:
        shown = terminal.read_table()
        assert len(shown) <= lines
        assert all(len(line) <= columns for line in shown), shown
        if columns >= 80:
            assert any(line.endswith(" RESTARTS") for line in shown[1:3])
        if columns == 40:
            assert "QUEUE" in shown[1] and "REQ/S" in shown[1] and "MEMORY" not in shown[1]
            assert shown[-1].startswith("... and 2 more")
        terminal.press("q")
        assert terminal.process.wait(DEADLINE) == 0
        assert terminal.read_until(r"\x1b\[\?1049l")
        assert terminal.settings() == terminal.before
    finally:
        terminal.close()


def test_top_can_be_read_in_a_narrow_terminal(repository: RepositoryBuilder, serve: Serve) -> None:
    repository.copy("identity")
    (repository.path / "identity").rename(repository.path / "a_model_with_a_long_tail")
    host = serve(repository).wait_started()
    for columns, row, titles in (
        (60, "a_mode+ail:1   1/1     0 ", "MODEL INST QUEUE REQ/S FAIL/S P50 P99 MEMORY"),
        (40, "a_mode+tail:1   1/1     0 ", "MODEL INST QUEUE REQ/S P99"),
    ):
        terminal = Terminal(columns, 24, f"http://{host.http_url}")
        try:
            shown = terminal.read_table()
        finally:
            terminal.close()
        assert all(len(line) <= columns for line in shown), shown
        *head, names, model = shown
        assert names.split() == titles.split()
        assert model.startswith(row)
        assert len(head) > 1
        assert re.fullmatch(
            r"triton, pbhost \S+: up [\d:]+, 1 model, 0.0 requests/s, 0 waiting,"
            r" server process \S+",
            " ".join(head),
        )


def test_top_needs_a_server(host: RunningHost) -> None:
    wrong = top("localhost:8000", "--once")
    assert wrong.stderr == "pbhost top: expected http://HOST:PORT, got 'localhost:8000'\n"
    assert top(f"http://{host.http_url}", "--interval=0").returncode == 2
    json.dumps(overview(host), allow_nan=False)
