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
from stub.wire.payload import INLINE_ALWAYS, INLINE_LIMIT
from stub.wire.ring import (
    RING_BYTES,
    RingError,
    RingReader,
    RingWriter,
    create_ring_file,
    map_rings,
)
from tests.conftest import DEADLINE, ROOT

LONGEST = RING_BYTES // 4
START = 64
ROOM = RING_BYTES - START
WRAP, ELSEWHERE = 0xFFFFFFFE, 0xFFFFFFFF
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


class RingMachine(RuleBasedStateMachine):
    """Writes and reads frames in any order, and compares the ring with a queue."""

    def __init__(self) -> None:
        super().__init__()
        self.guarded = Guarded()
        self.writer = RingWriter(self.guarded.memory)
        self.reader = RingReader(self.guarded.memory)
        self.expected: deque[bytes | None] = deque()
        self.number = 0

    @rule(size=sizes)
    def write_frame(self, size: int) -> None:
        self.number += 1
        frame = frame_of(self.number, size)
        if self.writer.try_write(frame):
            assert size <= LONGEST
            self.expected.append(frame)
            return
        if size <= LONGEST:
            # The ring is full: frames, their lengths, one wrap and the reserved word.
            taken = sum(len(entry or b"") + 8 for entry in self.expected)
            assert taken + (size + 8) + (LONGEST + 8) + 8 > ROOM
        if self.writer.write_overflow_marker():
            self.expected.append(None)

    @rule()
    def write_overflow_marker(self) -> None:
        if self.writer.write_overflow_marker():
            self.expected.append(None)
        else:
            assert self.expected

    @precondition(lambda self: self.expected)
    @rule(count=st.integers(1, 6))
    def read_frames(self, count: int) -> None:
        for _ in range(min(count, len(self.expected))):
            assert self.reader.read_frame() == self.expected.popleft()

    @invariant()
    def nothing_outside_was_written(self) -> None:
        self.guarded.check()

    def teardown(self) -> None:
        while self.expected:
            assert self.reader.read_frame() == self.expected.popleft()
        self.guarded.check()


TestRing = RingMachine.TestCase
TestRing.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)


@given(st.integers(0, ROOM // 4 - 1), st.lists(st.integers(0, 9000), min_size=1, max_size=12))
@settings(max_examples=100, deadline=None)
def test_frames_survive_a_wrap_at_every_alignment(start: int, lengths: list[int]) -> None:
    guarded = Guarded()
    writer, reader = RingWriter(guarded.memory), RingReader(guarded.memory)
    left = start * 4  # bytes to advance both positions by
    while left:
        step = min(left, LONGEST)
        assert writer.try_write(bytes(step - 4))
        assert reader.read_frame() == bytes(step - 4)
        left -= step
    for number, length in enumerate(lengths):
        frame = frame_of(number, length)
        assert writer.try_write(frame)
        assert reader.read_frame() == frame
    guarded.check()


@pytest.mark.parametrize("tail", range(4, 64, 4))
def test_words_at_the_end_of_the_ring_are_used_or_skipped(tail: int) -> None:
    memory = memoryview(bytearray(RING_BYTES))
    writer, reader = RingWriter(memory), RingReader(memory)
    for step in (LONGEST, LONGEST, LONGEST, ROOM - 3 * LONGEST - tail):
        assert writer.try_write(bytes(step - 4))
        reader.read_frame()
    for size in (tail - 4, tail - 3, 0, 17):
        frame = frame_of(size, size)
        assert writer.try_write(frame)
        assert reader.read_frame() == frame


def test_full_ring_still_has_room_for_an_overflow_marker() -> None:
    for size in range(LONGEST - 64, LONGEST):
        memory = memoryview(bytearray(RING_BYTES))
        writer, reader = RingWriter(memory), RingReader(memory)
        frames: list[bytes | None] = []
        for length in (size, 1000, 100, 10, 0):
            while writer.try_write(frame_of(len(frames), length)):
                frames.append(frame_of(len(frames), length))
        assert writer.write_overflow_marker()
        frames.append(None)
        assert [reader.read_frame() for _ in frames] == frames
        assert writer.try_write(b"again")
        assert reader.read_frame() == b"again"


def test_full_ring_refuses_frames_until_it_is_read() -> None:
    memory = memoryview(bytearray(RING_BYTES))
    writer, reader = RingWriter(memory), RingReader(memory)
    count = 0
    while writer.write_overflow_marker():
        count += 1
    assert count == ROOM // 4
    before = bytes(memory[START:])
    assert not writer.try_write(b"")
    assert not writer.write_overflow_marker()
    assert bytes(memory[START:]) == before
    assert reader.read_frame() is None
    assert writer.write_overflow_marker()
    assert not writer.write_overflow_marker()


@pytest.mark.parametrize("size", [LONGEST + 1, 0x7FFFFFFF, 0xFFFFFFFD, WRAP])
def test_a_length_that_the_writer_never_writes_is_an_error(size: int) -> None:
    guarded = Guarded()
    struct.pack_into("<I", guarded.memory, START, size)
    with pytest.raises(RingError):
        RingReader(guarded.memory).read_frame()
    guarded.check()


def test_a_frame_that_would_reach_beyond_the_end_is_an_error() -> None:
    guarded = Guarded()
    writer, reader = RingWriter(guarded.memory), RingReader(guarded.memory)
    for step in (LONGEST, LONGEST, LONGEST, ROOM - 3 * LONGEST - 100):
        assert writer.try_write(bytes(step - 4))
        reader.read_frame()
    struct.pack_into("<I", guarded.memory, RING_BYTES - 100, 97)
    with pytest.raises(RingError, match="97 bytes"):
        reader.read_frame()
    guarded.check()


@given(st.binary(max_size=64), st.lists(st.sampled_from([0, 4, WRAP, ELSEWHERE, LONGEST])))
def test_reader_stays_inside_a_ring_with_arbitrary_contents(noise: bytes, words: list[int]) -> None:
    content = noise + b"".join(struct.pack("<I", word) for word in words)
    memory = memoryview(bytearray(RING_BYTES))
    memory[START : START + len(content)] = content
    middle = START + LONGEST
    memory[middle : middle + len(content)] = content
    reader = RingReader(memory)
    for _ in range(40):
        try:
            frame = reader.read_frame()
        except RingError:
            return
        assert frame is None or len(frame) <= LONGEST


@given(st.integers(0, (1 << 64) - 1), st.lists(st.integers(0, LONGEST), max_size=12))
def test_a_forged_read_position_never_makes_the_writer_leave_its_memory(
    position: int, lengths: list[int]
) -> None:
    guarded = Guarded()
    writer = RingWriter(guarded.memory)
    for number, length in enumerate(lengths):
        struct.pack_into("<Q", guarded.memory, 0, position)
        if not writer.try_write(frame_of(number, length)):
            writer.write_overflow_marker()
    guarded.check()


REVERSING_PROCESS = """
import os, sys
from stub.wire.ring import RingReader, RingWriter, map_rings
descriptor = os.open(sys.argv[1], os.O_RDWR)
to_stub, to_host = map_rings(descriptor)
os.close(descriptor)
reader, writer = RingReader(to_stub), RingWriter(to_host)
while os.read(0, 1):
    assert writer.try_write(reader.read_frame()[::-1] + b"!")
    os.write(1, b"x")
"""


def test_two_processes_share_the_two_rings() -> None:
    """The other process returns every frame, reversed, through its own mapping."""
    fd = create_ring_file("pbhost-test-rings")
    frames = [frame_of(number, number * 37 % 9000) for number in range(200)]
    to_stub, to_host = map_rings(fd)
    writer, reader = RingWriter(to_stub), RingReader(to_host)
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
            assert reader.read_frame() == frame[::-1] + b"!"
        child.stdin.close()
        assert child.wait(DEADLINE) == 0
    os.close(fd)


def test_constants_repeated_here_match_the_module() -> None:
    assert (ring._START, ring._MAX_FRAME, ring._CAPACITY) == (START, LONGEST, ROOM)


READING_PROCESS = """
import os, sys
from stub.wire.ring import RingReader, map_rings
reader = RingReader(map_rings(os.open(sys.argv[1], os.O_RDWR))[0])
while count := len(os.read(0, 64)):
    for _ in range(count):
        reader.read_frame()
    os.write(1, b"x" * count)
"""


def test_writer_sees_free_space_while_the_reader_advances() -> None:
    """If a position were not written atomically, the ring would look unread for a moment."""
    fd = create_ring_file("pbhost-test-rings")
    writer = RingWriter(map_rings(fd)[0])
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
    writer, reader = RingWriter(memory), RingReader(memory)
    assert writer.inline_limit() == INLINE_LIMIT
    seen = []
    while writer.try_write(bytes(INLINE_LIMIT // 2)):
        seen.append(writer.inline_limit())
    assert sorted(seen, reverse=True) == seen
    assert seen[0] == INLINE_LIMIT
    assert INLINE_ALWAYS <= seen[-1] < INLINE_LIMIT // 4
    for _ in seen:
        assert reader.read_frame() is not None
    assert writer.inline_limit() == INLINE_LIMIT


def test_closed_ring_still_reports_an_inline_limit() -> None:
    """After a stub has died, its scheduler may still send work."""
    writer = RingWriter(memoryview(bytearray(RING_BYTES)))
    assert writer.try_write(bytes(1000))
    writer.close()
    assert INLINE_ALWAYS <= writer.inline_limit() <= INLINE_LIMIT
