"""Rings with the compiled lane hold, and give, the same bytes and errors as those of Python."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from host.instances.ring_link import FrameReceiver, FrameSender
from host.lane import read_record, state, write_record
from stub.wire import ring
from stub.wire.ring import RING_BYTES, RingError, RingReader, RingWriter
from tests.conftest import ALL

pytestmark = pytest.mark.skipif(read_record is None, reason=f"the compiled lane is {state}")

MAX_BYTES = 400_000  # of a frame

Step = tuple[str, int]

SIZES = st.sampled_from(
    [*range(9), 63, 64, 157, 5_000, 65_536, 131_071, 131_072, 131_073, 300_000]
) | st.integers(0, 140_000)
STEPS: st.SearchStrategy[list[Step]] = st.lists(
    st.tuples(st.sampled_from(["write"] * 4 + ["flush"]), SIZES)
    | st.tuples(st.just("read"), st.integers(1, 6))
    | st.tuples(
        st.sampled_from(["length", "position"]),
        st.sampled_from([0, 1, 3, 131_072, 131_073, 1 << 31, (1 << 31) + 1, (1 << 32) - 1])
        | st.integers(0, (1 << 32) - 1),
    )
    | st.tuples(st.sampled_from(["announce"]), st.integers(1, 3)),
    max_size=40,
)


class Ends:
    """Both ends of a ring: with the lane, or those of Python."""

    def __init__(self, lane: bool) -> None:
        self.memory = memoryview(bytearray(RING_BYTES))
        self.sender: RingWriter
        self.reader: RingReader
        if lane:
            self.sender = FrameSender(self.memory, lambda records: None)
            self.reader = FrameReceiver(self.memory, -1, lambda error: None)
            self.reader._max_bytes = MAX_BYTES
        else:
            self.sender = RingWriter(self.memory)
            self.reader = RingReader(self.memory, -1, MAX_BYTES)

    def step(self, name: str, value: int) -> Any:
        sender, reader = self.sender, self.reader
        if name == "write":
            self.announce(sender.write(bytes((value & 0xFF,)) * value))
        elif name == "flush":
            self.announce(sender.flush())
        elif name == "announce":
            self.announce(value)  # of records that were not written
        elif name == "position":
            self.memory[:8] = struct.pack("<q", value - 100)
        elif name == "length":
            at = ring._START + reader._read % ring._CAPACITY
            self.memory[at : at + 4] = struct.pack("<I", value)
        else:
            return [self.read() for _ in range(value)]
        return None

    def announce(self, records: int) -> None:
        """As `receive_announcements`."""
        if records:
            self.reader.announced += records
            self.reader._limit = self.reader._read + ring._CAPACITY

    def read(self) -> bytes | str | None:
        frames: list[bytes] = []
        try:
            if not isinstance(self.reader, FrameReceiver):
                return self.reader.read_frame()
            self.reader.read_frames(frames, 1)
            return frames[0] if frames else None
        except (RingError, MemoryError, IndexError, ValueError) as error:
            self.reader.announced = 0
            return repr(error)

    def state(self) -> tuple[object, ...]:
        sender, reader = self.sender, self.reader
        return (
            sender.written,
            [bytes(frame) for frame in sender.unsent],
            reader.announced,
            reader._read,
            reader._pieces,
            bytes(self.memory),
        )


def assert_equal(steps: list[Step]) -> None:
    lane, python = Ends(True), Ends(False)
    for name, value in steps:
        assert lane.step(name, value) == python.step(name, value)
        assert lane.state() == python.state()


@given(STEPS)
@settings(max_examples=1_000 if ALL else 100, deadline=None)
def test_rings_are_equal(steps: list[Step]) -> None:
    assert_equal(steps)


@pytest.mark.parametrize("size", [0, 1, 3, 4, 157, 100_000, 131_072])
def test_frames_that_wrap_around_are_equal(size: int) -> None:
    assert_equal(
        [("write", size), ("read", 1)] * (RING_BYTES // (size + 8) + 3 if size > 90 else 9)
    )


def test_the_lane_takes_whole_frames_only() -> None:
    assert read_record is not None and write_record is not None
    memory = memoryview(bytearray(RING_BYTES))
    assert write_record(memory, 0, b"frame") == 12
    assert write_record(memory, 12, b"") == 16
    assert read_record(memory, 0, 12) == b"frame"
    assert read_record(memory, 0, 11) is None  # not announced
    assert read_record(memory, 12, 16) == b""
    last = ring._CAPACITY - 4
    assert write_record(memory, last, b"x") == 0  # at the end of the ring
    assert write_record(memory, ring._CAPACITY, b"") == 0  # there is no room
    assert write_record(memory, last, b"") == last + 4
    assert read_record(memory, last, last + 4) == b""
    memory[:8] = struct.pack("<q", last + 1)  # more was read than was written
    assert write_record(memory, last, b"") == 0
    for length in (131_073, 1 << 31, (1 << 32) - 4, (1 << 32) - 1):
        memory[64:68] = struct.pack("<I", length)
        assert read_record(memory, 0, 1 << 62) is None


@pytest.mark.parametrize("closed", [memoryview(b""), memoryview(bytes(RING_BYTES))])
def test_the_lane_writes_nothing_into_other_memory(closed: memoryview) -> None:
    assert write_record is not None and read_record is not None
    assert write_record(closed, 0, b"frame") == 0
    assert read_record(closed[:-1], 0, 100) is None
