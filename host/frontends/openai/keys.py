"""The API keys of the OpenAI routes, read from a file that may change."""

from __future__ import annotations

import hashlib
import hmac
import logging
import time
from pathlib import Path

from host.errors import internal
from host.frontends.openai.errors import OpenAIError
from host.system.regular_file import read_file

_log = logging.getLogger("pbhost")

_MIN_LENGTH = 8  # characters of a key
_RECHECK_SECONDS = 1.0
_BEARER = b"bearer "


class ApiKeys:
    """Compares the keys of clients with those of a file: one per line, after an optional name.

    The file is read again after it has changed; if it cannot be read then, the old keys stay.
    Raises HostError if it cannot be read at the start.
    """

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        try:
            self._state = self._file_state()
            self._hashes = self._read()
        except (OSError, ValueError) as error:
            raise internal(f"failed to read the API keys in '{path}': {error}") from None
        self._checked = time.monotonic()

    def check(self, authorization: bytes | None) -> None:
        """Raise OpenAIError unless the header `Authorization` has a known key."""
        self._reload()
        header = (authorization or b"").strip()
        key = header[len(_BEARER) :].strip() if header.lower().startswith(_BEARER) else b""
        if not key:
            raise _refusal("this server needs an API key: Authorization: Bearer KEY")
        sent = hashlib.sha256(key).digest()
        # All keys are compared, so that the time does not show which one is similar.
        if not sum([hmac.compare_digest(sent, known) for known in self._hashes]):
            raise _refusal("unknown API key")

    def _reload(self) -> None:
        now = time.monotonic()
        if now - self._checked < _RECHECK_SECONDS:
            return
        self._checked = now
        try:
            state = self._file_state()
            if state != self._state:
                self._hashes = self._read()
                self._state = state
        except (OSError, ValueError) as error:
            _log.error("the API keys in '%s' cannot be read again: %s", self._path, error)

    def _file_state(self) -> tuple[int, int, int]:
        status = self._path.stat()
        return status.st_mtime_ns, status.st_ino, status.st_size

    def _read(self) -> list[bytes]:
        hashes = []
        for number, line in enumerate(read_file(self._path).splitlines(), 1):
            words = line.split()
            if not words or words[0].startswith(b"#"):
                continue
            if len(words[-1]) < _MIN_LENGTH:
                raise ValueError(f"the key in line {number} has less than {_MIN_LENGTH} characters")
            hashes.append(hashlib.sha256(words[-1]).digest())
        if not hashes:
            raise ValueError("it has no key")
        return hashes


def _refusal(message: str) -> OpenAIError:
    headers = ((b"www-authenticate", b"Bearer"),)
    return OpenAIError(message, "invalid_api_key", None, 401, "authentication_error", headers)
