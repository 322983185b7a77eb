"""The metrics of one model version (docs/reference/metrics.md, "Metrics")."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, fields

from host.config.schema import ModelConfig
from host.inference.call import FailureReason
from host.metrics.families import Histogram, Labels, MetricsSnapshot, labels_of
from host.metrics.latency import FIRST_RESPONSE, Latencies, MetricsSettings, TokenLatencies
from host.metrics.statistics import InferenceCounters

_log = logging.getLogger("pbhost")

_INVALID_LABEL_CHARACTER = re.compile(r"[^a-zA-Z0-9_]")

_LATENCIES = {
    "nv_inference_request_duration_us": "request_ns",
    "nv_inference_queue_duration_us": "queue_ns",
    "nv_inference_compute_input_duration_us": "input_ns",
    "nv_inference_compute_infer_duration_us": "infer_ns",
    "nv_inference_compute_output_duration_us": "output_ns",
}
_CACHE_COUNTS = {
    "nv_cache_num_hits_per_model": "hits",
    "nv_cache_num_misses_per_model": "misses",
}
_CACHE_LATENCIES = {
    "nv_cache_hit_duration_per_model": "hit_ns",
    "nv_cache_miss_duration_per_model": "miss_ns",
}


@dataclass(slots=True)
class Totals:
    """Sums over the lifetime of a series. Times are in nanoseconds; `batches` counts by size.

    `latencies` counts successful requests by bucket (`host.metrics.latency`).
    """

    success: int = 0
    inferences: int = 0
    executions: int = 0
    request_ns: int = 0
    queue_ns: int = 0
    input_ns: int = 0
    infer_ns: int = 0
    output_ns: int = 0
    hits: int = 0
    hit_ns: int = 0
    misses: int = 0
    miss_ns: int = 0
    quarantined: int = 0
    failures: Counter[FailureReason] = field(default_factory=Counter)
    batches: Counter[int] = field(default_factory=Counter)
    latencies: Counter[int] = field(default_factory=Counter)

    @classmethod
    def from_counters(cls, counters: InferenceCounters) -> Totals:
        """The sums since the version was loaded."""
        seen = counters.snapshot()
        spent = seen.inference_stats
        return cls(
            success=spent.success.count,
            inferences=seen.inference_count,
            executions=seen.execution_count,
            request_ns=spent.success.ns,
            queue_ns=spent.queue.ns,
            input_ns=spent.compute_input.ns,
            infer_ns=spent.compute_infer.ns,
            output_ns=spent.compute_output.ns,
            hits=spent.cache_hit.count,
            hit_ns=spent.cache_hit.ns,
            misses=spent.cache_miss.count,
            miss_ns=spent.cache_miss.ns,
            quarantined=counters.quarantined,
            failures=Counter(counters.failures),
            batches=Counter({b.batch_size: b.compute_infer.count for b in seen.batch_stats}),
            latencies=counters.latency_counts,
        )

    def __add__(self, other: Totals) -> Totals:
        return Totals(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(Totals)))


class ModelMetrics:
    """Exports the `counters` of one loaded model version as metrics.

    `pending` returns the number of requests that wait for execution. When a version is reloaded,
    the new one continues the series of the old one, so counters never decrease.
    """

    def __init__(
        self,
        config: ModelConfig,
        version: int,
        counters: InferenceCounters,
        pending: Callable[[], int],
        settings: MetricsSettings,
    ) -> None:
        self.labels = model_labels(config, version)
        self.load_seconds = 0.0
        self.has_quarantine = False
        self.latencies: Latencies | None = None
        if settings.summary_latencies or settings.histogram_latencies:
            self.latencies = Latencies(config, settings)
            counters.latencies = self.latencies
        self.token_latencies = TokenLatencies()
        self.counters = counters
        self.count_pending = pending
        """Returns the number of requests that wait for execution."""
        self._settings = settings
        self._cache_enabled = bool(config.response_cache.enable)
        self._max_batch_size: int = config.max_batch_size
        self._inherited = Totals()  # of predecessors that have ended
        self._has_inherited = False
        self._predecessors: list[ModelMetrics] = []  # old versions that still finish requests
        self._successor: ModelMetrics | None = None

    def set_namespace(self, namespace: str) -> None:
        """Adds the label `namespace`, unless it is empty: model names are local to it."""
        if namespace:
            self.labels = labels_of({**dict(self.labels), "namespace": namespace})

    def inherit_from(self, predecessor: ModelMetrics) -> None:
        """Continues the series of a version that this one replaces, if the labels are the same."""
        if predecessor.labels != self.labels:
            return
        predecessor._successor = self
        self._predecessors.append(predecessor)
        self.token_latencies = predecessor.token_latencies
        if self.latencies is not None and predecessor.latencies is not None:
            self.latencies.inherit_from(predecessor.latencies)

    def merge_into_successor(self) -> None:
        """Adds the totals to the successor, if any. Called when this version has ended."""
        successor, self._successor = self._successor, None
        if successor is None:
            return
        successor._predecessors.remove(self)
        successor._inherited += self._inherited + Totals.from_counters(self.counters)
        successor._has_inherited = True
        for predecessor in self._predecessors:
            successor._predecessors.append(predecessor)
            predecessor._successor = successor
        self._predecessors = []

    def totals(self) -> Totals:
        """The totals of this version and of the versions that it replaces."""
        total = Totals.from_counters(self.counters)
        if self._has_inherited:
            total = self._inherited + total
        for predecessor in self._predecessors:
            total += predecessor.totals()
        return total

    def collect_into(self, snapshot: MetricsSnapshot) -> None:
        """Adds every series of this version to the snapshot."""
        labels, totals = self.labels, self.totals()
        snapshot["nv_inference_request_success"].add(labels, totals.success)
        for reason in FailureReason:
            failed = labels_of({**dict(labels), "reason": reason.value})
            snapshot["nv_inference_request_failure"].add(failed, totals.failures[reason])
        snapshot["nv_inference_count"].add(labels, totals.inferences)
        snapshot["nv_inference_exec_count"].add(labels, totals.executions)
        snapshot["nv_inference_pending_request_count"].add(labels, self.count_pending())
        snapshot["nv_model_load_duration_secs"].add(labels, self.load_seconds)
        if self.has_quarantine:
            snapshot["pbhost_quarantine_refusals_total"].add(labels, totals.quarantined)
        if self._settings.counter_latencies:
            _collect_durations(snapshot, labels, totals, _LATENCIES)
            if self._cache_enabled:
                for name, count in _CACHE_COUNTS.items():
                    snapshot[name].add(labels, getattr(totals, count))
                _collect_durations(snapshot, labels, totals, _CACHE_LATENCIES)
        snapshot["pbhost_batch_size"].add_histogram(
            labels, _batch_size_histogram(totals.batches, self._max_batch_size)
        )
        for name, histogram in self.token_latencies.histograms().items():
            snapshot[name].add_histogram(labels, histogram)
        if self.latencies is not None:
            self._collect_latencies(snapshot, self.latencies)

    def _collect_latencies(self, snapshot: MetricsSnapshot, latencies: Latencies) -> None:
        summaries = {
            "nv_inference_request_summary_us": None if self._cache_enabled else latencies.request,
            "nv_inference_queue_summary_us": latencies.queue,
            "nv_inference_compute_input_summary_us": latencies.compute_input,
            "nv_inference_compute_infer_summary_us": latencies.compute_infer,
            "nv_inference_compute_output_summary_us": latencies.compute_output,
            "nv_cache_hit_summary_per_model": latencies.cache_hit if self._cache_enabled else None,
            "nv_cache_miss_summary_per_model": latencies.cache_miss
            if self._cache_enabled
            else None,
        }
        for name, summary in summaries.items():
            if summary is not None:
                snapshot[name].add_summary(
                    self.labels, summary.count, summary.total, summary.quantiles()
                )
        if latencies.first_response is not None:
            snapshot[FIRST_RESPONSE].add_histogram(self.labels, latencies.first_response)


def _collect_durations(
    snapshot: MetricsSnapshot, labels: Labels, totals: Totals, names: dict[str, str]
) -> None:
    for name, attribute in names.items():
        snapshot[name].add(labels, getattr(totals, attribute) // 1000)


def _batch_size_histogram(batches: Counter[int], largest: int) -> Histogram:
    """A histogram of batch sizes with buckets at powers of two, up to the maximum batch size."""
    bounds = [1.0]
    while bounds[-1] < largest:
        bounds.append(bounds[-1] * 2)
    histogram = Histogram(bounds)
    for size, count in batches.items():
        histogram.observe(size, count)
    return histogram


def model_labels(config: ModelConfig, version: int) -> Labels:
    """The labels of a model version: name, version and `metric_tags`.

    Characters of tag names that Prometheus does not allow become underscores.
    """
    tags: dict[str, str] = {}
    for key, value in config.metric_tags.items():
        name = "_" + _INVALID_LABEL_CHARACTER.sub("_", key)
        if name != f"_{key}":
            _log.warning(
                "metric tag '%s' of model '%s' is exported as label '%s'", key, config.name, name
            )
        tags[name] = value
    return labels_of({**tags, "model": config.name, "version": str(version)})
