"""The tensors of the requests that a stub ran when it died, kept as a recording."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timezone
from pathlib import Path
from typing import NamedTuple

from host.errors import HostError
from host.inference.request import Buffer, InferRequest, Tensor
from host.inference.shared_memory_bytes import read_bytes
from host.recording.folder import RecordingWriter
from host.recording.format import (
    FORMAT,
    RecordedRequest,
    RecordingEnd,
    RecordingHeader,
    TensorPlacer,
    describe_request,
    snapshot_tensors,
)


class CrashedRequest(NamedTuple):
    """A request that ran when a stub died. `seconds`: since the server got it."""

    request: InferRequest
    decoupled: bool
    seconds: float


class CrashTensors:
    """The first requests whose tensors have at most `limit` bytes together.

    Their bytes are kept as they are now, without a copy unless a client may change them.
    """

    def __init__(self, requests: Iterable[CrashedRequest], limit: int) -> None:
        self.requests: list[RecordedRequest] = []
        self._contents: list[Buffer] = []
        placer = TensorPlacer()
        for crashed in requests if limit else ():
            request = crashed.request
            if placer.size + sum(len(tensor.data) for tensor in request.inputs) > limit:
                break
            try:
                tensors = snapshot_tensors(request.inputs)
            except HostError:  # the client took its memory away
                continue
            self._add(crashed, tensors, placer)

    def _add(self, crashed: CrashedRequest, tensors: list[Tensor], placer: TensorPlacer) -> None:
        request, decoupled, seconds = crashed
        placed = placer.place(tensors)
        self._contents += [read_bytes(tensor.data) for tensor in tensors]
        self.requests.append(describe_request(request, placed, 0.0, seconds, decoupled, None))

    def write(self, folder: Path) -> None:
        """Writes a recording. Raises OSError."""
        now = datetime.now(timezone.utc)
        count = len(self.requests)
        with RecordingWriter(folder) as writer:
            writer.write_line(RecordingHeader(FORMAT, now.isoformat(timespec="seconds")))
            for data in self._contents:
                writer.write_bytes(data)
            for request in self.requests:
                writer.write_line(request)
            writer.write_line(RecordingEnd("a process died", count, count, 0))
