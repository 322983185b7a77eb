"""Frontend processes that are lost in the middle of requests, and clients that overload one."""

from __future__ import annotations

import asyncio
import json
import os
import queue
import resource
import signal
import uuid
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import tritonclient.grpc as grpcclient
from hyperframe.frame import SettingsFrame
from tritonclient.utils import InferenceServerException
from tritonclient.utils import shared_memory as shm

from stub.wire.ring import RING_BYTES
from tests.clients import tensor
from tests.conftest import DEADLINE, RepositoryBuilder, RunningHost, Serve, wait_until
from tests.faults.campaign import SCALE, fault
from tests.faults.hostile_http2 import HostileConnection
from tests.faults.models import add_models
from tests.faults.test_connections import infer_message
from tests.frontends import (
    add_hold,
    client_ports,
    connect,
    frontends,
    in_flight,
    only,
    wait_complete,
)
from tests.uploads import GrpcUpload, HttpUpload, add_model

MIB = 1 << 20
RECEIVE_BUFFER = 8 * MIB
VALUES = np.arange(1 << 16, dtype=np.float32)
CONNECTIONS = 2000 if SCALE else 400
PROCESSES, KILLS = 4, 5 if SCALE else 3


@pytest.fixture(scope="module")
def gate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file at whose creation the model `hold` responds."""
    return tmp_path_factory.mktemp("gate") / "open"


@pytest.fixture(scope="module")
def host(module_serve: Serve, module_repository: RepositoryBuilder, gate: Path) -> RunningHost:
    """A host with two frontend processes, which hold 8 MiB of large requests at once."""
    add_models(module_repository)
    add_model(module_repository)
    add_hold(module_repository, gate)
    return module_serve(
        module_repository,
        "--frontend-processes=2",
        "--grpc-engine=h2",
        "--allow-client-shm=true",
        f"--receive-buffer-byte-size={RECEIVE_BUFFER}",
    ).wait_started()


class SharedTensors:
    """The shared memory of a client: `VALUES`, and room for the output."""

    def __init__(self, client: grpcclient.InferenceServerClient) -> None:
        self._name = f"region-{uuid.uuid4().hex}"
        key = f"/test-{uuid.uuid4().hex}"
        self._memory = shm.create_shared_memory_region(self._name, key, 2 * VALUES.nbytes)
        shm.set_shared_memory_region(self._memory, [VALUES])
        client.register_system_shared_memory(self._name, key, 2 * VALUES.nbytes)

    def start(self, client: grpcclient.InferenceServerClient) -> queue.Queue[Any]:
        """Sends a request to the model `hold`; returns its outcome."""
        given = grpcclient.InferInput("IN", list(VALUES.shape), "FP32")
        given.set_shared_memory(self._name, VALUES.nbytes)
        wanted = grpcclient.InferRequestedOutput("OUT")
        wanted.set_shared_memory(self._name, VALUES.nbytes, offset=VALUES.nbytes)
        outcome: queue.Queue[Any] = queue.Queue()
        client.async_infer(
            "hold", [given], lambda result, error: outcome.put(error or result), outputs=[wanted]
        )
        return outcome

    @property
    def output(self) -> Any:
        """What was written for the output."""
        return shm.get_contents_as_numpy(
            self._memory, np.float32, list(VALUES.shape), offset=VALUES.nbytes
        )

    def close(self, client: grpcclient.InferenceServerClient) -> None:
        """Takes the memory back, whose name the server knows."""
        client.unregister_system_shared_memory(self._name)
        shm.destroy_shared_memory_region(self._memory)


def kill(process: psutil.Process) -> None:
    """Kills it, as the kernel does when a control group has no memory left."""
    process.kill()


def stop(process: psutil.Process) -> None:
    """Lets it stand still."""
    process.send_signal(signal.SIGSTOP)


@pytest.mark.parametrize("lose", [kill, stop])
def test_a_lost_frontend_harms_nothing_but_its_own_requests(
    host: RunningHost, gate: Path, lose: Callable[[psutil.Process], None]
) -> None:
    """It receives two bodies, is in the middle of a stream, and has a request in shared memory."""
    gate.unlink(missing_ok=True)
    victim, other = wait_complete(host, 2)
    cancelled = host.output.count("was cancelled")
    with ExitStack() as stack:
        with only(other, host):
            client = stack.enter_context(connect(host))
            tensors = SharedTensors(client)
            stack.enter_context(fault(f"a frontend: {lose.__name__}", host))
        with only(victim, host):
            lost_client = stack.enter_context(connect(host))
            grpc_body = stack.enter_context(GrpcUpload(host, 4 * MIB))
            http_body = stack.enter_context(HttpUpload(host, 3 * MIB))
        stream: queue.Queue[tuple[Any, Any]] = queue.Queue()
        lost_client.start_stream(lambda result, error: stream.put((result, error)))
        command = np.array([b"respond cancelled"], dtype=np.object_)
        lost_client.async_stream_infer("stream", [tensor("COMMAND", command)])
        assert stream.get(timeout=DEADLINE)[0].as_numpy("NUMBER") == [0]
        grpc_body.send(MIB)
        http_body.send(MIB)
        grpc_body.wait_read()
        http_body.wait_read()
        outcome = tensors.start(lost_client)
        wait_until(lambda: in_flight(host) == 1, "the request in shared memory")
        lose(victim)
        assert isinstance(outcome.get(timeout=DEADLINE), InferenceServerException)
        assert isinstance(stream.get(timeout=DEADLINE)[1], InferenceServerException)
        wait_until(lambda: host.output.count("was cancelled") > cancelled, "the cancellation")
        gate.touch()
        wait_until(lambda: in_flight(host) == 0, "the end of all requests")
        assert wait_complete(host, 2)[1].pid == other.pid
        # The memory that the two bodies would have needed is free again.
        with only(other, host), GrpcUpload(host, 7 * MIB) as whole:
            whole.send(8 * MIB)
            assert whole.wait_for_status() == 0
        assert not isinstance(tensors.start(client).get(timeout=DEADLINE), Exception)
        assert np.array_equal(tensors.output, VALUES)
        tensors.close(client)


def test_a_frontend_without_memory_is_replaced(host: RunningHost) -> None:
    victim, other = wait_complete(host, 2)
    with ExitStack() as stack:
        with only(other, host):
            stack.enter_context(fault("a frontend without memory", host))
        with only(victim, host):
            upload = stack.enter_context(GrpcUpload(host, 7 * MIB))
        upload.send(MIB)
        upload.wait_read()
        used = victim.memory_info().vms
        resource.prlimit(victim.pid, resource.RLIMIT_AS, (used, used))
        upload.send(8 * MIB)
        host.wait_for("pbhost-frontend 0 has ended: it .*, as it ran out of memory; its conn")
        with only(wait_complete(host, 2)[0], host), GrpcUpload(host, 7 * MIB) as whole:
            whole.send(8 * MIB)
            assert whole.wait_for_status() == 0


def test_a_frontend_that_lies_on_its_ring_is_replaced(host: RunningHost) -> None:
    """The server stands still until the frames that it was sent are garbage."""
    victim, other = wait_complete(host, 2)
    with ExitStack() as stack:
        with only(other, host):
            stack.enter_context(fault("a frontend that lies", host))
        with only(victim, host):
            client = stack.enter_context(connect(host))
        rings = next(
            path
            for path in Path(f"/proc/{victim.pid}/fd").iterdir()
            if "pbhost-frontend-rings" in str(path.readlink())
        )
        memory = stack.enter_context(rings.open("r+b", buffering=0))
        to_server = slice(RING_BYTES + 64, 2 * RING_BYTES)  # its head is the server's
        before = os.pread(memory.fileno(), 2 * RING_BYTES, 0)[to_server]
        host.process.send_signal(signal.SIGSTOP)
        try:
            outcome: queue.Queue[Any] = queue.Queue()
            given = [tensor("INPUT0", VALUES)]
            client.async_infer("identity", given, lambda result, error: outcome.put(error))
            wait_until(
                lambda: os.pread(memory.fileno(), 2 * RING_BYTES, 0)[to_server] != before,
                "a frame in the ring",
            )
            os.pwrite(memory.fileno(), b"\xc1" * len(before), to_server.start)
        finally:
            host.process.send_signal(signal.SIGCONT)
        host.wait_for(r"pbhost-frontend 0 has ended: .*, as it broke the protocol: RingError\(")
        assert isinstance(outcome.get(timeout=DEADLINE), InferenceServerException)
        wait_complete(host, 2)


def test_a_slow_reader_costs_no_client_of_another_frontend(host: RunningHost) -> None:
    first, other = wait_complete(host, 2)
    calls = 64
    # All requests fit together: what waits here is their responses.
    message = infer_message((RECEIVE_BUFFER - 3 * MIB) // (4 * calls))
    with ExitStack() as stack:
        with only(other, host):
            client = stack.enter_context(connect(host))
            stack.enter_context(fault("a slow reader at another frontend", host))
        with only(first, host):
            slow = stack.enter_context(
                HostileConnection(host, {SettingsFrame.INITIAL_WINDOW_SIZE: 0}, reads=False)
            )
            wait_until(lambda: bool(client_ports(first, host.port)), "the connection")
        for _ in range(calls):
            slow.send(slow.call(message))
        values = np.arange(MIB // 2, dtype=np.float32)
        for _ in range(8):
            result = client.infer("identity", [tensor("INPUT0", values)], client_timeout=DEADLINE)
            assert np.array_equal(result.as_numpy("OUTPUT0"), values)


class Storm:
    """Clients that each send one request after the other, and connect again when they must."""

    def __init__(self, host: RunningHost) -> None:
        self._port = int(host.http_url.rpartition(":")[2])
        self.responses = [0] * CONNECTIONS
        self.lost: list[int] = []  # the ports of connections that the server has closed
        self.wrong: list[bytes] = []

    async def run(self) -> None:
        """Runs all clients until this is cancelled."""
        await asyncio.gather(*(self._client(number) for number in range(CONNECTIONS)))

    async def _client(self, number: int) -> None:
        entry = {"name": "INPUT0", "datatype": "FP32", "shape": [1], "data": [number]}
        body = json.dumps({"inputs": [entry]}).encode()
        head = b"POST /v2/models/identity/infer HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n"
        expected = f'"data":[{number}.0]'.encode()
        while True:
            reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
            port = writer.get_extra_info("sockname")[1]
            try:
                while True:
                    writer.write(head % len(body) + body)
                    response = await reader.readuntil(b"\r\n\r\n")
                    size = int(response.lower().partition(b"content-length:")[2].split()[0])
                    response += await reader.readexactly(size)
                    if expected not in response.replace(b" ", b""):
                        self.wrong.append(response)
                    self.responses[number] += 1
            except (ConnectionError, asyncio.IncompleteReadError):
                self.lost.append(port)
            finally:
                writer.close()


def test_connections_of_other_frontends_survive_when_one_after_the_other_is_killed(
    serve: Serve, repository: RepositoryBuilder
) -> None:
    repository.copy("identity")
    host = serve(repository, f"--frontend-processes={PROCESSES}").wait_started()
    wait_complete(host, PROCESSES)
    port = int(host.http_url.rpartition(":")[2])
    doomed: list[int] = []

    async def kill_one(number: int) -> None:
        alive = frontends(host)
        victim = alive[number % len(alive)]
        victim.send_signal(signal.SIGSTOP)  # from now on it accepts no connection
        doomed.extend(client_ports(victim, port))
        victim.kill()

    async def main() -> None:
        storm = Storm(host)
        running = asyncio.ensure_future(storm.run())

        async def wait(condition: Callable[[], bool]) -> None:
            end = asyncio.get_running_loop().time() + DEADLINE
            while not condition():
                assert not running.done() and asyncio.get_running_loop().time() < end
                await asyncio.sleep(0.01)

        try:
            await wait(lambda: all(storm.responses))
            assert not storm.lost
            for number in range(KILLS):
                await kill_one(number)
                enough = sum(storm.responses) + 500
                await wait(partial(lambda least: sum(storm.responses) >= least, enough))
            before_end = list(storm.responses)
            await wait(
                lambda: all(
                    now > then for now, then in zip(storm.responses, before_end, strict=True)
                )
            )
        finally:
            running.cancel()
            await asyncio.wait([running])
        assert storm.lost and not storm.wrong
        assert not set(storm.lost) - set(doomed)

    asyncio.run(main())
    wait_complete(host, PROCESSES)
