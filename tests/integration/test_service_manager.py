"""The notifications to systemd, from a real host to a socket of the test, and the unit file."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
import uuid
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.clients import run_script
from tests.conftest import DEADLINE, ROOT, RepositoryBuilder, Serve

UNIT = ROOT / "deploy" / "systemd" / "pbhost.service"


class Notifications:
    """What a host sends to the service manager."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.signs_of_life = 0
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(f"\0{address[1:]}" if address.startswith("@") else address)
        self._socket.settimeout(DEADLINE)

    def next(self) -> dict[str, str]:
        """The fields of the next message that is no sign of life."""
        while (message := self._socket.recv(65536).decode()) == "WATCHDOG=1":
            self.signs_of_life += 1
        return dict(line.split("=", 1) for line in message.split("\n"))

    def wait_for_sign_of_life(self) -> None:
        assert self._socket.recv(65536) == b"WATCHDOG=1"

    def close(self) -> None:
        self._socket.close()


@pytest.fixture(params=["path", "abstract"])
def notifications(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Notifications]:
    name = f"@pbhost-test-{uuid.uuid4().hex}"
    address = str(tmp_path / "notify") if request.param == "path" else name
    with closing(Notifications(address)) as notifications:
        yield notifications


def test_the_service_manager_follows_the_life_of_a_server(
    notifications: Notifications, serve: Serve, repository: RepositoryBuilder
) -> None:
    repository.copy("script")
    env = {"NOTIFY_SOCKET": notifications.address, "WATCHDOG_USEC": "100000"}
    host = serve(repository, env=env)
    assert notifications.next() == {"STATUS": "Loading models"}
    assert notifications.next() == {"READY": "1", "STATUS": "Serving"}
    host.wait_started()
    notifications.wait_for_sign_of_life()
    with host.client() as client:
        seen = run_script(client, "import os\nreturn sorted(os.environ)")
    assert not {"NOTIFY_SOCKET", "WATCHDOG_USEC"} & set(seen)

    before = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
    host.process.send_signal(signal.SIGHUP)
    reloading = notifications.next()
    assert reloading["RELOADING"] == "1"
    assert int(reloading["MONOTONIC_USEC"]) >= before
    assert notifications.next()["READY"] == "1"

    host.process.send_signal(signal.SIGTERM)
    assert notifications.next() == {"STOPPING": "1", "STATUS": "Finishing requests"}
    assert host.process.wait(DEADLINE) == 0


def test_a_failed_start_is_told_as_the_status(
    notifications: Notifications, serve: Serve, repository: RepositoryBuilder
) -> None:
    repository.add("broken", "import absent\n")
    serve(repository, env={"NOTIFY_SOCKET": notifications.address})
    notifications.next()
    expected = {"STATUS": "Failed: Internal - failed to load all models"}
    assert notifications.next() == expected


def test_a_missing_service_manager_is_a_warning(
    serve: Serve, repository: RepositoryBuilder, tmp_path: Path
) -> None:
    env = {"NOTIFY_SOCKET": str(tmp_path / "absent"), "WATCHDOG_USEC": "100000"}
    host = serve(repository, env=env)
    host.wait_for(r"W\d{4} .*the service manager cannot be notified: .*No such file")


def test_a_watchdog_of_another_process_gets_no_signs_of_life(
    notifications: Notifications, serve: Serve, repository: RepositoryBuilder
) -> None:
    env = {
        "NOTIFY_SOCKET": notifications.address,
        "WATCHDOG_USEC": "1000",
        "WATCHDOG_PID": str(os.getpid()),
    }
    host = serve(repository, env=env).wait_started()
    host.stop()
    for _ in range(3):  # loading, serving, stopping
        notifications.next()
    assert notifications.signs_of_life == 0


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    text = UNIT.read_text()
    assert "/opt/pbhost/bin/pbhost" in text
    unit = tmp_path / "pbhost.service"
    unit.write_text(text.replace("/opt/pbhost/bin/pbhost", "/bin/true"))
    verified = subprocess.run(
        ["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, timeout=DEADLINE
    )
    assert (verified.returncode, verified.stdout, verified.stderr) == (0, "", "")
    security = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", "--threshold=20", str(unit)],
        capture_output=True, text=True, timeout=DEADLINE,
    )  # fmt: skip
    assert security.returncode == 0, security.stdout
