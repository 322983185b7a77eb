"""The quarantine of one model version: refuses requests that have killed two of its stubs."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone

import msgspec

from host.crashes.records import (
    CrashRecord,
    DescribedRequest,
    Timestamp,
    describe_requests,
    format_time,
)
from host.errors import HostError, invalid_argument
from host.inference.request import InferRequest, digest_request

_log = logging.getLogger("pbhost")

_DEATHS = 2  # of stubs, after which a request is refused
_MAX_SUSPECTS = 256  # of one model version; the oldest is dropped
_MAX_BYTES = 64 << 20  # of inputs; larger requests are not recognised, as that would take long
_SENT_BY_OTHERS = {signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT}
"""Signals that no request causes: an operator or another program sent them."""


class QuarantinedRequest(msgspec.Struct, frozen=True):
    """A request that is refused. `crashes`: ids of records."""

    model: str
    version: int
    until: Timestamp
    crashes: list[str]
    request: DescribedRequest


@dataclass(slots=True)
class _Suspect:
    """A request that ran alone in a stub when it died."""

    request: DescribedRequest
    crashes: list[str] = field(default_factory=list)
    until: datetime | None = None  # while it is refused
    timer: asyncio.TimerHandle | None = None


def is_caused_by_request(exit_code: int, out_of_memory: bool) -> bool:
    """Whether the request that ran may have ended a process; negative codes are signals."""
    return out_of_memory or -exit_code not in _SENT_BY_OTHERS


class Quarantine:
    """Refuses a request for `seconds` after it has killed two stubs of a model version.

    A request is recognised by a digest of its inputs, requested outputs and parameters. Only those
    that ran when a stub died have one, so `find_refusal` needs to be called only while `active`;
    `on_change` is called whenever that changes.
    """

    def __init__(self, model: str, version: int, seconds: float) -> None:
        self._model = model
        self._version = version
        self._seconds = seconds
        self._suspects: OrderedDict[bytes, _Suspect] = OrderedDict()
        self._sizes: dict[bytes, int] = {}  # bytes of inputs, of requests that are refused
        self.on_change: Callable[[], None] = lambda: None

    @property
    def active(self) -> bool:
        """Whether any request is refused."""
        return bool(self._sizes)

    def record_death(self, request: InferRequest, record: CrashRecord) -> None:
        """Records that the request was the only one that a stub ran when it died.

        Requests of sequences are not recorded: what they do depends on earlier requests.
        """
        size = _input_bytes(request)
        if request.correlation_id or size > _MAX_BYTES:
            return
        try:
            digest = _digest(request)
        except HostError as error:  # the client took its memory away, which may have ended the stub
            _log.warning(
                "quarantine: a request that ended process '%s' cannot be recognised: %s",
                record.instance, error.message,
            )  # fmt: skip
            return
        suspect = self._suspects.pop(digest, None)
        if suspect is None:
            (described,) = describe_requests([request])
            suspect = _Suspect(described)
        self._suspects[digest] = suspect
        suspect.crashes = [*suspect.crashes[1 - _DEATHS :], record.id]
        if len(suspect.crashes) >= _DEATHS:
            self._start_refusing(digest, suspect, size)
        while len(self._suspects) > _MAX_SUSPECTS:
            oldest = next(iter(self._suspects))
            self._stop_refusing(oldest)
            del self._suspects[oldest]

    def _start_refusing(self, digest: bytes, suspect: _Suspect, size: int) -> None:
        self._stop_refusing(digest)
        suspect.until = datetime.now(timezone.utc) + timedelta(seconds=self._seconds)
        loop = asyncio.get_running_loop()
        suspect.timer = loop.call_later(self._seconds, self._stop_refusing, digest)
        self._sizes[digest] = size
        self.on_change()
        _log.warning(
            "quarantine: requests to model '%s' version %d like that with the id '%s' are refused"
            " until %s, as they ended processes (crash records %s)",
            self._model, self._version, suspect.request.id, format_time(suspect.until),
            ", ".join(suspect.crashes),
        )  # fmt: skip

    def _stop_refusing(self, digest: bytes) -> None:
        suspect = self._suspects[digest]
        if suspect.timer is not None:
            suspect.timer.cancel()
        suspect.timer = suspect.until = None
        if self._sizes.pop(digest, None) is not None:
            self.on_change()

    def find_refusal(self, request: InferRequest) -> HostError | None:
        """The error for a request that is refused, with the code INVALID_ARG.

        Of requests whose inputs have another size than those that are refused, no digest is made.
        Raises HostError INTERNAL if memory of a client is gone.
        """
        if request.correlation_id or _input_bytes(request) not in self._sizes.values():
            return None
        digest = _digest(request)
        if digest not in self._sizes:
            return None
        suspect = self._suspects[digest]
        assert suspect.until is not None
        return invalid_argument(
            f"request to model '{self._model}' is in quarantine: the same inputs and parameters"
            f" ended {_DEATHS} processes of version {self._version} (crash records"
            f" {', '.join(suspect.crashes)}); it is refused until {format_time(suspect.until)}; to"
            " lift this: pbhost crashes URL --lift, or unload and load the model"
        )

    def list_requests(self) -> list[QuarantinedRequest]:
        """The requests that are refused now."""
        return [
            QuarantinedRequest(
                self._model,
                self._version,
                format_time(one.until),
                one.crashes,
                one.request,
            )
            for one in self._suspects.values()
            if one.until is not None
        ]

    def lift(self) -> int:
        """Forgets all requests and their deaths; returns how many were refused."""
        count = len(self._sizes)
        for digest in list(self._sizes):
            self._stop_refusing(digest)
        self._suspects.clear()
        return count


def _input_bytes(request: InferRequest) -> int:
    return sum(len(tensor.data) for tensor in request.inputs)


def _digest(request: InferRequest) -> bytes:
    parameters = repr(sorted(request.parameters.items()))  # a text of a client may be no UTF-8
    return digest_request(request, (parameters.encode("utf-8", "backslashreplace"),))
