"""Decoupled models, and response senders of ordinary models."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import psutil
import pytest
from tritonclient.utils import InferenceServerException

from tests.clients import Client, InferStream, infer_error, is_final, run_command, tensor
from tests.conftest import RepositoryBuilder, RunningHost, Serve

CLOSED = "Unable to send response. Response sender has been closed."
MORE_THAN_ONE = "Unable to send response. Non-decoupled model cannot send more than one response."
LET_GO = "Model instance '{}' returned no response for this request and let go of it"


@pytest.fixture(scope="module")
def host(module_repository: RepositoryBuilder, module_serve: Serve) -> RunningHost:
    module_repository.copy("stream", "identity")
    source = module_repository.path / "stream"
    config = (source / "config.pbtxt").read_text()
    model = (source / "1" / "model.py").read_text()
    module_repository.add("sender", model, config.replace("decoupled: true", "decoupled: false"))
    module_repository.add("fragile", model, config)
    return module_serve(module_repository, "--log-verbose=1").wait_started()


@pytest.fixture
def stream(host: RunningHost) -> Iterator[InferStream]:
    with InferStream(host) as stream:
        yield stream


@pytest.fixture
def client(host: RunningHost) -> Iterator[Client]:
    with host.client() as client:
        yield client


def error_of(stream: InferStream) -> str:
    with pytest.raises(InferenceServerException) as caught:
        stream.next()
    return str(caught.value.message())


# Decoupled models


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ("last", [0]),
        ("respond respond last", [0, 1, 2]),
        ("respond respond final", [0, 1]),
        ("final", []),
        ("thread:respond respond last", [0, 1, 2]),
        ("thread:many=1000 final", list(range(1000))),
        ("respond=5000 respond=100000 last", [0, 1, 2]),
    ],
)
def test_a_model_sends_any_number_of_responses(
    stream: InferStream, steps: str, expected: list[int]
) -> None:
    stream.send(steps, enable_empty_final_response=True)
    assert stream.read_numbers() == expected


def test_only_the_last_response_has_the_final_parameter(stream: InferStream) -> None:
    stream.send("respond respond last")
    assert [is_final(stream.next()) for _ in range(3)] == [False, False, True]


def test_an_empty_final_response_is_sent_only_on_request(stream: InferStream) -> None:
    stream.send("respond final", request_id="quiet")
    stream.send("last", request_id="after")
    results = [stream.next().get_response() for _ in range(2)]
    assert [result.id for result in results] == ["quiet", "after"]
    stream.send("final", request_id="told", enable_empty_final_response=True)
    told = stream.next().get_response()
    assert (told.id, told.model_name, len(told.outputs)) == ("told", "stream", 0)


def test_large_tensors_arrive_whole(stream: InferStream) -> None:
    stream.send("respond=300000 final", enable_empty_final_response=True)
    assert stream.next().as_numpy("DATA").shape == (300000,)
    assert is_final(stream.next())


def test_responses_to_requests_of_a_stream_interleave(stream: InferStream) -> None:
    for request in range(20):
        stream.send("thread:many=50 last", request_id=str(request))
    seen: dict[str, list[int]] = {str(request): [] for request in range(20)}
    open_requests = set(seen)
    while open_requests:
        result = stream.next()
        name = result.get_response().id
        seen[name].append(int(result.as_numpy("NUMBER")[0]))
        if is_final(result):
            open_requests.remove(name)
    assert all(numbers == list(range(51)) for numbers in seen.values())


def test_responses_arrive_after_execute_has_returned(stream: InferStream) -> None:
    """The instance is free for the next request before the first one has its responses."""
    stream.send("keeps respond", request_id="open")
    assert stream.next().get_response().id == "open"
    stream.send("last", request_id="second")
    assert stream.next().get_response().id == "second"
    stream.send("last releases", request_id="third")
    assert stream.next().get_response().id == "third"
    assert error_of(stream).startswith(LET_GO.format("stream_0"))


def test_an_error_response_does_not_end_the_request(stream: InferStream) -> None:
    stream.send("error=first respond last_error=second")
    assert error_of(stream) == "first"
    assert stream.next().as_numpy("NUMBER") == [0]
    assert error_of(stream) == "second"


def test_unary_requests_to_a_decoupled_model_are_rejected(client: Client) -> None:
    assert infer_error(run_command, client, "last", model="stream") == (
        "StatusCode.UNIMPLEMENTED",
        "ModelInfer RPC doesn't support models with decoupled transaction policy",
    )


def test_an_exception_ends_the_request_and_closes_its_sender(
    host: RunningHost, stream: InferStream
) -> None:
    stream.send("respond raises=on-purpose")
    assert stream.next().as_numpy("NUMBER") == [0]
    text = error_of(stream)
    assert text.startswith("Failed to process the request(s) for model 'stream_0', message: ")
    assert "ValueError: on-purpose" in text
    stream.send("last")
    assert stream.read_numbers() == [0]


def test_exception_after_the_final_response_is_only_logged(
    host: RunningHost, stream: InferStream
) -> None:
    stream.send("last raises=too-late-to-matter")
    assert stream.read_numbers() == [0]
    host.wait_for("ValueError: too-late-to-matter")
    stream.send("last")
    assert stream.read_numbers() == [0]


def test_a_dropped_sender_ends_the_request_with_an_error(stream: InferStream) -> None:
    stream.send("respond")
    assert stream.next().as_numpy("NUMBER") == [0]
    assert error_of(stream).startswith(LET_GO.format("stream_0"))


def test_failing_thread_ends_the_request_with_an_error(stream: InferStream) -> None:
    stream.send("thread:respond raises=in-a-thread")
    assert stream.next().as_numpy("NUMBER") == [0]
    assert error_of(stream).startswith(LET_GO.format("stream_0"))


@pytest.mark.parametrize(
    ("steps", "text"),
    [
        ("refused=flag last", "Unable to send response. Unsupported flag provided."),
        (
            "refused=nothing last",
            "Inference Response object must be provided when the response flags is set to zero.",
        ),
        ("last refused=respond", CLOSED),
        ("last refused=final", CLOSED),
    ],
)
def test_sender_rejects_invalid_sends(
    host: RunningHost, stream: InferStream, steps: str, text: str
) -> None:
    stream.send(steps)
    assert stream.read_numbers() == [0]
    host.wait_for(f"refused: {text}")


def test_decoupled_execute_must_return_none(stream: InferStream) -> None:
    stream.send("return:")
    assert (
        "Python model 'stream_0' is using the decoupled mode and the execute function must return"
        " None." in error_of(stream)
    )


def test_a_killed_stub_ends_open_streams_at_once(host: RunningHost) -> None:
    with InferStream(host) as kept, InferStream(host) as killer:
        kept.send("keeps respond", model="fragile")
        assert kept.next().as_numpy("NUMBER") == [0]
        killer.send("respond dies", model="fragile")
        assert killer.next().as_numpy("NUMBER") == [0]
        for stream in (kept, killer):
            text = error_of(stream)
            assert text.startswith("Stub process 'fragile_0' is not healthy.")
            assert "SIGKILL" in text


# Disconnected and slow clients


def test_sender_reports_a_disconnected_client_as_cancelled(host: RunningHost) -> None:
    with InferStream(host) as stream:
        stream.send("thread:respond cancelled respond last")
        assert stream.next().as_numpy("NUMBER") == [0]
        host.wait_for("waits to be cancelled")
        stream.cancel()
    host.wait_for("was cancelled")


def test_first_error_ends_a_stream_with_status_codes(host: RunningHost) -> None:
    with InferStream(host, headers={"triton_grpc_error": "true"}) as stream:
        stream.send("respond last_error=gone")
        assert stream.next().as_numpy("NUMBER") == [0]
        with pytest.raises(InferenceServerException) as caught:
            stream.next()
    assert (str(caught.value.status()), caught.value.message()) == (
        "StatusCode.NOT_FOUND",
        "gone",
    )


SLOW = """
import threading
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            threading.Thread(target=self.send, args=(request.get_response_sender(),)).start()

    def send(self, sender):
        data = pb_utils.Tensor("DATA", np.zeros(1 << 20, dtype=np.uint8))
        try:
            for number in range(10_000):
                if sender.is_cancelled():
                    break
                if number % 100 == 99:
                    pb_utils.Logger.log_info(f"{number + 1} are sent")
                sender.send(pb_utils.InferenceResponse([data]))
        except pb_utils.TritonModelException as error:
            pb_utils.Logger.log_info(f"gave up: {error}")
        finally:
            pb_utils.Logger.log_info("sender is done")
            if not sender.is_cancelled():
                sender.send(flags=1)
"""


def test_a_client_that_does_not_read_pauses_the_sender(
    repository: RepositoryBuilder, serve: Serve
) -> None:
    """Of ten gigabytes, only a few megabytes are sent while the client does not read."""
    repository.add(
        "slow",
        SLOW,
        """
        backend: "python"
        input [ { name: "COMMAND" data_type: TYPE_STRING dims: [ 1 ] } ]
        output [ { name: "DATA" data_type: TYPE_UINT8 dims: [ -1 ] } ]
        model_transaction_policy { decoupled: true }
        """,
    )
    host = serve(repository, "--response-send-timeout-secs=1").wait_started()
    import grpc
    from tritonclient.grpc import service_pb2, service_pb2_grpc

    with grpc.insecure_channel(host.url) as channel:
        array = np.array([b"x"], dtype=np.object_)
        request = service_pb2.ModelInferRequest(model_name="slow")
        request.inputs.append(tensor("COMMAND", array)._get_tensor())
        request.raw_input_contents.append(tensor("COMMAND", array)._get_content())
        call = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelStreamInfer(iter([request]))
        host.wait_for(
            r"gave up: Unable to send response. For 1 seconds the caller has taken none of \d+"
            r" earlier responses, which are \d+ bytes."
        )
        assert "are sent" not in host.output
        memory = psutil.Process(host.process.pid).memory_info().rss
        assert memory < 400 << 20
        call.cancel()
    host.wait_for("sender is done")


def test_many_streams_at_once_all_complete_and_leave_no_memory(host: RunningHost) -> None:
    """Runs 500 requests of 20 responses each; finds a leak of a megabyte, or 105 bytes each."""

    def send_requests() -> None:
        with InferStream(host) as stream:
            for request in range(500):
                stream.send("thread:many=19 last", request_id=str(request))
            finished = 0
            received = 0
            while finished < 500:
                received += 1
                finished += is_final(stream.next())
            assert received == 500 * 20

    process = psutil.Process(host.process.pid)
    sizes: list[int] = []
    # The first rounds fill buffers. In six sizes, one decrease by chance does not hide a leak.
    while len(sizes) < 6 or max(sizes[-6:]) - min(sizes[-6:]) >= 2 << 20:
        assert len(sizes) < 20, f"memory after each round, in bytes: {sizes}"
        send_requests()
        sizes.append(process.memory_info().rss)


# Response senders of ordinary models


@pytest.mark.parametrize(
    "steps", ["last", "respond final", "thread:last", "thread:respond final", "last refused=final"]
)
def test_ordinary_model_can_send_its_response(client: Client, steps: str) -> None:
    assert number_of(client, steps) == 0


def number_of(client: Client, steps: str) -> int:
    array = np.array([steps.encode()], dtype=np.object_)
    result = client.infer("sender", [tensor("COMMAND", array)])
    return int(result.as_numpy("NUMBER")[0])


@pytest.mark.parametrize("steps", ["last refused=respond", "respond refused=respond final"])
def test_ordinary_model_cannot_send_a_second_response(
    host: RunningHost, client: Client, steps: str
) -> None:
    assert number_of(client, steps) == 0
    host.wait_for(f"refused: {MORE_THAN_ONE}")


def test_ordinary_model_cannot_send_final_flag_before_response(
    host: RunningHost, client: Client
) -> None:
    assert number_of(client, "refused=final last") == 0
    host.wait_for(
        "refused: Unable to send response. Non-decoupled model cannot send complete final before"
        " sending a response."
    )


def test_a_sent_response_is_kept_when_execute_returns_one_too(
    host: RunningHost, client: Client
) -> None:
    """As in Triton, the batch fails after the client has got its response."""
    assert number_of(client, "return:last") == 0
    host.wait_for(MORE_THAN_ONE)


def test_returned_response_is_sent_although_a_sender_exists(client: Client) -> None:
    assert number_of(client, "return:") == 100


def test_request_without_a_response_gets_an_error(client: Client) -> None:
    status, text = infer_error(number_of, client, "")
    assert status == "StatusCode.INTERNAL"
    assert text.startswith(LET_GO.format("sender_0"))


@pytest.mark.parametrize(
    "steps",
    [
        "respond",
        "thread:respond",
        "respond respond final",
        "thread:respond respond final",
        "respond raises=x",
        "return:respond",
    ],
)
def test_a_sent_response_is_delivered_without_the_final_flag(client: Client, steps: str) -> None:
    assert number_of(client, steps) == 0


def test_a_large_response_that_was_sent_without_the_flag_arrives_whole(client: Client) -> None:
    for steps in ("respond=3000000 raises=x", "thread:respond=3000000"):
        array = np.array([steps.encode()], dtype=np.object_)
        result = client.infer("sender", [tensor("COMMAND", array)])
        assert result.as_numpy("DATA").size == 3000000


def test_the_model_is_finalized_after_its_threads_have_sent(
    repository: RepositoryBuilder, serve: Serve
) -> None:
    repository.copy("stream")
    host = serve(repository).wait_started()
    with InferStream(host) as stream:
        stream.send("thread:many=2000 last")
        stream.next()
        assert host.stop() == 0
        assert len(stream.read_numbers()) == 2000
    assert host.output.count("finalize has run") == 1
