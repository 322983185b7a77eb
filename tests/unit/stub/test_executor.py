"""Batches: their responses, wrong return values, exceptions, rescheduling, cancellation, blocks."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

import pb_utils
from stub.wire import messages as m
from stub.wire.messages import WireRequest, WireTensor
from tests.conftest import DEADLINE
from tests.unit.stub.host_peer import (
    FAILED,
    HOST_ARENA,
    LARGE,
    STUB_ARENA,
    StartStub,
    echo,
    error_text,
    input_value,
    output_value,
    output_values,
    response,
    wire_request,
)

Requests = list[pb_utils.InferenceRequest]


def test_each_request_of_a_batch_gets_its_response_in_order(start_stub: StartStub) -> None:
    host = start_stub(lambda requests: [echo(request) for request in requests])
    responses, done = host.run_batch(*map(wire_request, (7, 8, 9)))
    assert list(output_values(responses).items()) == [(0, 7), (1, 8), (2, 9)]
    assert all(message.final and message.batch == done.batch for message in responses)
    assert (done.failure, done.deferred, done.rescheduled) == (None, (), ())
    assert 0 < done.started <= done.inputs_ready <= done.outputs_begin <= done.ended


def test_batches_run_in_the_order_in_which_they_arrive(start_stub: StartStub) -> None:
    host = start_stub(lambda requests: [echo(request) for request in requests])
    numbers = [host.send_batch(wire_request(value)) for value in (1, 2, 3)]
    assert [host.receive(m.BatchDone).batch for _ in numbers] == numbers
    assert [(message.batch, output_value(message)) for message in host.received(m.Response)] == [
        (1, 1),
        (2, 2),
        (3, 3),
    ]


@pytest.mark.parametrize(
    ("requested", "sent"), [([], ["OUT"]), (["OTHER"], ["OTHER"]), (["NONE"], [])]
)
def test_only_requested_outputs_are_sent(
    start_stub: StartStub, requested: list[str], sent: list[str]
) -> None:
    """A request that names no outputs requests those of the configuration."""
    value = np.zeros(1, np.int32)
    tensors = [pb_utils.Tensor("OTHER", value), pb_utils.Tensor("OUT", value)]
    host = start_stub(lambda requests: [pb_utils.InferenceResponse(tensors)])
    (message,), _ = host.run_batch(wire_request(0, requested))
    assert message.response is not None
    assert [output.name for output in message.response.outputs] == sent


def test_an_error_response_fails_its_request_alone(start_stub: StartStub) -> None:
    error = pb_utils.TritonError("not this one", pb_utils.TritonError.NOT_FOUND)
    host = start_stub(lambda _: [pb_utils.InferenceResponse(error=error), response(2)])
    (failed, answered), done = host.run_batch(*map(wire_request, (1, 2)))
    assert error_text(failed) == "not this one"
    assert failed.response is not None and failed.response.error is not None
    assert failed.response.error.code == int(pb_utils.TritonError.NOT_FOUND)
    assert output_value(answered) == 2
    assert done.failure is None


def test_long_texts_of_errors_are_cut(start_stub: StartStub) -> None:
    def execute(requests: Any) -> Any:
        if len(requests) == 2:
            raise ValueError("b" * 1_000_000)
        return [pb_utils.InferenceResponse(error=pb_utils.TritonError("a" * 1_000_000))]

    host = start_stub(execute)
    (failed,), _ = host.run_batch(wire_request(1))
    assert error_text(failed) == "a" * 65536 + "... (934464 more characters)"
    _, done = host.run_batch(*map(wire_request, (1, 2)))
    assert done.failure is not None
    assert f"{'b' * 65536}... (934464 more characters)\n" in done.failure
    assert "test_executor.py" in done.failure


@pytest.mark.parametrize(
    ("decoupled", "returned", "text"),
    [
        (
            False,
            (response(1), response(2)),
            "Expected a list in the execute return, found type '<class 'tuple'>'.",
        ),
        (
            False,
            response(1),
            f"Expected a list in the execute return, found type '{pb_utils.InferenceResponse}'.",
        ),
        (
            False,
            [response(1)],
            (
                "Number of InferenceResponse objects do not match the number of InferenceRequest"
                " objects. InferenceRequest(s) size is:2, and InferenceResponse(s) size is:1\n"
            ),
        ),
        (
            False,
            [response(1), response(2), response(3)],
            (
                "Number of InferenceResponse objects do not match the number of InferenceRequest"
                " objects. InferenceRequest(s) size is:2, and InferenceResponse(s) size is:3\n"
            ),
        ),
        (
            False,
            [response(1), 5],
            (
                "Expected an 'InferenceResponse' object in the execute function return list, found"
                " type '<class 'int'>'."
            ),
        ),
        (
            True,
            [response(1), response(2)],
            (
                "Python model 'm_0' is using the decoupled mode and the execute function must"
                " return None."
            ),
        ),
    ],
)
def test_a_wrong_return_value_fails_every_request_with_the_documented_text(
    start_stub: StartStub, decoupled: bool, returned: object, text: str
) -> None:
    """docs/reference/model-methods.md, "execute: returned responses"."""
    host = start_stub(lambda _: returned, decoupled=decoupled)
    responses, done = host.run_batch(*map(wire_request, (1, 2)))
    assert [(message.index, error_text(message)) for message in responses] == [
        (0, FAILED + text),
        (1, FAILED + text),
    ]
    assert done.failure == FAILED + text


@pytest.mark.parametrize("kind", [ValueError, SystemExit, KeyboardInterrupt])
def test_an_exception_of_execute_fails_every_request_and_the_next_batch_runs(
    start_stub: StartStub, kind: type[BaseException]
) -> None:
    def execute(requests: Requests) -> list[pb_utils.InferenceResponse]:
        if input_value(requests[0]) == 0:
            raise kind("out of luck")
        return [echo(request) for request in requests]

    host = start_stub(execute)
    responses, done = host.run_batch(*map(wire_request, (0, 1)))
    assert [message.index for message in responses] == [0, 1]
    for message in responses:
        assert error_text(message).startswith(f"{FAILED}{kind.__name__}: out of luck\n\nAt:\n  ")
        assert error_text(message).endswith("): execute\n")
        assert done.failure == error_text(message)
    responses, done = host.run_batch(wire_request(2))
    assert output_values(responses) == {0: 2}
    assert done.failure is None


def test_a_model_without_execute_fails_every_request(start_stub: StartStub) -> None:
    host = start_stub(lambda requests: requests)
    model: Any = host.model
    del model.execute
    responses, _ = host.run_batch(*map(wire_request, (1, 2)))
    text = f"{FAILED}Python model /models/m/1 does not implement `execute` method."
    assert [error_text(message) for message in responses] == [text, text]


def test_a_rescheduled_request_gets_no_response(start_stub: StartStub) -> None:
    def execute(requests: Requests) -> list[pb_utils.InferenceResponse | None]:
        requests[1].set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
        return [response(1), None, response(3)]

    host = start_stub(execute)
    responses, done = host.run_batch(*map(wire_request, (1, 2, 3)))
    assert output_values(responses) == {0: 1, 2: 3}
    assert (done.rescheduled, done.deferred, done.failure) == ((1,), (), None)


def test_a_response_to_a_rescheduled_request_fails_the_batch(start_stub: StartStub) -> None:
    def execute(requests: Requests) -> list[pb_utils.InferenceResponse]:
        requests[1].set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
        return [response(1), response(2)]

    host = start_stub(execute)
    responses, done = host.run_batch(*map(wire_request, (1, 2)))
    text = (
        f"{FAILED}Expected a None object in the execute function return list for reschduled"
        f" request, found type '{pb_utils.InferenceResponse}'."
    )
    assert [error_text(message) for message in responses] == [text, text]
    assert done.rescheduled == ()


def test_a_request_that_the_model_drops_without_a_response_gets_an_error(
    start_stub: StartStub,
) -> None:
    host = start_stub(lambda requests: [response(1), None])
    responses, done = host.run_batch(*map(wire_request, (1, 2)))
    if len(responses) == 1:  # the error may come before or after the end of the batch
        responses.append(host.receive(m.Response))
    answered, dropped = sorted(responses, key=lambda message: message.index)
    assert output_values([answered]) == {0: 1}
    assert done.deferred == (1,)
    assert (dropped.batch, dropped.index) == (done.batch, 1)
    assert error_text(dropped).startswith("Model instance 'm_0' returned no response")


def test_a_batch_whose_requests_are_all_cancelled_is_not_run(start_stub: StartStub) -> None:
    values: list[int] = []

    def execute(requests: Requests) -> list[pb_utils.InferenceResponse]:
        values.extend(input_value(request) for request in requests)
        return [echo(request) for request in requests]

    host = start_stub(execute)
    host.send_service(m.CancelRequest(1, 0), m.CancelRequest(1, 1))
    host.drain_service_messages()
    assert host.run_batch(*map(wire_request, (1, 2))) == ([], m.BatchDone(1, 0, 0, 0, 0))
    host.run_batch(wire_request(3))
    assert values == [3]


def test_a_model_sees_which_requests_of_its_batch_are_cancelled(start_stub: StartStub) -> None:
    began, may_continue = threading.Event(), threading.Event()
    seen: list[list[bool]] = []

    def execute(requests: Requests) -> list[pb_utils.InferenceResponse]:
        seen.append([request.is_cancelled() for request in requests])
        began.set()
        assert may_continue.wait(DEADLINE)
        seen.append([request.is_cancelled() for request in requests])
        return [echo(request) for request in requests]

    host = start_stub(execute)
    host.send_service(m.CancelRequest(1, 1))
    host.drain_service_messages()
    host.send_batch(*map(wire_request, (1, 2, 3)))
    assert began.wait(DEADLINE)
    host.send_service(m.CancelRequest(1, 2))
    host.drain_service_messages()
    may_continue.set()
    host.receive(m.BatchDone)
    assert seen == [[False, True, False], [False, True, True]]


def large_request(tensor: WireTensor) -> WireRequest:
    return WireRequest("", [tensor], [], {})


def fail(requests: Requests) -> None:
    raise ValueError("no")


@pytest.mark.parametrize("execute", [lambda requests: [echo(r) for r in requests], fail])
def test_input_blocks_are_released_with_the_end_of_their_batch(
    start_stub: StartStub, execute: Any
) -> None:
    host = start_stub(execute)
    tensors = [host.export(np.full(LARGE, value, np.int32)) for value in (1, 2)]
    host.send_batch(*map(large_request, tensors))
    frame = host.receive_frame()
    assert [type(message) for message in frame] == [
        m.Response,
        m.Response,
        m.BatchDone,
        m.BlockRelease,
    ]
    assert isinstance(frame[-1], m.BlockRelease)
    assert sorted(frame[-1].blocks) == [(HOST_ARENA, tensor.offset, 1) for tensor in tensors]


def test_an_input_block_in_a_response_of_a_failed_batch_is_released_after_the_response(
    start_stub: StartStub,
) -> None:
    """The response was sent without the final flag, so it goes with the end of the batch."""

    def execute(requests: Requests) -> None:
        sender = requests[0].get_response_sender()
        sender.send(pb_utils.InferenceResponse(requests[0].inputs()))
        raise ValueError("no")

    host = start_stub(execute)
    tensor = host.export(np.full(LARGE, 4, np.int32))
    host.send_batch(WireRequest("", [tensor], ["IN"], {}))
    frame = host.receive_frame()
    assert [type(message) for message in frame] == [m.Response, m.BatchDone]
    assert isinstance(frame[0], m.Response) and frame[0].response is not None
    (output,) = frame[0].response.outputs
    assert (output.arena, output.offset) == (HOST_ARENA, tensor.offset)
    assert host.receive(m.BlockRelease).blocks == [(HOST_ARENA, tensor.offset, 1)]


def test_an_input_block_that_the_model_keeps_is_released_when_its_tensor_is_deleted(
    start_stub: StartStub,
) -> None:
    kept: list[pb_utils.Tensor] = []

    def execute(requests: Requests) -> list[pb_utils.InferenceResponse]:
        kept.extend(requests[0].inputs())
        return [echo(requests[0])]

    host = start_stub(execute)
    tensor = host.export(np.full(LARGE, 4, np.int32))
    host.send_batch(large_request(tensor))
    assert [type(message) for message in host.receive_frame()] == [m.Response, m.BatchDone]
    assert kept[0].as_numpy()[-1] == 4
    kept.clear()
    assert host.receive(m.BlockRelease).blocks == [(HOST_ARENA, tensor.offset, 1)]


def test_a_block_that_two_requests_share_is_released_for_each_of_them(
    start_stub: StartStub,
) -> None:
    host = start_stub(lambda requests: [echo(request) for request in requests])
    tensor = host.export(np.full(LARGE, 4, np.int32))
    host.run_batch(large_request(tensor), large_request(tensor))
    assert host.receive(m.BlockRelease).blocks == [(HOST_ARENA, tensor.offset, 2)]


def test_a_request_whose_shared_memory_is_gone_fails_alone(start_stub: StartStub) -> None:
    host = start_stub(lambda requests: [echo(request) for request in requests])
    gone = WireTensor("IN", 8, [LARGE], None, 9, 4096, 4 * LARGE)
    responses, done = host.run_batch(large_request(gone), wire_request(2))
    failed, answered = responses
    assert failed.index == 0 and error_text(failed).startswith(
        f"{FAILED}SharedMemoryUnavailable: the shared memory in which tensor 'IN' lay is gone"
    )
    assert output_values([answered]) == {1: 2}
    assert done.failure is None
    assert host.receive(m.BlockRelease).blocks == [(9, 4096, 1)]


def test_an_output_block_stays_unchanged_until_the_host_releases_it(
    start_stub: StartStub,
) -> None:
    def execute(requests: Requests) -> list[pb_utils.InferenceResponse]:
        array = np.full(LARGE, input_value(requests[0]), np.int32)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", array)])]

    host = start_stub(execute)

    def output_of_batch(value: int) -> WireTensor:
        (message,), _ = host.run_batch(wire_request(value))
        assert message.response is not None
        (tensor,) = message.response.outputs
        assert tensor.data is None
        return tensor

    first, second = output_of_batch(1), output_of_batch(2)
    assert (host.array(first) == 1).all() and (host.array(second) == 2).all()
    host.send_work(m.BlockRelease([(STUB_ARENA, first.offset, 1)]))
    assert output_of_batch(3).offset == first.offset
    assert (host.array(second) == 2).all()
