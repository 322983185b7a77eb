"""Responses."""

from __future__ import annotations

import json
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
    Tensor,
    TritonError,
    TritonModelException,
    get_output_tensor_by_name,
)
from tests.unit.pb_utils.recording import RecordedResponder

CODES = [
    "UNKNOWN",
    "INTERNAL",
    "NOT_FOUND",
    "INVALID_ARG",
    "UNAVAILABLE",
    "UNSUPPORTED",
    "ALREADY_EXISTS",
    "CANCELLED",
]


@pytest.mark.parametrize(("value", "name"), list(enumerate(CODES)))
def test_codes_are_attributes_of_the_class(value: int, name: str) -> None:
    code: Any = getattr(TritonError, name)
    assert code == value
    assert code.name == name
    assert TritonError("text", code).code() is code


def test_an_error_is_internal_unless_said_otherwise() -> None:
    error = TritonError("text")
    assert error.message() == "text"
    assert error.code() is TritonError.INTERNAL
    assert repr(error) == "TritonError('text', code=TritonError.INTERNAL)"
    by_keyword = TritonError(message="text", code=TritonError.CANCELLED)
    assert by_keyword.code() == TritonError.CANCELLED


def test_a_code_is_printed_as_in_triton() -> None:
    assert str(TritonError.NOT_FOUND) == "__ErrorCode.NOT_FOUND"
    assert repr(TritonError.NOT_FOUND) == "<__ErrorCode.NOT_FOUND: 2>"


def test_an_error_is_no_exception() -> None:
    assert not isinstance(TritonError("text"), BaseException)


def test_messages_are_always_readable_text() -> None:
    assert TritonError(b"text").message() == "text"
    assert TritonError(b"a\xffb").message() == r"a\xffb"
    assert TritonError("a\udcffb").message() == r"a\udcffb"
    assert TritonError("\u00e4").message() == "\u00e4"


@pytest.mark.parametrize("message", [None, 1, ValueError("x")])
def test_a_message_must_be_text(message: Any) -> None:
    with pytest.raises(TypeError, match=r"^__init__\(\): incompatible constructor arguments\."):
        TritonError(message)


def test_the_exception_is_an_ordinary_one() -> None:
    assert issubclass(TritonModelException, Exception)
    assert str(TritonModelException("boom")) == "boom"
    assert str(TritonModelException()) == ""
    assert TritonModelException.__name__ == "TritonModelException"


def tensor(name: str = "x") -> Tensor:
    return Tensor(name, np.zeros(1))


def test_empty_response_has_no_outputs_and_no_error() -> None:
    response = InferenceResponse()
    assert response.output_tensors() == []
    assert response.has_error() is False
    assert response.error() is None
    assert response.parameters() == "{}"


def test_constructor_arguments_can_be_read() -> None:
    x, error = tensor(), TritonError("boom")
    response = InferenceResponse(output_tensors=[x], error=error, parameters={"a": 1})
    assert response.output_tensors() == [x]
    assert response.has_error() is True
    assert response.error() is error
    assert json.loads(response.parameters()) == {"a": 1}
    assert InferenceResponse([x], None, None).output_tensors() == [x]


def test_reading_the_tensors_gives_a_new_list() -> None:
    response = InferenceResponse([tensor()])
    response.output_tensors().clear()
    assert len(response.output_tensors()) == 1


def test_a_list_changed_later_does_not_change_the_response() -> None:
    tensors, parameters = [tensor()], {"a": 1}
    response = InferenceResponse(tensors, None, dict(parameters))
    tensors.clear()
    assert len(response.output_tensors()) == 1


def test_an_output_tensor_may_not_be_none() -> None:
    missing: Any = [tensor(), None]
    with pytest.raises(TritonModelException) as caught:
        InferenceResponse(missing)
    assert str(caught.value) == "Output tensor for inference response should not be empty."


@pytest.mark.parametrize("error", ["boom", 1, ValueError("boom")])
def test_an_error_must_be_a_triton_error(error: Any) -> None:
    with pytest.raises(TypeError, match=r"^__init__\(\): incompatible constructor arguments\."):
        InferenceResponse([], error)


@pytest.mark.parametrize("parameters", [["a"], "a", 1, (("a", 1),)])
def test_parameters_must_be_a_dict(parameters: Any) -> None:
    with pytest.raises(TritonModelException) as caught:
        InferenceResponse(parameters=parameters)
    assert str(caught.value) == f"Expect dict, got {type(parameters)}"


def test_parameter_keys_must_be_text() -> None:
    wrong: Any = {1: "a"}
    with pytest.raises(TritonModelException) as caught:
        InferenceResponse(parameters=wrong)
    assert str(caught.value) == (
        "Expect parameters keys to have type str, found type <class 'int'>"
    )


@pytest.mark.parametrize("value", [1.5, None, [1], np.int64(1), np.bool_(True), b"a"])
def test_parameter_values_must_be_bool_int_or_str(value: Any) -> None:
    with pytest.raises(TritonModelException) as caught:
        InferenceResponse(parameters={"a": value})
    assert str(caught.value) == (
        f"Expect parameters values to have type bool/int/str, found type {type(value)}"
    )


def test_parameters_are_json_text() -> None:
    parameters: Any = {"b": True, "i": -(1 << 63), "s": 'a"\u00e4'}
    assert json.loads(InferenceResponse(parameters=parameters).parameters()) == parameters


def test_a_received_response_without_parameters_gives_empty_text() -> None:
    response = InferenceResponse._from_wire([], TritonError("boom"), None)
    assert response.parameters() == ""
    assert InferenceResponse._from_wire([], None, {"f": 0.5}).parameters() == '{"f":0.5}'


def test_outputs_are_found_by_name() -> None:
    first, second = tensor("a"), tensor("b")
    response = InferenceResponse([first, second, tensor("b")])
    assert get_output_tensor_by_name(response, "b") is second
    assert get_output_tensor_by_name(response, "c") is None


def test_repr_shows_error_or_outputs() -> None:
    assert "name='x'" in repr(InferenceResponse([tensor()]))
    assert "boom" in repr(InferenceResponse(error=TritonError("boom")))


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
