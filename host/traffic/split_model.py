"""A model whose requests are split between its versions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from host.cache.responses import CacheHit
from host.errors import HostError
from host.inference.call import Call
from host.inference.metadata import ModelStatistics
from host.inference.request import InferRequest
from host.models.registry import LoadedModel
from host.traffic.shadow import ShadowVersion
from host.traffic.split import Role, TrafficSplit


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
        self._shadow = None if shadow is None else ShadowVersion(shadow, split)
        self.name = stable.name
        self.version = stable.version
        self.config = stable.config
        self.metrics = stable.metrics
        self.extensions = stable.extensions
        self.quarantine = stable.quarantine

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
        if shadow is not None and copy is not None:
            shadow.follow(call, copy)
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

    def statistics(self) -> ModelStatistics:
        """The statistics of the stable version."""
        return self.stable.statistics()

    def acquire(self) -> None:
        """Holds the stable version."""
        self.stable.acquire()

    def release(self) -> None:
        """Ends a hold of the stable version."""
        self.stable.release()

    async def drain(self, sequences: bool = False) -> None:
        """Drains the stable version."""
        await self.stable.drain(sequences)

    def abort(self, error: HostError) -> None:
        """Ends every call in progress of the stable version."""
        self.stable.abort(error)

    async def stop(self, grace: float, finalize: float) -> None:
        """Stops the stable version; `grace` and `finalize` in seconds."""
        await self.stable.stop(grace, finalize)

    @property
    def in_flight(self) -> int:
        """Number of calls in progress of the stable version."""
        return self.stable.in_flight

    @property
    def unfinished(self) -> int:
        """Number of calls in progress, or of open sequences, of the stable version."""
        return self.stable.unfinished

    @property
    def in_use(self) -> bool:
        """Whether unloading the stable version now would end or delay work."""
        return self.stable.in_use


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
