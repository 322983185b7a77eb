"""`pbhost record`: records requests to a model of a running server, and their responses."""

from __future__ import annotations

import http.client
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NoReturn
from urllib.parse import quote

import msgspec

from host.cli.arguments import EXIT_USAGE, check_positive, errors_end, fail, parse_texts
from host.cli.server_client import ConnectionOptions, ServerClient
from host.errors import invalid_argument, unavailable
from host.options.flags import SIZE, FlagGroup, InvalidValue, byte_size, integer
from host.recording.recorder import RecordingSettings
from host.recording.recording import (
    LINES_NAME,
    MAX_LINE_BYTES,
    RecordedRequest,
    RecordingEnd,
    RecordingWriter,
    damaged,
    decode_header,
    decode_line,
)

_CHUNK = 1 << 20
_SILENCE_SECONDS = 30.0  # after the end of the recording, until the server is taken not to answer

_ABOUT = f"""\
Records requests to a model of a running server, with their tensors and their responses, into
DIRECTORY. URL is the address of the server's HTTP port, by default http://localhost:8000; requests
over gRPC and HTTP are recorded. The server must run with --allow-recording=true.

The directory gets two files, which only you can read: {LINES_NAME} has a line of JSON for each
request, and tensors.bin the bytes of all tensors. They contain what the clients sent. `pbhost
replay` sends the requests again.

examples:
  pbhost record http://localhost:8000 out/ --model=resnet --seconds=60 --sample=0.01
  pbhost replay out/ --against=http://localhost:9000

exit status: 0 the requests were recorded, or Ctrl-C has ended that; 1 the server does not record,
the files cannot be written, or nothing was recorded; 2 the command line is invalid"""


def _check_share(number: float) -> None:
    if not 0 < number <= 1:
        raise InvalidValue(f"expected a number greater than 0 and at most 1, got {number:g}")


_DEFAULT = RecordingSettings()
_group = FlagGroup("Recording")


@dataclass
class RecordOptions(ConnectionOptions):
    """The flags of `pbhost record`."""

    model: str = _group("", "Model whose requests are recorded. Required.")
    version: int | None = _group(
        None, "Record only requests that ask for this version of the model.", SIZE
    )
    seconds: float = _group(_DEFAULT.seconds, "Duration.", check=check_positive)
    sample: float = _group(
        _DEFAULT.sample,
        "Share of the requests that is recorded, from 0 to 1. Of a sequence, all are or none.",
        check=_check_share,
    )
    max_requests: int = _group(
        _DEFAULT.max_requests, "Number of requests after which the recording ends.", integer(1)
    )
    max_bytes: int = _group(
        _DEFAULT.max_bytes, "Bytes of tensors before which the recording ends.", byte_size(1)
    )


def main(arguments: Sequence[str]) -> NoReturn:
    """Records and exits."""
    (url, directory), options = parse_texts(
        arguments, "record [URL] DIRECTORY", _ABOUT, RecordOptions
    )
    if not options.model:
        fail("record", "--model is required", EXIT_USAGE)
    download = _Download(Path(directory), options)
    with errors_end("record"):
        try:
            download.run(ServerClient(url, options, options.seconds + _SILENCE_SECONDS))
        except KeyboardInterrupt:
            if not download.began:
                fail("record", "interrupted before the recording began; nothing is recorded")
    if download.lost:
        fail("record", f"'{directory}' was removed meanwhile, and the recording with it")
    sys.stdout.write(f"{download.describe()}\n")
    sys.exit(0)


class _Download:
    """Receives a recording and writes it. `began`: whether its folder has been opened."""

    def __init__(self, directory: Path, options: RecordOptions) -> None:
        self._directory = directory
        self._options = options
        self._requests = self._size = 0
        self._end: RecordingEnd | None = None
        self.began = False

    @property
    def lost(self) -> bool:
        """Whether the files that were written are no longer in the directory."""
        return self.began and not (self._directory / LINES_NAME).exists()

    def run(self, client: ServerClient) -> None:
        """Raises HostError."""
        options = self._options
        if (self._directory / LINES_NAME).exists():
            raise invalid_argument(
                f"'{self._directory}' has a recording already; choose another directory"
            )
        settings = RecordingSettings(
            options.seconds, options.sample, options.max_requests, options.max_bytes
        )
        path = f"/v2/models/{quote(options.model, safe='')}"
        if options.version is not None:
            path += f"/versions/{options.version}"
        with client.stream(f"{path}/record", msgspec.json.encode(settings)) as source:
            try:
                text = source.readline(MAX_LINE_BYTES + 1)
                if not text:
                    raise unavailable(
                        "the server has ended the recording early; nothing is recorded"
                    )
                header = decode_header(text)
                if header is None:
                    raise client.unexpected_answer()
                with RecordingWriter(self._directory) as writer:
                    self.began = True
                    writer.write_line(header)
                    self._write(source, writer)
            except (http.client.HTTPException, ConnectionError) as error:
                raise unavailable(f"the server has ended the recording early: {error}") from error
            except TimeoutError as error:
                raise unavailable("the server stopped sending") from error
            except OSError as error:
                raise unavailable(
                    f"cannot write the recording to '{self._directory}': {error.strerror or error}"
                ) from error

    def _write(self, source: BinaryIO, writer: RecordingWriter) -> None:
        while text := source.readline(MAX_LINE_BYTES + 1):
            if len(text) > MAX_LINE_BYTES:
                raise damaged(f"a line has more than {MAX_LINE_BYTES} bytes")
            line = decode_line(text)
            if isinstance(line, RecordedRequest):
                self._copy_tensors(line, source, writer)
                self._requests += 1
            writer.write_line(line)
            if isinstance(line, RecordingEnd):
                self._end = line
                return
        raise unavailable(
            f"the server has ended the recording early; {self._requests} requests are in"
            f" '{self._directory}'"
        )

    def _copy_tensors(
        self, request: RecordedRequest, source: BinaryIO, writer: RecordingWriter
    ) -> None:
        for tensor in request.tensors():
            if tensor.offset != self._size or tensor.size > self._options.max_bytes - self._size:
                raise damaged(f"the server sent tensor '{tensor.name}' at a wrong place")
            self._size += tensor.size
            left = tensor.size
            while left:
                data = source.read(min(left, _CHUNK))
                if not data:
                    raise http.client.IncompleteRead(b"", left)
                writer.write_bytes(data)
                left -= len(data)

    def describe(self) -> str:
        """What was recorded, in a sentence."""
        end = self._end
        recorded = f"{self._requests} request{'s' if self._requests != 1 else ''}"
        seen = f" of {end.seen}" if end is not None else ""
        text = f"recorded {recorded}{seen}, {self._size} bytes of tensors, in {self._directory}"
        if end is None:
            return f"{text}: interrupted"
        dropped = f"; {end.dropped} dropped or unfinished" if end.dropped else ""
        return f"{text}: {end.reason}{dropped}"
