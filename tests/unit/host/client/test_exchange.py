"""The steps of a client, without a server: what is repeated, and until when."""

from __future__ import annotations

import gc
import math
import os
from typing import Any

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2 as pb

from host.client.channel import Rpc, read_settings, to_host_error
from host.client.exchange import Deadline, Exchange, Pause, Steps
from host.client.messages import RequestOptions
from host.errors import ErrorCode, HostError, TooManyRequests, internal, unavailable

METADATA = pb.ModelMetadataResponse(name="m", versions=["1"])
METADATA.inputs.add(name="X", datatype="FP32", shape=[-1])
METADATA.outputs.add(name="Y", datatype="FP32", shape=[-1])
CONFIG = pb.ModelConfigResponse()
CONFIG.config.name = "m"
CONFIG.config.input.add(name="X")


def answer(size: int = 1, version: str = "1") -> Any:
    response = pb.ModelInferResponse(model_name="m", model_version=version)
    response.outputs.add(name="Y", datatype="FP32", shape=[size])
    response.raw_output_contents.append(bytes(4 * size))
    return response


def exchange(timeout: float | None = 60.0, retries: int = 3, memory: bool = False) -> Exchange:
    settings = read_settings("localhost:1", "", {}, "", "", "", "none")
    return Exchange(settings, timeout, retries, memory)


def run(steps: Steps[Any], *answers: Any) -> tuple[list[str], Any]:
    """Answers the RPCs; returns their methods, with the pauses, and the result or the error."""
    left, done = list(answers), []
    try:
        step = next(steps)
        while True:
            if isinstance(step, Pause):
                done.append("pause")
                step = next(steps)
                continue
            done.append(step.method)
            assert left, f"nothing answers {step.method}"
            given = left.pop(0)
            step = steps.throw(given) if isinstance(given, HostError) else steps.send(given)
    except StopIteration as end:
        assert not left
        return done, end.value
    except HostError as error:
        return done, error


DOWN = unavailable("down")
REQUEST: dict[str, Any] = {"X": [1]}
FIRST = ["ModelMetadata", "ModelConfig"]


def test_unavailable_is_repeated_with_longer_and_longer_pauses() -> None:
    steps = exchange().infer(RequestOptions("m"), REQUEST)
    done, result = run(steps, METADATA, CONFIG, DOWN, DOWN, DOWN, answer())
    assert done == [*FIRST, *(["ModelInfer", "pause"] * 3), "ModelInfer"]
    assert result["Y"].tolist() == [0]
    steps, pauses = exchange(retries=9).call("ServerReady", pb.ServerReadyRequest()), []
    next(steps)
    for _ in range(9):
        step = steps.throw(DOWN)
        assert isinstance(step, Pause)
        pauses.append(step.seconds)
        next(steps)
    with pytest.raises(HostError, match="down"):
        steps.throw(DOWN)
    assert pauses[:5] == sorted(pauses[:5])
    assert max(pauses) <= 6


@pytest.mark.parametrize(
    ("retries", "retried", "error"),
    [
        (0, True, DOWN),
        (3, False, DOWN),
        (3, True, internal("bad")),
        (3, True, TooManyRequests("", 1)),
    ],
)
def test_other_errors_and_sequences_are_not_repeated(
    retries: int, retried: bool, error: HostError
) -> None:
    steps = exchange(retries=retries).infer(RequestOptions("m", retried=retried), REQUEST)
    assert run(steps, METADATA, CONFIG, error) == ([*FIRST, "ModelInfer"], error)


def test_nothing_is_repeated_after_the_timeout() -> None:
    steps = exchange(timeout=0.05).infer(RequestOptions("m"), REQUEST)
    assert run(steps, METADATA, CONFIG, DOWN) == ([*FIRST, "ModelInfer"], DOWN)


def test_a_request_that_a_changed_model_refuses_is_sent_as_it_expects() -> None:
    client, refused = exchange(), HostError(ErrorCode.INVALID_ARG, "unexpected datatype")
    run(client.infer(RequestOptions("m"), REQUEST), METADATA, CONFIG, answer())
    changed = pb.ModelMetadataResponse()
    changed.CopyFrom(METADATA)
    changed.inputs[0].datatype = "INT8"
    steps = client.infer(RequestOptions("m"), REQUEST)
    done, _ = run(steps, refused, changed, CONFIG, answer())
    assert done == ["ModelInfer", *FIRST, "ModelInfer"]
    done, error = run(client.infer(RequestOptions("m"), REQUEST), refused, changed, CONFIG)
    assert (done, error) == (["ModelInfer", *FIRST], refused)
    done, error = run(client.infer(RequestOptions("m", retried=False), REQUEST), refused)
    assert (done, error) == (["ModelInfer"], refused)


def test_another_version_in_a_response_makes_metadata_stale() -> None:
    client = exchange()
    for _ in range(2):
        done, _ = run(
            client.infer(RequestOptions("m"), REQUEST), METADATA, CONFIG, answer(version="2")
        )
        assert done == [*FIRST, "ModelInfer"]


def test_metadata_are_enough_where_the_configuration_is_not_shown() -> None:
    hidden = unavailable("This protocol is restricted")
    steps = exchange(retries=0).infer(RequestOptions("m"), {})
    done, _ = run(steps, METADATA, hidden, answer())  # whether X is optional is not known
    assert done == [*FIRST, "ModelInfer"]


LARGE: dict[str, Any] = {"X": np.ones(1 << 18, np.float32)}


def test_a_server_without_the_region_gets_the_tensor_in_the_message() -> None:
    client = exchange(memory=True)
    refused = internal("Unable to open shared memory region")
    done, _ = run(client.infer(RequestOptions("m"), LARGE), METADATA, CONFIG, refused, answer())
    assert done == [*FIRST, "SystemSharedMemoryRegister", "ModelInfer"]
    done, _ = run(client.infer(RequestOptions("m"), LARGE), answer())
    assert done == ["ModelInfer"]


def test_a_server_that_has_lost_the_region_gets_the_tensor_in_the_message() -> None:
    client = exchange(memory=True)
    lost = HostError(ErrorCode.NOT_FOUND, "Unable to find shared memory region: 'x'")
    register = pb.SystemSharedMemoryRegisterResponse()
    run(client.infer(RequestOptions("m"), LARGE), METADATA, CONFIG, register, answer())
    for _ in range(2):
        done, _ = run(client.infer(RequestOptions("m"), LARGE), lost, answer())
        assert done == ["ModelInfer", "ModelInfer"]
        done, _ = run(client.infer(RequestOptions("m"), LARGE), register, answer())
        assert done == ["SystemSharedMemoryRegister", "ModelInfer"]
    run(client.infer(RequestOptions("m"), LARGE), lost, answer())
    done, _ = run(client.infer(RequestOptions("m"), LARGE), answer())  # three losses are enough
    assert done == ["ModelInfer"]


def test_an_output_whose_size_differs_is_not_given_a_place_again() -> None:
    client = exchange(memory=True)
    small = internal("shared memory size specified with the request for output 'Y' (1 bytes)")
    register = pb.SystemSharedMemoryRegisterResponse()

    def places() -> int:
        steps = client.infer(RequestOptions("m"), REQUEST)
        step: Any = next(steps)
        while not (isinstance(step, Rpc) and step.method == "ModelInfer"):
            step = steps.send({"ModelMetadata": METADATA, "ModelConfig": CONFIG}.get(step.method))
        steps.close()
        return sum("shared_memory_region" in output.parameters for output in step.message.outputs)

    size = 1 << 18
    run(client.infer(RequestOptions("m"), REQUEST), METADATA, CONFIG, answer(size))
    assert places() == 1
    done, _ = run(client.infer(RequestOptions("m"), REQUEST), register, small, answer(size + 1))
    assert done == ["SystemSharedMemoryRegister", "ModelInfer", "ModelInfer"]
    assert places() == 0
    run(client.close(), *[pb.SystemSharedMemoryUnregisterResponse()] * 2)


REGISTERED = pb.SystemSharedMemoryRegisterResponse()
UNREGISTERED = pb.SystemSharedMemoryUnregisterResponse()


def open_regions() -> int:
    """Descriptors of shared memory that this process holds: two for each region."""
    names = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            names.append(os.readlink(f"/proc/self/fd/{fd}"))
        except FileNotFoundError:  # of the directory itself
            continue
    return sum("pbhost-client" in name for name in names)


@pytest.mark.parametrize("wrong", [{"parameters": {"a": None}}, {"headers": {"a": "\n"}}])
def test_an_invalid_argument_holds_no_memory(wrong: Any) -> None:
    client = exchange(memory=True)
    run(client.infer(RequestOptions("m"), LARGE), METADATA, CONFIG, REGISTERED, answer())
    held, options = open_regions(), RequestOptions("m", **wrong)
    assert "'a'" in run(client.infer(options, LARGE), METADATA, CONFIG)[1].message
    assert "'a'" in run(client.prepare_stream(options, LARGE))[1].message
    # The first region is free for the next requests.
    assert run(client.infer(RequestOptions("m"), LARGE), answer())[0] == ["ModelInfer"]
    assert open_regions() == held
    run(client.close(), UNREGISTERED)


@pytest.mark.parametrize(
    "error",
    [
        DOWN,
        HostError(ErrorCode.DEADLINE_EXCEEDED, "late"),
        HostError(ErrorCode.UNKNOWN, "Stream removed"),
        internal("Received RST_STREAM with error code 2"),
    ],
)
def test_a_region_that_the_server_may_still_use_is_not_used_again(error: HostError) -> None:
    client, before = exchange(memory=True, retries=int(error is DOWN)), open_regions()
    names: list[str] = []
    steps = client.infer(RequestOptions("m"), LARGE)
    answers = {"ModelMetadata": METADATA, "ModelConfig": CONFIG}
    step: Any = next(steps)
    while len(names) < 2:
        if not isinstance(step, Rpc):
            step = next(steps)
        elif step.method == "ModelInfer":
            names.append(step.message.inputs[0].parameters["shared_memory_region"].string_param)
            try:
                step = steps.throw(error)
            except HostError:
                steps = client.infer(RequestOptions("m"), LARGE)
                step = next(steps)
        else:
            step = steps.send(answers.get(step.method, REGISTERED))
    assert len(set(names)) == 2
    steps.close()
    done, _ = run(client.close(), UNREGISTERED, UNREGISTERED)
    assert len(done) == 2
    assert open_regions() == before


def test_shared_memory_is_used_however_often_the_server_was_unavailable() -> None:
    client, before = exchange(memory=True, retries=0), open_regions()
    run(client.infer(RequestOptions("m"), LARGE), METADATA, CONFIG, REGISTERED, DOWN)
    for _ in range(40):
        done, _ = run(client.infer(RequestOptions("m"), LARGE), REGISTERED, DOWN)
        assert done == ["SystemSharedMemoryRegister", "ModelInfer"]
    assert open_regions() == before


def test_a_client_that_is_dropped_frees_its_memory() -> None:
    before = open_regions()
    client = exchange(memory=True)
    run(client.infer(RequestOptions("m"), LARGE), METADATA, CONFIG, REGISTERED, answer())
    assert open_regions() > before
    del client
    gc.collect()
    assert open_regions() == before


@pytest.mark.parametrize("waits_for", ["SystemSharedMemoryRegister", "ModelInfer"])
@pytest.mark.parametrize("fails", [False, True])
def test_a_client_may_be_closed_while_a_request_uses_memory(waits_for: str, fails: bool) -> None:
    client, before = exchange(memory=True), open_regions()
    steps = client.infer(RequestOptions("m"), LARGE)
    answers: dict[str, Any] = {
        "ModelMetadata": METADATA,
        "ModelConfig": CONFIG,
        "ModelInfer": answer(),
    }
    step: Any = next(steps)
    while step.method != waits_for:
        step = steps.send(answers.get(step.method, REGISTERED))
    run(client.close(), UNREGISTERED)
    closed = HostError(ErrorCode.CANCELLED, "Channel closed!")
    try:
        while fails:
            steps.throw(closed)
        while True:
            step = steps.send(answers.get(step.method, REGISTERED))
    except (StopIteration, HostError) as error:
        assert (error is closed) == fails
    assert open_regions() == before


def test_a_restart_of_the_server_is_one_loss_however_many_requests_meet_it() -> None:
    client, before = exchange(memory=True), open_regions()
    lost = HostError(ErrorCode.NOT_FOUND, "Unable to find shared memory region: 'x'")
    run(client.infer(RequestOptions("m"), LARGE), METADATA, CONFIG, REGISTERED, answer())
    sent = []
    for _ in range(4):
        steps = client.infer(RequestOptions("m"), LARGE)
        step: Any = next(steps)
        if step.method == "SystemSharedMemoryRegister":
            steps.send(REGISTERED)
        sent.append(steps)
    for steps in sent:
        steps.throw(lost)
        with pytest.raises(StopIteration):
            steps.send(answer())
    done, _ = run(client.infer(RequestOptions("m"), LARGE), REGISTERED, answer())
    assert done == ["SystemSharedMemoryRegister", "ModelInfer"]
    run(client.close(), UNREGISTERED)
    assert open_regions() == before


def test_losses_long_ago_do_not_turn_shared_memory_off() -> None:
    client = exchange(memory=True)
    lost = HostError(ErrorCode.NOT_FOUND, "Unable to find shared memory region: 'x'")
    run(client.infer(RequestOptions("m"), LARGE), METADATA, CONFIG, REGISTERED, answer())
    for _ in range(4):
        for _ in range(100):
            assert run(client.infer(RequestOptions("m"), LARGE), answer())[0] == ["ModelInfer"]
        run(client.infer(RequestOptions("m"), LARGE), lost, answer())
        done, _ = run(client.infer(RequestOptions("m"), LARGE), REGISTERED, answer())
        assert done == ["SystemSharedMemoryRegister", "ModelInfer"]
    run(client.close(), UNREGISTERED)


def test_a_request_whose_stub_died_is_not_sent_again() -> None:
    died = unavailable("Stub process 'm_0' is not healthy. It crashed while it ran this request.")
    steps = exchange().infer(RequestOptions("m"), REQUEST)
    assert run(steps, METADATA, CONFIG, died) == ([*FIRST, "ModelInfer"], died)


def test_classes_of_an_output_that_is_not_requested_are_refused() -> None:
    options = RequestOptions("m", outputs=["Z"], classes={"Y": 1})
    for steps in (exchange().infer(options, REQUEST), exchange().prepare_stream(options, REQUEST)):
        done, error = run(steps)
        assert (done, error.code) == ([], ErrorCode.INVALID_ARG)
        assert error.message == "`classes` has 'Y', which is not one of the requested `outputs`"


@pytest.mark.parametrize(
    ("of_client", "of_call", "expected"), [(60, None, 600), (None, None, None), (60, 5, 5)]
)
def test_loads_have_more_time_than_requests(
    of_client: float | None, of_call: float | None, expected: float | None
) -> None:
    client = exchange(timeout=of_client)
    for steps in (
        client.load_model("m", "", {}, of_call),
        client.unload_model("m", False, of_call),
    ):
        step: Any = next(steps)
        assert step.timeout == (expected and pytest.approx(expected, abs=4))


def test_timeouts_may_be_endless() -> None:
    assert Deadline(math.inf).left() is None
    left = Deadline(1e300).left()
    assert left is not None
    assert 1e6 < left < 1e9


class _RpcError:
    def __init__(self, code: grpc.StatusCode, details: str, trailing: Any = ()) -> None:
        self._values = code, details, trailing

    def code(self) -> grpc.StatusCode:
        return self._values[0]

    def details(self) -> str:
        return self._values[1]

    def trailing_metadata(self) -> Any:
        return self._values[2]


def test_a_status_of_grpc_becomes_the_error_of_the_server() -> None:
    for status in grpc.StatusCode:
        error = to_host_error(_RpcError(status, ""), "grpc://h:1")
        assert error.message
        known = status.name in (*ErrorCode.__members__, "INVALID_ARGUMENT", "UNIMPLEMENTED")
        assert (error.code is not ErrorCode.UNKNOWN) == (known and status.name != "UNKNOWN")
    trailing = [("grpc-retry-pushback-ms", "1500")]
    limited = to_host_error(_RpcError(grpc.StatusCode.RESOURCE_EXHAUSTED, "slow", trailing), "")
    assert isinstance(limited, TooManyRequests)
    assert limited.retry_after == 1.5
