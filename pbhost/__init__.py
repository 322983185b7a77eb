"""pbhost: serves TritonPythonModel classes.

`Server` runs a server in this process; `BlockingServer` does the same for code without `await`.
`Options` configures it. `Client` and `AsyncClient` send requests to a running server. `HostError`
is the error that their methods raise. `bind` serves plain
functions, and `testing` runs a model in a test.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from pbhost import _packages

if TYPE_CHECKING:
    from host.client.aio import AsyncClient
    from host.client.blocking import Client
    from host.errors import ErrorCode, HostError
    from host.frontends.grpc.grpc_application import GrpcApplication, GrpcMethod, GrpcStatus
    from host.inference.request import Result
    from host.model_control.control import ModelControlHook
    from host.options.options import Options
    from host.remote_models import RemoteModelProvider, RemoteVersion
    from host.server.blocking_server import BlockingServer
    from host.server.collectors import QueueState
    from host.server.own_models import OwnModels
    from host.server.server import Server
    from pbhost import bind, testing

__all__ = [
    "AsyncClient",
    "BlockingServer",
    "Client",
    "ErrorCode",
    "GrpcApplication",
    "GrpcMethod",
    "GrpcStatus",
    "HostError",
    "ModelControlHook",
    "Options",
    "OwnModels",
    "QueueState",
    "RemoteModelProvider",
    "RemoteVersion",
    "Result",
    "Server",
    "bind",
    "testing",
]

_HOMES = {
    "AsyncClient": "host.client.aio",
    "BlockingServer": "host.server.blocking_server",
    "Client": "host.client.blocking",
    "ErrorCode": "host.errors",
    "GrpcApplication": "host.frontends.grpc.grpc_application",
    "GrpcMethod": "host.frontends.grpc.grpc_application",
    "GrpcStatus": "host.frontends.grpc.grpc_application",
    "HostError": "host.errors",
    "ModelControlHook": "host.model_control.control",
    "Options": "host.options.options",
    "OwnModels": "host.server.own_models",
    "QueueState": "host.server.collectors",
    "RemoteModelProvider": "host.remote_models",
    "RemoteVersion": "host.remote_models",
    "Result": "host.inference.request",
    "Server": "host.server.server",
}

_packages.install()

if not TYPE_CHECKING:  # otherwise type checkers would accept any name

    def __getattr__(name: str) -> object:
        """Imports a public name on first use, so that no program loads more than it needs."""
        if name in _HOMES:
            return getattr(importlib.import_module(f"pbhost.{_HOMES[name]}"), name)
        if name in __all__:
            return importlib.import_module(f"pbhost.{name}")
        raise AttributeError(f"module 'pbhost' has no attribute '{name}'")
