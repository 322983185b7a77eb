"""The composition root: one server from its options, started, asked in-process, stopped."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from host.core import Core
from host.errors import HostError, internal, unavailable
from host.frontends.grpc_aio import GrpcAioFrontend
from host.frontends.grpc_methods import GrpcOptions
from host.frontends.grpc_service import GrpcService
from host.inference import InferRequest, InferResponse
from host.inprocess import Arrays, Result, to_request, to_result
from host.instances.launchers import ForkLauncher, SpawnLauncher
from host.instances.pool import StubPool
from host.log import Log, configure, table
from host.models.backends import Backends
from host.models.lifecycle import Lifecycle
from host.models.loader import Loader
from host.models.registry import Registry, State
from host.options import Options
from host.progress import Progress
from host.repository import Repository

_log = logging.getLogger("pbhost")

_LAST_SECONDS = 5.0  # for `finalize` of idle models when the exit timeout is over


class Server:
    """A host in this process. Everything belongs to the event loop that `start` runs in.

    `async with Server(Options(model_repository=["models"])) as server: ...`
    """

    def __init__(self, options: Options) -> None:
        self.options = options
        self.grpc_port = 0
        self._registry = Registry()
        self.core = Core(options.id, self._registry, options.strict_readiness)
        self._pool: StubPool | None = None
        self._lifecycle: Lifecycle | None = None
        self._grpc: GrpcAioFrontend | None = None
        self._log: Log | None = None

    async def start(self) -> Server:
        """Load the models, then open the ports.

        Raises HostError if a model does not load (with `exit_on_error`) or a port is taken; what
        had been started is stopped again.
        """
        options = self.options
        self._log = configure(options)
        try:
            for warning in options.warnings:
                _log.warning(warning)
            await self._load()
            self.core.start()
            if options.allow_grpc:
                await self._open_grpc()
        except BaseException:
            await self.stop()
            raise
        return self

    async def _load(self) -> None:
        options = self.options
        repository = Repository(Path(path) for path in options.model_repository)
        launcher = ForkLauncher() if options.stub_start == "fork" else SpawnLauncher()
        pool = self._pool = StubPool(
            launcher, options.arena_limit, self.core.ask, self.core.break_circle
        )
        lifecycle = self._lifecycle = Lifecycle(
            self._registry,
            repository,
            Loader(
                pool,
                Backends(Path(options.backend_directory)),
                auto_complete=not options.disable_auto_complete_config,
            ),
            strict=options.disable_auto_complete_config,
            explicit=options.model_control_mode == "explicit",
            threads=options.model_load_thread_count,
            grace=options.stub_grace_secs,
            finalize=max(1.0, float(options.exit_timeout_secs)),
        )
        self.core.connect(lifecycle)
        names = self._startup_models(lifecycle)
        with Progress(self._registry, names):
            sound = await lifecycle.load_all(names)
        _log.info("%s", self.model_table(), extra={"table": True})
        if not sound:
            error = internal("failed to load all models")
            if options.exit_on_error:
                raise error
            _log.error("%s", error.status_string)

    def _startup_models(self, lifecycle: Lifecycle) -> Sequence[str]:
        options = self.options
        if options.model_control_mode != "explicit":
            return lifecycle.names_on_disk()
        if "*" in options.load_model:
            return lifecycle.names_on_disk()
        return list(dict.fromkeys(options.load_model))

    async def _open_grpc(self) -> None:
        options = self.options
        self._grpc = GrpcAioFrontend(
            GrpcService(self.core), options.grpc_address, options.grpc_port, _grpc_options(options)
        )
        try:
            self.grpc_port = await self._grpc.start()
        except HostError as error:
            _log.error("failed to start GRPC service: %s - %s", error.code.value, error.message)
            raise
        _log.info("Started GRPCInferenceService at %s:%d", options.grpc_address, self.grpc_port)

    def model_table(self) -> str:
        """Every known version, with READY or the reason why not."""
        rows: list[list[str]] = []
        for name, entry in self._registry.items():
            if not entry.versions:
                reason = entry.reason or "No model version was found"
                rows.append([name, "-", f"Not loaded: {reason}"])
            for number, version in sorted(entry.versions.items()):
                status = version.state.value
                if version.state is not State.READY and version.reason:
                    status += f": {version.reason}"
                rows.append([name, str(number), status])
        return table(["Model", "Version", "Status"], rows)

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
        """Ask a model with numpy arrays (any shape and dtype that it takes; strings as objects).

        Raises HostError as a client would see it.
        """
        request = to_request(model, inputs, version, request_id, outputs, parameters or {})
        return to_result(await self.ask(request))

    async def ask(self, request: InferRequest) -> InferResponse:
        """The response to a request in the host's own form. Raises HostError."""
        return await self.core.infer(request)

    async def stop(self) -> bool:
        """Refuse new work, finish what runs, finalize the models, give everything back.

        Returns whether all work ended within the exit timeout.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + max(0, self.options.exit_timeout_secs)
        self.core.begin_exit()
        if self._grpc is not None:
            await self._grpc.stop(max(0.0, deadline - loop.time()))
            self._grpc = None
        in_time = True
        if self._lifecycle is not None:
            in_time = await self._unload(self._lifecycle, deadline)
            self._lifecycle = None
        if self._pool is not None:
            await self._pool.close()
            self._pool = None
        if self._log is not None:
            self._log.close()
            self._log = None
        return in_time

    async def _unload(self, lifecycle: Lifecycle, deadline: float) -> bool:
        loop = asyncio.get_running_loop()
        _log.info("Waiting for in-flight requests to complete.")
        unload = loop.create_task(lifecycle.unload_all())
        while True:
            left = deadline - loop.time()
            done, _ = await asyncio.wait([unload], timeout=max(0.0, min(1.0, left)))
            if done:
                unload.result()
                return True
            if left <= 0.0:
                break
            _log_busy(lifecycle, left)
        _log.error("failed to stop server: Internal - Exit timeout expired. Exiting immediately.")
        lifecycle.abort_all(unavailable("the server stops and its exit timeout has expired"))
        await asyncio.wait([unload], timeout=_LAST_SECONDS)
        unload.cancel()
        await asyncio.wait([unload])
        return False

    async def __aenter__(self) -> Server:
        return await self.start()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.stop()


def _grpc_options(options: Options) -> GrpcOptions:
    return GrpcOptions(
        keepalive_time=options.grpc_keepalive_time,
        keepalive_timeout=options.grpc_keepalive_timeout,
        keepalive_permit_without_calls=options.grpc_keepalive_permit_without_calls,
        http2_max_pings_without_data=options.grpc_http2_max_pings_without_data,
        http2_min_recv_ping_interval_without_data=(
            options.grpc_http2_min_recv_ping_interval_without_data
        ),
        http2_max_ping_strikes=options.grpc_http2_max_ping_strikes,
        max_connection_age=options.grpc_max_connection_age,
        max_connection_age_grace=options.grpc_max_connection_age_grace,
        reuse_port=options.reuse_grpc_port,
        compression_level=options.grpc_infer_response_compression_level,
        use_ssl=options.grpc_use_ssl,
        use_ssl_mutual=options.grpc_use_ssl_mutual,
        server_cert=options.grpc_server_cert,
        server_key=options.grpc_server_key,
        root_cert=options.grpc_root_cert,
    )


def _log_busy(lifecycle: Lifecycle, left: float) -> None:
    busy = [model for model in lifecycle.models() if model.in_flight]
    _log.info("Timeout %d: Found %d model versions that have in-flight inferences", left, len(busy))
    for model in busy:
        _log.info(
            "Model '%s' (version %d) has %d in-flight inferences",
            model.name,
            model.version,
            model.in_flight,
        )
