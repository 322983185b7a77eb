"""The API keys of clients, from a file that may change while the server runs."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import logging
import secrets
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from host.access.client import Client, SharedCapacity
from host.access.key_file import read_key_file
from host.errors import HostError, internal, unauthenticated
from host.metrics.catalogue import MetricsSnapshot
from host.metrics.family import labels_of

_log = logging.getLogger("pbhost")

_RECHECK_SECONDS = 1.0

_FileState = tuple[int, int, int]
"""Time of the last change in nanoseconds since 1970, inode and size."""


CATEGORY_WITHOUT_KEY = "health"
"""Requests of this category need no key: monitoring sends them."""


class ApiKeys:
    """Finds the client of a request by its key. Belongs to the event loop.

    The file is read again after it has changed; if it cannot be read then, the old keys stay.
    """

    def __init__(
        self,
        path: str,
        categories: Collection[str],
        default: frozenset[str],
        max_concurrent: int = 0,
    ) -> None:
        """`categories`: all that there are. `default`: those of a key that names none.

        `max_concurrent`: the requests in progress that clients share; 0 means no limit.

        Raises HostError INTERNAL if the file cannot be read.
        """
        self._path = Path(path)
        self._categories = categories
        self._default = default
        self._capacity = SharedCapacity(max_concurrent)
        self._clients: dict[str, Client] = {}
        self._unauthenticated = 0
        # Clients are found by a keyed hash: nothing about a stored hash can be learned from the
        # time of a look-up, which would not take the same time for all texts.
        self._secret = secrets.token_bytes(32)
        self._by_hash: dict[bytes, Client] = {}
        try:
            self._state: _FileState | None = self._file_state()
            self._read()
        except (OSError, ValueError) as error:
            raise internal(f"failed to read the API keys in '{path}': {error}") from None
        self._checked = time.monotonic()

    def authorize(self, category: str, authorization: str | bytes | None) -> Client:
        """Returns the client of a request of a category.

        `authorization`: the header of this name. An empty category needs only a key.
        Raises HostError UNAUTHENTICATED or PERMISSION_DENIED.
        """
        client = self._authenticate(authorization)
        client.check_category(category)
        return client

    def _authenticate(self, authorization: str | bytes | None) -> Client:
        self._reload()
        if isinstance(authorization, str):
            authorization = authorization.encode("utf-8", "surrogateescape")
        try:
            key = parse_key(authorization or b"")
        except HostError:
            self._unauthenticated += 1
            raise
        client = self._by_hash.get(self._index(hashlib.sha256(key).digest()))
        if client is None:
            self._unauthenticated += 1
            raise unauthenticated("unknown API key")
        return client

    def _index(self, digest: bytes) -> bytes:
        return hmac.digest(self._secret, digest, "sha256")

    def _reload(self) -> None:
        now = time.monotonic()
        if now - self._checked < _RECHECK_SECONDS:
            return
        self._checked = now
        try:
            state = self._file_state()
        except OSError as error:
            self._report_failure(None, error)
            return
        # A file that has changed just now may be incomplete: it is read at a later check.
        if state == self._state or abs(time.time() - state[0] / 1e9) < _RECHECK_SECONDS:
            return
        try:
            self._read()
            self._state = state
            _log.info("read %d API keys from '%s'", len(self._by_hash), self._path)
        except (OSError, ValueError) as error:
            self._report_failure(state, error)

    def _report_failure(self, state: _FileState | None, error: Exception) -> None:
        """Logs once that this state of the file cannot be read."""
        if state != self._state:
            self._state = state
            _log.error(
                "the API keys in '%s' cannot be read again, the old ones stay valid: %s",
                self._path, error,
            )  # fmt: skip

    def _file_state(self) -> _FileState:
        status = self._path.stat()
        return status.st_mtime_ns, status.st_ino, status.st_size

    def _read(self) -> None:
        """Replaces the keys. A client that stays keeps its counts. Raises OSError, ValueError."""
        entries = read_key_file(self._path, self._categories, self._default)
        known = self._clients
        self._clients, self._by_hash = {}, {}
        for name, entry in entries.items():
            client = known.get(name)
            if client is None:
                client = Client(name, entry.permissions, self._capacity)
            else:
                client.set_permissions(entry.permissions)
            self._clients[name] = client
            for digest in entry.hashes:
                self._by_hash[self._index(digest)] = client

    def collect_into(self, snapshot: MetricsSnapshot) -> None:
        """Adds the metrics of all clients."""
        snapshot["pbhost_unauthenticated_requests_total"].add((), self._unauthenticated)
        for client in self._clients.values():
            labels = (("client", client.name),)
            snapshot["pbhost_client_requests_total"].add(labels, client.started)
            snapshot["pbhost_client_requests_in_progress"].add(labels, client.in_progress)
            for reason, count in client.refused.items():
                refused = labels_of({"client": client.name, "reason": reason.value})
                snapshot["pbhost_client_refused_requests_total"].add(refused, count)


def parse_key(header: bytes) -> bytes:
    """Returns the key in a header `Authorization`. Raises HostError UNAUTHENTICATED without one.

    In the scheme Basic, which browsers and `tritonclient`'s BasicAuth use, it is the password.
    """
    scheme, _, rest = header.strip().partition(b" ")
    key = b""
    match scheme.lower():
        case b"bearer":
            key = rest.strip()
        case b"basic":
            with suppress(binascii.Error):
                key = base64.b64decode(rest.strip(), validate=True).partition(b":")[2]
    if not key:
        raise unauthenticated("this server needs an API key: Authorization: Bearer KEY")
    return key
