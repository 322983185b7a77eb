"""The inference statistics of one model version, updated on every request."""

from __future__ import annotations

import time
from collections.abc import Sequence

from host.inference.call import Call, FailureReason
from host.inference.metadata import BatchStatistics, Duration, InferenceStatistics, ModelStatistics
from host.inference.request import ExecutionTimes
from host.metrics.latency import Latencies, LatencyCounts

CountedBatch = tuple[Sequence[Call], ExecutionTimes, int]
"""Calls that are answered, the times of their batch, and the size of what else it had."""

_MAX_DURATIONS = 1000  # that are put into the counts of latencies together


class InferenceCounters:
    """Counts the requests and executions of one model version since it was loaded.

    All methods must be called on the event loop. Requests that are rejected before they are queued
    are not counted (docs/reference/metrics.md, "Members" and "Aggregation").
    """

    __slots__ = (
        "failures",
        "latencies",
        "quarantined",
        "_name",
        "_version",
        "_last_inference",
        "_inferences",
        "_success_ns",
        "_fail",
        "_fail_ns",
        "_queue_ns",
        "_computed",
        "_input_ns",
        "_infer_ns",
        "_output_ns",
        "_hits",
        "_hit_ns",
        "_misses",
        "_miss_ns",
        "_batches",
        "_latency_counts",
        "_durations",
    )

    def __init__(self, name: str, version: str) -> None:
        self.failures = dict.fromkeys(FailureReason, 0)
        self.latencies: Latencies | None = None
        self.quarantined = 0  # requests that were refused as they ended processes
        self._name = name
        self._version = version
        self._last_inference = 0
        self._inferences = 0
        self._success_ns = self._queue_ns = 0
        self._fail = self._fail_ns = 0
        self._computed = self._input_ns = self._infer_ns = self._output_ns = 0
        self._hits = self._hit_ns = self._misses = self._miss_ns = 0
        self._batches: dict[int, list[int]] = {}  # size: count, input, infer and output ns
        self._latency_counts = LatencyCounts()
        self._durations: list[int] = []  # of successful requests that are not in these counts yet

    @property
    def latency_counts(self) -> LatencyCounts:
        """The counts of successful requests by their latency."""
        self._count_durations()
        return self._latency_counts

    def _count_durations(self) -> None:
        self._latency_counts.add_latencies(self._durations)
        self._durations.clear()

    def record_batches(self, batches: Sequence[CountedBatch]) -> None:
        """Records executions that have ended, and their calls that did not fail.

        Each of these calls is charged with the full times of its batch. Failed calls are recorded
        with `record_failure`, calls that are answered later with `record_late_success`.
        """
        now = time.monotonic_ns()
        durations = self._durations
        inferences = total_ns = queue_ns = 0
        failure: Exception | None = None
        for calls, times, size in batches:
            try:
                started = times.started
                input_ns = times.inputs_ready - started
                infer_ns = times.outputs_begin - times.inputs_ready
                output_ns = times.ended - times.outputs_begin
                answered = 0
                for call in calls:
                    elements = call.request.batch_size
                    size += elements
                    if not call.failed:
                        inferences += elements
                        answered += 1
                        took = now - call.received_ns
                        total_ns += took
                        durations.append(took)
                        waited = started - (call.queued_ns or call.received_ns)
                        if waited > 0:
                            queue_ns += waited
                        if self.latencies is not None:
                            self.latencies.record_success(
                                took, waited, input_ns, infer_ns, output_ns
                            )
                self._computed += answered
                self._input_ns += input_ns * answered
                self._infer_ns += infer_ns * answered
                self._output_ns += output_ns * answered
                batch = self._batches.get(size)
                if batch is None:
                    batch = self._batches[size] = [0, 0, 0, 0]
                batch[0] += 1
                batch[1] += input_ns
                batch[2] += infer_ns
                batch[3] += output_ns
            except Exception as error:  # a defect: the other batches are counted
                failure = error
        self._inferences += inferences
        self._success_ns += total_ns
        self._queue_ns += queue_ns
        if batches:
            self._last_inference = time.time_ns() // 1_000_000
        if len(durations) > _MAX_DURATIONS:
            self._count_durations()
        if failure is not None:
            raise failure

    def record_execution(
        self, batch_size: int, input_ns: int, infer_ns: int, output_ns: int
    ) -> None:
        """Records an execution with `batch_size` elements, without its requests."""
        inferred = input_ns + infer_ns
        times = ExecutionTimes(0, input_ns, inferred, inferred + output_ns)
        self.record_batches([((), times, batch_size)])

    def record_success(
        self,
        batch_size: int,
        total_ns: int,
        queue_ns: int,
        input_ns: int,
        infer_ns: int,
        output_ns: int,
    ) -> None:
        """Records a request that the model answered."""
        self._inferences += batch_size
        self._success_ns += total_ns
        self._durations.append(total_ns)
        if queue_ns > 0:
            self._queue_ns += queue_ns
        self._computed += 1
        self._input_ns += input_ns
        self._infer_ns += infer_ns
        self._output_ns += output_ns
        if self.latencies is not None:
            self.latencies.record_success(total_ns, queue_ns, input_ns, infer_ns, output_ns)

    def add_compute_times(self, input_ns: int, infer_ns: int, output_ns: int) -> None:
        """Adds compute times to a request that is already recorded."""
        self._input_ns += input_ns
        self._infer_ns += infer_ns
        self._output_ns += output_ns

    def record_late_success(self, call: Call, times: ExecutionTimes) -> None:
        """Records a call whose last response came after the end of its execution."""
        self.record_success(
            call.request.batch_size,
            time.monotonic_ns() - call.received_ns,
            times.started - (call.queued_ns or call.received_ns),
            times.inputs_ready - times.started,
            times.outputs_begin - times.inputs_ready,
            times.ended - times.outputs_begin,
        )

    def record_failure(self, total_ns: int, reason: FailureReason = FailureReason.OTHER) -> None:
        """Records a queued request that ended with an error."""
        self.failures[reason] += 1
        self._fail += 1
        self._fail_ns += total_ns

    def record_cache_hit(self, total_ns: int, queue_ns: int, lookup_ns: int) -> None:
        """Records a request that was answered from the response cache, without an inference."""
        self._success_ns += total_ns
        self._durations.append(total_ns)
        self._queue_ns += queue_ns
        self._hits += 1
        self._hit_ns += lookup_ns
        if self.latencies is not None:
            self.latencies.record_cache_hit(queue_ns, lookup_ns)

    def record_cache_miss(self, lookup_and_insert_ns: int) -> None:
        """Records a successful request that was not in the cache: time of lookup and insertion."""
        self._misses += 1
        self._miss_ns += lookup_and_insert_ns
        self._success_ns += lookup_and_insert_ns
        if self.latencies is not None:
            self.latencies.record_cache_miss(lookup_and_insert_ns)

    def snapshot(self) -> ModelStatistics:
        """The current statistics, with batch sizes in ascending order."""
        computed = self._computed
        success = computed + self._hits
        return ModelStatistics(
            name=self._name,
            version=self._version,
            last_inference=self._last_inference,
            inference_count=self._inferences,
            execution_count=sum(count for count, *_ in self._batches.values()),
            inference_stats=InferenceStatistics(
                success=Duration(success, self._success_ns),
                fail=Duration(self._fail, self._fail_ns),
                queue=Duration(success, self._queue_ns),
                compute_input=Duration(computed, self._input_ns),
                compute_infer=Duration(computed, self._infer_ns),
                compute_output=Duration(computed, self._output_ns),
                cache_hit=Duration(self._hits, self._hit_ns),
                cache_miss=Duration(self._misses, self._miss_ns),
            ),
            batch_stats=[
                BatchStatistics(size, *(Duration(count, ns) for ns in phases))
                for size, (count, *phases) in sorted(self._batches.items())
            ],
        )
