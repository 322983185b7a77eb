"""The frontend processes of a host, and clients whose connections are at a certain one."""

from __future__ import annotations

import json
import signal
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import tritonclient.grpc as grpcclient

from tests.conftest import DEADLINE, RepositoryBuilder, RunningHost, wait_until

_HOLD = """
import threading
import time
from pathlib import Path

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        gate, pause = Path("{gate}"), threading.Event()
        end = time.monotonic() + {deadline}
        while not gate.exists():
            if time.monotonic() > end:
                raise TimeoutError("the gate did not open")
            pause.wait(0.005)
        inputs = [pb_utils.get_input_tensor_by_name(r, "IN").as_numpy() for r in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", one)]) for one in inputs]

    @staticmethod
    def auto_complete_config(config):
        config.add_input({{"name": "IN", "data_type": "TYPE_FP32", "dims": [-1]}})
        config.add_output({{"name": "OUT", "data_type": "TYPE_FP32", "dims": [-1]}})
        return config
"""


def add_hold(repository: RepositoryBuilder, gate: Path) -> None:
    """Adds the model `hold`, which returns its input once a file exists."""
    repository.add("hold", _HOLD.format(gate=gate, deadline=DEADLINE))


def in_flight(host: RunningHost) -> int:
    """The requests of the model `hold` without a response yet."""
    with urllib.request.urlopen(f"http://{host.http_url}/v2/overview") as response:
        models = json.loads(response.read())["models"]
    return sum(int(one["in_flight"]) for one in models if one["name"] == "hold")


def frontends(host: RunningHost) -> list[psutil.Process]:
    """The frontend processes, by their number."""
    found: dict[str, psutil.Process] = {}
    for child in psutil.Process(host.process.pid).children():
        with suppress(psutil.NoSuchProcess, IndexError):  # it has just ended
            title = child.cmdline()[0]
            if title.startswith("pbhost-frontend "):
                found[title] = child
    return [found[title] for title in sorted(found)]


def wait_complete(host: RunningHost, count: int) -> list[psutil.Process]:
    """Waits until there are `count` frontend processes; returns them by their number."""
    wait_until(lambda: len(frontends(host)) == count, f"{count} frontend processes")
    return frontends(host)


def client_ports(process: psutil.Process, port: int) -> set[int]:
    """The ports of the clients whose connections to `port` a process has."""
    return {
        one.raddr.port
        for one in process.net_connections("tcp")
        if one.laddr and one.laddr.port == port and one.raddr
    }


def connect(host: RunningHost) -> grpcclient.InferenceServerClient:
    """A new client with a connection of its own, which is accepted; use it as a context manager."""
    client = grpcclient.InferenceServerClient(
        host.url, channel_args=[("grpc.use_local_subchannel_pool", 1)]
    )
    assert client.is_server_live()
    return client


def _waiting_connections(*ports: int) -> int:
    """The connections that wait to be accepted, at listening sockets with these ports."""
    count = 0
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, queues, *_ = line.split()
            if state == "0A" and int(local.rpartition(":")[2], 16) in ports:
                count += int(queues.partition(":")[2], 16)
    return count


@contextmanager
def only(process: psutil.Process, host: RunningHost) -> Iterator[None]:
    """The other frontend processes stand still: this one accepts all connections."""
    ports = host.port, int(host.http_url.rpartition(":")[2])
    others = [one for one in frontends(host) if one.pid != process.pid]
    for other in others:
        other.send_signal(signal.SIGSTOP)
    try:
        yield
        wait_until(lambda: not _waiting_connections(*ports), "the connections to be accepted")
    finally:
        for other in others:
            other.send_signal(signal.SIGCONT)
