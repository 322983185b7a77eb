"""Response senders of a running model, before and after `execute` returns."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

import pb_utils
from pb_utils._response import InferenceResponseSender as Sender
from stub.wire import messages as m
from tests.conftest import DEADLINE
from tests.unit.stub.host_peer import (
    FAILED,
    LARGE,
    STUB_ARENA,
    StartStub,
    error_text,
    input_value,
    output_value,
    response,
    wire_request,
)

Requests = list[pb_utils.InferenceRequest]


FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
CLOSED = "Unable to send response. Response sender has been closed."
MORE_THAN_ONE = "Unable to send response. Non-decoupled model cannot send more than one response."
FINAL_ALONE = (
    "Unable to send response. Non-decoupled model cannot send complete final before sending a"
    " response."
)


class KeepSenders:
    """An `execute` that leaves the responses to the test."""

    def __init__(self) -> None:
        self.senders: list[Sender] = []

    def __call__(self, requests: Requests) -> None:
        self.senders.extend(request.get_response_sender() for request in requests)


def error_of_send(sender: Sender, answer: Any, flags: int) -> str:
    """The text of the error that `send` raises; no traceback keeps the sender alive."""
    try:
        sender.send(answer, flags)
    except pb_utils.TritonModelException as error:
        return str(error)
    raise AssertionError("the response was sent")


def test_responses_of_execute_arrive_in_order_and_before_the_end_of_the_batch(
    start_stub: StartStub,
) -> None:
    def execute(requests: Requests) -> None:
        for request in requests:
            value = input_value(request)
            sender = request.get_response_sender()
            sender.send(response(value))
            sender.send(response(value + 1))
            sender.send(flags=FINAL)

    host = start_stub(execute, decoupled=True)
    responses, done = host.run_batch(*map(wire_request, (10, 20)))
    assert [(message.index, message.final) for message in responses] == [
        (0, False),
        (0, False),
        (0, True),
        (1, False),
        (1, False),
        (1, True),
    ]
    assert [output_value(message) for message in responses if not message.final] == [10, 11, 20, 21]
    assert all(message.response is None for message in responses if message.final)
    assert (done.deferred, done.failure) == ((), None)


def test_responses_are_sent_after_execute_has_returned(start_stub: StartStub) -> None:
    execute = KeepSenders()
    host = start_stub(execute, decoupled=True)
    responses, done = host.run_batch(*map(wire_request, (1, 2)))
    assert (responses, done.deferred) == ([], (0, 1))
    assert host.run_batch(wire_request(3))[1].deferred == (0,)  # other batches run meanwhile
    first, second, third = execute.senders
    second.send(response(5))
    third.send(response(6), FINAL)
    second.send(flags=FINAL)
    first.send(response(7), FINAL)
    found = [host.receive(m.Response) for _ in range(4)]
    assert [(message.batch, message.index, message.final) for message in found] == [
        (1, 1, False),
        (2, 0, True),
        (1, 1, True),
        (1, 0, True),
    ]
    assert [output_value(found[index]) for index in (0, 1, 3)] == [5, 6, 7]


def test_a_thread_of_the_model_sends_responses_while_execute_runs(start_stub: StartStub) -> None:
    def execute(requests: Requests) -> None:
        sender = requests[0].get_response_sender()
        thread = threading.Thread(target=sender.send, args=(response(3), FINAL))
        thread.start()
        thread.join(DEADLINE)

    host = start_stub(execute)
    (message,), done = host.run_batch(wire_request(0))
    assert message.final and output_value(message) == 3
    assert done.deferred == ()


def test_a_sender_sends_only_requested_outputs(start_stub: StartStub) -> None:
    execute = KeepSenders()
    host = start_stub(execute)
    host.run_batch(wire_request(0, ["OTHER"]))
    execute.senders[0].send(response(1), FINAL)
    message = host.receive(m.Response)
    assert message.response is not None and message.response.outputs == []


@pytest.mark.parametrize("ended", [False, True])
@pytest.mark.parametrize(
    ("decoupled", "sent", "refused", "text"),
    [
        (True, [(None, FINAL)], (None, FINAL), CLOSED),
        (True, [(response(1), FINAL)], (response(2), 0), CLOSED),
        (True, [(response(1), 0), (None, FINAL)], (response(2), FINAL), CLOSED),
        (False, [(response(1), FINAL)], (response(2), FINAL), MORE_THAN_ONE),
        (False, [(response(1), FINAL)], (None, FINAL), CLOSED),
        (False, [(response(1), 0)], (response(2), 0), MORE_THAN_ONE),
        (False, [], (None, FINAL), FINAL_ALONE),
        (
            True,
            [],
            (None, 0),
            "Inference Response object must be provided when the response flags is set to zero.",
        ),
        (True, [], (response(1), 2), "Unable to send response. Unsupported flag provided."),
    ],
)
def test_a_response_that_a_request_cannot_have_raises_the_documented_error(
    start_stub: StartStub,
    ended: bool,
    decoupled: bool,
    sent: list[tuple[Any, int]],
    refused: tuple[Any, int],
    text: str,
) -> None:
    """docs/reference/model-methods.md, "Response sender"; during `execute` and afterwards."""
    senders: list[Sender] = []
    errors: list[str] = []

    def send_responses(sender: Sender) -> None:
        for arguments in sent:
            sender.send(*arguments)
        errors.append(error_of_send(sender, *refused))

    def execute(requests: Requests) -> None:
        senders.append(requests[0].get_response_sender())
        if not ended:
            send_responses(senders[0])

    host = start_stub(execute, decoupled=decoupled)
    responses, _ = host.run_batch(wire_request(0))
    if ended:
        send_responses(senders[0])
    assert errors == [text]


@pytest.mark.parametrize("decoupled", [False, True])
def test_a_sender_is_closed_by_an_exception_of_execute(
    start_stub: StartStub, decoupled: bool
) -> None:
    senders: list[Sender] = []

    def execute(requests: Requests) -> None:
        senders.extend(request.get_response_sender() for request in requests)
        raise ValueError("no")

    host = start_stub(execute, decoupled=decoupled)
    responses, done = host.run_batch(*map(wire_request, (1, 2)))
    assert [message.index for message in responses] == [0, 1]
    assert all(error_text(message).startswith(f"{FAILED}ValueError: no") for message in responses)
    assert done.deferred == ()
    for sender in senders:
        assert error_of_send(sender, response(1), FINAL) == CLOSED


def test_an_exception_of_execute_fails_only_requests_without_a_final_response(
    start_stub: StartStub,
) -> None:
    def execute(requests: Requests) -> None:
        requests[0].get_response_sender().send(response(1), FINAL)
        requests[1].get_response_sender().send(response(2))  # held back without the final flag
        raise ValueError("no")

    host = start_stub(execute)
    responses, done = host.run_batch(*map(wire_request, (1, 2, 3)))
    assert [message.index for message in responses] == [0, 1, 2]
    assert [output_value(message) for message in responses[:2]] == [1, 2]
    assert error_text(responses[2]).startswith(f"{FAILED}ValueError: no")
    assert done.failure == error_text(responses[2])


def test_a_returned_response_closes_the_sender(start_stub: StartStub) -> None:
    senders: list[Sender] = []

    def execute(requests: Requests) -> list[pb_utils.InferenceResponse]:
        senders.append(requests[0].get_response_sender())
        return [response(1)]

    host = start_stub(execute)
    responses, done = host.run_batch(wire_request(0))
    assert [output_value(message) for message in responses] == [1]
    assert done.deferred == ()
    assert error_of_send(senders[0], response(2), FINAL) == CLOSED


@pytest.mark.parametrize("flags", [0, FINAL])
def test_a_returned_response_after_a_sent_one_fails_the_requests_that_are_open(
    start_stub: StartStub, flags: int
) -> None:
    def execute(requests: Requests) -> list[pb_utils.InferenceResponse]:
        requests[0].get_response_sender().send(response(1), flags)
        return [response(2), response(3)]

    host = start_stub(execute)
    responses, done = host.run_batch(*map(wire_request, (1, 2)))
    answered, failed = responses
    assert (answered.index, output_value(answered)) == (0, 1)
    assert (failed.index, error_text(failed)) == (1, FAILED + MORE_THAN_ONE)


def test_a_response_without_the_final_flag_is_held_back_until_the_flag_comes(
    start_stub: StartStub,
) -> None:
    """The client of an ordinary model gets one message, which is final."""
    execute = KeepSenders()
    host = start_stub(execute)
    assert host.run_batch(wire_request(0))[1].deferred == (0,)
    execute.senders[0].send(response(1))
    assert host.run_batch(wire_request(0))[0] == []
    execute.senders[0].send(flags=FINAL)
    message = host.receive(m.Response)
    assert (message.batch, message.final, output_value(message)) == (1, True, 1)


@pytest.mark.parametrize("sent", [0, 2])
def test_a_sender_that_is_deleted_without_the_final_flag_ends_its_request_with_an_error(
    start_stub: StartStub, sent: int
) -> None:
    execute = KeepSenders()
    host = start_stub(execute, decoupled=True)
    host.run_batch(wire_request(0))
    for value in range(sent):
        execute.senders[0].send(response(value))
    execute.senders.clear()
    assert [output_value(host.receive(m.Response)) for _ in range(sent)] == list(range(sent))
    assert error_text(host.receive(m.Response)).startswith(
        "Model instance 'm_0' returned no response"
    )


def test_a_sender_sees_the_cancellation_after_execute_has_returned(start_stub: StartStub) -> None:
    execute = KeepSenders()
    host = start_stub(execute, decoupled=True)
    host.run_batch(*map(wire_request, (1, 2)))
    host.send_service(m.CancelRequest(1, 1))
    host.drain_service_messages()
    assert [sender.is_cancelled() for sender in execute.senders] == [False, True]
    execute.senders[1].send(flags=FINAL)
    message = host.receive(m.Response)
    assert (message.index, message.response, message.final) == (1, None, True)


def test_a_sender_waits_at_the_limit_until_the_host_acknowledges_a_response(
    start_stub: StartStub,
) -> None:
    execute = KeepSenders()
    host = start_stub(execute, decoupled=True, max_outstanding_responses=2, send_timeout=DEADLINE)
    host.run_batch(wire_request(0))
    sender = execute.senders[0]
    for value in (1, 2):
        sender.send(response(value))
    thread = threading.Thread(target=sender.send, args=(response(3), FINAL))
    thread.start()
    host.drain_service_messages()
    assert thread.is_alive()
    host.send_service(m.ResponseAck(1, 0, 1))
    thread.join(DEADLINE)
    assert [output_value(host.receive(m.Response)) for _ in range(3)] == [1, 2, 3]


def test_the_block_of_a_sent_response_lives_until_the_host_releases_it(
    start_stub: StartStub,
) -> None:
    execute = KeepSenders()
    host = start_stub(execute, decoupled=True)
    host.run_batch(wire_request(0))

    def send_large(value: int) -> Any:
        array = np.full(LARGE, value, np.int32)
        execute.senders[0].send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", array)]))
        message = host.receive(m.Response)
        assert message.response is not None
        return message.response.outputs[0]

    first, second = send_large(1), send_large(2)
    assert (host.array(first) == 1).all() and (host.array(second) == 2).all()
    host.send_work(m.BlockRelease([(STUB_ARENA, first.offset, 1)]))
    host.run_batch(wire_request(0))
    assert send_large(3).offset == first.offset
    assert (host.array(second) == 2).all()
