"""The API keys of clients, from a file that may change while the server runs."""

from __future__ import annotations

import base64
import binascii
import difflib
import hashlib
import hmac
import logging
import math
import re
import secrets
import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from host.access.clients import Client, Permissions, SharedCapacity
from host.errors import HostError, internal, unauthenticated
from host.metrics.families import MetricsSnapshot, labels_of
from host.system.files import read_file

_MIN_LENGTH = 8  # characters of a key
_MAX_FILE_BYTES = 1 << 24
_HASHED = re.compile(r"sha256:([0-9a-fA-F]{64})")
_OPTIONS = ("models", "rate", "burst", "concurrency", "allow")
_OPTION = re.compile(rf"({'|'.join(_OPTIONS)})=(.*)")

DEFAULT_CATEGORIES = frozenset(("metadata", "inference", "model-config", "statistics"))
"""The categories of a client whose line has no `allow`."""


@dataclass(slots=True)
class ClientEntry:
    """A client of a key file: the SHA-256 hashes of its keys, and its permissions."""

    permissions: Permissions
    hashes: list[bytes] = field(default_factory=list)


def read_key_file(
    path: Path, categories: Collection[str], default: frozenset[str] = DEFAULT_CATEGORIES
) -> dict[str, ClientEntry]:
    """Returns the clients of a key file by name. `categories`: the known ones. Blocks.

    Raises OSError, and ValueError with the line of an error.
    """
    if path.stat().st_size > _MAX_FILE_BYTES:
        raise ValueError(f"it has more than {_MAX_FILE_BYTES} bytes")
    clients: dict[str, ClientEntry] = {}
    lines_of_options: dict[str, int] = {}
    owners: dict[bytes, int] = {}
    for number, line in enumerate(read_file(path).decode().splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        try:
            name, digest, options = _split_line(words)
            if digest in owners:
                raise ValueError(f"line {owners[digest]} has the same key")
            owners[digest] = number
            name = name or digest.hex()[:8]
            if name not in clients:
                clients[name] = ClientEntry(_read_options({}, categories, default))
            if options:
                first = lines_of_options.setdefault(name, number)
                if first != number:
                    raise ValueError(f"line {first} has the options of client '{name}'")
                clients[name].permissions = _read_options(options, categories, default)
            clients[name].hashes.append(digest)
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from None
    if not clients:
        raise ValueError("it has no key")
    return clients


def _split_line(words: list[str]) -> tuple[str, bytes, dict[str, str]]:
    """Returns the name, or "", the hash of the key, and the options. Raises ValueError."""
    options: dict[str, str] = {}
    while len(words) > 1 and (option := _OPTION.fullmatch(words[-1])):
        name, value = option.groups()
        if name in options:
            raise ValueError(f"option '{name}' is given twice")
        options[name] = value
        words = words[:-1]
    if len(words) > 2:
        raise ValueError(_unexpected_word(words[2]))
    key = words[-1]
    hashed = _HASHED.fullmatch(key)
    if hashed:
        digest = bytes.fromhex(hashed[1])
    elif key.startswith("sha256:"):
        raise ValueError("a hash is sha256: and 64 hexadecimal digits")
    elif len(key) < _MIN_LENGTH:
        raise ValueError(f"the key has less than {_MIN_LENGTH} characters")
    else:
        digest = hashlib.sha256(key.encode()).digest()
    return words[0] if len(words) == 2 else "", digest, options


def _unexpected_word(word: str) -> str:
    """Returns the error for a word. It may be a key, so that the text has no part of it."""
    close = difflib.get_close_matches(word.partition("=")[0], _OPTIONS, n=1)
    hint = f"; did you mean '{close[0]}=...'?" if close else f". Options are {_list(_OPTIONS)}"
    return f"expected [NAME] KEY [OPTION=VALUE ...]{hint}"


def _read_options(
    options: dict[str, str], categories: Collection[str], default: frozenset[str]
) -> Permissions:
    rate = _number(options, "rate")
    burst = _count(options, "burst") or max(1, math.ceil(rate))
    allowed = default
    if "allow" in options:
        named = options["allow"].split(",")
        allowed = frozenset(categories if named == ["all"] else named)
        for category in sorted(allowed.difference(categories)):
            raise ValueError(
                f"allow: unknown category '{category}'; known are all, {_list(categories)}"
            )
    models = tuple(options["models"].split(",")) if "models" in options else ()
    if "" in models:
        raise ValueError("models: a name is empty")
    return Permissions(allowed, models, rate, burst, _count(options, "concurrency"))


def _number(options: dict[str, str], name: str) -> float:
    if name not in options:
        return 0.0
    try:
        number = float(options[name])
    except ValueError:
        number = math.nan
    if not 0 < number <= 1e9:
        raise ValueError(f"{name} must be a number above 0, got '{options[name]}'")
    return number


def _count(options: dict[str, str], name: str) -> int:
    text = options.get(name, "")
    if name not in options:
        return 0
    if not (text.isascii() and text.isdigit() and 0 < len(text) < 10 and int(text)):
        raise ValueError(f"{name} must be a whole number above 0, got '{text}'")
    return int(text)


def _list(names: Collection[str]) -> str:
    return ", ".join(sorted(names))


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
