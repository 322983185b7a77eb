"""The client for asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from collections.abc import Sequence as Items
from types import TracebackType
from typing import Any, TypeVar

import grpc
import grpc.aio
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

from host.client.channel import closed_error, read_settings, to_host_error
from host.client.exchange import (
    Exchange,
    Pause,
    RequestOptions,
    Retries,
    SequenceState,
    Steps,
    StreamRequest,
    read_stream_response,
)
from host.client.signature import Value
from host.errors import ErrorCode, HostError, invalid_argument
from host.inference.request import Parameter, Result

_Result = TypeVar("_Result")


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
            if self._channel is not None:
                await self._run(self._exchange.close())
        finally:
            self._closed = True
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
                    response = await getattr(self._open(), step.method)(
                        step.message, timeout=step.timeout, metadata=step.metadata
                    )
                except grpc.aio.AioRpcError as error:
                    step = steps.throw(to_host_error(error, self._exchange.settings.url))
                except grpc.aio.UsageError:  # of a channel that another task has closed
                    step = steps.throw(closed_error())
                except asyncio.CancelledError:
                    if not self._was_cancelled_by_close():
                        raise
                    step = steps.throw(_cancelled_error())
                else:
                    step = steps.send(response)
        except StopIteration as done:
            result: _Result = done.value
            return result
        finally:
            steps.close()  # if this was interrupted

    def _open(self) -> Any:
        """The methods of the server; the channel belongs to the event loop that runs now."""
        if self._closed:
            raise closed_error()
        if self._channel is None:
            settings = self._exchange.settings
            options, compression = settings.options, settings.compression
            if settings.credentials is None:
                self._channel = grpc.aio.insecure_channel(settings.address, options, compression)
            else:
                self._channel = grpc.aio.secure_channel(
                    settings.address, settings.credentials, options, compression
                )
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

    def _open_stream(self, request: StreamRequest) -> Any:
        rpc = request.rpc
        return self._open().ModelStreamInfer(
            iter([rpc.message]), timeout=request.deadline.left(), metadata=rpc.metadata
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


def _cancelled_error() -> HostError:
    return HostError(ErrorCode.CANCELLED, "this client was closed before the call had ended")


class AsyncResponseStream(AsyncIterator[Result]):
    """The responses to one request. `aclose`, or dropping the object, cancels the request."""

    def __init__(self, client: AsyncClient, steps: Steps[StreamRequest]) -> None:
        self._client = client
        self._steps = steps
        self._request: StreamRequest | None = None
        self._retries: Retries | None = None
        self._call: Any = None
        self._begun = self._ended = False

    async def __anext__(self) -> Result:
        """The next response. Raises HostError."""
        while not self._ended:
            try:
                if self._call is None:
                    await self._send()
                answer = await self._call.read()
            except grpc.aio.AioRpcError as error:
                await self._repeat(to_host_error(error, self._client._exchange.settings.url))
                continue
            except asyncio.CancelledError:
                self._cancel()
                if not self._client._was_cancelled_by_close():
                    raise
                raise _cancelled_error() from None
            except BaseException:  # as of a wrong input
                self._cancel()
                raise
            if answer is grpc.aio.EOF:  # type: ignore[attr-defined]
                self._ended = True
                break
            self._begun = True
            try:
                result, self._ended = read_stream_response(answer)
            except HostError:
                self._cancel()
                raise
            if result is not None:
                return result
        raise StopAsyncIteration

    async def _send(self) -> None:
        if self._request is None:
            request = self._request = await self._client._run(self._steps)
            self._retries = self._client._exchange.retries(request.retried, request.deadline)
        self._call = self._client._open_stream(self._request)

    async def _repeat(self, error: HostError) -> None:
        """Waits until the request may be sent again. Raises HostError if something has arrived."""
        assert self._retries is not None
        pause = None if self._begun else self._retries.next_pause(error)
        if pause is None:
            self._ended = True
            raise error
        self._call = None
        await asyncio.sleep(pause)

    async def aclose(self) -> None:
        """Cancels the request."""
        self._cancel()

    def _cancel(self) -> None:
        self._ended = True
        self._steps.close()
        if self._call is not None:
            self._call.cancel()

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
        if not self._ended and self._call is not None:
            self._call.cancel()


class AsyncSequence:
    """Requests of one sequence. Leaving `with` ends it.

    If the last request did not have `end=True`, its inputs are then sent once more to end the
    sequence, and the response is dropped.
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
        self._state.succeeded(values, end)
        return result

    async def end(self) -> None:
        """Ends the sequence if it has begun and has not ended."""
        values = self._state.values_for_end()
        if values is not None:
            await self.infer(values, end=True)

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
