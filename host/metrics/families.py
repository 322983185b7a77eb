"""The metric families of the server: their catalogue, and their samples."""

from __future__ import annotations

import enum
import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

Labels = tuple[tuple[str, str], ...]
"""Label names and values, sorted by name."""


class MetricKind(enum.Enum):
    """The kind of a family. The value is the word in the TYPE line."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"
    SUMMARY = "summary"


@dataclass(slots=True)
class Sample:
    """One line of a scrape: `suffix` of the metric name, labels and value.

    `numeric_label` is the last label of a histogram bucket (`le`) or of a summary (`quantile`).
    """

    suffix: str
    labels: Labels
    value: float
    numeric_label: tuple[str, float] | None = None


class Histogram:
    """Counts observations per bucket. `bounds` are in strictly ascending order."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)  # the last one has no bound
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Counts a value. Bounds are inclusive, and NaN is counted only in the last bucket."""
        place = len(self.bounds) if math.isnan(value) else bisect_left(self.bounds, value)
        self.counts[place] += times
        self.total += value * times


@dataclass(slots=True)
class MetricFamily:
    """A metric name with its help text, kind and samples."""

    name: str
    help: str
    kind: MetricKind
    samples: list[Sample] = field(default_factory=list)

    def add(self, labels: Labels, value: float) -> None:
        """Adds the value of a counter or gauge."""
        self.samples.append(Sample("", labels, value))

    def add_histogram(self, labels: Labels, histogram: Histogram) -> None:
        """Adds count, sum and cumulative buckets; the last bucket is +Inf."""
        self._add_head(labels, sum(histogram.counts), histogram.total)
        below = 0
        bounds = (*histogram.bounds, math.inf)
        for bound, count in zip(bounds, histogram.counts, strict=True):
            below += count
            self.samples.append(Sample("_bucket", labels, below, ("le", bound)))

    def add_summary(
        self, labels: Labels, count: int, total: float, quantiles: Iterable[tuple[float, float]]
    ) -> None:
        """Adds count, sum, and (quantile, value) pairs."""
        self._add_head(labels, count, total)
        for quantile, value in quantiles:
            self.samples.append(Sample("", labels, value, ("quantile", quantile)))

    def _add_head(self, labels: Labels, count: int, total: float) -> None:
        self.samples.append(Sample("_count", labels, count))
        self.samples.append(Sample("_sum", labels, total))


def labels_of(texts: Mapping[str, str]) -> Labels:
    """Converts a mapping to labels."""
    return tuple(sorted(texts.items()))


_COUNTERS = {
    "nv_inference_request_success": "Number of successful inference requests, all batch sizes",
    "nv_inference_request_failure": "Number of failed inference requests, all batch sizes",
    "nv_inference_count": "Number of inferences performed (does not include cached requests)",
    "nv_inference_exec_count": (
        "Number of model executions performed (does not include cached requests)"
    ),
    "nv_inference_request_duration_us": (
        "Cumulative inference request duration in microseconds (includes cached requests)"
    ),
    "nv_inference_queue_duration_us": (
        "Cumulative inference queuing duration in microseconds (includes cached requests)"
    ),
    "nv_inference_compute_input_duration_us": (
        "Cumulative compute input duration in microseconds (does not include cached requests)"
    ),
    "nv_inference_compute_infer_duration_us": (
        "Cumulative compute inference duration in microseconds (does not include cached requests)"
    ),
    "nv_inference_compute_output_duration_us": (
        "Cumulative inference compute output duration in microseconds (does not include cached"
        " requests)"
    ),
    "nv_cache_num_hits_per_model": "Number of cache hits per model",
    "nv_cache_num_misses_per_model": "Number of cache misses per model",
    "nv_cache_hit_duration_per_model": "Total cache hit duration per model, in microseconds",
    "nv_cache_miss_duration_per_model": (
        "Total cache miss (insert+lookup) duration per model, in microseconds"
    ),
    "pbhost_instance_busy_us_total": "Time that the instance executed batches, in microseconds",
    "pbhost_batches_closed_total": "Batches formed, by closing reason",
    "pbhost_stub_restarts_total": "Stub processes that were restarted after they died",
    "pbhost_quarantine_refusals_total": (
        "Requests that were refused because the same request has ended processes of the model"
    ),
    "pbhost_on_demand_loads_total": "Loads of the model for requests, by result",
    "pbhost_on_demand_requests_total": "Requests that had to wait until their model was loaded",
    "pbhost_on_demand_wait_seconds_total": (
        "Time that requests waited until their model was loaded, in seconds"
    ),
    "pbhost_repository_listings_total": "Listings of the object store",
    "pbhost_repository_listing_seconds_total": "Time that listings took, in seconds",
    "pbhost_repository_objects_total": (
        "Objects that models needed, by result: fetched, or cached if they were in the cache"
    ),
    "pbhost_repository_fetched_bytes_total": "Bytes fetched from the object store",
    "pbhost_repository_fetch_seconds_total": "Time in which models were fetched, in seconds",
    "pbhost_repository_failures_total": "Listings and fetches of models that failed",
    "pbhost_model_evictions_total": "Unloads of the model that made room in the memory budget",
    "pbhost_split_requests_total": (
        "Requests that named no version, by the version that got them, and its role"
    ),
    "pbhost_shadow_comparisons_total": "Requests copied to the shadow version, by result",
    "pbhost_client_requests_total": "Inference requests of the client that were accepted",
    "pbhost_client_refused_requests_total": "Refused requests of the client, by reason",
    "pbhost_unauthenticated_requests_total": "Requests without a known API key",
    "process_cpu_seconds_total": "CPU time of the server process, in seconds",
}
_GAUGES = {
    "nv_inference_pending_request_count": (
        "Instantaneous number of pending requests awaiting execution per-model."
    ),
    "nv_model_load_duration_secs": "Duration of the last load of the model, in seconds",
    "nv_pinned_memory_pool_total_bytes": "Pinned memory pool total memory size, in bytes",
    "nv_pinned_memory_pool_used_bytes": "Pinned memory pool used memory size, in bytes",
    "nv_cpu_utilization": "CPU utilization rate [0.0 - 1.0]",
    "nv_cpu_memory_total_bytes": "CPU total memory (RAM), in bytes",
    "nv_cpu_memory_used_bytes": "CPU used memory (RAM), in bytes",
    "nv_cache_util": "Cache utilization [0.0 - 1.0]",
    "nv_cache_num_entries": "Number of responses stored in response cache",
    "nv_cache_num_hits": "Number of cache hits in response cache",
    "nv_cache_num_misses": "Number of cache misses in response cache",
    "nv_cache_num_lookups": "Number of cache lookups in response cache",
    "nv_cache_num_evictions": "Number of cache evictions in response cache",
    "nv_cache_lookup_duration": ("Total cache lookup duration (hit and miss), in microseconds"),
    "nv_cache_insertion_duration": "Total cache insertion duration, in microseconds",
    "pbhost_stub_up": "Whether the instance has a stub process that accepts requests",
    "pbhost_arena_used_bytes": "Shared memory used by tensors of the stubs and the host, in bytes",
    "pbhost_event_loop_lag_seconds": (
        "Longest time that work waited for the event loop in the last 15 to 30 seconds"
    ),
    "pbhost_on_demand_waiting_requests": "Requests that wait now until their model is loaded",
    "pbhost_memory_budget_bytes": "Limit of the memory of all models, by device, in bytes",
    "pbhost_model_memory_bytes": (
        "Memory of the processes of the model, by device, in bytes, as it was measured last"
    ),
    "pbhost_arena_limit_bytes": "Limit of shared memory for tensors of one process, in bytes",
    "pbhost_client_requests_in_progress": "Inference requests of the client in progress",
    "pbhost_build_info": "Version of the server, and the version of Triton that clients read",
    "process_start_time_seconds": "Start of the server process, in seconds since 1970 UTC",
    "process_virtual_memory_bytes": "Virtual memory of the server process, in bytes",
    "process_resident_memory_bytes": "Resident memory of the server process, in bytes",
    "process_open_fds": "Open file descriptors of the server process",
    "process_max_fds": "Limit of open file descriptors of the server process",
}
_HISTOGRAMS = {
    "nv_inference_first_response_histogram_ms": (
        "Duration from request to first response in milliseconds"
    ),
    "pbhost_time_to_first_token_seconds": (
        "Time from a streamed request under /v1 to the first piece of a text, in seconds"
    ),
    "pbhost_inter_token_latency_seconds": (
        "Time between two pieces of a text that is streamed under /v1, in seconds"
    ),
    "pbhost_batch_size": "Batch sizes of the batches that the model executed",
}
_SUMMARIES = {
    "nv_inference_request_summary_us": (
        "Summary of inference request duration in microseconds (includes cached requests)"
    ),
    "nv_inference_queue_summary_us": (
        "Summary of inference queuing duration in microseconds (includes cached requests)"
    ),
    "nv_inference_compute_input_summary_us": (
        "Summary of compute input duration in microseconds (does not include cached requests)"
    ),
    "nv_inference_compute_infer_summary_us": (
        "Summary of compute inference duration in microseconds (does not include cached requests)"
    ),
    "nv_inference_compute_output_summary_us": (
        "Summary of compute output duration in microseconds (does not include cached requests)"
    ),
    "nv_cache_hit_summary_per_model": "Summary of cache hit duration, in microseconds",
    "nv_cache_miss_summary_per_model": "Summary of cache miss duration, in microseconds",
}

CATALOGUE = {
    name: (kind, help)
    for kind, families in (
        (MetricKind.COUNTER, _COUNTERS),
        (MetricKind.GAUGE, _GAUGES),
        (MetricKind.HISTOGRAM, _HISTOGRAMS),
        (MetricKind.SUMMARY, _SUMMARIES),
    )
    for name, help in families.items()
}
"""Kinds and help texts by name, in the order of a scrape."""


class MetricsSnapshot:
    """The server's metric families, filled for one scrape."""

    def __init__(self) -> None:
        self._families: dict[str, MetricFamily] = {}

    def __getitem__(self, name: str) -> MetricFamily:
        family = self._families.get(name)
        if family is None:
            kind, help = CATALOGUE[name]
            family = self._families[name] = MetricFamily(name, help, kind)
        return family

    def families(self) -> list[MetricFamily]:
        """The families that have samples, in the order of the catalogue."""
        return [self._families[name] for name in CATALOGUE if name in self._families]
