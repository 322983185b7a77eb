"""Response senders: order, held responses, dropped requests, cancellation and credit."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

import pb_utils
from stub.memory import StubMemory
from stub.responders import ResponderRegistry, StubResponder
from stub.stub_channel import Channel
from stub.wire import messages as m
from stub.wire.arena import Arena, create_arena_file
from stub.wire.ring import create_ring_file
from stub.wire.shared_file import PAGE
from stub.wire.spawn import SpawnArguments
from tests.conftest import DEADLINE, wait_until


class RegistryFixture:
    """A registry with a real channel, and the host's end of its ring."""

    def __init__(self, endpoint: str) -> None:
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.bind(endpoint)
        rings, arena = create_ring_file("rings", 3), create_arena_file("pbhost-test", 64 * PAGE)
        events = [os.eventfd(0), os.eventfd(0), os.eventfd(0, os.EFD_NONBLOCK)]
        self._descriptors = [rings, arena, *events]
        work, heard, bls = events
        spawn = SpawnArguments(endpoint, "t", "title", -1, rings, work, heard, bls, 1, -1, 0, -1, 0)
        self.channel = Channel(spawn)
        self.wakes = 0
        memory = StubMemory(Arena(1, arena, 64 * PAGE), lambda: None)
        self.registry = ResponderRegistry(self.channel, memory, self._wake)

    def _wake(self) -> None:
        self.wakes += 1

    def begin(self, count: int, decoupled: bool, batch: int = 1) -> list[StubResponder]:
        responders = [
            StubResponder(self.registry, batch, index, decoupled, ("OUT",), None, 1)
            for index in range(count)
        ]
        self.registry.begin_batch(batch, responders)
        return responders

    def dropped(self) -> Sequence[Any]:
        return self.registry.take_responses_to_dropped_requests([])

    def close(self) -> None:
        self.channel.mark_host_gone()
        self.channel.close()
        self._router.close(0)
        self._context.term()
        for descriptor in self._descriptors:
            os.close(descriptor)


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[RegistryFixture]:
    fixture = RegistryFixture(f"ipc://{tmp_path}/host")
    fixture.channel.mark_host_gone()  # sent frames are dropped; this test is about the state only
    yield fixture
    fixture.close()


def response() -> pb_utils.InferenceResponse:
    return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.zeros(2, np.int32))])


def test_requests_that_are_answered_later_are_reported_at_the_end_of_the_batch(
    ends: RegistryFixture,
) -> None:
    responders = ends.begin(3, decoupled=False)
    assert responders[1].close()
    assert ends.registry.end_batch(responders) == [0, 2]
    assert not responders[1].close()


@pytest.mark.parametrize("ended", [False, True])
def test_a_request_is_cancelled_during_and_after_its_batch(
    ends: RegistryFixture, ended: bool
) -> None:
    responders = ends.begin(2, decoupled=False)
    if ended:
        ends.registry.end_batch(responders)
    ends.registry.cancel_request(1, 1)
    assert [responder.is_cancelled() for responder in responders] == [False, True]


def test_a_request_that_is_cancelled_before_its_batch_begins_is_cancelled(
    ends: RegistryFixture,
) -> None:
    ends.registry.cancel_request(2, 0)
    assert not ends.begin(1, decoupled=False, batch=1)[0].is_cancelled()
    assert ends.begin(1, decoupled=False, batch=2)[0].is_cancelled()
    assert not ends.begin(1, decoupled=False, batch=3)[0].is_cancelled()


def test_a_request_that_is_deleted_without_a_response_gets_an_error(ends: RegistryFixture) -> None:
    responders = ends.begin(1, decoupled=False)
    ends.registry.end_batch(responders)
    responders.clear()
    assert ends.wakes == 1
    (answer,) = ends.dropped()
    assert isinstance(answer, m.Response) and (answer.batch, answer.index) == (1, 0)
    assert answer.response is not None and answer.response.error is not None
    assert "returned no response for this request" in answer.response.error.message
    assert not ends.dropped()


def test_a_request_that_is_deleted_gets_the_response_that_was_sent_without_the_final_flag(
    ends: RegistryFixture,
) -> None:
    responders = ends.begin(1, decoupled=False)
    responders[0].send(response(), final=False)
    ends.registry.end_batch(responders)
    responders.clear()
    (answer,) = ends.dropped()
    assert answer.response.error is None
    assert [output.name for output in answer.response.outputs] == ["OUT"]


def test_a_sender_fails_after_the_timeout_if_the_client_receives_nothing(
    ends: RegistryFixture,
) -> None:
    (responder,) = ends.begin(1, decoupled=True)
    ends.registry.send_timeout = 0.01
    responder.send(response(), final=False)
    with pytest.raises(pb_utils.TritonModelException, match="taken none of 1 earlier responses"):
        responder.send(response(), final=False)


def wait_for_credit(responder: StubResponder) -> tuple[threading.Thread, list[str]]:
    """A thread that waits until it may send; the list gets the error that it meets, if any."""
    errors: list[str] = []

    def send() -> None:
        try:
            responder.send(response(), False)
        except pb_utils.TritonModelException as error:
            errors.append(str(error))

    thread = threading.Thread(target=send)
    thread.start()

    def waits() -> bool:
        frame = sys._current_frames().get(thread.ident or 0)
        while frame is not None and frame.f_code is not threading.Condition.wait.__code__:
            frame = frame.f_back
        return frame is not None

    wait_until(waits, "the sender to wait")
    return thread, errors


@pytest.mark.parametrize(
    ("event", "message"),
    [
        ("acknowledged", ""),
        ("cancelled", ""),
        ("closed", "Response sender has been closed"),
        ("final response", "Response sender has been closed"),
    ],
)
def test_all_waiting_senders_continue_after_an_event_of_their_request(
    ends: RegistryFixture, event: str, message: str
) -> None:
    (responder,) = ends.begin(1, decoupled=True)
    responder.send(response(), final=False)
    senders = [wait_for_credit(responder) for _ in range(2)]
    if event == "acknowledged":
        ends.registry.acknowledge_responses(1, 0, 1)  # at least one of them may send
        wait_until(lambda: sum(thread.is_alive() for thread, _ in senders) <= 1, "one to send")
        ends.registry.acknowledge_responses(1, 0, 1)
    elif event == "cancelled":
        ends.registry.cancel_request(1, 0)
    elif event == "closed":
        responder.close()
    else:
        responder.max_outstanding_responses = 2  # the others have begun to wait for less
        responder.send(response(), final=True)
    for thread, errors in senders:
        thread.join(DEADLINE)
        assert not thread.is_alive()
        assert [message in error for error in errors] == [True] * bool(message)
