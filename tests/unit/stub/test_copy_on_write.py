"""Gives models writable arrays over received tensors without a copy, by copy-on-write mappings."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

import pb_utils
import stub.copy_on_write
from pb_utils import _storage
from pb_utils._storage import address_of
from stub.conversion import tensor_from_wire, tensor_to_wire
from stub.copy_on_write import CopyOnWriteMapping
from stub.memory import StubMemory
from stub.wire.arena import Arena, Block, create_arena_file
from stub.wire.messages import OpenArena, WireTensor
from stub.wire.shared_file import PAGE

SIZE = 1 << 18  # bytes: the minimum for a view
LIMIT = 64 * SIZE
REGION = 5  # arena number of a client's region


def is_possible() -> bool:
    fd = create_arena_file("pbhost-test", PAGE)
    try:
        CopyOnWriteMapping(fd, PAGE, 0, False)
    except (OSError, ValueError):
        return False
    finally:
        os.close(fd)
    return True


pytestmark = pytest.mark.skipif(
    not is_possible(), reason="needs Linux 5.14 or later, overcommit, and no limit of addresses"
)


class ViewsFixture:
    """A stub's memory, with the host's arena and a client's region."""

    def __init__(self) -> None:
        self.fds = [create_arena_file("pbhost-test", LIMIT) for _ in range(3)]
        self.host = Arena(0, self.fds[0], LIMIT)
        self.wakes = 0
        self.memory = StubMemory(Arena(1, self.fds[1], LIMIT), self.wake)
        self.memory.add_inherited_arena(0, self.fds[0], LIMIT)
        self.memory.add_inherited_arena(1, self.fds[1], LIMIT)
        path = f"/proc/self/fd/{self.fds[2]}"
        self.memory.open_arena(OpenArena(REGION, path, LIMIT, region=True))
        self.views = self.memory.views
        _storage.set_copy_on_write_mapper(self.views.map_array)

    def wake(self) -> None:
        self.wakes += 1

    def close(self) -> None:
        _storage.set_copy_on_write_mapper(_storage._no_mapping)
        for fd in self.fds:
            os.close(fd)

    def export_block(self, value: int, size: int = SIZE) -> tuple[Block, WireTensor]:
        """Writes a tensor into the host's arena."""
        block = self.host.write(memoryview(bytes([value]) * size))
        return block, WireTensor("x", 2, [size], None, 0, block.offset, size)

    def receive(self, wire: WireTensor) -> npt.NDArray[np.uint8]:
        """Returns the model's array of a tensor."""
        return tensor_from_wire(wire, self.memory).as_numpy()

    def write_region(self, value: int, offset: int = 0, size: int = SIZE) -> WireTensor:
        """Writes a tensor into the client's region."""
        os.pwrite(self.fds[2], bytes([value]) * size, offset)
        return WireTensor("x", 2, [size], None, REGION, offset, size)

    def is_mapped(self, array: npt.NDArray[np.uint8]) -> bool:
        """Returns whether the array is a view and not a copy."""
        return any(span.address == address_of(array) for span in self.views._views)


@pytest.fixture
def bench() -> Iterator[ViewsFixture]:
    bench = ViewsFixture()
    bench.views.begin_batch(regions=True)
    yield bench
    bench.close()


def test_an_array_is_mapped_without_a_copy(bench: ViewsFixture) -> None:
    _, wire = bench.export_block(3)
    array = bench.receive(wire)
    assert bench.is_mapped(array)
    assert array.flags.writeable and array.flags.aligned and not array.flags.owndata
    assert (array == 3).all()


def test_writes_of_a_model_do_not_change_the_block(bench: ViewsFixture) -> None:
    block, wire = bench.export_block(3)
    array = bench.receive(wire)
    array[:] = 4
    assert (array == 4).all()
    assert bytes(block.data) == bytes([3]) * SIZE


def test_written_pages_are_reverted_before_the_next_array(bench: ViewsFixture) -> None:
    _, wire = bench.export_block(3)
    bench.receive(wire)[5000] = 4
    for _ in range(65):
        array = bench.receive(wire)
        assert (array == 3).all()
    assert bench.is_mapped(array)


def test_a_model_that_writes_gets_copies_for_a_while_and_each_time_for_longer(
    bench: ViewsFixture,
) -> None:
    _, wire = bench.export_block(3)
    waits = []
    for _ in range(3):
        array = bench.receive(wire)
        assert bench.is_mapped(array)
        array[0] = 4
        del array
        copies = 0
        while not bench.is_mapped(bench.receive(wire)):
            copies += 1
        waits.append(copies)
    assert waits == [64, 128, 256]


def test_enough_unchanged_views_reset_the_backoff(bench: ViewsFixture) -> None:
    _, wire = bench.export_block(3)
    for _ in range(2):
        bench.receive(wire)[0] = 4
        for _ in range(64):
            assert not bench.is_mapped(bench.receive(wire))
        for _ in range(128):
            assert bench.is_mapped(bench.receive(wire))


def test_a_kept_array_does_not_change(bench: ViewsFixture) -> None:
    block, wire = bench.export_block(3)
    array = bench.receive(wire)
    bench.views.end_batch()
    offset = block.offset
    del block  # the block may be reused now
    ended = bench.memory.take_releases()
    assert ended is not None and ended.blocks == [(0, offset, 1)]  # even while the array is alive
    other, _ = bench.export_block(9)
    assert other.offset == offset
    assert (array == 3).all()


def test_deleting_an_array_releases_its_block(bench: ViewsFixture) -> None:
    _, wire = bench.export_block(3)
    array = bench.receive(wire)
    assert bench.memory.take_releases() is None
    del array
    ended = bench.memory.take_releases()
    assert ended is not None and len(ended.blocks) == 1


def test_two_arrays_of_one_block_are_independent(bench: ViewsFixture) -> None:
    _, wire = bench.export_block(3)
    first, second = bench.receive(wire), bench.receive(wire)
    first[:] = 4
    assert bench.is_mapped(first) and not bench.is_mapped(second)
    assert (second == 3).all()


def test_tensors_that_share_a_page_are_independent(bench: ViewsFixture) -> None:
    bench.write_region(1, 0)
    bench.write_region(2, SIZE + 64)
    first = bench.receive(WireTensor("x", 2, [SIZE + 64], None, REGION, 0, SIZE + 64))
    second = bench.receive(WireTensor("y", 2, [SIZE], None, REGION, SIZE + 64, SIZE))
    first[:] = 7
    assert bench.is_mapped(first)
    assert (second == 2).all()


def test_a_client_region_is_mapped_and_may_change_after_the_batch(
    bench: ViewsFixture,
) -> None:
    array = bench.receive(bench.write_region(3))
    assert bench.is_mapped(array)
    bench.views.end_batch()
    bench.write_region(9)
    assert (array == 3).all()


def test_a_client_region_is_copied_if_responses_may_leave_before_the_end(
    bench: ViewsFixture,
) -> None:
    bench.views.begin_batch(regions=False)
    array = bench.receive(bench.write_region(3))
    bench.write_region(9)
    assert (array == 3).all()
    _, wire = bench.export_block(3)
    assert bench.is_mapped(bench.receive(wire))


def test_an_early_response_detaches_arrays_in_client_regions(
    bench: ViewsFixture,
) -> None:
    array = bench.receive(bench.write_region(3))
    bench.views.detach_from_client_regions()
    bench.write_region(9)
    assert (array == 3).all()
    later = bench.receive(bench.write_region(5, SIZE))
    bench.write_region(9, SIZE)
    assert (later == 5).all()


@pytest.mark.parametrize("offset", [0, PAGE, -PAGE, SIZE // 2, 1 - SIZE, SIZE - 1])
def test_an_output_may_overwrite_an_input_in_the_clients_memory(
    bench: ViewsFixture, offset: int
) -> None:
    place = 4 * SIZE
    array = bench.receive(bench.write_region(3, place))
    room = bench.memory.output_buffer(SIZE, (REGION, place + offset, SIZE))
    assert room is not None
    room[:] = bytes([8]) * SIZE
    assert (array == 3).all()


def test_an_output_may_overwrite_an_input_that_was_registered_by_another_name(
    bench: ViewsFixture,
) -> None:
    path = f"/proc/self/fd/{bench.fds[2]}"
    bench.memory.open_arena(OpenArena(REGION + 1, path, LIMIT - 2 * PAGE, 2 * PAGE, True))
    array = bench.receive(bench.write_region(3))
    assert bench.memory.output_buffer(SIZE, (REGION + 1, 2 * SIZE, SIZE)) is not None
    assert bench.views.unchanged_block_of(array) is None  # the block is in the client's region
    room = bench.memory.output_buffer(SIZE, (REGION + 1, 0, SIZE))
    assert room is not None
    room[:] = bytes([8]) * SIZE
    assert (array == 3).all()


def test_an_unchanged_array_is_sent_by_reference(bench: ViewsFixture) -> None:
    block, wire = bench.export_block(3)
    tensor = pb_utils.Tensor("y", bench.receive(wire).reshape(4, -1))
    placed: list[Block] = []
    sent = tensor_to_wire(tensor, bench.memory, placed)
    assert (sent.arena, sent.offset, sent.size) == (0, block.offset, SIZE)
    assert sent.shape == [4, SIZE // 4]
    assert bench.memory.own.used == 0


@pytest.mark.parametrize("change", ["written", "part", "reversed", "client"])
def test_any_other_array_is_sent_with_its_present_content(bench: ViewsFixture, change: str) -> None:
    _, wire = bench.export_block(3)
    if change == "client":
        wire = bench.write_region(3)
    array = bench.receive(wire)
    if change == "written":
        array[-1] = 4
    elif change == "part":
        array = array[PAGE:]
    elif change == "reversed":
        array = array[::-1]
    expected = array.tobytes()
    sent = tensor_to_wire(pb_utils.Tensor("y", array), bench.memory, [])
    assert sent.arena == 1
    reader = bench.memory._readers[1]
    assert bytes(reader.slice(sent.offset, sent.size)) == expected


def test_another_thread_gets_a_copy(bench: ViewsFixture) -> None:
    _, wire = bench.export_block(3)
    got: list[npt.NDArray[np.uint8]] = []
    thread = threading.Thread(target=lambda: got.append(bench.receive(wire)))
    thread.start()
    thread.join()
    assert not bench.is_mapped(got[0])


def test_arrays_are_copied_between_batches(bench: ViewsFixture) -> None:
    bench.views.end_batch()
    _, wire = bench.export_block(3)
    assert not bench.is_mapped(bench.receive(wire))


def test_a_forked_child_sees_the_arrays_of_its_parent(bench: ViewsFixture) -> None:
    block, wire = bench.export_block(3)
    array = bench.receive(wire)
    bench.views.register_fork_handlers()
    go_read, go_write = os.pipe()
    child = os.fork()
    if child == 0:
        os.read(go_read, 1)
        copied = not bench.is_mapped(bench.receive(wire))
        os._exit(0 if (array == 3).all() and copied else 1)
    del array
    offset = block.offset
    del block
    bench.views.reclaim_dropped_views()
    other, _ = bench.export_block(9)
    assert other.offset == offset
    os.write(go_write, b"x")
    assert os.waitpid(child, 0)[1] == 0
    os.close(go_read)
    os.close(go_write)


def test_writes_through_dlpack_do_not_change_the_block(bench: ViewsFixture) -> None:
    torch = pytest.importorskip("torch")
    block, wire = bench.export_block(3)
    tensor = tensor_from_wire(wire, bench.memory)
    array = torch.from_dlpack(tensor)
    assert bench.is_mapped(array.numpy())
    array[:] = 4
    placed: list[Block] = []
    sent = tensor_to_wire(tensor, bench.memory, placed)
    assert bytes(placed[0].data) == bytes([4]) * SIZE and sent.arena == 1
    assert bytes(block.data) == bytes([3]) * SIZE


def test_an_array_in_a_closed_arena_stays_readable(bench: ViewsFixture) -> None:
    _, wire = bench.export_block(3)
    array = bench.receive(wire)
    bench.memory.close_arena(0)
    assert (array == 3).all()


def test_a_reused_descriptor_is_not_mapped(bench: ViewsFixture) -> None:
    bench.memory.open_arena(OpenArena(7, f"/proc/self/fd/{bench.fds[0]}", LIMIT))
    os.dup2(bench.fds[1], bench.fds[0])
    block, _ = bench.export_block(3)
    array = bench.receive(WireTensor("x", 2, [SIZE], None, 7, block.offset, SIZE))
    assert not bench.is_mapped(array)


def test_without_kernel_support_arrays_are_copied(
    bench: ViewsFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stub.copy_on_write._POPULATE_WRITE", 9999)
    _, wire = bench.export_block(3)
    array = bench.receive(wire)
    assert not bench.is_mapped(array)
    assert (array == 3).all()


def test_writes_through_dlpack_are_sent_even_after_as_numpy(bench: ViewsFixture) -> None:
    torch = pytest.importorskip("torch")
    _, wire = bench.export_block(3)
    tensor = tensor_from_wire(wire, bench.memory)
    array = tensor.as_numpy()
    torch.from_dlpack(tensor).mul_(2)
    placed: list[Block] = []
    tensor_to_wire(tensor, bench.memory, placed)
    assert bytes(placed[0].data) == bytes([6]) * SIZE
    assert bench.is_mapped(array)


def test_texts_over_an_input_are_sent_as_texts(bench: ViewsFixture) -> None:
    _, wire = bench.export_block(ord("x"))
    array = bench.receive(wire).view("S4")
    placed: list[Block] = []
    tensor_to_wire(pb_utils.Tensor("y", array), bench.memory, placed)
    assert bytes(placed[0].data) == b"\x04\0\0\0xxxx" * (SIZE // 4)


class Region:
    """A client's region that can be resized."""

    def __init__(self, bench: ViewsFixture, size: int = 4 * SIZE) -> None:
        self.bench = bench
        self.fd = os.memfd_create("region")
        os.ftruncate(self.fd, size)
        path = f"/proc/self/fd/{self.fd}"
        bench.memory.open_arena(OpenArena(REGION + 2, path, size, region=True))

    def receive(self, value: int, offset: int = 0) -> npt.NDArray[np.uint8]:
        os.pwrite(self.fd, bytes([value]) * SIZE, offset)
        return self.bench.receive(WireTensor("x", 2, [SIZE], None, REGION + 2, offset, SIZE))

    def mapped(self) -> int:
        """Returns the bytes of the region that this process has mapped."""
        inode = str(os.fstat(self.fd).st_ino)
        total = 0
        with open("/proc/self/maps") as maps:
            for line in maps:
                where, _, _, _, number, *path = line.split()
                if number == inode and "memfd:region" in "".join(path):
                    start, end = (int(side, 16) for side in where.split("-"))
                    total += end - start
        return total


@pytest.fixture
def region(bench: ViewsFixture) -> Iterator[Region]:
    region = Region(bench)
    yield region
    os.close(region.fd)


def test_a_kept_array_does_not_change_when_the_client_shrinks_its_region(
    bench: ViewsFixture, region: Region
) -> None:
    array = region.receive(3)
    bench.views.end_batch()
    os.ftruncate(region.fd, 0)
    os.ftruncate(region.fd, 4 * SIZE)
    os.pwrite(region.fd, bytes([9]) * SIZE, 0)
    assert (array == 3).all()


def test_a_range_of_a_client_region_is_mapped_again_after_its_kept_array_is_deleted(
    bench: ViewsFixture, region: Region
) -> None:
    for _ in range(3):
        array, other = region.receive(3), region.receive(4, SIZE)
        assert bench.is_mapped(array) and bench.is_mapped(other)
        bench.views.end_batch()
        del array
        bench.views.begin_batch(regions=True)
        bench.views.reclaim_dropped_views()
        bench.views._copies_left = 0
        for value in range(80):
            assert (region.receive(value) == value).all()
        assert (other == 4).all()
        del other
        bench.views.reclaim_dropped_views()
        bench.views._copies_left = 0
    assert not bench.views._views


def test_concurrent_writes_of_a_thread_survive_the_detaching_of_its_array(
    bench: ViewsFixture, region: Region
) -> None:
    array = region.receive(0)
    rounds = 200
    begun = threading.Event()

    def write() -> None:
        for _ in range(rounds):
            np.add(array, 1, out=array)
            begun.set()

    thread = threading.Thread(target=write)
    thread.start()
    begun.wait(60)
    bench.views.detach_from_client_regions()
    thread.join()
    assert (array == rounds).all()


def test_a_client_that_removes_its_region_does_not_stop_the_batch(
    bench: ViewsFixture, region: Region
) -> None:
    _, wire = bench.export_block(3)
    array, other = region.receive(3), bench.receive(wire)
    os.ftruncate(region.fd, 0)
    bench.views.end_batch()
    assert (other == 3).all()
    ended = bench.memory.take_releases()
    assert ended is not None and ended.blocks[0][0] == 0
    del array
    bench.views.reclaim_dropped_views()


def test_a_kept_array_does_not_keep_the_rest_of_a_client_region_mapped(
    bench: ViewsFixture, region: Region
) -> None:
    array = region.receive(3, SIZE)
    bench.views.end_batch()
    assert region.mapped() > 0
    bench.memory.close_arena(REGION + 2)
    assert region.mapped() == 0
    assert (array == 3).all()
    del array
    bench.views.reclaim_dropped_views()
    assert not bench.views._views


def test_a_region_may_be_closed_while_the_model_reads_it(
    bench: ViewsFixture, region: Region
) -> None:
    array = region.receive(3, SIZE)
    bench.memory.close_arena(REGION + 2)
    assert region.mapped() >= SIZE
    assert (array == 3).all()
    bench.views.end_batch()
    os.ftruncate(region.fd, 0)
    assert (array == 3).all()


def test_a_tensor_of_a_request_of_an_earlier_batch_is_copied(bench: ViewsFixture) -> None:
    tensor = tensor_from_wire(bench.write_region(3), bench.memory)
    bench.views.end_batch()
    bench.views.begin_batch(regions=True)
    array = tensor.as_numpy()
    bench.write_region(9)
    assert (array == 3).all()


def test_a_batch_that_writes_to_many_arrays_backs_off_once(bench: ViewsFixture) -> None:
    exported = [bench.export_block(3) for _ in range(16)]
    for array in [bench.receive(wire) for _, wire in exported]:
        array[0] = 4
    del array
    bench.views.reclaim_dropped_views()
    assert sum(not bench.is_mapped(bench.receive(exported[0][1])) for _ in range(65)) == 64


def test_a_model_that_keeps_its_inputs_gets_copies(bench: ViewsFixture) -> None:
    kept = []
    for _ in range(2):
        _, wire = bench.export_block(3)
        kept.append(bench.receive(wire))
        bench.views.end_batch()
        bench.views.begin_batch(regions=True)
    assert [bench.is_mapped(array) for array in kept] == [True, False]


def test_pages_of_an_array_deleted_between_batches_are_reclaimed_soon(
    bench: ViewsFixture,
) -> None:
    _, wire = bench.export_block(3)
    array = bench.receive(wire)
    bench.views.end_batch()
    before = bench.wakes
    del array
    assert bench.wakes > before
    bench.views.reclaim_dropped_views()
    assert not bench.views._views


@pytest.mark.parametrize(
    "place", ["overlaps", "detach", "is_changed", "restore_file_pages", "array_at"]
)
@pytest.mark.parametrize("regions", [False, True])
def test_finalisers_may_call_any_method_during_any_other(
    bench: ViewsFixture, monkeypatch: pytest.MonkeyPatch, place: str, regions: bool
) -> None:
    """An allocation may start a garbage collection, which runs finalisers of the model."""
    exported = [bench.export_block(value) for value in range(3)]
    inside: list[bool] = []
    intrusions: list[npt.NDArray[np.uint8]] = []
    owner: Any = stub.copy_on_write if place == "array_at" else stub.copy_on_write._View
    original = getattr(owner, place)

    def finaliser() -> None:
        inner = bench.receive(exported[0][1])
        inner[0] = 9
        intrusions.append(inner)
        bench.views.unchanged_block_of(inner)
        bench.views.detach_from_client_regions()
        if len(intrusions) % 2:
            bench.views.detach_all()
            intrusions.clear()
        bench.views.reclaim_dropped_views()

    def intruded(*arguments: Any, **options: Any) -> Any:
        if not inside:
            inside.append(True)
            finaliser()
            inside.pop()
        return original(*arguments, **options)

    monkeypatch.setattr(owner, place, intruded)
    done: list[bool] = []

    def work() -> None:
        for round in range(20):
            bench.views.begin_batch(regions)
            for value, (_, wire) in enumerate(exported):
                if regions:
                    wire = bench.write_region(value, value * SIZE)
                bench.views._copies_left = 0
                array = bench.receive(wire)
                assert (array == value).all()
                array[round] = 7
                tensor_to_wire(pb_utils.Tensor("y", array), bench.memory, [])
                kept = bench.receive(wire)
                array[round] = 8
                assert (kept == value).all()
            bench.views.end_batch()
            del array, kept
            bench.views.reclaim_dropped_views()
        done.append(True)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(60)
    assert done


def test_with_limited_address_space_arrays_are_copied(
    bench: ViewsFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stub.copy_on_write._MAX_MAPPED_BYTES", 0)
    _, wire = bench.export_block(3)
    assert not bench.is_mapped(bench.receive(wire))


class CopyOnWriteViewsMachine(RuleBasedStateMachine):
    """Runs actions of the model, the host and the client in any order; no array may change."""

    def __init__(self) -> None:
        super().__init__()
        self.bench = ViewsFixture()
        self.values = iter(range(1 << 30))
        self.expected: list[tuple[npt.NDArray[np.uint8], bytes]] = []
        self.exported: list[tuple[Block, WireTensor]] = []
        self.open = self.has_responded = False

    def teardown(self) -> None:
        self.expected.clear()
        self.bench.close()

    def next_value(self) -> int:
        return next(self.values) % 251

    @precondition(lambda self: not self.open)
    @rule(regions=st.booleans())
    def begin(self, regions: bool) -> None:
        self.bench.views.begin_batch(regions)
        self.open = True
        self.has_responded = not regions

    @precondition(lambda self: self.open)
    @rule()
    def respond_early(self) -> None:
        self.bench.views.detach_from_client_regions()
        self.has_responded = True

    @precondition(lambda self: self.open)
    @rule()
    def end(self) -> None:
        self.bench.views.end_batch()
        self.open = False
        self.exported.clear()
        self.bench.views.reclaim_dropped_views()

    @rule(pages=st.integers(0, 2), odd=st.sampled_from([0, 16, 17]))
    def take_block(self, pages: int, odd: int) -> None:
        exported = self.bench.export_block(self.next_value(), SIZE + pages * PAGE + odd)
        self.exported.append(exported)
        self.keep(self.bench.receive(exported[1]), bytes(exported[0].data))

    @precondition(lambda self: self.exported)
    @rule(data=st.data())
    def take_again(self, data: st.DataObject) -> None:
        block, wire = data.draw(st.sampled_from(self.exported))
        self.keep(self.bench.receive(wire), bytes(block.data))

    @precondition(lambda self: self.open)
    @rule(place=st.integers(0, 40), odd=st.sampled_from([0, 16, 17]))
    def take_from_client(self, place: int, odd: int) -> None:
        offset = place * PAGE + odd
        array = self.bench.receive(WireTensor("x", 2, [SIZE], None, REGION, offset, SIZE))
        self.keep(array, os.pread(self.bench.fds[2], SIZE, offset))

    @precondition(lambda self: not self.open or self.has_responded)
    @rule(place=st.integers(0, 80))
    def client_writes(self, place: int) -> None:
        self.bench.write_region(self.next_value(), place * PAGE)

    @rule(place=st.integers(0, 80), odd=st.integers(0, 100))
    def output_is_written(self, place: int, odd: int) -> None:
        room = self.bench.memory.output_buffer(SIZE, (REGION, place * PAGE + odd, SIZE))
        assert room is not None
        room[:] = bytes([self.next_value()]) * SIZE

    def keep(self, array: npt.NDArray[np.uint8], content: bytes) -> None:
        self.bench.views._copies_left = 0  # else nearly all arrays would be copies
        self.expected.append((array, content))

    @precondition(lambda self: self.expected)
    @rule(data=st.data(), where=st.integers(0, SIZE - 1), count=st.integers(1, 2 * PAGE))
    def model_writes(self, data: st.DataObject, where: int, count: int) -> None:
        index = data.draw(st.integers(0, len(self.expected) - 1))
        array = self.expected[index][0]
        array[where : where + count] = self.next_value()
        self.expected[index] = array, array.tobytes()

    @precondition(lambda self: self.expected)
    @rule(data=st.data())
    def model_sends(self, data: st.DataObject) -> None:
        array, content = data.draw(st.sampled_from(self.expected))
        placed: list[Block] = []
        tensor_to_wire(pb_utils.Tensor("y", array), self.bench.memory, placed)
        assert bytes(placed[0].data) == content

    @precondition(lambda self: self.expected)
    @rule(data=st.data())
    def model_drops(self, data: st.DataObject) -> None:
        self.expected.pop(data.draw(st.integers(0, len(self.expected) - 1)))

    @invariant()
    def nothing_has_changed(self) -> None:
        for array, content in self.expected:
            assert array.tobytes() == content


TestModel = CopyOnWriteViewsMachine.TestCase
TestModel.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
