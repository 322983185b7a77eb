"""Arrays that belong to the model without a copy: the kernel copies the pages that it writes to.

Most models only read what `as_numpy` gives them. An array over a private, copy-on-write mapping of
the block costs them nothing. It must not change when the block is used anew, so an array that
outlives its batch, or a fork, gets pages of its own before that.
"""

import os
import threading
from collections import deque
from typing import TYPE_CHECKING, Any, Callable, Deque, List, Optional, Tuple

from pb_utils._storage import address_of, borrow
from stub.copy_on_write_mapping import PrivateMapping
from stub.wire.arena import Block
from stub.wire.shared_file import PAGE

if TYPE_CHECKING:
    import numpy.typing as npt

_ALIGNMENT = 16  # bytes, as of memory that numpy allocates
_FIRST_REST = 64  # arrays
_LONGEST_REST = 1 << 16
_MOST_LIVE = 64  # arrays of which something is kept in mind; more are copies


class RegionBlock(Block):
    """A block in a client's memory, which came with a `batch`. After that the client may change it
    although the block lives.
    """

    __slots__ = ("batch",)

    batch: int  # set by whoever makes it


def _nobody() -> None:
    """In a forked child nobody is to be woken."""


class _Span:
    """The pages that an array shows."""

    __slots__ = (
        *("address", "alive", "block", "end", "mapping", "nbytes", "parted", "replaced", "start"),
    )

    def __init__(self, mapping: PrivateMapping, block: Block) -> None:
        self.mapping = mapping
        self.start = block.offset // PAGE * PAGE
        self.end = (block.offset + block.size + PAGE - 1) // PAGE * PAGE
        self.address = mapping.address + block.offset
        self.nbytes = block.size
        self.block: Optional[Block] = None  # what the array depends on
        self.parted = False  # it has pages of its own, or had
        self.replaced = False  # and these are not of the mapping
        self.alive = True

    def lies_in(self, file: Tuple[int, int], place: int, size: int) -> bool:
        start = place - self.mapping.place
        return self.mapping.file == file and self.start < start + size and start < self.end

    def overlaps(self, other: "_Span") -> bool:
        return (
            self is not other
            and self.mapping is other.mapping
            and self.start < other.end
            and other.start < self.end
        )

    def part(self) -> bool:
        """Give the array pages of its own; False if there is no memory for that, or no file."""
        start, size = self.start, self.end - self.start
        try:
            if self.mapping.region and not self.mapping.is_changed(start, size):
                self.mapping.replace(start, size)
                self.replaced = True
            else:  # a thread of the model may be writing there at this moment
                self.mapping.part(start, size)
        except OSError:
            return False
        self.parted = True
        self.block = None
        return True

    def is_changed(self) -> bool:
        return self.parted or self.mapping.is_changed(self.start, self.end - self.start)

    def recover(self) -> bool:
        """Whether the pages show the file again; the array is gone."""
        if self.replaced:
            return False
        try:
            self.mapping.forget(self.start, self.end - self.start)
        except OSError:  # locked in memory, by the model
            return False
        return True


class _Holder:
    """What the arrays over a span keep alive."""

    __slots__ = ("_gone", "_span")

    def __init__(self, span: _Span, gone: Callable[[_Span], None]) -> None:
        self._span = span
        self._gone = gone

    def __del__(self) -> None:
        self._gone(self._span)


class Snapshots:
    """Those of one stub, made on its main thread while `execute` runs.

    A model that writes to them, or keeps them, pays more than for copies. It gets copies for a
    while then, for twice as long each time. Finalisers may call any method in the middle of any
    other, in the same thread.
    """

    def __init__(
        self,
        mapping_of: Callable[[int], Optional[PrivateMapping]],
        wake: Callable[[], None],
    ) -> None:
        """`mapping_of` an arena by its number, None if there is none; `wake` has `tidy` called
        soon.
        """
        self.batch = 0  # number of the present one, or of the last
        self._mapping_of = mapping_of
        self._wake = wake
        self._live: List[_Span] = []  # also those of arrays that have pages of their own
        self._gone: Deque[_Span] = deque()
        self._lock = threading.RLock()
        self._thread = 0
        self._regions = False  # whether clients' memory may be shown
        self._rest = 0  # so many arrays are still to be copied
        self._pause = _FIRST_REST  # the next rest
        self._unharmed = 0  # since the last rest

    def begin(self, regions: bool) -> None:
        """A batch begins on this thread; `regions` says whether no client is answered before it
        ends.
        """
        self.batch += 1
        self._thread = threading.get_ident()
        self._regions = regions

    def end(self) -> None:
        """The batch is about to be answered: arrays that are still alive get pages of their own."""
        self._thread = 0
        if self._live:
            self.part()

    def part(self) -> None:
        """Let no living array depend on a block any more.

        Where the client has taken its memory away, or there is no memory, they go on doing so.
        """
        with self._lock:
            self._part(list(self._live))

    def part_from_regions(self) -> None:
        """As `part`, of clients' memory, which is not shown any more in this batch."""
        with self._lock:
            self._regions = False
            self._part([span for span in self._live if span.mapping.region])

    def part_from(self, file: Tuple[int, int], place: int, size: int) -> None:
        """As `part`, of bytes in a file that are about to be written to."""
        if self._live:
            with self._lock:
                self._part([span for span in self._live if span.lies_in(file, place, size)])

    def show(self, owner: object, array: "npt.NDArray[Any]") -> "Optional[npt.NDArray[Any]]":
        """A writable array of the same content, type and shape, over the block `owner`.

        None where that cannot be, or does not pay.
        """
        if threading.get_ident() != self._thread or not isinstance(owner, Block):
            return None
        self.tidy()
        if self._rest:
            self._rest -= 1
            return None
        mapping = self._mapping_of(owner.arena)
        if mapping is None or array.nbytes != owner.size or len(self._live) >= _MOST_LIVE:
            return None
        if mapping.region and not (isinstance(owner, RegionBlock) and owner.batch == self.batch):
            return None
        span = _Span(mapping, owner)
        with self._lock:
            self._live.append(span)  # first: what comes in the middle of this must not be over it
            if not span.address % _ALIGNMENT and not any(map(span.overlaps, list(self._live))):
                span.block = owner
                allowed = self._regions or not mapping.region or span.parted
                if allowed and not mapping.released:
                    holder = _Holder(span, self._lose)
                    return borrow(span.address, array.dtype, array.shape, holder, writable=True)
                span.block = None
            self._live.remove(span)
        return None

    def _lose(self, span: _Span) -> None:
        """The last array over it has gone; called by finalisers, so it waits for nothing."""
        span.block = None
        span.alive = False
        self._gone.append(span)
        if not self._thread:
            self._wake()

    def block_of(self, array: "Optional[npt.NDArray[Any]]") -> Optional[Block]:
        """The block that an array shows whole and unchanged, unless it is a client's memory."""
        if array is None or not self._live:
            return None
        address, nbytes = address_of(array), array.nbytes
        with self._lock:
            for span in list(self._live):
                if span.address == address and span.nbytes == nbytes and span.block is not None:
                    block = span.block
                    return None if span.mapping.region or span.is_changed() else block
        return None

    def tidy(self) -> None:
        """Take back what the arrays that have gone have left. Any thread."""
        if not self._gone:
            return
        written = False
        with self._lock:
            while self._gone:
                span = self._gone.popleft()
                self._live.remove(span)
                if not span.is_changed():
                    self._unharmed += 1
                    continue
                written = written or not span.parted
                if not span.recover():
                    self.release(span.mapping)
        if written:
            self._tire()
        elif self._unharmed >= self._pause:
            self._pause = _FIRST_REST

    def release(self, mapping: PrivateMapping) -> None:
        """Nothing more is shown of this mapping: only living arrays need it."""
        with self._lock:
            spans = [span for span in self._live if span.mapping is mapping and span.alive]
            try:
                mapping.release(sorted((span.start, span.end) for span in spans))
            except OSError:
                pass  # too many mappings: the file stays until the last of these arrays has gone

    def provide_for_forks(self) -> None:
        """From now on, no child depends on a block that this process gives back."""
        os.register_at_fork(before=self.part, after_in_child=self._stop)

    def _stop(self) -> None:
        self._thread = 0
        self._wake = _nobody
        self._live = []
        self._gone.clear()
        self._lock = threading.RLock()  # another thread may have held it

    def _part(self, spans: List[_Span]) -> None:
        parted = [span.part() for span in spans if span.block is not None]
        if any(parted):
            self._tire()

    def _tire(self) -> None:
        self._rest = self._pause
        self._pause = min(2 * self._pause, _LONGEST_REST)
        self._unharmed = 0
