"""Custom metrics: shared by name, held by family objects, removed with the last of these."""

from __future__ import annotations

import math

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from host.errors import ErrorCode, HostError
from host.metrics.custom import CustomMetrics
from host.metrics.families import Labels, MetricFamily, MetricKind, labels_of
from pb_utils._model_texts import METRIC_DELETED

COUNTER, GAUGE, HISTOGRAM = range(3)
BAD_NAMES = ["", "1a", "a-b", "a b", "é", "__a", "a\n"]


def scrape(metrics: CustomMetrics) -> dict[str, MetricFamily]:
    return {family.name: family for family in metrics.collect()}


def values(metrics: CustomMetrics, name: str) -> dict[Labels, float]:
    return {sample.labels: sample.value for sample in scrape(metrics)[name].samples}


def error_text(error: pytest.ExceptionInfo[HostError]) -> str:
    assert error.value.code in (ErrorCode.INVALID_ARG, ErrorCode.NOT_FOUND)
    return error.value.message


def with_metric(kind: int, buckets: list[float] | None = None) -> CustomMetrics:
    """A store in which `owner` has metric 1 of family 1, `name`, without labels."""
    metrics = CustomMetrics()
    metrics.new_family("owner", 1, "name", "help", kind)
    metrics.new_metric("owner", 1, 1, {}, buckets)
    return metrics


# Families


def test_families_with_the_same_name_are_one_and_keep_the_first_description() -> None:
    metrics = CustomMetrics()
    metrics.new_family("a", 1, "name", "first", COUNTER)
    metrics.new_family("a", 2, "name", "second", COUNTER)
    metrics.new_family("b", 1, "name", "third", COUNTER)
    (family,) = metrics.collect()
    assert (family.name, family.help, family.kind) == ("name", "first", MetricKind.COUNTER)


def test_a_family_of_another_kind_is_refused_even_after_the_first_is_released() -> None:
    metrics = CustomMetrics()
    metrics.new_family("a", 1, "name", "", COUNTER)
    for _ in range(2):
        with pytest.raises(HostError) as error:
            metrics.new_family("b", 1, "name", "", GAUGE)
        assert error_text(error) == "Family name already exists with different type"
        metrics.remove_owner("a")


def test_a_family_stays_registered_after_its_last_object_is_released() -> None:
    metrics = with_metric(COUNTER)
    metrics.release_objects("owner", [1], [])
    (family,) = metrics.collect()
    assert (family.name, family.help, family.samples) == ("name", "help", [])


@pytest.mark.parametrize("name", BAD_NAMES)
def test_a_family_name_that_prometheus_does_not_allow_is_refused(name: str) -> None:
    with pytest.raises(HostError) as error:
        CustomMetrics().new_family("a", 1, name, "", COUNTER)
    assert error_text(error) == (
        f"Invalid metric name '{name}'; it must match [a-zA-Z_:][a-zA-Z0-9_:]* and not begin with"
        " '__'"
    )


def test_a_family_cannot_have_the_name_of_a_server_metric() -> None:
    with pytest.raises(HostError) as error:
        CustomMetrics().new_family("a", 1, "nv_inference_count", "", COUNTER)
    assert error_text(error) == (
        "Metric name 'nv_inference_count' is reserved for a metric of the server;"
        " choose another one"
    )


@pytest.mark.parametrize("kind", [-1, 3])
def test_an_unknown_kind_is_refused(kind: int) -> None:
    with pytest.raises(HostError) as error:
        CustomMetrics().new_family("a", 1, "name", "", kind)
    expected = f"Unknown metric kind {kind}; expected COUNTER, GAUGE, HISTOGRAM"
    assert error_text(error) == expected


def test_a_number_that_is_in_use_is_refused() -> None:
    metrics = with_metric(COUNTER)
    with pytest.raises(HostError, match="number 1 is in use"):
        metrics.new_family("owner", 1, "other", "", COUNTER)
    with pytest.raises(HostError, match="number 1 is in use"):
        metrics.new_metric("owner", 1, 1, {}, None)


# Metrics


def test_metrics_with_the_same_labels_share_one_value_in_all_stubs() -> None:
    metrics = CustomMetrics()
    for owner in ("a", "b"):
        metrics.new_family(owner, 1, "name", "", COUNTER)
        metrics.new_metric(owner, 1, 1, {"x": "1", "k": "v"}, None)
    metrics.new_metric("b", 2, 1, {"k": "v", "x": "1"}, None)
    metrics.update_metric("a", 1, "increment", 1)
    metrics.update_metric("b", 1, "increment", 2)
    metrics.update_metric("b", 2, "increment", 4)
    assert [
        metrics.read_metric("a", 1),
        metrics.read_metric("b", 1),
        metrics.read_metric("b", 2),
    ] == [7, 7, 7]
    assert values(metrics, "name") == {(("k", "v"), ("x", "1")): 7}


def test_a_label_set_is_removed_with_its_last_family_object_and_restarts_at_zero() -> None:
    metrics = CustomMetrics()
    for owner in ("a", "b"):
        metrics.new_family(owner, 1, "name", "", COUNTER)
        metrics.new_metric(owner, 1, 1, {"k": "v"}, None)
        metrics.update_metric(owner, 1, "increment", 1)
    metrics.release_objects("a", [1], [])
    assert values(metrics, "name") == {(("k", "v"),): 2}
    metrics.remove_owner("b")
    assert values(metrics, "name") == {}
    metrics.new_family("a", 2, "name", "", COUNTER)
    metrics.new_metric("a", 2, 2, {"k": "v"}, None)
    assert values(metrics, "name") == {(("k", "v"),): 0}


def test_a_released_metric_is_exported_until_its_family_object_is_released() -> None:
    metrics = with_metric(COUNTER)
    metrics.update_metric("owner", 1, "increment", 3)
    metrics.release_objects("owner", [], [1])
    assert values(metrics, "name") == {(): 3}
    metrics.new_metric("owner", 2, 1, {}, None)
    assert metrics.read_metric("owner", 2) == 3
    metrics.release_objects("owner", [1], [2])
    assert values(metrics, "name") == {}


def test_two_family_objects_of_one_stub_count_as_two() -> None:
    metrics = with_metric(GAUGE)
    metrics.new_family("owner", 2, "name", "", GAUGE)
    metrics.new_metric("owner", 2, 2, {}, None)
    metrics.release_objects("owner", [1], [])
    metrics.update_metric("owner", 2, "set", 5)
    assert values(metrics, "name") == {(): 5}


def test_a_metric_cannot_be_used_after_its_family_object_is_released() -> None:
    metrics = with_metric(COUNTER)
    metrics.release_objects("owner", [1], [])
    metrics.update_metric("owner", 1, "increment", 1)  # sent before the release
    with pytest.raises(HostError) as error:
        metrics.read_metric("owner", 1)
    assert error_text(error) == METRIC_DELETED
    with pytest.raises(HostError) as error:
        metrics.new_metric("owner", 2, 1, {}, None)
    assert error_text(error) == METRIC_DELETED


def test_releasing_unknown_objects_changes_nothing() -> None:
    metrics = with_metric(COUNTER)
    metrics.release_objects("owner", [7], [7])
    metrics.release_objects("stranger", [1], [1])
    metrics.remove_owner("stranger")
    metrics.update_metric("stranger", 1, "increment", 1)
    assert values(metrics, "name") == {(): 0}


@pytest.mark.parametrize("name", [*BAD_NAMES, "a:b"])
def test_a_label_name_that_prometheus_does_not_allow_is_refused(name: str) -> None:
    metrics = CustomMetrics()
    metrics.new_family("a", 1, "name", "", COUNTER)
    with pytest.raises(HostError) as error:
        metrics.new_metric("a", 1, 1, {name: "v"}, None)
    assert error_text(error) == (
        f"Invalid label name '{name}'; it must match [a-zA-Z_][a-zA-Z0-9_]* and not begin with '__'"
    )
    assert values(metrics, "name") == {}


def test_a_histogram_cannot_have_a_label_named_le() -> None:
    metrics = CustomMetrics()
    metrics.new_family("a", 1, "name", "", HISTOGRAM)
    with pytest.raises(HostError) as error:
        metrics.new_metric("a", 1, 1, {"le": "1"}, [1.0])
    assert (
        error_text(error) == "Invalid label name 'le'; it is reserved for the buckets of histograms"
    )


# Kinds


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        (COUNTER, "set"),
        (COUNTER, "observe"),
        (GAUGE, "observe"),
        (HISTOGRAM, "increment"),
        (HISTOGRAM, "set"),
    ],
)
def test_an_operation_that_the_kind_does_not_support_is_refused(kind: int, change: str) -> None:
    metrics = with_metric(kind, [] if kind == HISTOGRAM else None)
    with pytest.raises(ValueError) as error:
        metrics.update_metric("owner", 1, change, 1)
    name = ("COUNTER", "GAUGE", "HISTOGRAM")[kind]
    assert str(error.value) == (
        f"TRITONSERVER_METRIC_KIND_{name} does not support {change.capitalize()}"
    )


def test_a_histogram_has_no_single_value() -> None:
    with pytest.raises(HostError) as error:
        with_metric(HISTOGRAM, []).read_metric("owner", 1)
    assert error_text(error) == "TRITONSERVER_METRIC_KIND_HISTOGRAM does not support Value"


def test_a_counter_cannot_decrease_and_a_gauge_can() -> None:
    counter, gauge = with_metric(COUNTER), with_metric(GAUGE)
    with pytest.raises(ValueError) as error:
        counter.update_metric("owner", 1, "increment", -0.5)
    assert str(error.value) == (
        "TRITONSERVER_METRIC_KIND_COUNTER can only be incremented monotonically by non-negative"
        " values."
    )
    assert counter.read_metric("owner", 1) == 0
    gauge.update_metric("owner", 1, "increment", -0.5)
    assert gauge.read_metric("owner", 1) == -0.5


def test_an_unknown_change_is_an_error() -> None:
    with pytest.raises(KeyError):
        with_metric(COUNTER).update_metric("owner", 1, "double", 1)


# Buckets


def buckets(metrics: CustomMetrics) -> list[tuple[float, float]]:
    return [
        (sample.numeric_label[1], sample.value)
        for sample in scrape(metrics)["name"].samples
        if sample.numeric_label is not None
    ]


def test_a_histogram_counts_up_to_each_bound_inclusively() -> None:
    metrics = with_metric(HISTOGRAM, [0.1, 1.0, 5.0])
    for value in (0.1, 0.05, 1.5, 6.0, math.nan):
        metrics.update_metric("owner", 1, "observe", value)
    assert buckets(metrics) == [(0.1, 2), (1.0, 2), (5.0, 3), (math.inf, 5)]


@pytest.mark.parametrize("given", [[], [math.inf]])
def test_a_histogram_may_have_no_bounds_and_infinity_adds_no_bucket(
    given: list[float],
) -> None:
    metrics = with_metric(HISTOGRAM, given)
    metrics.update_metric("owner", 1, "observe", 3)
    assert buckets(metrics) == [(math.inf, 1)]


def test_a_label_set_keeps_its_first_bounds() -> None:
    metrics = with_metric(HISTOGRAM, [1.0])
    metrics.new_metric("owner", 2, 1, {}, [2.0, 3.0])
    metrics.update_metric("owner", 2, "observe", 2.5)
    assert buckets(metrics) == [(1.0, 0), (math.inf, 1)]


@pytest.mark.parametrize("given", [[2.0, 1.0], [1.0, 1.0], [math.nan], [0.0, math.nan, 1.0]])
def test_bounds_must_be_strictly_sorted(given: list[float]) -> None:
    with pytest.raises(HostError) as error:
        with_metric(HISTOGRAM, given)
    assert error_text(error) == "Bucket Boundaries must be strictly sorted"


def test_histograms_require_bounds_and_other_kinds_refuse_them() -> None:
    with pytest.raises(HostError) as error:
        with_metric(HISTOGRAM, None)
    assert error_text(error) == "Missing required buckets."
    with pytest.raises(HostError) as error:
        with_metric(GAUGE, [])
    assert error_text(error) == "Unexpected buckets found."


# Compared with a simple model

OWNERS = ("a", "b", "c")
NAMES = {"counter": COUNTER, "gauge": GAUGE}
LABELS: tuple[dict[str, str], ...] = ({}, {"k": "1"}, {"k": "2"})


class Store(RuleBasedStateMachine):
    """The store and a simple model of it: which owner holds which label sets, and their values."""

    def __init__(self) -> None:
        super().__init__()
        self.metrics = CustomMetrics()
        self.number = 0
        self.seen: list[str] = []
        self.families: dict[tuple[str, int], str] = {}  # (owner, number): name
        self.made: dict[tuple[str, int], tuple[int, Labels]] = {}  # (owner, number): family, labels
        self.held: dict[tuple[str, int], set[Labels]] = {}  # (owner, family): label sets
        self.values: dict[tuple[str, Labels], float] = {}

    def remove_unheld(self) -> None:
        held = {(self.families[key], labels) for key, sets in self.held.items() for labels in sets}
        self.values = {key: value for key, value in self.values.items() if key in held}

    @rule(owner=st.sampled_from(OWNERS), name=st.sampled_from(sorted(NAMES)))
    def new_family(self, owner: str, name: str) -> None:
        self.number += 1
        self.metrics.new_family(owner, self.number, name, name, NAMES[name])
        self.families[owner, self.number] = name
        self.held[owner, self.number] = set()
        if name not in self.seen:
            self.seen.append(name)

    @precondition(lambda self: self.families)
    @rule(data=st.data(), labels=st.sampled_from(LABELS))
    def new_metric(self, data: st.DataObject, labels: dict[str, str]) -> None:
        owner, family = data.draw(st.sampled_from(sorted(self.families)))
        self.number += 1
        self.metrics.new_metric(owner, self.number, family, labels, None)
        key = labels_of(labels)
        self.made[owner, self.number] = (family, key)
        self.held[owner, family].add(key)
        self.values.setdefault((self.families[owner, family], key), 0.0)

    @precondition(lambda self: self.made)
    @rule(data=st.data(), by=st.integers(0, 100))
    def increment(self, data: st.DataObject, by: int) -> None:
        owner, metric = data.draw(st.sampled_from(sorted(self.made)))
        self.metrics.update_metric(owner, metric, "increment", by)
        family, labels = self.made[owner, metric]
        self.values[self.families[owner, family], labels] += by

    @precondition(lambda self: self.made)
    @rule(data=st.data())
    def read(self, data: st.DataObject) -> None:
        owner, metric = data.draw(st.sampled_from(sorted(self.made)))
        family, labels = self.made[owner, metric]
        expected = self.values[self.families[owner, family], labels]
        assert self.metrics.read_metric(owner, metric) == expected

    @precondition(lambda self: self.made)
    @rule(data=st.data())
    def drop_metric(self, data: st.DataObject) -> None:
        owner, metric = data.draw(st.sampled_from(sorted(self.made)))
        self.metrics.release_objects(owner, [], [metric])
        del self.made[owner, metric]

    @precondition(lambda self: self.families)
    @rule(data=st.data())
    def drop_family(self, data: st.DataObject) -> None:
        owner, family = data.draw(st.sampled_from(sorted(self.families)))
        self.metrics.release_objects(owner, [family], [])
        self.end(owner, family)
        self.remove_unheld()

    @rule(owner=st.sampled_from(OWNERS))
    def forget(self, owner: str) -> None:
        self.metrics.remove_owner(owner)
        for who, family in list(self.families):
            if who == owner:
                self.end(who, family)
        self.remove_unheld()

    def end(self, owner: str, family: int) -> None:
        del self.held[owner, family]
        for key, (of, _) in list(self.made.items()):
            if key[0] == owner and of == family:
                del self.made[key]
        del self.families[owner, family]

    @invariant()
    def a_scrape_shows_what_is_held(self) -> None:
        families = list(self.metrics.collect())
        assert [family.name for family in families] == self.seen
        shown = {(f.name, s.labels): s.value for f in families for s in f.samples}
        assert shown == self.values


TestStore = Store.TestCase
TestStore.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
