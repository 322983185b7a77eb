"""The client for asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from collections.abc import Sequence as Items
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, TypeVar

import grpc
import grpc.aio
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

from host.client.channel import Rpc, cancelled_error, closed_error, read_settings, to_host_error
from host.client.exchange import (
    Exchange,
    Pause,
    SequenceState,
    Steps,
    StreamState,
)
from host.client.http_transport import HttpCall, HttpTransport
from host.client.messages import RequestOptions
from host.client.signature import Value
from host.errors import HostError, invalid_argument
from host.inference.request import Parameter, Result

_Result = TypeVar("_Result")
_HTTP_THREADS = 64  # calls over HTTP at a time; more of them wait


class AsyncClient:
    """`Client` for asyncio. Belongs to the event loop of its first call.

    Arguments as those of `Client`; the methods too, with `await` and `async for`.

    `async with AsyncClient("localhost:8001") as client: await client.infer("scale", X=[1.0])`
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
        self._closed = False
        self._http: HttpTransport | None = None
        self._threads: ThreadPoolExecutor | None = None
        if settings.over_http:
            self._http = HttpTransport(settings)
            self._threads = ThreadPoolExecutor(_HTTP_THREADS, "pbhost-client")
        self._channel: grpc.aio.Channel | None = None
        self._service: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def infer(
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
        """As `Client.infer`. Cancelling the call cancels the request. Raises HostError."""
        options = RequestOptions(
            model, version, request_id, outputs, classes or {}, parameters or {}, priority,
            queue_timeout, timeout, headers or {},
        )  # fmt: skip
        return await self._run(self._exchange.infer(options, {**(inputs or {}), **arrays}))

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
    ) -> AsyncResponseStream:
        """As `Client.stream`; the request is sent when the loop begins."""
        options = RequestOptions(
            model, version, request_id, outputs, classes or {}, parameters or {}, priority,
            queue_timeout, timeout, headers or {},
        )  # fmt: skip
        values = {**(inputs or {}), **arrays}
        return AsyncResponseStream(self, self._exchange.prepare_stream(options, values))

    def sequence(
        self,
        model: str,
        *,
        version: int = -1,
        sequence_id: int | str = 0,
        priority: int = 0,
        timeout: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> AsyncSequence:
        """As `Client.sequence`, with `async with`."""
        options = RequestOptions(
            model, version=version, priority=priority, timeout=timeout, headers=headers or {}
        )
        return AsyncSequence(self, SequenceState(options, sequence_id))

    async def is_ready(self, model: str = "", *, version: int = -1) -> bool:
        """Whether the server, or a model of it, takes requests."""
        return await self._run(self._exchange.is_ready(model, version))

    async def metadata(self, model: str = "", *, version: int = -1) -> dict[str, Any]:
        """The metadata of the server, or of a model, as JSON has them."""
        return await self._run(self._exchange.read_metadata(model, version))

    async def config(self, model: str, *, version: int = -1) -> dict[str, Any]:
        """The configuration of a model, as JSON has it."""
        return await self._run(self._exchange.read_config(model, version))

    async def models(self) -> list[dict[str, Any]]:
        """Name, version, state and reason of each model version in the repository."""
        return await self._run(self._exchange.list_models())

    async def load_model(
        self,
        model: str,
        *,
        config: str = "",
        files: Mapping[str, bytes] | None = None,
        timeout: float | None = None,
    ) -> None:
        """Loads or reloads a model. `config`: JSON; `files`: contents by path in the model."""
        await self._run(self._exchange.load_model(model, config, files or {}, timeout))

    async def unload_model(
        self, model: str, *, unload_dependents: bool = False, timeout: float | None = None
    ) -> None:
        """Unloads a model; with `unload_dependents`, also those that only it uses."""
        await self._run(self._exchange.unload_model(model, unload_dependents, timeout))

    async def close(self) -> None:
        """Cancels what is in progress and closes the connection."""
        if self._closed:
            return
        try:
            if self._channel is not None or self._http is not None:
                await self._run(self._exchange.close())
        finally:
            self._closed = True
            if self._http is not None and self._threads is not None:
                self._http.close()
                self._threads.shutdown(wait=False)
            if self._channel is not None:
                await self._channel.close(None)

    async def _run(self, steps: Steps[_Result]) -> _Result:
        """Carries out the steps of a call."""
        if self._closed:
            raise closed_error()
        try:
            step = next(steps)
            while True:
                if isinstance(step, Pause):
                    await asyncio.sleep(step.seconds)
                    step = next(steps)
                    continue
                try:
                    if self._http is not None:
                        response = await self._call_over_http(self._http, step)
                    else:
                        response = await getattr(self._open(), step.method)(
                            step.message, timeout=step.timeout, metadata=step.metadata
                        )
                except HostError as error:
                    step = steps.throw(error)
                except grpc.aio.AioRpcError as error:
                    step = steps.throw(to_host_error(error, self._exchange.settings.url))
                except grpc.aio.UsageError:  # of a channel that another task has closed
                    step = steps.throw(closed_error())
                except asyncio.CancelledError:
                    if not self._was_cancelled_by_close():
                        raise
                    step = steps.throw(cancelled_error())
                else:
                    step = steps.send(response)
        except StopIteration as done:
            result: _Result = done.value
            return result
        finally:
            steps.close()  # if this was interrupted

    async def _call_over_http(self, transport: HttpTransport, rpc: Rpc) -> Any:
        """A thread waits for the response. Raises HostError."""
        call = HttpCall(transport)
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, call.run, rpc)
        except asyncio.CancelledError:
            call.cancel()
            raise
        except RuntimeError as error:  # of threads that another task has shut down
            if not self._closed:
                raise
            raise closed_error() from error

    def _open(self) -> Any:
        """The methods of the server; the channel belongs to the event loop that runs now."""
        if self._closed:
            raise closed_error()
        if self._channel is None:
            self._channel = self._exchange.settings.open_channel(grpc.aio)
            self._service = GRPCInferenceServiceStub(self._channel)
            self._loop = asyncio.get_running_loop()
        elif self._loop is not asyncio.get_running_loop():
            raise invalid_argument("this client belongs to another event loop; create one in each")
        return self._service

    def _was_cancelled_by_close(self) -> bool:
        """Whether a call was cancelled by `close`, and not with the task that waits for it."""
        task = asyncio.current_task()
        cancelling = getattr(task, "cancelling", None)  # Python 3.10 has none
        return self._closed and not (cancelling is not None and cancelling())

    def _open_stream(self, state: StreamState) -> Any:
        rpc = state.next_rpc()
        return self._open().ModelStreamInfer(
            iter([rpc.message]), timeout=rpc.timeout, metadata=rpc.metadata
        )

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()


class AsyncResponseStream(AsyncIterator[Result]):
    """The responses to one request. `aclose`, or dropping the object, cancels the request."""

    def __init__(self, client: AsyncClient, steps: Steps[StreamState]) -> None:
        self._client = client
        self._steps = steps
        self._state: StreamState | None = None
        self._call: Any = None
        self._cancelled = False

    async def __anext__(self) -> Result:
        """The next response. Raises HostError."""
        while not self._cancelled and not (self._state is not None and self._state.ended):
            try:
                if self._state is None:
                    self._state = await self._client._run(self._steps)
                if self._call is None:
                    self._call = self._client._open_stream(self._state)
                result = await self._read(self._state, self._call)
            except asyncio.CancelledError:
                self._cancel()
                if not self._client._was_cancelled_by_close():
                    raise
                raise cancelled_error() from None
            except BaseException:  # as of a wrong input
                self._cancel()
                raise
            if result is not None:
                return result
        raise StopAsyncIteration

    async def _read(self, state: StreamState, call: Any) -> Result | None:
        """Returns a response; None if it is empty, or none. Raises HostError."""
        try:
            answer = await call.read()
            if answer is not grpc.aio.EOF:  # type: ignore[attr-defined]
                return state.received(answer)
            state.completed()
        except grpc.aio.AioRpcError as error:
            await self._wait(state, to_host_error(error, self._client._exchange.settings.url))
        except HostError as error:
            await self._wait(state, error)
        return None

    async def _wait(self, state: StreamState, error: HostError) -> None:
        """Waits until the request is sent again. Raises an error that is final."""
        self._call.cancel()
        self._call = None
        await asyncio.sleep(state.failed(error))

    async def aclose(self) -> None:
        """Cancels the request."""
        self._cancel()

    def _cancel(self) -> None:
        self._cancelled = True
        self._steps.close()
        if self._call is not None:
            self._call.cancel()
        if self._state is not None:
            self._state.cancelled()

    async def __aenter__(self) -> AsyncResponseStream:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._cancel()

    def __del__(self) -> None:
        if self._state is not None and not self._state.ended:
            self._cancel()


class AsyncSequence:
    """Requests of one sequence. Leaving `with` ends it.

    If the last request did not have `end=True`, its inputs are then sent once more to end the
    sequence, and the responses are dropped.
    """

    def __init__(self, client: AsyncClient, state: SequenceState) -> None:
        self._client = client
        self._state = state

    async def infer(
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
        result = await self._client._run(self._client._exchange.infer(options, values))
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
    ) -> AsyncResponseStream:
        """Sends the next request of a decoupled model, as `AsyncClient.stream`."""
        values = {**(inputs or {}), **arrays}
        options = self._state.next_request(end, request_id, outputs, parameters, timeout)
        return AsyncResponseStream(self._client, self._prepare(options, values, end))

    def _prepare(
        self, options: RequestOptions, values: Mapping[str, Value], end: bool
    ) -> Steps[StreamState]:
        stream = yield from self._client._exchange.prepare_stream(options, values)
        self._state.sent(values, end, streamed=True)
        return stream

    async def end(self) -> None:
        """Ends the sequence if it has begun and has not ended."""
        values = self._state.values_for_end()
        if values is None:
            return
        if not self._state.streamed:
            await self.infer(values, end=True)
            return
        timeout = self._state.timeout or self._client._exchange.timeout
        async for _ in self.stream(values, end=True, timeout=timeout):
            pass

    async def __aenter__(self) -> AsyncSequence:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            await self.end()
        except HostError:
            if error is None:
                raise  # otherwise the first error says more
