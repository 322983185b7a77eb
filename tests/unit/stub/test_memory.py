"""The stub's memory: exported and imported blocks, and their release."""

from __future__ import annotations

import os
import sys
import threading
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest

import pb_utils
from stub.conversion import request_from_wire, response_to_wire, tensor_from_wire, tensor_to_wire
from stub.memory import SharedMemoryUnavailable, StubMemory
from stub.wire.arena import Arena, Block, create_arena_file
from stub.wire.messages import (
    INLINE_ALWAYS,
    INLINE_LIMIT,
    OpenArena,
    WireRequest,
    WireResponse,
    WireTensor,
)
from stub.wire.shared_file import PAGE
from tests.unit.pb_utils.recording import RecordedResponder

LIMIT = 64 * PAGE


class MemoryFixture:
    """A stub's memory with the host's arena beside it."""

    def __init__(self) -> None:
        self.fds = [create_arena_file("pbhost-test", LIMIT) for _ in range(2)]
        self.host = Arena(0, self.fds[0], LIMIT)
        self.own = Arena(1, self.fds[1], LIMIT)
        self.wakes = 0
        self.memory = StubMemory(self.own, self._wake)
        self.memory.add_inherited_arena(0, self.fds[0], LIMIT)
        self.memory.add_inherited_arena(1, self.fds[1], LIMIT)

    def _wake(self) -> None:
        self.wakes += 1

    def import_block(self, data: bytes, name: str = "x") -> WireTensor:
        """Writes a tensor into the host's arena; returns its reference."""
        block = self.host.write(memoryview(data))
        self.kept = [*getattr(self, "kept", []), block]
        return WireTensor(name, 2, [len(data)], None, 0, block.offset, len(data))


def sent(tensor: pb_utils.Tensor, memory: StubMemory) -> WireTensor:
    """Converts a tensor for a message, and exports its blocks."""
    placed: list[Block] = []
    wire = tensor_to_wire(tensor, memory, placed)
    memory.export_blocks(placed)
    return wire


def converted_response(
    response: pb_utils.InferenceResponse, outputs: str, memory: StubMemory
) -> WireResponse:
    """Converts a response with these outputs for a message, and exports its blocks."""
    placed: list[Block] = []
    wire = response_to_wire(response, list(outputs), memory, placed)
    memory.export_blocks(placed)
    return wire


def used(memory: StubMemory) -> int:
    """Returns the bytes of the stub's arena that are in use."""
    memory.own.trim()
    return memory.own.used


@pytest.fixture
def bench() -> Iterator[MemoryFixture]:
    bench = MemoryFixture()
    yield bench
    for fd in bench.fds:
        os.close(fd)


def large(name: str, count: int = INLINE_LIMIT + 1, value: int = 7) -> pb_utils.Tensor:
    return pb_utils.Tensor(name, np.full(count, value, dtype=np.uint8))


def test_an_imported_block_shows_the_owners_bytes_until_its_last_user_is_deleted(
    bench: MemoryFixture,
) -> None:
    tensor = tensor_from_wire(bench.import_block(b"abc" * 5000), bench.memory)
    array = tensor.as_numpy(copy=False)
    assert bench.memory.take_releases() is None
    del tensor
    assert array.tobytes() == b"abc" * 5000
    assert bench.memory.take_releases() is None
    del array
    ended = bench.memory.take_releases()
    assert ended is not None
    assert ended.blocks == [(0, 0, 1)]
    assert bench.memory.take_releases() is None


def test_releases_are_reported_together_with_their_counts(bench: MemoryFixture) -> None:
    wire, other = bench.import_block(b"x" * 9000), bench.import_block(b"y" * 9000)
    imported = [tensor_from_wire(wire, bench.memory) for _ in range(3)]
    imported.append(tensor_from_wire(other, bench.memory))
    imported.clear()
    ended = bench.memory.take_releases()
    assert ended is not None
    assert sorted(ended.blocks) == [(0, wire.offset, 3), (0, other.offset, 1)]


def test_releases_wake_the_service_thread_unless_the_batch_reports_them(
    bench: MemoryFixture,
) -> None:
    imported = [tensor_from_wire(bench.import_block(b"x" * 9000), bench.memory) for _ in range(6)]
    bench.memory.begin_batch()
    imported.pop()
    assert bench.wakes == 0  # the next BLS request carries the release
    imported.pop()
    assert bench.wakes == 1
    bench.memory.execute_returned()
    imported.pop()
    ended = bench.memory.end_batch()
    assert ended is not None
    assert sum(count for _, _, count in ended.blocks) == 3
    assert bench.wakes == 1  # the main thread sends them itself
    imported.pop()
    assert bench.wakes == 2


def test_the_end_of_a_batch_leaves_releases_to_a_service_thread_that_looks_for_them(
    bench: MemoryFixture,
) -> None:
    imported = [tensor_from_wire(bench.import_block(b"x" * 9000), bench.memory)]
    bench.memory.set_released_in_time(True)
    bench.memory.begin_batch()
    imported.clear()
    assert bench.memory.end_batch() is None
    assert bench.wakes == 0
    assert bench.memory.take_releases() is not None


def test_a_small_tensor_travels_inline(bench: MemoryFixture) -> None:
    wire = sent(large("x", INLINE_LIMIT), bench.memory)
    assert wire.data == b"\7" * INLINE_LIMIT
    assert (bench.own.used, len(bench.memory.exported)) == (0, 0)


def test_tensors_of_one_message_share_what_the_ring_takes(bench: MemoryFixture) -> None:
    room = 40_000
    bench.memory.ring_free_bytes = lambda: room
    outputs = [large("a", 15_000), large("b", 15_000)]
    both = converted_response(pb_utils.InferenceResponse(outputs), "ab", bench.memory)
    assert [output.data is None for output in both.outputs] == [False, False]
    bench.memory.begin_batch(2)  # a batch of two requests
    both = converted_response(
        pb_utils.InferenceResponse([large("a", 15_000), large("b")]), "ab", bench.memory
    )
    assert [output.data is None for output in both.outputs] == [True, True]
    bench.memory.begin_batch(1)
    room = 0
    wires = [sent(large("x", INLINE_ALWAYS + more), bench.memory) for more in (0, 1)]
    assert [wire.data is None for wire in wires] == [False, True]


def test_a_large_tensor_is_kept_until_the_host_returns_it(bench: MemoryFixture) -> None:
    wire = sent(large("x", 90_000), bench.memory)
    assert (wire.data, wire.arena, wire.size) == (None, 1, 90_000)
    assert used(bench.memory) == 24 * PAGE
    bench.memory.exported.release_block(1, wire.offset, 1)
    assert used(bench.memory) == 0


def test_an_imported_tensor_is_sent_by_reference(bench: MemoryFixture) -> None:
    wire = bench.import_block(b"x" * 9000)
    assert sent(tensor_from_wire(wire, bench.memory), bench.memory) == wire
    assert (bench.own.used, len(bench.memory.exported)) == (0, 0)


def test_the_same_tensor_twice_is_written_once_and_exported_twice(bench: MemoryFixture) -> None:
    tensor = large("x", 90_000)
    assert sent(tensor, bench.memory) == sent(tensor, bench.memory)
    assert (bench.own.used, len(bench.memory.exported)) == (24 * PAGE, 2)


def test_a_response_without_room_is_an_error_with_what_would_help(bench: MemoryFixture) -> None:
    response = pb_utils.InferenceResponse([large("a", 100 * PAGE)])
    wire = converted_response(response, "a", bench.memory)
    assert wire.error is not None
    assert wire.error.message.startswith(
        "Failed to increase the shared memory pool size for key 'pbhost-stub' to "
    )
    assert "raise --arena-byte-size" in wire.error.message
    del response
    assert used(bench.memory) == 0


def test_a_response_whose_second_output_finds_no_room_holds_nothing_of_the_first(
    bench: MemoryFixture,
) -> None:
    response = pb_utils.InferenceResponse([large("a", 40 * PAGE), large("b", 40 * PAGE)])
    assert converted_response(response, "ab", bench.memory).error is not None
    del response
    assert (used(bench.memory), len(bench.memory.exported)) == (0, 0)


def test_each_release_is_reported_once_by_two_threads(bench: MemoryFixture) -> None:
    """The main thread reports releases at the end of a batch, the service thread at any time."""
    counts: list[Counter[int]] = [Counter(), Counter()]
    faults: list[BaseException] = []
    over = threading.Event()

    def tell(counter: Counter[int]) -> None:
        try:
            while not over.is_set() or bench.memory._unsent_releases:
                ended = bench.memory.take_releases()
                for _, offset, count in ended.blocks if ended is not None else ():
                    counter[offset] += count
        except BaseException as fault:
            faults.append(fault)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    threads = [threading.Thread(target=tell, args=(counter,)) for counter in counts]
    try:
        for thread in threads:
            thread.start()
        for number in range(50_000):
            bench.memory._on_import_dropped(0, number % 7)
        over.set()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not faults
    assert counts[0] + counts[1] == Counter(number % 7 for number in range(50_000))


def test_outputs_that_are_not_requested_use_no_memory(bench: MemoryFixture) -> None:
    response = pb_utils.InferenceResponse([large("a", 90_000), large("b", 90_000)])
    wire = converted_response(response, "b", bench.memory)
    assert [output.name for output in wire.outputs] == ["b"]
    assert len(bench.memory.exported) == 1


def test_a_request_that_names_no_outputs_means_those_of_the_configuration(
    bench: MemoryFixture,
) -> None:
    for named, meant in (([], ["A", "B"]), (["B"], ["B"])):
        wire = WireRequest("", [], named, {})
        exchange = RecordedResponder()
        request = request_from_wire(wire, bench.memory, exchange, wire.outputs or ["A", "B"])
        assert sorted(request.requested_output_names()) == meant


def test_another_stubs_arena_is_opened_by_path_and_closed(bench: MemoryFixture) -> None:
    fd = create_arena_file("pbhost-test", LIMIT)
    block = Arena(9, fd, LIMIT).write(memoryview(b"z" * 9000))
    wire = WireTensor("x", 2, [9000], None, 9, block.offset, 9000)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(2):  # the second message, on the other socket, changes nothing
        bench.memory.open_arena(OpenArena(9, f"/proc/{os.getpid()}/fd/{fd}", LIMIT))
    os.close(fd)
    tensor = tensor_from_wire(wire, bench.memory)
    assert tensor.as_numpy(copy=False).tobytes() == b"z" * 9000
    bench.memory.close_arena(9)
    assert tensor.as_numpy(copy=False).tobytes() == b"z" * 9000
    with pytest.raises(
        SharedMemoryUnavailable, match="the shared memory in which tensor 'x' lay is gone"
    ):
        tensor_from_wire(wire, bench.memory)
    del tensor
    assert len(os.listdir("/proc/self/fd")) <= before


def test_the_arena_of_a_process_that_is_gone_cannot_be_opened(bench: MemoryFixture) -> None:
    with pytest.raises(OSError, match="No such file"):
        bench.memory.open_arena(OpenArena(9, "/proc/self/fd/999999", LIMIT))
