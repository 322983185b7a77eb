"""The client for code without `await`."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Items
from types import TracebackType
from typing import Any, TypeVar

from host.client.channel import ChannelSettings, closed_error, read_settings
from host.client.exchange import (
    Exchange,
    Pause,
    SequenceState,
    Steps,
    StreamState,
)
from host.client.grpc_transport import GrpcStream, GrpcTransport
from host.client.http_transport import HttpTransport
from host.client.messages import RequestOptions
from host.client.signature import Value
from host.errors import HostError
from host.inference.request import Parameter, Result

_Result = TypeVar("_Result")


def open_transport(settings: ChannelSettings) -> HttpTransport | GrpcTransport:
    """Returns what carries out RPCs; it connects with the first one. Raises HostError."""
    return HttpTransport(settings) if settings.over_http else GrpcTransport(settings)


class Client:
    """A client of a server; any thread may call it.

    `url`: HOST:PORT or grpc://HOST:PORT of the gRPC port, or http://HOST:PORT of the HTTP port,
    which has no streams; grpcs:// and https:// with TLS. `api_key`, `headers`: sent
    with each RPC. `ca_file`: certificates to trust instead of those of the system;
    `certificate_file`, `key_file`: of the client; all PEM. `timeout`: seconds for a call with its
    repetitions; None is no limit. `retries`: how often a call that is UNAVAILABLE is repeated.
    `shared_memory`: pass tensors of 1 MiB and more by shared memory, if the server is on this
    machine and allows it. `compression`: none, gzip or deflate. Methods raise HostError.

    `with Client("localhost:8001") as client: client.infer("scale", X=[1.0])["Y"]`
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str = "",
        headers: Mapping[str, str] | None = None,
        ca_file: str = "",
        certificate_file: str = "",
        key_file: str = "",
        timeout: float | None = 60.0,
        retries: int = 3,
        shared_memory: bool = True,
        compression: str = "none",
    ) -> None:
        """Raises HostError INVALID_ARG; the server is not asked yet."""
        settings = read_settings(
            url, api_key, headers or {}, ca_file, certificate_file, key_file, compression
        )
        self._exchange = Exchange(settings, timeout, retries, shared_memory)
        self._closed = threading.Event()
        self._transport = open_transport(settings)

    def infer(
        self,
        model: str,
        inputs: Mapping[str, Value] | None = None,
        /,
        *,
        version: int = -1,
        request_id: str = "",
        outputs: Items[str] = (),
        classes: Mapping[str, int] | None = None,
        parameters: Mapping[str, Parameter] | None = None,
        priority: int = 0,
        queue_timeout: float | None = None,
        timeout: float | None = None,
        headers: Mapping[str, str] | None = None,
        **arrays: Value,
    ) -> Result:
        """Sends a request and returns its response.

        Inputs are arrays, numbers, texts, bytes, or lists of them; those whose names are no Python
        names, or are names of options, go in `inputs`. An array needs the data type and the shape
        of the input. Numbers in lists get its data type, and a missing batch dimension is added.

        `outputs`: names of the requested outputs; all by default. `classes`: outputs that are
        returned as their highest values, and how many. `queue_timeout`: seconds that the request
        may wait in the server. `timeout`: seconds until the response is here.

        Raises HostError. What does not fit the metadata of the model is INVALID_ARG, and is not
        sent.
        """
        options = RequestOptions(
            model, version, request_id, outputs, classes or {}, parameters or {}, priority,
            queue_timeout, timeout, headers or {},
        )  # fmt: skip
        return self._run(self._exchange.infer(options, {**(inputs or {}), **arrays}))

    def stream(
        self,
        model: str,
        inputs: Mapping[str, Value] | None = None,
        /,
        *,
        version: int = -1,
        request_id: str = "",
        outputs: Items[str] = (),
        classes: Mapping[str, int] | None = None,
        parameters: Mapping[str, Parameter] | None = None,
        priority: int = 0,
        queue_timeout: float | None = None,
        timeout: float | None = None,
        headers: Mapping[str, str] | None = None,
        **arrays: Value,
    ) -> ResponseStream:
        """Sends a request and returns its responses as they arrive; any model may be asked.

        Arguments as in `infer`, but without a `timeout` there is no limit. Leaving the loop, or
        `close`, cancels the request. An error ends the stream.
        """
        options = RequestOptions(
            model, version, request_id, outputs, classes or {}, parameters or {}, priority,
            queue_timeout, timeout, headers or {},
        )  # fmt: skip
        values = {**(inputs or {}), **arrays}
        return ResponseStream(self, self._run(self._exchange.prepare_stream(options, values)))

    def sequence(
        self,
        model: str,
        *,
        version: int = -1,
        sequence_id: int | str = 0,
        priority: int = 0,
        timeout: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Sequence:
        """Opens a sequence: requests that a model with a sequence batcher handles together.

        `sequence_id`: its correlation id; a random one by default. Nothing is repeated.
        """
        options = RequestOptions(
            model, version=version, priority=priority, timeout=timeout, headers=headers or {}
        )
        return Sequence(self, SequenceState(options, sequence_id))

    def is_ready(self, model: str = "", *, version: int = -1) -> bool:
        """Whether the server, or a model of it, takes requests."""
        return self._run(self._exchange.is_ready(model, version))

    def metadata(self, model: str = "", *, version: int = -1) -> dict[str, Any]:
        """The metadata of the server, or of a model, as JSON has them."""
        return self._run(self._exchange.read_metadata(model, version))

    def config(self, model: str, *, version: int = -1) -> dict[str, Any]:
        """The configuration of a model, as JSON has it."""
        return self._run(self._exchange.read_config(model, version))

    def models(self) -> list[dict[str, Any]]:
        """Name, version, state and reason of each model version in the repository."""
        return self._run(self._exchange.list_models())

    def load_model(
        self,
        model: str,
        *,
        config: str = "",
        files: Mapping[str, bytes] | None = None,
        timeout: float | None = None,
    ) -> None:
        """Loads or reloads a model. `config`: JSON; `files`: contents by path in the model."""
        self._run(self._exchange.load_model(model, config, files or {}, timeout))

    def unload_model(
        self, model: str, *, unload_dependents: bool = False, timeout: float | None = None
    ) -> None:
        """Unloads a model; with `unload_dependents`, also those that only it uses."""
        self._run(self._exchange.unload_model(model, unload_dependents, timeout))

    def close(self) -> None:
        """Cancels what is in progress and closes the connection."""
        if self._closed.is_set():
            return
        try:
            self._run(self._exchange.close())
        finally:
            self._closed.set()
            self._transport.close()

    def _run(self, steps: Steps[_Result]) -> _Result:
        """Carries out the steps of a call."""
        if self._closed.is_set():
            raise closed_error()
        try:
            step = next(steps)
            while True:
                if isinstance(step, Pause):
                    time.sleep(step.seconds)
                    step = next(steps)
                    continue
                try:
                    response = self._transport.call(step)
                except HostError as error:
                    step = steps.throw(error)
                except ValueError:  # of a channel that another thread has closed
                    if not self._closed.is_set():
                        raise
                    step = steps.throw(closed_error())
                else:
                    step = steps.send(response)
        except StopIteration as done:
            result: _Result = done.value
            return result
        finally:
            steps.close()  # if this was interrupted

    def _open_stream(self, state: StreamState) -> GrpcStream:
        if self._closed.is_set():
            raise closed_error()
        assert isinstance(self._transport, GrpcTransport)  # others have no streams
        return self._transport.open_stream(state.next_rpc())

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class ResponseStream(Iterator[Result]):
    """The responses to one request. `close`, or dropping the object, cancels the request."""

    def __init__(self, client: Client, state: StreamState) -> None:
        self._client = client
        self._state = state
        self._call = client._open_stream(state)

    def __next__(self) -> Result:
        """The next response. Raises HostError."""
        while not self._state.ended:
            try:
                result = self._state.received(next(self._call))
            except StopIteration:
                self._state.completed()
            except HostError as error:
                self._send_again(error)
            else:
                if result is not None:
                    return result
        raise StopIteration

    def _send_again(self, error: HostError) -> None:
        """Raises an error that is final."""
        self._call.cancel()
        time.sleep(self._state.failed(error))
        self._call = self._client._open_stream(self._state)

    def close(self) -> None:
        """Cancels the request."""
        self._call.cancel()
        self._state.cancelled()

    def __enter__(self) -> ResponseStream:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_call") and not self._state.ended:
            self.close()


class Sequence:
    """Requests of one sequence. Leaving `with` ends it.

    If the last request did not have `end=True`, its inputs are then sent once more to end the
    sequence, and the responses are dropped.
    """

    def __init__(self, client: Client, state: SequenceState) -> None:
        self._client = client
        self._state = state

    def infer(
        self,
        inputs: Mapping[str, Value] | None = None,
        /,
        *,
        end: bool = False,
        request_id: str = "",
        outputs: Items[str] = (),
        parameters: Mapping[str, Parameter] | None = None,
        timeout: float | None = None,
        **arrays: Value,
    ) -> Result:
        """Sends the next request, as `Client.infer`. `end`: it is the last one."""
        values = {**(inputs or {}), **arrays}
        options = self._state.next_request(end, request_id, outputs, parameters, timeout)
        result = self._client._run(self._client._exchange.infer(options, values))
        self._state.sent(values, end)
        return result

    def stream(
        self,
        inputs: Mapping[str, Value] | None = None,
        /,
        *,
        end: bool = False,
        request_id: str = "",
        outputs: Items[str] = (),
        parameters: Mapping[str, Parameter] | None = None,
        timeout: float | None = None,
        **arrays: Value,
    ) -> ResponseStream:
        """Sends the next request of a decoupled model, as `Client.stream`."""
        values = {**(inputs or {}), **arrays}
        options = self._state.next_request(end, request_id, outputs, parameters, timeout)
        steps = self._client._exchange.prepare_stream(options, values)
        stream = ResponseStream(self._client, self._client._run(steps))
        self._state.sent(values, end, streamed=True)
        return stream

    def end(self) -> None:
        """Ends the sequence if it has begun and has not ended."""
        values = self._state.values_for_end()
        if values is None:
            return
        if not self._state.streamed:
            self.infer(values, end=True)
            return
        timeout = self._state.timeout or self._client._exchange.timeout
        for _ in self.stream(values, end=True, timeout=timeout):
            pass

    def __enter__(self) -> Sequence:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.end()
        except HostError:
            if error is None:
                raise  # otherwise the first error says more
