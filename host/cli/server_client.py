"""Sends requests of subcommands to the HTTP port of a running server."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Sequence

from host.errors import invalid_argument, unavailable
from host.options.flag_parser import InvalidValue

_TIMEOUT_SECONDS = 30.0

HEADER_HELP = "Header of the requests to the server, as NAME:VALUE. You can repeat this flag."


def check_headers(texts: Sequence[str]) -> None:
    """Raises InvalidValue unless each text is NAME:VALUE."""
    for text in texts:
        if text.find(":") < 1 or "\n" in text:
            raise InvalidValue(f"expected NAME:VALUE, got '{text}'")


class ServerClient:
    """Reads from a running server. `headers`: NAME:VALUE texts, sent with each request."""

    def __init__(self, url: str, headers: Sequence[str]) -> None:
        self._url = url.rstrip("/")
        self._headers = dict(text.split(":", 1) for text in headers)

    def get(self, path: str) -> bytes:
        """Returns the body. Raises HostError with the server's error, or if it does not answer."""
        if not self._url.startswith(("http://", "https://")):
            raise invalid_argument(f"expected http://HOST:PORT, got '{self._url}'")
        request = urllib.request.Request(self._url + path, headers=self._headers)
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS) as response:
                content: bytes = response.read()
                return content
        except urllib.error.HTTPError as error:
            raise invalid_argument(_error_text(error)) from error
        except (OSError, ValueError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            raise unavailable(
                f"no answer from {self._url}: {reason}; is it the address of the HTTP port?"
            ) from error


def _error_text(error: urllib.error.HTTPError) -> str:
    """The error of a server, or its status if it is no server of this kind."""
    try:
        return str(json.loads(error.read())["error"])
    except (ValueError, KeyError, TypeError):
        return f"the server answered with status {error.code} {error.reason}"
