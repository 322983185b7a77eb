"""The registry: every known version of every model, and its state."""

from __future__ import annotations

import enum
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from host.cache.responses import CacheHit
from host.config.schema import ModelConfig
from host.crashes.quarantine import Quarantine
from host.errors import ErrorCode, HostError, invalid_argument, not_found
from host.inference.call import Call
from host.inference.request import InferRequest
from host.metrics.model_metrics import ModelMetrics
from host.repository.repository import split_qualified_name
from pb_utils import _model_texts as texts

_Started = TypeVar("_Started")

Extensions = dict[type[Any], Any]
"""Objects by their types."""


class NotServedError(HostError):
    """No version that a request asks for is ready. Loading the model may help."""


class OnDemand(Protocol):
    """Loads models when requests ask for them."""

    async def start_when_loaded(
        self, request: InferRequest, start: Callable[[], _Started]
    ) -> _Started:
        """Loads the model of a request, then calls `start`; returns its result.

        Raises HostError if the model does not load in time, or what `start` raises.
        """


class Model(Protocol):
    """A model that can be asked."""

    name: str
    version: int
    config: ModelConfig
    metrics: ModelMetrics
    extensions: Extensions
    """What frontends keep with the model; their hooks add it after the load (`LoadHook`)."""

    @property
    def labels(self) -> Mapping[str, Sequence[str]]:
        """Names of classes, by output."""

    def infer(self, request: InferRequest) -> Call:
        """Starts a request. Raises HostError if it is invalid for this model."""

    def repeat_cache_hit(self, hit: CacheHit) -> bool:
        """Counts a request that is equal to one that `hit` has answered; False if it must run."""

    @property
    def ready(self) -> bool:
        """Whether the model can run a request now."""

    @property
    def defines_is_ready(self) -> bool:
        """Whether the model defines `is_ready`."""

    async def why_not_ready(self) -> str:
        """The reason why the model is not ready, "" if it is.

        Source: docs/reference/model-methods.md, "is_ready".
        """


class LoadedModel(Model, Protocol):
    """A model with what its owner, the lifecycle, needs to stop it."""

    quarantine: Quarantine | None
    """Refuses requests that have killed stubs; None if nothing is refused."""

    def acquire(self) -> None:
        """Holds the model for a request of an ensemble, even while it is drained."""

    def release(self) -> None:
        """Ends a hold."""

    async def drain(self, sequences: bool = False) -> None:
        """Refuses new calls, and waits until there are no calls and no holds.

        `sequences`: also until all open sequences have ended.
        """

    def abort(self, error: HostError) -> None:
        """Ends every call in progress."""

    async def stop(self, grace: float, finalize: float) -> None:
        """Stops the model; `grace` and `finalize` in seconds, as for `Instance.stop`."""

    @property
    def in_flight(self) -> int:
        """Number of calls in progress, including queued ones."""

    @property
    def unfinished(self) -> int:
        """Number of calls in progress; of a model with sequences, the number of open sequences."""

    @property
    def in_use(self) -> bool:
        """Whether unloading the model now would end or delay work: calls, holds, sequences."""


class SplitModel(Model, Protocol):
    """Stands for a model whose requests are split between its versions."""

    stable: LoadedModel
    """The version that gets the requests of all clients outside the split."""


class VersionState(enum.Enum):
    """The states in the repository index.

    Source: docs/reference/model-control.md, "States in the repository index".
    """

    LOADING = "LOADING"
    READY = "READY"
    UNLOADING = "UNLOADING"
    UNAVAILABLE = "UNAVAILABLE"


_VERSION = re.compile(r"-?[0-9]{1,30}")
_INT64 = 1 << 63

UNLOADED = "unloaded"
"""The reason of a version that was unloaded on purpose."""


@dataclass(slots=True)
class ModelVersion:
    """One version of a model. `model` is set while it is READY or still finishes work."""

    number: int
    state: VersionState
    reason: str = ""
    model: LoadedModel | None = None
    since: float = field(default_factory=time.time)
    """When the version got its first state, in seconds since 1970 UTC."""

    @property
    def failed(self) -> bool:
        """Whether the version is unavailable for another reason than an unload."""
        return self.state is VersionState.UNAVAILABLE and self.reason != UNLOADED


@dataclass(slots=True)
class ModelEntry:
    """The known versions of one model; `reason`: why its version policy selected none."""

    versions: dict[int, ModelVersion] = field(default_factory=dict)
    reason: str = ""

    @property
    def is_served_or_loading(self) -> bool:
        """Whether a version is ready or loading."""
        return any(
            v.state in (VersionState.READY, VersionState.LOADING) for v in self.versions.values()
        )


@dataclass(frozen=True, slots=True)
class LoadFailure:
    """A load that failed before its versions were selected.

    Requests do not find the model. `counts`: with strict readiness, the server is not ready.
    """

    reason: str
    counts: bool


class Registry:
    """Finds models for requests. Only the lifecycle changes it.

    The keys are qualified names; requests use names. The two are the same without `namespaces`
    (docs/reference/model-control.md, "Namespaces").
    """

    def __init__(self, namespaces: bool = False) -> None:
        self._namespaces = namespaces
        self._entries: dict[str, ModelEntry] = {}
        self._remote: dict[str, ModelEntry] = {}
        self.failures: dict[str, LoadFailure] = {}
        self._ready: dict[tuple[str, int], LoadedModel] = {}
        self.served: Mapping[tuple[str, int], Model] = self._ready
        """The models that requests find, by name and version; -1 is the highest ready one."""
        self.on_demand: set[str] = set()
        """The qualified names of models that the next request loads if they are not loaded."""
        self.watchers: list[Callable[[], None]] = []
        """Called when requests may find other models."""
        self.split_versions: (
            Callable[[str, Mapping[int, LoadedModel]], SplitModel | None] | None
        ) = None
        """Asked for each model with several ready versions: how requests without one are split.

        Takes a qualified name and the ready versions, ascending. None: the highest one gets all.
        """

    def find(self, name: str, version: int = -1) -> Model:
        """The model for a request; version -1 is the highest ready one.

        Raises NotServedError with the texts of docs/reference/protocol.md, "Model lookup".
        """
        model = self.served.get((name, version))
        if model is not None:
            return model
        return self._pick(self.resolve_name(name), name, version)

    def find_step_model(self, known: str, version: int) -> LoadedModel:
        """As `find`, by qualified name."""
        model = self._ready.get((known, version))
        return model if model is not None else self._pick(known, self.name_of(known), version)

    def _pick(self, identity: str, name: str, version: int) -> LoadedModel:
        model = self._ready.get((identity, version))
        if model is not None:
            return model
        entry = self._entries.get(identity) or self._remote.get(identity)
        code = ErrorCode.NOT_FOUND
        if entry is None:
            problem = "is not found"
        elif version == -1:
            problem = "has no available versions"
        elif version not in entry.versions:
            problem = f"version {version} is not found"
        else:
            code, problem = ErrorCode.UNAVAILABLE, f"version {version} is not at ready state"
        raise NotServedError(code, texts.unknown_model(name, problem))

    def resolve_name(self, name: str) -> str:
        """The qualified name of the only model of this name.

        Raises HostError INVALID_ARG with the texts of docs/reference/protocol.md, "Model lookup",
        unless there is exactly one. Without namespaces nothing is looked up.
        """
        if not self._namespaces:
            return name
        named = (one for one in self.qualified_names(name) if one in self._entries)
        known = [one for one in named if self._entries[one].is_served_or_loading]
        if not known:
            unknown = texts.unknown_model(name, "is not found")
            raise NotServedError(ErrorCode.INVALID_ARG, unknown)
        if len(known) > 1:
            raise invalid_argument(
                f"There are {len(known)} identifiers of model '{name}' in global map, model"
                " namespace must be provided to resolve ambiguity."
            )
        return known[0]

    def qualified_names(self, name: str) -> list[str]:
        """The qualified names of all known or failed models of this name.

        Without namespaces it is always the name itself.
        """
        if not self._namespaces:
            return [name]
        return sorted(known for known in self.names() if split_qualified_name(known)[1] == name)

    def list_named_versions(self) -> list[tuple[str, int]]:
        """The (name, version) pairs that are ready and found by name, in order."""
        return sorted((name, number) for name, number in self.served if number != -1)

    def namespace_of(self, known: str) -> str:
        """The repository of a model, "" without namespaces."""
        return split_qualified_name(known)[0] if self._namespaces else ""

    def name_of(self, known: str) -> str:
        """The name that requests use for a model."""
        return split_qualified_name(known)[1] if self._namespaces else known

    def set_version(self, name: str, version: ModelVersion) -> None:
        """Enters or replaces a version."""
        self._entries.setdefault(name, ModelEntry()).versions[version.number] = version
        self.state_changed()

    def remove_version(self, name: str, number: int) -> None:
        """Removes a version that is not loaded."""
        del self._entries[name].versions[number]
        self.state_changed()

    def set_failed(self, name: str, reason: str, *, counts: bool) -> None:
        """Enters a load that failed before its versions were selected."""
        self.failures[name] = LoadFailure(reason, counts)

    def set_no_versions(self, name: str, reason: str) -> None:
        """Records that the version policy selected no version; known versions stay."""
        if name not in self._entries:
            self._entries[name] = ModelEntry(reason=reason)

    def clear_failed(self, name: str) -> None:
        """Removes the record of a failed load."""
        self.failures.pop(name, None)
        entry = self._entries.get(name)
        if entry is not None and not entry.versions:
            del self._entries[name]

    def forget_failures(self, name: str) -> None:
        """Removes all failures of a model that should no longer be served."""
        for number, version in self.versions(name).items():
            if version.failed:
                del self._entries[name].versions[number]
        self.clear_failed(name)

    def has_versions(self, known: str) -> bool:
        """Whether a load of the model got as far as its versions."""
        return known in self._entries

    def is_known(self, name: str) -> bool:
        """As `has_versions`, for any model of this name."""
        return any(map(self.has_versions, self.qualified_names(name)))

    def check_known(self, name: str) -> None:
        """Raises HostError NOT_FOUND unless `is_known`."""
        if not self.is_known(name):
            raise not_found(texts.unknown_model(name, "is not found"))

    def check_ready(self, name: str) -> None:
        """Raises HostError INVALID_ARG unless a version of the model is ready.

        The text is the one that Triton has for trace settings.
        """
        versions = self.versions(self.resolve_name(name)).values()
        if not any(version.state is VersionState.READY for version in versions):
            raise invalid_argument(f"Request for unknown model : {name}")

    def versions(self, name: str) -> dict[int, ModelVersion]:
        """The known versions of a model, ascending; empty if the model is unknown."""
        entry = self._entries.get(name) or self._remote.get(name)
        return dict(sorted(entry.versions.items())) if entry is not None else {}

    def names(self) -> frozenset[str]:
        """The names of all models that are known or failed to load."""
        return frozenset(self._entries) | self.failures.keys()

    def list_entries(self) -> Iterator[tuple[str, ModelEntry]]:
        """Every known model, by name."""
        return iter(sorted(self._entries.items()))

    def set_remote(self, name: str, entry: ModelEntry) -> None:
        """Enters or replaces what is known of a model of another server.

        Requests find it, and `versions`; `list_entries` has only the models of this server.
        """
        self._remote[name] = entry
        self.state_changed()

    def is_remote(self, name: str) -> bool:
        """Whether a model of another server was entered with this name."""
        return name in self._remote

    def state_changed(self) -> None:
        """Updates the look-up tables after the state of a version was changed in place."""
        ready: dict[tuple[str, int], LoadedModel] = {}
        splits: dict[tuple[str, int], Model] = {}
        for name, entry in (*self._remote.items(), *self._entries.items()):
            versions = {
                number: version.model
                for number, version in sorted(entry.versions.items())
                if version.state is VersionState.READY and version.model is not None
            }
            for number, model in versions.items():
                ready[(name, number)] = ready[(name, -1)] = model
            if len(versions) > 1 and self.split_versions is not None:
                split = self.split_versions(name, versions)
                if split is not None:
                    ready[(name, -1)], splits[(name, -1)] = split.stable, split
        self._ready = ready
        self.served = {**ready, **splits} if splits else ready
        if self._namespaces:
            present = (
                known for known, entry in self._entries.items() if entry.is_served_or_loading
            )
            names = Counter(map(self.name_of, present))
            self.served = {
                (self.name_of(known), number): model
                for (known, number), model in self.served.items()
                if names[self.name_of(known)] == 1
            }
        for watcher in self.watchers:
            watcher()


def parse_version(text: str) -> int:
    """Parses a version from a client; empty means -1, the latest.

    Raises HostError INVALID_ARG (docs/reference/protocol.md, "Version strings").
    """
    if not text:
        return -1
    number = int(text) if _VERSION.fullmatch(text) else _INT64
    if not -_INT64 <= number < _INT64:
        raise invalid_argument(texts.invalid_version(text, " (details: stol)"))
    if number < 0:
        raise invalid_argument(
            f"invalid model version specified '{text}' , version should be an integral value > 0"
        )
    return number
