"""RPCs over a gRPC channel, for callers without an event loop."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

from host.client.channel import ChannelSettings, Rpc, to_host_error


class GrpcTransport:
    """Carries out RPCs (docs/reference/grpc.md). Any thread may call."""

    def __init__(self, settings: ChannelSettings) -> None:
        self._channel = settings.open_channel(grpc)
        self._url = settings.url
        self._service = GRPCInferenceServiceStub(self._channel)

    def call(self, rpc: Rpc) -> Any:
        """Returns the response. Raises HostError, and ValueError if the channel is closed."""
        try:
            return getattr(self._service, rpc.method)(
                rpc.message, timeout=rpc.timeout, metadata=rpc.metadata
            )
        except grpc.RpcError as error:
            raise to_host_error(error, self._url) from error

    def open_stream(self, rpc: Rpc) -> GrpcStream:
        """Sends the request of a stream."""
        call = self._service.ModelStreamInfer(
            iter([rpc.message]), timeout=rpc.timeout, metadata=rpc.metadata
        )
        return GrpcStream(call, self._url)

    def close(self) -> None:
        """Cancels what is in progress."""
        self._channel.close()


class GrpcStream(Iterator[Any]):
    """The responses to the request of a stream."""

    def __init__(self, call: Any, url: str) -> None:
        self._call = call
        self._url = url

    def __next__(self) -> Any:
        """Returns the next response. Raises HostError."""
        try:
            return next(self._call)
        except grpc.RpcError as error:
            raise to_host_error(error, self._url) from error

    def cancel(self) -> None:
        """Cancels the request."""
        self._call.cancel()
