"""The parts of a server: stubs, loaders, models and their control, opened and closed as one."""

from __future__ import annotations

import asyncio
import errno
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from host.access.api_keys import ApiKeys
from host.bls import BlsTargets
from host.cache.local import open_store
from host.cache.responses import ResponseStore
from host.config.model_config import AdaptConfig, ConfigSettings
from host.core import VERSION, CollectStatistics, Core
from host.crashes.records import CrashRecords
from host.ensembles.ensemble import EnsembleLoader
from host.environments.model_environments import Environments
from host.errors import internal, invalid_argument
from host.frontends.openai.load_hook import OpenAILoadHook
from host.health import EventLoopWatchdog, ServerState
from host.instances.flow_control import FlowControlSettings
from host.instances.gpus import find_gpus, read_gpu_memory
from host.instances.launchers import ForkLauncher, SpawnLauncher
from host.instances.pool import StubPool
from host.instances.stub_process import Launcher
from host.logs.log_handler import LogHandler
from host.logs.log_settings import LogSettings
from host.metrics.custom import CustomMetrics
from host.metrics.machine import MachineMetrics, ProcessMetrics
from host.model_control.control import ModelControl, ModelControlHook
from host.model_control.dependencies import EnsembleDependencies
from host.model_control.lifecycle import ModelLifecycle
from host.model_control.memory_budget import HOST, Evictions, MemoryBudget, MemoryUsage, gpu_name
from host.model_control.on_demand import OnDemandLoads
from host.models.backends import Backends
from host.models.instance_loader import Loader
from host.models.loaders import LendableSemaphore, Loaders, LoadSettings
from host.models.registry import Registry
from host.models.traffic_splits import TrafficSplits
from host.options.options import Options
from host.options.validators import memory_budget as read_memory_budget
from host.options.validators import read_policies
from host.remote_models import RemoteModelProvider, RemoteModels
from host.repository.fingerprint import FingerprintFunction, ImportedFiles, compute_fingerprint
from host.repository.open_repository import open_repository
from host.repository.override import UploadedDirectories
from host.repository.repository import Repository
from host.scheduling.rate_limiter import RateLimiter, ResourceLimit
from host.server.collectors import MetricsCollector, OverviewCollector
from host.system.resources import usable_cpus
from host.tracing.tracer import Tracer
from stub.wire.ring import BUSY_POLL_SECONDS


@dataclass(frozen=True, slots=True)
class Components:
    """The parts of a server that exist from its start to its end."""

    core: Core
    pool: StubPool
    repository: Repository
    lifecycle: ModelLifecycle
    dependencies: EnsembleDependencies
    control: ModelControl
    on_demand: OnDemandLoads | None
    memory_budget: MemoryBudget | None
    store: ResponseStore | None
    watchdog: EventLoopWatchdog
    resources: AsyncExitStack

    async def close(self) -> None:
        """Ends what is left, and frees everything. All endpoints are closed before."""
        await self.resources.aclose()


class Composition:
    """Puts a server together. Belongs to the event loop; the arguments are those of `Server`.

    Attributes:
        registry: The models, and what became of their loads; it outlives the components.
        state: Whether the server has started, and whether it exits.
        traffic: How requests are split between versions of a model.
        custom_metrics: The metrics that models made.
        remote: The models of other servers; None without them.
        fingerprint: Tells whether files of a model have changed.
    """

    def __init__(
        self,
        options: Options,
        launcher: Launcher | None = None,
        control_hook: ModelControlHook | None = None,
        remote_models: RemoteModelProvider | None = None,
        collect_statistics: CollectStatistics | None = None,
        adapt_config: AdaptConfig | None = None,
    ) -> None:
        self._options = options
        self._launcher = launcher
        self._control_hook = control_hook
        self._collect_statistics = collect_statistics
        self._adapt_config = adapt_config
        self.registry = Registry(options.model_namespacing)
        self.state = ServerState()
        self.traffic = TrafficSplits(self.registry)
        self.custom_metrics = CustomMetrics()
        self.remote: RemoteModels | None = None
        if remote_models is not None:
            if options.model_namespacing:
                raise invalid_argument(
                    "remote models do not work with model_namespacing: they have no namespace"
                )
            timeout = options.on_demand_timeout_secs
            self.remote = RemoteModels(remote_models, self.registry, timeout)
        self._imported_files: ImportedFiles | None = None
        self.fingerprint: FingerprintFunction = lambda name, path: compute_fingerprint(path)
        if options.dev:
            self._imported_files = ImportedFiles()
            self.fingerprint = self._imported_files.compute_fingerprint

    async def open(self, log: LogHandler) -> Components:
        """Opens everything but endpoints; no model is loaded yet.

        `log`: the handler whose settings clients may change. Raises HostError;
        then nothing is left open.
        """
        options, registry = self._options, self.registry
        async with AsyncExitStack() as stack:  # closed in reverse: stubs end before what they use
            watchdog = EventLoopWatchdog()
            stack.push_async_callback(asyncio.to_thread, watchdog.close)
            tracer = Tracer(options.tracing)
            stack.push_async_callback(asyncio.to_thread, tracer.close)
            uploads = UploadedDirectories()
            stack.push_async_callback(asyncio.to_thread, uploads.close)
            store = None
            if options.cache_settings is not None:
                store = await open_store(*options.cache_settings, options.cache_directory)
                stack.push_async_callback(store.close)
            environments = Environments(options.environment_cache, options.environment_timeout_secs)
            stack.push_async_callback(environments.close)
            targets = BlsTargets(registry, self.state, tracer)
            pool = self._open_pool(targets)
            stack.push_async_callback(pool.close)

            repository = await asyncio.to_thread(
                open_repository,
                options.model_repository,
                options.model_namespacing,
                options.mirror_settings,
            )
            stack.push_async_callback(repository.close)
            initializing = LendableSemaphore(options.max_initializing_instances)
            lifecycle = ModelLifecycle(
                registry,
                repository,
                self._make_loaders(pool, environments, store, initializing),
                await _read_load_settings(options, self._adapt_config),
                uploads,
                self.fingerprint,
                initializing,
                self.remote,
            )
            dependencies = EnsembleDependencies(registry, lifecycle)
            on_demand = await self._make_on_demand(repository, dependencies)
            if self.remote is not None:
                self.remote.others = on_demand
                stack.push_async_callback(self.remote.close)
            targets.on_demand = self.remote or on_demand
            budget = self._make_memory_budget(pool, dependencies, on_demand)
            if budget is not None:
                lifecycle.admission = budget
                stack.push_async_callback(budget.close)
            control = pool.control = self._make_control(repository, dependencies)
            core = self._make_core(pool, control, on_demand, repository, tracer, log)
            return Components(
                core=core,
                pool=pool,
                repository=repository,
                lifecycle=lifecycle,
                dependencies=dependencies,
                control=control,
                on_demand=on_demand,
                memory_budget=budget,
                store=store,
                watchdog=watchdog,
                resources=stack.pop_all(),
            )
        # For the type checker, which takes the stack for one that may swallow exceptions.
        raise AssertionError("an exit stack swallows no exception")

    def _open_pool(self, targets: BlsTargets) -> StubPool:
        """Opens what stubs need. Raises HostError."""
        options = self._options
        default_launcher = ForkLauncher if options.stub_start == "fork" else SpawnLauncher
        try:
            pool = StubPool(
                self._launcher or default_launcher(),
                options.arena_limit,
                targets,
                self.custom_metrics,
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

    def _make_loaders(
        self,
        pool: StubPool,
        environments: Environments,
        store: ResponseStore | None,
        initializing: LendableSemaphore,
    ) -> Loaders:
        """What loads models of each kind."""
        options = self._options
        instances = Loader(
            pool,
            Backends(Path(options.backend_directory), options.backend_config),
            environments,
            auto_complete=not options.disable_auto_complete_config,
            flow=FlowControlSettings(
                min(
                    FlowControlSettings.max_outstanding_responses,
                    options.grpc_max_response_pool_size,
                ),
                options.response_send_timeout_secs,
            ),
            debugged=options.debug_model,
            metrics=options.metrics_settings,
            store=store,
            limiter=_make_rate_limiter(options),
            policies=read_policies(options.host_policy),
            initializing=initializing,
            quarantine_seconds=options.quarantine_secs,
        )
        metrics = options.metrics_settings
        ensembles = EnsembleLoader(self.registry, pool.arenas, metrics=metrics, store=store)
        hooks = [OpenAILoadHook(self.registry)] if options.allow_openai else []
        return Loaders(instances, ensembles, hooks)

    async def _make_on_demand(
        self, repository: Repository, dependencies: EnsembleDependencies
    ) -> OnDemandLoads | None:
        """What loads models for requests; None if no model loads on demand.

        Object stores are listed later, when the ports are open.
        """
        mode = self._options.model_control_mode
        found = await asyncio.to_thread(dependencies.lifecycle.planner.find_models_on_demand)
        self.registry.on_demand |= found
        if not found and mode not in ("on-demand", "poll") and not repository.mirrors:
            return None
        return OnDemandLoads(
            self.registry,
            repository,
            dependencies,
            by_default=mode == "on-demand",
            timeout=self._options.on_demand_timeout_secs,
        )

    def _make_memory_budget(
        self, pool: StubPool, dependencies: EnsembleDependencies, on_demand: OnDemandLoads | None
    ) -> MemoryBudget | None:
        """What limits the memory of models; None without `--memory-budget`."""
        budget = read_memory_budget(self._options.memory_budget)
        if not budget:
            return None
        limits = {HOST if gpu is None else gpu_name(gpu): size for gpu, size in budget.items()}
        return MemoryBudget(
            limits,
            MemoryUsage(
                pool.process_ids, None if set(budget) == {None} else read_gpu_memory
            ).measure,
            Evictions(
                self.registry,
                dependencies,
                (lambda name: False) if on_demand is None else on_demand.is_awaited,
                pool.awaited_models,
            ),
            self._options.on_demand_timeout_secs,
        )

    def _make_control(
        self, repository: Repository, dependencies: EnsembleDependencies
    ) -> ModelControl:
        """What loads and unloads models for clients and for models."""
        mode = self._options.model_control_mode
        control = ModelControl(
            self.registry,
            repository,
            dependencies,
            self.traffic,
            explicit=mode in ("explicit", "on-demand"),
            on_demand=mode == "on-demand",
            serving=lambda: self.state.accepts_model_control,
        )
        control.hook = self._control_hook
        control.remote = self.remote
        return control

    def _make_core(
        self,
        pool: StubPool,
        control: ModelControl,
        on_demand: OnDemandLoads | None,
        repository: Repository,
        tracer: Tracer,
        log: LogHandler,
    ) -> Core:
        options = self._options
        controlled = options.model_control_mode in ("explicit", "on-demand")
        return Core(
            options.id,
            self.registry,
            self.state,
            strict_readiness=options.strict_readiness,
            control=control,
            on_demand=self.remote or on_demand,
            traffic=self.traffic,
            regions=pool.regions,
            crash_records=pool.crash_records,
            describe_activity=pool.describe_activity,
            overview=OverviewCollector(options.id, self.registry, controlled, repository).collect,
            tracer=tracer,
            log=LogSettings(log, pool.update_log_levels),
            remote=self.remote,
            collect_statistics=self._collect_statistics,
        )

    def make_metrics_collector(
        self, components: Components, api_keys: ApiKeys | None
    ) -> MetricsCollector:
        """Makes what collects the metrics; to be closed before the components."""
        options = self._options
        others = (
            *(ProcessMetrics(VERSION), components.store, components.on_demand),
            *(components.memory_budget, self.traffic, api_keys),
        )
        return MetricsCollector(
            self.registry,
            components.pool,
            self.custom_metrics,
            machine=MachineMetrics() if options.allow_cpu_metrics else None,
            watchdog=components.watchdog,
            interval=options.metrics_interval_ms / 1000,
            pinned=options.pinned_memory_pool_byte_size,
            repository=components.repository,
            others=[part.collect_into for part in others if part is not None],
        )


async def _read_load_settings(options: Options, adapt_config: AdaptConfig | None) -> LoadSettings:
    return LoadSettings(
        config=ConfigSettings(
            strict=options.disable_auto_complete_config,
            config_name=options.model_config_name or None,
            gpus=await find_gpus(options.min_supported_compute_capability),
            least_capability=options.min_supported_compute_capability,
            cpu_fallback=options.gpu_fallback == "cpu",
            variables=options.template_variables,
            adapt=adapt_config,
        ),
        threads=options.model_load_thread_count,
        retries=options.model_load_retry_count,
        grace=options.stub_grace_secs,
        finalize=_finalize_seconds(options),
        step=options.stub_load_timeout_secs,
        agents=options.repoagent_directory,
        on_demand=options.model_control_mode == "on-demand",
    )


def _finalize_seconds(options: Options) -> float:
    """Seconds that a model's `finalize` may take."""
    return max(1.0, float(options.exit_timeout_secs))


def _make_rate_limiter(options: Options) -> RateLimiter | None:
    if options.rate_limit == "off":
        return None
    return RateLimiter(ResourceLimit(*given) for given in options.rate_limiter_resources)
