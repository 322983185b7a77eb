"""The split of the requests to one model: who gets which share, and what was counted."""

from __future__ import annotations

import enum
import zlib
from collections import Counter, OrderedDict

from host.config.parameters import TrafficSettings, TrafficShare
from host.inference.request import InferRequest

_MAX_SEQUENCES = 65536  # whose version is remembered
_SEQUENCE_END = 2  # of the flags of a request


class ComparisonResult(enum.Enum):
    """What became of a copied request, as in the metrics."""

    EQUAL = "equal"
    DIFFERENT = "different"
    FAILED = "failed"  # the shadow version refused or failed a request that was answered
    SKIPPED = "skipped"  # not copied, or not compared


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
