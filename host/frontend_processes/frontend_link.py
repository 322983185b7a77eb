"""The connection between the core and a frontend process, and what the process inherits."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from host.frontend_processes.frontend_messages import ToCore, ToFrontend
from host.frontends.receive_memory import ReceiveBudget
from host.instances.ring_link import FrameReceiver, FrameSender, event_writer
from stub.wire.messages import BlockRelease, encode_message, join_messages
from stub.wire.ring import map_ring
from stub.wire.shared_file import Mapping, create_shared_file
from stub.wire.spawn import ProcessArguments

FRONTEND_RING, CORE_RING = 0, 1
"""The rings of a frontend process: messages for it, and its messages for the core."""

_MAX_FRAME_MESSAGES = 64
_GENERATION = 2  # the word of the ring's header that shows the generation of models
_TRACING = 24  # the byte of the ring's header that shows whether requests may be traced


class SharedState:
    """What the core shows a frontend without a message: the frontend sees a change at once.

    A change is seen before anything that was sent after it, as it is in the header of the ring.
    """

    def __init__(self, rings: int) -> None:
        """`rings`: the descriptor of the rings."""
        self._memory = Mapping(rings, 64, writable=True).view
        self._words = self._memory[:64].cast("Q")

    @property
    def generation(self) -> int:
        """Changes whenever a model may be found that was not, or the other way round."""
        return self._words[_GENERATION]

    @property
    def tracing(self) -> bool:
        """Whether requests may be traced."""
        return self._memory[_TRACING] != 0

    def show_generation(self, generation: int) -> None:
        """Sets the generation, in the core."""
        self._words[_GENERATION] = generation

    def show_tracing(self, tracing: bool) -> None:
        """Sets whether requests may be traced, in the core."""
        self._memory[_TRACING] = tracing


class MessageLink:
    """One end. The messages of one turn of the event loop are sent in one frame.

    `on_frames` is called with the frames of the other end, in order. `on_error` is called with a
    reason if the ring contains something else. A frame also has the blocks that `collect_releases`
    returns.
    """

    def __init__(
        self,
        rings: int,
        events: tuple[int, int],
        in_core: bool,
        on_frames: Callable[[Sequence[bytes]], None],
        on_error: Callable[[Exception], None],
        collect_releases: Callable[[], BlockRelease | None],
    ) -> None:
        """`rings`: their descriptor. `events`: the eventfds, of the ring to the frontend first."""
        outgoing, incoming = (FRONTEND_RING, CORE_RING) if in_core else (CORE_RING, FRONTEND_RING)
        self.sender = FrameSender(
            map_ring(rings, outgoing), event_writer(events[outgoing], on_error)
        )
        self.receiver = FrameReceiver(map_ring(rings, incoming), events[incoming], on_error)
        self.inline_limit = self.sender.inline_limit  # bytes of tensors in the next frame
        self._collect_releases = collect_releases
        self._loop = asyncio.get_running_loop()
        self._unsent: list[bytes] = []  # encoded messages of this turn
        self.receiver.start_reading(on_frames)

    def send(self, message: ToCore | ToFrontend) -> None:
        """Sends a message at the end of this turn of the event loop.

        Raises ValueError, TypeError or OverflowError if it cannot be encoded.
        """
        encoded = encode_message(message)
        if not self._unsent:
            self._loop.call_soon(self.flush)
        self._unsent.append(encoded)
        if len(self._unsent) >= _MAX_FRAME_MESSAGES:
            self.flush()

    def flush(self) -> None:
        """Sends the messages of this turn now. After `close`, they are dropped."""
        if self._unsent:
            messages, self._unsent = self._unsent, []
            releases = self._collect_releases()
            if releases is not None:
                messages.append(encode_message(releases))
            self.sender.send(join_messages(messages))

    def flush_releases(self) -> None:
        """Sends the blocks that this process has released since the last message."""
        releases = self._collect_releases()
        if releases is not None:
            self.send(releases)

    def close(self) -> None:
        """Neither sends nor delivers anything any more."""
        self.sender.close()
        self.receiver.close()


_WORD = 8  # bytes


class BudgetFile:
    """Shared memory with a number for each process: the bytes that it has reserved.

    Raises OSError.
    """

    def __init__(self, processes: int) -> None:
        self.size = processes * _WORD
        self.fd = create_shared_file("pbhost-receive-budget", self.size)
        self._words = Mapping(self.fd, self.size, writable=True).view.cast("Q")

    def clear(self, index: int) -> None:
        """Releases what a process has reserved that has ended."""
        self._words[index] = 0

    def close(self) -> None:
        """Closes the descriptor of this process."""
        os.close(self.fd)


class SharedReceiveBudget(ReceiveBudget):
    """Counts the bytes of one process, and checks the sum of all against the limit.

    Each process writes its own number only. Two that reserve at the same moment may together
    exceed the limit by their last requests.
    """

    __slots__ = ("_index", "_words")

    def __init__(self, limit: int, fd: int, size: int, index: int) -> None:
        """`fd`, `size`: of a `BudgetFile`. `index`: the number of this process in it."""
        super().__init__(limit)
        self._words = Mapping(fd, size, writable=True).view.cast("Q")
        self._index = index

    def reserve(self, size: int) -> None:
        """As `ReceiveBudget.reserve`."""
        super().reserve(size)
        self._words[self._index] = self.reserved_bytes

    def total_bytes(self) -> int:
        """The bytes that the requests of all processes hold now."""
        return sum(self._words)


@dataclass(frozen=True)
class FrontendSpawn(ProcessArguments):
    """The arguments of a frontend process. Descriptors are numbers in that process.

    `index`: 0, 1, ... `control`: the socket that brings arenas, and shows the end of the core.
    `rings`, and the eventfds `to_frontend` and `to_core`: of the `RingFiles`. `limit`: bytes of an
    arena. `grpc`, `http`: listening sockets; -1 for none. `budget`, `budget_size`: of a
    `BudgetFile`.
    """

    index: int
    control: int
    rings: int
    to_frontend: int
    to_core: int
    arena: int
    arena_fd: int
    limit: int
    host_arena_fd: int
    grpc: int
    http: int
    budget: int
    budget_size: int

    DESCRIPTORS: ClassVar[tuple[str, ...]] = (
        "control",
        "rings",
        "to_frontend",
        "to_core",
        "arena_fd",
        "host_arena_fd",
        "grpc",
        "http",
        "budget",
    )
