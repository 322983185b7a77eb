"""Builds a server from its options, starts it and stops it."""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from types import TracebackType

from host.bls.targets import BlsTargets
from host.cache.store import ResponseStore
from host.cache.store_factory import open_store
from host.core import VERSION, Core
from host.crashes.records import CrashRecords
from host.ensembles.loader import EnsembleLoader
from host.environments.environments import Environments
from host.errors import internal, invalid_argument, unavailable
from host.frontend_processes.processes import FrontendProcesses
from host.frontends.grpc.application import GrpcApplication
from host.frontends.http.asgi import AsgiApplication
from host.frontends.openai.loader import OpenAILoader
from host.health.event_loop_watchdog import EventLoopWatchdog
from host.health.server_state import ServerState
from host.inference.request import InferRequest, InferResponse
from host.instances.batch_tracker import FlowControl
from host.instances.gpu_memory import read_gpu_memory
from host.instances.gpus import find_gpus
from host.instances.launchers import ForkLauncher, SpawnLauncher
from host.instances.pool import StubPool
from host.instances.process import Launcher
from host.instances.terminal import has_terminal
from host.logs.handler import LogHandler, configure
from host.logs.settings import LogSettings
from host.logs.tail import LogTail
from host.logs.text_table import format_table
from host.metrics.custom import CustomMetrics
from host.metrics.family import MetricFamily
from host.metrics.machine import MachineMetrics
from host.metrics.process import ProcessMetrics
from host.model_control.control import ModelControl
from host.model_control.dependencies import EnsembleDependencies
from host.model_control.eviction import Evictions
from host.model_control.hook import LoadParameters, ModelControlHook
from host.model_control.lifecycle import ModelLifecycle
from host.model_control.memory_budget import MemoryBudget
from host.model_control.memory_usage import HOST, MemoryUsage, gpu_name
from host.model_control.on_demand import OnDemandLoads
from host.model_control.repository_poller import RepositoryPoller, read_state
from host.models.backends import Backends
from host.models.lendable_semaphore import LendableSemaphore
from host.models.loader import Loader
from host.models.loading import LoadSettings, ModelLoader
from host.models.registry import Registry, VersionState
from host.options.host_policies import read_policies
from host.options.options import Options
from host.options.startup_table import option_table_rows
from host.options.validators import memory_budget as read_memory_budget
from host.remote.provider import RemoteModelProvider
from host.remote.remote_models import RemoteModels
from host.repository.imported_files import ImportedFiles
from host.repository.repository import FingerprintFunction, Repository, compute_fingerprint
from host.scheduling.rate_limiter import RateLimiter, ResourceLimit
from host.server.endpoints import Endpoints, wait_with_reports
from host.server.in_process import Arrays, Result, to_request, to_result
from host.server.load_progress import LoadProgress
from host.server.metrics_collector import MetricsCollector
from host.server.overview_collector import OverviewCollector
from host.server.own_models import OwnModels
from host.server.queues import QueueState, read_queues
from host.system.cpus import usable_cpus
from host.tracing.tracer import Tracer
from host.traffic.splits import TrafficSplits
from stub.wire.ring import BUSY_POLL_SECONDS

_log = logging.getLogger("pbhost")

_FINAL_TIMEOUT_S = 5.0  # seconds for `finalize` of idle models after the exit timeout


class Server:
    """A server in this process. Belongs to the event loop that `start` runs in.

    `launcher`: starts stubs in another way than the options say. `control_hook`: takes part in the
    loads and unloads that clients and models ask for. `remote_models`: the models of other servers,
    which ensembles, models (BLS) and clients can call here; raises HostError INVALID_ARG if they
    come together with `model_namespacing`.

    `async with Server(Options(model_repository=["models"])) as server: ...`
    """

    def __init__(
        self,
        options: Options,
        launcher: Launcher | None = None,
        *,
        control_hook: ModelControlHook | None = None,
        remote_models: RemoteModelProvider | None = None,
    ) -> None:
        self.options = options
        self._launcher = launcher
        self._control_hook = control_hook
        self._control: ModelControl | None = None
        self._registry = Registry(options.model_namespacing)
        self._remote: RemoteModels | None = None
        if remote_models is not None:
            if options.model_namespacing:
                raise invalid_argument(
                    "remote models do not work with model_namespacing: they have no namespace"
                )
            timeout = options.on_demand_timeout_secs
            self._remote = RemoteModels(remote_models, self._registry, timeout)
        self._traffic = TrafficSplits(self._registry)
        self._state = ServerState()
        self._core: Core | None = None
        self._pool: StubPool | None = None
        self._environments: Environments | None = None
        self._lifecycle: ModelLifecycle | None = None
        self._families: EnsembleDependencies | None = None
        self._on_demand: OnDemandLoads | None = None
        self._memory_budget: MemoryBudget | None = None
        self._poller: RepositoryPoller | None = None
        self._custom_metrics = CustomMetrics()
        self._endpoints = Endpoints(options, self._custom_metrics.collect)
        self._store: ResponseStore | None = None
        self._metrics_collector: MetricsCollector | None = None
        self._log: LogHandler | None = None
        self._watchdog: EventLoopWatchdog | None = None
        self._tracer: Tracer | None = None
        self._imported_files: ImportedFiles | None = None
        self._fingerprint: FingerprintFunction = lambda name, path: compute_fingerprint(path)
        if options.dev:
            self._imported_files = ImportedFiles()
            self._fingerprint = self._imported_files.compute_fingerprint
        self._running = False  # whether it was started and not told to stop

    @property
    def core(self) -> Core:
        """The models, as clients see them. Raises HostError UNAVAILABLE before they are loaded."""
        if self._core is None or not self._state.started:
            raise unavailable("Server not ready")
        return self._core

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

        Raises HostError if a model fails to load (with `exit_on_error`), a port is taken, or the
        log file cannot be written. Everything that was started is stopped then.
        """
        options = self.options
        try:
            self._log = configure(options)
        except OSError as error:
            raise invalid_argument(
                f"cannot write the log to '{options.log_file}': {error}"
            ) from error
        self._log.dev = options.dev
        if options.log_tail_lines:
            self._log.tail = LogTail(options.log_tail_lines)
        self._watchdog = EventLoopWatchdog()
        try:
            for warning in options.warnings:
                _log.warning(warning)
            tracer = self._tracer = Tracer(options.tracing)
            await self._endpoints.check_configuration()
            targets = BlsTargets(self._registry, self._state, tracer)
            pool = self._open_pool(targets)
            repository = Repository(map(Path, options.model_repository), options.model_namespacing)
            lifecycle = await self._open_lifecycle(pool, repository)
            families = self._families = EnsembleDependencies(self._registry, lifecycle)
            loads = await self._open_on_demand(repository, families)
            if self._remote is not None:
                lifecycle.remote, self._remote.others = self._remote, loads
            on_demand = targets.on_demand = self._remote or loads
            self._open_memory_budget(pool, families)
            mode = options.model_control_mode
            control = pool.control = self._control = ModelControl(
                self._registry,
                repository,
                families,
                self._traffic,
                explicit=mode in ("explicit", "on-demand"),
                on_demand=mode == "on-demand",
                serving=lambda: self._state.accepts_model_control,
            )
            control.hook = self._control_hook
            control.remote = self._remote
            core = self._core = Core(
                options.id,
                self._registry,
                self._state,
                strict_readiness=options.strict_readiness,
                control=control,
                on_demand=on_demand,
                traffic=self._traffic,
                regions=pool.regions,
                crash_records=pool.crash_records,
                describe_activity=pool.describe_activity,
                overview=OverviewCollector(
                    options.id, self._registry, mode in ("explicit", "on-demand")
                ).collect,
                tracer=tracer,
                log=LogSettings(self._log, pool.update_log_levels),
                remote=self._remote,
            )
            processes = None
            if options.frontend_count:
                processes = FrontendProcesses(
                    options, options.frontend_count, pool.arenas, pool.busy_poller.connection_hook
                )
            await self._endpoints.start(core, pool.busy_poller.connection_hook, processes)
            if options.allow_metrics:
                collector = self._open_metrics_collector()
                await self._endpoints.start_metrics(collector.collect_after_catch_up)
            self._endpoints.log_listening()
            await self._load_models(repository, families)
            self._state.started = True
            core.notify_watchers()
            if not options.dev:
                rows = option_table_rows(core.server_metadata(), options)
                _log.info("%s", format_table(["Option", "Value"], rows), extra={"table": True})
            self._endpoints.log_started()
        except BaseException:  # a cancelled start (Ctrl-C) must not leave processes behind either
            await self.stop()
            raise
        self._running = True
        return self

    def _open_pool(self, targets: BlsTargets) -> StubPool:
        """Opens what stubs need. Raises HostError."""
        options = self.options
        default_launcher = ForkLauncher if options.stub_start == "fork" else SpawnLauncher
        try:
            pool = self._pool = StubPool(
                self._launcher or default_launcher(),
                options.arena_limit,
                targets,
                self._custom_metrics,
                options.allow_client_shm,
                CrashRecords(
                    options.crash_records, options.crash_directory, options.crash_tensor_byte_size
                ),
            )
        except OSError as failure:
            if failure.errno != errno.ENOMEM:
                raise
            raise internal(
                f"no address space for {options.arena_limit} bytes of tensors: {failure.strerror};"
                " set --arena-byte-size to less, or allow this process more (ulimit -v)"
            ) from failure
        # With less CPUs, polling takes the CPU from a process that works on the same request.
        needed = 3.0 if options.frontend_count else 2.0
        if options.busy_poll and usable_cpus() >= needed:
            pool.busy_poller.seconds = BUSY_POLL_SECONDS
        pool.imported_files = self._imported_files
        pool.load_seconds = options.stub_load_timeout_secs or None
        return pool

    def _make_loader(self, python: Loader, pool: StubPool) -> ModelLoader:
        """Make the loader of all models from that of Python models."""
        options = self.options
        loader = EnsembleLoader(
            python,
            self._registry,
            pool.arenas,
            metrics=options.metrics_settings,
            store=self._store,
        )
        if not options.allow_openai:
            return loader
        return OpenAILoader(loader, self._registry, _finalize_seconds(options))

    async def _open_lifecycle(self, pool: StubPool, repository: Repository) -> ModelLifecycle:
        """Makes what loads and unloads models. Raises HostError."""
        options = self.options
        environments = self._environments = Environments(
            options.environment_cache, options.environment_timeout_secs
        )
        if options.cache_settings is not None:
            self._store = await open_store(*options.cache_settings, options.cache_directory)
        initializing = LendableSemaphore(options.max_initializing_instances)
        python = Loader(
            pool,
            Backends(Path(options.backend_directory), options.backend_config),
            environments,
            auto_complete=not options.disable_auto_complete_config,
            flow=FlowControl(
                min(FlowControl.max_outstanding_responses, options.grpc_max_response_pool_size),
                options.response_send_timeout_secs,
            ),
            debugged=options.debug_model,
            metrics=options.metrics_settings,
            store=self._store,
            limiter=_make_rate_limiter(options),
            policies=read_policies(options.host_policy),
            initializing=initializing,
            quarantine_seconds=options.quarantine_secs,
        )
        self._lifecycle = ModelLifecycle(
            self._registry,
            repository,
            self._make_loader(python, pool),
            LoadSettings(
                strict=options.disable_auto_complete_config,
                threads=options.model_load_thread_count,
                retries=options.model_load_retry_count,
                grace=options.stub_grace_secs,
                finalize=_finalize_seconds(options),
                gpus=await find_gpus(options.min_supported_compute_capability),
                least_capability=options.min_supported_compute_capability,
                config_name=options.model_config_name or None,
                agents=options.repoagent_directory,
                cpu_fallback=options.gpu_fallback == "cpu",
                on_demand=options.model_control_mode == "on-demand",
                variables=options.template_variables,
            ),
            self._fingerprint,
            initializing,
        )
        return self._lifecycle

    async def _open_on_demand(
        self, repository: Repository, families: EnsembleDependencies
    ) -> OnDemandLoads | None:
        """What loads models for requests; None if no model loads on demand."""
        mode = self.options.model_control_mode
        found = await asyncio.to_thread(families.lifecycle.find_models_on_demand)
        self._registry.on_demand |= found
        if not found and mode not in ("on-demand", "poll"):
            return None
        self._on_demand = OnDemandLoads(
            self._registry,
            repository,
            families,
            by_default=mode == "on-demand",
            timeout=self.options.on_demand_timeout_secs,
        )
        return self._on_demand

    def _open_memory_budget(self, pool: StubPool, families: EnsembleDependencies) -> None:
        """Makes what limits the memory of models, if `--memory-budget` is set."""
        budget = read_memory_budget(self.options.memory_budget)
        if not budget:
            return
        limits = {HOST if gpu is None else gpu_name(gpu): size for gpu, size in budget.items()}
        on_demand = self._on_demand
        self._memory_budget = families.lifecycle.admission = MemoryBudget(
            limits,
            MemoryUsage(pool, None if set(budget) == {None} else read_gpu_memory).measure,
            Evictions(
                self._registry,
                families,
                (lambda name: False) if on_demand is None else on_demand.is_awaited,
                pool.awaited_models,
            ),
            self.options.on_demand_timeout_secs,
        )

    async def _load_models(self, repository: Repository, families: EnsembleDependencies) -> None:
        """Loads the models of the start, and begins to poll. Raises HostError."""
        options = self.options
        started_with = None
        if options.dev:
            state = await asyncio.to_thread(read_state, repository, self._fingerprint)
            started_with = state.fingerprints
        names, all_loaded = await self._startup_models(repository)
        if options.debug_model:
            _warn_about_debugging(options.debug_model, names)
        # A repainted line would overwrite the prompt of a debugger.
        log = None if options.debug_model or options.dev else self._log
        with nullcontext() if log is None else LoadProgress(self._registry, names, log):
            all_loaded = await families.load_all(names) and all_loaded
        _log.info("%s", self.model_table(), extra={"table": True})
        if not all_loaded:
            error = internal("failed to load all models")
            if options.exit_on_error:
                raise error
            _log.error("%s", error.status_string)
        if options.model_control_mode == "poll":
            self._poller = RepositoryPoller(
                self._registry,
                repository,
                families,
                options.poll_interval,
                self._fingerprint,
                started_with,
            )

    async def _startup_models(self, repository: Repository) -> tuple[list[str], bool]:
        """The models to load at start-up, and whether every repository could be read."""
        options = self.options
        mode = options.model_control_mode
        load_all = "*" in options.load_model
        named: list[str] = []
        if mode in ("explicit", "on-demand") and not load_all:
            asked = list(dict.fromkeys(options.load_model))
            known = await asyncio.to_thread(lambda: list(map(repository.qualified_names, asked)))
            named = [
                one for name, found in zip(asked, known, strict=True) for one in found or [name]
            ]
            if mode == "explicit":
                return named, True
        scan = await asyncio.to_thread(repository.scan)
        for text in scan.warnings:
            _log.error("%s", text)
        if options.model_repository and not (scan.models or scan.failures):
            paths = ", ".join(f"'{path}'" for path in options.model_repository)
            _log.warning("no models in %s: a model is a folder there, as NAME/1/model.py", paths)
        names = [
            name
            for name, directory in scan.models.items()
            if not directory.duplicated and (load_all or name not in self._registry.on_demand)
        ]
        return list(dict.fromkeys([*named, *names])), not scan.failures

    def _open_metrics_collector(self) -> MetricsCollector:
        options = self.options
        assert self._pool is not None and self._watchdog is not None
        collector = self._metrics_collector = MetricsCollector(
            self._registry,
            self._pool,
            self._custom_metrics,
            machine=MachineMetrics() if options.allow_cpu_metrics else None,
            process=ProcessMetrics(VERSION),
            watchdog=self._watchdog,
            interval=options.metrics_interval_ms / 1000,
            pinned=options.pinned_memory_pool_byte_size,
            store=self._store,
            on_demand=self._on_demand,
            memory_budget=self._memory_budget,
            api_keys=self._endpoints.api_keys,
            traffic=self._traffic,
        )
        return collector

    async def collect_metrics(self) -> list[MetricFamily]:
        """Everything that the metrics endpoint shows, also without that endpoint.

        Raises HostError UNAVAILABLE if the server does not run.
        """
        if self._pool is None or self._core is None:
            raise unavailable("Server not ready")
        collector = self._metrics_collector or self._open_metrics_collector()
        return await collector.collect_after_catch_up()

    def queue_state(self, model: str = "") -> QueueState:
        """How full the queue of a model is; "" is all models together."""
        return read_queues(self._registry, model)

    async def load_model(self, name: str, parameters: LoadParameters | None = None) -> None:
        """Loads or reloads a model in this server, without the `control_hook`. Raises HostError.

        `parameters`: `config` and `file:<path>`, as in the repository API. The model control mode
        must be explicit or on-demand.
        """
        await self._model_control.load_in_turn(name, parameters or {})

    async def unload_model(self, name: str, unload_dependents: bool = False) -> None:
        """Starts to unload a model in this server, without the `control_hook`. Raises HostError."""
        await self._model_control.unload_in_turn(name, unload_dependents)

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
        return OwnModels(self.core, self._registry, self._model_control.index)

    async def refresh_remote_model(self, name: str) -> bool:
        """Asks for the versions of a remote model anew, if this server has learned of it.

        To be called when they have changed. The ensembles that use it are reloaded, or unloaded
        until it has a version again; returns whether that changed what is served. Raises HostError.
        """
        if self._remote is None or self._families is None or not self._registry.is_remote(name):
            return False
        await self._remote.refresh_known(name)
        return await self._families.follow_remote_model(name)

    def waiting_ensembles(self) -> dict[str, list[str]]:
        """Ensembles that are loaded when their models are, and which of them are remote."""
        return {} if self._families is None else self._families.waiting_ensembles()

    @property
    def _model_control(self) -> ModelControl:
        if self._control is None:
            raise unavailable("Server not ready")
        return self._control

    def model_table(self) -> str:
        """A table of every known version, with READY or the reason why it is not."""
        rows: list[list[str]] = []
        for name, failure in self._registry.failures.items():
            rows.append([name, "-", f"Not loaded: {failure.reason}"])
        for name, entry in self._registry.list_entries():
            if not entry.versions:
                rows.append([name, "-", f"Not loaded: {entry.reason}"])
            for number, version in sorted(entry.versions.items()):
                status = version.state.value
                if version.state is not VersionState.READY and version.reason:
                    # The log has all lines of the reason.
                    status += f": {version.reason.splitlines()[0]}"
                rows.append([name, str(number), status])
        rows.sort(key=lambda row: row[0])
        return format_table(["Model", "Version", "Status"], rows)

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

        Returns whether all work ended within the exit timeout.
        """
        self._state.exiting = True
        if self._core is not None:
            self._core.end_recordings()
        try:
            if self._poller is not None:
                await self._poller.close()
            if self._running:
                self._running = False
                await self._delay_exit()
            deadline = asyncio.get_running_loop().time() + self.options.exit_timeout_secs
            in_time = await self._endpoints.drain(deadline)
            await self._endpoints.stop(deadline)
            if self._on_demand is not None:
                await self._on_demand.close()
            if self._lifecycle is not None:
                in_time = await self._unload(self._lifecycle, deadline, in_time)
                in_time = await self._drain_remote_models(deadline) and in_time
        finally:  # also if this is cancelled: no process outlives the server
            await self._release_resources()
        return in_time

    async def _delay_exit(self) -> None:
        """Waits, so that load balancers see the health and send requests elsewhere."""
        delay = self.options.exit_delay_secs
        if delay > 0:
            _log.info("The server reports not ready; requests are accepted for another %g s", delay)
            await asyncio.sleep(delay)

    async def _release_resources(self) -> None:
        """Stops what is left and drops all references, so that a stopped server holds no memory."""
        pool, lifecycle, log = self._pool, self._lifecycle, self._log
        environments, self._environments = self._environments, None
        collector, self._metrics_collector = self._metrics_collector, None
        store, self._store = self._store, None
        budget, self._memory_budget = self._memory_budget, None
        tracer, self._tracer = self._tracer, None
        watchdog, self._watchdog = self._watchdog, None
        self._poller = self._on_demand = self._lifecycle = self._pool = self._log = None
        self._core = self._control = None
        await self._endpoints.stop(0.0)  # if `stop` was interrupted
        await self._endpoints.stop_metrics(_FINAL_TIMEOUT_S)
        if collector is not None:
            collector.close()
        if self._remote is not None:
            await self._remote.close()
        if budget is not None:
            await budget.close()
        if pool is not None:
            await pool.close()
        if environments is not None:
            await environments.close()
        if store is not None:
            await store.close()
        if lifecycle is not None:
            await asyncio.to_thread(lifecycle.close)
        if tracer is not None:
            await asyncio.to_thread(tracer.close)
        if watchdog is not None:
            await asyncio.to_thread(watchdog.close)
        if log is not None:
            await asyncio.to_thread(log.close)

    async def _unload(self, lifecycle: ModelLifecycle, deadline: float, in_time: bool) -> bool:
        _log.info("Waiting for in-flight requests to complete.")
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
        if self._remote is None:
            return True
        if await self._remote.drain(deadline - asyncio.get_running_loop().time()):
            return True
        _log.error("requests to models of other servers did not end within the exit timeout")
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


def _finalize_seconds(options: Options) -> float:
    """Seconds that a model's `finalize` may take."""
    return max(1.0, float(options.exit_timeout_secs))


def _make_rate_limiter(options: Options) -> RateLimiter | None:
    if options.rate_limit == "off":
        return None
    return RateLimiter(ResourceLimit(*given) for given in options.rate_limiter_resources)


def _warn_about_debugging(model: str, names: Sequence[str]) -> None:
    if not has_terminal():
        _log.warning(
            "--debug-model: stdin is not a terminal, so a debugger in '%s' gets no input and quits;"
            " start pbhost at a terminal (in a container: docker run -it)",
            model,
        )
    if model not in names:
        _log.warning("--debug-model: model '%s' is not loaded at start-up", model)


def _log_in_flight(lifecycle: ModelLifecycle, left: float) -> None:
    busy = [model for model in lifecycle.living_models() if model.in_flight]
    _log.info("Timeout %d: Found %d model versions that have in-flight inferences", left, len(busy))
    for model in busy:
        _log.info(
            "Model '%s' (version %d) has %d in-flight inferences",
            model.name,
            model.version,
            model.in_flight,
        )
