"""What the handlers of all routes that infer have in common."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Iterable, Sequence
from contextlib import AbstractContextManager, aclosing
from typing import Any, TypeVar

from host.core import Core
from host.frontends.http.http_exchange import HttpExchange, trace_request
from host.frontends.openai.bodies import BodyReader
from host.frontends.openai.contract import Contract
from host.frontends.openai.model_directory import ModelDirectory
from host.frontends.openai.outputs import raise_error, read_texts
from host.frontends.request_headers import HeaderForwarding
from host.inference.request import InferRequest, InferResponse

_T = TypeVar("_T")


class Handler:
    """The base of a route's handler. Subclasses answer requests with it."""

    def __init__(
        self, core: Core, models: ModelDirectory, bodies: BodyReader, forwarding: HeaderForwarding
    ) -> None:
        self._core = core
        self._models = models
        self._bodies = bodies
        self._forwarding = forwarding

    def _trace(
        self, exchange: HttpExchange, requests: Sequence[InferRequest]
    ) -> AbstractContextManager[None]:
        """Adds the headers that the model is to see to the requests' parameters.

        Returns the context manager that traces the first request until its response is sent. Raises
        HostError INVALID_ARG if a header has the name of a reserved parameter.
        """
        if self._forwarding:
            forwarded = self._forwarding.to_parameters(exchange.raw_headers())
            for request in requests:
                request.parameters.update(forwarded)
        return trace_request(self._core.request_tracer, exchange, requests[0])

    async def _responses(self, request: InferRequest) -> AsyncGenerator[InferResponse, None]:
        """Yields responses as they arrive. Leaving early cancels the call.

        Raises HostError, also for a response that is an error.
        """
        async with aclosing(aiter(await self._core.infer_when_loaded(request))) as responses:
            async for response in responses:
                raise_error(response)
                yield response

    async def _files(
        self, contract: Contract, request: InferRequest, meaning: str
    ) -> AsyncGenerator[bytes, None]:
        """Yields the elements of the outputs of a meaning, as `_responses` does."""
        async with aclosing(self._responses(request)) as responses:
            async for response in responses:
                for tensor in response.outputs:
                    if contract.outputs.get(tensor.name) == meaning:
                        for element in read_texts(tensor):
                            if element:
                                yield element


async def gather(calls: Iterable[Coroutine[Any, Any, _T]]) -> list[_T]:
    """Returns the results of all calls in order. An error of one call cancels the others."""
    tasks = [asyncio.create_task(call) for call in calls]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
