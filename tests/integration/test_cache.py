"""The response cache of a real host: which requests are answered without execution, and which are
not.
"""

from __future__ import annotations

import os
import queue
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import numpy as np
import pytest
import redis
import tritonclient.grpc as grpcclient

from tests.clients import Client, infer_error, run_script, tensor
from tests.conftest import DEADLINE, RepositoryBuilder, RunningHost, Serve, wait_until
from tests.integration.test_client_memory import Memory

COUNTER = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    count = 0

    def execute(self, requests):
        responses = []
        for request in requests:
            given = pb_utils.get_input_tensor_by_name(request, "X").as_numpy()
            self.count += 1
            if given.size and given.flat[0] < 0:
                error = pb_utils.TritonError("no negative numbers")
                responses.append(pb_utils.InferenceResponse(error=error))
                continue
            count = pb_utils.Tensor("COUNT", np.full(given.shape, self.count, np.int32))
            same = pb_utils.Tensor("SAME", given)
            wanted = request.requested_output_names()
            outputs = [t for t in (count, same) if t.name() in wanted]
            responses.append(pb_utils.InferenceResponse(outputs))
        return responses
"""
CONFIG = """
backend: "python"
input [ {{ name: "X" data_type: TYPE_INT32 dims: {dims} }} ]
output [ {{ name: "COUNT" data_type: TYPE_INT32 dims: {dims} }},
         {{ name: "SAME" data_type: TYPE_INT32 dims: {dims} }} ]
{more}
"""
ENABLED = "response_cache { enable: true }"
SIZE = 1 << 20


def add_counter(
    repository: RepositoryBuilder,
    name: str,
    more: str = ENABLED,
    dims: str = "[ -1 ]",
    version: int = 1,
) -> None:
    repository.add(name, COUNTER, CONFIG.format(dims=dims, more=more), version)


@pytest.fixture(scope="module")
def host(module_repository: RepositoryBuilder, module_serve: Serve) -> RunningHost:
    repository = module_repository
    repository.copy("script")
    for name in ("counter", "stopped", "counted", "shared"):
        add_counter(repository, name)
    add_counter(repository, "plain", "")
    add_counter(repository, "deep", dims="[ -1, -1 ]")
    for version in (1, 2):
        add_counter(repository, "versions", ENABLED + "version_policy { all {} }", version=version)
    ordered = "max_batch_size: 4 dynamic_batching { preserve_ordering: true }"
    add_counter(repository, "ordered", ENABLED + ordered)
    return module_serve(
        repository, f"--cache-config=local,size={SIZE}", "--allow-client-shm=true"
    ).wait_started()


@pytest.fixture
def client(host: RunningHost) -> Iterator[Client]:
    with host.client() as client:
        yield client


def numbers(*values: int) -> list[grpcclient.InferInput]:
    return [tensor("X", np.array(values, dtype=np.int32))]


def count(client: Client, *values: int, model: str = "counter", **options: Any) -> int:
    """Which execution of the model has made this response."""
    result = client.infer(model, numbers(*values), **options)
    return int(result.as_numpy("COUNT").flat[0])


def statistics(client: Client, model: str) -> Any:
    (found,) = client.get_inference_statistics(model, "1", as_json=False).model_stats
    return found


def test_an_equal_request_is_answered_from_the_cache(client: Client) -> None:
    first = count(client, 1, 2, 3)
    assert count(client, 1, 2, 3) == first
    assert count(client, 1, 2, 4) != first
    assert count(client, 1, 2, 3) == first


def test_a_request_keeps_its_own_id(client: Client) -> None:
    assert count(client, 4, request_id="a", parameters={"p": 1}) == count(client, 4)
    for request_id in ("b", "b", "c", "", "long " * 30, "d"):
        result = client.infer("counter", numbers(4), request_id=request_id)
        assert result.get_response().id == request_id
        assert result.get_response().model_version == "1"


def test_the_shape_is_part_of_the_key(client: Client) -> None:
    def asked(shape: tuple[int, int]) -> Any:
        array = np.arange(6, dtype=np.int32).reshape(shape)
        return client.infer("deep", [tensor("X", array)]).as_numpy("COUNT")

    flat, tall = asked((1, 6)), asked((6, 1))
    assert (flat.shape, tall.shape) == ((1, 6), (6, 1))
    assert flat.flat[0] != tall.flat[0]


def test_the_requested_outputs_are_part_of_the_key(client: Client) -> None:
    def asked(*names: str) -> list[str]:
        wanted = [grpcclient.InferRequestedOutput(name) for name in names]
        response = client.infer("counter", numbers(5), outputs=wanted).get_response()
        return sorted(output.name for output in response.outputs)

    for _ in range(2):
        assert asked("COUNT", "SAME") == ["COUNT", "SAME"]
        assert asked("SAME") == ["SAME"]


def test_each_version_has_its_own_entries(client: Client) -> None:
    for _ in range(2):
        assert count(client, 7, model="versions", model_version="1") == 1
    count(client, 8, model="versions", model_version="2")
    assert count(client, 7, model="versions", model_version="2") == 2
    assert count(client, 7, model="versions") == 2, "the latest one, by whatever name"


REPEATS = 6  # requests until equal ones are answered without parsing them, and some more


def test_repeated_hits_end_with_their_entry_their_model_and_its_version(
    repository: RepositoryBuilder, serve: Serve
) -> None:
    """Each kind of end needs requests that are answered without parsing them before it."""
    add_counter(repository, "m")
    host = serve(
        repository,
        "--cache-config=local,size=4096",
        *("--model-control-mode=explicit", "--load-model=*"),
    ).wait_started()
    with host.client() as client:
        assert {count(client, 1, model="m") for _ in range(REPEATS)} == {1}
        assert {count(client, 1, model="m", model_version="1") for _ in range(REPEATS)} == {1}
        # Other entries take its place.
        for value in range(2, 12):
            count(client, value, model="m")
        assert {count(client, 1, model="m") for _ in range(REPEATS)} == {12}
        # A second version has entries of its own, and is the one that is asked.
        add_counter(repository, "m", version=2)
        client.load_model("m")
        assert {count(client, 1, model="m") for _ in range(REPEATS)} == {1}
        (seen,) = client.get_inference_statistics("m", "2").model_stats
        assert (seen.execution_count, seen.inference_stats.cache_hit.count) == (1, REPEATS - 1)
        # Loaded again with other code, it answers once its entries are gone.
        counter = COUNTER.replace("count = 0", "count = 100")
        repository.add("m", counter, CONFIG.format(dims="[ -1 ]", more=ENABLED), 2)
        client.load_model("m")
        for value in range(2, 12):
            count(client, value, model="m")
        assert {count(client, 1, model="m") for _ in range(REPEATS)} == {111}
        # A model that is gone does not answer.
        client.unload_model("m")
        status, message = infer_error(count, client, 1, model="m")
        assert "Request for unknown model: 'm' has no available versions" in message


def test_a_model_without_the_cache_enabled_is_always_executed(client: Client) -> None:
    assert [count(client, 1, model="plain") for _ in range(3)] == [1, 2, 3]


def test_a_failure_is_not_cached(client: Client) -> None:
    before = statistics(client, "counter").inference_stats
    for _ in range(2):
        assert infer_error(client.infer, "counter", numbers(-1))[1] == "no negative numbers"
    after = statistics(client, "counter").inference_stats
    assert after.fail.count == before.fail.count + 2
    assert after.cache_miss.count == before.cache_miss.count
    assert after.cache_hit.count == before.cache_hit.count


def test_a_hit_does_not_need_a_stub(host: RunningHost, client: Client) -> None:
    first = count(client, 1, model="stopped")
    (stub,) = host.stubs("stopped_0")
    stub.send_signal(signal.SIGSTOP)
    try:
        assert count(client, 1, model="stopped", client_timeout=DEADLINE) == first
    finally:
        stub.send_signal(signal.SIGCONT)


def test_hits_and_misses_are_not_counted_as_inferences(host: RunningHost, client: Client) -> None:
    for value in (1, 1, 1, 1, 1, 1, 2):  # the later ones are not parsed
        count(client, value, model="counted")
    seen = statistics(client, "counted")
    assert (seen.inference_count, seen.execution_count) == (2, 2)
    spent = seen.inference_stats
    assert (spent.success.count, spent.fail.count, spent.queue.count) == (7, 0, 7)
    assert spent.compute_infer.count == 2
    assert (spent.cache_hit.count, spent.cache_miss.count) == (5, 2)
    assert spent.cache_hit.ns > 0 and spent.cache_miss.ns > 0
    labels = '{model="counted",version="1"}'
    for series in (
        f"nv_cache_num_hits_per_model{labels} 5",
        f"nv_cache_num_misses_per_model{labels} 2",
        f"nv_inference_request_success{labels} 7",
        f"nv_inference_count{labels} 2",
    ):
        assert series in scrape(host)


def test_the_whole_cache_has_metrics(host: RunningHost, client: Client) -> None:
    def value(name: str) -> float:
        lines = [line for line in scrape(host).splitlines() if line.startswith(f"{name} ")]
        (line,) = lines
        return float(line.split()[1])

    names = ("lookups", "hits", "misses", "entries")
    before = {name: value(f"nv_cache_num_{name}") for name in names}
    for _ in range(6):
        count(client, 1234)
    grown = {name: value(f"nv_cache_num_{name}") - before[name] for name in names}
    assert grown == {"lookups": 6, "hits": 5, "misses": 1, "entries": 1}
    assert 0 < value("nv_cache_util") < 1
    assert "nv_cache_num_hits_per_model" in scrape(host)


def scrape(host: RunningHost) -> str:
    with urlopen(f"http://{host.metrics_url}/metrics", timeout=DEADLINE) as answer:
        text: str = answer.read().decode()
    return text


def test_a_response_too_large_for_the_cache_is_sent_and_logged(
    host: RunningHost, client: Client
) -> None:
    large = [9] * (SIZE // 4)
    assert count(client, *large) != count(client, *large)
    host.wait_for(
        r"Failed to insert key \[\d+\] into response cache: Requested byte_size: \d+ is greater"
        rf" than total cache size: {SIZE}"
    )


def test_hits_and_misses_keep_the_order_of_their_requests(host: RunningHost) -> None:
    answers: queue.Queue[str] = queue.Queue()
    with host.client() as client:
        rows = [tensor("X", np.full((1, 3), value, dtype=np.int32)) for value in (1, 2)]
        client.infer("ordered", [rows[0]])
        client.start_stream(lambda result, error: answers.put(result.get_response().id))
        (stub,) = host.stubs("ordered_0")
        stub.send_signal(signal.SIGSTOP)
        try:
            client.async_stream_infer("ordered", [rows[1]], request_id="run")
            client.async_stream_infer("ordered", [rows[0]], request_id="kept")
            # When the host answers the next request on the same connection, it has accepted both.
            wait_until(lambda: pending(host, "ordered") or hits(client, "ordered") > 0, "the two")
        finally:
            stub.send_signal(signal.SIGCONT)
        assert [answers.get(timeout=DEADLINE) for _ in range(2)] == ["run", "kept"]
        client.stop_stream()


def hits(client: Client, model: str) -> int:
    number: int = statistics(client, model).inference_stats.cache_hit.count
    return number


def pending(host: RunningHost, model: str) -> bool:
    return f'nv_inference_pending_request_count{{model="{model}",version="1"}} 1' in scrape(host)


def test_bls_requests_and_ensemble_steps_use_the_cache(client: Client) -> None:
    source = """
        asked = ask("counter", tensor("X", np.array([6, 6], dtype=np.int32)), outputs=["COUNT"])
        found = [pb_utils.get_output_tensor_by_name(asked.exec(), "COUNT") for _ in range(2)]
        return [int(tensor.as_numpy()[0]) for tensor in found]
        """
    first, second = run_script(client, source)
    assert first == second


def test_hits_work_with_tensors_in_client_shared_memory(client: Client) -> None:
    memory = Memory(client)
    try:
        found = []
        for value in (3, 3, 5, 3):
            memory.write(np.full(100, value, dtype=np.int32))
            memory.write(np.zeros(100, dtype=np.int32), 400)
            given = grpcclient.InferInput("X", [100], "INT32")
            given.set_shared_memory(memory.name, 400)
            wanted = grpcclient.InferRequestedOutput("COUNT")
            wanted.set_shared_memory(memory.name, 400, 400)
            client.infer("shared", [given], outputs=[wanted])
            found.append(int(memory.read(np.int32, [100], 400)[99]))
        assert found == [1, 1, 2, 1]
        small = grpcclient.InferRequestedOutput("COUNT")
        small.set_shared_memory(memory.name, 8, 400)
        memory.write(np.full(100, 3, dtype=np.int32))
        first = infer_error(client.infer, "shared", [given], outputs=[small])
        assert "400" in first[1]
        assert infer_error(client.infer, "shared", [given], outputs=[small]) == first
    finally:
        client.unregister_system_shared_memory()
        memory.close()


@pytest.mark.parametrize(
    ("more", "text"),
    [
        (
            "model_transaction_policy { decoupled: true }",
            (
                "Response Cache does not currently support model m with 'decoupled' transaction"
                " policy. Please disable the response cache."
            ),
        ),
        (
            "sequence_batching { }",
            (
                "Response Cache does not currently support model m with sequence batching"
                " scheduler. Please disable the response cache."
            ),
        ),
    ],
    ids=["decoupled", "sequences"],
)
def test_models_that_cannot_be_cached_do_not_load(
    repository: RepositoryBuilder, serve: Serve, more: str, text: str
) -> None:
    add_counter(repository, "m", ENABLED + more)
    host = serve(repository)
    assert host.process.wait(DEADLINE) == 1
    assert text in " ".join(host.output.split())


@pytest.mark.parametrize(
    ("setting", "text"),
    [
        (
            "local,other=1",
            "Failed to initialize LocalCache: config didn't contain a valid 'size' field.",
        ),
        (
            "local,size=big",
            "Failed to initialize LocalCache: 'size' config must be a string or uint type",
        ),
        (
            "local,size=0",
            (
                "Failed to initialize LocalCache: 'size' must be greater than 0 bytes; without"
                " --cache-config, there is no cache"
            ),
        ),
        (
            "mine,size=1",
            "unable to find 'libtritoncache_mine.so' for cache. Searched: /some/where",
        ),
        (
            "redis,host=localhost",
            (
                "Failed to initialize RedisCache: setting 'port' is missing, as in"
                " 'redis,host=localhost,port=6379'"
            ),
        ),
    ],
    ids=["no size", "no number", "nothing", "no such cache", "no port"],
)
def test_a_cache_that_cannot_be_opened_stops_the_start(
    repository: RepositoryBuilder, serve: Serve, setting: str, text: str
) -> None:
    host = serve(repository, f"--cache-config={setting}", "--cache-directory=/some/where")
    assert host.process.wait(DEADLINE) == 1
    host.wait_for("error: creating server: ")
    assert f"error: creating server: Invalid argument - {text}" in host.output


# Redis


def port_outside_the_ephemeral_range() -> int:
    """A free port outside the ephemeral range, so that a server can use it again."""
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    # Test workers start at different ports.
    for port in range(first - 1 - os.getpid() % 2000, 1024, -1):
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    pytest.fail("no port is free")


class RedisServer:
    """A Redis server with its own folder; `flags` are further settings."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self.port = port_outside_the_ephemeral_range()
        self.folder = folder
        self._flags = flags
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(
            ["redis-server", "--bind", "127.0.0.1", "--port", str(self.port), "--save", "",
             "--daemonize", "no", *self._flags],
            cwd=self.folder, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        wait_until(self.answers, "the Redis server")

    def client(self) -> redis.Redis:
        return redis.Redis(port=self.port)

    def answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), 1):
                return True
        except OSError:
            return False

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()

    @property
    def flag(self) -> str:
        """The flags of a host, with long timeouts: a slow Redis server must not cause misses."""
        timeouts = [f"{name}_timeout=60000" for name in ("connect", "socket", "wait")]
        settings = ["host=127.0.0.1", f"port={self.port}", *timeouts]
        return " ".join(f"--cache-config=redis,{setting}" for setting in settings)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    if shutil.which("redis-server") is None:
        pytest.skip("no redis-server on this machine (apt-get install redis-server)")
    server = RedisServer(tmp_path)
    yield server
    server.stop()


def test_hosts_share_the_entries_of_a_redis_server(
    repository: RepositoryBuilder, serve: Serve, server: RedisServer
) -> None:
    add_counter(repository, "counter")
    one = serve(repository, *server.flag.split())
    other = serve(repository, *server.flag.split())
    with one.wait_started().client() as client, other.wait_started().client() as second:
        assert [count(client, 5, request_id="x"), count(client, 6)] == [1, 2]
        with server.client() as keeper:
            wait_until(lambda: len(keeper.keys("pbhost:response:*")) == 2, "both responses")
            assert count(second, 6) == 2
            assert count(second, 5) == 1
            assert count(client, 5) == 1
            seen = statistics(second, "counter")
            assert (seen.execution_count, seen.inference_stats.cache_hit.count) == (0, 2)
            # Entries that another program has written are not valid responses.
            for key in keeper.keys():
                keeper.set(key, b"nonsense")
        assert count(second, 5) == 1, "its first execution"
        other.wait_for(r"the entry of key \[\d+\] is not a valid response")


def test_requests_are_executed_while_the_redis_server_is_down(
    repository: RepositoryBuilder, serve: Serve, server: RedisServer
) -> None:
    add_counter(repository, "counter")
    host = serve(repository, *server.flag.split()).wait_started()
    with host.client() as client:
        assert count(client, 5) == 1
        server.stop()
        assert [count(client, 5), count(client, 5)] == [2, 3]
        host.wait_for(r"the Redis server at 127.0.0.1:\d+ is not used for 1 s")
        server.start()
        latest = 0

        def kept_again() -> bool:
            nonlocal latest
            before, latest = latest, count(client, 5)
            return latest == before

        wait_until(kept_again, "the server to be used again")
    assert host.stop() == 0


def test_a_hanging_redis_server_delays_requests_only_for_its_timeout(
    repository: RepositoryBuilder, serve: Serve, server: RedisServer
) -> None:
    add_counter(repository, "counter")
    timeout = "--cache-config=redis,socket_timeout=1000"  # the start must respect the timeout, too
    host = serve(repository, *server.flag.split(), timeout).wait_started()
    server.process.send_signal(signal.SIGSTOP)
    try:
        with host.client() as client:
            assert [count(client, 5), count(client, 5)] == [1, 2]
    finally:
        server.process.send_signal(signal.SIGCONT)


def test_a_missing_redis_server_stops_the_start(
    repository: RepositoryBuilder, serve: Serve
) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # and is not listening
        port = closed.getsockname()[1]
        host = serve(
            repository,
            "--cache-config=redis,host=127.0.0.1",
            f"--cache-config=redis,port={port}",
        )
        assert host.process.wait(DEADLINE) == 1
    host.wait_for(
        "error: creating server: Unavailable - Failed to initialize RedisCache: no Redis server at"
        f" 127.0.0.1:{port}: "
    )
