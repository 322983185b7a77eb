"""Sends the requests of a recording to a server, and compares the responses."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from host.cli.comparison import ExpectedResponse, Tolerance, describe_difference
from host.cli.inference import Inference, InferenceClient, received_tensor, response_of
from host.errors import ErrorCode, HostError
from host.recording.folder import RecordingReader
from host.recording.format import RecordedRequest, RecordedResponse, RecordedTensor
from pb_utils import InferenceResponse, Tensor

_SHOWN_DIFFERENCES = 10
_SEQUENCE = "sequence_id"


class Latency(msgspec.Struct, frozen=True):
    """Quantiles of the time until the last response, in seconds."""

    p50: float
    p99: float


class Difference(msgspec.Struct, frozen=True):
    """What is different in the responses to the request with this number, from 1."""

    number: int
    model: str
    id: str
    text: str


class ReplayResult(msgspec.Struct):
    """What a replay has found. `differences`: the first ones, of different and failed requests.

    `failed`: the server refused or failed the request. `recorded` was measured in the server,
    `now` in the client. `largest_delay`: seconds that a request was sent after its time.
    """

    requests: int = 0
    equal: int = 0
    different: int = 0
    failed: int = 0
    not_compared: int = 0
    seconds: float = 0.0
    largest_delay: float = 0.0
    recorded: Latency | None = None
    now: Latency | None = None
    differences: list[Difference] = []


class Schedule(NamedTuple):
    """When requests are sent. `speed`: factor to the original, 0 for as fast as possible."""

    speed: float
    concurrency: int


@dataclass(slots=True)
class _Numbered:
    """A request of the recording, and its number, from 1."""

    number: int
    request: RecordedRequest


class Replay:
    """Sends the requests of a recording. `model` and `version`: instead of the recorded ones."""

    def __init__(
        self,
        reader: RecordingReader,
        client: InferenceClient,
        tolerance: Tolerance,
        model: str = "",
        version: str = "",
    ) -> None:
        self._reader = reader
        self._client = client
        self._tolerance = tolerance
        self._model = model
        self._version = version
        self._result = ReplayResult()
        self._latencies: list[float] = []
        self._recorded_latencies: list[float] = []
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._error: Exception | None = None

    def run(self, schedule: Schedule) -> ReplayResult:
        """Sends all requests; each sequence in its order.

        Raises HostError if the recording is damaged, or the server does not answer at all.
        """
        chains = self._read_chains()
        pending = iter(chains)
        first = min((chain[0].request.time for chain in chains), default=0.0)
        started = time.monotonic()

        def work() -> None:
            try:
                while (chain := self._take(pending)) is not None:
                    for one in chain:
                        if schedule.speed:
                            due = started + (one.request.time - first) / schedule.speed
                            self._wait_until(due)
                        if self._stopped.is_set():
                            return
                        self._replay(one)
            except Exception as error:  # of any kind: it is raised in the main thread
                self._error = self._error or error
                self._stopped.set()

        with ThreadPoolExecutor(schedule.concurrency) as threads:
            try:
                wait([threads.submit(work) for _ in range(min(schedule.concurrency, len(chains)))])
            except BaseException:  # Ctrl-C: the threads end with their requests
                self._stopped.set()
                raise
        if self._error is not None:
            raise self._error
        self._result.seconds = time.monotonic() - started
        self._result.recorded = _latency(self._recorded_latencies)
        self._result.now = _latency(self._latencies)
        self._result.differences.sort(key=lambda one: one.number)
        return self._result

    def _read_chains(self) -> list[list[_Numbered]]:
        """Requests that follow each other: a list for each sequence, and for each other request."""
        chains: list[list[_Numbered]] = []
        sequences: dict[tuple[str, object], list[_Numbered]] = {}
        for number, request in enumerate(self._reader.requests(), 1):
            one = _Numbered(number, request)
            sequence = request.parameters.get(_SEQUENCE)
            if sequence is None:
                chains.append([one])
            elif (key := (request.model, sequence)) in sequences:
                sequences[key].append(one)
            else:
                sequences[key] = [one]
                chains.append(sequences[key])
        for chain in chains:
            chain.sort(key=lambda one: one.request.time)
        return sorted(chains, key=lambda chain: chain[0].request.time)

    def _take(self, pending: Iterator[list[_Numbered]]) -> list[_Numbered] | None:
        with self._lock:
            return next(pending, None)

    def _wait_until(self, due: float) -> None:
        delay = due - time.monotonic()
        if delay > 0:
            self._stopped.wait(delay)
        else:
            with self._lock:
                self._result.largest_delay = max(self._result.largest_delay, -delay)

    def _replay(self, one: _Numbered) -> None:
        """Sends a request and compares its responses. Raises HostError, as `run`."""
        request = one.request
        inference = Inference(
            self._model or request.model,
            self._version or request.version,
            request.id,
            [self._tensor(tensor) for tensor in request.inputs],
            request.requested_outputs,
            request.parameters,
        )
        started = time.monotonic()
        try:
            received = list(self._client.infer(inference, request.decoupled))
        except HostError as error:
            if error.code is ErrorCode.UNAVAILABLE and not self._latencies:
                raise
            received = [response_of([], {}, error.message)]
        except (ValueError, TypeError) as error:  # what no message can contain
            received = [response_of([], {}, f"the request cannot be sent: {error}")]
        seconds = time.monotonic() - started
        self._count(one, received, seconds)

    def _count(self, one: _Numbered, received: list[InferenceResponse], seconds: float) -> None:
        request, text = one.request, ""
        errors = [error for response in received if (error := response.error()) is not None]
        if request.responses is None:
            text = f"error '{errors[0].message()}'" if errors else ""
        else:
            expected = [self._expected(response) for response in request.responses]
            text = describe_difference(expected, received, self._tolerance)
        result = self._result
        with self._lock:
            result.requests += 1
            self._latencies.append(seconds)
            if request.responses is not None:
                self._recorded_latencies.append(request.seconds)
            if text and errors:
                result.failed += 1
            elif text:
                result.different += 1
            elif request.responses is None:
                result.not_compared += 1
            else:
                result.equal += 1
            if text and len(result.differences) < _SHOWN_DIFFERENCES:
                result.differences.append(Difference(one.number, request.model, request.id, text))

    def _expected(self, response: RecordedResponse) -> ExpectedResponse:
        outputs = [self._tensor(output) for output in response.outputs]
        error = "" if response.error is None else response.error or "error"
        return ExpectedResponse(response_of(outputs, {}, error), response.left_out)

    def _tensor(self, tensor: RecordedTensor) -> Tensor:
        content = self._reader.read_tensor(tensor)
        return received_tensor(tensor.name, tensor.datatype, tensor.shape, content)


def _latency(seconds: list[float]) -> Latency | None:
    if not seconds:
        return None
    ordered = sorted(seconds)
    last = len(ordered) - 1
    return Latency(ordered[last // 2], ordered[round(last * 0.99)])
