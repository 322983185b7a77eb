"""Arenas: contents of blocks, limits, memory use, and concurrent access."""

from __future__ import annotations

import gc
import json
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from stub.wire import arena as arena_module
from stub.wire.arena import Arena, ArenaFull, ArenaReader, Block, create_arena_file, file_size
from stub.wire.shared_file import PAGE
from tests.conftest import DEADLINE, ROOT

MIB = 1 << 20
SECTOR = 512  # unit of st_blocks


@pytest.fixture
def fd() -> Iterator[int]:
    descriptor = create_arena_file("pbhost-test", 4 * MIB)
    yield descriptor
    os.close(descriptor)


def resident(fd: int) -> int:
    """Returns the bytes of memory that the file uses."""
    return os.fstat(fd).st_blocks * SECTOR


def contents(number: int, size: int) -> bytes:
    return bytes([number % 251 + 1]) * size


def write(arena: Arena, data: bytes) -> Block:
    return arena.write(memoryview(data))


class ArenaMachine(RuleBasedStateMachine):
    """Writes and drops blocks in any order, and compares the arena with a list of living blocks."""

    LIMIT = 64 * PAGE
    blocks = Bundle("blocks")

    def __init__(self) -> None:
        super().__init__()
        self.fd = create_arena_file("pbhost-test", self.LIMIT)
        self.arena = Arena(7, self.fd, self.LIMIT)
        self.reader = ArenaReader(self.fd, self.LIMIT)
        self.live: dict[int, tuple[Block, bytes]] = {}
        self.number = 0

    @rule(
        target=blocks,
        size=st.one_of(st.integers(0, 3 * PAGE), st.integers(0, 70 * PAGE), st.just(5 * PAGE)),
    )
    def write(self, size: int) -> int:
        self.number += 1
        data = contents(self.number, size)
        used = self.used()
        try:
            block = write(self.arena, data)
        except ArenaFull as full:
            assert (full.requested, full.used, full.allowed) == (size, used, self.LIMIT)
            room = "its limit" not in str(full)
            assert room or used + arena_module._size_class(size) > self.LIMIT
        else:
            assert (block.arena, block.size) == (7, size)
            self.live[self.number] = (block, data)
        return self.number

    @rule(number=consumes(blocks))
    def drop(self, number: int) -> None:
        self.live.pop(number, None)

    @rule()
    def trim(self) -> None:
        more = self.arena.trim()
        assert more == (self.arena.warm > 0)
        assert self.arena.used == self.used()

    @rule()
    def trim_until_nothing_is_left_to_give(self) -> None:
        self.arena.trim()
        assert not self.arena.trim()
        assert self.arena.used == self.used()
        assert resident(self.fd) == self.arena.used

    def used(self) -> int:
        return sum(arena_module._size_class(len(data)) for _, data in self.live.values())

    @invariant()
    def contents_are_intact(self) -> None:
        for block, data in self.live.values():
            assert block.data == data
            assert self.reader.slice(block.offset, block.size) == data

    @invariant()
    def blocks_do_not_overlap(self) -> None:
        end = 0
        for block in sorted((block for block, _ in self.live.values()), key=lambda b: b.offset):
            assert block.offset >= end
            end = block.offset + max(1, block.size)
        assert end <= file_size(self.LIMIT)

    @invariant()
    def accounts_are_right_and_the_limit_holds(self) -> None:
        arena = self.arena
        with arena._lock:
            arena._collect_dropped()
        assert arena.used == self.used()
        assert 0 <= arena.warm
        assert arena.used + arena.warm <= self.LIMIT
        assert resident(self.fd) == arena.used + arena.warm

    def teardown(self) -> None:
        self.live.clear()
        self.arena.trim()
        self.arena.trim()
        assert (self.arena.used, self.arena.warm, resident(self.fd)) == (0, 0, 0)
        os.close(self.fd)


TestArena = ArenaMachine.TestCase
TestArena.settings = settings(max_examples=40, stateful_step_count=50, deadline=None)


@given(st.integers(0, 1 << 50))
def test_a_block_is_never_too_small_nor_a_quarter_too_large(size: int) -> None:
    given_ = arena_module._size_class(size)
    assert given_ % PAGE == 0
    assert given_ >= max(size, 1)
    assert given_ <= max(PAGE, (size + PAGE - 1) // PAGE * PAGE * 5 // 4)
    assert arena_module._size_class(given_) == given_


def test_blocks_cannot_be_written_to(fd: int) -> None:
    block = write(Arena(0, fd, 4 * MIB), b"abc")
    assert block.data.readonly
    reader = ArenaReader(fd, 4 * MIB)
    assert reader.slice(block.offset, 3).readonly


def test_full_arena_reports_requested_used_and_allowed_bytes(fd: int) -> None:
    arena = Arena(0, fd, 4 * MIB)
    block = write(arena, bytes(3 * MIB))
    with pytest.raises(ArenaFull) as caught:
        write(arena, bytes(2 * MIB))
    full = caught.value
    assert (full.requested, full.used, full.allowed) == (2 * MIB, 3 * MIB, 4 * MIB)
    assert str(full) == (
        f"{2 * MIB} bytes were requested from a tensor arena that uses {3 * MIB} of {4 * MIB} bytes"
        " (its limit)"
    )
    del block
    assert write(arena, bytes(2 * MIB)).size == 2 * MIB


def test_a_full_arena_reuses_the_memory_of_free_blocks_of_other_sizes(fd: int) -> None:
    arena = Arena(0, fd, 4 * MIB)
    for size in (4 * MIB, 3 * MIB, 2 * MIB, MIB, 4 * MIB):
        write(arena, bytes(size))
        assert resident(fd) <= 4 * MIB


def test_lack_of_memory_fails_only_that_block(monkeypatch: pytest.MonkeyPatch, fd: int) -> None:
    arena = Arena(0, fd, 4 * MIB)
    real = os.posix_fallocate

    def lacking(descriptor: int, offset: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", lacking)
    for _ in range(3):
        with pytest.raises(ArenaFull, match=r"\(No space left on device\)"):
            write(arena, bytes(PAGE))
    monkeypatch.setattr(os, "posix_fallocate", real)
    block = write(arena, b"abc")
    assert (block.offset, arena.used, resident(fd)) == (0, PAGE, PAGE)


def test_many_different_sizes_exhaust_the_addresses_with_an_error() -> None:
    limit = 8 * PAGE
    fd = create_arena_file("pbhost-test", limit)
    arena = Arena(0, fd, limit)
    with pytest.raises(ArenaFull, match=r"\(too many different sizes\)"):
        for pages in range(8, 0, -1):
            kept = [write(arena, bytes(pages * PAGE)) for _ in range(8 // pages)]
            del kept
    os.close(fd)


def test_trim_returns_memory_after_a_burst_and_keeps_used_blocks(fd: int) -> None:
    arena = Arena(0, fd, 4 * MIB)
    kept = write(arena, b"kept" * 1000)
    burst = [write(arena, bytes(100_000)) for _ in range(20)]
    assert resident(fd) >= 2_000_000
    del burst
    assert arena.trim()  # another burst may follow
    assert resident(fd) >= 2_000_000
    assert not arena.trim()
    assert resident(fd) == arena.used == PAGE
    assert kept.data == b"kept" * 1000
    again = write(arena, contents(3, 100_000))
    assert again.data == contents(3, 100_000)


def test_trim_keeps_the_memory_needed_since_the_last_trim(fd: int) -> None:
    arena = Arena(0, fd, 4 * MIB)
    arena.trim()
    for _ in range(5):
        for _ in range(10):
            write(arena, bytes(MIB))
        assert arena.trim()
        assert resident(fd) == arena.warm == MIB


def test_a_block_may_be_dropped_in_another_thread(fd: int) -> None:
    arena = Arena(0, fd, 4 * MIB)
    blocks = [write(arena, contents(number, PAGE)) for number in range(100)]
    threads = [threading.Thread(target=blocks.pop) for _ in range(100)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    del threads
    arena.trim()
    assert arena.used == 0


def test_concurrent_writers_get_separate_blocks() -> None:
    fd = create_arena_file("pbhost-test", 16 * MIB)
    arena = Arena(0, fd, 16 * MIB)
    wrong: list[int] = []

    def work(number: int) -> None:
        held: list[tuple[Block, bytes]] = []
        for turn in range(200):
            data = contents(number * 7 + turn, 1 + turn * 97 % (5 * PAGE))
            held.append((write(arena, data), data))
            if len(held) > 6:
                block, expected = held.pop(turn % len(held))
                if block.data != expected:
                    wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    arena.trim()
    arena.trim()
    assert (arena.used, arena.warm, resident(fd)) == (0, 0, 0)
    os.close(fd)


class _Cycle:
    def __init__(self, block: Block) -> None:
        self.block = block
        self.itself = self


def test_garbage_collector_may_drop_a_block_inside_arena_code(
    monkeypatch: pytest.MonkeyPatch, fd: int
) -> None:
    """A finaliser may run at any allocation, also while the arena's lock is held."""
    arena = Arena(0, fd, 4 * MIB)
    gc.disable()
    try:
        _Cycle(write(arena, bytes(MIB)))
        real = Arena._reserve

        def reserve(self: Arena, asked: int, size: int) -> int:
            gc.collect()
            return real(self, asked, size)

        monkeypatch.setattr(Arena, "_reserve", reserve)
        block = write(arena, contents(1, PAGE))
        assert block.data == contents(1, PAGE)
        assert arena.used == PAGE + MIB  # the block was dropped, and the next call collects it
        arena.trim()
        assert arena.used == PAGE
    finally:
        gc.enable()


def test_a_view_outlives_the_arena(fd: int) -> None:
    block = write(Arena(0, fd, 4 * MIB), b"still here")
    gc.collect()
    assert bytes(block.data) == b"still here"


READ = """
import json, os, sys
from stub.wire.arena import ArenaReader
path, limit, places = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
descriptor = os.open(path, os.O_RDONLY)
reader = ArenaReader(descriptor, limit)
os.close(descriptor)
for place in places:
    sys.stdout.buffer.write(reader.slice(*place))
"""


def test_another_process_reads_what_the_writer_wrote(fd: int) -> None:
    arena = Arena(0, fd, 4 * MIB)
    written = [contents(number, size) for number, size in enumerate((0, 1, PAGE, 300_000))]
    blocks = [write(arena, data) for data in written]
    places = json.dumps([(block.offset, block.size) for block in blocks])
    path = f"/proc/{os.getpid()}/fd/{fd}"
    child = subprocess.run(
        [sys.executable, "-c", READ, path, str(4 * MIB), places],
        stdout=subprocess.PIPE,
        cwd=ROOT,
        timeout=DEADLINE,
        check=True,
    )
    assert child.stdout == b"".join(written)


@pytest.mark.parametrize(
    ("offset", "size"),
    [(-1, 1), (0, -1), (0, 16 * MIB + 1), (16 * MIB, 1), (1 << 70, 1), (1, 1 << 70)],
)
def test_a_reference_outside_of_the_arena_is_refused(fd: int, offset: int, size: int) -> None:
    assert file_size(4 * MIB) == 16 * MIB
    with pytest.raises(ValueError, match="lies outside its arena"):
        ArenaReader(fd, 4 * MIB).slice(offset, size)


def test_an_arena_takes_no_memory_before_it_is_used() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    fd = create_arena_file("pbhost-test", 1 << 36)
    Arena(0, fd, 1 << 36)
    ArenaReader(fd, 1 << 36)
    assert resident(fd) == 0
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # KiB
    os.close(fd)
