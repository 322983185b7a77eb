"""Custom metrics, which a model adds to those of the server."""

from __future__ import annotations

import json
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar

from pb_utils import _arguments, _runtime
from pb_utils import _model_texts as texts
from pb_utils._exceptions import NamedInt, SuggestingType, TritonModelException

if TYPE_CHECKING:
    Key = tuple[str, tuple[float, ...] | None]


class MetricKind(NamedInt):
    """The kind of a metric.

    ``COUNTER`` only increases, ``GAUGE`` can take any value, and ``HISTOGRAM`` counts observations
    in buckets.
    """

    COUNTER = 0
    GAUGE = 1
    HISTOGRAM = 2


_UNSUPPORTED = {
    MetricKind.COUNTER: ("set", "observe"),
    MetricKind.GAUGE: ("observe",),
    MetricKind.HISTOGRAM: ("increment", "set", "value"),
}


class _EndedRuntime(_runtime.Runtime):
    """The runtime of families that outlive their model instance."""

    def change_metric(self, metric: int, change: str, value: float) -> None:
        """Does nothing: the metrics of the instance have been removed."""

    def _unsupported(self, what: str) -> TritonModelException:
        return TritonModelException(f"{what} cannot be used: its model instance has ended")


_ENDED = _EndedRuntime()


class _FamilyState:
    """The state that a registered family shares with its metrics.

    Metrics refer to this object and not to the ``MetricFamily``, so they do not keep the family
    alive. It does not keep the runtime alive: in a process that binds functions, a runtime holds
    the memory and the descriptors of an instance that may have ended.
    """

    __slots__ = ("_runtime", "deleted", "kind", "lock", "metrics", "number")

    def __init__(self, runtime: _runtime.Runtime, number: int, kind: MetricKind) -> None:
        self._runtime = weakref.ref(runtime)
        self.number = number
        self.kind = kind
        self.deleted = False
        self.metrics: dict[Key, int] = {}
        self.lock = threading.Lock()

    def runtime(self) -> _runtime.Runtime:
        """Returns the runtime, or one that rejects calls if the instance has ended."""
        return self._runtime() or _ENDED

    def delete(self) -> None:
        """Removes the metrics of the family. A finaliser calls it, so it takes no lock."""
        self.deleted = True
        self.runtime().drop_metrics([self.number], list(self.metrics.values()))


class Metric(metaclass=SuggestingType):
    """A metric: the time series of a family with one set of labels.

    ``MetricFamily.Metric()`` returns it. It can be used as long as the ``MetricFamily`` object
    exists. Deleting the ``Metric`` object does not remove the time series from the server. The
    rules are in docs/reference/model-module.md, "Metrics".
    """

    __slots__ = ("__weakref__", "_family", "_number")

    _family: _FamilyState
    _number: int

    def __init__(self) -> None:
        """Always raises: ``MetricFamily.Metric()`` creates metrics.

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
        """Adds a value to a counter or a gauge.

        Args:
            value: the number to add; 0 or more for a counter.

        Raises:
            TypeError: ``value`` is not a number.
            TritonModelException: ``value`` is negative and the metric is a counter, the metric is a
                histogram, or the family has been deleted.
        """
        self._change("increment", value)

    @_arguments.with_argument_errors
    def set(self, value: float) -> None:
        """Sets the value of a gauge.

        Args:
            value: the new value.

        Raises:
            TypeError: ``value`` is not a number.
            TritonModelException: the metric is not a gauge, or the family has been deleted.
        """
        self._change("set", value)

    @_arguments.with_argument_errors
    def observe(self, value: float) -> None:
        """Adds an observation to a histogram.

        Args:
            value: the observed value.

        Raises:
            TypeError: ``value`` is not a number.
            TritonModelException: the metric is not a histogram, or the family has been deleted.
        """
        self._change("observe", value)

    def value(self) -> float:
        """Returns the current value of a counter or a gauge. The call waits for the server.

        Raises:
            TritonModelException: the metric is a histogram, or the family has been deleted.
        """
        self._check_allowed("get", "value")
        try:
            return self._family.runtime().read_metric(self._number)
        except TritonModelException as error:
            raise _operation_error("get", str(error)) from None

    def _change(self, change: str, value: object) -> None:
        number = _arguments.check_number(change, "value", value)
        self._check_allowed(change, change)
        if self._family.kind is MetricKind.COUNTER and number < 0:
            text = self._family.runtime().error_message(texts.COUNTER_DECREMENT)
            raise _operation_error(change, text)
        try:
            self._family.runtime().change_metric(self._number, change, number)
        except TritonModelException as error:
            raise _operation_error(change, str(error)) from None

    def _check_allowed(self, verb: str, operation: str) -> None:
        family = self._family
        if family.deleted:
            raise _operation_error(verb, texts.METRIC_DELETED)
        if operation in _UNSUPPORTED[family.kind]:
            text = (
                f"TRITONSERVER_METRIC_KIND_{family.kind.name} does not support "
                f"{operation.capitalize()}"
            )
            raise _operation_error(verb, family.runtime().error_message(text))


_Metric = Metric  # in the class body, the method hides the class of the same name


class MetricFamily(metaclass=SuggestingType):
    """A family of metrics: all have the same name and kind, and differ by their labels.

    The server exports the metrics as long as this object exists, so a model keeps it in an
    attribute. Families with the same name and kind, also in other instances and models, are the
    same family (docs/reference/model-module.md, "Metrics").

    Attributes:
        COUNTER: a metric that only increases.
        GAUGE: a metric that can take any value.
        HISTOGRAM: a metric that counts observations in buckets.

    Examples:
        >>> self.family = pb_utils.MetricFamily("scored", "Rows", pb_utils.MetricFamily.COUNTER)
        >>> self.family.Metric({"model": "a"}).increment(1)
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
        """Registers a family with the server.

        Args:
            name: name of the metric in the metrics endpoint.
            description: help text. If families with the same name differ in it, the first one is
                used.
            kind: ``MetricFamily.COUNTER``, ``MetricFamily.GAUGE`` or ``MetricFamily.HISTOGRAM``.

        Raises:
            TypeError: an argument has the wrong type.
            TritonModelException: the server rejects the family, for example because of its name.
        """
        name = _arguments.check_text("__init__", "name", name)
        description = _arguments.check_text("__init__", "description", description)
        kind = _arguments.check_instance("__init__", "kind", kind, MetricKind)
        runtime = _runtime.current()
        number = _create_or_raise(
            "MetricFamily", lambda: runtime.new_metric_family(name, description, int(kind))
        )
        self._family = _FamilyState(runtime, number, kind)
        weakref.finalize(self, self._family.delete).atexit = False

    @_arguments.with_argument_errors
    def Metric(
        self, labels: dict[str, str] | None = None, buckets: list[float] | None = None
    ) -> _Metric:
        """Returns the metric of this family with a set of labels; a new metric starts at 0.

        Args:
            labels: a dict of str to str; None for no labels.
            buckets: upper bounds of the buckets in strictly increasing order. A histogram needs
                them, other kinds must not have them.

        Raises:
            TypeError: a label cannot be written as JSON, or a bucket is not a number.
            TritonModelException: ``labels`` is not a dict of str to str, ``buckets`` is not a list,
                is missing or is not allowed, or the server rejects the metric.
        """
        family = self._family
        if labels is not None and not isinstance(labels, dict):
            raise TritonModelException("Failed to create metric. Labels must be a dictionary.")
        text = json.dumps(labels or {}, sort_keys=True)
        bounds = None if buckets is None else _checked_buckets(family.kind, buckets)
        if bounds is None and family.kind is MetricKind.HISTOGRAM:
            raise TritonModelException("Failed to create metric. Missing required buckets.")
        with family.lock:
            number = family.metrics.get((text, bounds))
            if number is None:
                number = _create_or_raise(
                    "Metric",
                    lambda: family.runtime().new_metric(family.number, json.loads(text), bounds),
                )
                family.metrics[text, bounds] = number
        return _Metric._create(family, number)


def _checked_buckets(kind: MetricKind, buckets: object) -> tuple[float, ...]:
    if not isinstance(buckets, list):
        raise TritonModelException("Failed to create metric. Buckets must be a list.")
    if kind is not MetricKind.HISTOGRAM:
        raise TritonModelException("Failed to create metric. Unexpected buckets found.")
    return tuple(_arguments.check_number("Metric", "buckets", bound) for bound in buckets)


def _create_or_raise(what: str, create: Callable[[], int]) -> int:
    try:
        return create()
    except TritonModelException as error:
        raise TritonModelException(f"Error when creating {what}: {error}") from None


def _operation_error(verb: str, text: str) -> TritonModelException:
    return TritonModelException(f"Failed to {verb} metric value: {text}")
