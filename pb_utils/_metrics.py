"""Metrics that a model adds to those of the server."""

from __future__ import annotations

import json
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar

from pb_utils import _arguments, _runtime
from pb_utils._enums import NamedInt
from pb_utils._model_exception import TritonModelException

if TYPE_CHECKING:
    Key = tuple[str, tuple[float, ...] | None]


class MetricKind(NamedInt):
    """What a metric does: only grow, go up and down, or count observations by size."""

    COUNTER = 0
    GAUGE = 1
    HISTOGRAM = 2


_UNSUPPORTED = {
    MetricKind.COUNTER: ("set", "observe"),
    MetricKind.GAUGE: ("observe",),
    MetricKind.HISTOGRAM: ("increment", "set", "value"),
}


class _FamilyState:
    """A registered family: what it shares with its metrics, which do not keep it alive."""

    __slots__ = ("deleted", "kind", "lock", "metrics", "number", "runtime")

    def __init__(self, runtime: _runtime.Runtime, number: int, kind: MetricKind) -> None:
        self.runtime = runtime
        self.number = number
        self.kind = kind
        self.deleted = False
        self.metrics: dict[Key, int] = {}
        self.lock = threading.Lock()

    def delete(self) -> None:
        """Take all metrics away. Called by a finaliser: it neither waits nor takes a lock."""
        self.deleted = True
        self.runtime.drop_metrics([self.number], list(self.metrics.values()))


class Metric:
    """One time series of a family. It ends with the family object, not with this one."""

    __slots__ = ("__weakref__", "_family", "_number")

    _family: _FamilyState
    _number: int

    def __init__(self) -> None:
        """Refuse: a metric comes from ``MetricFamily.Metric()``.

        Raises:
            TypeError: always.
        """
        raise TypeError("c_python_backend_utils.Metric: No constructor defined!")

    @classmethod
    def _create(cls, family: _FamilyState, number: int) -> Metric:
        metric = cls.__new__(cls)
        metric._family = family
        metric._number = number
        return metric

    @_arguments.with_argument_errors
    def increment(self, value: float) -> None:
        """Add to a counter (0 or more) or a gauge.

        Raises:
            TypeError: ``value`` is no number.
            TritonModelException: a counter would fall, it is a histogram, or the family is gone.
        """
        self._change("increment", value)

    @_arguments.with_argument_errors
    def set(self, value: float) -> None:
        """Set a gauge.

        Raises:
            TypeError: ``value`` is no number.
            TritonModelException: it is no gauge, or the family is gone.
        """
        self._change("set", value)

    @_arguments.with_argument_errors
    def observe(self, value: float) -> None:
        """Count a value in a histogram.

        Raises:
            TypeError: ``value`` is no number.
            TritonModelException: it is no histogram, or the family is gone.
        """
        self._change("observe", value)

    def value(self) -> float:
        """Return the value of a counter or a gauge.

        Raises:
            TritonModelException: it is a histogram, or the family is gone.
        """
        self._check_allowed("get", "value")
        try:
            return self._family.runtime.read_metric(self._number)
        except TritonModelException as error:
            raise _failed("get", str(error)) from None

    def _change(self, change: str, value: object) -> None:
        number = _arguments.check_number(change, "value", value)
        self._check_allowed(change, change)
        if self._family.kind is MetricKind.COUNTER and number < 0:
            text = (
                "TRITONSERVER_METRIC_KIND_COUNTER can only be incremented monotonically by "
                "non-negative values."
            )
            raise _failed(change, self._family.runtime.error_message(text))
        try:
            self._family.runtime.change_metric(self._number, change, number)
        except TritonModelException as error:
            raise _failed(change, str(error)) from None

    def _check_allowed(self, verb: str, operation: str) -> None:
        family = self._family
        if family.deleted:
            text = (
                "Invalid metric operation as the corresponding 'MetricFamily' has been deleted. "
                "The 'MetricFamily' object should be deleted AFTER its corresponding 'Metric' "
                "objects have been deleted."
            )
            raise _failed(verb, text)
        if operation in _UNSUPPORTED[family.kind]:
            text = (
                f"TRITONSERVER_METRIC_KIND_{family.kind.name} does not support "
                f"{operation.capitalize()}"
            )
            raise _failed(verb, family.runtime.error_message(text))


_Metric = Metric  # within the family, its method has that name


class MetricFamily:
    """Metrics of one name and kind, told apart by labels.

    The server shows them as long as this object lives. Families of one name and kind, also those
    of other models, are one.
    """

    __slots__ = ("__weakref__", "_family")

    COUNTER: ClassVar[MetricKind] = MetricKind.COUNTER
    GAUGE: ClassVar[MetricKind] = MetricKind.GAUGE
    HISTOGRAM: ClassVar[MetricKind] = MetricKind.HISTOGRAM

    @_arguments.with_argument_errors
    def __init__(
        self,
        name: str | bytes | bytearray,
        description: str | bytes | bytearray,
        kind: MetricKind,
    ) -> None:
        """Register a family.

        Args:
            name: as the server shows it.
            description: its help text; the first one counts if several give one.
            kind: ``MetricFamily.COUNTER``, ``GAUGE`` or ``HISTOGRAM``.

        Raises:
            TypeError: an argument has another type.
            TritonModelException: the server refuses it.
        """
        name = _arguments.check_text("__init__", "name", name)
        description = _arguments.check_text("__init__", "description", description)
        kind = _arguments.check_instance("__init__", "kind", kind, MetricKind)
        runtime = _runtime.current()
        number = _created(
            "MetricFamily", lambda: runtime.new_metric_family(name, description, int(kind))
        )
        self._family = _FamilyState(runtime, number, kind)
        weakref.finalize(self, self._family.delete).atexit = False

    @_arguments.with_argument_errors
    def Metric(
        self, labels: dict[str, str] | None = None, buckets: list[float] | None = None
    ) -> _Metric:
        """Return the family's metric with these labels, at 0 if it is new.

        Args:
            labels: what tells it apart from the family's others.
            buckets: upper bounds, strictly increasing; for histograms only.

        Raises:
            TypeError: a label cannot be written as JSON, or a bucket is no number.
            TritonModelException: ``labels`` is no dict of str to str, ``buckets`` is no list, is
                missing or is unexpected, or the server refuses the metric.
        """
        family = self._family
        if labels is not None and not isinstance(labels, dict):
            raise TritonModelException("Failed to create metric. Labels must be a dictionary.")
        text = json.dumps(labels or {}, sort_keys=True)
        bounds = None if buckets is None else _bounds(family.kind, buckets)
        if bounds is None and family.kind is MetricKind.HISTOGRAM:
            raise TritonModelException("Failed to create metric. Missing required buckets.")
        with family.lock:
            number = family.metrics.get((text, bounds))
            if number is None:
                number = _created(
                    "Metric",
                    lambda: family.runtime.new_metric(family.number, json.loads(text), bounds),
                )
                family.metrics[text, bounds] = number
        return _Metric._create(family, number)


def _bounds(kind: MetricKind, buckets: object) -> tuple[float, ...]:
    if not isinstance(buckets, list):
        raise TritonModelException("Failed to create metric. Buckets must be a list.")
    if kind is not MetricKind.HISTOGRAM:
        raise TritonModelException("Failed to create metric. Unexpected buckets found.")
    return tuple(_arguments.check_number("Metric", "buckets", bound) for bound in buckets)


def _created(what: str, create: Callable[[], int]) -> int:
    try:
        return create()
    except TritonModelException as error:
        raise TritonModelException(f"Error when creating {what}: {error}") from None


def _failed(verb: str, text: str) -> TritonModelException:
    return TritonModelException(f"Failed to {verb} metric value: {text}")
