"""pbhost: serves TritonPythonModel classes.

`Server` runs a host in this process, `BlockingServer` does so for code that does not await;
`Options` says what is served and how, and `HostError` is what goes wrong. `host.bind` serves plain
functions.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from host.errors import ErrorCode, HostError
    from host.options.options import Options
    from host.server.blocking import BlockingServer
    from host.server.in_process import Result
    from host.server.server import Server

__all__ = ["BlockingServer", "ErrorCode", "HostError", "Options", "Result", "Server"]

_HOMES = {
    "BlockingServer": "host.server.blocking",
    "ErrorCode": "host.errors",
    "HostError": "host.errors",
    "Options": "host.options.options",
    "Result": "host.server.in_process",
    "Server": "host.server.server",
}


def __getattr__(name: str) -> object:
    """Import on first use: no module of the package pays for the whole of it."""
    if name not in _HOMES:
        raise AttributeError(f"module 'host' has no attribute '{name}'")
    return getattr(importlib.import_module(_HOMES[name]), name)
