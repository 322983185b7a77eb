"""Who is loaded now: every known version of every model, and its state."""

from __future__ import annotations

import enum
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from host.config.model_config import ModelConfig
from host.errors import HostError, invalid_argument, not_found, unavailable
from host.inference.metadata import ModelStatistics
from host.inference.request import Call, InferRequest
from host.metrics.model_metrics import ModelMetrics
from host.repository.qualified_name import split_qualified_name


class Model(Protocol):
    """Whatever can be asked."""

    name: str
    version: int
    config: ModelConfig
    metrics: ModelMetrics
    labels: Mapping[str, Sequence[str]]
    """Names of classes, by output."""

    def infer(self, request: InferRequest) -> Call:
        """Start a request. Raises HostError if it is not valid for this model."""

    @property
    def ready(self) -> bool:
        """Whether a request would be run now."""

    @property
    def defines_is_ready(self) -> bool:
        """Whether it is asked itself if it is ready."""

    async def why_not_ready(self) -> str:
        """Why a request should not come now, "" if it may (pb_utils spec 2.11)."""

    def statistics(self) -> ModelStatistics:
        """What it has done so far."""


class LoadedModel(Model, Protocol):
    """A model as its keeper sees it: ended when nobody needs it any more."""

    def acquire(self) -> None:
        """Whoever asks it later, as part of an ensemble, may do so even while it is drained."""

    def release(self) -> None:
        """One of those who held it asks it no more."""

    async def drain(self) -> None:
        """Refuse new calls, and wait until those under way have ended and nobody holds it."""

    def abort(self, error: HostError) -> None:
        """End every call under way."""

    async def stop(self, grace: float, finalize: float) -> None:
        """End it; seconds as for `Instance.stop`."""

    @property
    def in_flight(self) -> int:
        """Calls under way, queued ones included."""


class VersionState(enum.Enum):
    """The states that the repository index shows (configuration spec 8.1)."""

    LOADING = "LOADING"
    READY = "READY"
    UNLOADING = "UNLOADING"
    UNAVAILABLE = "UNAVAILABLE"


_VERSION = re.compile(r"-?[0-9]{1,30}")
_INT64 = 1 << 63

UNLOADED = "unloaded"
"""Reason of a version that was unloaded on purpose."""


@dataclass(slots=True)
class ModelVersion:
    """One version of a model. `model` is there while it is READY or still finishing work."""

    number: int
    state: VersionState
    reason: str = ""
    model: LoadedModel | None = None

    @property
    def failed(self) -> bool:
        """Whether it is not there, and not because it was unloaded."""
        return self.state is VersionState.UNAVAILABLE and self.reason != UNLOADED


@dataclass(slots=True)
class ModelEntry:
    """All known versions of one model; none, for a reason, if its policy chose none."""

    versions: dict[int, ModelVersion] = field(default_factory=dict)
    reason: str = ""

    @property
    def is_served_or_loading(self) -> bool:
        """Whether a version is served, or is about to be."""
        return any(
            v.state in (VersionState.READY, VersionState.LOADING) for v in self.versions.values()
        )


@dataclass(frozen=True, slots=True)
class LoadFailure:
    """Why a model that is to be served did not get so far that its versions were chosen.

    Nobody who asks for it finds it. `counts`: a strict server is not ready because of it.
    """

    reason: str
    counts: bool


class Registry:
    """Looked up on every request; changed only by the lifecycle.

    Models are kept by identity, and requests find them by name. That is the same unless there are
    `namespaces` (configuration spec 8.9).
    """

    def __init__(self, namespaces: bool = False) -> None:
        self._namespaces = namespaces
        self._entries: dict[str, ModelEntry] = {}
        self.failures: dict[str, LoadFailure] = {}
        self._ready: dict[tuple[str, int], LoadedModel] = {}
        self._named = self._ready

    def find(self, name: str, version: int = -1) -> LoadedModel:
        """The model for a request; -1 means its highest ready version.

        Raises HostError with the texts of protocol spec 3.1.
        """
        model = self._named.get((name, version))
        if model is not None:
            return model
        return self._pick(self.resolve_name(name), name, version)

    def find_step_model(self, known: str, version: int) -> LoadedModel:
        """As `find`, by identity."""
        model = self._ready.get((known, version))
        return model if model is not None else self._pick(known, self.name_of(known), version)

    def _pick(self, identity: str, name: str, version: int) -> LoadedModel:
        model = self._ready.get((identity, version))
        if model is not None:
            return model
        entry = self._entries.get(identity)
        known = f"Request for unknown model: '{name}'"
        if entry is None:
            raise not_found(f"{known} is not found")
        if version == -1:
            raise not_found(f"{known} has no available versions")
        if version not in entry.versions:
            raise not_found(f"{known} version {version} is not found")
        raise unavailable(f"{known} version {version} is not at ready state")

    def resolve_name(self, name: str) -> str:
        """The identity of the one model of this name.

        Raises HostError INVALID_ARG with the texts of protocol spec 3.1 unless there is one; but
        without namespaces nothing is looked up.
        """
        if not self._namespaces:
            return name
        named = (one for one in self.qualified_names(name) if one in self._entries)
        known = [one for one in named if self._entries[one].is_served_or_loading]
        if not known:
            raise invalid_argument(f"Request for unknown model: '{name}' is not found")
        if len(known) > 1:
            raise invalid_argument(
                f"There are {len(known)} identifiers of model '{name}' in global map, model"
                " namespace must be provided to resolve ambiguity."
            )
        return known[0]

    def qualified_names(self, name: str) -> list[str]:
        """Every model of this name that is known, or has failed to be; without namespaces the name
        itself in any case.
        """
        if not self._namespaces:
            return [name]
        return sorted(known for known in self.names() if split_qualified_name(known)[1] == name)

    def list_named_versions(self) -> list[tuple[str, int]]:
        """Names and numbers of the versions that are found by name and ready; in their order."""
        return sorted((name, number) for name, number in self._named if number != -1)

    def namespace_of(self, known: str) -> str:
        """The repository that a model belongs to, "" without namespaces."""
        return split_qualified_name(known)[0] if self._namespaces else ""

    def name_of(self, known: str) -> str:
        """What requests call the model of this identity."""
        return split_qualified_name(known)[1] if self._namespaces else known

    def set_version(self, name: str, version: ModelVersion) -> None:
        """Enter a version, in place of what was known of it."""
        self._entries.setdefault(name, ModelEntry()).versions[version.number] = version
        self._index()

    def remove_version(self, name: str, number: int) -> None:
        """Forget a version that is not loaded."""
        del self._entries[name].versions[number]
        self._index()

    def set_failed(self, name: str, reason: str, *, counts: bool) -> None:
        """The model's load failed before it came to its versions."""
        self.failures[name] = LoadFailure(reason, counts)

    def set_no_versions(self, name: str, reason: str) -> None:
        """The model's policy has chosen no version; what is known of others stays."""
        if name not in self._entries:
            self._entries[name] = ModelEntry(reason=reason)

    def clear_failed(self, name: str) -> None:
        """The model's load got as far as its versions, or it is not wanted any more."""
        self.failures.pop(name, None)
        entry = self._entries.get(name)
        if entry is not None and not entry.versions:
            del self._entries[name]

    def forget_failures(self, name: str) -> None:
        """Nobody wants this model any more, so that it failed is no matter."""
        for number, version in self.versions(name).items():
            if version.failed:
                del self._entries[name].versions[number]
        self.clear_failed(name)

    def has_versions(self, name: str) -> bool:
        """Whether a load of the model has come as far as its versions."""
        return name in self._entries

    def versions(self, name: str) -> dict[int, ModelVersion]:
        """The known versions of a model, none if it is unknown."""
        entry = self._entries.get(name)
        return dict(sorted(entry.versions.items())) if entry is not None else {}

    def names(self) -> frozenset[str]:
        """The name of every model that is known, or has failed to be."""
        return frozenset(self._entries) | self.failures.keys()

    def list_entries(self) -> Iterator[tuple[str, ModelEntry]]:
        """Every known model, by name."""
        return iter(sorted(self._entries.items()))

    def state_changed(self) -> None:
        """A version's state was changed in place."""
        self._index()

    def _index(self) -> None:
        ready: dict[tuple[str, int], LoadedModel] = {}
        for name, entry in self._entries.items():
            for number, version in sorted(entry.versions.items()):
                if version.state is VersionState.READY and version.model is not None:
                    ready[(name, number)] = version.model
                    ready[(name, -1)] = version.model
        self._ready = self._named = ready
        if self._namespaces:
            present = (
                known for known, entry in self._entries.items() if entry.is_served_or_loading
            )
            names = Counter(map(self.name_of, present))
            self._named = {
                (self.name_of(known), number): model
                for (known, number), model in ready.items()
                if names[self.name_of(known)] == 1
            }


def parse_version(text: str) -> int:
    """A version as clients write it; empty means -1, the latest.

    Raises HostError INVALID_ARG (protocol spec 0.3).
    """
    if not text:
        return -1
    number = int(text) if _VERSION.fullmatch(text) else _INT64
    if not -_INT64 <= number < _INT64:
        raise invalid_argument(
            f"failed to get model version from specified version string '{text}'"
            " (details: stol), version should be an integral value > 0"
        )
    if number < 0:
        raise invalid_argument(
            f"invalid model version specified '{text}' , version should be an integral value > 0"
        )
    return number
