"""What a frontend process knows of the core's state: models, API keys, traces."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

from host.access.api_keys import parse_key
from host.config.schema import ModelConfig, new_config
from host.errors import ErrorCode, HostError
from host.frontend_processes.core_link import CoreLink, CoreSilent
from host.frontend_processes.frontend_messages import (
    Authorize,
    Cancel,
    FindModel,
    FinishTrace,
    WireTrace,
)
from host.inference.call import Call
from host.inference.request import RequestTrace
from host.models.registry import NotServedError
from host.tracing.trace import TRACE_HEADERS

_MAX_ENTRIES = 4096
_MAX_NAME_LENGTH = 512  # of a model that is remembered


class ModelTable:
    """The configurations of models, and the errors for those that are not found.

    Each is asked for once, until any model changes: the core shows that in shared memory, before
    a client can know of the change.
    """

    def __init__(self, link: CoreLink) -> None:
        self._link = link
        self._generation = -1
        self._known: dict[tuple[str, int], ModelConfig | HostError] = {}

    def find(self, model: str, version: int) -> ModelConfig:
        """The configuration of a model; -1 is the latest version. Raises HostError."""
        generation = self._link.state.generation
        if generation != self._generation or len(self._known) > _MAX_ENTRIES:
            self._known.clear()
            self._generation = generation
        known = self._known.get((model, version))
        if known is None:
            known = self._ask(model, version)
            if len(model) <= _MAX_NAME_LENGTH:
                self._known[(model, version)] = known
        if isinstance(known, HostError):
            raise _copy_error(known)
        return known

    def _ask(self, model: str, version: int) -> ModelConfig | HostError:
        number = next(self._link.numbers)
        try:
            data = self._link.ask_now(FindModel(number, model, version), number)
        except CoreSilent:
            raise
        except HostError as error:
            return _copy_error(error)
        config = new_config()
        config.ParseFromString(data)
        return config


def _copy_error(error: HostError) -> HostError:
    """A new error: one that is raised again would collect tracebacks."""
    kind = NotServedError if isinstance(error, NotServedError) else HostError
    return kind(error.code, error.message)


KEY_ERRORS = ErrorCode.UNAUTHENTICATED, ErrorCode.PERMISSION_DENIED
"""The errors of clients that have no key, or not the right one."""

_MAX_LENGTH = 1024  # bytes of a header and of a name that are remembered
_REFUSAL_SECONDS = 1.0  # the core looks at the file of the keys as often


class Sender:
    """The client that sends an inference request now, by its header.

    `admission`: the number of the `AwaitModel` that has counted the request; 0 if none has.
    """

    __slots__ = ("admission", "header", "_link")

    def __init__(self, link: CoreLink, header: bytes) -> None:
        self.admission = 0
        self.header = header
        self._link = link

    def withdraw_admission(self) -> None:
        """Ends what the core counts of a wait, unless it has started the request."""
        if self.admission:
            self._link.send(Cancel(self.admission))
            self.admission = 0


current_sender: ContextVar[Sender | None] = ContextVar("current_sender", default=None)
"""The client of the request that is sent now; None if clients need no keys."""


class RemoteKeys:
    """Asks the core whether a header lets clients send requests to a model, and remembers that.

    So only clients with a key make this process parse a request. The core checks each request
    again, and counts it; `forget` is called if it refuses one. A question blocks this process until
    the core has replied. So a header without a key is refused here, and one that the core has
    refused is refused again for a second; the core counts them, and sends no reply.
    """

    def __init__(self, link: CoreLink) -> None:
        self.link = link
        self._accepted: set[tuple[bytes, str]] = set()
        self._refused: dict[tuple[bytes, str], _Refusal] = {}

    def authorize(self, category: str, header: str | bytes | None) -> RemoteClient:
        """As `ApiKeys.authorize`, for the category of inference. Raises HostError."""
        if isinstance(header, str):
            header = header.encode("utf-8", "surrogateescape")
        client = RemoteClient(self, header or b"")
        client.check_model("")
        return client

    def check(self, header: bytes, model: str) -> None:
        """Raises HostError unless a header allows requests to a model; "" stands for any."""
        entry = header, model
        if entry in self._accepted:
            return
        number = next(self.link.numbers)
        try:
            parse_key(header)
        except HostError:
            self.link.send(Authorize(number, b"", model))
            raise
        question = Authorize(number, header, model)
        refusal = self._refused.get(entry)
        if refusal is not None:
            if time.monotonic() < refusal.end:
                self.link.send(question)
                raise HostError(refusal.code, refusal.message)
            del self._refused[entry]
        remembered = len(header) + len(model) <= _MAX_LENGTH
        try:
            self.link.ask_now(question, number)
        except HostError as error:
            if remembered and error.code in KEY_ERRORS:
                if len(self._refused) >= _MAX_ENTRIES:
                    self._refused.clear()
                end = time.monotonic() + _REFUSAL_SECONDS
                self._refused[entry] = _Refusal(error.code, error.message, end)
            raise
        if len(self._accepted) >= _MAX_ENTRIES:
            self._accepted.clear()
        if remembered:
            self._accepted.add(entry)

    def forget(self) -> None:
        """Asks the core again from now on: the keys have changed."""
        self._accepted.clear()
        self._refused.clear()


class _Refusal(NamedTuple):
    """An error of the core, and the time on the monotonic clock, in seconds, until it holds."""

    code: ErrorCode
    message: str
    end: float


class RemoteClient:
    """A client that the core knows by its header."""

    __slots__ = ("_header", "_keys")

    def __init__(self, keys: RemoteKeys, header: bytes) -> None:
        self._keys = keys
        self._header = header

    def check_model(self, name: str) -> None:
        """As `Client.check_model`, for requests. Raises HostError."""
        self._keys.check(self._header, name)

    def start_request(self, start: Callable[[], Call]) -> Call:
        """Starts a request; the core counts it, and refuses it above a limit."""
        with self.sending():
            return start()

    async def start_after_wait(self, start: Callable[[], Awaitable[Call]]) -> Call:
        """As `start_request`, but `start` waits first; the core counts that, too."""
        with self.sending():
            return await start()

    @contextmanager
    def sending(self) -> Iterator[None]:
        """While this is open, requests are those of the client."""
        sender = Sender(self._keys.link, self._header)
        token = current_sender.set(sender)
        try:
            yield
        finally:
            current_sender.reset(token)
            sender.withdraw_admission()


class RemoteTrace(RequestTrace):
    """The part of a trace that a frontend records. Only the core knows whether it is kept."""

    def __init__(self, link: CoreLink, model: str, headers: dict[str, str]) -> None:
        self._link = link
        self._finished = self._started = False
        self._wire = WireTrace(next(link.numbers), model, headers, [])

    def take_events(self) -> WireTrace:
        """The trace with its events by now, for the message that starts its request."""
        self._started = True
        wire = self._wire
        self._wire = WireTrace(wire.number, wire.model, {}, [])
        return wire

    def record_event(self, name: str, ns: int = 0) -> None:
        """Records an event, at the current time unless another is given."""
        if not self._finished:
            self._wire.events.append((name, ns or time.monotonic_ns()))

    def finish_response(self) -> None:
        """Sends the events to the core. A second call does nothing."""
        if not self._finished:
            self._finished = True
            self._link.send(FinishTrace(self._wire, self._started))


class RemoteTracer:
    """Starts the traces of a frontend process."""

    def __init__(self, link: CoreLink) -> None:
        self._link = link

    def start_trace(self, model: str, header: Callable[[str], str | None]) -> RemoteTrace:
        """Starts the trace of a request; `header` returns a header of the client."""
        headers = {name: value for name in TRACE_HEADERS if (value := header(name)) is not None}
        return RemoteTrace(self._link, model, headers)
