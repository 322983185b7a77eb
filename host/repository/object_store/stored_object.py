"""An object as a store lists it, and the errors of reading it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

from host.errors import ErrorCode, HostError

NEW = ".new"
"""The end of the names of files and folders in the cache that are not complete yet."""

UNLISTED = -1
"""The size of an object with a refused key, beside which others could not be listed."""


@dataclass(frozen=True)
class StoredObject:
    """An object as the store lists it; `path` is below the prefix of the location."""

    path: str
    size: int
    etag: str
    version: str
    changed: float

    @cached_property
    def identity(self) -> str:
        """Equal for objects of equal content, as far as the store tells."""
        known = (self.path, self.size, self.etag, self.version, self.etag or self.changed)
        return hashlib.sha256(repr(known).encode()).hexdigest()[:32]


class ObjectChanged(HostError):
    """An object is no longer the one that was listed."""

    def __init__(self, message: str) -> None:
        super().__init__(ErrorCode.UNAVAILABLE, message)
