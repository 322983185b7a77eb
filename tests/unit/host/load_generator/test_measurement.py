"""The statistics of the load generator: windows, quantiles, and what was the limit."""

from __future__ import annotations

import math
import os
import signal
import socket
from array import array
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from host.load_generator.job import Protocol, Target
from host.load_generator.measurement import (
    Level,
    Load,
    Measurement,
    Measuring,
    Plan,
    ServerCounts,
    are_alike,
    divide,
    mean,
    quantile,
    summarize,
)
from host.load_generator.requests import encode_post
from host.load_generator.schedule import arrival_times
from host.load_generator.workers import Sample, Workers
from tests.unit.host.client.test_http_transport import RESULT, read_request, serving

POSITIVE = st.floats(0.001, 1e6)


@given(POSITIVE, POSITIVE, st.integers(0, 5))
def test_three_equal_windows_are_alike(rate: float, latency: float, before: int) -> None:
    windows = [(1e9, 1e9)] * before + [(rate, latency)] * 3
    assert are_alike(windows, 0.1)


@given(POSITIVE, POSITIVE, st.sampled_from([0, 1, 2]), st.booleans())
def test_a_window_that_differs_much_is_not_alike(
    rate: float, latency: float, place: int, in_rate: bool
) -> None:
    windows = [(rate, latency)] * 3
    windows[place] = (2 * rate, latency) if in_rate else (rate, 2 * latency)
    assert not are_alike(windows, 0.1)


def test_fewer_than_three_windows_and_windows_without_requests_are_not_stable() -> None:
    assert not are_alike([(1.0, 1.0)] * 2, 0.1)
    assert not are_alike([(0.0, math.nan)] * 3, 0.1)


@given(st.lists(POSITIVE, min_size=1), st.sampled_from([0.5, 0.9, 0.99, 0.999]))
def test_a_quantile_is_between_the_values_around_it(values: list[float], share: float) -> None:
    found, ordered = quantile(values, share), sorted(values)
    place = share * (len(values) - 1)
    low, high = ordered[math.floor(place)], ordered[math.ceil(place)]
    assert low * (1 - 1e-9) <= found <= high * (1 + 1e-9)


def test_figures_without_values_are_not_numbers() -> None:
    assert math.isnan(quantile([], 0.5))
    assert math.isnan(mean([]))
    assert math.isnan(ServerCounts().mean("queue"))
    assert math.isnan(ServerCounts().batch)


def sample_of(**fields: object) -> Sample:
    sample = Sample()
    for name, value in fields.items():
        setattr(sample, name, value)
    return sample


@given(st.lists(st.tuples(st.floats(0.1, 10), st.integers(0, 20), st.floats(0, 1)), min_size=1))
def test_joined_samples_add_up(parts: list[tuple[float, int, float]]) -> None:
    samples = [
        sample_of(
            seconds=seconds, latencies=array("d", [0.1] * count), responses=count,
            failures={"INTERNAL": count}, cpu=[cpu], busy=[cpu],
        )
        for seconds, count, cpu in parts
    ]  # fmt: skip
    whole = Sample.joined(samples)
    count = sum(count for _, count, _ in parts)
    assert (len(whole.latencies), whole.responses) == (count, count)
    assert whole.failures == {"INTERNAL": count}
    assert whole.seconds == pytest.approx(sum(seconds for seconds, *_ in parts))
    assert min(cpu for *_, cpu in parts) - 1e-9 <= whole.cpu[0]
    assert whole.cpu[0] <= max(cpu for *_, cpu in parts) + 1e-9


def test_failures_before_the_reported_windows_count() -> None:
    windows = [sample_of(seconds=1.0, latencies=array("d", [0.1])) for _ in range(5)]
    windows[0].failures, windows[0].messages = {"INTERNAL": 2}, {"INTERNAL": "why"}
    whole = summarize(windows)
    assert (whole.seconds, len(whole.latencies)) == (3.0, 3)
    assert (whole.failures, whole.messages) == ({"INTERNAL": 2}, {"INTERNAL": "why"})


@given(st.integers(1, 50), st.integers(1, 8), st.sampled_from([1, 3, 24]))
def test_processes_share_a_load(requests: int, processes: int, chains: int) -> None:
    processes = min(processes, requests)
    load = Load(Target("h", 1, False, Protocol.GRPC), [[b"%d" % n] for n in range(chains)])
    jobs = divide(load, Level(24), Plan(requests=requests), processes)
    assert sum(job.concurrency for job in jobs) == 24
    assert sum(job.requests for job in jobs) == requests
    assert all(job.requests for job in jobs)  # 0 would have no end
    if chains == 24:
        assert all(len(job.chains) == job.concurrency for job in jobs)
        assert len({chain[0] for job in jobs for chain in job.chains}) == 24
    jobs = divide(load, Level(rate=100.0, poisson=False), Plan(), processes)
    times = sorted(
        time
        for job in jobs
        for time in islice(arrival_times(job.offset, job.rate, False, job.seed), 3)
    )
    assert times == pytest.approx([n / 100 for n in range(3 * processes)])


@pytest.mark.parametrize(
    ("level", "fields", "limit"),
    [
        (Level(4), {"cpu": [0.2, 0.95], "busy": [0.2, 0.95]}, "has used 95 % of a CPU"),
        (Level(4), {"cpu": [0.2], "busy": [0.95]}, "the CPUs of the client's machine were busy"),
        (Level(4), {"cpu": [0.2], "busy": [0.3]}, ""),
        (
            Level(rate=100.0),
            {"cpu": [0.2], "busy": [0.3], "lateness": [0.004], "latencies": [0.01]},
            "at least 4.0 ms late",
        ),
        (
            Level(rate=100.0),
            {"cpu": [0.2], "busy": [0.3], "lateness": [0.004], "latencies": [1.0]},
            "",
        ),
    ],
)
def test_it_says_when_the_client_was_the_limit(
    level: Level, fields: dict[str, object], limit: str
) -> None:
    found = Measurement(level, sample_of(**fields), True, 1)
    assert limit in found.client_limit
    assert bool(found.client_limit) == bool(limit)


def test_statistics_of_all_versions_are_added_up() -> None:
    version = {
        "inference_count": "8",
        "execution_count": 2,
        "batch_stats": [
            {"batch_size": size, "compute_input": {"ns": 1}, "compute_infer": {"ns": "5"}}
            for size in (1, 2)
        ],
        "inference_stats": {
            "success": {"count": "4", "ns": "100"},
            "fail": {"count": 1},
            "queue": {"count": 4, "ns": 8_000_000},
        },
    }
    counts = ServerCounts.of({"model_stats": [version, version]})
    assert (counts.requests, counts.failed, counts.inferences) == (8, 2, 16)
    assert counts.batch == 4
    assert counts.mean("queue") == pytest.approx(0.002)
    assert counts.executing == 24
    assert counts.since(counts) == ServerCounts()  # also the time of reading


def answer_requests(connection: socket.socket) -> None:
    while read_request(connection):
        connection.sendall(RESULT)


def load_of(url: str) -> Load:
    target = Target("127.0.0.1", int(url.rpartition(":")[2]), False, Protocol.HTTP)
    return Load(target, [[encode_post(url, "/", b"{}", {})]])


def test_what_was_measured_is_kept_if_a_worker_dies_afterwards() -> None:
    reads = []

    def read_counts() -> None:
        reads.append(1)
        if len(reads) == 2:  # before and after the only window
            os.kill(workers._processes[0].pid, signal.SIGKILL)

    plan = Plan(window=0.05, windows=1, warmup=0, processes=1)
    with serving(answer_requests) as url, Workers() as workers:
        measuring = Measuring(workers, plan, read_counts=read_counts)
        assert measuring.measure(load_of(url), Level(1)).sample.latencies
        assert measuring.measure(load_of(url), Level(1)).sample.latencies  # by another process


def test_an_interrupt_in_the_warm_up_starts_no_load() -> None:
    reads: list[None] = []
    plan = Plan(requests=5, processes=1)
    with serving(answer_requests) as url, Workers() as workers:
        measuring = Measuring(
            workers, plan, read_counts=lambda: reads.append(None), is_interrupted=lambda: True
        )
        found = measuring.measure(load_of(url), Level(1))
    assert found.interrupted
    assert not found.sample.seconds
    assert not reads
