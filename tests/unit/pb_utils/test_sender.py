"""The sender's state machine (docs/reference/model_api.md, 2.6)."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from c_python_backend_utils import InferenceResponseSender
from pb_utils import (
    TRITONSERVER_RESPONSE_COMPLETE_FINAL,
    InferenceRequest,
    InferenceResponse,
    TritonModelException,
)
from tests.unit.pb_utils.recording import RecordedResponder

FINAL = TRITONSERVER_RESPONSE_COMPLETE_FINAL
FLAG = "Unable to send response. Unsupported flag provided."
NOTHING = "Inference Response object must be provided when the response flags is set to zero."
OWN = (
    "Unable to send response. Response sender has no reference to the decoupled state of the model."
)
SECOND = "Unable to send response. Non-decoupled model cannot send more than one response."
TOO_EARLY = (
    "Unable to send response. Non-decoupled model cannot send complete final before sending a "
    "response."
)
CLOSED = "Unable to send response. Response sender has been closed."


def sender_of(exchange: RecordedResponder) -> InferenceResponseSender:
    request = InferenceRequest._from_wire(
        request_id="",
        correlation_id=0,
        inputs=[],
        requested_output_names=(),
        model_name="m",
        model_version=1,
        flags=0,
        timeout=0,
        parameters={},
        handle=exchange,
    )
    return request.get_response_sender()


def refusal(sender: InferenceResponseSender, *arguments: Any) -> str:
    with pytest.raises(TritonModelException) as caught:
        sender.send(*arguments)
    return str(caught.value)


def test_a_decoupled_model_sends_any_number_of_responses() -> None:
    exchange = RecordedResponder(decoupled=True)
    sender = sender_of(exchange)
    first, last = InferenceResponse(), InferenceResponse()
    sender.send(first)
    sender.send(response=first, flags=0)
    sender.send(last, FINAL)
    assert exchange.delivered == [(first, False), (first, False), (last, True)]
    for late in ((first,), (first, FINAL), (None, FINAL)):
        assert refusal(sender, *late) == CLOSED


def test_a_decoupled_model_may_end_without_a_response() -> None:
    exchange = RecordedResponder(decoupled=True)
    sender_of(exchange).send(flags=FINAL)
    assert exchange.delivered == [(None, True)]


@pytest.mark.parametrize("apart", [False, True])
def test_another_model_sends_one_response(apart: bool) -> None:
    exchange = RecordedResponder()
    sender, response = sender_of(exchange), InferenceResponse()
    if apart:
        sender.send(response)
        assert refusal(sender, response) == SECOND
        sender.send(flags=FINAL)
        assert exchange.delivered == [(response, False), (None, True)]
    else:
        sender.send(response, FINAL)
        assert exchange.delivered == [(response, True)]
    assert refusal(sender, response) == SECOND
    assert refusal(sender, response, FINAL) == SECOND
    assert refusal(sender, None, FINAL) == CLOSED


def test_another_model_cannot_end_before_its_response() -> None:
    exchange = RecordedResponder()
    sender = sender_of(exchange)
    assert refusal(sender, None, FINAL) == TOO_EARLY
    sender.send(InferenceResponse(), FINAL)


@pytest.mark.parametrize("decoupled", [False, True])
def test_a_closed_exchange_takes_nothing(decoupled: bool) -> None:
    exchange = RecordedResponder(decoupled)
    sender = sender_of(exchange)
    assert exchange.close() is True
    assert exchange.close() is False
    assert refusal(sender, InferenceResponse()) == CLOSED
    assert refusal(sender, None, FINAL) == (CLOSED if decoupled else TOO_EARLY)
    assert exchange.delivered == []


def test_the_sender_of_a_models_own_request_cannot_send() -> None:
    request = InferenceRequest(inputs=[], requested_output_names=[], model_name="m")
    sender = request.get_response_sender()
    assert refusal(sender, InferenceResponse()) == OWN
    assert refusal(sender, None, 2) == FLAG
    assert refusal(sender) == NOTHING
    with pytest.raises(TritonModelException, match="is_cancelled"):
        sender.is_cancelled()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [((None, 2), FLAG), ((InferenceResponse(), 3), FLAG), ((), NOTHING), ((None, 0), NOTHING)],
)
def test_flags_and_response_are_checked_first(arguments: tuple[Any, ...], text: str) -> None:
    exchange = RecordedResponder()
    exchange.close()
    assert refusal(sender_of(exchange), *arguments) == text


@pytest.mark.parametrize("arguments", [("x",), ([InferenceResponse()],), (None, None), (None, 1.0)])
def test_wrong_types_are_type_errors(arguments: tuple[Any, ...]) -> None:
    with pytest.raises(TypeError, match=r"^send\(\): incompatible function arguments\."):
        sender_of(RecordedResponder()).send(*arguments)


def test_flags_may_be_any_integer_type() -> None:
    exchange = RecordedResponder(decoupled=True)
    sender_of(exchange).send(None, np.uint8(1))
    assert exchange.delivered == [(None, True)]


def expected(state: dict[str, bool], decoupled: bool, response: bool, flags: int) -> str | None:
    """Return the refusal, by the order of the specification's table, or None."""
    if flags not in (0, 1):
        return FLAG
    if not flags and not response:
        return NOTHING
    if not decoupled and response and state["sent"]:
        return SECOND
    if not decoupled and not response and not state["sent"]:
        return TOO_EARLY
    if state["closed"]:
        return CLOSED
    state["sent"] = state["sent"] or response
    state["closed"] = flags == 1
    return None


@given(
    decoupled=st.booleans(),
    sends=st.lists(st.tuples(st.booleans(), st.integers(0, 3)), max_size=12),
)
def test_every_order_of_sends_follows_the_table(
    decoupled: bool, sends: list[tuple[bool, int]]
) -> None:
    exchange = RecordedResponder(decoupled)
    sender, state = sender_of(exchange), {"sent": False, "closed": False}
    for given_response, flags in sends:
        response = InferenceResponse() if given_response else None
        before = len(exchange.delivered)
        text = expected(state, decoupled, given_response, flags)
        if text is None:
            sender.send(response, flags)
            assert exchange.delivered[before:] == [(response, flags == 1)]
        else:
            assert refusal(sender, response, flags) == text
            assert len(exchange.delivered) == before
        assert (exchange.has_response, exchange.closed) == (state["sent"], state["closed"])


def test_of_many_threads_one_answers() -> None:
    exchange = RecordedResponder()
    sender, refused = sender_of(exchange), []
    together = threading.Barrier(8)

    def send() -> None:
        together.wait()
        try:
            sender.send(InferenceResponse(), FINAL)
        except TritonModelException as error:
            refused.append(str(error))

    threads = [threading.Thread(target=send) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(exchange.delivered) == 1
    assert refused == [SECOND] * 7


def test_a_response_that_cannot_be_delivered_leaves_the_sender_open() -> None:
    class Full(RecordedResponder):
        def _wait_for_credit(self) -> None:
            raise TritonModelException("no room")

    exchange = Full(decoupled=True)
    assert refusal(sender_of(exchange), InferenceResponse(), FINAL) == "no room"
    assert not exchange.closed


def test_a_request_has_one_sender_which_outlives_it() -> None:
    exchange = RecordedResponder()
    sender = sender_of(exchange)  # the request is gone
    sender.send(InferenceResponse(), FINAL)
    assert exchange.closed
    request = InferenceRequest(inputs=[], requested_output_names=[], model_name="m")
    assert request.get_response_sender() is request.get_response_sender()


def test_a_cancellation_once_told_stays() -> None:
    exchange = RecordedResponder()
    exchange.cancel_answers = [False, True]
    sender = sender_of(exchange)
    assert [sender.is_cancelled() for _ in range(4)] == [False, True, True, True]
