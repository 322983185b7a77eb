"""Metric families and metrics."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from c_python_backend_utils import Metric, MetricKind
from pb_utils import MetricFamily, TritonModelException, _runtime
from tests.unit.pb_utils.recording import RecordingRuntime

KINDS = {"COUNTER": 0, "GAUGE": 1, "HISTOGRAM": 2}
DELETED = (
    "Invalid metric operation as the corresponding 'MetricFamily' has been deleted. The "
    "'MetricFamily' object should be deleted AFTER its corresponding 'Metric' objects have been "
    "deleted."
)


def family(kind: str = "GAUGE") -> MetricFamily:
    return MetricFamily("name", "description", getattr(MetricFamily, kind))


def metric_of(family: MetricFamily) -> Metric:
    buckets = [1.0] if family._family.kind is MetricKind.HISTOGRAM else None
    return family.Metric(labels={"a": "b"}, buckets=buckets)


@pytest.mark.parametrize(("kind", "number"), KINDS.items())
def test_a_family_registers_at_once(runtime: RecordingRuntime, kind: str, number: int) -> None:
    kept = MetricFamily(name=b"n", description="d", kind=getattr(MetricFamily, kind))
    assert runtime.calls == [("family", "n", "d", number)]
    assert int(getattr(kept, kind)) == number
    assert getattr(MetricFamily, kind) is getattr(MetricKind, kind)


@pytest.mark.parametrize(
    "arguments",
    [(None, "d", MetricKind.GAUGE), ("n", None, MetricKind.GAUGE), ("n", "d", 1), ("n", "d", None)],
)
def test_arguments_of_a_family_are_checked(runtime: RecordingRuntime, arguments: Any) -> None:
    with pytest.raises(TypeError, match=r"^__init__\(\): incompatible constructor arguments\."):
        MetricFamily(*arguments)
    assert runtime.calls == []


def test_rejected_family_raises_with_the_reason(runtime: RecordingRuntime) -> None:
    runtime.refuses = "Family name already exists with different type"
    with pytest.raises(TritonModelException) as caught:
        family()
    assert str(caught.value) == (
        "Error when creating MetricFamily: Family name already exists with different type"
    )
    gc.collect()
    assert runtime.calls == []


def test_rejected_metric_raises_with_the_reason(runtime: RecordingRuntime) -> None:
    kept = family("HISTOGRAM")
    runtime.refuses = "Bucket Boundaries must be strictly sorted"
    with pytest.raises(TritonModelException) as caught:
        kept.Metric(buckets=[2, 1])
    assert str(caught.value) == (
        "Error when creating Metric: Bucket Boundaries must be strictly sorted"
    )
    runtime.refuses = None
    assert isinstance(kept.Metric(buckets=[1, 2]), Metric)


def test_labels_and_buckets_reach_the_server(runtime: RecordingRuntime) -> None:
    counter, histogram = family("COUNTER"), family("HISTOGRAM")
    del runtime.calls[:]
    counter.Metric()
    counter.Metric({"b": "x", "a": "y"})
    counter.Metric({"not": 5})  # type: ignore[dict-item]  # wrong on purpose
    histogram.Metric(labels=None, buckets=[])
    histogram.Metric(buckets=[1, np.float32(2.5)])
    assert [call[2:] for call in runtime.calls] == [
        ({}, None),
        ({"a": "y", "b": "x"}, None),
        ({"not": 5}, None),
        ({}, []),
        ({}, [1.0, 2.5]),
    ]


@pytest.mark.parametrize(
    ("kind", "arguments", "text"),
    [
        ("GAUGE", {"labels": [("a", "b")]}, "Labels must be a dictionary."),
        ("GAUGE", {"labels": "a"}, "Labels must be a dictionary."),
        ("HISTOGRAM", {"buckets": (1, 2)}, "Buckets must be a list."),
        ("COUNTER", {"buckets": 5}, "Buckets must be a list."),
        ("COUNTER", {"buckets": [1]}, "Unexpected buckets found."),
        ("GAUGE", {"buckets": []}, "Unexpected buckets found."),
        ("HISTOGRAM", {}, "Missing required buckets."),
        ("HISTOGRAM", {"labels": {"a": "b"}, "buckets": None}, "Missing required buckets."),
    ],
)
def test_invalid_labels_and_buckets_are_rejected(
    runtime: RecordingRuntime, kind: str, arguments: Any, text: str
) -> None:
    kept = family(kind)
    with pytest.raises(TritonModelException) as caught:
        kept.Metric(**arguments)
    assert str(caught.value) == f"Failed to create metric. {text}"


def test_buckets_must_be_numbers(runtime: RecordingRuntime) -> None:
    with pytest.raises(TypeError, match=r"^Metric\(\): incompatible function arguments\."):
        family("HISTOGRAM").Metric(buckets=["1"])  # type: ignore[list-item]  # wrong on purpose


def test_the_same_labels_are_one_metric_for_the_server(runtime: RecordingRuntime) -> None:
    kept = family()
    del runtime.calls[:]
    first = kept.Metric({"a": "1", "b": "2"})
    second = kept.Metric({"b": "2", "a": "1"})
    other = kept.Metric({"a": "1"})
    assert first._number == second._number != other._number
    assert [call[0] for call in runtime.calls] == ["metric", "metric"]


SUPPORTED = {
    "COUNTER": {"increment", "value"},
    "GAUGE": {"increment", "set", "value"},
    "HISTOGRAM": {"observe"},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("operation", ["increment", "set", "observe", "value"])
def test_operations_depend_on_the_kind(
    runtime: RecordingRuntime, kind: str, operation: str
) -> None:
    kept = family(kind)
    metric = metric_of(kept)
    del runtime.calls[:]
    runtime.value = 7.5
    arguments = () if operation == "value" else (2,)
    verb = "get" if operation == "value" else operation
    if operation in SUPPORTED[kind]:
        result = getattr(metric, operation)(*arguments)
        expected = ("read", 2) if operation == "value" else (operation, 2, 2.0)
        assert runtime.calls == [expected]
        assert result == (7.5 if operation == "value" else None)
        return
    with pytest.raises(TritonModelException) as caught:
        getattr(metric, operation)(*arguments)
    assert str(caught.value) == (
        f"Failed to {verb} metric value: <TRITONSERVER_METRIC_KIND_{kind} does not support "
        f"{operation.capitalize()}>"
    )
    assert runtime.calls == []


@given(value=st.floats(allow_nan=False))
def test_only_a_counter_rejects_negative_increments(value: float) -> None:
    runtime = RecordingRuntime()
    with _runtime.use(runtime):
        gauge, counter = family("GAUGE"), family("COUNTER")
        falling, growing = gauge.Metric(), counter.Metric()
        del runtime.calls[:]
        falling.increment(value)
        if value < 0:
            with pytest.raises(TritonModelException) as caught:
                growing.increment(value)
            assert str(caught.value) == (
                "Failed to increment metric value: <TRITONSERVER_METRIC_KIND_COUNTER can only be "
                "incremented monotonically by non-negative values.>"
            )
        else:
            growing.increment(value)
    assert [call[2] for call in runtime.calls] == [value] * (1 if value < 0 else 2)


@pytest.mark.parametrize("value", ["1", None, [1], b"1", 1j, 10**400])
@pytest.mark.parametrize("operation", ["increment", "set", "observe"])
def test_values_must_be_numbers(runtime: RecordingRuntime, operation: str, value: Any) -> None:
    kept = family("GAUGE")
    metric = kept.Metric()
    with pytest.raises(TypeError, match=rf"^{operation}\(\): incompatible function arguments\."):
        getattr(metric, operation)(value)


@pytest.mark.parametrize("value", [2, True, np.float32(0.5), np.int64(3), np.array(4)])
def test_values_may_be_anything_with_a_float(runtime: RecordingRuntime, value: Any) -> None:
    kept = family("GAUGE")
    kept.Metric().set(value)
    assert runtime.calls[-1] == ("set", 2, float(value))


@pytest.mark.parametrize(
    ("verb", "operation", "kind"),
    [
        ("increment", "increment", "COUNTER"),
        ("set", "set", "GAUGE"),
        ("observe", "observe", "HISTOGRAM"),
        ("get", "value", "GAUGE"),
    ],
)
def test_rejections_by_the_server_are_raised(
    runtime: RecordingRuntime, verb: str, operation: str, kind: str
) -> None:
    kept = family(kind)
    metric = metric_of(kept)
    runtime.refuses = "out of order"
    with pytest.raises(TritonModelException) as caught:
        getattr(metric, operation)(*(() if operation == "value" else (1,)))
    assert str(caught.value) == f"Failed to {verb} metric value: out of order"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("operation", ["increment", "set", "observe", "value"])
def test_metric_cannot_be_used_after_its_family(
    runtime: RecordingRuntime, kind: str, operation: str
) -> None:
    kept = family(kind)
    metric = metric_of(kept)
    del kept
    assert runtime.calls[-1] == ("drop", [1], [2])
    with pytest.raises(TritonModelException) as caught:
        getattr(metric, operation)(*(() if operation == "value" else (-1,)))
    verb = "get" if operation == "value" else operation
    assert str(caught.value) == f"Failed to {verb} metric value: {DELETED}"


def test_metric_of_a_dropped_family_cannot_be_used(runtime: RecordingRuntime) -> None:
    metric = family().Metric()
    with pytest.raises(TritonModelException, match="has been deleted"):
        metric.set(1)


def test_dropping_a_metric_changes_nothing(runtime: RecordingRuntime) -> None:
    kept = family()
    metric = kept.Metric()
    alive = weakref.ref(metric)
    del metric
    assert alive() is None
    assert [call[0] for call in runtime.calls] == ["family", "metric"]


def test_family_uses_the_runtime_that_created_it(runtime: RecordingRuntime) -> None:
    other = RecordingRuntime()
    with _runtime.use(other):
        kept = family()
    kept.Metric().set(1)
    del kept
    assert [call[0] for call in other.calls] == ["family", "metric", "set", "drop"]
    assert runtime.calls == []


def test_threads_that_create_the_same_metric_get_one(runtime: RecordingRuntime) -> None:
    kept = family()
    numbers: list[int] = []
    together = threading.Barrier(8)

    def make() -> None:
        together.wait()
        numbers.append(kept.Metric({"a": "b"})._number)

    threads = [threading.Thread(target=make) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(numbers) == 8
    assert len(set(numbers)) == 1
