"""`pbhost replay`: sends recorded requests again, and compares the responses."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import msgspec

from host.cli.arguments import (
    EXIT_USAGE,
    check_positive,
    errors_end,
    fail,
    format_flag,
    parse_texts,
    to_json,
)
from host.cli.infer import URL
from host.cli.model_arguments import serve_flag
from host.cli.model_client import ModelClient, response_of
from host.cli.run import run_recorded
from host.cli.server_client import ConnectionOptions
from host.client.channel import NoAnswer
from host.client.messages import add_input, new_request
from host.client.signature import EncodedTensor, to_tensor
from host.errors import HostError, not_found
from host.logs.formats import escape_control_characters
from host.options.flags import SIZE, SWITCH, FlagGroup, InvalidValue, integer
from host.options.validators import not_negative
from host.recording.comparison import ExpectedResponse, Tolerance, describe_difference
from host.recording.recording import (
    RecordedRequest,
    RecordedResponse,
    RecordedTensor,
    RecordingReader,
)
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
        client: ModelClient,
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

    def run(self, speed: float, concurrency: int) -> ReplayResult:
        """Sends all requests; each sequence in its order.

        `speed`: factor to the original, 0 for as fast as possible. `concurrency`: of requests.
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
                        if speed:
                            due = started + (one.request.time - first) / speed
                            self._wait_until(due)
                        if self._stopped.is_set():
                            return
                        self._replay(one)
            except Exception as error:  # of any kind: it is raised in the main thread
                self._error = self._error or error
                self._stopped.set()

        with ThreadPoolExecutor(concurrency) as threads:
            try:
                wait([threads.submit(work) for _ in range(min(concurrency, len(chains)))])
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

    def _replay(self, numbered: _Numbered) -> None:
        """Sends a request and compares its responses. Raises HostError, as `run`."""
        request = numbered.request
        inputs = [(one, self._reader.read_tensor(one)) for one in request.inputs]
        started = time.monotonic()
        try:
            message = new_request(
                self._model or request.model, self._version or request.version, request.id,
                request.requested_outputs, request.parameters,
            )  # fmt: skip
            for one, content in inputs:
                add_input(message, EncodedTensor(one.name, one.datatype, tuple(one.shape), content))
            received = list(self._client.infer(message, request.decoupled))
        except HostError as error:
            if isinstance(error, NoAnswer) and not self._latencies:
                raise
            received = [response_of([], {}, error.message)]
        except (ValueError, TypeError) as error:  # what no message can contain
            received = [response_of([], {}, f"the request cannot be sent: {error}")]
        seconds = time.monotonic() - started
        self._count(numbered, received, seconds)

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
        return to_tensor(tensor.name, tensor.datatype, tensor.shape, content)


def _latency(seconds: list[float]) -> Latency | None:
    if not seconds:
        return None
    ordered = sorted(seconds)
    last = len(ordered) - 1
    return Latency(ordered[last // 2], ordered[round(last * 0.99)])


_AS_FAST_AS_POSSIBLE = "max"

_ABOUT = """\
Sends the requests of a recording to a running server again, and compares the responses with those
of the recording; or runs one of them in this process, as `pbhost run` does. DIRECTORY was written
by `pbhost record`, or by a server with --crash-tensor-byte-size.

Errors are equal to errors, whatever their texts. Parameters of responses are not compared, nor are
outputs that were in shared memory of a client.

examples:
  pbhost replay out/ --against=http://localhost:8000
  pbhost replay out/ --against=grpc://localhost:8001 --speed=max --tolerance=0.001
  pbhost replay out/ --run models/resnet --request=17

exit status: 0 all responses are equal; 1 a response differs, the server does not answer, or the
recording cannot be read; 2 the command line is invalid"""


def _read_speed(text: str) -> float:
    """Returns how many times as fast as the original; 0 is as fast as possible."""
    if text == _AS_FAST_AS_POSSIBLE:
        return 0.0
    try:
        speed = float(text)
    except ValueError:
        speed = 0.0
    if not 0 < speed < float("inf"):
        raise InvalidValue(f"expected a number greater than 0, or max; got '{text}'")
    return speed


def _check_url(text: str) -> None:
    if text and not URL.fullmatch(text):
        raise InvalidValue(f"expected http://HOST:PORT or grpc://HOST:PORT, got '{text}'")


_group = FlagGroup("Replay")


@dataclass
class ReplayOptions(ConnectionOptions):
    """The flags of `pbhost replay`."""

    against: str = _group(
        "",
        "Address of the server: http://HOST:PORT, or grpc://HOST:PORT, which decoupled models need;"
        " or https, or grpcs.",
        check=_check_url,
    )
    run: str = _group("", "Directory of the model that runs one request in this process.")
    request: int = _group(1, "Number of the request that --run runs.", integer(1))
    pdb: bool = _group(
        False, "With --run: open the debugger where the model raises an exception.", SWITCH
    )
    speed: str = _group(
        "1",
        "Speed of sending, as a multiple of the recorded speed; max: as fast as possible.",
        check=_read_speed,
    )
    concurrency: int = _group(
        32, "Number of requests that run at the same time, at most.", integer(1, 1024)
    )
    model: str = _group("", "Send the requests to this model instead.")
    version: int | None = _group(
        None, "Send the requests to this version of the model instead.", SIZE
    )
    tolerance: float = _group(
        1e-5, "Relative difference of floats that count as equal.", check=not_negative
    )
    absolute_tolerance: float = _group(
        1e-8, "Absolute difference of floats that count as equal.", check=not_negative
    )
    timeout: float = _group(
        60.0, "Seconds to wait for the responses to a request.", check=check_positive
    )
    format: str = format_flag(_group)
    backend_directory: str = serve_flag("backend_directory")


def main(arguments: Sequence[str]) -> NoReturn:
    """Replays the recording and exits."""
    (directory,), options = parse_texts(arguments, "replay DIRECTORY", _ABOUT, ReplayOptions)
    if bool(options.against) == bool(options.run):
        fail("replay", "give either --against=URL or --run=MODEL_DIR", EXIT_USAGE)
    with errors_end("replay"), RecordingReader(Path(directory)) as reader:
        if options.run:
            request = _find_request(reader, options.request)
            run_recorded(Path(options.run), reader, request, options.pdb, options.backend_directory)
        result = _send(reader, options)
    sys.stdout.write(_describe_result(result, options.format))
    sys.exit(1 if result.differences or result.failed else 0)


def _find_request(reader: RecordingReader, number: int) -> RecordedRequest:
    """Returns a request by its number, from 1. Raises HostError."""
    count = 0
    for count, request in enumerate(reader.requests(), 1):
        if count == number:
            return request
    raise not_found(f"the recording has {count} requests, and no request {number}")


def _send(reader: RecordingReader, options: ReplayOptions) -> ReplayResult:
    """Raises HostError."""
    version = "" if options.version is None else str(options.version)
    tolerance = Tolerance(options.tolerance, options.absolute_tolerance)
    with ModelClient(options.against, options, options.timeout) as client:
        replay = Replay(reader, client, tolerance, options.model, version)
        return replay.run(_read_speed(options.speed), options.concurrency)


def _describe_result(result: ReplayResult, form: str) -> str:
    if form == "json":
        return to_json(result)
    lines = [
        f"request {one.number} to '{one.model}' (id '{one.id}'): {one.text}"
        for one in result.differences
    ]
    more = result.different + result.failed - len(lines)
    if more > 0:
        lines.append(f"and {more} more")
    counts = f"{result.equal} equal, {result.different} different, {result.failed} failed"
    if result.not_compared:
        counts += f", {result.not_compared} without recorded responses"
    lines.append(f"{result.requests} requests in {result.seconds:.3f} s: {counts}")
    for name, latency in (("recorded", result.recorded), ("now", result.now)):
        if latency is not None:
            lines.append(
                f"latency {name}: p50 {1000 * latency.p50:.3f} ms, p99 {1000 * latency.p99:.3f} ms"
            )
    if result.largest_delay >= 0.1:
        lines.append(
            f"requests were up to {result.largest_delay:.3f} s late; raise --concurrency, or lower"
            " --speed"
        )
    return "".join(f"{escape_control_characters(line)}\n" for line in lines)
