"""`pbhost wait`: waits until a server, or models of it, take requests."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn
from urllib.parse import quote

from host.cli.arguments import EXIT_USAGE, errors_end, fail, parse_texts
from host.cli.server_client import ConnectionOptions, ServerClient, check_timeout, check_url
from host.errors import ErrorCode, HostError
from host.options.flags import FlagGroup

_PAUSE_SECONDS = 0.2
_ANSWER_SECONDS = 5.0

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
class WaitOptions(ConnectionOptions):
    """The flags of `pbhost wait`."""

    model: list[str] = _group([], "Wait for this model. You can repeat this flag.")
    timeout: float = _group(
        60.0, "Seconds to wait at most; 0 asks only once.", check=_check_timeout
    )


def main(arguments: Sequence[str]) -> NoReturn:
    """Waits and exits; the status says whether all is ready."""
    (url,), options = parse_texts(arguments, "wait [URL]", _ABOUT, WaitOptions)
    paths = [f"/v2/models/{quote(name, safe='')}/ready" for name in options.model]
    end = time.monotonic() + options.timeout
    with errors_end("wait"):
        try:
            check_url(url)
            client = ServerClient(url, options)
        except HostError as error:
            fail("wait", error.message, EXIT_USAGE)
        for path in paths or ["/v2/health/ready"]:
            _wait(client, url, path, options, end)
    sys.exit(0)


def _wait(client: ServerClient, url: str, path: str, options: WaitOptions, end: float) -> None:
    """Asks until the answer is yes. Raises HostError."""
    what = url if path.startswith("/v2/health") else f"{url}{path.removesuffix('/ready')}"
    while True:
        client.timeout = max(0.1, min(end - time.monotonic(), _ANSWER_SECONDS))
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
