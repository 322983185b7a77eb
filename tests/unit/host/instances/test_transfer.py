"""Tensors on their way to a stub and back: which side holds them, and for how long."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable

import pytest

from host.errors import ErrorCode, HostError, unavailable
from host.inference.request import InferRequest, InferResponse, Tensor
from host.instances.arenas import ArenaFile, Arenas, arena_full_error
from host.instances.transfer import BLS, WORK, TensorTransfer
from host.tracing.trace import Trace, TraceTree
from stub.wire.arena import Arena, ArenaFull
from stub.wire.messages import (
    INLINE_ALWAYS,
    INLINE_LIMIT,
    BlockRelease,
    CloseArena,
    OpenArena,
    ToStub,
    WireError,
    WireRequest,
    WireTensor,
)
from stub.wire.shared_file import PAGE
from tests.conftest import DEADLINE

PAGES = 20  # more than a message carries
LARGE = bytes(range(256)) * (PAGES * PAGE // 256)
LIMIT = 32 * PAGES * PAGE


class Peer:
    """One stub, as the host sees it, and its end of the shared memory."""

    def __init__(self, arenas: Arenas) -> None:
        self.flushes = 0
        self.closed: list[CloseArena] = []
        self.flushed = asyncio.Event()
        self.file: ArenaFile = arenas.create_arena()
        self.arena = Arena(self.file.number, self.file.fd, LIMIT)
        self.transfer = TensorTransfer(arenas, self.file, self._flush, self.closed.append)

    def _flush(self) -> None:
        self.flushes += 1
        self.flushed.set()

    def place(self, data: bytes, name: str = "x") -> WireTensor:
        """A tensor that the stub has written, as it names it."""
        block = self.arena.write(memoryview(data))
        self.kept = [*getattr(self, "kept", []), block]
        return WireTensor(name, 2, [len(data)], None, block.arena, block.offset, block.size)


class Bench:
    def __init__(self) -> None:
        self.arenas = Arenas(LIMIT)
        self.peer = Peer(self.arenas)
        self.transfer = self.peer.transfer

    def used(self) -> int:
        """Bytes of the host's arena that are held."""
        self.arenas.host.trim()
        return self.arenas.host.used


def with_bench(test: Callable[[Bench], None]) -> None:
    async def main() -> None:
        bench = Bench()
        test(bench)
        bench.arenas.close()

    asyncio.run(main())


def large(data: bytes = LARGE) -> Tensor:
    return Tensor("x", "UINT8", [len(data)], data)


def sent(bench: Bench, tensor: Tensor, ring: str, frame: list[ToStub]) -> WireTensor:
    """The tensor as the only input of a request."""
    request = InferRequest("m", [tensor])
    return bench.transfer.encode_request(request, ring, frame).inputs[0]


def test_a_small_tensor_travels_inside_the_message() -> None:
    def test(bench: Bench) -> None:
        frame: list[ToStub] = []
        tensor = large(b"x" * INLINE_LIMIT)
        wire = sent(bench, tensor, WORK, frame)
        assert (wire.data, frame, bench.used()) == (b"x" * INLINE_LIMIT, [], 0)

    with_bench(test)


def test_tensors_of_one_message_share_the_inline_limit() -> None:
    def test(bench: Bench) -> None:
        room = 40_000
        transfer = TensorTransfer(
            bench.arenas, bench.peer.file, lambda: None, lambda _: None, lambda: room
        )

        def inline(batch_requests: int, *sizes: int) -> list[bool]:
            request = InferRequest("m", [large(bytes(size)) for size in sizes])
            sent = transfer.encode_request(request, WORK, [], batch_requests)
            return [tensor.data is not None for tensor in sent.inputs]

        assert inline(1, 40_000) == [True]
        assert inline(1, 40_001) == [False]
        assert inline(1, 20_000, 20_001) == [True, False]
        assert inline(1, 39_000, 1_000) == [True, True]
        assert inline(1, 39_000, 1_001) == [False, True]
        assert inline(2, 19_000, 1_000) == [True, True]
        assert inline(2, 19_000, 1_001) == [False, True]
        assert inline(4, 10_000) == [True]
        assert inline(4, 10_001) == [False]
        assert inline(1000, INLINE_ALWAYS, INLINE_ALWAYS + 1) == [True, False]
        room = 0
        assert inline(1, INLINE_ALWAYS, INLINE_ALWAYS + 1) == [True, False]

    with_bench(test)


def test_large_tensor_is_written_once_and_held_until_it_is_released() -> None:
    def test(bench: Bench) -> None:
        frame: list[ToStub] = []
        tensor = large()
        first = sent(bench, tensor, WORK, frame)
        second = sent(bench, tensor, WORK, frame)
        assert first == second
        assert frame == []  # a stub knows the host's arena from the start
        assert bench.used() == PAGES * PAGE
        del tensor
        bench.transfer.release_blocks(BlockRelease([(0, first.offset, 1)]))
        assert bench.used() == PAGES * PAGE
        bench.transfer.release_blocks(BlockRelease([(0, first.offset, 1)]))
        assert bench.used() == 0
        with pytest.raises(KeyError):
            bench.transfer.release_blocks(BlockRelease([(0, first.offset, 1)]))

    with_bench(test)


def test_exited_stub_holds_no_blocks() -> None:
    def test(bench: Bench) -> None:
        for _ in range(5):
            sent(bench, large(), WORK, [])
        assert bench.used() == 5 * PAGES * PAGE
        bench.transfer.process_exited()
        assert bench.used() == 0

    with_bench(test)


def test_tensor_of_a_stub_is_read_in_place_and_released_after_its_last_use() -> None:
    async def main() -> None:
        bench = Bench()
        wire = bench.peer.place(LARGE)
        tensor = bench.transfer.decode_tensor(wire)
        assert (tensor.name, tensor.datatype, tensor.shape) == ("x", "UINT8", [len(LARGE)])
        assert tensor.data == LARGE
        assert bench.transfer.collect_releases() is None
        del tensor
        await asyncio.wait_for(bench.peer.flushed.wait(), DEADLINE)
        assert bench.transfer.collect_releases() == BlockRelease([(wire.arena, wire.offset, 1)])
        assert bench.transfer.collect_releases() is None
        bench.arenas.close()

    asyncio.run(main())


def test_several_holders_of_one_block_are_counted() -> None:
    def test(bench: Bench) -> None:
        wire = bench.peer.place(LARGE)
        tensors = [bench.transfer.decode_tensor(wire) for _ in range(3)]
        tensors.clear()
        assert bench.transfer.collect_releases() == BlockRelease([(wire.arena, wire.offset, 3)])

    with_bench(test)


def test_a_tensor_may_be_dropped_in_another_thread() -> None:
    async def main() -> None:
        bench = Bench()
        tensors = [bench.transfer.decode_tensor(bench.peer.place(LARGE))]
        thread = threading.Thread(target=tensors.clear)
        thread.start()
        thread.join()
        await asyncio.wait_for(bench.peer.flushed.wait(), DEADLINE)
        assert bench.peer.flushes == 1
        bench.arenas.close()

    asyncio.run(main())


def test_dropped_blocks_are_released_in_one_message() -> None:
    async def main() -> None:
        bench = Bench()
        wire = bench.peer.place(LARGE)
        for _ in range(100):
            bench.transfer.decode_tensor(wire)
        await asyncio.wait_for(bench.peer.flushed.wait(), DEADLINE)
        assert bench.peer.flushes == 1
        bench.arenas.close()

    asyncio.run(main())


def test_tensor_may_be_dropped_after_its_stub_or_the_loop_has_ended() -> None:
    kept: list[Tensor] = []

    async def main() -> None:
        bench = Bench()
        kept.append(bench.transfer.decode_tensor(bench.peer.place(LARGE)))
        kept.append(bench.transfer.decode_tensor(bench.peer.place(LARGE)))
        bench.transfer.process_exited()
        kept.pop()
        bench.arenas.close()

    asyncio.run(main())
    gc.collect()
    assert kept[0].data == LARGE
    kept.clear()


def test_exported_block_comes_back_by_reference() -> None:
    def test(bench: Bench) -> None:
        wire = sent(bench, large(), WORK, [])
        tensor = bench.transfer.decode_tensor(wire)
        bench.transfer.release_blocks(BlockRelease([(0, wire.offset, 1)]))
        assert tensor.data == LARGE
        assert bench.used() == PAGES * PAGE
        del tensor
        assert bench.used() == 0

    with_bench(test)


@pytest.mark.parametrize(
    ("wire", "error"),
    [
        (WireTensor("x", 99, [0], b""), KeyError),
        (WireTensor("x", 2, [1], None, 0, 0, 1), KeyError),  # never lent
        (WireTensor("x", 2, [1], None, 77, 0, 1), KeyError),  # no such arena
        (WireTensor("x", 2, [1], None, 1, -1, 1), ValueError),
        (WireTensor("x", 2, [1], None, 1, 4 * LIMIT, 1), ValueError),
        (WireTensor("x", 2, [1], None, 1, 0, 4 * LIMIT + 1), ValueError),
    ],
)
def test_reference_to_an_unknown_block_is_refused(wire: WireTensor, error: type[Exception]) -> None:
    def test(bench: Bench) -> None:
        assert bench.peer.file.number == 1
        with pytest.raises(error):
            bench.transfer.decode_tensor(wire)
        with pytest.raises(error):
            bench.transfer.decode_request(WireRequest("", [wire], [], {}))

    with_bench(test)


def test_exported_block_must_come_back_with_its_size() -> None:
    def test(bench: Bench) -> None:
        wire = sent(bench, large(), WORK, [])
        wire.size += 1
        with pytest.raises(ValueError, match=f"a lent block of {len(LARGE)} bytes"):
            bench.transfer.decode_tensor(wire)

    with_bench(test)


def test_another_stubs_arena_is_announced_once_for_each_thread_that_reads() -> None:
    def test(bench: Bench) -> None:
        other = Peer(bench.arenas)
        tensor = other.transfer.decode_tensor(other.place(LARGE))
        for ring in (WORK, BLS):
            frame: list[ToStub] = []
            for _ in range(2):
                wire = sent(bench, tensor, ring, frame)
                assert wire.arena == other.file.number
            assert frame == [OpenArena(other.file.number, other.file.path, LIMIT)]
        for _ in range(2):
            for tell in bench.arenas.on_closed:
                tell(other.file.number)
        assert bench.peer.closed == [CloseArena(other.file.number)]
        frame = []
        sent(bench, tensor, WORK, frame)
        assert len(frame) == 1

    with_bench(test)


def test_request_that_cannot_be_encoded_exports_nothing_and_leaves_no_trace_open() -> None:
    def test(bench: Bench) -> None:
        completed: list[TraceTree] = []
        tree = TraceTree(completed.append)
        trace = Trace(lambda _: 1, tree)
        trace.start_response()
        request = InferRequest("m", [large()], trace=trace)
        trace.start_inference(request, "m", 1, 1)
        request.output_placement = {"y": object()}  # no block
        with pytest.raises(AssertionError):
            bench.transfer.encode_request(request, WORK, [])
        request.output_placement = None
        request.inputs.append(Tensor("y", "NO_SUCH_TYPE", [1], b"a"))
        with pytest.raises(KeyError):
            bench.transfer.encode_request(request, WORK, [])
        request.inputs = []
        assert bench.used() == 0
        error = HostError(ErrorCode.INTERNAL, "it cannot be sent")
        trace.record_response(InferResponse("m", 1, error=error), True)
        trace.finish_response()
        assert completed == [tree]

    with_bench(test)


def test_a_stub_gets_its_own_block_without_an_announcement() -> None:
    def test(bench: Bench) -> None:
        tensor = bench.transfer.decode_tensor(bench.peer.place(LARGE))
        frame: list[ToStub] = []
        sent(bench, tensor, WORK, frame)
        assert frame == []

    with_bench(test)


def test_arena_is_closed_after_its_last_tensor_and_stubs_are_told() -> None:
    async def main() -> None:
        bench = Bench()
        closed: list[int] = []
        bench.arenas.on_closed.append(closed.append)
        other = Peer(bench.arenas)
        number = other.file.number
        tensor = other.transfer.decode_tensor(other.place(LARGE))
        reference = sent(bench, tensor, WORK, [])
        other.transfer.process_exited()
        del other
        gc.collect()
        assert closed == []
        assert bench.arenas.announcement(number)
        bench.transfer.release_blocks(BlockRelease([(number, reference.offset, 1)]))
        del tensor
        gc.collect()
        await asyncio.sleep(0)  # the collector only schedules the announcement on the loop
        assert closed == [number]
        assert bench.peer.closed == [CloseArena(number)]
        with pytest.raises(KeyError):
            bench.arenas.announcement(number)
        bench.arenas.close()

    asyncio.run(main())


def test_request_round_trips_with_its_fields() -> None:
    def test(bench: Bench) -> None:
        request = InferRequest(
            "m", [large(b"abc")], 3, "7", ["O"], {"a": 1, "b": "c"}, "corr", 3, timeout_us=5
        )
        received = bench.transfer.decode_request(bench.transfer.encode_request(request, WORK, []))
        for field in ("model_name", "model_version", "id", "requested_outputs", "parameters"):
            assert getattr(received, field) == getattr(request, field)
        for field in ("correlation_id", "flags", "timeout_us"):
            assert getattr(received, field) == getattr(request, field)
        assert received.inputs[0].data == b"abc"

    with_bench(test)


OF_CLIENTS = (
    ErrorCode.DEADLINE_EXCEEDED,
    ErrorCode.UNAUTHENTICATED,
    ErrorCode.PERMISSION_DENIED,
    ErrorCode.RESOURCE_EXHAUSTED,
)
"""Errors of frontends and clients, which no model gets."""


@pytest.mark.parametrize("code", [code for code in ErrorCode if code not in OF_CLIENTS])
def test_every_error_code_round_trips(code: ErrorCode) -> None:
    def test(bench: Bench) -> None:
        response = InferResponse("m", 1, error=HostError(code, "why"))
        wire = bench.transfer.encode_response(response, WORK, []).error
        assert wire is not None
        error = bench.transfer.decode_error(wire)
        assert (error.code, error.message) == (code, "why")

    with_bench(test)


def test_an_error_code_that_does_not_exist_is_refused() -> None:
    def test(bench: Bench) -> None:
        with pytest.raises(IndexError):
            bench.transfer.decode_error(WireError(len(ErrorCode), "x"))

    with_bench(test)


def test_full_arena_error_names_the_remedy() -> None:
    def test(bench: Bench) -> None:
        too_large = large(bytes(LIMIT + 1))
        with pytest.raises(ArenaFull) as caught:
            sent(bench, too_large, WORK, [])
        text = arena_full_error(caught.value).message
        assert text.startswith(
            f"Failed to increase the shared memory pool size for key 'pbhost-host' to {LIMIT + 1}"
            " bytes."
        )
        assert text.endswith("raise --arena-byte-size or send smaller tensors")
        wire = bench.transfer.encode_response(InferResponse("m", 1, outputs=[too_large]), WORK, [])
        assert wire.error == WireError(1, text)
        assert wire.outputs == []

    with_bench(test)


def test_an_error_response_carries_no_outputs() -> None:
    def test(bench: Bench) -> None:
        response = InferResponse("m", 1, outputs=[large()], error=unavailable("x"))
        assert bench.transfer.encode_response(response, WORK, []).outputs == []
        assert bench.used() == 0

    with_bench(test)
