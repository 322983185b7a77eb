"""The host's end of the connection: frames in the order they were said, whatever way they took."""

from __future__ import annotations

import asyncio
import gc
import os
import resource
import struct
from collections.abc import Callable
from itertools import pairwise
from random import Random
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from host.instances.busy_polling import BusyPoller
from host.instances.channel import Channel
from host.instances.link import Link, ReclaimedFrame
from stub.wire import messages as m
from stub.wire.ring import (
    END_OF_OVERFLOW,
    RECLAIMABLE,
    RING_BYTES,
    RingError,
    RingReader,
    RingWriter,
    map_bls_ring,
    map_rings,
)
from tests.conftest import DEADLINE
from tests.descriptors import descriptors

START = 64  # of the frames in a ring


class FakeChannel:
    """The frames that would be sent over ZeroMQ."""

    def __init__(self) -> None:
        self.sent: list[tuple[bytes, bytes]] = []
        self.handlers: dict[str, Callable[[bytes], None]] = {}

    def register(self, token: str, handler: Callable[[bytes], None]) -> None:
        self.handlers[token] = handler

    def unregister(self, token: str) -> None:
        del self.handlers[token]

    def send(self, address: bytes, frame: bytes) -> None:
        self.sent.append((address, frame))


class LinkWithStub:
    """A link, and the stub's ends of its rings and sockets."""

    def __init__(self) -> None:
        self.channel = FakeChannel()
        self.received: list[bytes] = []
        self.faults: list[Exception] = []
        self.link = Link(cast(Channel, self.channel), BusyPoller(), self.faults.append)
        self.link.start_reading(self.received.append)
        to_stub, self.memory = map_rings(self.link.rings_fd)
        self.inbox = RingReader(to_stub)
        self.writer = RingWriter(self.memory)
        self.bls_inbox = RingReader(map_bls_ring(self.link.rings_fd))
        self.say = self.channel.handlers[self.link.token]

    def hello(self) -> None:
        for number in range(3):
            self.say(b"hello %d" % number)

    def put(self, frame: bytes) -> None:
        assert self.writer.try_write(frame)
        os.eventfd_write(self.link.host_event, 1)

    def put_overflow_marker(self) -> None:
        assert self.writer.write_overflow_marker()
        os.eventfd_write(self.link.host_event, 1)


def with_link(test: Callable[[LinkWithStub], None]) -> None:
    async def main() -> None:
        ends = LinkWithStub()
        try:
            test(ends)
        finally:
            ends.link.close()
            ends.link.close()

    asyncio.run(main())


def test_a_stub_is_connected_when_all_its_sockets_are() -> None:
    def test(ends: LinkWithStub) -> None:
        ends.say(b"hello 1")
        ends.say(b"hello 2")
        assert ends.received == []
        ends.say(b"hello 3")
        assert ends.received == [b"hello 3"]

    with_link(test)


def test_other_callbacks_run_between_the_frames_of_a_flood() -> None:
    async def main() -> None:
        ends = LinkWithStub()
        for number in range(500):
            ends.put(b"%d" % number)
        counts = [0]
        while counts[-1] < 500:
            await asyncio.sleep(0)
            counts.append(len(ends.received))
        assert max(after - before for before, after in pairwise(counts)) <= 128
        assert ends.received == [b"%d" % number for number in range(500)]
        ends.link.close()

    asyncio.run(main())


def test_reading_what_is_announced_reads_all_of_it() -> None:
    def test(ends: LinkWithStub) -> None:
        for number in range(500):
            ends.put(b"%d" % number)
        ends.link.read_announced()
        assert len(ends.received) == 500

    with_link(test)


def test_the_stub_sees_the_levels_of_log_lines() -> None:
    def test(ends: LinkWithStub) -> None:
        assert ends.inbox.flags() == 0
        ends.link.set_log_levels(0b0111)
        assert ends.inbox.flags() == 0b0111

    with_link(test)


def test_announced_frame_is_read_by_the_event_loop() -> None:
    async def main() -> None:
        ends = LinkWithStub()
        both = asyncio.Event()

        def received(frame: bytes) -> None:
            ends.received.append(frame)
            if len(ends.received) == 2:
                both.set()

        ends.link._on_frame = received
        ends.put(b"a")
        ends.put(b"b")
        await asyncio.wait_for(both.wait(), DEADLINE)
        assert ends.received == [b"a", b"b"]
        ends.link.close()

    asyncio.run(main())


def test_a_frame_that_was_not_announced_is_not_read() -> None:
    def test(ends: LinkWithStub) -> None:
        ends.writer.try_write(b"a")
        ends.link.read_announced()
        assert ends.received == []
        os.eventfd_write(ends.link.host_event, 1)
        ends.link.read_announced()
        assert ends.received == [b"a"]

    with_link(test)


def test_frames_behind_a_late_overflow_frame_wait_for_it() -> None:
    def test(ends: LinkWithStub) -> None:
        ends.hello()
        ends.received.clear()
        ends.put(b"1")
        ends.put_overflow_marker()
        ends.put(b"3")
        late = ends.link.read_announced()
        assert ends.received == [b"1"]
        assert late is not None and not late.done()
        ends.put(b"4")
        later = ends.link.read_announced()
        assert ends.received == [b"1"]
        assert later is not None and later is not late
        ends.say(b"2")
        assert ends.received == [b"1", b"2", b"3", b"4"]
        assert late.done() and later.done()
        assert ends.link.read_announced() is None

    with_link(test)


def test_closing_the_link_ends_the_wait_for_a_late_frame() -> None:
    def test(ends: LinkWithStub) -> None:
        ends.hello()
        ends.put_overflow_marker()
        late = ends.link.read_announced()
        assert late is not None and not late.done()
        ends.link.close()
        assert late.done()

    with_link(test)


def test_the_wait_lasts_until_all_late_frames_are_here() -> None:
    def test(ends: LinkWithStub) -> None:
        ends.hello()
        ends.received.clear()
        for _ in range(300):
            ends.put_overflow_marker()
        late = ends.link.read_announced()
        assert late is not None
        for number in range(300):
            assert not late.done()
            ends.say(b"%d" % number)
        assert late.done()

    with_link(test)


def test_early_overflow_frame_waits_for_its_marker() -> None:
    def test(ends: LinkWithStub) -> None:
        ends.hello()
        ends.received.clear()
        ends.say(b"2")
        assert ends.received == []
        ends.put(b"1")
        ends.put_overflow_marker()
        ends.link.read_announced()
        assert ends.received == [b"1", b"2"]

    with_link(test)


@given(st.lists(st.booleans(), max_size=30), st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_frame_order_is_kept_across_ring_and_socket(elsewhere: list[bool], chance: Random) -> None:
    """Each frame takes the ring or goes elsewhere; the two ways run at paces of their own."""

    def test(ends: LinkWithStub) -> None:
        ends.hello()
        ends.received.clear()
        frames = [b"%d" % number for number in range(len(elsewhere))]
        events = [("ring", number) for number in range(len(frames))]
        late = [number for number, other in enumerate(elsewhere) if other]
        while events or late:
            pick = chance.random()
            if events and (pick < 0.5 or not late):
                number = events.pop(0)[1]
                if elsewhere[number]:
                    ends.put_overflow_marker()
                else:
                    ends.put(frames[number])
            elif late:
                ends.say(frames[late.pop(0)])
            if pick < 0.3:
                ends.link.read_announced()
        ends.link.read_announced()
        assert ends.received == frames

    with_link(test)


def test_a_damaged_ring_is_reported_once_and_not_read_again() -> None:
    def test(ends: LinkWithStub) -> None:
        ends.put(b"good")
        struct.pack_into("<I", ends.memory, START + 8, 0x7FFFFFFF)
        os.eventfd_write(ends.link.host_event, 2)
        ends.link.read_announced()
        assert ends.received == [b"good"]
        assert [type(fault) for fault in ends.faults] == [RingError]

    with_link(test)


def test_work_goes_into_the_ring_and_is_announced() -> None:
    def test(ends: LinkWithStub) -> None:
        ends.link.send_work([m.Finalize()])
        assert os.eventfd_read(ends.link.work_event) == 1
        frame = ends.inbox.read_frame()
        assert frame is not None
        assert m.decode_to_stub(frame) == [m.Finalize()]
        assert ends.channel.sent == []

    with_link(test)


def test_work_too_long_for_the_ring_is_sent_over_the_socket() -> None:
    async def main() -> None:
        ends = LinkWithStub()
        messages = [m.Initialize("x", m.ModelSource("/", 1, "m"), {"config": "x" * RING_BYTES}, [])]
        ends.link.send_work(messages)
        ends.link.send_work([m.Finalize()])
        await asyncio.sleep(0)
        assert os.eventfd_read(ends.link.work_event) == 2
        assert ends.inbox.read_frame() is None
        assert ends.inbox.read_frame() == m.encode([m.Finalize()])
        address = ends.link.token.encode() + b"w"
        assert ends.channel.sent == [(address, m.encode(messages))]
        ends.link.close()

    asyncio.run(main())


def test_service_messages_do_not_use_the_ring() -> None:
    def test(ends: LinkWithStub) -> None:
        ends.link.send_service([m.CancelRequest(1, 0)])
        address = ends.link.token.encode() + b"s"
        assert ends.channel.sent == [(address, m.encode([m.CancelRequest(1, 0)]))]

    with_link(test)


def test_bls_responses_go_into_their_ring_and_are_announced() -> None:
    def test(ends: LinkWithStub) -> None:
        messages = [m.BlsResponse(1, None), m.BlsResponse(2, None)]
        ends.link.send_bls_responses(messages)
        assert os.eventfd_read(ends.link.bls_event) == 1
        frame = ends.bls_inbox.read_frame()
        assert frame is not None and m.decode_to_stub(frame) == messages
        assert ends.channel.sent == []

    with_link(test)


def test_bls_responses_that_a_stub_does_not_read_use_the_socket_until_it_does() -> None:
    def test(ends: LinkWithStub) -> None:
        def send(number: int) -> None:
            ends.link.send_bls_responses([m.BlsResponse(number, None)])

        sent = 0
        while not ends.channel.sent:  # a stub that sleeps
            sent += 1
            send(sent)
        send(sent + 1)
        address, service = ends.link.token.encode() + b"s", ends.channel.sent
        assert [m.decode_to_stub(frame) for _, frame in service] == [
            [m.BlsResponse(sent, None)],
            [m.BlsResponse(sent + 1, None)],
        ]
        assert {to for to, _ in service} == {address}
        assert os.eventfd_read(ends.link.bls_event) == sent  # the last one is the marker
        for number in range(1, sent):
            frame = ends.bls_inbox.read_frame()
            assert frame is not None
            assert m.decode_to_stub(frame) == [m.BlsResponse(number, None)]
        assert ends.bls_inbox.read_frame() is None
        service.clear()
        send(sent + 2)
        assert service == [(address, END_OF_OVERFLOW)]
        frame = ends.bls_inbox.read_frame()
        assert frame is not None and m.decode_to_stub(frame) == [m.BlsResponse(sent + 2, None)]

    with_link(test)


def test_a_closed_link_sends_nothing_reads_nothing_and_holds_nothing() -> None:
    async def main() -> None:
        gc.collect()
        before = descriptors()
        ends = LinkWithStub()
        ends.put(b"unread")
        ends.link.close()
        ends.link.read_announced()
        ends.link.send_work([m.Finalize()])
        assert (ends.received, ends.channel.sent, ends.channel.handlers) == ([], [], {})
        del ends
        gc.collect()
        assert not descriptors() - before

    asyncio.run(main())


def test_a_frame_whose_reader_closes_the_link_is_the_last_one() -> None:
    async def main() -> None:
        ends = LinkWithStub()
        received: list[bytes] = []

        def close(frame: bytes) -> None:
            received.append(frame)
            ends.link.close()

        ends.link._on_frame = close
        ends.put(b"1")
        ends.put(b"2")
        ends.link.read_announced()
        assert received == [b"1"]

    asyncio.run(main())


def test_every_link_has_a_token_of_its_own() -> None:
    async def main() -> None:
        links = [LinkWithStub().link for _ in range(5)]
        assert len({link.token for link in links}) == 5
        for link in links:
            link.close()

    asyncio.run(main())


@pytest.mark.parametrize("count", [1, 2, 500])
def test_several_announcements_may_come_as_one(count: int) -> None:
    def test(ends: LinkWithStub) -> None:
        for number in range(count):
            assert ends.writer.try_write(b"%d" % number)
        os.eventfd_write(ends.link.host_event, count)
        ends.link.read_announced()
        assert ends.received == [b"%d" % number for number in range(count)]

    with_link(test)


@pytest.mark.parametrize("room", range(4))
def test_link_without_free_descriptors_leaks_none(room: int) -> None:
    """A host that is at its limit would otherwise never get away from it."""

    async def main() -> None:
        gc.collect()
        before = len(os.listdir("/proc/self/fd"))
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        free = os.dup(0)
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free + room, limits[1]))
        try:
            with pytest.raises(OSError, match="Too many open files"):
                LinkWithStub()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        gc.collect()
        assert len(os.listdir("/proc/self/fd")) == before

    asyncio.run(main())


def test_few_frames_wait_for_an_announcement_and_the_others_are_dropped() -> None:
    def test(ends: LinkWithStub) -> None:
        ends.hello()
        ends.received.clear()
        for number in range(1000):
            ends.say(b"%d" % number)
        assert ends.link.dropped_frames == 968
        for _ in range(32):
            ends.put_overflow_marker()
        ends.link.read_announced()
        assert ends.received == [b"%d" % number for number in range(32)]
        assert not ends.faults

    with_link(test)


def test_few_frames_wait_for_earlier_ones_in_the_ring() -> None:
    def test(ends: LinkWithStub) -> None:
        ends.hello()
        ends.received.clear()
        for _ in range(10_000):
            ends.put(b"small")
        for _ in range(100):
            ends.put_overflow_marker()
        for number in range(100):
            ends.say(b"%d" % number)
        assert ends.received == [b"small"] * 10_000 + [b"%d" % number for number in range(100)]
        assert ends.link.dropped_frames == 0

    with_link(test)


FULL_COUNTER = "it has filled the counter of the frames that it is sent"


def test_a_stub_that_fills_the_counter_of_its_bls_responses_is_reported() -> None:
    def test(ends: LinkWithStub) -> None:
        os.eventfd_write(ends.link.bls_event, 2**64 - 2)
        ends.link.send_bls_responses([m.BlsResponse(1, None)])
        assert [str(fault) for fault in ends.faults] == [FULL_COUNTER]

    with_link(test)


def test_a_stub_that_fills_the_counter_of_its_work_is_reported() -> None:
    def test(ends: LinkWithStub) -> None:
        os.eventfd_write(ends.link.work_event, 2**64 - 2)
        ends.link.send_work([m.Finalize()])
        assert [str(fault) for fault in ends.faults] == [FULL_COUNTER]

    with_link(test)


def execute(number: int) -> list[m.ToStub]:
    return [m.Execute(number, [])]


def reclaimable(number: int) -> ReclaimedFrame:
    return number, (m.CloseArena(number),)


class TakingStub:
    """The stub's end of the ring of work: takes one frame at a time."""

    def __init__(self, ends: LinkWithStub) -> None:
        self._ends = ends

    def take(self) -> int | None:
        """The number of the next batch, if one was announced."""
        event = self._ends.link.work_event
        try:
            announced = os.eventfd_read(event)
        except BlockingIOError:
            return None
        if announced > 1:
            os.eventfd_write(event, announced - 1)
        frame = self._ends.inbox.read_frame()
        assert frame is not None
        (message,) = m.decode_to_stub(frame)
        assert isinstance(message, m.Execute)
        return message.batch


def test_frames_that_the_stub_has_not_taken_are_reclaimed() -> None:
    def test(ends: LinkWithStub) -> None:
        stub = TakingStub(ends)
        ends.link.send_work(execute(1))
        for number in (2, 3, 4):
            ends.link.send_work(execute(number), reclaimable(number))
        assert ends.link.reclaim_frames(1) == [reclaimable(4)]
        assert (stub.take(), stub.take()) == (1, 2)
        assert ends.link.reclaim_frames(9) == [reclaimable(3)]
        assert stub.take() is None
        ends.link.send_work(execute(5), reclaimable(5))
        assert ends.link.reclaim_frames(9) == [reclaimable(5)]

    with_link(test)


def test_no_frame_before_one_that_stays_is_reclaimed() -> None:
    def test(ends: LinkWithStub) -> None:
        ends.link.send_work(execute(1), reclaimable(1))
        ends.link.send_work([m.BlsResponse(1, None)])
        assert ends.link.reclaim_frames(9) == []
        ends.link.send_work(execute(2), reclaimable(2))
        large = "x" * RING_BYTES
        ends.link.send_work([m.Initialize("x", m.ModelSource("/", 1, large), {}, [])])
        assert ends.link.reclaim_frames(9) == []

    with_link(test)


def test_log_levels_do_not_tell_the_stub_to_take_all_frames() -> None:
    def test(ends: LinkWithStub) -> None:
        assert ends.inbox.flags() == 0
        ends.link.send_work(execute(1), reclaimable(1))
        ends.link.set_log_levels(0b1010)
        assert ends.inbox.flags() == RECLAIMABLE | 0b1010

    with_link(test)


@given(st.lists(st.sampled_from(["stay", "send", "send", "take", "take", "reclaim", "turn"])))
@settings(deadline=None)
def test_each_frame_is_taken_or_reclaimed_in_order(events: list[str]) -> None:
    async def main() -> None:
        ends = LinkWithStub()
        stub = TakingStub(ends)
        expected: list[int] = []  # numbers of batches that were sent and not taken
        stays: set[int] = set()
        for number, event in enumerate(events, 1):
            if event == "stay":
                ends.link.send_work(execute(number))
                expected.append(number)
                stays.add(number)
            elif event == "send":
                ends.link.send_work(execute(number), reclaimable(number))
                expected.append(number)
            elif event == "take" and (taken := stub.take()) is not None:
                assert taken == expected.pop(0)
            elif event == "reclaim":
                newest: list[ReclaimedFrame] = []
                while expected and expected[-1] not in stays:
                    newest.insert(0, reclaimable(expected.pop()))
                assert ends.link.reclaim_frames(99) == newest
            elif event == "turn":
                await asyncio.sleep(0)  # busy stubs are told of their frames
        await asyncio.sleep(0)
        while expected:
            assert stub.take() == expected.pop(0)
        assert stub.take() is None
        ends.link.close()

    asyncio.run(main())
