"""Metrics that models make: shared by name, counted over all stubs that hold them."""

from __future__ import annotations

import math
import re
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from host.errors import invalid_argument, not_found
from host.metrics.catalogue import CATALOGUE
from host.metrics.family import Histogram, Labels, MetricFamily, MetricKind, labels_of

_KINDS = (MetricKind.COUNTER, MetricKind.GAUGE, MetricKind.HISTOGRAM)
"""Kinds by their numbers (pb_utils spec 3.13)."""

_SUPPORTED_KINDS = {
    "increment": (MetricKind.COUNTER, MetricKind.GAUGE),
    "set": (MetricKind.GAUGE,),
    "observe": (MetricKind.HISTOGRAM,),
    "value": (MetricKind.COUNTER, MetricKind.GAUGE),
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

    __slots__ = ("value", "histogram", "reference_count")

    def __init__(self, bounds: Sequence[float] | None) -> None:
        self.value = 0.0
        self.histogram = None if bounds is None else Histogram(bounds)
        self.reference_count = 0  # family objects, in all stubs, that hold it


@dataclass(slots=True)
class _SharedFamily:
    """What all families of one name share. It stays when nobody holds anything of it any more."""

    name: str
    help: str
    kind: MetricKind
    series: dict[Labels, _Series] = field(default_factory=dict)


@dataclass(slots=True)
class _FamilyObject:
    """One family object in a stub, and the label sets that it holds."""

    shared: _SharedFamily
    labels_held: set[Labels] = field(default_factory=set)
    metrics: set[int] = field(default_factory=set)


@dataclass(slots=True)
class _OwnerObjects:
    """What one stub has, by the numbers it chose."""

    families: dict[int, _FamilyObject] = field(default_factory=dict)
    metrics: dict[int, tuple[_FamilyObject, _SharedFamily, _Series]] = field(default_factory=dict)


class CustomMetrics:
    """The metrics of all models (pb_utils spec 3.13). Belongs to the event loop.

    A family object keeps its metrics alive; a label set is there as long as any family object in
    any stub holds it. Owners are told apart by being equal or not. Errors are HostErrors with the
    texts of the core; whoever asked puts them into words for the model.
    """

    def __init__(self) -> None:
        self._families: dict[str, _SharedFamily] = {}
        self._owners: dict[object, _OwnerObjects] = {}

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
            shared = self._families[name] = _SharedFamily(name, description, _KINDS[kind])
        elif shared.kind is not _KINDS[kind]:
            raise invalid_argument("Family name already exists with different type")
        families = self._owners.setdefault(owner, _OwnerObjects()).families
        _check_unused(family, families)
        families[family] = _FamilyObject(shared)

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
        family_object = known.families.get(family) if known is not None else None
        if known is None or family_object is None:
            raise not_found(DELETED)
        shared = family_object.shared
        key = _checked_labels(labels, shared.kind)
        bounds = _checked_buckets(buckets, shared.kind)
        _check_unused(metric, known.metrics)
        series = shared.series.get(key)
        if series is None:
            series = shared.series[key] = _Series(bounds)
        if key not in family_object.labels_held:
            family_object.labels_held.add(key)
            series.reference_count += 1
        family_object.metrics.add(metric)
        known.metrics[metric] = (family_object, shared, series)

    def update_metric(self, owner: object, metric: int, change: str, value: float) -> None:
        """`increment`, `set` or `observe`; one that has gone is left alone.

        Raises ValueError for what the metric cannot do: no sound stub asks for that.
        """
        known = self._owners.get(owner)
        found = known.metrics.get(metric) if known is not None else None
        if found is None:
            return
        _, shared, series = found
        if shared.kind not in _SUPPORTED_KINDS[change]:
            raise ValueError(_unsupported_text(shared.kind, change))
        if series.histogram is not None:
            series.histogram.observe(value)
        elif change == "set":
            series.value = value
        elif shared.kind is MetricKind.COUNTER and value < 0:
            raise ValueError(_DECREMENT)
        else:
            series.value += value

    def read_metric(self, owner: object, metric: int) -> float:
        """The value. Raises HostError."""
        known = self._owners.get(owner)
        found = known.metrics.get(metric) if known is not None else None
        if found is None:
            raise not_found(DELETED)
        _, shared, series = found
        if shared.kind not in _SUPPORTED_KINDS["value"]:
            raise invalid_argument(_unsupported_text(shared.kind, "value"))
        return series.value

    def release_objects(self, owner: object, families: list[int], metrics: list[int]) -> None:
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
            family_object = known.families.pop(number, None)
            if family_object is not None:
                for metric in family_object.metrics:
                    del known.metrics[metric]
                _release_labels(family_object)
        if not known.families:
            del self._owners[owner]

    def remove_owner(self, owner: object) -> None:
        """The owner is gone, and with it everything it held."""
        known = self._owners.pop(owner, None)
        if known is not None:
            for family_object in known.families.values():
                _release_labels(family_object)

    def collect(self) -> Iterator[MetricFamily]:
        """Every family that there ever was, in the order of their first registration."""
        for shared in self._families.values():
            family = MetricFamily(shared.name, shared.help, shared.kind)
            for labels, series in sorted(shared.series.items()):
                if series.histogram is not None:
                    family.add_histogram(labels, series.histogram)
                else:
                    family.add(labels, series.value)
            yield family


def _release_labels(family_object: _FamilyObject) -> None:
    for labels in family_object.labels_held:
        series = family_object.shared.series[labels]
        series.reference_count -= 1
        if not series.reference_count:
            del family_object.shared.series[labels]


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


def _check_unused(number: int, numbers: Container[int]) -> None:
    if number in numbers:
        raise invalid_argument(f"number {number} is in use")


def _checked_labels(labels: dict[str, str], kind: MetricKind) -> Labels:
    for name in labels:
        if not _LABEL.fullmatch(name):
            raise invalid_argument(
                f"Invalid label name '{name}'; it must match"
                f" {_LABEL.pattern.removeprefix('(?!__)')} and not begin with '__'"
            )
        if kind is MetricKind.HISTOGRAM and name == "le":
            raise invalid_argument("Invalid label name 'le'; histograms name their buckets by it")
    return labels_of(labels)


def _checked_buckets(buckets: list[float] | None, kind: MetricKind) -> list[float] | None:
    if kind is not MetricKind.HISTOGRAM:
        if buckets is not None:
            raise invalid_argument("Unexpected buckets found.")
        return None
    if buckets is None:
        raise invalid_argument("Missing required buckets.")
    if any(map(math.isnan, buckets)) or any(low >= high for low, high in pairwise(buckets)):
        raise invalid_argument("Bucket Boundaries must be strictly sorted")
    return buckets[:-1] if buckets and buckets[-1] == math.inf else buckets


def _unsupported_text(kind: MetricKind, operation: str) -> str:
    return f"TRITONSERVER_METRIC_KIND_{kind.name} does not support {operation.capitalize()}"
