"""Splits the requests to models between their versions: shares, counts, and their changes."""

from __future__ import annotations

import enum
import zlib
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace

import msgspec

from host.cache.responses import CacheHit
from host.config.parameters import TrafficSettings, TrafficShare, is_percentage, traffic_settings
from host.errors import invalid_argument
from host.inference.call import Call
from host.inference.request import InferRequest
from host.metrics.families import MetricsSnapshot, labels_of
from host.models.registry import LoadedModel, Registry, VersionState
from host.models.shadow_version import ComparisonResult, ShadowVersion

_MAX_SEQUENCES = 65536  # whose version is remembered
_SEQUENCE_END = 2  # of the flags of a request


class Role(enum.Enum):
    """What a version does with the requests that it gets, as in the metrics."""

    STABLE = "stable"
    CANARY = "canary"
    SHADOW = "shadow"


class TrafficSplit:
    """Decides for each request to a model. It outlives the versions that it splits between.

    Attributes:
        settings: The shares; may be replaced at any time.
        requests: The number of requests by version and role.
        comparisons: The number of copied requests by version of the shadow and result.
    """

    def __init__(self, settings: TrafficSettings) -> None:
        self.settings = settings
        self.requests: Counter[tuple[int, Role]] = Counter()
        self.comparisons: Counter[tuple[int, ComparisonResult]] = Counter()
        self._canary_due = 0.0  # percent; a request is due at 100
        self._shadow_due = 0.0
        self._sequences: OrderedDict[int | str, tuple[bool, bool]] = OrderedDict()

    def choose(self, request: InferRequest) -> tuple[bool, bool]:
        """Whether a request goes to the canary, and whether it is copied to the shadow.

        The requests of a sequence have the same answer, also after a change of the shares.
        """
        key = request.correlation_id
        if key:
            return self._choose_for_sequence(key, bool(request.flags & _SEQUENCE_END))
        settings = self.settings
        to_canary = to_shadow = False
        if settings.canary is not None:
            self._canary_due += settings.canary.percent
            if to_canary := self._canary_due >= 100.0:
                self._canary_due -= 100.0
        if settings.shadow is not None:
            self._shadow_due += settings.shadow.percent
            if to_shadow := self._shadow_due >= 100.0:
                self._shadow_due -= 100.0
        return to_canary, to_shadow

    def _choose_for_sequence(self, key: int | str, ends: bool) -> tuple[bool, bool]:
        chosen = self._sequences.pop(key, None)
        if chosen is None:
            settings = self.settings
            chosen = (
                _is_in_share(key, "canary", settings.canary),
                _is_in_share(key, "shadow", settings.shadow),
            )
        if not ends:
            self._sequences[key] = chosen
            if len(self._sequences) > _MAX_SEQUENCES:
                self._sequences.popitem(last=False)
        return chosen


def _is_in_share(key: int | str, what: str, share: TrafficShare | None) -> bool:
    """Whether a sequence is in a share: always the same for the same sequence and share."""
    if share is None:
        return False
    return zlib.crc32(f"{what} {key}".encode()) / 2**32 * 100 < share.percent


class SplitModel:
    """Stands for the stable version of a model, but passes some requests on to others."""

    def __init__(
        self,
        split: TrafficSplit,
        stable: LoadedModel,
        canary: LoadedModel | None,
        shadow: LoadedModel | None,
    ) -> None:
        self.stable = stable
        self._split = split
        self._canary = canary
        self._shadow = None if shadow is None else ShadowVersion(shadow, split.comparisons)
        self.name = stable.name
        self.version = stable.version
        self.config = stable.config
        self.metrics = stable.metrics
        self.extensions = stable.extensions

    def infer(self, request: InferRequest) -> Call:
        """Starts a request. Raises HostError if it is invalid for the version that gets it."""
        to_canary, to_shadow = self._split.choose(request)
        model, role = self.stable, Role.STABLE
        if to_canary and self._canary is not None:
            model, role = self._canary, Role.CANARY
        shadow, copy = self._shadow, None
        if to_shadow and shadow is not None:
            copy = shadow.copy_request(request)
        call = model.infer(request)
        self._split.requests[(model.version, role)] += 1
        if shadow is not None and copy is not None and shadow.follow(call, copy):
            self._split.requests[(shadow.model.version, Role.SHADOW)] += 1
        return call

    def repeat_cache_hit(self, hit: CacheHit) -> bool:
        """Returns False: each request is assigned to a version."""
        return False

    @property
    def labels(self) -> Mapping[str, Sequence[str]]:
        """Names of classes, by output, of the stable version."""
        return self.stable.labels

    @property
    def ready(self) -> bool:
        """Whether the stable version can run a request now."""
        return self.stable.ready

    @property
    def defines_is_ready(self) -> bool:
        """Whether the stable version defines `is_ready`."""
        return self.stable.defines_is_ready

    async def why_not_ready(self) -> str:
        """The reason why the stable version is not ready, "" if it is."""
        return await self.stable.why_not_ready()


def split_versions(split: TrafficSplit, versions: Mapping[int, LoadedModel]) -> SplitModel | None:
    """A model that splits requests between ready versions; None if one alone takes all.

    `versions`: by number, ascending. The stable version is the highest one without a share.
    """
    shares = split.settings
    canary = versions.get(shares.canary.version) if shares.canary is not None else None
    shadow = versions.get(shares.shadow.version) if shares.shadow is not None else None
    others = [model for model in versions.values() if model is not canary and model is not shadow]
    if not others or (canary is None and shadow is None):
        return None
    return SplitModel(split, others[-1], canary, shadow)


class TrafficChange(msgspec.Struct, forbid_unknown_fields=True):
    """A change of the shares of a model: UNSET leaves a share as it is, None ends it."""

    canary: TrafficShare | None | msgspec.UnsetType = msgspec.UNSET
    shadow: TrafficShare | None | msgspec.UnsetType = msgspec.UNSET


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
    canary: TrafficShare | None
    shadow: TrafficShare | None
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
            settings = replace(settings, canary=self._checked(known, change.canary))
        if change.shadow is not msgspec.UNSET:
            settings = replace(settings, shadow=self._checked(known, change.shadow))
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

    def _checked(self, known: str, share: TrafficShare | None) -> TrafficShare | None:
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
        return share

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
            settings.canary,
            settings.shadow,
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
