"""The checks of the response sender (docs/reference/model-api.md, "Response sender")."""

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


def sender_of(responder: RecordedResponder) -> InferenceResponseSender:
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
        handle=responder,
    )
    return request.get_response_sender()


def refusal(sender: InferenceResponseSender, *arguments: Any) -> str:
    with pytest.raises(TritonModelException) as caught:
        sender.send(*arguments)
    return str(caught.value)


def test_a_decoupled_model_sends_any_number_of_responses() -> None:
    responder = RecordedResponder(decoupled=True)
    sender = sender_of(responder)
    first, last = InferenceResponse(), InferenceResponse()
    sender.send(first)
    sender.send(response=first, flags=0)
    sender.send(last, FINAL)
    assert responder.delivered == [(first, False), (first, False), (last, True)]
    for late in ((first,), (first, FINAL), (None, FINAL)):
        assert refusal(sender, *late) == CLOSED


def test_decoupled_model_can_send_final_flag_alone() -> None:
    responder = RecordedResponder(decoupled=True)
    sender_of(responder).send(flags=FINAL)
    assert responder.delivered == [(None, True)]


@pytest.mark.parametrize("apart", [False, True])
def test_ordinary_model_sends_one_response(apart: bool) -> None:
    responder = RecordedResponder()
    sender, response = sender_of(responder), InferenceResponse()
    if apart:
        sender.send(response)
        assert refusal(sender, response) == SECOND
        sender.send(flags=FINAL)
        assert responder.delivered == [(response, False), (None, True)]
    else:
        sender.send(response, FINAL)
        assert responder.delivered == [(response, True)]
    assert refusal(sender, response) == SECOND
    assert refusal(sender, response, FINAL) == SECOND
    assert refusal(sender, None, FINAL) == CLOSED


def test_ordinary_model_cannot_send_final_flag_before_response() -> None:
    responder = RecordedResponder()
    sender = sender_of(responder)
    assert refusal(sender, None, FINAL) == TOO_EARLY
    sender.send(InferenceResponse(), FINAL)


@pytest.mark.parametrize("decoupled", [False, True])
def test_closed_responder_rejects_responses(decoupled: bool) -> None:
    responder = RecordedResponder(decoupled)
    sender = sender_of(responder)
    assert responder.close() is True
    assert responder.close() is False
    assert refusal(sender, InferenceResponse()) == CLOSED
    assert refusal(sender, None, FINAL) == (CLOSED if decoupled else TOO_EARLY)
    assert responder.delivered == []


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
    responder = RecordedResponder()
    responder.close()
    assert refusal(sender_of(responder), *arguments) == text


@pytest.mark.parametrize("arguments", [("x",), ([InferenceResponse()],), (None, None), (None, 1.0)])
def test_wrong_types_are_type_errors(arguments: tuple[Any, ...]) -> None:
    with pytest.raises(TypeError, match=r"^send\(\): incompatible function arguments\."):
        sender_of(RecordedResponder()).send(*arguments)


def test_flags_may_be_any_integer_type() -> None:
    responder = RecordedResponder(decoupled=True)
    sender_of(responder).send(None, np.uint8(1))
    assert responder.delivered == [(None, True)]


def expected(state: dict[str, bool], decoupled: bool, response: bool, flags: int) -> str | None:
    """Returns the expected error text, by the order of the table; None if there is no error."""
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
def test_every_order_of_sends_follows_the_reference(
    decoupled: bool, sends: list[tuple[bool, int]]
) -> None:
    responder = RecordedResponder(decoupled)
    sender, state = sender_of(responder), {"sent": False, "closed": False}
    for given_response, flags in sends:
        response = InferenceResponse() if given_response else None
        before = len(responder.delivered)
        text = expected(state, decoupled, given_response, flags)
        if text is None:
            sender.send(response, flags)
            assert responder.delivered[before:] == [(response, flags == 1)]
        else:
            assert refusal(sender, response, flags) == text
            assert len(responder.delivered) == before
        assert (responder.has_response, responder.closed) == (state["sent"], state["closed"])


def test_only_one_of_many_threads_sends_the_response() -> None:
    responder = RecordedResponder()
    sender, refused = sender_of(responder), []
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
    assert len(responder.delivered) == 1
    assert refused == [SECOND] * 7


def test_a_response_that_cannot_be_delivered_leaves_the_sender_open() -> None:
    class Full(RecordedResponder):
        def _wait_for_credit(self) -> None:
            raise TritonModelException("no room")

    responder = Full(decoupled=True)
    assert refusal(sender_of(responder), InferenceResponse(), FINAL) == "no room"
    assert not responder.closed


def test_request_has_one_sender_that_outlives_it() -> None:
    responder = RecordedResponder()
    sender = sender_of(responder)  # the request object is deleted
    sender.send(InferenceResponse(), FINAL)
    assert responder.closed
    request = InferenceRequest(inputs=[], requested_output_names=[], model_name="m")
    assert request.get_response_sender() is request.get_response_sender()


def test_cancellation_stays_true() -> None:
    responder = RecordedResponder()
    responder.is_cancelled_results = [False, True]
    sender = sender_of(responder)
    assert [sender.is_cancelled() for _ in range(4)] == [False, True, True, True]
