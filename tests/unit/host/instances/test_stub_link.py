"""The connection to one stub: rings in shared memory, and ZeroMQ for its service thread."""

from __future__ import annotations

import asyncio
import gc
import os
import resource
import struct
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from host.instances.busy_polling import BusyPoller
from host.instances.host_channel import Channel
from host.instances.stub_link import Link, ReclaimedFrame
from stub.wire import messages as m
from stub.wire.ring import (
    BLS_RING,
    HOST_RING,
    RECLAIMABLE,
    RING_BYTES,
    WORK_RING,
    RingError,
    RingReader,
    RingWriter,
    map_ring,
)
from tests.conftest import DEADLINE
from tests.descriptors import descriptors
from tests.waiting import eventually

START = 64  # of the frames in a ring


class FakeChannel:
    """The frames that would be sent over ZeroMQ."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, bytes]] = []
        self.handlers: dict[str, Callable[[bytes], None]] = {}

    def register(self, token: str, handler: Callable[[bytes], None]) -> None:
        self.handlers[token] = handler

    def unregister(self, token: str) -> None:
        del self.handlers[token]

    def send(self, token: str, frame: bytes) -> None:
        self.sent.append((token, frame))


class LinkWithStub:
    """A link, and the stub's ends of its rings and sockets."""

    def __init__(self) -> None:
        self.channel = FakeChannel()
        self.received: list[bytes] = []
        self.faults: list[Exception] = []
        self.link = Link(cast(Channel, self.channel), BusyPoller(), self.faults.append)
        self.link.start_reading(self.received.extend)
        rings = self.link.rings_fd
        self.inbox = RingReader(map_ring(rings, WORK_RING), self.link.work_event, reclaimable=True)
        self.memory = map_ring(rings, HOST_RING)
        self.writer = RingWriter(self.memory)
        self.bls_inbox = RingReader(map_ring(rings, BLS_RING), self.link.bls_event)
        self.say = self.channel.handlers[self.link.token]

    def put(self, frame: bytes) -> None:
        os.eventfd_write(self.link.host_event, self.writer.write(frame))

    def put_the_rest(self) -> None:
        """Writes what the ring had no room for."""
        self.link.read_announced()
        while self.writer.unsent:
            os.eventfd_write(self.link.host_event, self.writer.flush())
            self.link.read_announced()


def with_link(test: Callable[[LinkWithStub], None]) -> None:
    async def main() -> None:
        ends = LinkWithStub()
        try:
            test(ends)
        finally:
            ends.link.close()
            ends.link.close()

    asyncio.run(main())


def test_the_socket_of_a_stub_brings_its_first_frame_and_no_other() -> None:
    def test(ends: LinkWithStub) -> None:
        ends.say(b"hello")
        for number in range(1000):
            ends.say(b"%d" % number)
        ends.put(b"announced")
        ends.link.read_announced()
        assert ends.received == [b"hello", b"announced"]
        assert ends.link.dropped_frames == 1000

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

        def received(frames: Sequence[bytes]) -> None:
            ends.received += frames
            if len(ends.received) == 2:
                both.set()

        ends.link._inbox._on_frames = received
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


@pytest.mark.parametrize("size", [RING_BYTES // 4 + 1, RING_BYTES, 5 * RING_BYTES])
def test_a_long_frame_keeps_its_place_between_others(size: int) -> None:
    def test(ends: LinkWithStub) -> None:
        frames = [b"1", os.urandom(size), b"3", os.urandom(size), b"5"]
        for frame in frames:
            ends.put(frame)
        ends.put_the_rest()
        assert ends.received == frames

    with_link(test)


@given(st.lists(st.sampled_from([1, 5000, RING_BYTES // 4 + 1, RING_BYTES]), max_size=12))
@settings(max_examples=40, deadline=None)
def test_frames_of_all_sizes_keep_their_order(sizes: list[int]) -> None:
    def test(ends: LinkWithStub) -> None:
        frames = [bytes([number]) * size for number, size in enumerate(sizes, 1)]
        for number, frame in enumerate(frames):
            ends.put(frame)
            if number % 3 == 2:
                ends.link.read_announced()
        ends.put_the_rest()
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


def test_a_frame_for_which_there_is_no_memory_is_reported_and_nothing_is_read_after_it() -> None:
    def test(ends: LinkWithStub) -> None:
        class Pieces(list[bytes]):
            """Too long for memory once they are joined."""

            def __iter__(self) -> Iterator[bytes]:
                raise MemoryError

        inbox = ends.link._inbox
        ends.put(bytes(RING_BYTES // 4 + 1))
        inbox._pieces = Pieces()
        ends.link.read_announced()
        assert [type(fault) for fault in ends.faults] == [MemoryError]
        assert "no memory for a frame of 131073 bytes" in str(ends.faults[0])
        assert inbox._pieces == []
        ends.put(b"later")
        ends.link.read_announced()
        assert ends.received == [] and len(ends.faults) == 1

    with_link(test)


def test_a_stub_cannot_send_a_frame_of_any_length() -> None:
    def test(ends: LinkWithStub) -> None:
        ends.link._inbox._pieces = [b"read before"]
        ends.link._inbox._pieces_bytes = (1 << 31) + (1 << 24)
        ends.put(b"the end")
        ends.link.read_announced()
        assert [type(fault) for fault in ends.faults] == [RingError]

    with_link(test)


def test_work_goes_into_the_ring_and_is_announced() -> None:
    def test(ends: LinkWithStub) -> None:
        ends.link.send_work([m.Finalize()])
        assert ends.inbox.receive_announcements() and ends.inbox.announced == 1
        frame = ends.inbox.read_frame()
        assert frame is not None
        assert m.decode_to_stub(frame) == [m.Finalize()]
        assert ends.channel.sent == []

    with_link(test)


async def frames_of(reader: RingReader, count: int) -> list[bytes]:
    """The next frames, read as they come."""
    frames: list[bytes] = []

    def all_came() -> bool:
        reader.receive_announcements()
        while (frame := reader.read_frame()) is not None:
            frames.append(frame)
        return len(frames) >= count

    await eventually(all_came, f"{count} frames")
    return frames


def test_work_longer_than_the_ring_arrives_before_what_follows_it() -> None:
    async def main() -> None:
        ends = LinkWithStub()
        messages = [m.Initialize("x", m.ModelSource("/", 1, "m"), {"config": "x" * RING_BYTES}, [])]
        ends.link.send_work(messages)
        ends.link.send_work([m.Finalize()])
        assert await frames_of(ends.inbox, 2) == [m.encode(messages), m.encode([m.Finalize()])]
        assert ends.channel.sent == []
        ends.link.close()

    asyncio.run(main())


def test_service_messages_do_not_use_the_ring() -> None:
    def test(ends: LinkWithStub) -> None:
        ends.link.send_service([m.CancelRequest(1, 0)])
        assert ends.channel.sent == [(ends.link.token, m.encode([m.CancelRequest(1, 0)]))]

    with_link(test)


def test_bls_responses_go_into_their_ring_and_are_announced() -> None:
    def test(ends: LinkWithStub) -> None:
        messages = [m.BlsResponse(1, None), m.BlsResponse(2, None)]
        ends.link.send_bls_responses(messages)
        assert ends.bls_inbox.receive_announcements() and ends.bls_inbox.announced == 1
        frame = ends.bls_inbox.read_frame()
        assert frame is not None and m.decode_to_stub(frame) == messages
        assert ends.channel.sent == []

    with_link(test)


def test_bls_responses_that_a_stub_does_not_read_wait_for_it() -> None:
    async def main() -> None:
        ends = LinkWithStub()
        sent = [[m.BlsResponse(number, None)] for number in range(100_000)]
        for messages in sent:
            ends.link.send_bls_responses(messages)
        frames = await frames_of(ends.bls_inbox, len(sent))
        assert [m.decode_to_stub(frame) for frame in frames] == sent
        assert ends.channel.sent == []
        ends.link.close()

    asyncio.run(main())


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


def test_frames_whose_reader_closes_the_link_are_the_last_ones() -> None:
    async def main() -> None:
        ends = LinkWithStub()
        received: list[bytes] = []

        def close(frames: Sequence[bytes]) -> None:
            received.extend(frames)
            ends.link.close()

        ends.link._inbox._on_frames = close
        for number in range(500):
            ends.put(b"%d" % number)
        await eventually(lambda: bool(received), "the first frames")
        await asyncio.sleep(0)
        assert len(received) == 128

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


def batches_in(frame: bytes) -> list[int]:
    """The numbers of the batches in a frame that has nothing else."""
    batches = [each for each in m.decode_to_stub(frame) if isinstance(each, m.Execute)]
    assert m.encode(batches) == frame
    return [batch.batch for batch in batches]


def announced(ends: LinkWithStub) -> list[list[int]]:
    """The numbers of the batches in the frames of work that were announced since the last time."""
    inbox = ends.inbox
    frames: list[list[int]] = []
    while inbox.announced or inbox.receive_announcements():
        frame = inbox.read_frame()
        assert frame is not None
        frames.append(batches_in(frame))
    return frames


def test_work_of_a_turn_for_a_busy_stub_shares_frames_of_at_most_sixteen_batches() -> None:
    async def main() -> None:
        ends = LinkWithStub()
        for number in range(1 + 16 + 2):
            ends.link.send_work(execute(number))
        assert announced(ends) == [[0], [*range(1, 17)]]
        await asyncio.sleep(0)
        assert announced(ends) == [[17, 18]]
        await asyncio.sleep(0)
        assert announced(ends) == []
        ends.link.send_work(execute(19))
        ends.link.close()
        await asyncio.sleep(0)  # it is dropped

    asyncio.run(main())


def test_work_with_messages_about_memory_starts_a_frame() -> None:
    """The batch ahead may wait for a BLS response in that memory."""

    async def main() -> None:
        ends = LinkWithStub()
        opening = m.OpenArena(7, "/proc/1/fd/3", 4096)
        for number in range(3):
            ends.link.send_work(execute(number))
        ends.link.send_work([opening, *execute(3)])
        ends.link.send_work(execute(4))
        await asyncio.sleep(0)
        ends.inbox.receive_announcements()
        frames = [ends.inbox.read_frame() for _ in range(3)]
        kinds = [[type(each) for each in m.decode_to_stub(frame or b"")] for frame in frames]
        assert kinds == [[m.Execute], [m.Execute] * 2, [m.OpenArena, m.Execute, m.Execute]]
        ends.link.close()

    asyncio.run(main())


def test_asking_for_room_sends_no_work_before_the_end_of_the_turn() -> None:
    async def main() -> None:
        ends = LinkWithStub()
        for number in range(4):
            ends.link.send_work(execute(number))
            ends.link.inline_limit()
        assert announced(ends) == [[0]]
        await asyncio.sleep(0)
        assert announced(ends) == [[1, 2, 3]]
        ends.link.close()

    asyncio.run(main())


def test_a_closed_link_gives_back_no_work_that_waited() -> None:
    async def main() -> None:
        ends = LinkWithStub()
        ends.link.send_work(execute(1))
        ends.link.send_work(execute(2), reclaimable(2))
        ends.link.close()
        assert ends.link.reclaim_frames(2) == []

    asyncio.run(main())


def test_stub_that_answered_gets_all_of_its_work_at_once() -> None:
    async def main() -> None:
        ends = LinkWithStub()
        for number in range(3):
            ends.link.send_work(execute(number))
        ends.put(b"an answer")
        ends.link.read_announced()
        ends.link.send_work(execute(3))
        assert announced(ends) == [[0], [1, 2, 3]]
        ends.link.close()

    asyncio.run(main())


def test_held_work_comes_with_the_response_that_the_stub_waits_for() -> None:
    async def main() -> None:
        ends = LinkWithStub()
        ends.link.send_work(execute(0))
        for number in range(1, 20):
            ends.link.send_work(execute(number), held=True)
        await asyncio.sleep(0)
        assert announced(ends) == [[0]]
        ends.link.send_work([m.BlsResponse(7, None)])
        ends.inbox.receive_announcements()
        frame = ends.inbox.read_frame()
        assert frame is not None and not ends.inbox.announced
        *held, response = m.decode_to_stub(frame)
        assert [each.batch for each in held if isinstance(each, m.Execute)] == [*range(1, 20)]
        assert isinstance(response, m.BlsResponse)
        ends.link.close()

    asyncio.run(main())


def test_other_work_does_not_wait_for_what_is_held() -> None:
    async def main() -> None:
        ends = LinkWithStub()
        ends.link.send_work(execute(0))
        ends.link.send_work(execute(1), held=True)
        ends.link.send_work(execute(2))
        await asyncio.sleep(0)
        assert announced(ends) == [[0], [1, 2]]
        ends.link.close()

    asyncio.run(main())


def test_room_in_the_ring_is_what_earlier_work_of_the_turn_leaves() -> None:
    def test(ends: LinkWithStub) -> None:
        ends.link.send_work(execute(1))
        room = ends.link.inline_limit()
        source = m.ModelSource("/", 1, "x" * (RING_BYTES // 2))
        ends.link.send_work([m.AutoComplete(source, "")])
        ends.link.send_work([m.AutoComplete(m.ModelSource("/", 1, "x" * (RING_BYTES // 3)), "")])
        assert ends.link.inline_limit() < room

    with_link(test)


class TakingStub:
    """The stub's end of the ring of work: takes one frame at a time."""

    def __init__(self, ends: LinkWithStub) -> None:
        self._ends = ends
        self._taken: deque[int] = deque()

    def take(self) -> int | None:
        """The number of the next batch, if one was announced."""
        inbox = self._ends.inbox
        if not self._taken:
            if not inbox.announced:
                inbox.receive_announcements()
            frame = inbox.read_frame()
            if frame is None:
                return None
            self._taken += batches_in(frame)
        return self._taken.popleft()


def test_frames_that_the_stub_has_not_taken_are_reclaimed() -> None:
    async def main() -> None:
        ends = LinkWithStub()
        stub = TakingStub(ends)
        ends.link.send_work(execute(1))
        for number in (2, 3, 4):
            ends.link.send_work(execute(number), reclaimable(number))
        assert ends.link.reclaim_frames(1) == [reclaimable(4)]
        await asyncio.sleep(0)
        assert (stub.take(), stub.take()) == (1, 2)
        assert ends.link.reclaim_frames(9) == [reclaimable(3)]
        assert stub.take() is None
        ends.link.send_work(execute(5), reclaimable(5))
        assert ends.link.reclaim_frames(9) == [reclaimable(5)]
        ends.link.close()

    asyncio.run(main())


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
