"""What operators rely on: ports, connections, flags of a stock deployment, health, the end."""

from __future__ import annotations

import http.client as http_client
import json
import os
import re
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
from tests.asking import infer_error, run_command, tensor
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
    """A model's requests wait until the gate is opened."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def model(self) -> str:
        """Source of the model."""
        return UNTIL_SOURCE + WAITS.format(go=str(self.path))

    def open(self) -> None:
        """Let them through."""
        self.path.touch()


@pytest.fixture(params=["grpcio", "h2"])
def engine(request: pytest.FixtureRequest) -> str:
    """The flag for one of the two engines of the gRPC endpoint."""
    return f"--grpc-engine={request.param}"


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    return Gate(tmp_path / "go")


# Ports and addresses


def test_two_hosts_share_a_port_if_both_say_so(
    repository: RepositoryBuilder, serve: Serve, engine: str
) -> None:
    first = serve(repository, engine, "--reuse-grpc-port=true", "--id=one").wait_started()
    second = serve(
        repository, engine, "--reuse-grpc-port=true", "--id=two", f"--grpc-port={first.port}"
    ).wait_started()
    assert second.port == first.port
    names = set()

    def ask() -> bool:
        """With a connection of its own, which the kernel gives to one of them."""
        options = [("grpc.use_local_subchannel_pool", 1)]
        with grpcclient.InferenceServerClient(first.url, channel_args=options) as client:
            names.add(client.get_server_metadata().name)
        return names == {"one", "two"}

    wait_until(ask, "answers of both")
    first.stop()
    names.clear()
    ask()
    assert names == {"two"}


def test_a_port_is_not_shared_with_one_that_did_not_say_so(
    repository: RepositoryBuilder, serve: Serve, engine: str
) -> None:
    first = serve(repository, engine, "--reuse-grpc-port=true").wait_started()
    second = serve(repository, engine, f"--grpc-port={first.port}")
    assert second.process.wait(DEADLINE) == 1
    text = f"Unavailable - Socket '127.0.0.1:{first.port}' already in use "
    assert f"failed to start GRPC service: {text}" in second.output
    assert f"error: creating server: {text}" in second.output


@pytest.mark.parametrize("endpoint", ["grpc", "http", "metrics"])
def test_an_address_that_is_not_the_machines_is_no_taken_port(
    repository: RepositoryBuilder, serve: Serve, engine: str, endpoint: str
) -> None:
    repository.copy("identity")
    host = serve(repository, engine, f"--{endpoint}-address=192.0.2.1")
    assert host.process.wait(DEADLINE) == 1
    assert (
        "error: creating server: Unavailable - Socket '192.0.2.1:0' cannot be opened: Cannot assign"
        " requested address"
    ) in host.output
    assert "loading: identity" not in host.output


@pytest.mark.parametrize("endpoint", ["grpc", "http", "metrics"])
def test_a_taken_port_is_noticed_before_models_load(
    repository: RepositoryBuilder, serve: Serve, engine: str, endpoint: str
) -> None:
    repository.copy("identity")
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        host = serve(repository, engine, f"--{endpoint}-port={port}")
        assert host.process.wait(DEADLINE) == 1
    service = {"grpc": "GRPC", "http": "HTTP", "metrics": "Metrics"}[endpoint]
    text = f"Unavailable - Socket '127.0.0.1:{port}' already in use "
    host.wait_for(re.escape(f"error: creating server: {text}"))
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
def test_an_ipv6_address(repository: RepositoryBuilder, serve: Serve, engine: str) -> None:
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
def test_a_endpoint_that_is_not_allowed_is_not_opened(
    repository: RepositoryBuilder, serve: Serve, endpoint: str, line: str
) -> None:
    host = serve(repository, f"--allow-{endpoint}=false")
    assert host.metrics_url  # the last one to open
    assert host.stop() == 0
    assert line not in host.output


def test_two_hosts_share_an_http_port_if_both_say_so(
    repository: RepositoryBuilder, serve: Serve
) -> None:
    first = serve(repository, "--reuse-http-port=true", "--id=one").wait_started()
    address = first.http_url
    port = address.rpartition(":")[2]
    flags = ("--reuse-http-port=true", "--id=two", f"--http-port={port}")
    second = serve(repository, *flags).wait_started()
    assert second.http_url == address
    names = set()

    def ask() -> bool:
        with urlopen(f"http://{address}/v2", timeout=DEADLINE) as page:
            names.add(json.load(page)["name"])
        return names == {"one", "two"}

    wait_until(ask, "answers of both")
    third = serve(repository, f"--http-port={port}")
    assert third.process.wait(DEADLINE) == 1
    text = f"Unavailable - Socket '127.0.0.1:{port}' already in use "
    assert f"failed to start HTTP service: {text}" in third.output
    assert f"error: creating server: {text}" in third.output


# Connections


def test_messages_may_be_far_larger_than_grpcs_default_limit(
    repository: RepositoryBuilder, serve: Serve, engine: str
) -> None:
    repository.copy("identity")
    host = serve(repository, engine).wait_started()
    array = np.arange(6 << 20, dtype=np.float32)  # 24 MiB; gRPC's default is 4 MiB
    with host.client() as client:
        result = client.infer("identity", [tensor("INPUT0", array)])
        np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), array)


def test_a_client_that_pings_too_often_is_told_to_calm_down(
    repository: RepositoryBuilder, serve: Serve, engine: str
) -> None:
    host = serve(repository, engine).wait_started()
    with Http2Connection(host.port) as wire:
        answers = 0
        while True:
            try:
                wire.ping()
            except OSError:
                pass  # closed by now; what it said is still to be read
            frame = wire.next(PING, GOAWAY)
            assert frame is not None
            if frame.kind == GOAWAY:
                break
            answers += 1
    assert frame.error == ENHANCE_YOUR_CALM
    assert b"too_many_pings" in frame.payload
    assert answers >= 2  # --grpc-http2-max-ping-strikes


def test_the_calls_of_a_client_that_pings_too_often_are_told_why_they_end(
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
def test_pings_are_answered_for_ever_if_told_so(
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


def test_a_client_that_answers_pings_stays(
    repository: RepositoryBuilder, serve: Serve, engine: str
) -> None:
    host = serve(repository, engine, *PINGS, "--grpc-keepalive-timeout=60000").wait_started()
    with Http2Connection(host.port) as wire:
        for _ in range(4):  # there would be no other one before the first is answered
            frame = wire.next(PING)
            assert frame is not None
            wire.ping(ACK, frame.payload)


def test_a_client_that_does_not_answer_a_ping_is_gone(
    repository: RepositoryBuilder, serve: Serve, engine: str
) -> None:
    host = serve(repository, engine, *PINGS, "--grpc-keepalive-timeout=200").wait_started()
    with Http2Connection(host.port) as wire:
        while wire.next(PING, GOAWAY) is not None:  # which stay without an answer
            pass


def test_a_connection_ends_at_its_age(
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


def test_a_call_may_outlast_its_connections_age_and_no_grace_means_for_ever(
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


def test_a_call_is_ended_when_the_grace_of_its_connection_is_over(
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
"""What KServe's runtime for Triton passes, beside --model-store=/mnt/models."""

_SOMEBODY = "64321"  # no user of that number is known, as on OpenShift


@pytest.fixture
def unprivileged() -> list[str]:
    """Runs a command with no right to write what others own.

    A uid that is not root's; it may read everything, as the interpreter may lie in root's home.
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


def test_the_flags_of_kserves_stock_runtime_are_taken(tmp_path: Path) -> None:
    options = parse([f"--model-store={tmp_path}", *KSERVE])
    assert (options.model_repository, options.grpc_port) == ([str(tmp_path)], 9000)
    assert (options.http_port, options.allow_http, options.allow_grpc) == (8080, True, True)


def test_a_user_without_rights_serves_a_read_only_repository_without_a_home(
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
            infer_error(run_command, client, "aborts")  # and a stub may be started anew
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


def test_a_repository_may_have_other_configurations_for_other_machines(
    repository: RepositoryBuilder, serve: Serve
) -> None:
    """A model that has none of that name is served as it is; a changed one is loaded anew."""
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
    """A model's `initialize` takes as long as this is held."""

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


def test_a_model_whose_process_died_is_not_ready_until_it_is_back(
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


def test_a_failed_first_load_keeps_a_strict_server_not_ready_until_one_succeeds(
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


# The end

PATIENT = "--exit-timeout-secs=600"
"""For tests that do a lot while the server stops."""


class Poller:
    """Asks for readiness all the time, as a load balancer does; `seen` has each new answer."""

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
            answer = self._ask()
            if self.seen[-1:] != [answer]:
                self.seen.append(answer)

    def _ask(self) -> str:
        try:
            return "ready" if self._client.is_server_ready() else "not ready"
        except InferenceServerException as error:
            return str(error.message())

    def wait(self, answer: str) -> None:
        """Return once this has been answered."""
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


def test_at_the_end_readiness_goes_first_then_what_runs_ends(
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
        for ask in (client.is_server_live, client.is_server_ready):
            assert infer_error(ask) == ("StatusCode.UNAVAILABLE", EXITING)
        assert infer_error(client.infer, "waits", []) == ("StatusCode.UNAVAILABLE", STOPPING)
        assert not answer.done()
        host.wait_for("Found 1 gRPC service connections and inference handlers")
        gate.open()
        answer.result(DEADLINE)
        assert host.stop() == 0
    assert poller.seen[:2] == ["ready", EXITING]
    assert "ready" not in poller.seen[1:]


class HttpPoller(Poller):
    """The same over HTTP: status and body, on one connection as long as it lasts."""

    def _ask(self) -> str:
        try:
            self._connection.request("GET", "/v2/health/ready")
            answer = self._connection.getresponse()
            text = answer.read().decode()
        except OSError as error:
            self._connection.close()  # the next request opens it anew
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
    """Status and document of an inference over HTTP, on a connection of its own."""
    connection = http_client.HTTPConnection(host.http_url, timeout=DEADLINE)
    with closing(connection):
        data = json.dumps({"inputs": [], **body})
        connection.request("POST", f"/v2/models/{model}/infer", data)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())


def test_at_the_end_readiness_goes_first_on_the_http_endpoint_too(
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


def test_an_http_request_that_outlasts_the_exit_timeout_is_answered(
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


def test_with_a_delay_requests_are_taken_after_health_has_said_no(
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


def test_a_delay_comes_to_its_end(repository: RepositoryBuilder, serve: Serve) -> None:
    host = serve(repository, "--exit-delay-secs=0.1").wait_started()
    assert host.stop() == 0
    host.wait_for("The server reports not ready; requests are accepted for another 0.1 s")


def test_further_signals_change_nothing(
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


def test_a_stream_is_told_of_the_end_after_its_answers(
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
def test_an_exit_timeout_of_nothing_waits_for_nothing(
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


def test_idle_connections_do_not_hold_up_the_end(
    repository: RepositoryBuilder, serve: Serve, engine: str
) -> None:
    repository.copy("identity")
    host = serve(repository, engine, PATIENT).wait_started()
    connection = http_client.HTTPConnection(host.http_url, timeout=DEADLINE)
    with host.client() as client, closing(connection):
        assert client.is_server_live()  # and the connection stays open
        connection.request("GET", "/v2/health/live")
        assert connection.getresponse().read() == b""
        assert host.stop() == 0


def test_metrics_are_told_until_the_end(
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


def test_a_start_that_fails_ends_what_had_loaded(
    repository: RepositoryBuilder, serve: Serve
) -> None:
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
