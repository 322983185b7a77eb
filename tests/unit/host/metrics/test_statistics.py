"""The statistics of a model version."""

from __future__ import annotations

import time
from typing import Any, cast

import pytest

from host.errors import internal
from host.inference.call import Call
from host.inference.metadata import BatchStatistics, Duration, InferenceStatistics, ModelStatistics
from host.inference.request import ExecutionTimes, InferRequest, InferResponse
from host.metrics.statistics import InferenceCounters

TIMES = ExecutionTimes(started=1_100, inputs_ready=1_110, outputs_begin=1_310, ended=1_315)


@pytest.fixture(autouse=True)
def clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock stands still at 2,000 ns, and at 77 ms since the epoch."""
    monkeypatch.setattr(time, "monotonic_ns", lambda: 2_000)
    monkeypatch.setattr(time, "time_ns", lambda: 77_654_321)


def call(batch_size: int = 1, received: int = 1_000, failed: bool = False) -> Call:
    made = Call(InferRequest("m", [], batch_size=batch_size))
    made.received_ns = received
    made.queued_ns = received + 20
    if failed:
        made.fail(internal("no"))
    else:
        made.respond(InferResponse("m", 1))
    return made


def test_all_counters_start_at_zero() -> None:
    assert InferenceCounters("m", "3").snapshot() == ModelStatistics("m", "3")


def test_every_request_is_charged_with_the_full_times_of_its_batch() -> None:
    counters = InferenceCounters("m", "1")
    counters.record_batches([([call(2), call(3, received=1_010)], TIMES, 0)])
    assert counters.snapshot() == ModelStatistics(
        name="m",
        version="1",
        last_inference=77,
        inference_count=5,
        execution_count=1,
        inference_stats=InferenceStatistics(
            success=Duration(2, 1_000 + 990),
            queue=Duration(2, 80 + 70),
            compute_input=Duration(2, 20),
            compute_infer=Duration(2, 400),
            compute_output=Duration(2, 10),
        ),
        batch_stats=[BatchStatistics(5, Duration(1, 10), Duration(1, 200), Duration(1, 5))],
    )


def test_a_batch_that_cannot_be_counted_costs_no_other_one_its_counts() -> None:
    class Failing:
        def record_success(self, *times: int) -> None:
            if times[0] == 990:
                raise RuntimeError("a defect")

    counters = InferenceCounters("m", "1")
    counters.latencies = cast(Any, Failing())
    batches = [([call(2)], TIMES, 0), ([call(3, received=1_010)], TIMES, 0), ([call(4)], TIMES, 0)]
    with pytest.raises(RuntimeError, match="a defect"):
        counters.record_batches(batches)
    counted = counters.snapshot()
    assert counted.inference_stats.compute_infer.count == 2
    assert [one.batch_size for one in counted.batch_stats] == [2, 4]
    assert counted.inference_count >= 6


def test_batch_sizes_are_listed_in_ascending_order() -> None:
    counters = InferenceCounters("m", "1")
    for size in (4, 1, 4):
        counters.record_batches([([call(size)], TIMES, 0)])
    stats = counters.snapshot()
    assert [(b.batch_size, b.compute_infer) for b in stats.batch_stats] == [
        (1, Duration(1, 200)),
        (4, Duration(2, 400)),
    ]
    assert (stats.inference_count, stats.execution_count) == (9, 3)


def test_failed_calls_of_a_batch_count_as_executed_but_not_as_success() -> None:
    counters = InferenceCounters("m", "1")
    counters.record_batches([([call(2), call(3, failed=True)], TIMES, 0)])
    counters.record_failure(900)
    stats = counters.snapshot()
    assert (stats.inference_count, stats.execution_count) == (2, 1)
    assert stats.inference_stats.success.count == 1
    assert stats.inference_stats.fail == Duration(1, 900)
    assert [batch.batch_size for batch in stats.batch_stats] == [5]


def test_a_failure_in_the_queue_counts_only_as_failure() -> None:
    counters = InferenceCounters("m", "1")
    counters.record_failure(5)
    counters.record_failure(6)
    assert counters.snapshot() == ModelStatistics(
        "m", "1", inference_stats=InferenceStatistics(fail=Duration(2, 11))
    )


def test_queue_time_without_a_queue_starts_when_the_call_is_received() -> None:
    counters = InferenceCounters("m", "1")
    direct = call()
    direct.queued_ns = 0
    counters.record_batches([([direct], TIMES, 0)])
    assert counters.snapshot().inference_stats.queue == Duration(1, 100)


def test_queue_time_is_never_negative() -> None:
    counters = InferenceCounters("m", "1")
    counters.record_success(1, 10, -3, 1, 2, 3)
    assert counters.snapshot().inference_stats.queue == Duration(1, 0)


def test_cache_hit_is_a_success_without_inference_or_compute() -> None:
    counters = InferenceCounters("m", "1")
    counters.record_cache_hit(total_ns=50, queue_ns=10, lookup_ns=7)
    assert counters.snapshot() == ModelStatistics(
        "m",
        "1",
        inference_stats=InferenceStatistics(
            success=Duration(1, 50), queue=Duration(1, 10), cache_hit=Duration(1, 7)
        ),
    )


def test_the_time_of_a_cache_miss_is_added_to_its_success() -> None:
    counters = InferenceCounters("m", "1")
    counters.record_success(1, 100, 1, 2, 3, 4)
    counters.record_cache_miss(9)
    stats = counters.snapshot().inference_stats
    assert stats.success == Duration(1, 109)
    assert stats.cache_miss == Duration(1, 9)


def test_a_snapshot_does_not_change_later() -> None:
    counters = InferenceCounters("m", "1")
    counters.record_batches([([call()], TIMES, 0)])
    before = counters.snapshot()
    counters.record_batches([([call()], TIMES, 0)])
    assert before.execution_count == 1
    assert before.batch_stats[0].compute_infer.count == 1
