"""The splits of all models: their settings, changes while the server runs, and metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import msgspec

from host.config.traffic_parameters import (
    TrafficSettings,
    TrafficShare,
    is_percentage,
    traffic_settings,
)
from host.errors import invalid_argument
from host.metrics.catalogue import MetricsSnapshot
from host.metrics.family import labels_of
from host.models.registry import LoadedModel, Registry, VersionState
from host.traffic.split import TrafficSplit
from host.traffic.split_model import SplitModel, split_versions


class Share(msgspec.Struct, forbid_unknown_fields=True):
    """The share of the requests that a version gets, in percent."""

    version: int
    percent: float


class TrafficChange(msgspec.Struct, forbid_unknown_fields=True):
    """A change of the shares of a model: UNSET leaves a share as it is, None ends it."""

    canary: Share | None | msgspec.UnsetType = msgspec.UNSET
    shadow: Share | None | msgspec.UnsetType = msgspec.UNSET


class RequestCount(msgspec.Struct):
    """The requests that a version got: as `stable`, as `canary` or as `shadow`."""

    version: int
    role: str
    count: int


class ComparisonCount(msgspec.Struct):
    """The copied requests by result: `equal`, `different`, `failed` or `skipped`."""

    version: int
    result: str
    count: int


class TrafficState(msgspec.Struct):
    """How the requests to a model that name no version are split.

    `stable`: the version that answers the others; None if no version is ready.
    """

    stable: int | None
    canary: Share | None
    shadow: Share | None
    requests: list[RequestCount]
    comparisons: list[ComparisonCount]


class TrafficSplits:
    """Splits the requests to models as their configurations, or later requests, say.

    Belongs to the event loop. The registry asks it for each model with several ready versions.
    """

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._splits: dict[str, TrafficSplit] = {}
        self._changed: set[str] = set()  # models whose configurations no longer count
        registry.split_versions = self._split_versions

    def _split_versions(self, known: str, versions: Mapping[int, LoadedModel]) -> SplitModel | None:
        split = self._splits.get(known)
        if known not in self._changed:
            settings = traffic_settings(versions[max(versions)].config)
            if split is None:
                if settings == TrafficSettings():
                    return None
                split = self._splits[known] = TrafficSplit(settings)
            split.settings = settings
        return None if split is None else split_versions(split, versions)

    def change(self, name: str, change: TrafficChange) -> None:
        """Changes the shares of a model until `follow_configuration`. Raises HostError."""
        known = self._registry.resolve_name(name)
        split = self._splits.get(known) or TrafficSplit(TrafficSettings())
        settings = split.settings
        if change.canary is not msgspec.UNSET:
            settings = replace(settings, canary=self._share(known, change.canary))
        if change.shadow is not msgspec.UNSET:
            settings = replace(settings, shadow=self._share(known, change.shadow))
        split.settings = settings
        self._splits[known] = split
        self._changed.add(known)
        self._registry.state_changed()

    @property
    def changed_by_client(self) -> bool:
        """Whether a client has changed how requests are split."""
        return bool(self._changed)

    def follow_configuration(self, known: str) -> None:
        """Splits the requests to a model as its configuration says, whatever was changed before."""
        if known in self._changed:
            self._changed.discard(known)
            self._splits[known].settings = TrafficSettings()  # if it has no two versions now
            self._registry.state_changed()

    def _share(self, known: str, share: Share | None) -> TrafficShare | None:
        if share is None:
            return None
        name = self._registry.name_of(known)
        if not is_percentage(share.percent):
            raise invalid_argument(
                f"the percentage must be above 0 and up to 100, got {share.percent:g}; null ends"
                " the share"
            )
        ready = self._ready_versions(known)
        if share.version not in ready:
            raise invalid_argument(
                f"model '{name}' has no ready version {share.version}; ready are"
                f" {', '.join(map(str, ready)) or 'none'}"
            )
        return TrafficShare(share.version, share.percent)

    def _ready_versions(self, known: str) -> list[int]:
        versions = self._registry.versions(known)
        return [n for n, version in versions.items() if version.state is VersionState.READY]

    def describe(self, name: str) -> TrafficState:
        """The shares and the counts of a model. Raises HostError if it is unknown."""
        known = self._registry.resolve_name(name)
        model = self._registry.find(name)
        split = self._splits.get(known) or TrafficSplit(TrafficSettings())
        settings = split.settings
        return TrafficState(
            model.version,
            _to_share(settings.canary),
            _to_share(settings.shadow),
            [
                RequestCount(version, role.value, count)
                for (version, role), count in sorted(
                    split.requests.items(), key=lambda item: (item[0][0], item[0][1].value)
                )
            ],
            [
                ComparisonCount(version, result.value, count)
                for (version, result), count in sorted(
                    split.comparisons.items(), key=lambda item: (item[0][0], item[0][1].value)
                )
            ],
        )

    def collect_into(self, snapshot: MetricsSnapshot) -> None:
        """Adds the metrics of all splits."""
        for known, split in self._splits.items():
            model = self._registry.name_of(known)
            for (version, role), count in split.requests.items():
                labels = {"model": model, "version": str(version), "role": role.value}
                snapshot["pbhost_split_requests_total"].add(labels_of(labels), count)
            for (version, result), count in split.comparisons.items():
                labels = {"model": model, "version": str(version), "result": result.value}
                snapshot["pbhost_shadow_comparisons_total"].add(labels_of(labels), count)


def _to_share(share: TrafficShare | None) -> Share | None:
    return None if share is None else Share(share.version, share.percent)
