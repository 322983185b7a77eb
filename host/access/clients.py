"""A client that is known by its API keys: what it may ask, and how much."""

from __future__ import annotations

import enum
import functools
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase

from host.errors import HostError, TooManyRequests, permission_denied
from host.inference.call import Call, CallListener
from host.inference.request import InferResponse


class TokenBucket:
    """Limits the rate of events. `capacity` events may arrive at once, then `per_second`."""

    __slots__ = ("_capacity", "_rate", "_tokens", "_updated_at", "_clock")

    def __init__(
        self, capacity: float, per_second: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._capacity = capacity
        self._rate = per_second
        self._tokens = capacity
        self._updated_at = clock()

    def has_tokens(self, count: float = 1.0) -> bool:
        """Whether there are tokens for an event."""
        now = self._clock()
        self._tokens = min(self._capacity, self._tokens + (now - self._updated_at) * self._rate)
        self._updated_at = now
        return self._tokens >= count

    def consume(self, count: float = 1.0) -> bool:
        """Takes tokens for an event. Returns False, and takes none, if there are too few."""
        if not self.has_tokens(count):
            return False
        self._tokens -= count
        return True

    def give_back(self, count: float = 1.0) -> None:
        """Returns tokens that were taken for an event that does not happen."""
        self._tokens = min(self._capacity, self._tokens + count)

    def seconds_until_token(self) -> float:
        """The seconds until there is one token, as of the last call of another method."""
        return max(0.0, (1.0 - self._tokens) / self._rate)

    def set_limits(self, capacity: float, per_second: float) -> None:
        """Changes the limits; tokens that were taken stay taken."""
        self.has_tokens()
        self._tokens = max(0.0, min(self._tokens + capacity - self._capacity, capacity))
        self._capacity, self._rate = capacity, per_second


_RETRY_SECONDS = 1.0  # for a client whose own requests must end first
_CACHED_NAMES = 4096  # model names whose permission is remembered


class RefusalReason(enum.Enum):
    """Why a request of a known client was refused, as in the metrics."""

    CATEGORY = "category"
    MODEL = "model"
    RATE = "rate"
    CONCURRENCY = "concurrency"
    FAIR_SHARE = "fair_share"


@dataclass(frozen=True, slots=True)
class Permissions:
    """What a client may ask, and how much.

    Attributes:
        models: Patterns of model names, as in a shell; empty means every model.
        categories: Categories of requests.
        rate: Inference requests per second, in the long run; 0 means no limit.
        burst: Inference requests that may arrive at once.
        concurrency: Concurrent inference requests; 0 means no limit.
    """

    categories: frozenset[str]
    models: tuple[str, ...] = ()
    rate: float = 0.0
    burst: int = 1
    concurrency: int = 0


class SharedCapacity:
    """Counts the requests in progress of all clients, and shares a limit among them.

    While fewer than `limit` requests are in progress, every client may send more. After that, only
    clients below their equal share may: the limit, divided by the clients that have requests.
    """

    __slots__ = ("limit", "in_progress", "active_clients")

    def __init__(self, limit: int = 0) -> None:
        """`limit` 0: there is none."""
        self.limit = limit
        self.in_progress = 0
        self.active_clients = 0

    def has_room(self, own: int) -> bool:
        """Whether a client with `own` requests in progress may send another one."""
        if not self.limit or self.in_progress < self.limit:
            return True
        return own * (self.active_clients + (own == 0)) < self.limit


class Client:
    """A client, with the state of its limits. Belongs to the event loop.

    Attributes:
        name: Its name in the key file.
        in_progress: Its inference requests without a last response.
        started: The number of its inference requests that were passed to a model.
        refused: The number of its refused requests, by reason.
    """

    def __init__(self, name: str, permissions: Permissions, capacity: SharedCapacity) -> None:
        self.name = name
        self.in_progress = 0
        self.started = 0
        self.refused: Counter[RefusalReason] = Counter()
        self._capacity = capacity
        self._permissions = permissions
        self._may_ask_model = _model_filter(permissions.models)
        self._bucket = TokenBucket(permissions.burst, permissions.rate)

    def set_permissions(self, permissions: Permissions) -> None:
        """Changes the permissions; requests in progress still count."""
        self._permissions = permissions
        self._may_ask_model = _model_filter(permissions.models)
        self._bucket.set_limits(permissions.burst, permissions.rate)

    def check_category(self, category: str) -> None:
        """Raises HostError PERMISSION_DENIED unless the client may send requests of a category."""
        if category and category not in self._permissions.categories:
            self.refused[RefusalReason.CATEGORY] += 1
            raise permission_denied(
                f"the key of client '{self.name}' does not allow requests of category '{category}'"
            )

    def may_ask_model(self, name: str) -> bool:
        """Whether the client may ask a model."""
        return self._may_ask_model(name)

    def check_model(self, name: str) -> None:
        """Raises HostError PERMISSION_DENIED unless the client may ask a model.

        An empty name stands for all models.
        """
        if not name and self._permissions.models:
            self.refused[RefusalReason.MODEL] += 1
            raise permission_denied(
                f"the key of client '{self.name}' is for some models only: name a model"
            )
        if name and not self._may_ask_model(name):
            self.refused[RefusalReason.MODEL] += 1
            raise permission_denied(
                f"the key of client '{self.name}' does not allow requests to model '{name}'"
            )

    @contextmanager
    def count_request(self) -> Iterator[None]:
        """Counts an inference request while the context is open.

        Raises TooManyRequests if a limit is reached.
        """
        self.admit()
        self.started += 1
        try:
            yield
        finally:
            self.request_finished()

    def admit(self) -> Admission:
        """Counts a request that may start later. The caller starts or withdraws the admission.

        Raises TooManyRequests if a limit is reached.
        """
        self._check_limits()
        self._enter()
        return Admission(self, bool(self._permissions.rate) and self._bucket.consume())

    def start_request(self, start: Callable[[], Call]) -> Call:
        """Starts an inference request and counts it until it ends, unless `start` raises.

        Raises TooManyRequests if a limit is reached, and what `start` raises.
        """
        return self.admit().start_request(start)

    async def start_after_wait(self, start: Callable[[], Awaitable[Call]]) -> Call:
        """As `start_request`, but `start` waits before the request starts, which counts too."""
        admission = self.admit()
        try:
            call = await start()
        except BaseException:  # also if the client has gone
            admission.withdraw()
            raise
        return admission.start_request(lambda: call)

    def request_started(self, call: Call) -> None:
        """Called when a request in progress has started; notices its end."""
        self.started += 1
        if call.finished:
            self.request_finished()
        else:
            call.listener = _CountedCall(self, call.listener)

    def request_withdrawn(self, took_token: bool) -> None:
        """Called when a request in progress does not start; gives its token back."""
        self.request_finished()
        if took_token:
            self._bucket.give_back()

    def _check_limits(self) -> None:
        limits = self._permissions
        if limits.concurrency and self.in_progress >= limits.concurrency:
            raise self._too_many(
                RefusalReason.CONCURRENCY,
                f"has {self.in_progress} requests in progress, and its limit is"
                f" {limits.concurrency}",
            )
        if not self._capacity.has_room(self.in_progress):
            raise self._too_many(
                RefusalReason.FAIR_SHARE,
                f"has its share of the {self._capacity.limit} requests that the server handles"
                " concurrently",
            )
        if limits.rate and not self._bucket.has_tokens():
            raise self._too_many(
                RefusalReason.RATE,
                f"has sent more than {limits.rate:g} requests per second",
                self._bucket.seconds_until_token(),
            )

    def _enter(self) -> None:
        self._capacity.in_progress += 1
        self._capacity.active_clients += self.in_progress == 0
        self.in_progress += 1

    def request_finished(self) -> None:
        """Called when a counted request has ended."""
        self.in_progress -= 1
        self._capacity.in_progress -= 1
        self._capacity.active_clients -= self.in_progress == 0

    def _too_many(
        self, reason: RefusalReason, fact: str, seconds: float = _RETRY_SECONDS
    ) -> HostError:
        self.refused[reason] += 1
        return TooManyRequests(f"client '{self.name}' {fact}; retry in {seconds:.3g} s", seconds)


class Admission:
    """A request that a client may start: it is in progress, and has its token of `rate`."""

    __slots__ = ("_client", "_took_token")

    def __init__(self, client: Client, took_token: bool) -> None:
        self._client = client
        self._took_token = took_token

    def start_request(self, start: Callable[[], Call]) -> Call:
        """Starts the request, which counts until it ends. Withdraws it if `start` raises."""
        try:
            call = start()
        except BaseException:  # whatever it raises: what was counted is given back
            self.withdraw()
            raise
        self._client.request_started(call)
        return call

    def withdraw(self) -> None:
        """Counts the request no longer: it does not start."""
        self._client.request_withdrawn(self._took_token)


class _CountedCall:
    """Passes on what a model learns about a call, and counts the end of the call."""

    __slots__ = ("_client", "_listener", "observes_responses")

    def __init__(self, client: Client, listener: CallListener | None) -> None:
        self._client = client
        self._listener = listener
        self.observes_responses = listener is not None and listener.observes_responses

    def call_responded(self, call: Call, response: InferResponse) -> None:
        if self._listener is not None:
            self._listener.call_responded(call, response)

    def call_finished(self, call: Call) -> None:
        self._client.request_finished()
        if self._listener is not None:
            self._listener.call_finished(call)


def _model_filter(patterns: tuple[str, ...]) -> Callable[[str], bool]:
    """Returns a function that tells whether a name matches one of the patterns; none match all."""
    if not patterns:
        return lambda name: True
    return functools.lru_cache(_CACHED_NAMES)(
        lambda name: any(fnmatchcase(name, pattern) for pattern in patterns)
    )
