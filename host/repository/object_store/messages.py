"""Messages between a server and its process that reads object stores: a line of JSON each."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from host.repository.object_store.stored_object import StoredObject


@dataclass(frozen=True, slots=True)
class Request:
    """Asks for a listing, for the content of an object, or for its content in a file.

    Attributes:
        id: What the replies have.
        url: The location.
        stall_seconds: The most seconds without a byte.
        folder: What to list; "" is everything.
        stored: The object to read; None asks for a listing.
        path: The new file to write; "" asks for the content itself.
    """

    id: int
    url: str
    stall_seconds: float
    folder: str = ""
    stored: StoredObject | None = None
    path: str = ""


@dataclass(frozen=True, slots=True)
class Failure:
    """An error; `changed`: the object is not the one that was listed."""

    code: str
    message: str
    changed: bool


@dataclass(frozen=True, slots=True)
class Reply:
    """The bytes received since the last reply; in the last one, also the result or an error.

    One with `SIGN_OF_LIFE` as its `id` belongs to no request.
    A long listing comes in several replies, so that the server decodes a part of it at a time.
    """

    id: int
    received: int = 0
    ended: bool = False
    objects: list[StoredObject] | None = None
    content: bytes | None = None
    failure: Failure | None = None


@dataclass(frozen=True, slots=True)
class Cancel:
    """Ends a request; no reply follows."""

    cancelled: int


SIGN_OF_LIFE = 0


def encode_line(message: Request | Cancel | Reply) -> bytes:
    """A message as a line."""
    return msgspec.json.encode(message) + b"\n"


_replies = msgspec.json.Decoder(Reply)
_requests = msgspec.json.Decoder(Request)
_cancels = msgspec.json.Decoder(Cancel)


def decode_reply(line: bytes) -> Reply:
    """A reply from its line."""
    return _replies.decode(line)


def decode_request(line: bytes) -> Request | Cancel:
    """A request, or its cancellation, from a line."""
    return (_cancels if line.startswith(b'{"cancelled"') else _requests).decode(line)


BEAT_SECONDS = 1.0
"""The time between two signs of life of the process that reads, while it has requests."""

LONGEST_LINE = 1 << 30
"""The most bytes of a line: an object may be a configuration file, or have a long name."""
