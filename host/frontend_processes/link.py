"""The connection between the core and a frontend process: two rings, and an eventfd for each."""

from __future__ import annotations

import asyncio
import os
import select
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack, suppress

from stub.wire.ring import RingError, RingReader, RingWriter, create_ring_file, map_rings
from stub.wire.shared_file import Mapping

_MAX_FRAMES_PER_TURN = 128  # frames that are handled before other callbacks run
_PIECE_BYTES = 1 << 16  # a longer frame is sent in pieces
_MAX_FRAME_BYTES = (1 << 31) + (1 << 24)  # of a frame in pieces: a message of gRPC, and more
FULL_RING_PAUSE = 0.001  # seconds until the next attempt to write
_END = b""  # the piece after the last one
_GENERATION = 2  # the word of the ring's header that shows the generation of models
_TRACING = 24  # the byte of the ring's header that shows whether requests may be traced


class LinkFiles:
    """The descriptors of one connection. The core creates them; the frontend process inherits them.

    Raises OSError.
    """

    def __init__(self, rings: int, to_frontend: int, to_core: int) -> None:
        self.rings = rings
        self.to_frontend = to_frontend  # the eventfd of frames for the frontend
        self.to_core = to_core

    @classmethod
    def create(cls) -> LinkFiles:
        """Creates them. Raises OSError."""
        flags = os.EFD_CLOEXEC | os.EFD_NONBLOCK
        with ExitStack() as opened:
            rings = create_ring_file("pbhost-frontend-rings")
            opened.callback(os.close, rings)
            to_frontend = os.eventfd(0, flags)
            opened.callback(os.close, to_frontend)
            to_core = os.eventfd(0, flags)
            opened.pop_all()
        return cls(rings, to_frontend, to_core)

    def close(self) -> None:
        """Closes them in this process."""
        for descriptor in (self.rings, self.to_frontend, self.to_core):
            os.close(descriptor)


class SharedState:
    """What the core shows a frontend without a message: the frontend sees a change at once.

    A change is seen before anything that was sent after it, as it is in the header of the ring.
    """

    def __init__(self, files: LinkFiles) -> None:
        self._memory = Mapping(files.rings, 64, writable=True).view
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


class RingLink:
    """One end. `on_frame` is called with every frame of the other end, in order.

    `on_error` is called with a reason if the ring contains something else. Frames that the ring has
    no room for wait in this process: the requests in progress bound them.
    """

    def __init__(
        self,
        files: LinkFiles,
        in_core: bool,
        on_frame: Callable[[bytes], None],
        on_error: Callable[[Exception], None],
    ) -> None:
        to_frontend, to_core = map_rings(files.rings)
        self._ring = RingWriter(to_frontend if in_core else to_core)
        self._inbox = RingReader(to_core if in_core else to_frontend)
        self._peer_event = files.to_frontend if in_core else files.to_core
        self._event = files.to_core if in_core else files.to_frontend
        self.inline_limit = self._ring.inline_limit  # bytes of tensors in the next frame
        self._on_frame = on_frame
        self._on_error = on_error
        self._unsent: deque[bytes | None] = deque()  # frames and pieces; None: pieces follow
        self._flushing = False
        self._announced = 0  # frames in the ring that were not read
        self._pieces: list[bytes] | None = None
        self._pieces_size = 0
        self._continuing = False
        self._open = True
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._event, self._on_signal)

    def send(self, frame: bytes) -> None:
        """Sends a frame. After `close`, it is dropped."""
        if not self._open:
            return
        if len(frame) > _PIECE_BYTES:
            view = memoryview(frame)
            self._unsent.append(None)
            for start in range(0, len(frame), _PIECE_BYTES):
                self._unsent.append(bytes(view[start : start + _PIECE_BYTES]))
            self._unsent.append(_END)
        elif self._unsent or not self._ring.try_write(frame):
            self._unsent.append(frame)
        else:
            self._announce(1)
            return
        if not self._flushing:
            self._flush()

    def _flush(self) -> None:
        """Writes what the ring has room for; the rest when the other end has read some of it."""
        self._flushing = False
        if not self.flush():
            self._flushing = True
            self._loop.call_later(FULL_RING_PAUSE, self._flush)

    def flush(self) -> bool:
        """Writes what the ring has room for now; returns whether nothing is left."""
        written = 0
        while self._unsent:
            frame = self._unsent[0]
            ring = self._ring
            if not (ring.write_overflow_marker() if frame is None else ring.try_write(frame)):
                break
            self._unsent.popleft()
            written += 1
        if written:
            self._announce(written)
        return not self._unsent

    def _announce(self, frames: int) -> None:
        try:
            os.eventfd_write(self._peer_event, frames)
        except BlockingIOError:
            self._on_error(RingError("the counter of the frames that it is sent is full"))

    def wait(self, seconds: float) -> bool:
        """Blocks until a frame was announced; returns whether one was in time."""
        if self._announced:
            return True
        poller = select.poll()
        poller.register(self._event, select.POLLIN)
        return bool(poller.poll(seconds * 1000))

    def read_available(self) -> None:
        """Delivers the frames that were announced so far, also those of a nested call."""
        self._receive_signal()
        self._deliver(self._announced)

    def _on_signal(self) -> None:
        self._receive_signal()
        self._deliver(_MAX_FRAMES_PER_TURN)

    def _receive_signal(self) -> None:
        with suppress(BlockingIOError):  # nothing new
            self._announced += os.eventfd_read(self._event)

    def _deliver(self, most: int) -> None:
        while self._announced and self._open:
            if most <= 0:
                if not self._continuing:
                    self._continuing = True
                    self._loop.call_soon(self._continue)
                return
            most -= 1
            self._announced -= 1
            try:
                frame = self._join(self._inbox.read_frame())
            except RingError as error:
                self._on_error(error)
                return
            if frame is not None:
                self._on_frame(frame)

    def _continue(self) -> None:
        self._continuing = False
        self._deliver(_MAX_FRAMES_PER_TURN)

    def _join(self, frame: bytes | None) -> bytes | None:
        """A whole frame; None if pieces are missing. Raises RingError."""
        pieces = self._pieces
        if pieces is None:
            if frame is None:
                self._pieces, self._pieces_size = [], 0
            return frame
        if frame is None:
            raise RingError("a frame in pieces inside of another one")
        if frame == _END:
            self._pieces = None
            return b"".join(pieces)
        self._pieces_size += len(frame)
        if self._pieces_size > _MAX_FRAME_BYTES:
            raise RingError(f"a frame of more than {_MAX_FRAME_BYTES} bytes")
        pieces.append(frame)
        return None

    def close(self) -> None:
        """Neither sends nor delivers anything any more."""
        if self._open:
            self._open = False
            self._loop.remove_reader(self._event)
            self._unsent.clear()
            self._ring.close()
            self._inbox.close()
