"""Builds a server from its options, starts it and stops it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import AsyncExitStack

from host.config.model_config import AdaptConfig
from host.core import CollectStatistics, Core
from host.errors import HostError, invalid_argument, unavailable
from host.frontend_processes.processes import FrontendProcesses
from host.frontends.grpc.grpc_application import GrpcApplication
from host.frontends.http.app import AsgiApplication
from host.inference.request import InferRequest, InferResponse, Result
from host.instances.stub_process import Launcher
from host.logs.formats import format_table
from host.logs.log_handler import LogHandler, LogTail
from host.metrics.families import MetricFamily
from host.model_control.control import LoadParameters, ModelControl, ModelControlHook
from host.model_control.lifecycle import ModelLifecycle
from host.model_control.repository_poller import RepositoryPoller
from host.options.options import Options, option_table_rows
from host.remote_models import RemoteModelProvider, ReturningCalls
from host.server.collectors import MetricsCollector, QueueState, read_queues
from host.server.composition import Components, Composition
from host.server.endpoints import Endpoints, wait_with_reports
from host.server.in_process import Arrays, to_request, to_result
from host.server.own_models import OwnModels
from host.server.startup_models import StartupModels, format_model_table

_log = logging.getLogger("pbhost")

_FINAL_TIMEOUT_S = 5.0  # seconds for `finalize` of idle models after the exit timeout


class Server:
    """A server in this process. Belongs to the event loop that `start` runs in.

    `launcher`: starts stubs in another way than the options say. `control_hook`: takes part in the
    loads and unloads that clients and models ask for. `remote_models`: the models of other servers,
    which ensembles, models (BLS) and clients can call here; raises HostError INVALID_ARG if they
    come together with `model_namespacing`. `collect_statistics`: returns the statistics that
    clients get, where several servers answer as one. `adapt_config`: changes the configuration of
    each model in place, after it was read and before it is checked; it runs in a thread, and what
    it raises as HostError fails the load.

    `async with Server(Options(model_repository=["models"])) as server: ...`
    """

    def __init__(
        self,
        options: Options,
        launcher: Launcher | None = None,
        *,
        control_hook: ModelControlHook | None = None,
        remote_models: RemoteModelProvider | None = None,
        collect_statistics: CollectStatistics | None = None,
        adapt_config: AdaptConfig | None = None,
    ) -> None:
        self.options = options
        self._composition = Composition(
            options, launcher, control_hook, remote_models, collect_statistics, adapt_config
        )
        self._state = self._composition.state
        self._endpoints = Endpoints(options, self._composition.custom_metrics.collect)
        self._components: Components | None = None  # from its start to its end
        self._metrics_collector: MetricsCollector | None = None
        self._poller: RepositoryPoller | None = None
        self._log: LogHandler | None = None
        self._running = False  # whether it was started and not told to stop
        self._changing = asyncio.Lock()  # held while it opens its parts, and while it stops

    @property
    def core(self) -> Core:
        """The models, as clients see them. Raises HostError UNAVAILABLE before they are loaded."""
        if not self._state.started:
            raise unavailable("Server not ready")
        return self._open_components.core

    @property
    def asgi_application(self) -> AsgiApplication:
        """The HTTP endpoints, for another ASGI server on this event loop; no port is needed.

        Raises HostError UNAVAILABLE before the server is started.
        """
        app = self._endpoints.http_app
        if app is None:
            raise unavailable("Server not ready")
        return AsgiApplication(app)

    @property
    def grpc_application(self) -> GrpcApplication:
        """The gRPC methods, for another gRPC server on this event loop; no port is needed.

        Raises HostError UNAVAILABLE before the server is started.
        """
        service = self._endpoints.grpc_service
        if service is None:
            raise unavailable("Server not ready")
        return GrpcApplication(service)

    @property
    def grpc_port(self) -> int:
        """The gRPC port, 0 if gRPC is not served."""
        return self._endpoints.grpc_port

    @property
    def http_port(self) -> int:
        """The HTTP port, 0 if HTTP is not served."""
        return self._endpoints.http_port

    @property
    def metrics_port(self) -> int:
        """The metrics port, 0 if metrics are not served."""
        return self._endpoints.metrics_port

    async def start(self) -> Server:
        """Opens the ports, then loads the models; requests are refused until that is done.

        Raises HostError if a model fails to load or a repository is no directory (both with
        `exit_on_error`), a port is taken, the log file cannot be written, or `stop` was called.
        Everything that was started is stopped then.
        """
        options = self.options
        try:
            self._log = LogHandler(options)
        except OSError as error:
            raise invalid_argument(
                f"cannot write the log to '{options.log_file}': {error}"
            ) from error
        self._log.dev = options.dev
        if options.log_tail_lines:
            self._log.tail = LogTail(options.log_tail_lines)
        try:
            await self._open(self._log)
        except BaseException:  # a cancelled start (Ctrl-C) must not leave processes behind either
            await self.stop()
            raise
        self._running = True
        return self

    async def _open(self, log: LogHandler) -> None:
        options, composition, endpoints = self.options, self._composition, self._endpoints
        for warning in options.warnings:
            _log.warning(warning)
        async with self._changing:  # what is half open cannot be stopped
            components = await self._open_parts(log)
        endpoints.log_listening()
        await components.repository.refresh()
        try:
            components.repository.check_paths()
        except HostError as error:
            if options.exit_on_error:
                raise
            _log.error(
                "%s. The server has no models and is not live; create the directory, or change"
                " --model-repository, and start the server again",
                error.status_string,
            )
            self._state.failed = True
        else:
            models = StartupModels(
                options,
                composition.registry,
                components.repository,
                components.dependencies,
                composition.fingerprint,
                log,
            )
            self._poller = await models.load_models()
            self._refuse_exiting()
            self._state.started = True
        components.core.notify_watchers()
        if not options.dev:
            rows = option_table_rows(components.core.server_metadata(), options)
            _log.info("%s", format_table(["Option", "Value"], rows), extra={"table": True})
        endpoints.log_started()

    async def _open_parts(self, log: LogHandler) -> Components:
        options, endpoints = self.options, self._endpoints
        self._refuse_exiting()
        await endpoints.check_configuration()
        components = self._components = await self._composition.open(log)
        pool = components.pool
        connection_hook = pool.busy_poller.connection_hook
        processes = None
        if options.frontend_count:
            processes = FrontendProcesses(
                options, options.frontend_count, pool.arenas, connection_hook
            )
        await endpoints.start(
            components.core, connection_hook, pool.arenas.received.reserve, processes
        )
        if options.allow_metrics:
            collector = self._open_metrics_collector(components)
            await endpoints.start_metrics(collector.collect)
        self._refuse_exiting()
        return components

    def _refuse_exiting(self) -> None:
        """Raises HostError UNAVAILABLE if `stop` was called."""
        if self._state.exiting:
            raise unavailable("this server is stopping; create a new one")

    def _open_metrics_collector(self, components: Components) -> MetricsCollector:
        keys = self._endpoints.api_keys
        self._metrics_collector = self._composition.make_metrics_collector(components, keys)
        return self._metrics_collector

    @property
    def _open_components(self) -> Components:
        """Raises HostError UNAVAILABLE if there are none."""
        if self._components is None:
            raise unavailable("Server not ready")
        return self._components

    async def collect_metrics(self) -> list[MetricFamily]:
        """Everything that the metrics endpoint shows, also without that endpoint.

        Raises HostError UNAVAILABLE if the server does not run.
        """
        components = self._open_components
        collector = self._metrics_collector or self._open_metrics_collector(components)
        return collector.collect()

    def queue_state(self, model: str = "") -> QueueState:
        """How full the queue of a model is; "" is all models together."""
        return read_queues(self._composition.registry, model)

    async def load_model(self, name: str, parameters: LoadParameters | None = None) -> None:
        """Loads or reloads a model in this server, without the `control_hook`. Raises HostError.

        `parameters`: `config` and `file:<path>`, as in the repository API. The model control mode
        must be explicit or on-demand.
        """
        await self._model_control.load_model(name, parameters or {}, hooked=False)

    async def unload_model(self, name: str, unload_dependents: bool = False) -> None:
        """Starts to unload a model in this server, without the `control_hook`. Raises HostError."""
        await self._model_control.unload_model(name, unload_dependents, hooked=False)

    def override_config(self, name: str) -> str:
        """The configuration of a model that came with a load and is in force; "" if none is.

        JSON. It holds for later loads without one, until the files of the model change.
        """
        return self._model_control.override_config(name)

    @property
    def own_models(self) -> OwnModels:
        """The models of this server, for other servers that call them.

        Raises HostError UNAVAILABLE before they are loaded.
        """
        remote = self._composition.remote
        returning = ReturningCalls() if remote is None else remote.returning
        return OwnModels(
            self.core, self._composition.registry, self._model_control.index, returning
        )

    async def refresh_remote_model(self, name: str) -> bool:
        """Asks for the versions of a remote model again, if this server has learned of it.

        To be called when they have changed. The ensembles that use it are reloaded, or unloaded
        until it has a version again; returns whether that changed what is served. Raises HostError.
        """
        remote, components = self._composition.remote, self._components
        if remote is None or components is None or not self._composition.registry.is_remote(name):
            return False
        await remote.refresh_known(name)
        return await components.dependencies.follow_remote_model(name)

    def waiting_ensembles(self) -> dict[str, list[str]]:
        """Ensembles that are loaded when their models are, and which of them are remote."""
        return {} if self._components is None else self._components.dependencies.waiting_ensembles()

    @property
    def _model_control(self) -> ModelControl:
        return self._open_components.control

    def model_table(self) -> str:
        """A table of every known version, with READY or the reason why it is not."""
        return format_model_table(self._composition.registry)

    async def infer(
        self,
        model: str,
        inputs: Arrays,
        *,
        version: int = -1,
        request_id: str = "",
        outputs: Sequence[str] = (),
        parameters: dict[str, bool | int | float | str] | None = None,
    ) -> Result:
        """Sends numpy arrays to a model (any shape and dtype that it takes; strings as objects).

        Raises HostError as a client would see it.
        """
        request = to_request(model, inputs, version, request_id, outputs, parameters or {})
        return to_result(await self.infer_request(request))

    async def stream(
        self,
        model: str,
        inputs: Arrays,
        *,
        version: int = -1,
        request_id: str = "",
        outputs: Sequence[str] = (),
        parameters: dict[str, bool | int | float | str] | None = None,
    ) -> AsyncGenerator[Result, None]:
        """As `infer`, but yields all responses of a decoupled model as they arrive.

        Other models have one. Leaving the loop and closing the generator cancels the request. An
        error ends the stream.
        """
        request = to_request(model, inputs, version, request_id, outputs, parameters or {})
        call = await self.core.infer_when_loaded(request)
        responses = call.__aiter__()
        try:
            async for response in responses:
                if response.error is not None:
                    raise response.error
                if response.outputs or not call.finished:  # not an empty end
                    yield to_result(response)
        finally:
            await responses.aclose()

    async def infer_request(self, request: InferRequest) -> InferResponse:
        """The response to a request. Raises HostError."""
        return await (await self.core.infer_when_loaded(request))

    async def reload_files(self) -> None:
        """Opens the log file and reads the TLS files again, for log rotation and new certificates.

        What cannot be opened or read is logged, and what was in use stays in use.
        """
        if self._log is not None:
            try:
                self._log.reopen()
            except OSError as error:
                _log.error("cannot open the log file '%s' again: %s", self._log.file, error)
        await self._endpoints.reload_tls()

    async def stop(self) -> bool:
        """Refuses new requests, finishes those in progress, finalizes models and frees everything.

        Returns whether all work ended within the exit timeout. While another call stops the server,
        or `start` opens it, waits for that first.
        """
        self._state.exiting = True
        async with self._changing:
            try:
                return await self._finish_work()
            finally:  # also if this is cancelled: no process outlives the server
                await _run_to_end(self._release_resources())

    async def _finish_work(self) -> bool:
        components = self._components
        if components is not None:
            components.core.end_recordings()
        if self._poller is not None:
            await self._poller.close()
        if self._running:
            self._running = False
            await self._delay_exit()
        deadline = asyncio.get_running_loop().time() + self.options.exit_timeout_secs
        in_time = await self._endpoints.drain(deadline)
        await self._endpoints.stop(deadline)
        if components is not None:
            if components.on_demand is not None:
                await components.on_demand.close()
            in_time = await self._unload(components.lifecycle, deadline, in_time)
            in_time = await self._drain_remote_models(deadline) and in_time
        return in_time

    async def _delay_exit(self) -> None:
        """Waits, so that load balancers see the health and send requests elsewhere."""
        delay = self.options.exit_delay_secs
        if delay > 0:
            _log.info("The server reports not ready; requests are accepted for another %g s", delay)
            await asyncio.sleep(delay)

    async def _release_resources(self) -> None:
        """Stops what is left and drops all references, so that a stopped server holds no memory."""
        components, self._components = self._components, None
        collector, self._metrics_collector = self._metrics_collector, None
        log, self._log = self._log, None
        self._poller = None
        async with AsyncExitStack() as stack:  # in reverse, and each also if one before it fails
            if log is not None:
                stack.push_async_callback(asyncio.to_thread, log.close)
            if components is not None:
                stack.push_async_callback(components.close)
            if collector is not None:
                stack.callback(collector.close)
            stack.push_async_callback(self._endpoints.stop_metrics, _FINAL_TIMEOUT_S)
            stack.push_async_callback(self._endpoints.stop, 0.0)  # if `stop` was interrupted

    async def _unload(self, lifecycle: ModelLifecycle, deadline: float, in_time: bool) -> bool:
        _log.info("Waiting for in-flight requests to complete.")
        _log_in_flight(lifecycle, max(0.0, deadline - asyncio.get_running_loop().time()))
        unload = asyncio.ensure_future(lifecycle.unload_all())
        if await wait_with_reports(unload, deadline, lambda left: _log_in_flight(lifecycle, left)):
            unload.result()
            if in_time:
                return True
        _log.error("failed to stop server: Internal - Exit timeout expired. Exiting immediately.")
        lifecycle.abort_all(unavailable("the server stops and its exit timeout has expired"))
        await asyncio.wait([unload], timeout=_FINAL_TIMEOUT_S)
        unload.cancel()
        await asyncio.wait([unload])
        return False

    async def _drain_remote_models(self, deadline: float) -> bool:
        """Lets the requests of this process to remote models end.

        Those of local models have ended with the models.
        """
        remote = self._composition.remote
        if remote is None:
            return True
        if await remote.drain(deadline - asyncio.get_running_loop().time()):
            return True
        _log.error("requests to models of other servers did not end within the exit timeout")
        return False

    async def __aenter__(self) -> Server:
        return await self.start()

    async def __aexit__(self, *error: object) -> None:
        await self.stop()


async def _run_to_end(work: Coroutine[None, None, None]) -> None:
    """Runs work that ends by itself; a cancellation takes effect at its end."""
    running = asyncio.ensure_future(work)
    cancelled = False
    while not running.done():
        try:
            await asyncio.wait([running])
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        raise asyncio.CancelledError from running.exception()
    running.result()


def _log_in_flight(lifecycle: ModelLifecycle, left: float) -> None:
    busy = [model for model in lifecycle.living_models() if model.unfinished]
    _log.info("Timeout %d: Found %d model versions that have in-flight inferences", left, len(busy))
    for model in busy:
        _log.info(
            "Model '%s' (version %d) has %d in-flight inferences",
            model.name,
            model.version,
            model.unfinished,
        )
