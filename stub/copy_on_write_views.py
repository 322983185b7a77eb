"""Arrays that belong to the model without a copy: the kernel copies the pages that it writes to.

Most models only read what `as_numpy` gives them. An array over a private, copy-on-write mapping of
the block costs them nothing. It must not change when the block is used anew, so an array that
outlives its batch, or a fork, gets pages of its own before that.
"""

import os
import threading
from collections import deque
from typing import TYPE_CHECKING, Any, Callable, Deque, List, Optional, Tuple

from pb_utils._storage import address_of, array_at
from stub.copy_on_write_mapping import CopyOnWriteMapping
from stub.wire.arena import Block
from stub.wire.shared_file import PAGE

if TYPE_CHECKING:
    import numpy.typing as npt

_ALIGNMENT = 16  # bytes, as of memory that numpy allocates
_INITIAL_BACKOFF = 64  # arrays
_MAX_BACKOFF = 1 << 16
_MAX_VIEWS = 64  # arrays of which something is kept in mind; more are copies


class RegionBlock(Block):
    """A block in a client's memory, which came with a `batch`. After that the client may change it
    although the block lives.
    """

    __slots__ = ("batch",)

    batch: int  # set by whoever makes it


def _ignore_wake() -> None:
    """In a forked child nobody is to be woken."""


class _View:
    """The pages that an array shows."""

    __slots__ = (
        *("address", "alive", "block", "end", "mapping", "nbytes", "detached", "replaced", "start"),
    )

    def __init__(self, mapping: CopyOnWriteMapping, block: Block) -> None:
        self.mapping = mapping
        self.start = block.offset // PAGE * PAGE
        self.end = (block.offset + block.size + PAGE - 1) // PAGE * PAGE
        self.address = mapping.address + block.offset
        self.nbytes = block.size
        self.block: Optional[Block] = None  # what the array depends on
        self.detached = False  # it has pages of its own, or had
        self.replaced = False  # and these are not of the mapping
        self.alive = True

    def overlaps_file_range(self, file: Tuple[int, int], place: int, size: int) -> bool:
        start = place - self.mapping.file_offset
        return self.mapping.file == file and self.start < start + size and start < self.end

    def overlaps(self, other: "_View") -> bool:
        return (
            self is not other
            and self.mapping is other.mapping
            and self.start < other.end
            and other.start < self.end
        )

    def detach(self) -> bool:
        """Give the array pages of its own; False if there is no memory for that, or no file."""
        start, size = self.start, self.end - self.start
        try:
            if self.mapping.is_client_region and not self.mapping.is_changed(start, size):
                self.mapping.replace_with_copy(start, size)
                self.replaced = True
            else:  # a thread of the model may be writing there at this moment
                self.mapping.copy_pages(start, size)
        except OSError:
            return False
        self.detached = True
        self.block = None
        return True

    def is_changed(self) -> bool:
        return self.detached or self.mapping.is_changed(self.start, self.end - self.start)

    def restore_file_pages(self) -> bool:
        """Whether the pages show the file again; the array is gone."""
        if self.replaced:
            return False
        try:
            self.mapping.discard_changes(self.start, self.end - self.start)
        except OSError:  # locked in memory, by the model
            return False
        return True


class _ViewLifetime:
    """What the arrays over a view keep alive."""

    __slots__ = ("_on_drop", "_view")

    def __init__(self, view: _View, gone: Callable[[_View], None]) -> None:
        self._view = view
        self._on_drop = gone

    def __del__(self) -> None:
        self._on_drop(self._view)


class CopyOnWriteViews:
    """Those of one stub, made on its main thread while `execute` runs.

    A model that writes to them, or keeps them, pays more than for copies. It gets copies for a
    while then, for twice as long each time. Finalisers may call any method in the middle of any
    other, in the same thread.
    """

    def __init__(
        self,
        mapping_of: Callable[[int], Optional[CopyOnWriteMapping]],
        wake: Callable[[], None],
    ) -> None:
        """`mapping_of` an arena by its number, None if there is none; `wake` has
        `reclaim_dropped_views` called
        soon.
        """
        self.batch = 0  # number of the present one, or of the last
        self._mapping_of = mapping_of
        self._wake = wake
        self._views: List[_View] = []  # also those of arrays that have pages of their own
        self._dropped: Deque[_View] = deque()
        self._lock = threading.RLock()
        self._batch_thread = 0
        self._regions_allowed = False  # whether clients' memory may be shown
        self._copies_left = 0  # so many arrays are still to be copied
        self._backoff = _INITIAL_BACKOFF  # the next rest
        self._unchanged_views = 0  # since the last rest

    def begin_batch(self, regions: bool) -> None:
        """A batch begins on this thread; `regions` says whether no client is answered before it
        ends.
        """
        self.batch += 1
        self._batch_thread = threading.get_ident()
        self._regions_allowed = regions

    def end_batch(self) -> None:
        """The batch is about to be answered: arrays that are still alive get pages of their own."""
        self._batch_thread = 0
        if self._views:
            self.detach_all()

    def detach_all(self) -> None:
        """Let no living array depend on a block any more.

        Where the client has taken its memory away, or there is no memory, they go on doing so.
        """
        with self._lock:
            self._detach(list(self._views))

    def detach_from_client_regions(self) -> None:
        """As `detach_all`, of clients' memory, which is not shown any more in this batch."""
        with self._lock:
            self._regions_allowed = False
            self._detach([view for view in self._views if view.mapping.is_client_region])

    def detach_from_range(self, file: Tuple[int, int], place: int, size: int) -> None:
        """As `detach_all`, of bytes in a file that are about to be written to."""
        if self._views:
            with self._lock:
                self._detach(
                    [view for view in self._views if view.overlaps_file_range(file, place, size)]
                )

    def map_array(self, owner: object, array: "npt.NDArray[Any]") -> "Optional[npt.NDArray[Any]]":
        """A writable array of the same content, type and shape, over the block `owner`.

        None where that cannot be, or does not pay.
        """
        if threading.get_ident() != self._batch_thread or not isinstance(owner, Block):
            return None
        self.reclaim_dropped_views()
        if self._copies_left:
            self._copies_left -= 1
            return None
        mapping = self._mapping_of(owner.arena)
        if mapping is None or array.nbytes != owner.size or len(self._views) >= _MAX_VIEWS:
            return None
        if mapping.is_client_region and not (
            isinstance(owner, RegionBlock) and owner.batch == self.batch
        ):
            return None
        view = _View(mapping, owner)
        with self._lock:
            self._views.append(view)  # first: what comes in the middle of this must not be over it
            if not view.address % _ALIGNMENT and not any(map(view.overlaps, list(self._views))):
                view.block = owner
                allowed = self._regions_allowed or not mapping.is_client_region or view.detached
                if allowed and not mapping.released:
                    holder = _ViewLifetime(view, self._on_arrays_dropped)
                    return array_at(view.address, array.dtype, array.shape, holder, writable=True)
                view.block = None
            self._views.remove(view)
        return None

    def _on_arrays_dropped(self, view: _View) -> None:
        """The last array over it has gone; called by finalisers, so it waits for nothing."""
        view.block = None
        view.alive = False
        self._dropped.append(view)
        if not self._batch_thread:
            self._wake()

    def unchanged_block_of(self, array: "Optional[npt.NDArray[Any]]") -> Optional[Block]:
        """The block that an array shows whole and unchanged, unless it is a client's memory."""
        if array is None or not self._views:
            return None
        address, nbytes = address_of(array), array.nbytes
        with self._lock:
            for view in list(self._views):
                if view.address == address and view.nbytes == nbytes and view.block is not None:
                    block = view.block
                    return None if view.mapping.is_client_region or view.is_changed() else block
        return None

    def reclaim_dropped_views(self) -> None:
        """Take back what the arrays that have gone have left. Any thread."""
        if not self._dropped:
            return
        written = False
        with self._lock:
            while self._dropped:
                view = self._dropped.popleft()
                self._views.remove(view)
                if not view.is_changed():
                    self._unchanged_views += 1
                    continue
                written = written or not view.detached
                if not view.restore_file_pages():
                    self.release_mapping(view.mapping)
        if written:
            self._back_off()
        elif self._unchanged_views >= self._backoff:
            self._backoff = _INITIAL_BACKOFF

    def release_mapping(self, mapping: CopyOnWriteMapping) -> None:
        """Nothing more is shown of this mapping: only living arrays need it."""
        with self._lock:
            views = [view for view in self._views if view.mapping is mapping and view.alive]
            try:
                mapping.release_file(sorted((view.start, view.end) for view in views))
            except OSError:
                pass  # too many mappings: the file stays until the last of these arrays has gone

    def register_fork_handlers(self) -> None:
        """From now on, no child depends on a block that this process gives back."""
        os.register_at_fork(before=self.detach_all, after_in_child=self._reset_in_forked_child)

    def _reset_in_forked_child(self) -> None:
        self._batch_thread = 0
        self._wake = _ignore_wake
        self._views = []
        self._dropped.clear()
        self._lock = threading.RLock()  # another thread may have held it

    def _detach(self, views: List[_View]) -> None:
        detached = [view.detach() for view in views if view.block is not None]
        if any(detached):
            self._back_off()

    def _back_off(self) -> None:
        self._copies_left = self._backoff
        self._backoff = min(2 * self._backoff, _MAX_BACKOFF)
        self._unchanged_views = 0
