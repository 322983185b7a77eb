"""Recordings in folders: writes them, and reads them back, also if strangers wrote them."""

from __future__ import annotations

import errno
import io
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from host.errors import HostError, not_found
from host.inference.request import Buffer
from host.recording.format import (
    MAX_LINE_BYTES,
    Line,
    RecordedRequest,
    RecordedTensor,
    RecordingEnd,
    RecordingHeader,
    damaged,
    decode_header,
    decode_line,
    encode_line,
)

LINES_NAME, TENSORS_NAME = "recording.jsonl", "tensors.bin"
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
# A link of a stranger's recording could lead to a file of this user, which would be sent on.
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class RecordingWriter:
    """Writes a recording into a new or empty folder, which only its owner can read.

    The bytes of a request's tensors are written before its line, so that each line is complete.
    Its methods raise OSError.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lines = open(os.open(folder / LINES_NAME, _CREATE, 0o600), "wb")
        try:
            self._tensors = open(os.open(folder / TENSORS_NAME, _CREATE, 0o600), "wb")
        except OSError:
            self._lines.close()
            raise

    def write_bytes(self, data: Buffer) -> None:
        """Writes bytes of tensors of the next line."""
        self._tensors.write(data)

    def write_line(self, line: Line, contents: Iterable[Buffer] = ()) -> None:
        """Writes a line after the bytes of its tensors."""
        for data in contents:
            self._tensors.write(data)
        self._tensors.flush()
        self._lines.write(encode_line(line))
        self._lines.flush()

    def close(self) -> None:
        """Closes the files."""
        try:
            self._tensors.close()
        finally:
            self._lines.close()

    def __enter__(self) -> RecordingWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class RecordingReader:
    """Reads a recording. Everything in it is checked, and nothing in it names a file.

    `header` is its first line, `end` its last one: None if the recording was interrupted.
    """

    header: RecordingHeader
    end: RecordingEnd | None = None

    def __init__(self, folder: Path) -> None:
        """Raises HostError NOT_FOUND or INVALID_ARG."""
        self._folder = folder
        self._lines = _open(folder / LINES_NAME)
        try:
            self._tensors = _open(folder / TENSORS_NAME)
        except HostError:
            self._lines.close()
            raise
        self._size = os.fstat(self._tensors.fileno()).st_size
        try:
            header = decode_header(self._read_text())
            if header is None:
                raise damaged("its first line is not that of a recording")
        except HostError:
            self.close()
            raise
        self.header = header

    def requests(self) -> Iterator[RecordedRequest]:
        """Its requests. Raises HostError INVALID_ARG for a damaged one."""
        while (line := self._next_line()) is not None:
            if isinstance(line, RecordedRequest):
                for tensor in line.tensors():
                    if tensor.offset + tensor.size > self._size:
                        raise damaged(f"tensor '{tensor.name}' ends after {TENSORS_NAME}")
                yield line
            elif isinstance(line, RecordingEnd):
                self.end = line

    def _next_line(self) -> Line | None:
        text = self._read_text()
        return decode_line(text) if text else None

    def _read_text(self) -> bytes:
        try:
            text = self._lines.readline(MAX_LINE_BYTES + 1)
        except OSError as error:
            raise damaged(f"{LINES_NAME} cannot be read: {error.strerror}") from error
        if len(text) > MAX_LINE_BYTES:
            raise damaged(f"a line has more than {MAX_LINE_BYTES} bytes")
        return text

    def read_tensor(self, tensor: RecordedTensor) -> bytes:
        """The bytes of a tensor; any thread may call. Raises HostError INVALID_ARG."""
        parts: list[bytes] = []
        offset, end = tensor.offset, tensor.offset + tensor.size
        while offset < end:
            try:
                part = os.pread(self._tensors.fileno(), min(end - offset, 1 << 30), offset)
            except OSError as error:
                raise damaged(f"{TENSORS_NAME} cannot be read: {error.strerror}") from error
            if not part:
                raise damaged(f"tensor '{tensor.name}' ends after {TENSORS_NAME}")
            parts.append(part)
            offset += len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def close(self) -> None:
        """Closes the files."""
        self._lines.close()
        self._tensors.close()

    def __enter__(self) -> RecordingReader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def remove_recording(folder: Path) -> None:
    """Removes a recording if there is one; not a folder with other files. Raises OSError."""
    for name in (LINES_NAME, TENSORS_NAME):
        with suppress(FileNotFoundError, NotADirectoryError):
            (folder / name).unlink()
    try:
        folder.rmdir()
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTEMPTY, errno.ENOTDIR):
            raise


def _open(path: Path) -> io.BufferedReader:
    """Opens an ordinary file. Raises HostError NOT_FOUND or INVALID_ARG."""
    try:
        file = open(os.open(path, _READ), "rb")
    except OSError as error:
        raise not_found(
            f"no recording in '{path.parent}': {path.name}: {error.strerror}"
        ) from error
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise not_found(f"no recording in '{path.parent}': {path.name} is not an ordinary file")
    return file
