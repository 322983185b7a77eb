"""Bound functions: what clients receive, and what remains after the program or its host ends."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException

import pb_utils
from host.bind import (
    BadSpecError,
    DynamicBatcher,
    Host,
    HostFailure,
    ModelConfig,
    QueuePolicy,
    TensorSpec,
    TimeoutAction,
    UnrecoverableError,
    batch,
    sample,
)
from tests.clients import tensor
from tests.conftest import DEADLINE, GRPC_ENGINE, ROOT, wait_until

X = TensorSpec(name="x", dtype=np.float32, shape=(-1,))
Y = TensorSpec(name="y", dtype=np.float32, shape=(-1,))
TEXT = TensorSpec(name="text", dtype=np.bytes_, shape=(1,))
PORTS = dict.fromkeys(("grpc_port", "http_port", "metrics_port"), 0)
ADDRESSES = dict.fromkeys(("grpc_address", "http_address", "metrics_address"), "127.0.0.1")


def new_host(**flags: Any) -> Host:
    return Host(**{**PORTS, **ADDRESSES, "grpc_engine": GRPC_ENGINE, **flags})


class Counted:
    """Doubles its input and counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    @batch
    def __call__(self, x: Any) -> Any:
        self.calls += 1
        return {"y": 2 * x}


def details(requests: Any) -> Any:
    """Returns the properties of each request as text."""
    return [
        [np.array([[f"{sorted(request.parameters.items())} {len(requests)}"]])]
        for request in requests
    ]


def misbehave(requests: Any) -> Any:
    """Returns the value of the Python expression in the input."""
    return eval(requests[0]["text"][0, 0])


@batch
def fragile(x: Any) -> Any:
    if x[0, 0] < 0:
        raise UnrecoverableError("the card has fallen off the bus")
    return [x]


@batch
def count(x: Any) -> Iterator[Any]:
    for number in range(int(x[0, 0])):
        yield {"y": x + number}
    if x[0, 0] == 3:
        raise ValueError("three is too many")


@batch
async def later(x: Any) -> Any:
    return [x + 1]


@batch
async def count_later(x: Any) -> Any:
    yield {"y": x}
    yield {"y": x + 1}


@sample
def send_request(x: Any) -> Any:
    """Sends a BLS request to another bound model."""
    inputs = [pb_utils.Tensor("x", x[None])]
    request = pb_utils.InferenceRequest(
        model_name="double", inputs=inputs, requested_output_names=["y"]
    )
    response = request.exec()
    return {"y": response.output_tensors()[0].as_numpy()[0] + 1}


class Meeting:
    """Returns only when two calls run at the same time."""

    def __init__(self, barrier: threading.Barrier) -> None:
        self._barrier = barrier

    def __call__(self, requests: Any) -> Any:
        self._barrier.wait(DEADLINE)
        return [{"y": request["x"]} for request in requests]


counted = Counted()
running = threading.Event()
closed = threading.Event()


def endless(requests: Any) -> Iterator[Any]:
    """Yields outputs until no client waits for more."""
    running.set()
    try:
        while True:
            yield [{"y": request["x"]} for request in requests]
    finally:
        closed.set()


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    with new_host(cache_config="local,size=1048576") as host:
        host.bind("double", batch(lambda x: [2 * x]), [X], [Y], max_batch_size=8, strict=True)
        host.bind("counted", counted, [X], [Y], config=ModelConfig(response_cache=True))
        whole = DynamicBatcher(max_queue_delay_microseconds=60_000_000, preferred_batch_size=[2])
        host.bind("details", details, [TEXT], [TEXT], batcher=whole, max_batch_size=2)
        host.bind("misbehave", misbehave, [TEXT], [Y], strict=True, max_batch_size=4)
        host.bind("lenient", misbehave, [TEXT], [Y])
        host.bind("fragile", fragile, [X], [Y])
        host.bind("count", count, [X], [Y], decoupled=True)
        host.bind("later", later, [X], [Y])
        host.bind("count_later", count_later, [X], [Y], decoupled=True)
        host.bind("ask", send_request, [X], [Y], batching=False)
        barrier = threading.Barrier(2)
        host.bind("meeting", [Meeting(barrier), Meeting(barrier)], [X], [Y], batcher=None)
        host.bind("endless", endless, [X], [Y], decoupled=True)
        yield host.run()


@pytest.fixture
def client(host: Host) -> Iterator[grpcclient.InferenceServerClient]:
    with grpcclient.InferenceServerClient(host.grpc_url) as client:
        yield client


def ones(rows: int = 1, columns: int = 2) -> Any:
    return np.ones((rows, columns), dtype=np.float32)


def double(client: Any, model: str, x: Any) -> Any:
    return client.infer(model, [tensor("x", x)]).as_numpy("y")


def test_a_function_is_served_over_grpc_and_http(host: Host, client: Any) -> None:
    assert double(client, "double", ones(2)).tolist() == [[2, 2], [2, 2]]
    large = np.arange(1_000_000, dtype=np.float32).reshape(4, -1)
    np.testing.assert_array_equal(double(client, "double", large), 2 * large)
    with httpclient.InferenceServerClient(host.http_url) as http:
        given = httpclient.InferInput("x", [1, 2], "FP32").set_data_from_numpy(ones())
        assert http.infer("double", [given]).as_numpy("y").tolist() == [[2, 2]]
    with pytest.raises(InferenceServerException, match="unexpected shape for input 'x'"):
        double(client, "double", np.float32(1).reshape(1, 1, 1))


def test_metadata_and_configuration_match_the_binding(client: Any) -> None:
    config = client.get_model_config("details", as_json=True)["config"]
    assert config["max_batch_size"] == 2
    assert config["dynamic_batching"]["preferred_batch_size"] == [2]
    assert config["input"][0]["data_type"] == "TYPE_STRING"
    assert client.get_model_config("counted", as_json=True)["config"]["response_cache"]["enable"]
    assert len(client.get_model_repository_index(as_json=True)["models"]) == 12


def test_requests_of_several_clients_are_batched_with_their_parameters(client: Any) -> None:
    text = tensor("text", np.array([[b"?"]], dtype=np.object_))
    answers = [_send_later(client, "details", [text], {"user": user}) for user in ("anna", "bert")]
    said = sorted(answer().as_numpy("text").item().decode() for answer in answers)
    assert said == ["[('user', 'anna')] 2", "[('user', 'bert')] 2"]


def _send_later(client: Any, model: str, inputs: Any, parameters: Any = None) -> Any:
    """Sends a request; the returned function waits for its response."""
    there = threading.Event()
    got: list[Any] = []

    def take(result: Any, error: Any) -> None:
        got.append((result, error))
        there.set()

    client.async_infer(model, inputs, take, parameters=parameters)

    def answer() -> Any:
        assert there.wait(DEADLINE)
        result, error = got[0]
        if error is not None:
            raise error
        return result

    return answer


def test_each_function_of_a_list_is_an_instance(client: Any) -> None:
    answers = [_send_later(client, "meeting", [tensor("x", ones())]) for _ in range(2)]
    assert [answer().as_numpy("y").tolist() for answer in answers] == [[[1, 1]], [[1, 1]]]


def test_repeated_requests_are_answered_by_the_cache(client: Any) -> None:
    for _ in range(3):
        assert double(client, "counted", 7 * ones()).tolist() == [[14, 14]]
    assert counted.calls == 1


def test_coroutine_functions_and_bls_requests_work(client: Any) -> None:
    assert double(client, "later", ones()).tolist() == [[2, 2]]
    assert double(client, "ask", ones()[0]).tolist() == [3, 3]


@pytest.mark.parametrize(
    ("returned", "text"),
    [
        ("{}", "must return a list with a dict of arrays for each request; it returned dict"),
        ("[]", "was called with 1 requests and returned 0 results"),
        ("[3]", "must return a dict of output names to arrays, or a list .* it returned int"),
        ("[{'z': np.ones(1)}]", "returned an output 'z', but the outputs of model .* are y"),
        ("[{'y': [1.0]}]", "output 'y' must be a numpy array, got list"),
        ("[{}]", "the function returned no output 'y'"),
        ("[{'y': np.ones((1, 1))}]", "output 'y' must have dtype float32, got float64"),
        ("[{'y': np.ones((2, 1), 'f')}]", r"'y' must have a first dimension of 1.*shape \(2, 1\)"),
        ("[{'y': np.ones(1, 'f')}]", r"'y' must have shape \(-1,\) after the batch.*got \(\)"),
        ("[{'y': np.ones(1, 'c8')}]", "output 'y' must have dtype float32, got complex64"),
        ("(each for each in [])", "a generator needs a model that is bound with decoupled=True"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
    ],
    ids=[f"{number:02}" for number in range(12)],
)
def test_an_error_of_a_function_reaches_the_client(client: Any, returned: str, text: str) -> None:
    given = tensor("text", np.array([[returned.encode()]], dtype=np.object_))
    with pytest.raises(InferenceServerException, match=text) as caught:
        client.infer("misbehave", [given])
    assert "host/bind" not in str(caught.value), "frames of the host say nothing to an author"
    fine = tensor("text", np.array([[b"[[np.ones((1, 2), 'f')]]"]], dtype=np.object_))
    assert client.infer("misbehave", [fine]).as_numpy("y").tolist() == [[1, 1]]


def test_outputs_are_compared_only_if_strict(client: Any) -> None:
    def send_request(returned: bytes) -> Any:
        given = tensor("text", np.array([[returned]], dtype=np.object_))
        return client.infer("lenient", [given])

    assert send_request(b"[{'y': np.ones((1, 1))}]").as_numpy("y").dtype == np.float64
    with pytest.raises(InferenceServerException, match="output 'y' of dtype complex64: NumPy"):
        send_request(b"[{'y': np.ones(1, 'c8')}]")


class Streaming:
    """A gRPC stream and the responses that it received."""

    def __init__(self, host: Host) -> None:
        self.client = grpcclient.InferenceServerClient(host.grpc_url)
        self._answers: list[Any] = []
        self._there = threading.Semaphore(0)
        self.client.start_stream(self._take)

    def _take(self, result: Any, error: Any) -> None:
        self._answers.append(error or result)
        self._there.release()

    def send_request(self, model: str, x: Any) -> None:
        self.client.async_stream_infer(model, [tensor("x", x)], enable_empty_final_response=True)

    def next(self) -> Any:
        """Returns an output, an error, or None after the last response."""
        assert self._there.acquire(timeout=DEADLINE)
        answer = self._answers.pop(0)
        return answer if isinstance(answer, Exception) else answer.as_numpy("y")

    def __enter__(self) -> Streaming:
        return self

    def __exit__(self, *_: object) -> None:
        self.client.stop_stream(cancel_requests=True)
        self.client.close()


def test_a_generator_sends_any_number_of_responses(host: Host) -> None:
    with Streaming(host) as stream:
        for model in ("count", "count_later"):
            stream.send_request(model, 2 * ones(1, 1))
            assert [stream.next().item(), stream.next().item()] == [2, 3]
            assert stream.next() is None
        stream.send_request("count", 3 * ones(1, 1))
        assert [stream.next().item() for _ in range(3)] == [3, 4, 5]
        assert "ValueError: three is too many" in str(stream.next())


def test_a_generator_ends_when_its_client_disconnects(host: Host) -> None:
    with Streaming(host) as stream:
        stream.send_request("endless", ones())
        assert running.wait(DEADLINE)
        assert stream.next().tolist() == [[1, 1]]
    assert closed.wait(DEADLINE)


def test_an_unrecoverable_error_makes_the_model_not_ready(client: Any) -> None:
    assert client.is_model_ready("fragile")
    assert double(client, "fragile", ones()).tolist() == [[1, 1]]
    with pytest.raises(InferenceServerException, match="the card has fallen off the bus"):
        double(client, "fragile", -ones())
    assert not client.is_model_ready("fragile")
    with pytest.raises(InferenceServerException, match="'fragile' accepts no more requests: the c"):
        double(client, "fragile", ones())
    assert client.is_model_ready("double") and client.is_server_live()


_LATE = {
    "backend": "python",
    "input": [{"name": "INPUT_1", "data_type": "TYPE_INT64", "dims": [-1]}],
    "output": [{"name": "y", "data_type": "TYPE_FP32", "dims": [-1]}],
}


def test_a_function_bound_to_a_running_host_is_served_at_once(host: Host, client: Any) -> None:
    host.bind("late", batch(lambda INPUT_1: [INPUT_1 + 1]), [TensorSpec((-1,), np.int64)], [Y])
    given = tensor("INPUT_1", np.array([[1]], dtype=np.int64))
    assert client.infer("late", [given]).as_numpy("y").tolist() == [[2]]
    client.unload_model("late")
    wait_until(lambda: not client.is_model_ready("late"), "the end of the model")
    client.load_model("late")
    with pytest.raises(
        InferenceServerException, match="no function is bound.*or all its instances are in use"
    ):
        client.load_model("late", config=json.dumps({**_LATE, "max_batch_size": 2}))
    assert client.infer("late", [given]).as_numpy("y").tolist() == [[2]]


def test_invalid_bindings_are_refused(host: Host) -> None:
    for arguments, text in [
        (("late2", 3, [X], [Y]), "model 'late2' needs a function, or a list of functions; got int"),
        (("late2", [], [X], [Y]), "model 'late2' needs at least one function"),
        (("double", len, [X], [Y]), "a model named 'double' is already bound"),
        (("late2", len, [X, X], [Y]), "two inputs have the name 'x'"),
        (("late2", len, [X], []), "a model needs at least one output"),
        (("late2", len, ["x"], [Y]), "input 1 must be a TensorSpec, got str"),
    ]:
        with pytest.raises(BadSpecError, match=re.escape(text)):
            host.bind(*arguments)  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(BadSpecError, match="max_batch_size is at least 1 with batching, got 0"):
        host.bind("late2", len, [X], [Y], max_batch_size=0)
    with pytest.raises(HostFailure, match="must not contain path traversal characters"):
        host.bind("../late2", len, [X], [Y])
    with pytest.raises(HostFailure, match="is already started"):
        host.run()
    wrong = DynamicBatcher(preferred_batch_size=[9])
    with pytest.raises(HostFailure, match="preferred size must be <= max batch size for late2"):
        host.bind("late2", len, [X], [Y], batcher=wrong)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (((0,), np.float32), "has shape (0,): sizes are at least 1, or -1 for any"),
        ((3, np.float32), "needs a tuple as its shape, got 3"),
        (((1,), np.complex64), "dtype complex64 has no data type in the protocol"),
        (((1,), "no such type"), "'no such type' is not a numpy dtype"),
    ],
    ids=["size", "shape", "dtype", "no dtype"],
)
def test_an_invalid_tensor_spec_is_refused(arguments: Any, text: str) -> None:
    with pytest.raises(BadSpecError, match=re.escape(text)):
        TensorSpec(*arguments)


def test_queue_policies_become_configuration_fields() -> None:
    policy = QueuePolicy(TimeoutAction.DELAY, 1000, True, 7)
    config = DynamicBatcher(
        priority_levels=2,
        default_priority_level=1,
        default_queue_policy=policy,
        priority_queue_policy={2: policy},
    ).config()
    assert config["default_queue_policy"] == config["priority_queue_policy"]["2"]
    assert config["default_queue_policy"]["timeout_action"] == "DELAY"
    assert config["default_queue_policy"]["max_queue_size"] == 7


def test_a_failed_start_of_a_host_gives_the_reason() -> None:
    with pytest.raises(HostFailure, match="grpc-prt"):
        new_host(grpc_prt=1).run()
    broken = new_host()
    broken.bind("double", counted, [X], [Y], batcher=DynamicBatcher(preferred_batch_size=[9]))
    with pytest.raises(HostFailure, match="failed to load all models"):
        broken.run()
    assert not broken.is_alive() and broken.grpc_url == ""


def test_stop_does_not_wait_for_a_function_that_never_returns() -> None:
    called, go_on, went_on = threading.Event(), threading.Event(), threading.Event()

    def hang(requests: Any) -> Any:
        called.set()
        go_on.wait(DEADLINE)
        went_on.set()
        return [{"y": request["x"]} for request in requests]

    host = new_host(exit_timeout_secs=0, allow_http=False, allow_metrics=False)
    host.bind("hang", hang, [X], [Y])
    host.run()
    with grpcclient.InferenceServerClient(host.grpc_url) as client:
        answer = _send_later(client, "hang", [tensor("x", ones())])
        assert called.wait(DEADLINE)
        assert not host.stop(), "not all work has ended"
        with pytest.raises(InferenceServerException):
            answer()
    go_on.set()
    assert went_on.wait(DEADLINE)
    assert not host.is_alive() and host.stop()
    with pytest.raises(HostFailure, match="this host was stopped; create a new one"):
        host.run()


SCRIPT = """
import sys
import numpy as np
from host.bind import Host, TensorSpec, batch

hosts = {"grpc_port": 0, "http_port": 0, "metrics_port": 0}
with Host(**hosts) as host:
    tensor = [TensorSpec(shape=(-1,), dtype=np.float32)]
    host.bind("echo", batch(lambda INPUT_1: [INPUT_1]), tensor, tensor)
    host.run()
    # One write: the host logs into the same file.
    sys.stdout.write(f"URL {host.grpc_url}\\n")
    sys.stdout.flush()
    host.serve()
print("continued", flush=True)
"""


class Program:
    """A program with a bound function, and the host that it started."""

    def __init__(self, folder: Path) -> None:
        (folder / "logging.py").write_text("raise SystemExit('a file of the user was imported')")
        script = folder / "src" / "program.py"
        script.parent.mkdir()
        script.write_text(SCRIPT)
        self.log = folder / "log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(script)],
                cwd=folder,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                stdout=log,
                stderr=subprocess.STDOUT,
            )

        def there() -> bool:
            assert self.process.poll() is None, self.log.read_text()
            return "URL " in self.log.read_text()

        wait_until(there, "a program that serves")
        (self.host,) = psutil.Process(self.process.pid).children()

    def send_request(self) -> None:
        """Asserts that the model responds."""
        found = re.search(r"URL (\S+)", self.log.read_text())
        assert found is not None
        with grpcclient.InferenceServerClient(found[1]) as client:
            result = client.infer("echo", [tensor("INPUT_1", ones())])
            assert result.as_numpy("OUTPUT_1").tolist() == [[1, 1]]


@pytest.fixture
def program(tmp_path: Path) -> Iterator[Program]:
    program = Program(tmp_path)
    yield program
    program.process.kill()
    program.process.wait()


def test_a_signal_ends_serve_and_the_program_continues(program: Program) -> None:
    program.send_request()
    program.process.terminate()  # the same signal as Ctrl-C in the documented example
    assert program.process.wait(DEADLINE) == 0
    assert program.log.read_text().endswith("continued\n")
    assert not program.host.is_running()


def test_a_host_exits_when_its_program_is_killed(program: Program) -> None:
    program.send_request()
    folders = {file.path for file in program.host.open_files() if file.path.endswith("/lock")}
    program.process.kill()
    program.process.wait()
    wait_until(lambda: not program.host.is_running(), "the end of the host")
    assert folders and not any(Path(path).parent.exists() for path in folders)


def test_serve_raises_when_its_host_exits(program: Program) -> None:
    program.host.kill()
    assert program.process.wait(DEADLINE) == 1
    assert "HostFailure: the host exited by itself; see its log" in program.log.read_text()


def test_the_example_serves_its_client() -> None:
    log = subprocess.Popen(
        [sys.executable, "examples/bind_function.py", *(f"--{n}-port=0" for n in ("grpc", "http"))]
        + ["--metrics-port=0"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert log.stdout is not None
    with log, log.stdout as lines:
        port = next(
            found[1]
            for line in lines
            if (found := re.search(r"Started GRPCInferenceService at \S+:(\d+)", line))
        )
        drain = threading.Thread(target=lines.read)
        drain.start()
        try:
            command = [sys.executable, "examples/bind_client.py", "--url", f"localhost:{port}"]
            printed = subprocess.run(
                command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=DEADLINE
            ).stdout
        finally:
            log.send_signal(signal.SIGINT)
            assert log.wait(DEADLINE) == 0
            drain.join()
    assert "['KÖLN', 'BONN']\n3 2 1 0 liftoff\n" in printed
