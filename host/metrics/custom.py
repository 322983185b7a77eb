"""Metrics that models make: shared by name, counted over all stubs that hold them."""

from __future__ import annotations

import math
import re
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from host.errors import invalid_argument, not_found
from host.metrics.catalogue import CATALOGUE
from host.metrics.family import Family, Histogram, Kind, Labels, labels_of

_KINDS = (Kind.COUNTER, Kind.GAUGE, Kind.HISTOGRAM)
"""Kinds by their numbers (pb_utils spec 3.13)."""

_POSSIBLE = {
    "increment": (Kind.COUNTER, Kind.GAUGE),
    "set": (Kind.GAUGE,),
    "observe": (Kind.HISTOGRAM,),
    "value": (Kind.COUNTER, Kind.GAUGE),
}

_NAME = re.compile(r"(?!__)[a-zA-Z_:][a-zA-Z0-9_:]*")
_LABEL = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*")

DELETED = (
    "Invalid metric operation as the corresponding 'MetricFamily' has been deleted. The"
    " 'MetricFamily' object should be deleted AFTER its corresponding 'Metric' objects have been"
    " deleted."
)

_DECREMENT = (
    "TRITONSERVER_METRIC_KIND_COUNTER can only be incremented monotonically by non-negative values."
)


class _Series:
    """One label set of a family."""

    __slots__ = ("value", "histogram", "holders")

    def __init__(self, bounds: Sequence[float] | None) -> None:
        self.value = 0.0
        self.histogram = None if bounds is None else Histogram(bounds)
        self.holders = 0  # family objects, in all stubs, that hold it


@dataclass(slots=True)
class _Shared:
    """What all families of one name share. It stays when nobody holds anything of it any more."""

    name: str
    help: str
    kind: Kind
    series: dict[Labels, _Series] = field(default_factory=dict)


@dataclass(slots=True)
class _Hold:
    """One family object in a stub, and the label sets that it holds."""

    shared: _Shared
    held: set[Labels] = field(default_factory=set)
    metrics: set[int] = field(default_factory=set)


@dataclass(slots=True)
class _Owner:
    """What one stub has, by the numbers it chose."""

    families: dict[int, _Hold] = field(default_factory=dict)
    metrics: dict[int, tuple[_Hold, _Shared, _Series]] = field(default_factory=dict)


class CustomMetrics:
    """The metrics of all models (pb_utils spec 3.13). Belongs to the event loop.

    A family object keeps its metrics alive; a label set is there as long as any family object in
    any stub holds it. Owners are told apart by being equal or not. Errors are HostErrors with the
    texts of the core; whoever asked puts them into words for the model.
    """

    def __init__(self) -> None:
        self._families: dict[str, _Shared] = {}
        self._owners: dict[object, _Owner] = {}

    def new_family(
        self, owner: object, family: int, name: str, description: str, kind: int
    ) -> None:
        """Register a family, or share the one of that name, whose description stays.

        Raises HostError: the kind is another one, or the name is no good.
        """
        if not 0 <= kind < len(_KINDS):
            raise invalid_argument(
                f"Unknown metric kind {kind}; expected COUNTER, GAUGE, HISTOGRAM"
            )
        shared = self._families.get(name)
        if shared is None:
            _check_name(name)
            shared = self._families[name] = _Shared(name, description, _KINDS[kind])
        elif shared.kind is not _KINDS[kind]:
            raise invalid_argument("Family name already exists with different type")
        families = self._owners.setdefault(owner, _Owner()).families
        _check_new(family, families)
        families[family] = _Hold(shared)

    def new_metric(
        self,
        owner: object,
        metric: int,
        family: int,
        labels: dict[str, str],
        buckets: list[float] | None,
    ) -> None:
        """Create a metric in a family of the owner, or share the value of those labels.

        `buckets` are the bounds of a histogram; +Inf may be left out, and a label set that is
        there keeps the bounds that it has. Raises HostError.
        """
        known = self._owners.get(owner)
        hold = known.families.get(family) if known is not None else None
        if known is None or hold is None:
            raise not_found(DELETED)
        shared = hold.shared
        key = _checked_labels(labels, shared.kind)
        bounds = _checked_buckets(buckets, shared.kind)
        _check_new(metric, known.metrics)
        series = shared.series.get(key)
        if series is None:
            series = shared.series[key] = _Series(bounds)
        if key not in hold.held:
            hold.held.add(key)
            series.holders += 1
        hold.metrics.add(metric)
        known.metrics[metric] = (hold, shared, series)

    def change(self, owner: object, metric: int, change: str, value: float) -> None:
        """`increment`, `set` or `observe`; one that has gone is left alone.

        Raises ValueError for what the metric cannot do: no sound stub asks for that.
        """
        known = self._owners.get(owner)
        found = known.metrics.get(metric) if known is not None else None
        if found is None:
            return
        _, shared, series = found
        if shared.kind not in _POSSIBLE[change]:
            raise ValueError(_impossible(shared.kind, change))
        if series.histogram is not None:
            series.histogram.observe(value)
        elif change == "set":
            series.value = value
        elif shared.kind is Kind.COUNTER and value < 0:
            raise ValueError(_DECREMENT)
        else:
            series.value += value

    def read(self, owner: object, metric: int) -> float:
        """The value. Raises HostError."""
        known = self._owners.get(owner)
        found = known.metrics.get(metric) if known is not None else None
        if found is None:
            raise not_found(DELETED)
        _, shared, series = found
        if shared.kind not in _POSSIBLE["value"]:
            raise invalid_argument(_impossible(shared.kind, "value"))
        return series.value

    def drop(self, owner: object, families: list[int], metrics: list[int]) -> None:
        """The owner has let go of these; what it does not have is left alone.

        A metric of which only the family object is left keeps its value and is still shown.
        """
        known = self._owners.get(owner)
        if known is None:
            return
        for number in metrics:
            found = known.metrics.pop(number, None)
            if found is not None:
                found[0].metrics.discard(number)
        for number in families:
            hold = known.families.pop(number, None)
            if hold is not None:
                for metric in hold.metrics:
                    del known.metrics[metric]
                _let_go(hold)
        if not known.families:
            del self._owners[owner]

    def forget(self, owner: object) -> None:
        """The owner is gone, and with it everything it held."""
        known = self._owners.pop(owner, None)
        if known is not None:
            for hold in known.families.values():
                _let_go(hold)

    def collect(self) -> Iterator[Family]:
        """Every family that there ever was, in the order of their first registration."""
        for shared in self._families.values():
            family = Family(shared.name, shared.help, shared.kind)
            for labels, series in sorted(shared.series.items()):
                if series.histogram is not None:
                    family.add_histogram(labels, series.histogram)
                else:
                    family.add(labels, series.value)
            yield family


def _let_go(hold: _Hold) -> None:
    for labels in hold.held:
        series = hold.shared.series[labels]
        series.holders -= 1
        if not series.holders:
            del hold.shared.series[labels]


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise invalid_argument(
            f"Invalid metric name '{name}'; it must match {_NAME.pattern.removeprefix('(?!__)')}"
            " and not begin with '__'"
        )
    if name in CATALOGUE:
        raise invalid_argument(
            f"Metric name '{name}' is taken by the server's own metrics; choose another one"
        )


def _check_new(number: int, numbers: Container[int]) -> None:
    if number in numbers:
        raise invalid_argument(f"number {number} is in use")


def _checked_labels(labels: dict[str, str], kind: Kind) -> Labels:
    for name in labels:
        if not _LABEL.fullmatch(name):
            raise invalid_argument(
                f"Invalid label name '{name}'; it must match"
                f" {_LABEL.pattern.removeprefix('(?!__)')} and not begin with '__'"
            )
        if kind is Kind.HISTOGRAM and name == "le":
            raise invalid_argument("Invalid label name 'le'; histograms name their buckets by it")
    return labels_of(labels)


def _checked_buckets(buckets: list[float] | None, kind: Kind) -> list[float] | None:
    if kind is not Kind.HISTOGRAM:
        if buckets is not None:
            raise invalid_argument("Unexpected buckets found.")
        return None
    if buckets is None:
        raise invalid_argument("Missing required buckets.")
    if any(map(math.isnan, buckets)) or any(low >= high for low, high in pairwise(buckets)):
        raise invalid_argument("Bucket Boundaries must be strictly sorted")
    return buckets[:-1] if buckets and buckets[-1] == math.inf else buckets


def _impossible(kind: Kind, operation: str) -> str:
    return f"TRITONSERVER_METRIC_KIND_{kind.name} does not support {operation.capitalize()}"
