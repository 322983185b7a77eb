"""The ring against a plain queue, and against memory that another process has overwritten."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from stub.wire import ring
from stub.wire.messages import INLINE_ALWAYS, INLINE_LIMIT
from stub.wire.ring import (
    RECLAIMABLE,
    RING_BYTES,
    RingError,
    RingReader,
    RingWriter,
    create_ring_file,
    map_ring,
)
from tests.conftest import DEADLINE, ROOT

LONGEST = RING_BYTES // 4
START = 64
ROOM = RING_BYTES - START
WRAP, MORE = 0xFFFFFFFF, 1 << 31
GUARD = b"\xa5" * 4096

sizes = st.one_of(
    st.integers(0, 40),
    st.integers(LONGEST - 8, LONGEST + 8),
    st.integers(0, LONGEST),
    st.integers(1000, 5000),
)


class Guarded:
    """The memory of a ring between two guard areas that must not change."""

    def __init__(self) -> None:
        self._all = bytearray(GUARD + bytes(RING_BYTES) + GUARD)
        self.memory = memoryview(self._all)[len(GUARD) : len(GUARD) + RING_BYTES]

    def check(self) -> None:
        assert self._all[: len(GUARD)] == GUARD
        assert self._all[-len(GUARD) :] == GUARD


def frame_of(number: int, size: int) -> bytes:
    """Returns bytes that differ from those of the neighbouring frames."""
    return bytes([number % 251 + 1]) * size


class Interrupted(bytes):
    """A frame whose first use is interrupted."""

    interrupted = False

    def __len__(self) -> int:
        if not self.interrupted:
            self.interrupted = True
            raise KeyboardInterrupt
        return super().__len__()


class Reader(RingReader):
    """A reader that is told of records without an eventfd."""

    def __init__(self, memory: memoryview, max_bytes: int = sys.maxsize) -> None:
        super().__init__(memory, -1, max_bytes)

    def read_record(self) -> bytes | None:
        """The frame that ends with the next record, if one does."""
        self.announced += 1
        return self.read_frame()


class RingMachine(RuleBasedStateMachine):
    """Writes and reads frames in any order, and compares the ring with a queue."""

    def __init__(self) -> None:
        super().__init__()
        self.guarded = Guarded()
        self.writer = RingWriter(self.guarded.memory)
        self.reader = Reader(self.guarded.memory)
        self.expected: deque[bytes] = deque()
        self.records = 0  # that were written and not read
        self.number = 0

    @rule(size=sizes)
    def write_frame(self, size: int) -> None:
        self.number += 1
        frame = frame_of(self.number, size)
        self.records += self.writer.write(frame)
        self.expected.append(frame)

    @rule()
    def flush(self) -> None:
        self.records += self.writer.flush()

    @precondition(lambda self: self.records)
    @rule(count=st.integers(1, 6))
    def read_records(self, count: int) -> None:
        for _ in range(min(count, self.records)):
            self.read_record()

    def read_record(self) -> None:
        self.records -= 1
        frame = self.reader.read_record()
        if frame is not None:
            assert frame == self.expected.popleft()

    @invariant()
    def nothing_outside_was_written(self) -> None:
        self.guarded.check()

    @invariant()
    def an_empty_ring_has_room(self) -> None:
        if not self.records:
            self.records += self.writer.flush()
            assert self.records or not self.writer.unsent

    def teardown(self) -> None:
        while self.expected:
            if not self.records:
                self.records += self.writer.flush()
            self.read_record()
        assert not self.records and not self.writer.unsent
        self.guarded.check()


TestRing = RingMachine.TestCase
TestRing.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)


@given(st.integers(0, ROOM // 4 - 1), st.lists(st.integers(0, 9000), min_size=1, max_size=12))
@settings(max_examples=100, deadline=None)
def test_frames_survive_a_wrap_at_every_alignment(start: int, lengths: list[int]) -> None:
    guarded = Guarded()
    writer, reader = RingWriter(guarded.memory), Reader(guarded.memory)
    left = start * 4  # bytes to advance both positions by
    while left:
        step = min(left, LONGEST)
        assert writer.try_write(bytes(step - 4))
        assert reader.read_record() == bytes(step - 4)
        left -= step
    for number, length in enumerate(lengths):
        frame = frame_of(number, length)
        assert writer.try_write(frame)
        assert reader.read_record() == frame
    guarded.check()


@pytest.mark.parametrize("tail", range(4, 64, 4))
def test_words_at_the_end_of_the_ring_are_used_or_skipped(tail: int) -> None:
    memory = memoryview(bytearray(RING_BYTES))
    writer, reader = RingWriter(memory), Reader(memory)
    for step in (LONGEST, LONGEST, LONGEST, ROOM - 3 * LONGEST - tail):
        assert writer.try_write(bytes(step - 4))
        reader.read_record()
    for size in (tail - 4, tail - 3, 0, 17):
        frame = frame_of(size, size)
        assert writer.try_write(frame)
        assert reader.read_record() == frame


def test_full_ring_refuses_records_until_it_is_read() -> None:
    memory = memoryview(bytearray(RING_BYTES))
    writer, reader = RingWriter(memory), Reader(memory)
    count = 0
    while writer.try_write(b""):
        count += 1
    assert count == ROOM // 4
    before = bytes(memory[START:])
    assert writer.write(b"") == writer.flush() == 0
    assert bytes(memory[START:]) == before
    assert reader.read_record() == b""
    assert (writer.flush(), len(writer.unsent)) == (1, 0)
    assert not writer.try_write(b"")


def test_a_frame_behind_one_that_waits_waits_too() -> None:
    memory = memoryview(bytearray(RING_BYTES))
    writer, reader = RingWriter(memory), Reader(memory)
    long = os.urandom(RING_BYTES)
    records = writer.write(long)
    assert writer.write(b"short") == 0
    read = []
    while records:
        records -= 1
        read.append(reader.read_record())
        records += writer.flush()
    assert [frame for frame in read if frame is not None] == [long, b"short"]


def test_a_frame_over_the_limit_of_the_reader_is_an_error() -> None:
    memory = memoryview(bytearray(RING_BYTES))
    writer, reader = RingWriter(memory), Reader(memory, LONGEST)
    reader.announced = writer.write(bytes(LONGEST + 1))
    with pytest.raises(RingError, match=f"more than {LONGEST} bytes"):
        reader.read_record()


def test_a_reader_reads_no_more_than_a_ring_of_what_is_announced() -> None:
    """A writer that announces more than the ring holds must not keep the reader busy."""
    memory = memoryview(bytearray(RING_BYTES))
    for position in (START, START + LONGEST, START + 2 * LONGEST):
        struct.pack_into("<I", memory, position, MORE | (LONGEST - 4))
    struct.pack_into("<I", memory, START + 3 * LONGEST, WRAP)
    event = os.eventfd(0, os.EFD_NONBLOCK)
    reader = RingReader(memory, event)
    os.eventfd_write(event, 1000)
    assert reader.receive_announcements()
    with pytest.raises(RingError, match="than the ring holds"):
        reader.read_frame()
    assert len(reader._pieces) <= 3
    os.close(event)


def test_only_a_reader_of_reclaimable_frames_leaves_some_of_them_announced() -> None:
    """The memory of the host's rings belongs to the stub as well, with this flag."""
    for reclaimable, learned in ((False, 3), (True, 1)):
        memory, event = memoryview(bytearray(RING_BYTES)), os.eventfd(0, os.EFD_NONBLOCK)
        RingWriter(memory).set_flags(RECLAIMABLE)
        reader = RingReader(memory, event, reclaimable=reclaimable)
        os.eventfd_write(event, 3)
        assert reader.receive_announcements() and reader.announced == learned
        os.close(event)


def test_records_of_a_flush_that_an_exception_ends_are_announced_by_the_next_one() -> None:
    """A signal handler of the model may raise anywhere."""
    memory = memoryview(bytearray(RING_BYTES))
    writer, reader = RingWriter(memory), Reader(memory)
    while writer.write(bytes(LONGEST)):
        pass
    writer.unsent.append(Interrupted(b"after it"))  # type: ignore[arg-type]
    for _ in range(3):
        assert reader.read_record() == bytes(LONGEST)
    with pytest.raises(KeyboardInterrupt):
        writer.flush()
    assert (writer.flush(), reader.read_record()) == (2, bytes(LONGEST))
    assert reader.read_record() == b"after it"


def test_an_empty_record_that_continues_is_an_error() -> None:
    memory = memoryview(bytearray(RING_BYTES))
    struct.pack_into("<I", memory, START, MORE)
    with pytest.raises(RingError, match="0 bytes"):
        Reader(memory).read_record()


def test_frames_that_are_announced_together_are_within_the_limit_of_the_reader() -> None:
    """The writer fills the ring as often as it can, also with frames longer than the ring."""
    memory = memoryview(bytearray(RING_BYTES))
    event = os.eventfd(0, os.EFD_NONBLOCK)
    writer, reader = RingWriter(memory), RingReader(memory, event)
    sizes = [1, 3, 2000, LONGEST, LONGEST + 1, RING_BYTES, 70_000] * 6
    frames = [frame_of(number, size) for number, size in enumerate(sizes)]
    records, read = sum(writer.write(frame) for frame in frames), 0
    while records:
        os.eventfd_write(event, records)
        assert reader.receive_announcements()
        while (frame := reader.read_frame()) is not None:
            assert frame == frames[read]
            read += 1
        records = writer.flush()
    assert read == len(frames)
    os.close(event)


@pytest.mark.parametrize("size", [LONGEST + 1, 0x7FFFFFFF, 0xFFFFFFFD, WRAP, MORE | (LONGEST + 1)])
def test_a_length_that_the_writer_never_writes_is_an_error(size: int) -> None:
    guarded = Guarded()
    struct.pack_into("<I", guarded.memory, START, size)
    with pytest.raises(RingError):
        Reader(guarded.memory).read_record()
    guarded.check()


def test_a_frame_that_would_reach_beyond_the_end_is_an_error() -> None:
    guarded = Guarded()
    writer, reader = RingWriter(guarded.memory), Reader(guarded.memory)
    for step in (LONGEST, LONGEST, LONGEST, ROOM - 3 * LONGEST - 100):
        assert writer.try_write(bytes(step - 4))
        reader.read_record()
    struct.pack_into("<I", guarded.memory, RING_BYTES - 100, 97)
    with pytest.raises(RingError, match="97 bytes"):
        reader.read_record()
    guarded.check()


@given(st.binary(max_size=64), st.lists(st.sampled_from([0, 4, WRAP, MORE, MORE | 8, LONGEST])))
def test_reader_stays_inside_a_ring_with_arbitrary_contents(noise: bytes, words: list[int]) -> None:
    content = noise + b"".join(struct.pack("<I", word) for word in words)
    memory = memoryview(bytearray(RING_BYTES))
    memory[START : START + len(content)] = content
    middle = START + LONGEST
    memory[middle : middle + len(content)] = content
    reader = Reader(memory)
    for _ in range(40):
        try:
            frame = reader.read_record()
        except RingError:
            return
        assert frame is None or len(frame) <= 40 * LONGEST


@given(st.integers(0, (1 << 64) - 1), st.lists(st.integers(0, LONGEST), max_size=12))
def test_a_forged_read_position_never_makes_the_writer_leave_its_memory(
    position: int, lengths: list[int]
) -> None:
    guarded = Guarded()
    writer = RingWriter(guarded.memory)
    for number, length in enumerate(lengths):
        struct.pack_into("<Q", guarded.memory, 0, position)
        writer.write(frame_of(number, length))
    guarded.check()


REVERSING_PROCESS = """
import os, sys
from stub.wire.ring import RingReader, RingWriter, map_ring
descriptor = os.open(sys.argv[1], os.O_RDWR)
reader, writer = RingReader(map_ring(descriptor, 0), -1), RingWriter(map_ring(descriptor, 1))
os.close(descriptor)
while os.read(0, 1):
    reader.announced += 1
    assert writer.try_write(reader.read_frame()[::-1] + b"!")
    os.write(1, b"x")
"""


def test_two_processes_share_the_two_rings() -> None:
    """The other process returns every frame, reversed, through its own mapping."""
    fd = create_ring_file("pbhost-test-rings", 2)
    frames = [frame_of(number, number * 37 % 9000) for number in range(200)]
    writer, reader = RingWriter(map_ring(fd, 0)), Reader(map_ring(fd, 1))
    path = f"/proc/{os.getpid()}/fd/{fd}"
    with subprocess.Popen(
        [sys.executable, "-c", REVERSING_PROCESS, path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
        bufsize=0,
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        for frame in frames:
            assert writer.try_write(frame)
            child.stdin.write(b"x")
            assert child.stdout.read(1) == b"x"
            assert reader.read_record() == frame[::-1] + b"!"
        child.stdin.close()
        assert child.wait(DEADLINE) == 0
    os.close(fd)


def test_constants_repeated_here_match_the_module() -> None:
    assert (ring._START, ring._MAX_RECORD, ring._CAPACITY) == (START, LONGEST, ROOM)


READING_PROCESS = """
import os, sys
from stub.wire.ring import RingReader, map_ring
reader = RingReader(map_ring(os.open(sys.argv[1], os.O_RDWR), 0), -1)
while count := len(os.read(0, 64)):
    for _ in range(count):
        reader.announced += 1
        reader.read_frame()
    os.write(1, b"x" * count)
"""


def test_writer_sees_free_space_while_the_reader_advances() -> None:
    """If a position were not written atomically, the ring would look unread for a moment."""
    fd = create_ring_file("pbhost-test-rings", 2)
    writer = RingWriter(map_ring(fd, 0))
    with subprocess.Popen(
        [sys.executable, "-c", READING_PROCESS, f"/proc/{os.getpid()}/fd/{fd}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
        bufsize=0,
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        under_way = 0
        for number in range(100_000):
            assert writer.try_write(b"x" * 100), f"no room for frame {number} behind {under_way}"
            under_way += 1
            child.stdin.write(b"x")
            while under_way > 32:
                under_way -= len(child.stdout.read(64))
        child.stdin.close()
        assert child.wait(DEADLINE) == 0
    os.close(fd)


def test_inline_limit_shrinks_as_the_ring_fills() -> None:
    memory = memoryview(bytearray(RING_BYTES))
    writer, reader = RingWriter(memory), Reader(memory)
    assert writer.inline_limit() == INLINE_LIMIT
    seen = []
    while writer.try_write(bytes(INLINE_LIMIT // 2)):
        seen.append(writer.inline_limit())
    assert sorted(seen, reverse=True) == seen
    assert seen[0] == INLINE_LIMIT
    assert INLINE_ALWAYS <= seen[-1] < INLINE_LIMIT // 4
    for _ in seen:
        assert reader.read_record() is not None
    assert writer.inline_limit() == INLINE_LIMIT


def test_closed_ring_still_reports_an_inline_limit() -> None:
    """After a stub has died, its scheduler may still send work."""
    writer = RingWriter(memoryview(bytearray(RING_BYTES)))
    assert writer.try_write(bytes(1000))
    writer.close()
    assert INLINE_ALWAYS <= writer.inline_limit() <= INLINE_LIMIT
