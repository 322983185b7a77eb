"""The stub's end of the connection to the host; the only stub module that knows of zmq."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from stub.stub_channel import Channel
from stub.wire import messages as m
from stub.wire.ring import (
    RECLAIMABLE,
    RING_BYTES,
    WAKE_EARLY,
    RingReader,
    RingWriter,
    create_ring_file,
    map_ring,
)
from stub.wire.session import State
from stub.wire.spawn import SpawnArguments
from tests.conftest import DEADLINE

WANTED = m.AutoComplete(m.ModelSource("/models/a", 1, "model.py"), "{}")


class Ends:
    """The stub's end and the host's end of a connection."""

    def __init__(self, endpoint: str) -> None:
        self._rings, self._host_event = create_ring_file("rings", 3), os.eventfd(0, os.EFD_NONBLOCK)
        self._bls_event = os.eventfd(0, os.EFD_NONBLOCK)
        self.work_event = os.eventfd(0, os.EFD_NONBLOCK)
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.bind(endpoint)
        lifeline, self._host_alive = os.pipe()
        self._fds = (lifeline, self._rings, self.work_event, self._host_event, self._bls_event)
        self.channel = Channel(SpawnArguments(endpoint, "t", "title", *self._fds, 1, -1, 0, -1, 0))
        self._ring = RingWriter(map_ring(self._rings, 0))

    def wake_early(self) -> None:
        os.eventfd_write(self.work_event, WAKE_EARLY)

    def send(self, *messages: m.ToStub) -> None:
        self._ring.try_write(m.encode(messages or [WANTED]))
        os.eventfd_write(self.work_event, 1)

    def received_messages(self) -> list[m.ToHost]:
        """The messages in the frames of the stub that were announced."""
        reader = RingReader(map_ring(self._rings, 1), self._host_event)
        reader.receive_announcements()
        messages: list[m.ToHost] = []
        while (frame := reader.read_frame()) is not None:
            messages += m.decode_to_host(frame)
        return messages

    def allow_reclaiming(self) -> None:
        self._ring.set_flags(RECLAIMABLE)

    def end_host(self) -> None:
        """Closes the lifeline, as the end of the host does."""
        if self._host_alive >= 0:
            os.close(self._host_alive)
            self._host_alive = -1

    def close(self) -> None:
        self.end_host()
        self.channel.mark_host_gone()
        self.channel.close()
        self._router.close(0)
        self._context.term()
        for descriptor in self._fds:
            os.close(descriptor)


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[Ends]:
    made = Ends(f"ipc://{tmp_path}/host")
    yield made
    made.close()


@pytest.mark.parametrize("seconds", [0.0001, 0.05])
def test_a_stub_that_is_woken_early_receives_its_work_whenever_it_arrives(
    ends: Ends, seconds: float
) -> None:
    """The work may arrive while the stub busy-polls, or after it went to sleep."""
    sender = threading.Timer(seconds, ends.send)
    ends.wake_early()
    sender.start()
    try:
        assert ends.channel.receive_work() == [WANTED]
    finally:
        sender.join()


def test_a_stub_that_finds_work_is_not_idle(ends: Ends) -> None:
    ends.wake_early()
    ends.send()
    assert ends.channel.receive_work() == [WANTED]
    assert not ends.channel.is_idle()


def test_a_stub_that_waited_for_a_frame_of_several_batches_is_not_idle(ends: Ends) -> None:
    ends.channel._session.state = State.SERVING
    for batches in (1, 2):
        sender = threading.Timer(0.05, ends.send, [m.Execute(n, []) for n in range(batches)])
        sender.start()
        try:
            assert len(ends.channel.receive_work()) == batches
        finally:
            sender.join()
        assert ends.channel.is_idle() == (batches == 1)


def test_a_stub_that_had_to_wait_for_work_is_idle_until_there_is_more(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[int] = []
    look = ends.channel._has_work

    def send_before_the_second_look(milliseconds: int) -> object:
        looks.append(milliseconds)
        if len(looks) == 2:
            ends.send()
        return look(milliseconds)

    monkeypatch.setattr(ends.channel, "_has_work", send_before_the_second_look)
    ends.wake_early()
    assert ends.channel.receive_work() == [WANTED]
    assert len(looks) == 2
    assert ends.channel.is_idle()
    os.eventfd_write(ends.work_event, 1)
    assert not ends.channel.is_idle()


def test_a_stub_takes_one_frame_at_a_time_if_the_host_may_reclaim_the_others(ends: Ends) -> None:
    ends.allow_reclaiming()
    ends.wake_early()
    for number in range(3):
        ends.send(m.CloseArena(number))
    for left in (2, 1):
        assert ends.channel.receive_work() == [m.CloseArena(2 - left)]
        assert os.eventfd_read(ends.work_event) == left
        os.eventfd_write(ends.work_event, left)
    assert ends.channel.receive_work() == [m.CloseArena(2)]


def test_a_stub_takes_all_frames_that_nobody_reclaims(ends: Ends) -> None:
    for _ in range(3):
        ends.send()
    assert ends.channel.receive_work() == [WANTED]
    with pytest.raises(BlockingIOError):
        os.eventfd_read(ends.work_event)


def test_a_thread_that_waits_for_room_lets_others_send_once_the_host_has_ended(ends: Ends) -> None:
    """The service thread, which watches for the end of the host, may be one of the others."""
    text = "x" * (RING_BYTES + 1)
    threads = [
        threading.Thread(target=ends.channel.send, args=([m.LogLine(1, "f", 0, text)],))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    ends.end_host()
    for thread in threads:
        thread.join(DEADLINE)
    assert not any(thread.is_alive() for thread in threads)


def test_a_forked_child_does_not_flush_what_its_parent_has_queued(ends: Ends) -> None:
    ends.channel.queue([m.ModelWarning("7")])
    child = os.fork()
    if child == 0:
        ends.channel.flush()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    ends.channel.flush()
    assert ends.received_messages() == [m.ModelWarning("7")]


def test_a_frame_whose_announcement_was_interrupted_is_announced_with_the_next_one(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal handler of the model may raise anywhere."""
    announce = ends.channel._announce

    def interrupt() -> None:
        monkeypatch.setattr(ends.channel, "_announce", announce)
        raise KeyboardInterrupt

    monkeypatch.setattr(ends.channel, "_announce", lambda *_: interrupt())
    with pytest.raises(KeyboardInterrupt):
        ends.channel.send([m.ModelWarning("1")])
    ends.channel.send([m.ModelWarning("2")])
    assert ends.received_messages() == [m.ModelWarning("1"), m.ModelWarning("2")]
