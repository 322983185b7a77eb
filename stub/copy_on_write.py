"""Gives models writable arrays over received tensors without a copy, by copy-on-write mappings.

Most models only read the arrays of `as_numpy`. An array over a private, copy-on-write mapping of
the block costs such a model nothing, and the kernel copies the pages that another model writes to.
The array must not change when the block is reused, so it gets its own pages before that: at the end
of its batch, and before a fork.
"""

import ctypes
import mmap
import os
import resource
import sys
import threading
from collections import deque
from typing import TYPE_CHECKING, Any, Callable, Deque, List, Optional, Tuple

from pb_utils._storage import address_of, array_at
from stub.wire.arena import Block
from stub.wire.shared_file import PAGE, file_identity

if TYPE_CHECKING:
    import numpy.typing as npt


_NORESERVE = 0x4000  # from <sys/mman.h>, like the next one (Linux 5.14)
_POPULATE_WRITE = 23
_MAX_MAPPED_BYTES = 16 << 40  # bytes; a process has 128 TiB of addresses, and the arenas need some
_PAGEMAP_ENTRY_SIZE = 8  # bytes per page in /proc/self/pagemap; the last one holds the flags
_UNCHANGED_PAGE_FLAGS = bytes(flags for flags in range(256) if flags >> 5 & 1 or not flags >> 6)
"""Flag bytes of pages without changes: the page belongs to the file (bit 5), or is not present
(bits 6 and 7 are clear)."""


class CopyOnWriteMapping:
    """A copy-on-write mapping of a file: what this process writes is not written to the file.

    `address` is the start of the mapping. `file_offset` is the position of that start in `file`, an
    identity from `file_identity`. The methods take offsets from `address` and sizes, in bytes; both
    are multiples of the page size.
    """

    def __init__(self, fd: int, size: int, offset: int, region: bool) -> None:
        """Maps `size` bytes of the file; `region` tells whether they are a client's shared memory.

        Raises OSError or ValueError if the file cannot be mapped.
        """
        global _page_map, _mapped_bytes
        if sys.byteorder != "little" or _address_space_is_limited():
            raise OSError("copy-on-write mappings need an unlimited address space")
        if _mapped_bytes + size > _MAX_MAPPED_BYTES:
            raise OSError(f"{_mapped_bytes} bytes are mapped already")
        if _page_map is None:
            _page_map = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
        self.file = file_identity(fd)
        self.file_offset = offset
        self.is_client_region = region
        self.released = False
        self._size = size
        flags = mmap.MAP_PRIVATE | _NORESERVE
        self._map = mmap.mmap(fd, size, flags=flags, offset=offset)
        self._map.madvise(_POPULATE_WRITE, 0, 0)  # no bytes: fails if the kernel lacks it
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        _mapped_bytes += size

    def __del__(self) -> None:
        global _mapped_bytes
        if hasattr(self, "address"):
            _mapped_bytes -= self._size

    def is_changed(self, offset: int, size: int) -> bool:
        """Returns whether this process has written to any of the pages."""
        assert _page_map is not None
        count = -(-size // PAGE)
        entries = os.pread(
            _page_map,
            count * _PAGEMAP_ENTRY_SIZE,
            (self.address + offset) // PAGE * _PAGEMAP_ENTRY_SIZE,
        )
        return len(entries) < count * _PAGEMAP_ENTRY_SIZE or bool(
            entries[7::8].translate(None, _UNCHANGED_PAGE_FLAGS)
        )

    def discard_changes(self, offset: int, size: int) -> None:
        """Reverts the pages to the content of the file; to zeros after `replace_with_copy`.

        Raises OSError.
        """
        self._map.madvise(mmap.MADV_DONTNEED, offset, size)

    def copy_pages(self, offset: int, size: int) -> None:
        """Copies each page that is not a copy yet. Raises OSError.

        Other threads may write to the pages meanwhile.
        """
        _call_libc(_libc.madvise, self.address + offset, size, _POPULATE_WRITE)

    def replace_with_copy(self, offset: int, size: int) -> None:
        """Replaces the pages by anonymous memory with the same content. Raises OSError.

        Unlike the copies of `copy_pages`, these pages stay when the file shrinks. A write of
        another thread during the call may be lost.
        """
        # Raises an error if the file is too short; touching the pages would be a SIGBUS.
        self.copy_pages(offset, size)
        size = -(-size // PAGE) * PAGE
        copy = _call_libc(_libc.mmap, None, size, _READ_WRITE, _PRIVATE_ANONYMOUS, -1, 0)
        target = self.address + offset
        ctypes.memmove(copy, target, size)
        try:
            _call_libc(_libc.mremap, copy, size, size, _MAYMOVE_FIXED, target)
        except OSError:
            _call_libc(_libc.munmap, copy, size)
            raise

    def release_file(self, kept: List[Tuple[int, int]]) -> None:
        """Unmaps the file, except for the parts in `kept`: sorted pairs (start, end).

        Raises OSError.
        """
        self.released = True
        flags = _PRIVATE_ANONYMOUS | _FIXED | _NORESERVE
        ends = [0, *(end for _, end in kept)]
        starts = [*(start for start, _ in kept), -(-self._size // PAGE) * PAGE]
        for start, end in zip(ends, starts):
            if start < end:
                _call_libc(_libc.mmap, self.address + start, end - start, 0, flags, -1, 0)


def _address_space_is_limited() -> bool:
    """Returns whether the system counts mappings that reserve no memory towards a limit."""
    limits = (resource.RLIMIT_AS, resource.RLIMIT_DATA)
    if any(resource.getrlimit(limit)[0] != resource.RLIM_INFINITY for limit in limits):
        return True
    try:
        with open("/proc/sys/vm/overcommit_memory") as setting:
            return setting.read().strip() == "2"
    except OSError:
        return True


def _call_libc(function: Any, *arguments: Any) -> int:
    """Calls a function of the C library. Raises OSError."""
    result: int = function(*arguments)
    if result == -1 or result == _FAILED:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


_page_map: Optional[int] = None
_mapped_bytes = 0  # bytes of all copy-on-write mappings
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
_libc.mmap.argtypes = (
    *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int),
    ctypes.c_long,
)
_libc.mmap.restype = ctypes.c_size_t
_libc.munmap.argtypes = ctypes.c_void_p, ctypes.c_size_t
_libc.mremap.argtypes = (
    *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int),
    ctypes.c_void_p,
)
_libc.mremap.restype = ctypes.c_size_t
_FAILED = ctypes.c_size_t(-1).value
_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
_PRIVATE_ANONYMOUS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
_FIXED = 0x10  # from <sys/mman.h>
_MAYMOVE_FIXED = 1 | 2


_ALIGNMENT = 16  # bytes, like memory that numpy allocates
_INITIAL_BACKOFF = 64  # number of arrays that are copied
_MAX_BACKOFF = 1 << 16
_MAX_VIEWS = 64  # number of views that are tracked; further arrays are copied


class RegionBlock(Block):
    """A block in a client's shared memory, received with the batch number `batch`.

    The client may change the memory after that batch, even while the block is alive.
    """

    __slots__ = ("batch",)

    batch: int  # set after construction


def _ignore_wake() -> None:
    """Does nothing: a forked child has no service thread to wake."""


class _View:
    """The range of pages under one array."""

    __slots__ = (
        *("address", "alive", "block", "end", "mapping", "nbytes", "detached", "replaced", "start"),
    )

    def __init__(self, mapping: CopyOnWriteMapping, block: Block) -> None:
        self.mapping = mapping
        self.start = block.offset // PAGE * PAGE
        self.end = (block.offset + block.size + PAGE - 1) // PAGE * PAGE
        self.address = mapping.address + block.offset
        self.nbytes = block.size
        self.block: Optional[Block] = None  # the block that the array depends on
        self.detached = False  # the array has its own pages, or had them
        self.replaced = False  # its own pages have replaced those of the mapping
        self.alive = True

    def overlaps_file_range(self, file: Tuple[int, int], offset: int, size: int) -> bool:
        start = offset - self.mapping.file_offset
        return self.mapping.file == file and self.start < start + size and start < self.end

    def overlaps(self, other: "_View") -> bool:
        return (
            self is not other
            and self.mapping is other.mapping
            and self.start < other.end
            and other.start < self.end
        )

    def detach(self) -> bool:
        """Gives the array its own pages; returns False if memory is short, or the file is gone."""
        start, size = self.start, self.end - self.start
        try:
            if self.mapping.is_client_region and not self.mapping.is_changed(start, size):
                self.mapping.replace_with_copy(start, size)
                self.replaced = True
            else:  # a thread of the model may write to the pages now
                self.mapping.copy_pages(start, size)
        except OSError:
            return False
        self.detached = True
        self.block = None
        return True

    def is_changed(self) -> bool:
        return self.detached or self.mapping.is_changed(self.start, self.end - self.start)

    def restore_file_pages(self) -> bool:
        """Reverts the pages of a deleted array; returns whether they show the file again."""
        if self.replaced:
            return False
        try:
            self.mapping.discard_changes(self.start, self.end - self.start)
        except OSError:  # the model has locked the pages in memory
            return False
        return True


class _ViewLifetime:
    """The owner of all arrays over a view: its finaliser runs after the last array is deleted."""

    __slots__ = ("_on_drop", "_view")

    def __init__(self, view: _View, gone: Callable[[_View], None]) -> None:
        self._view = view
        self._on_drop = gone

    def __del__(self) -> None:
        self._on_drop(self._view)


class CopyOnWriteViews:
    """The copy-on-write views of one stub, created on the thread of the batch during `execute`.

    A model that writes to its arrays or keeps them pays more for views than for copies. It
    therefore gets copies for a while, and each time for twice as many arrays as before. Finalisers
    may call any method while another one runs on the same thread.
    """

    def __init__(
        self,
        mapping_of: Callable[[int], Optional[CopyOnWriteMapping]],
        wake: Callable[[], None],
    ) -> None:
        """Stores the two callbacks.

        `mapping_of` returns the mapping of an arena number, or None. `wake` wakes the service
        thread, which then calls `reclaim_dropped_views`.
        """
        self.batch = 0  # number of the current batch, or of the last one
        self._mapping_of = mapping_of
        self._wake = wake
        self._views: List[_View] = []  # including views that have their own pages
        self._dropped: Deque[_View] = deque()
        self._lock = threading.RLock()
        self._batch_thread = 0
        self._regions_allowed = False  # whether views of client regions are allowed now
        self._copies_left = 0  # number of arrays to copy before the next view
        self._backoff = _INITIAL_BACKOFF  # next value of _copies_left
        self._unchanged_views = 0  # since the last backoff

    def begin_batch(self, regions: bool) -> None:
        """Begins a batch on this thread.

        `regions` allows views of client regions: no response leaves before the end of the batch.
        """
        self.batch += 1
        self._batch_thread = threading.get_ident()
        self._regions_allowed = regions

    def end_batch(self) -> None:
        """Ends the batch before its responses are sent: arrays still alive get their own pages."""
        self._batch_thread = 0
        if self._views:
            self.detach_all()

    def detach_all(self) -> None:
        """Gives all living arrays their own pages, so that no array depends on a block.

        An array stays dependent if memory is short, or if the client has removed its region.
        """
        with self._lock:
            self._detach(list(self._views))

    def detach_from_client_regions(self) -> None:
        """Detaches the views of client regions, and creates no more of them in this batch."""
        with self._lock:
            self._regions_allowed = False
            self._detach([view for view in self._views if view.mapping.is_client_region])

    def detach_from_range(self, file: Tuple[int, int], offset: int, size: int) -> None:
        """Detaches the views of bytes in a file that are about to be overwritten."""
        if self._views:
            with self._lock:
                self._detach(
                    [view for view in self._views if view.overlaps_file_range(file, offset, size)]
                )

    def map_array(self, owner: object, array: "npt.NDArray[Any]") -> "Optional[npt.NDArray[Any]]":
        """Returns a writable array with the content, type and shape of `array` over block `owner`.

        Returns None if that is not possible, or slower than a copy.
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
            self._views.append(view)  # first, so that views created during this call do not overlap
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
        """Marks the view for `reclaim_dropped_views`. Called by finalisers, so it never waits."""
        view.block = None
        view.alive = False
        self._dropped.append(view)
        if not self._batch_thread:
            self._wake()

    def unchanged_block_of(self, array: "Optional[npt.NDArray[Any]]") -> Optional[Block]:
        """Returns the block under an array that covers it and has not changed it.

        Returns None for other arrays, and for blocks in client regions.
        """
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
        """Removes the views whose arrays are deleted, on any thread; backs off if they were
        written.
        """
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
        """Ends the use of a mapping: only arrays that are alive still keep parts of it."""
        with self._lock:
            views = [view for view in self._views if view.mapping is mapping and view.alive]
            try:
                mapping.release_file(sorted((view.start, view.end) for view in views))
            except OSError:
                pass  # too many mappings: the file stays mapped until the last array is deleted

    def register_fork_handlers(self) -> None:
        """Detaches all views before each fork: no child may depend on a block of its parent."""
        os.register_at_fork(before=self.detach_all, after_in_child=self._reset_in_forked_child)

    def _reset_in_forked_child(self) -> None:
        self._batch_thread = 0
        self._wake = _ignore_wake
        self._views = []
        self._dropped.clear()
        self._lock = threading.RLock()  # another thread may have held the lock

    def _detach(self, views: List[_View]) -> None:
        detached = [view.detach() for view in views if view.block is not None]
        if any(detached):
            self._back_off()

    def _back_off(self) -> None:
        self._copies_left = self._backoff
        self._backoff = min(2 * self._backoff, _MAX_BACKOFF)
        self._unchanged_views = 0
