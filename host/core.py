"""The core of a server, which the frontends call: inference, health, metadata, model control."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from host.cache.responses import CacheHit
from host.config.schema import ModelConfig
from host.crashes.quarantine import Quarantine, QuarantinedRequest
from host.crashes.records import CrashRecords
from host.errors import HostError, invalid_argument, not_found, unavailable, unsupported
from host.health import Health, ServerState
from host.inference.call import Call
from host.inference.metadata import (
    IndexEntry,
    ModelMetadata,
    ModelStatistics,
    ServerMetadata,
    TensorMetadata,
)
from host.inference.request import InferRequest
from host.instances.activity import InstanceActivity
from host.instances.regions import Regions
from host.logs.log_settings import LogSettings
from host.metrics.latency import TokenLatencies
from host.metrics.overview import ServerOverview
from host.model_control.control import ModelControl
from host.models.registry import (
    Model,
    ModelVersion,
    NotServedError,
    OnDemand,
    Registry,
    VersionState,
    parse_version,
)
from host.models.traffic_splits import TrafficSplits
from host.recording.recorder import Infer, Recorder, Recording, RecordingSettings
from host.remote_models import RemoteModels
from host.tracing.trace_settings import DescribedSettings, SettingChanges
from host.tracing.tracer import Tracer

VERSION = "2.73.0"
"""The version of Triton whose behaviour this server has; clients can read it."""

_log = logging.getLogger("pbhost")

_Started = TypeVar("_Started")
_Extension = TypeVar("_Extension")

CollectStatistics = Callable[[str, str], Awaitable[list[ModelStatistics]]]
"""Returns the statistics of a model and a version; of all without a name. Raises HostError."""

EXTENSIONS = [
    "classification",
    "sequence",
    "model_repository",
    "model_repository(unload_dependents)",
    "schedule_policy",
    "model_configuration",
    "system_shared_memory",
    "binary_tensor_data",
    "parameters",
    "statistics",
    "trace",
    "logging",
]
"""Protocol extensions that are served."""


class Core:
    """The models of one server, as clients see them. Belongs to the event loop."""

    def __init__(
        self,
        name: str,
        registry: Registry,
        state: ServerState,
        *,
        strict_readiness: bool,
        control: ModelControl,
        on_demand: OnDemand | None,
        traffic: TrafficSplits,
        regions: Regions,
        crash_records: CrashRecords,
        describe_activity: Callable[[str], Awaitable[list[InstanceActivity]]],
        overview: Callable[[], ServerOverview],
        tracer: Tracer,
        log: LogSettings,
        remote: RemoteModels | None = None,
        collect_statistics: CollectStatistics | None = None,
    ) -> None:
        self._name = name
        self._registry = registry
        self._state = state
        self.health = Health(registry, state, strict_readiness, remote)
        self._remote = remote
        self.control = control
        self._on_demand = on_demand
        self.traffic = traffic
        """How requests are split between versions of a model."""
        self.regions = regions
        """Shared memory that clients registered."""
        self.crash_records = crash_records
        """The deaths of stubs."""
        self._describe_activity = describe_activity
        self._recorder = Recorder(self._infer)
        self.infer: Infer = self._infer
        """Starts a request, see `_infer`; replaced while requests are recorded."""
        self.collect_statistics = collect_statistics or self._collect_statistics
        """Returns the statistics that clients get; another one where several servers are one."""
        self.overview = overview
        """Returns what the models and their instances do, in numbers."""
        self.log = log
        """The settings of the log."""
        self._tracer = tracer
        self.request_tracer = tracer if tracer.enabled else None
        """Decides which requests are traced; None while none is."""
        self._watchers: list[Callable[[], None]] = []

    def add_watcher(self, watcher: Callable[[], None]) -> None:
        """Calls `watcher` whenever other models can be found, or `request_tracer` has changed."""
        self._watchers.append(watcher)
        self._registry.watchers.append(watcher)

    def notify_watchers(self) -> None:
        """Called when the models of the start are loaded."""
        for watcher in self._watchers:
            watcher()

    def refuse_while_loading(self) -> None:
        """Raises HostError UNAVAILABLE while the models of the start are loading."""
        if not self._state.started:
            raise unavailable("Server not ready")

    # Inference

    def _infer(self, request: InferRequest, unary: bool = False) -> Call:
        """Starts a request. `unary`: the frontend cannot carry responses of a decoupled model.

        Raises HostError if the request is invalid for the model; NotServedError if the model is
        missing, so that `start_when_loaded` may help.
        """
        if not self._state.started:
            raise unavailable("Server not ready")
        model = self._registry.served.get((request.model_name, request.model_version))
        if model is None:
            model = self._registry.find(request.model_name, request.model_version)
        if unary and model.config.model_transaction_policy.decoupled:
            raise unsupported(
                "ModelInfer RPC doesn't support models with decoupled transaction policy"
            )
        if request.classification is not None:
            request.classification.labels = model.labels
            request.classification.batched = model.config.max_batch_size > 0
        return model.infer(request)

    def repeat_cache_hit(self, name: str, version: int, hit: CacheHit) -> bool:
        """Counts a request that is equal to one that the response cache has answered with `hit`.

        The caller sends the same response. False if only `infer` can answer; nothing is counted.
        """
        if not self._state.started or self._recorder.active or self.request_tracer is not None:
            return False
        try:
            return self._registry.find(name, version).repeat_cache_hit(hit)
        except HostError:  # `infer` reports it
            return False

    @property
    def handles_requests(self) -> bool:
        """Whether something is done here to requests of any model: tracing, recording, splitting.

        Otherwise those of models of other servers can be passed on as they are.
        """
        return (
            self.request_tracer is not None
            or self._recorder.active
            or self.traffic.changed_by_client
        )

    @property
    def loads_on_demand(self) -> bool:
        """Whether `start_when_loaded` can load models."""
        return self._on_demand is not None

    async def start_when_loaded(
        self, request: InferRequest, start: Callable[[], _Started]
    ) -> _Started:
        """Calls `start` and returns its result.

        If it raises NotServedError and the model of the request loads on demand, waits for the
        model and calls `start` again. Raises HostError.
        """
        try:
            return start()
        except NotServedError:
            if self._on_demand is None:
                raise
        return await self._on_demand.start_when_loaded(request, start)

    async def infer_when_loaded(self, request: InferRequest) -> Call:
        """As `infer`, but waits for the model if it is not loaded and loads on demand."""
        if self._on_demand is None:
            return self.infer(request)
        return await self.start_when_loaded(request, lambda: self.infer(request))

    async def config_when_loaded(self, name: str, version: str) -> ModelConfig:
        """As `model_config`, but waits for the model if it is not loaded and loads on demand."""
        if self._on_demand is None:
            return self.model_config(name, version)
        request = InferRequest(name, [], parse_version(version))
        return await self.start_when_loaded(request, lambda: self.model_config(name, version))

    async def describe_activity(self, model: str) -> list[InstanceActivity]:
        """What the instances of a model do now; "" is all models.

        Raises HostError NOT_FOUND for an unknown model.
        """
        found = await self._describe_activity(model)
        if model and not found and not self._registry.is_known(model):
            raise not_found(f"model '{model}' has no instance")
        return found

    def list_quarantined(self) -> list[QuarantinedRequest]:
        """The requests that are refused because they have killed stubs."""
        return [one for quarantine in self._quarantines() for one in quarantine.list_requests()]

    def lift_quarantine(self, model: str) -> int:
        """Accepts such requests to a model again; "" is all models. Returns how many there were.

        Raises HostError NOT_FOUND for an unknown model.
        """
        if model:
            self._registry.check_known(model)
        return sum(quarantine.lift() for quarantine in self._quarantines(model))

    def _quarantines(self, model: str = "") -> Iterator[Quarantine]:
        for _, entry in self._registry.list_entries():
            for version in entry.versions.values():
                served = version.model
                if served is not None and model in ("", served.name) and served.quarantine:
                    yield served.quarantine

    # Recordings

    @contextmanager
    def record(self, name: str, version: str, settings: RecordingSettings) -> Iterator[Recording]:
        """Records requests of clients to a model. Raises HostError."""
        decoupled = bool(self._find(name, version).config.model_transaction_policy.decoupled)
        recording = self._recorder.add(name, parse_version(version), decoupled, settings)
        self.infer = self._recorder.infer
        try:
            yield recording
        finally:
            self._recorder.remove(name)
            if not self._recorder.active:
                self.infer = self._infer

    def end_recordings(self) -> None:
        """Ends all recordings, as the server stops."""
        self._recorder.end_all("the server stopped")

    # Metadata

    def server_metadata(self) -> ServerMetadata:
        """Name, version and extensions of the server."""
        return ServerMetadata(self._name, VERSION, list(EXTENSIONS))

    def list_ready_versions(self) -> list[tuple[str, int]]:
        """Every (model, version) that is ready, sorted."""
        return self._registry.list_named_versions()

    def load_failures(self) -> dict[str, str]:
        """Models that failed to load before their versions were known, with the reasons."""
        registry = self._registry
        return {registry.name_of(one): text.reason for one, text in registry.failures.items()}

    async def refresh_remote(self, name: str) -> None:
        """Asks for the versions of a model of another server, so that its metadata are true.

        Does nothing for other models. Raises HostError.
        """
        if self._remote is not None:
            await self._remote.refresh(name)

    def model_metadata(self, name: str, version: str) -> ModelMetadata:
        """Inputs and outputs of a model. Raises HostError if it is missing."""
        model = self._find(name, version)
        versions = (
            [model.version]
            if version
            else [n for n, v in self._versions(name).items() if v.state is VersionState.READY]
        )
        config = model.config
        return ModelMetadata(
            name=name,
            versions=[str(number) for number in versions],
            platform=config.platform or config.backend,
            inputs=_tensor_metadata(config, config.input),
            outputs=_tensor_metadata(config, config.output),
        )

    def model_config(self, name: str, version: str) -> ModelConfig:
        """The complete configuration of a model. Raises HostError if it is missing."""
        return self._find(name, version).config

    def extension(self, kind: type[_Extension], name: str, version: int) -> _Extension | None:
        """What a frontend keeps with a model, None if it has none of this type.

        Raises HostError if the model is missing.
        """
        found: _Extension | None = self._registry.find(name, version).extensions.get(kind)
        return found

    def ready_since(self, name: str, version: int) -> float:
        """When a model became ready, in seconds since 1970. Raises HostError if it is missing."""
        number = self._registry.find(name, version).version
        return self._versions(name)[number].since

    def token_latencies(self, name: str, version: int) -> TokenLatencies:
        """The token latencies of a model. Raises HostError if it is missing."""
        return self._registry.find(name, version).metrics.token_latencies

    def tensor_counts(self, name: str, version: str) -> tuple[int, int]:
        """The numbers of inputs and outputs of a model; (0, 0) if it is missing."""
        try:
            config = self._find(name, version).config
        except HostError:
            return 0, 0
        return len(config.input), len(config.output)

    def statistics(self, name: str, version: str) -> list[ModelStatistics]:
        """Statistics of a model; of all models without a name. Raises HostError."""
        self.refuse_while_loading()
        number = parse_version(version)
        try:
            known_as = self._registry.resolve_name(name) if name else ""
        except HostError as error:
            raise invalid_argument(f"requested model '{name}' is not available") from error
        found = [
            known.model.metrics.counters.snapshot()
            for model_name, entry in self._registry.list_entries()
            for known in sorted(entry.versions.values(), key=lambda v: v.number)
            if known_as in ("", model_name)
            and number in (-1, known.number)
            and known.state is VersionState.READY
            and known.model is not None
        ]
        if name and not found:
            states = {known.state for known in self._registry.versions(known_as).values()}
            if VersionState.READY in states:
                raise invalid_argument(
                    f"requested model version is not available for model '{name}'"
                )
            raise invalid_argument(f"requested model '{name}' is not available")
        return found

    async def _collect_statistics(self, name: str, version: str) -> list[ModelStatistics]:
        """The statistics, with those of models of other servers."""
        remote = self._remote
        if remote is None or (name and not remote.serves(name)):
            return self.statistics(name, version)
        self.refuse_while_loading()
        if name:
            return list(await remote.statistics(name, version))
        return [*self.statistics(name, version), *await remote.statistics(name, version)]

    def _versions(self, name: str) -> dict[int, ModelVersion]:
        return self._registry.versions(self._registry.resolve_name(name))

    def _find(self, name: str, version: str) -> Model:
        self.refuse_while_loading()
        return self._registry.find(name, parse_version(version))

    # Traces and log

    def trace_settings(self, model: str, change: SettingChanges | None = None) -> DescribedSettings:
        """Changes trace settings if `change` is given; returns those of a model, or the global
        ones.

        Raises HostError; then nothing has changed.
        """
        tracer = self._tracer
        if model:
            self._registry.check_ready(model)
        if change is not None:
            tracer.update_settings(model, change)
            self.request_tracer = tracer if tracer.enabled else None
            self.notify_watchers()
        return tracer.describe_settings(model)

    # Model control

    async def repository_index(self, ready: bool) -> list[IndexEntry]:
        """Every model on disk with its versions, or only the ready ones. Raises HostError."""
        entries = await self.control.index(ready)
        if self._remote is None:
            return entries
        remote = self._remote
        own = [entry for entry in entries if not remote.serves(entry.name)]
        return sorted([*own, *await remote.index(ready)], key=lambda entry: entry.name)


def _tensor_metadata(config: ModelConfig, tensors: Iterable[Any]) -> list[TensorMetadata]:
    from tritonclient.grpc import model_config_pb2

    batch = [-1] if config.max_batch_size > 0 else []
    names = model_config_pb2.DataType
    return [
        TensorMetadata(
            tensor.name,
            "BYTES"
            if tensor.data_type == names.TYPE_STRING
            else names.Name(tensor.data_type)[len("TYPE_") :],
            batch + list(tensor.dims),
        )
        for tensor in tensors
    ]
