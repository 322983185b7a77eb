"""The models of one server as other servers see them, to which they are remote."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing

from host.core import Core
from host.inference.metadata import IndexEntry, ModelStatistics
from host.inference.request import InferRequest
from host.models.registry import Registry, VersionState
from host.remote_models import RemoteVersion, ResponseStream, ReturningCalls


class OwnModels:
    """The counterpart of a `RemoteModelProvider` at the server that has the models.

    `index`: the entries of the repository index. `returning`: of the calls to remote models.
    """

    def __init__(
        self,
        core: Core,
        registry: Registry,
        index: Callable[[bool], Awaitable[list[IndexEntry]]],
        returning: ReturningCalls,
    ) -> None:
        self._core = core
        self._registry = registry
        self._index = index
        self._returning = returning

    async def describe(self, name: str) -> list[RemoteVersion]:
        """The loaded versions of a model. Raises HostError if it is unknown."""
        known = self._registry.versions(self._registry.resolve_name(name))
        if not known:
            self._registry.find(name)  # raises
        return [
            RemoteVersion(
                number,
                version.model.config,
                version.model.labels,
                version.model.defines_is_ready,
                await version.model.why_not_ready(),
            )
            for number, version in known.items()
            if version.state is VersionState.READY and version.model is not None
        ]

    async def infer(self, request: InferRequest, headers: Mapping[str, str]) -> ResponseStream:
        """Yields the responses to a request. Raises HostError if it is refused.

        `headers`: the W3C trace context of the other server. The memory of the tensors is valid
        until the next response is asked for. Closing the stream cancels the request.
        """
        tracer = self._core.request_tracer
        trace = None if tracer is None else tracer.start_trace(request.model_name, headers.get)
        request.trace = trace
        try:
            call = await self._core.infer_when_loaded(request)
            with self._returning.incoming(call):
                async with aclosing(call.iterate_with_final()) as responses:
                    async for response, final in responses:
                        yield response, final
        finally:
            if trace is not None:
                trace.finish_response()

    async def statistics(self, name: str, version: str) -> list[ModelStatistics]:
        """The statistics of a model; of all models without a name. Raises HostError."""
        return self._core.statistics(name, version)

    def ready_versions(self) -> list[tuple[str, int]]:
        """Every (model, version) that is ready, in order."""
        return [
            (self._registry.name_of(known), number)
            for known, entry in self._registry.list_entries()
            for number, version in sorted(entry.versions.items())
            if version.state is VersionState.READY
        ]

    async def index(self, ready: bool) -> Sequence[IndexEntry]:
        """The models on disk, or only the versions that are ready. Raises HostError."""
        return await self._index(ready)

    async def ready(self) -> bool:
        """Whether these models are ready. Raises HostError during the exit."""
        return await self._core.health.own_ready()
