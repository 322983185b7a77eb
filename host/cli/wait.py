"""`pbhost wait`: waits until a server, or models of it, take requests."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn
from urllib.parse import quote

from host.cli.arguments import parse_texts
from host.cli.server_client import (
    HEADER_HELP,
    ServerClient,
    check_headers,
    check_timeout,
    check_url,
)
from host.errors import ErrorCode, HostError
from host.options.flags import FlagGroup

_PAUSE_SECONDS = 0.2
_ANSWER_SECONDS = 5.0
_EXIT_NOT_READY, _EXIT_USAGE = 1, 2

_ABOUT = """\
Waits until a server is ready, which means that all its models are loaded, or until each --model is.
URL is the address of the server's HTTP port, by default http://localhost:8000.

examples:
  pbhost serve models & pbhost wait && python client.py
  pbhost wait http://models.example:8000 --model=resnet --timeout=120

exit status: 0 ready; 1 not ready within the timeout; 2 the command line is invalid"""


def _check_timeout(seconds: float) -> None:
    if seconds:
        check_timeout(seconds)


_group = FlagGroup("Wait")


@dataclass
class WaitOptions:
    """The flags of `pbhost wait`."""

    model: list[str] = _group([], "Wait for this model. You can repeat this flag.")
    timeout: float = _group(
        60.0, "Seconds to wait at most; 0 asks only once.", check=_check_timeout
    )
    header: list[str] = _group([], HEADER_HELP, check=check_headers)


def main(arguments: Sequence[str]) -> NoReturn:
    """Waits and exits; the status says whether all is ready."""
    (url,), options = parse_texts(arguments, "wait [URL]", _ABOUT, WaitOptions)
    paths = [f"/v2/models/{quote(name, safe='')}/ready" for name in options.model]
    end = time.monotonic() + options.timeout
    try:
        check_url(url)
        for path in paths or ["/v2/health/ready"]:
            _wait(url, path, options, end)
    except HostError as error:
        sys.stderr.write(f"pbhost wait: {error.message}\n")
        sys.exit(_EXIT_USAGE if error.code is ErrorCode.INVALID_ARG else _EXIT_NOT_READY)
    except KeyboardInterrupt:
        sys.exit(_EXIT_NOT_READY)
    sys.exit(0)


def _wait(url: str, path: str, options: WaitOptions, end: float) -> None:
    """Asks until the answer is yes. Raises HostError."""
    what = url if path.startswith("/v2/health") else f"{url}{path.removesuffix('/ready')}"
    while True:
        left = end - time.monotonic()
        client = ServerClient(url, options.header, max(0.1, min(left, _ANSWER_SECONDS)))
        try:
            client.get(path)
            return
        except HostError as error:
            if time.monotonic() + _PAUSE_SECONDS > end:
                raise HostError(
                    ErrorCode.UNAVAILABLE,
                    f"{what} is not ready after {options.timeout:g} s: {error.message}",
                ) from error
        time.sleep(_PAUSE_SECONDS)
