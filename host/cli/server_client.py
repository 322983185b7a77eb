"""Sends requests of subcommands to the HTTP port of a running server, and the flags for it."""

from __future__ import annotations

import http.client
import json
import re
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPResponse
from typing import TypeVar

import msgspec

from host.client.tls import read_tls
from host.errors import HostError, invalid_argument, unavailable
from host.options.flags import FlagGroup, InvalidValue

_TIMEOUT_SECONDS = 30.0
_Answer = TypeVar("_Answer")
MAX_TIMEOUT = 1e6  # sockets refuse much longer ones


def check_timeout(seconds: float) -> None:
    """Raises InvalidValue for a timeout that sockets do not take."""
    if not 0 < seconds <= MAX_TIMEOUT:
        raise InvalidValue(
            f"expected a number greater than 0 and at most {MAX_TIMEOUT:.0f}, got {seconds:g}"
        )


def check_url(url: str) -> None:
    """Raises HostError INVALID_ARG for the address of no server."""
    try:
        found = urllib.parse.urlsplit(url)
        valid = found.scheme in ("http", "https") and bool(found.hostname)
        valid = valid and found.port != 0 and re.fullmatch(r"[!-~]+", url) is not None
    except ValueError:  # as a port of more than 65535
        valid = False
    if not valid:
        raise invalid_argument(f"expected http://HOST:PORT, got '{url}'")


def check_headers(texts: Sequence[str]) -> None:
    """Raises InvalidValue unless each text is NAME:VALUE."""
    for text in texts:
        if not re.fullmatch(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+:[\t -~\x80-\xff]*", text):
            raise InvalidValue(f"expected NAME:VALUE, got '{text}'")


def read_headers(texts: Sequence[str]) -> dict[str, str]:
    """Returns the values of NAME:VALUE texts by name."""
    return {name: value.strip() for name, _, value in (text.partition(":") for text in texts)}


_group = FlagGroup("Connection")


@dataclass
class ConnectionOptions:
    """The flags of a command that asks a running server."""

    header: list[str] = _group(
        [],
        "Header of the requests to the server, as NAME:VALUE. You can repeat this flag.",
        check=check_headers,
    )
    ca_file: str = _group(
        "", "PEM file of certificate authorities to trust, instead of those of the machine."
    )
    certificate_file: str = _group("", "PEM file with the certificate of the client.")
    key_file: str = _group("", "PEM file with the key of --certificate-file.")

    def check_certificates(self, url: str) -> None:
        """Raises InvalidValue for certificates that do not fit together, or the address."""
        if bool(self.certificate_file) != bool(self.key_file):
            raise InvalidValue("a client certificate needs both --certificate-file and --key-file")
        scheme, _, place = url.partition("://")
        if scheme in ("http", "grpc") and (self.ca_file or self.certificate_file):
            raise InvalidValue(f"certificates need TLS: use {scheme}s://{place}")


class ServerClient:
    """Asks a running server.

    `timeout`: seconds without a byte after which the server is taken not to answer.
    """

    def __init__(
        self, url: str, options: ConnectionOptions, timeout: float = _TIMEOUT_SECONDS
    ) -> None:
        """Raises InvalidValue, and HostError for files that cannot be used."""
        options.check_certificates(url)
        self._url = url.rstrip("/")
        self._tls = None
        if options.ca_file or options.certificate_file:
            self._tls = read_tls(options.ca_file, options.certificate_file, options.key_file)
        self._headers = read_headers(options.header)
        self.timeout = timeout

    def get(self, path: str) -> bytes:
        """Returns the body. Raises HostError with the server's error, or if it does not answer."""
        return self._send(urllib.request.Request(self._url + path, headers=self._headers))

    def read(self, path: str, answer: type[_Answer], body: bytes | None = None) -> _Answer:
        """Returns the JSON of the answer as this type; a `body` is posted. Raises HostError."""
        answered = self.get(path) if body is None else self.post(path, body, {})
        try:
            return msgspec.json.decode(answered, type=answer)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise self.unexpected_answer() from error

    def post(self, path: str, body: bytes, headers: Mapping[str, str]) -> bytes:
        """Sends a body with more headers. Raises HostError, as `get`."""
        every = {**self._headers, **headers}
        return self._send(urllib.request.Request(self._url + path, body, every, method="POST"))

    @contextmanager
    def stream(self, path: str, body: bytes) -> Iterator[HTTPResponse]:
        """Sends a body and opens the answer, which the caller reads. Raises HostError."""
        request = urllib.request.Request(self._url + path, body, self._headers, method="POST")
        with self._open(request) as response:
            yield response

    def unexpected_answer(self) -> HostError:
        """Returns the error for an answer that no server of this kind sends."""
        return unavailable(
            f"unexpected answer from {self._url}; is it the address of the HTTP port?"
        )

    def _send(self, request: urllib.request.Request) -> bytes:
        with self._open(request) as response:
            try:
                return response.read()
            except (OSError, http.client.HTTPException) as error:
                raise self._no_answer(error) from error

    def _open(self, request: urllib.request.Request) -> HTTPResponse:
        check_url(self._url)
        try:
            response: HTTPResponse = urllib.request.urlopen(
                request, timeout=self.timeout, context=self._tls
            )
            return response
        except urllib.error.HTTPError as error:
            raise invalid_argument(_error_text(error)) from error
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise self._no_answer(error) from error

    def _no_answer(self, error: Exception) -> HostError:
        reason = getattr(error, "reason", error)
        return unavailable(
            f"no answer from {self._url}: {reason}; is it the address of the HTTP port?"
        )


def _error_text(error: urllib.error.HTTPError) -> str:
    """The error of a server, or its status if it is no server of this kind."""
    try:
        found = json.loads(error.read())["error"]
        return str(found["message"] if isinstance(found, dict) else found)  # as OpenAI's API has it
    except (ValueError, KeyError, TypeError, RecursionError, OSError, http.client.HTTPException):
        return f"the server answered with status {error.code} {error.reason}"
