"""The metrics of one model version, and their continuation after a reload."""

from __future__ import annotations

import gc
import weakref

import pytest

from host.config.schema import ModelConfig, new_config
from host.inference.call import FailureReason
from host.metrics.families import MetricsSnapshot
from host.metrics.latency import MetricsSettings
from host.metrics.model_metrics import ModelMetrics, model_labels
from host.metrics.statistics import InferenceCounters


def config_of(name: str = "m", **tags: str) -> ModelConfig:
    config = new_config()
    config.name = name
    config.max_batch_size = 8
    for key, value in tags.items():
        config.metric_tags[key] = value
    return config


class Metered:
    """Counters of a version, and its metrics."""

    def __init__(
        self, config: ModelConfig | None = None, settings: MetricsSettings | None = None
    ) -> None:
        self.counters = InferenceCounters("m", "1")
        self.pending = 0
        self.metrics = ModelMetrics(
            config or config_of(),
            1,
            self.counters,
            lambda: self.pending,
            settings or MetricsSettings(),
        )

    def shown(self) -> dict[str, float]:
        """Values by name, suffix and labels, without the labels of the model."""
        snapshot = MetricsSnapshot()
        self.metrics.collect_into(snapshot)
        found: dict[str, float] = {}
        for family in snapshot.families():
            for sample in family.samples:
                own = [value for name, value in sample.labels if name not in ("model", "version")]
                mark = [] if sample.numeric_label is None else [f"{sample.numeric_label[1]:g}"]
                found[" ".join([family.name + sample.suffix, *own, *mark])] = sample.value
        return found


def test_counters_are_exported() -> None:
    one = Metered()
    one.counters.record_success(4, 9_000, 1_999, 2_000, 3_000, 4_000)
    one.counters.record_execution(4, 2_000, 3_000, 4_000)
    one.counters.record_failure(5_000, FailureReason.BACKEND)
    one.pending = 3
    one.metrics.load_seconds = 0.5
    shown = one.shown()
    assert {name: value for name, value in shown.items() if not name.startswith("pbhost_")} == {
        "nv_inference_request_success": 1,
        "nv_inference_request_failure REJECTED": 0,
        "nv_inference_request_failure CANCELED": 0,
        "nv_inference_request_failure BACKEND": 1,
        "nv_inference_request_failure OTHER": 0,
        "nv_inference_count": 4,
        "nv_inference_exec_count": 1,
        "nv_inference_request_duration_us": 9,
        "nv_inference_queue_duration_us": 1,
        "nv_inference_compute_input_duration_us": 2,
        "nv_inference_compute_infer_duration_us": 3,
        "nv_inference_compute_output_duration_us": 4,
        "nv_inference_pending_request_count": 3,
        "nv_model_load_duration_secs": 0.5,
    }
    sizes = {name: value for name, value in shown.items() if "batch_size_bucket" in name}
    assert list(sizes) == [f"pbhost_batch_size_bucket {bound}" for bound in "1 2 4 8 inf".split()]
    assert list(sizes.values()) == [0, 0, 1, 1, 1]


def test_cache_metrics_are_exported_for_models_with_the_cache_enabled() -> None:
    config = config_of()
    config.response_cache.enable = True
    one = Metered(config, MetricsSettings(summary_latencies=True))
    one.counters.record_cache_hit(9_000, 1_000, 2_000)
    one.counters.record_cache_miss(3_000)
    shown = one.shown()
    assert shown["nv_cache_num_hits_per_model"] == shown["nv_cache_num_misses_per_model"] == 1
    assert shown["nv_cache_hit_duration_per_model"] == 2
    assert shown["nv_cache_miss_duration_per_model"] == 3
    assert shown["nv_inference_request_success"] == 1
    assert shown["nv_inference_count"] == 0
    assert "nv_cache_hit_summary_per_model_count" in shown
    assert "nv_inference_request_summary_us_count" not in shown


def test_latency_counters_can_be_disabled_without_the_other_counters() -> None:
    config = config_of()
    config.response_cache.enable = True
    one = Metered(config, MetricsSettings(counter_latencies=False))
    one.counters.record_success(1, 1_000, 0, 0, 0, 0)
    shown = one.shown()
    assert not [name for name in shown if "duration_us" in name or "nv_cache" in name]
    assert shown["nv_inference_request_success"] == shown["nv_inference_count"] == 1


def test_summaries_and_histograms_are_exported_if_enabled() -> None:
    settings = MetricsSettings(
        summary_latencies=True, histogram_latencies=True, quantiles=(0.5, 1.0)
    )
    one = Metered(config_of(), settings)
    one.counters.record_success(1, 7_000, 2_000, 1_000, 3_000, 1_000)
    shown = one.shown()
    assert shown["nv_inference_request_summary_us_count"] == 1
    assert shown["nv_inference_request_summary_us 0.5"] == 7
    assert shown["nv_inference_compute_infer_summary_us 1"] == 3
    assert "nv_inference_first_response_histogram_ms_bucket inf" in shown
    assert not [name for name in Metered().shown() if "summary" in name or "first" in name]


# Labels


def test_tags_become_labels_with_an_underscore() -> None:
    labels = model_labels(config_of(team="a"), 3)
    assert labels == (("_team", "a"), ("model", "m"), ("version", "3"))


def test_a_tag_that_cannot_be_a_label_is_changed_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    labels = model_labels(config_of(**{"my-team": "a"}), 1)
    assert labels[0] == ("_my_team", "a")
    assert caplog.messages == ["metric tag 'my-team' of model 'm' is exported as label '_my_team'"]


# Replacement


def succeeded(*generations: Metered) -> None:
    for old, new in zip(generations, generations[1:], strict=False):
        new.metrics.inherit_from(old.metrics)


def successes(one: Metered) -> float:
    (value,) = (v for k, v in one.shown().items() if k.startswith("nv_inference_request_success"))
    return value


def test_a_version_continues_the_totals_of_the_one_it_replaces() -> None:
    old, new = Metered(), Metered()
    old.counters.record_success(1, 1_000, 0, 0, 0, 0)
    succeeded(old, new)
    old.counters.record_success(1, 1_000, 0, 0, 0, 0)  # the old version finishes its requests
    new.counters.record_success(1, 1_000, 0, 0, 0, 0)
    old.counters.record_failure(0, FailureReason.CANCELED)
    assert successes(new) == 3
    old.metrics.merge_into_successor()
    assert successes(new) == 3
    assert new.shown()["nv_inference_request_failure CANCELED"] == 1


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_versions_may_end_in_any_order(order: tuple[int, int]) -> None:
    generations = [Metered(), Metered(), Metered()]
    succeeded(*generations)
    alive = list(generations)
    counted = 0
    for place in order:
        for one in alive:
            one.counters.record_success(1, 1_000, 0, 0, 0, 0)
        counted += len(alive)
        assert successes(generations[-1]) == counted
        alive.remove(generations[place])
        generations[place].metrics.merge_into_successor()
        assert successes(generations[-1]) == counted


def test_a_version_that_has_ended_is_garbage_collected() -> None:
    generations = [Metered(), Metered()]
    succeeded(*generations)
    ended = weakref.ref(generations[0].metrics)
    generations.pop(0).metrics.merge_into_successor()
    gc.collect()
    assert ended() is None


def test_a_version_with_other_tags_starts_new_series() -> None:
    old, new = Metered(), Metered(config_of(team="a"))
    old.counters.record_success(1, 1_000, 0, 0, 0, 0)
    succeeded(old, new)
    old.metrics.merge_into_successor()
    assert successes(new) == 0


def test_a_version_continues_the_latencies_of_the_one_it_replaces() -> None:
    settings = MetricsSettings(summary_latencies=True, histogram_latencies=True)
    old, new = Metered(settings=settings), Metered(settings=settings)
    old.counters.record_success(1, 7_000, 2_000, 1_000, 3_000, 1_000)
    succeeded(old, new)
    new.counters.record_success(1, 7_000, 2_000, 1_000, 3_000, 1_000)
    assert new.shown()["nv_inference_request_summary_us_count"] == 2
