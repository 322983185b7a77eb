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
from stub.wire.arena import Block
from stub.wire.shared_file import PAGE, PrivateMapping

if TYPE_CHECKING:
    import numpy.typing as npt

_ALIGNMENT = 16  # bytes, as of memory that numpy allocates
_FIRST_REST = 64  # arrays
_LONGEST_REST = 1 << 16


class _Span:
    """The pages that an array shows."""

    __slots__ = ("address", "block", "end", "mapping", "nbytes", "start")

    def __init__(self, mapping: PrivateMapping, block: Block) -> None:
        self.mapping = mapping
        self.start = block.offset // PAGE * PAGE
        self.end = (block.offset + block.size + PAGE - 1) // PAGE * PAGE
        self.address = mapping.address + block.offset
        self.nbytes = block.size
        self.block: Optional[Block] = block  # None: the array is gone, or has pages of its own

    def lies_in(self, file: Tuple[int, int], place: int, size: int) -> bool:
        start = place - self.mapping.place
        return self.mapping.file == file and self.start < start + size and start < self.end

    def overlaps(self, mapping: PrivateMapping, start: int, end: int) -> bool:
        return self.mapping is mapping and self.start < end and start < self.end


class _Holder:
    """What the arrays over a span keep alive."""

    __slots__ = ("_gone", "_span")

    def __init__(self, span: _Span, gone: Deque[_Span]) -> None:
        self._span = span
        self._gone = gone

    def __del__(self) -> None:  # anywhere, so it takes no lock
        self._span.block = None
        self._gone.append(self._span)


class Snapshots:
    """Those of one stub, made on its main thread while `execute` runs.

    A model that writes to them, or keeps them, pays more than for copies. It gets copies for a
    while then, for twice as long each time.
    """

    def __init__(self, mapping_of: Callable[[int], Optional[PrivateMapping]]) -> None:
        """`mapping_of` an arena by its number; None if there is none."""
        self._mapping_of = mapping_of
        self._live: List[_Span] = []  # also those of arrays that have pages of their own
        self._gone: Deque[_Span] = deque()
        self._lock = threading.Lock()
        self._thread = 0
        self._regions = False  # whether clients' memory may be shown
        self._rest = 0  # so many arrays are still to be copied
        self._pause = _FIRST_REST  # the next rest
        self._unharmed = 0  # since the last rest

    def begin(self, regions: bool) -> None:
        """A batch begins on this thread; `regions` says whether no client is answered before it
        ends.
        """
        self._thread = threading.get_ident()
        self._regions = regions

    def end(self) -> None:
        """The batch is about to be answered: arrays that are still alive get pages of their own.

        Raises OSError if there is no memory for them.
        """
        self._thread = 0
        if self._live:
            self.part()

    def part(self) -> None:
        """Let no living array depend on a block any more. Raises OSError."""
        with self._lock:
            self._part(list(self._live))

    def part_from_regions(self) -> None:
        """As `part`, of clients' memory, which is not shown any more in this batch."""
        with self._lock:
            self._regions = False
            self._part([span for span in self._live if span.mapping.region])

    def part_from(self, file: Tuple[int, int], place: int, size: int) -> None:
        """As `part`, of bytes in a file that are about to be written to. Raises OSError."""
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
        if mapping is None or array.nbytes != owner.size:
            return None
        span = _Span(mapping, owner)
        with self._lock:
            if span.address % _ALIGNMENT or (mapping.region and not self._regions):
                return None
            if any(other.overlaps(mapping, span.start, span.end) for other in self._live):
                return None
            self._live.append(span)
        holder = _Holder(span, self._gone)
        return borrow(span.address, array.dtype, array.shape, holder, writable=True)

    def block_of(self, array: "Optional[npt.NDArray[Any]]") -> Optional[Block]:
        """The block that an array shows whole and unchanged, unless it is a client's memory."""
        if array is None or not self._live:
            return None
        address, nbytes = address_of(array), array.nbytes
        with self._lock:
            for span in self._live:
                if span.address == address and span.nbytes == nbytes:
                    unchanged = not span.mapping.region and not self._is_changed(span)
                    return span.block if unchanged else None
        return None

    def tidy(self) -> None:
        """Take back what the arrays that have gone have left."""
        while self._gone:
            span = self._gone.popleft()
            with self._lock:
                self._live.remove(span)
                if self._is_changed(span):
                    span.mapping.forget(span.start, span.end - span.start)
                    self._tire()
                    continue
            self._unharmed += 1
            if self._unharmed >= self._pause:
                self._pause = _FIRST_REST

    def _is_changed(self, span: _Span) -> bool:
        return span.mapping.is_changed(span.start, span.end - span.start)

    def _part(self, spans: List[_Span]) -> None:
        for span in spans:
            if span.block is not None:
                span.mapping.part(span.start, span.end - span.start)
                span.block = None

    def _tire(self) -> None:
        self._rest = self._pause
        self._pause = min(2 * self._pause, _LONGEST_REST)
        self._unharmed = 0

    def provide_for_forks(self) -> None:
        """From now on, no child depends on a block that this process gives back."""
        os.register_at_fork(before=self.part, after_in_child=self._stop)

    def _stop(self) -> None:
        self._thread = 0
        self._live = []
        self._lock = threading.Lock()  # another thread may have held it
