"""Operation of a server: ports, connections, deployment flags, health and shutdown."""

from __future__ import annotations

import http.client as http_client
import json
import os
import shutil
import signal
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from host.options.command_line import parse
from tests.clients import infer_error, run_command, tensor
from tests.conftest import DEADLINE, ROOT, RepositoryBuilder, RunningHost, Serve, wait_until
from tests.http2 import ACK, ENHANCE_YOUR_CALM, GOAWAY, NO_ERROR, PING, Http2Connection
from tests.waiting import UNTIL_SOURCE

WAITS = """
import os
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        print("waiting", flush=True)
        until(lambda: os.path.exists({go!r}), "the gate to be opened")
        return [pb_utils.InferenceResponse([]) for _ in requests]
"""


class Gate:
    """A model whose requests wait until `open` is called."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def model(self) -> str:
        """The source of the model."""
        return UNTIL_SOURCE + WAITS.format(go=str(self.path))

    def open(self) -> None:
        """Lets the requests continue."""
        self.path.touch()


@pytest.fixture(params=["grpcio", "h2"])
def engine(request: pytest.FixtureRequest) -> str:
    """The flag that selects one of the two gRPC engines."""
    return f"--grpc-engine={request.param}"


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    return Gate(tmp_path / "go")


# Ports and addresses


def test_two_hosts_share_a_port_if_both_allow_it(
    repository: RepositoryBuilder, serve: Serve, engine: str
) -> None:
    first = serve(repository, engine, "--reuse-grpc-port=true", "--id=one").wait_started()
    second = serve(
        repository, engine, "--reuse-grpc-port=true", "--id=two", f"--grpc-port={first.port}"
    ).wait_started()
    assert second.port == first.port
    names = set()

    def send_request() -> bool:
        """Uses a new connection; the kernel chooses the server that accepts it."""
        options = [("grpc.use_local_subchannel_pool", 1)]
        with grpcclient.InferenceServerClient(first.url, channel_args=options) as client:
            names.add(client.get_server_metadata().name)
        return names == {"one", "two"}

    wait_until(send_request, "answers of both")
    first.stop()
    names.clear()
    send_request()
    assert names == {"two"}


def test_a_port_is_not_shared_with_a_host_that_does_not_allow_it(
    repository: RepositoryBuilder, serve: Serve, engine: str
) -> None:
    first = serve(repository, engine, "--reuse-grpc-port=true").wait_started()
    second = serve(repository, engine, f"--grpc-port={first.port}")
    assert second.process.wait(DEADLINE) == 1
    text = f"Unavailable - Socket '127.0.0.1:{first.port}' already in use "
    assert f"failed to start GRPC service: {text}" in second.output
    assert "error: creating server: failed to start GRPC service" in second.output
    assert second.output.count("already in use") == 1


@pytest.mark.parametrize("endpoint", ["grpc", "http", "metrics"])
def test_an_address_of_another_machine_is_not_reported_as_a_port_in_use(
    repository: RepositoryBuilder, serve: Serve, engine: str, endpoint: str
) -> None:
    repository.copy("identity")
    host = serve(repository, engine, f"--{endpoint}-address=192.0.2.1")
    assert host.process.wait(DEADLINE) == 1
    assert (
        "service: Unavailable - Socket '192.0.2.1:0' cannot be opened: Cannot assign"
        " requested address"
    ) in host.output
    assert "loading: identity" not in host.output


@pytest.mark.parametrize("endpoint", ["grpc", "http", "metrics"])
def test_a_port_in_use_is_reported_before_models_load(
    repository: RepositoryBuilder, serve: Serve, engine: str, endpoint: str
) -> None:
    repository.copy("identity")
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        host = serve(repository, engine, f"--{endpoint}-port={port}")
        assert host.process.wait(DEADLINE) == 1
    service = {"grpc": "GRPC", "http": "HTTP", "metrics": "Metrics"}[endpoint]
    text = f"Unavailable - Socket '127.0.0.1:{port}' already in use "
    host.wait_for(f"error: creating server: failed to start {service} service")
    assert f"failed to start {service} service: {text}" in host.output
    assert (
        f"--{endpoint}-address=127.0.0.1 --{endpoint}-port={port}:"
        " this must be an address of this machine,"
        " and a port that no other process listens on; port 0 selects a free port"
    ) in host.output
    assert "loading: identity" not in host.output


def _has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


@pytest.mark.skipif(not _has_ipv6(), reason="this machine has no IPv6")
def test_a_host_listens_on_an_ipv6_address(
    repository: RepositoryBuilder, serve: Serve, engine: str
) -> None:
    endpoints = ("grpc", "http", "metrics")
    host = serve(
        repository, engine, *(f"--{endpoint}-address=ipv6:[::1]" for endpoint in endpoints)
    )

    def port(service: str) -> str:
        return host.wait_for(rf"Started {service} at ipv6:\[::1\]:(\d+)")[1]

    with grpcclient.InferenceServerClient(f"[::1]:{port('GRPCInferenceService')}") as client:
        assert client.is_server_live()
    for service, path in (("HTTPService", "v2/health/ready"), ("Metrics Service", "metrics")):
        with urlopen(f"http://[::1]:{port(service)}/{path}", timeout=DEADLINE) as page:
            assert page.status == 200


@pytest.mark.parametrize(
    ("endpoint", "line"),
    [("grpc", "Started GRPCInferenceService"), ("http", "Started HTTPService")],
)
def test_a_disabled_endpoint_is_not_opened(
    repository: RepositoryBuilder, serve: Serve, endpoint: str, line: str
) -> None:
    host = serve(repository, f"--allow-{endpoint}=false")
    assert host.metrics_url  # the metrics port opens last
    assert host.stop() == 0
    assert line not in host.output


def test_two_hosts_share_an_http_port_if_both_allow_it(
    repository: RepositoryBuilder, serve: Serve
) -> None:
    first = serve(repository, "--reuse-http-port=true", "--id=one").wait_started()
    address = first.http_url
    port = address.rpartition(":")[2]
    flags = ("--reuse-http-port=true", "--id=two", f"--http-port={port}")
    second = serve(repository, *flags).wait_started()
    assert second.http_url == address
    names = set()

    def send_request() -> bool:
        with urlopen(f"http://{address}/v2", timeout=DEADLINE) as page:
            names.add(json.load(page)["name"])
        return names == {"one", "two"}

    wait_until(send_request, "answers of both")
    third = serve(repository, f"--http-port={port}")
    assert third.process.wait(DEADLINE) == 1
    text = f"Unavailable - Socket '127.0.0.1:{port}' already in use "
    assert f"failed to start HTTP service: {text}" in third.output
    assert "error: creating server: failed to start HTTP service" in third.output


# Connections


def test_messages_can_exceed_the_default_limit_of_grpc(
    repository: RepositoryBuilder, serve: Serve, engine: str
) -> None:
    repository.copy("identity")
    host = serve(repository, engine).wait_started()
    array = np.arange(6 << 20, dtype=np.float32)  # 24 MiB; gRPC's default is 4 MiB
    with host.client() as client:
        result = client.infer("identity", [tensor("INPUT0", array)])
        np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), array)


def test_a_client_that_pings_too_often_is_disconnected(
    repository: RepositoryBuilder, serve: Serve, engine: str
) -> None:
    host = serve(repository, engine).wait_started()
    with Http2Connection(host.port) as wire:
        answers = 0
        while True:
            try:
                wire.ping()
            except OSError:
                pass  # the connection is closed, but its last frames can still be read
            frame = wire.next(PING, GOAWAY)
            assert frame is not None
            if frame.kind == GOAWAY:
                break
            answers += 1
    assert frame.error == ENHANCE_YOUR_CALM
    assert b"too_many_pings" in frame.payload
    assert answers >= 2  # --grpc-http2-max-ping-strikes


def test_the_calls_of_a_client_that_pings_too_often_fail_with_the_reason(
    repository: RepositoryBuilder, serve: Serve, gate: Gate
) -> None:
    repository.add("waits", gate.model)
    host = serve(repository).wait_started()
    often = [("grpc.keepalive_time_ms", 10), ("grpc.http2.max_pings_without_data", 0)]
    with grpcclient.InferenceServerClient(host.url, channel_args=often) as client:
        with pytest.raises(InferenceServerException, match="Too many pings"):
            client.infer("waits", [], client_timeout=DEADLINE)
    gate.open()


@pytest.mark.parametrize(
    "flags",
    [
        ["--grpc-http2-max-ping-strikes=0"],
        [
            "--grpc-http2-min-recv-ping-interval-without-data=0",
            "--grpc-keepalive-permit-without-calls=true",
        ],
    ],
)
def test_pings_are_not_limited_if_the_limit_is_off(
    repository: RepositoryBuilder, serve: Serve, engine: str, flags: list[str]
) -> None:
    host = serve(repository, engine, *flags).wait_started()
    with Http2Connection(host.port) as wire:
        for _ in range(50):
            wire.ping()
            frame = wire.next(PING, GOAWAY)
            assert frame is not None
            assert (frame.kind, frame.flags) == (PING, ACK)


PINGS = [
    *("--grpc-keepalive-time=100", "--grpc-keepalive-permit-without-calls=true"),
    "--grpc-http2-max-pings-without-data=0",
]


def test_a_client_that_answers_pings_stays_connected(
    repository: RepositoryBuilder, serve: Serve, engine: str
) -> None:
    host = serve(repository, engine, *PINGS, "--grpc-keepalive-timeout=60000").wait_started()
    with Http2Connection(host.port) as wire:
        for _ in range(4):  # a client sends no further ping before the first one is answered
            frame = wire.next(PING)
            assert frame is not None
            wire.ping(ACK, frame.payload)


def test_a_client_that_does_not_answer_a_ping_is_disconnected(
    repository: RepositoryBuilder, serve: Serve, engine: str
) -> None:
    host = serve(repository, engine, *PINGS, "--grpc-keepalive-timeout=200").wait_started()
    with Http2Connection(host.port) as wire:
        while wire.next(PING, GOAWAY) is not None:  # the client does not reply to the pings
            pass


def test_a_connection_ends_at_its_maximum_age(
    repository: RepositoryBuilder, serve: Serve, engine: str
) -> None:
    host = serve(repository, engine, "--grpc-max-connection-age=200").wait_started()
    with Http2Connection(host.port) as wire:
        frame = wire.next(GOAWAY)
        assert frame is not None
        assert frame.error == NO_ERROR
        while (frame := wire.next(PING)) is not None:
            if not frame.flags & ACK:
                wire.ping(ACK, frame.payload)
    with host.client() as client:
        assert client.is_server_live()


def test_without_a_grace_limit_a_call_outlasts_the_maximum_age_of_its_connection(
    repository: RepositoryBuilder, serve: Serve, engine: str, gate: Gate
) -> None:
    repository.add("waits", gate.model)
    host = serve(repository, engine, "--grpc-max-connection-age=100").wait_started()
    with Http2Connection(host.port) as wire, host.client() as client, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(client.infer, "waits", [])
        host.wait_for("waiting")
        assert wire.next(GOAWAY) is not None
        gate.open()
        answer.result(DEADLINE)


def test_a_call_fails_after_the_grace_period_of_its_connection(
    repository: RepositoryBuilder, serve: Serve, engine: str, gate: Gate
) -> None:
    repository.add("waits", gate.model)
    host = serve(
        repository, engine, "--grpc-max-connection-age=100", "--grpc-max-connection-age-grace=200"
    ).wait_started()
    with host.client() as client:
        status, _ = infer_error(client.infer, "waits", [])
    gate.open()
    assert status == "StatusCode.UNAVAILABLE"


# Flags and rights of stock deployments

KSERVE = ["--http-port=8080", "--grpc-port=9000", "--allow-grpc=true", "--allow-http=true"]
"""The flags of KServe's runtime for Triton, without --model-store=/mnt/models."""

_SOMEBODY = "64321"  # a uid without an entry in /etc/passwd, as on OpenShift


@pytest.fixture
def unprivileged() -> list[str]:
    """A prefix that runs a command as an unprivileged user.

    The user may read everything, because the interpreter can be in the home directory of root.
    """
    if os.getuid() != 0:
        return ["env"]
    found = shutil.which("setpriv")
    if found is None:
        pytest.skip("setpriv of util-linux is needed to give up root's rights")
    return [
        *(found, f"--reuid={_SOMEBODY}", f"--regid={_SOMEBODY}", "--clear-groups"),
        *("--bounding-set=-all,+dac_read_search", "--no-new-privs"),
        *("--inh-caps=-all,+dac_read_search", "--ambient-caps=-all,+dac_read_search"),
    ]


def test_the_flags_of_the_kserve_runtime_are_accepted(tmp_path: Path) -> None:
    options = parse([f"--model-store={tmp_path}", *KSERVE])
    assert (options.model_repository, options.grpc_port) == ([str(tmp_path)], 9000)
    assert (options.http_port, options.allow_http, options.allow_grpc) == (8080, True, True)


def test_an_unprivileged_user_without_a_home_serves_a_read_only_repository(
    repository: RepositoryBuilder,
    serve: Serve,
    unprivileged: list[str],
    tmp_path: Path,
) -> None:
    repository.copy("identity", "misbehave")
    writable = tmp_path / "tmp"
    writable.mkdir()
    writable.chmod(0o777)
    before = _tree(repository.path)
    for path in [repository.path, *repository.path.rglob("*")]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    try:
        host = serve(
            repository,
            under=[*unprivileged, "env", "--unset=HOME", "--unset=XDG_CACHE_HOME"],
            env={"TMPDIR": str(writable), "PYTHONPATH": str(ROOT)},
        ).wait_started()
        with host.client() as client:
            assert client.is_server_ready()
            assert run_command(client, "echo x") == "x"
            infer_error(run_command, client, "aborts")  # its stub can be restarted
            assert run_command(client, "echo y") == "y"
        if os.getuid() == 0:
            assert host.stubs()[0].uids().real == int(_SOMEBODY)
        assert host.stop() == 0
    finally:
        for path in [repository.path, *repository.path.rglob("*")]:
            path.chmod(0o755 if path.is_dir() else 0o644)
    assert _tree(repository.path) == before
    assert list(writable.iterdir()) == []


def _tree(path: Path) -> set[str]:
    return {str(found) for found in path.rglob("*")}


def test_a_flag_selects_alternative_configurations(
    repository: RepositoryBuilder, serve: Serve
) -> None:
    """A model without such a file uses config.pbtxt; a changed configuration is reloaded."""
    repository.copy("identity", "misbehave")
    plain = (repository.path / "identity" / "config.pbtxt").read_text()
    configs = repository.path / "identity" / "configs"
    configs.mkdir()
    big = configs / "big.pbtxt"
    big.write_text(plain + "instance_group [ { count: 2 kind: KIND_CPU } ]")
    host = serve(
        repository,
        *("--model-config-name=big", "--model-control-mode=explicit", "--load-model=*"),
    ).wait_started()
    assert len(host.stubs()) == 3
    with host.client() as client:
        big.unlink()
        client.load_model("identity")
        config = client.get_model_config("identity").config
    assert [group.count for group in config.instance_group] == [1]


# Health


SLOW_START = """
import os
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        print("initializing", flush=True)
        until(lambda: not os.path.exists({hold!r}), "the hold to end")

    def execute(self, requests):
        return [pb_utils.InferenceResponse([]) for _ in requests]
"""


class Hold:
    """A model whose `initialize` waits until this object is released."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.model = UNTIL_SOURCE + SLOW_START.format(hold=str(path))

    def __enter__(self) -> Hold:
        self._path.touch()
        return self

    def __exit__(self, *exception: object) -> None:
        self._path.unlink()


@pytest.fixture
def hold(tmp_path: Path) -> Hold:
    return Hold(tmp_path / "hold")


def test_a_model_whose_process_died_is_not_ready_until_its_restart(
    repository: RepositoryBuilder, serve: Serve, hold: Hold
) -> None:
    repository.add("slow", hold.model)
    repository.copy("identity")
    host = serve(repository).wait_started()
    with host.client() as client:
        assert client.is_model_ready("slow")
        with hold:
            os.kill(host.stubs("slow_0")[0].pid, signal.SIGKILL)
            wait_until(lambda: not client.is_model_ready("slow"), "the model not to be ready")
            host.wait_for("(?s)initializing.*initializing")
            assert not client.is_model_ready("slow")
            assert not client.is_server_ready()
            assert client.is_model_ready("identity")
            assert client.is_server_live()
        wait_until(lambda: client.is_model_ready("slow"), "the model to be back")
        assert client.is_server_ready()


@pytest.mark.parametrize("strict", [True, False])
def test_while_a_new_model_loads_only_a_strict_server_is_not_ready(
    repository: RepositoryBuilder, serve: Serve, hold: Hold, strict: bool
) -> None:
    repository.add("slow", hold.model)
    repository.copy("identity")
    host = serve(
        repository,
        *("--model-control-mode=explicit", "--load-model=identity"),
        f"--strict-readiness={strict}",
    ).wait_started()
    with host.client() as client, host.client() as loader, ThreadPoolExecutor(1) as pool:
        assert client.is_server_ready()
        with hold:
            loading = pool.submit(loader.load_model, "slow")
            host.wait_for("initializing")
            assert client.is_server_ready() is not strict
            assert client.is_model_ready("identity")
            assert not client.is_model_ready("slow")
        loading.result(DEADLINE)
        assert client.is_server_ready()


def test_a_reload_leaves_a_strict_server_ready_even_if_it_fails(
    repository: RepositoryBuilder, serve: Serve, hold: Hold
) -> None:
    directory = repository.add("slow", hold.model)
    host = serve(repository, "--model-control-mode=explicit", "--load-model=slow").wait_started()
    with host.client() as client, host.client() as loader, ThreadPoolExecutor(1) as pool:
        with hold:
            (directory / "1" / "model.py").write_text(hold.model + "\nraise ValueError('no')\n")
            failing = pool.submit(infer_error, loader.load_model, "slow")
            failing.result(DEADLINE)
            assert client.is_server_ready()
            (directory / "1" / "model.py").write_text(hold.model + "\n# changed\n")
            loading = pool.submit(loader.load_model, "slow")
            host.wait_for("(?s)initializing.*initializing")
            assert client.is_server_ready()
            assert client.is_model_ready("slow")
        loading.result(DEADLINE)
        assert client.is_server_ready()


def test_a_failed_first_load_keeps_a_strict_server_not_ready_until_a_load_succeeds(
    repository: RepositoryBuilder, serve: Serve
) -> None:
    repository.add("broken", "raise ValueError('no')\n")
    host = serve(repository, "--model-control-mode=explicit").wait_started()
    with host.client() as client:
        assert client.is_server_ready()
        infer_error(client.load_model, "broken")
        assert not client.is_server_ready()
        assert client.is_server_live()
        shutil.rmtree(repository.path / "broken")
        repository.copy("identity")
        (repository.path / "identity").rename(repository.path / "broken")
        config = repository.path / "broken" / "config.pbtxt"
        config.write_text(config.read_text().replace('name: "identity"', ""))
        client.load_model("broken")
        assert client.is_server_ready()


# Shutdown

PATIENT = "--exit-timeout-secs=600"
"""For tests that send requests while the server shuts down."""


class Poller:
    """Polls readiness like a load balancer. `seen` has each changed response."""

    def __init__(self, host: RunningHost) -> None:
        self.seen: list[str] = []
        self._open(host)
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _open(self, host: RunningHost) -> None:
        self._client = host.client()

    def _close(self) -> None:
        self._client.close()

    def _run(self) -> None:
        while not self._end.is_set():
            answer = self._send_request()
            if self.seen[-1:] != [answer]:
                self.seen.append(answer)

    def _send_request(self) -> str:
        try:
            return "ready" if self._client.is_server_ready() else "not ready"
        except InferenceServerException as error:
            return str(error.message())

    def wait(self, answer: str) -> None:
        """Waits until this response was received."""
        wait_until(lambda: answer in self.seen, f"health to say {answer!r}, not {self.seen}")

    def __enter__(self) -> Poller:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._end.set()
        self._thread.join(DEADLINE)
        self._close()


EXITING = "Server exiting"
STOPPING = "GRPC server is shutting down and has stopped accepting new requests."


def test_shutdown_fails_readiness_first_and_then_finishes_running_requests(
    repository: RepositoryBuilder, serve: Serve, engine: str, gate: Gate
) -> None:
    repository.add("waits", gate.model)
    host = serve(repository, engine, PATIENT).wait_started()
    with host.client() as client, ThreadPoolExecutor(1) as pool, Poller(host) as poller:
        poller.wait("ready")
        answer = pool.submit(client.infer, "waits", [])
        host.wait_for("waiting")
        host.process.send_signal(signal.SIGTERM)
        poller.wait(EXITING)
        for send_request in (client.is_server_live, client.is_server_ready):
            assert infer_error(send_request) == ("StatusCode.UNAVAILABLE", EXITING)
        assert infer_error(client.infer, "waits", []) == ("StatusCode.UNAVAILABLE", STOPPING)
        assert not answer.done()
        host.wait_for("Found 1 gRPC service connections and inference handlers")
        gate.open()
        answer.result(DEADLINE)
        assert host.stop() == 0
    assert poller.seen[:2] == ["ready", EXITING]
    assert "ready" not in poller.seen[1:]


class HttpPoller(Poller):
    """Polls over HTTP: status and body, on one connection as long as it lasts."""

    def _send_request(self) -> str:
        try:
            self._connection.request("GET", "/v2/health/ready")
            answer = self._connection.getresponse()
            text = answer.read().decode()
        except OSError as error:
            self._connection.close()  # the next request opens a new connection
            return "refused" if isinstance(error, ConnectionRefusedError) else "closed"
        except http_client.HTTPException:
            self._connection.close()
            return "closed"
        return "ready" if answer.status == 200 else f"{answer.status} {text}"

    def _open(self, host: RunningHost) -> None:
        self._connection = http_client.HTTPConnection(host.http_url, timeout=DEADLINE)

    def _close(self) -> None:
        self._connection.close()


def post(host: RunningHost, model: str = "waits", **body: Any) -> tuple[int, Any]:
    """Sends an inference request over HTTP on a new connection; returns status and JSON."""
    connection = http_client.HTTPConnection(host.http_url, timeout=DEADLINE)
    with closing(connection):
        data = json.dumps({"inputs": [], **body})
        connection.request("POST", f"/v2/models/{model}/infer", data)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())


def test_shutdown_fails_readiness_first_over_http(
    repository: RepositoryBuilder, serve: Serve, gate: Gate
) -> None:
    repository.add("waits", gate.model)
    host = serve(repository, PATIENT).wait_started()
    exiting = '503 {"error":"Server exiting"}'
    with ThreadPoolExecutor(1) as pool, HttpPoller(host) as poller:
        poller.wait("ready")
        answer = pool.submit(post, host)
        host.wait_for("waiting")
        host.process.send_signal(signal.SIGTERM)
        poller.wait(exiting)
        status, document = post(host)
        assert (status, document) == (503, {"error": EXITING})
        assert not answer.done()
        host.wait_for("Found 1 HTTP service connections")
        gate.open()
        assert answer.result(DEADLINE)[0] == 200
        assert host.stop() == 0
    assert poller.seen[:2] == ["ready", exiting]
    assert "ready" not in poller.seen[1:]


def test_an_http_request_that_exceeds_the_exit_timeout_gets_a_response(
    repository: RepositoryBuilder, serve: Serve, gate: Gate
) -> None:
    repository.add("waits", gate.model)
    host = serve(repository, "--exit-timeout-secs=1", "--stub-grace-secs=0.5").wait_started()
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(post, host)
        host.wait_for("waiting")
        assert host.stop() == 1
        assert answer.result(DEADLINE) == (503, {"error": EXITING})
    gate.open()


def test_with_an_exit_delay_requests_are_accepted_after_readiness_fails(
    repository: RepositoryBuilder, serve: Serve, engine: str
) -> None:
    repository.copy("misbehave")
    host = serve(repository, engine, "--exit-delay-secs=600").wait_started()
    with host.client() as client, Poller(host) as poller:
        poller.wait("ready")
        host.process.send_signal(signal.SIGTERM)
        poller.wait(EXITING)
        assert run_command(client, "echo late") == "late"
        host.wait_for("The server reports not ready; requests are accepted for another 600 s")
    assert "ready" not in poller.seen[1:]
    host.stop(signal.SIGKILL)


def test_the_server_exits_after_the_exit_delay(repository: RepositoryBuilder, serve: Serve) -> None:
    host = serve(repository, "--exit-delay-secs=0.1").wait_started()
    assert host.stop() == 0
    host.wait_for("The server reports not ready; requests are accepted for another 0.1 s")


def test_further_signals_have_no_effect(
    repository: RepositoryBuilder, serve: Serve, gate: Gate
) -> None:
    repository.add("waits", gate.model)
    host = serve(repository, PATIENT).wait_started()
    with host.client() as client, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(client.infer, "waits", [])
        host.wait_for("waiting")
        host.process.send_signal(signal.SIGTERM)
        host.wait_for(r"Signal \(15\) received\.")
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGPIPE):
            host.process.send_signal(number)
        host.wait_for("gRPC service connections and inference handlers")
        gate.open()
        answer.result(DEADLINE)
        assert host.stop() == 0
    assert host.output.count(" received.") == 1


def test_a_stream_gets_its_responses_before_the_shutdown_error(
    repository: RepositoryBuilder, serve: Serve, engine: str, gate: Gate
) -> None:
    repository.add("waits", gate.model)
    host = serve(repository, engine, PATIENT).wait_started()
    came: list[str] = []
    ended = threading.Event()

    def take(result: object, error: InferenceServerException | None) -> None:
        came.append("answer" if error is None else str(error.message()))
        if error is not None:
            ended.set()

    with host.client() as client:
        client.start_stream(take)
        client.async_stream_infer("waits", [])
        host.wait_for("waiting")
        host.process.send_signal(signal.SIGTERM)
        host.wait_for("received")
        gate.open()
        assert ended.wait(DEADLINE)
        client.stop_stream()
    assert host.stop() == 0
    assert came == ["answer", STOPPING]


@pytest.mark.parametrize("text", ["0", "-5"])
def test_an_exit_timeout_of_zero_does_not_wait(
    repository: RepositoryBuilder, serve: Serve, gate: Gate, text: str
) -> None:
    repository.add("waits", gate.model)
    host = serve(repository, f"--exit-timeout-secs={text}", "--stub-grace-secs=0.5").wait_started()
    with host.client() as client, ThreadPoolExecutor(1) as pool:
        cut = pool.submit(infer_error, client.infer, "waits", [])
        host.wait_for("waiting")
        assert host.stop() == 1
        assert cut.result(DEADLINE)[0] in ("StatusCode.UNAVAILABLE", "StatusCode.CANCELLED")
    assert (
        "failed to stop server: Internal - Exit timeout expired. Exiting immediately."
        in host.output
    )
    gate.open()


def test_idle_connections_do_not_delay_the_exit(
    repository: RepositoryBuilder, serve: Serve, engine: str
) -> None:
    repository.copy("identity")
    host = serve(repository, engine, PATIENT).wait_started()
    connection = http_client.HTTPConnection(host.http_url, timeout=DEADLINE)
    with host.client() as client, closing(connection):
        assert client.is_server_live()  # the connection stays open
        connection.request("GET", "/v2/health/live")
        assert connection.getresponse().read() == b""
        assert host.stop() == 0


def test_metrics_are_served_until_the_end_of_shutdown(
    repository: RepositoryBuilder, serve: Serve, gate: Gate
) -> None:
    repository.add("waits", gate.model)
    host = serve(repository, PATIENT).wait_started()
    with host.client() as client, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(client.infer, "waits", [])
        host.wait_for("waiting")
        host.process.send_signal(signal.SIGTERM)
        host.wait_for("Found 1 gRPC service connections")
        with urlopen(f"http://{host.metrics_url}/metrics", timeout=DEADLINE) as page:
            assert b"nv_inference_request_success" in page.read()
        gate.open()
        answer.result(DEADLINE)


def test_a_failed_start_ends_the_loaded_models(repository: RepositoryBuilder, serve: Serve) -> None:
    source = """
    class TritonPythonModel:
        def execute(self, requests):
            pass

        def finalize(self):
            print("finalized")
    """
    repository.add("sound", source, 'backend: "python"')
    repository.add("broken", "raise ValueError('no')\n")
    host = serve(repository, "--exit-delay-secs=600")
    assert host.process.wait(DEADLINE) == 1
    host.stop()
    assert "error: creating server: Internal - failed to load all models" in host.output
    assert "finalized" in host.output
    assert "Started GRPCInferenceService" not in host.output
