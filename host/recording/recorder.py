"""Records requests and responses while a server runs: samples them, and limits their memory."""

from __future__ import annotations

import asyncio
import random
import time
import zlib
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from datetime import datetime, timezone
from typing import Annotated, Protocol

import msgspec
from msgspec import structs

from host.errors import ErrorCode, HostError
from host.inference.call import Call, CallListener
from host.inference.request import Buffer, InferRequest, InferResponse, Tensor, read_bytes
from host.recording.recording import (
    FORMAT,
    RecordedResponse,
    RecordingEnd,
    RecordingHeader,
    TensorPlacer,
    describe_request,
    encode_line,
    snapshot_tensors,
    to_valid_parameters,
    to_valid_text,
)

_MAX_PENDING_BYTES = 64 << 20  # of tensors that run or wait for the reader of the recording
_MAX_PENDING = 10_000  # requests that run or wait
_SEQUENCE_START, _SEQUENCE_END = 1, 2


class RecordingSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a client wants to record. `sample`: the share of requests, or of sequences.

    The recording ends after `seconds`, `max_requests`, or before `max_bytes` of tensors.
    """

    seconds: Annotated[float, msgspec.Meta(gt=0, le=86_400)] = 60.0
    sample: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    max_requests: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] = 10_000
    max_bytes: Annotated[int, msgspec.Meta(ge=1, le=1 << 40)] = 1 << 30


class Recording:
    """One recording of the requests to a model; version -1 is any, as requests name it.

    Belongs to the event loop.
    """

    def __init__(self, version: int, decoupled: bool, settings: RecordingSettings) -> None:
        self._version = version
        self._settings = settings
        self.decoupled = decoupled
        self.started = time.monotonic()
        self._seed = random.getrandbits(32)
        self._sequences: set[int | str] = set()  # in progress, that were chosen
        self._placer = TensorPlacer()
        self._seen = self._recorded = self._chosen = 0
        self._pending = self._pending_bytes = 0
        self._ready: deque[tuple[Sequence[Buffer], int]] = deque()  # lines, and bytes of tensors
        self._reason = ""
        self._changed = asyncio.Event()
        self._timer = asyncio.get_running_loop().call_later(
            settings.seconds, self.end, "the time was over"
        )

    # Requests

    def chooses(self, request: InferRequest) -> bool:
        """Whether the request is recorded; of sequences, all requests are or none."""
        if self._reason or self._version not in (-1, request.model_version):
            return False
        self._seen += 1
        if request.correlation_id:
            return self._chooses_sequence(request.correlation_id, request.flags)
        return random.random() < self._settings.sample

    def _chooses_sequence(self, sequence: int | str, flags: int) -> bool:
        if flags & _SEQUENCE_START:
            digest = zlib.crc32(repr(sequence).encode(), self._seed)
            if digest < self._settings.sample * 2**32 and len(self._sequences) < _MAX_PENDING:
                self._sequences.add(sequence)
        chosen = sequence in self._sequences
        if flags & _SEQUENCE_END:
            self._sequences.discard(sequence)
        return chosen

    def begin(self, request: InferRequest) -> RecordedCall | None:
        """Starts to record a request, before the model changes it; None without memory for it."""
        self._chosen += 1
        size = sum(len(tensor.data) for tensor in request.inputs)
        if self._pending >= _MAX_PENDING or not self.reserve(size):
            return None
        self._pending += 1
        try:
            return RecordedCall(self, request, snapshot_tensors(request.inputs), size)
        except HostError:  # the memory of the client is gone, as the model will find out
            self.drop(size)
            return None

    def reserve(self, size: int) -> bool:
        """Counts bytes of tensors; returns False, and counts nothing, if there are too many."""
        if self._pending_bytes + size > _MAX_PENDING_BYTES:
            return False
        self._pending_bytes += size
        return True

    def drop(self, size: int) -> None:
        """Forgets a request that held `size` bytes."""
        self._pending -= 1
        self._pending_bytes -= size

    def add(self, recorded: RecordedCall) -> None:
        """Adds a request with all its responses."""
        if self._reason:
            self.drop(recorded.size)
            return
        if self._placer.size + recorded.size > self._settings.max_bytes:
            self.drop(recorded.size)
            self.end("the limit of bytes was reached")
            return
        self._recorded += 1
        self._ready.append((recorded.encode(self._placer), recorded.size))
        self._changed.set()
        if self._recorded >= self._settings.max_requests:
            self.end("the limit of requests was reached")

    # Reader

    async def lines(self) -> AsyncGenerator[Sequence[Buffer], None]:
        """Each line with the bytes of its tensors, until the recording ends."""
        now = datetime.now(timezone.utc)
        yield [encode_line(RecordingHeader(FORMAT, now.isoformat(timespec="seconds")))]
        while self._ready or not self._reason:
            if not self._ready:
                self._changed.clear()
                await self._changed.wait()
                continue
            parts, size = self._ready.popleft()
            yield parts
            self.drop(size)
        dropped = self._chosen - self._recorded
        yield [encode_line(RecordingEnd(self._reason, self._seen, self._recorded, dropped))]

    def end(self, reason: str) -> None:
        """Takes no more requests; those in progress are dropped."""
        if not self._reason:
            self._reason = reason
            self._timer.cancel()
            self._changed.set()


class RecordedCall(CallListener):
    """A request that is recorded, and its responses as they arrive. `size`: tensors in bytes."""

    observes_responses = True

    def __init__(
        self, recording: Recording, request: InferRequest, inputs: list[Tensor], size: int
    ) -> None:
        self.size = size
        self._recording = recording
        self._request = request
        self._inputs = inputs
        self._placed = frozenset(request.output_placement or ())  # outputs in memory of the client
        self._responses: list[InferResponse] = []
        self._started = time.monotonic()
        self._listener: CallListener | None = None
        self._dropped = False

    def follow(self, call: Call) -> None:
        """Records the responses of the call from now on, and those that are here already."""
        for response in call.undelivered_responses():
            self._add_response(response)
        if call.finished:
            self._finish()
        else:
            self._listener, call.listener = call.listener, self

    def drop(self) -> None:
        """Does not record the request."""
        if not self._dropped:
            self._dropped = True
            self._recording.drop(self.size)
            self._inputs, self._responses = [], []

    def call_responded(self, call: Call, response: InferResponse) -> None:
        """Records a response, after the model has changed it."""
        if self._listener is not None:
            self._listener.call_responded(call, response)
        self._add_response(response)

    def call_finished(self, call: Call) -> None:
        """Completes the request."""
        if self._listener is not None:
            self._listener.call_finished(call)
        self._finish()

    def _add_response(self, response: InferResponse) -> None:
        if self._dropped:
            return
        size = sum(len(output.data) for output in response.outputs)
        if not self._recording.reserve(size):
            self.drop()
            return
        self.size += size
        # Users of a response may replace the data of its tensors.
        try:
            outputs = snapshot_tensors(response.outputs)
        except HostError:  # an input in memory of the client, which is gone, was passed on
            self.drop()
            return
        self._responses.append(structs.replace(response, outputs=outputs))

    def _finish(self) -> None:
        if not self._dropped:
            self._recording.add(self)

    def encode(self, placer: TensorPlacer) -> Sequence[Buffer]:
        """The line, and the bytes of the tensors that it places."""
        inputs = placer.place(self._inputs)
        contents = [read_bytes(tensor.data) for tensor in self._inputs]
        responses: list[RecordedResponse] = []
        for response in self._responses:
            outputs = [output for output in response.outputs if output.name not in self._placed]
            contents += [read_bytes(output.data) for output in outputs]
            responses.append(
                RecordedResponse(
                    placer.place(outputs),
                    [output.name for output in response.outputs if output.name in self._placed],
                    to_valid_parameters(response.parameters),
                    None if response.error is None else to_valid_text(response.error.message),
                )
            )
        now = time.monotonic()
        line = describe_request(
            self._request,
            inputs,
            self._started - self._recording.started,
            now - self._started,
            self._recording.decoupled,
            responses,
        )
        return [encode_line(line), *contents]


class Infer(Protocol):
    """Starts a request. `unary`: a single response can be carried. Raises HostError."""

    def __call__(self, request: InferRequest, unary: bool = False) -> Call: ...


class Recorder:
    """Starts the requests of a server with `start`, and records those that recordings choose."""

    def __init__(self, start: Infer) -> None:
        self._start = start
        self._recordings: dict[str, Recording] = {}

    @property
    def active(self) -> bool:
        """Whether there is a recording."""
        return bool(self._recordings)

    def add(
        self, model: str, version: int, decoupled: bool, settings: RecordingSettings
    ) -> Recording:
        """Begins a recording; -1 is any version. Raises HostError ALREADY_EXISTS."""
        if model in self._recordings:
            raise HostError(
                ErrorCode.ALREADY_EXISTS, f"requests to model '{model}' are being recorded already"
            )
        recording = self._recordings[model] = Recording(version, decoupled, settings)
        return recording

    def remove(self, model: str) -> None:
        """Ends the recording of a model."""
        self._recordings.pop(model).end("its reader has gone")

    def end_all(self, reason: str) -> None:
        """Ends all recordings; their readers get what was recorded."""
        for recording in self._recordings.values():
            recording.end(reason)

    def infer(self, request: InferRequest, unary: bool = False) -> Call:
        """Starts a request. Raises HostError; then the request is not recorded."""
        recording = self._recordings.get(request.model_name)
        if recording is None or not recording.chooses(request):
            return self._start(request, unary)
        recorded = recording.begin(request)
        if recorded is None:
            return self._start(request, unary)
        try:
            call = self._start(request, unary)
        except BaseException:  # whatever it is, the request is no longer counted
            recorded.drop()
            raise
        recorded.follow(call)
        return call
