"""Measures a load in windows until three windows are alike, and says what was the limit."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from host.errors import HostError
from host.load_generator.job import Job, Target
from host.load_generator.workers import Sample, Workers

_ALIKE = 3  # windows
_SLICE_SECONDS = 0.25  # between two looks at the workers
_LAST_LOOK_SECONDS = 0.02  # if a number of requests ends the load
_LEAST_REQUESTS = 10  # in a window, which is up to ten times as long for them
_LONGEST = 10
_MOST_PROCESSES = 256
_BUSY = 0.9  # of one CPU
_LATE_SECONDS, _LATE_SHARE = 0.001, 0.1

QUANTILES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99, "p99.9": 0.999}


@dataclass(frozen=True)
class Level:
    """A load: `concurrency` requests in flight, or `rate` requests per second in open loop."""

    concurrency: int = 0
    rate: float = 0.0
    poisson: bool = True

    def __str__(self) -> str:
        return f"concurrency {self.concurrency}" if self.concurrency else f"rate {self.rate:g}"


@dataclass(frozen=True)
class Plan:
    """How long to measure. Times are in seconds.

    `windows`: at most this many, of which three must differ by less than the share `stability`.
    `requests`: if not 0, measure this many requests instead. `processes`: 0 for as many as needed.
    """

    window: float = 2.0
    windows: int = 10
    stability: float = 0.1
    warmup: float = 1.0
    requests: int = 0
    processes: int = 0
    timeout: float = 60.0
    seed: int = 0


@dataclass(frozen=True)
class Load:
    """What is sent, and where. `chains` and `ends` are as in `job.Job`."""

    target: Target
    chains: Sequence[Sequence[bytes]]
    ends: Sequence[bytes] = ()


@dataclass(frozen=True)
class ServerCounts:
    """The statistics of a model: numbers of requests, and nanoseconds in all of them.

    `executing`: nanoseconds in which instances executed batches. `cpu`: CPU time of the server
    process in nanoseconds, if it is known. `at`: when this was read.
    """

    requests: int = 0
    failed: int = 0
    inferences: int = 0
    executions: int = 0
    queue: int = 0
    compute_input: int = 0
    compute_infer: int = 0
    compute_output: int = 0
    executing: int = 0
    cpu: int = 0
    at: int = 0

    @classmethod
    def of(cls, statistics: dict[str, Any]) -> ServerCounts:
        """Adds the versions in the answer to a request for statistics up."""
        counts = [0] * 9
        for one in statistics.get("model_stats", []):
            stats = one.get("inference_stats", {})

            def of(name: str, field: str, stats: dict[str, Any] = stats) -> int:
                return int(stats.get(name, {}).get(field, 0))

            row = (
                of("success", "count"),
                of("fail", "count"),
                int(one.get("inference_count", 0)),
                int(one.get("execution_count", 0)),
                of("queue", "ns"),
                of("compute_input", "ns"),
                of("compute_infer", "ns"),
                of("compute_output", "ns"),
                sum(
                    int(batch.get(name, {}).get("ns", 0))
                    for batch in one.get("batch_stats", [])
                    for name in ("compute_input", "compute_infer", "compute_output")
                ),
            )
            counts = [before + more for before, more in zip(counts, row, strict=True)]
        return replace(cls(*counts), at=time.perf_counter_ns())

    def since(self, before: ServerCounts) -> ServerCounts:
        """Returns the difference."""
        return ServerCounts(
            *(getattr(self, name) - getattr(before, name) for name in self.__dataclass_fields__)
        )

    def mean(self, name: str) -> float:
        """Returns the mean seconds of a request; NaN without one."""
        return getattr(self, name) / 1e9 / self.requests if self.requests else math.nan

    @property
    def batch(self) -> float:
        """The mean number of inferences in an execution; NaN without one."""
        return self.inferences / self.executions if self.executions else math.nan


@dataclass(frozen=True)
class Measurement:
    """What was measured at one level.

    `sample`: of the reported windows, with the failures of all. `stable`: the windows were alike.
    `server`: what the server says about the same time, if it was
    asked. `processes`: of the load generator.
    """

    level: Level
    sample: Sample
    stable: bool
    processes: int
    server: ServerCounts | None = None
    interrupted: bool = False

    @property
    def rate(self) -> float:
        """Successful requests per second."""
        return self.sample.rate

    @property
    def failed(self) -> int:
        """The number of failed requests."""
        return sum(self.sample.failures.values())

    def latency(self, share: float) -> float:
        """Returns a quantile of the latency in seconds; NaN without a request."""
        return quantile(self.sample.latencies, share)

    @property
    def client_limit(self) -> str:
        """Why the client may have been the limit; "" if it was not."""
        sample = self.sample
        if sample.cpu and max(sample.cpu) >= _BUSY:
            return f"a process of the client has used {100 * max(sample.cpu):.0f} % of a CPU"
        if sample.busy and max(sample.busy) >= _BUSY:
            return "the CPUs of the client's machine were busy"
        if self.level.rate:
            late = quantile(sample.lateness, 0.99)
            if late > max(_LATE_SECONDS, _LATE_SHARE * self.latency(0.5)):
                return f"1 % of the requests were at least {1000 * late:.1f} ms late in the client"
        return ""


def quantile(values: Sequence[float], share: float) -> float:
    """Returns a quantile; NaN without values."""
    return float(np.quantile(np.asarray(values), share)) if len(values) else math.nan


def mean(values: Sequence[float]) -> float:
    """Returns the mean; NaN without values."""
    return float(np.mean(np.asarray(values))) if len(values) else math.nan


def are_alike(windows: Sequence[tuple[float, float]], stability: float) -> bool:
    """Whether the last three windows are alike in their rate and in their mean latency.

    None may differ from the mean of the three by more than the share `stability`.
    """
    last = windows[-_ALIKE:]
    if len(last) < _ALIKE:
        return False
    for column in zip(*last, strict=True):
        middle = sum(column) / _ALIKE
        if not all(abs(value - middle) <= stability * middle for value in column):
            return False
    return True


def summarize(windows: Sequence[Sample]) -> Sample:
    """Returns the last three windows as one sample, with the failures of all windows."""
    sample, whole = Sample.joined(windows[-_ALIKE:]), Sample.joined(windows)
    sample.failures, sample.messages = whole.failures, whole.messages
    return sample


@dataclass
class Progress:
    """What the live line shows."""

    level: Level
    phase: str
    sample: Sample = field(default_factory=Sample)


class Measuring:
    """Measures levels of a load, one after the other, with the same processes.

    `observe` is called about four times a second; `read_counts` asks the server for its statistics.
    `is_interrupted` says whether to end at once, with what there is.
    """

    def __init__(
        self,
        workers: Workers,
        plan: Plan,
        observe: Callable[[Progress], None] = lambda progress: None,
        read_counts: Callable[[], ServerCounts | None] = lambda: None,
        is_interrupted: Callable[[], bool] = lambda: False,
    ) -> None:
        self._workers = workers
        self._plan = plan
        self._observe = observe
        self._read_counts = read_counts
        self._is_interrupted = is_interrupted
        self._processes = plan.processes or 1

    def measure(self, load: Load, level: Level) -> Measurement:
        """Measures one level; with more processes if they are not fixed, and one is the limit.

        Raises HostError if no server answers.
        """
        while True:
            most = _most_processes(level, self._plan)
            processes = min(self._processes, most)
            found = self._measure(load, level, processes)
            more = min(2 * processes, _cpu_count(), most)
            enough = max(found.sample.cpu, default=0.0) < _BUSY or more <= processes
            if self._plan.processes or enough or found.interrupted:
                return found
            self._processes = more

    def _measure(self, load: Load, level: Level, processes: int) -> Measurement:
        plan, workers = self._plan, self._workers
        if plan.requests:
            if plan.warmup:
                workers.start(divide(load, level, replace(plan, requests=0), processes))
                self._wait(Progress(level, "warm-up"), plan.warmup)
                workers.stop()  # so that the server counts no request of it below
                if self._is_interrupted():
                    return Measurement(level, Sample(), False, processes, interrupted=True)
            counts = self._read_counts()
            workers.start(divide(load, level, plan, processes))
            sample = self._wait(Progress(level, f"{plan.requests} requests"), math.inf)
            server = self._since(counts)
            self._end_load()
            if sample.ended:  # without the time of connecting, and until the last look
                sample.seconds = sample.finished - sample.began
            return Measurement(level, sample, True, processes, server, self._is_interrupted())
        workers.start(divide(load, level, plan, processes))
        self._wait(Progress(level, "warm-up"), plan.warmup)
        windows: list[Sample] = []
        edges = [self._read_counts()]
        stable = False
        while len(windows) < plan.windows and not stable and not self._is_interrupted():
            progress = Progress(level, f"window {len(windows) + 1}")
            windows.append(self._wait(progress, plan.window, _LEAST_REQUESTS))
            edges.append(self._read_counts())
            figures = [(one.rate, mean(one.latencies)) for one in windows]
            stable = are_alike(figures, plan.stability)
            if not plan.processes and max(windows[-1].cpu) >= _BUSY and len(windows) == 1:
                if processes < min(_cpu_count(), _most_processes(level, plan)):
                    break  # this is measured again, with more processes
        self._end_load()
        first, last = edges[max(0, len(windows) - _ALIKE)], edges[-1]
        server = None if first is None or last is None else last.since(first)
        sample = summarize(windows)
        return Measurement(level, sample, stable, processes, server, self._is_interrupted())

    def _end_load(self) -> None:
        """Ends a load that was measured, which a worker that fails now does not change."""
        with suppress(HostError):  # the next load starts other processes
            self._workers.stop()

    def _since(self, before: ServerCounts | None) -> ServerCounts | None:
        now = self._read_counts()
        return None if now is None or before is None else now.since(before)

    def _wait(self, progress: Progress, seconds: float, least: int = 0) -> Sample:
        """Returns what is measured in this time, or until the load ends or is interrupted."""
        parts: list[Sample] = []
        passed, ended = 0.0, 0
        pause = _LAST_LOOK_SECONDS if math.isinf(seconds) else _SLICE_SECONDS
        while not self._is_interrupted():
            time.sleep(max(0.0, min(pause, seconds - passed)))
            part = self._workers.cut()
            parts.append(part)
            passed += part.seconds
            ended += len(part.latencies) + sum(part.failures.values())
            progress.sample = part
            self._observe(progress)
            if part.ended or passed >= seconds and (ended >= least or passed >= _LONGEST * seconds):
                break
            if passed >= seconds:
                time.sleep(_LAST_LOOK_SECONDS)
        return Sample.joined(parts)


def _cpu_count() -> int:
    return len(os.sched_getaffinity(0))


def _most_processes(level: Level, plan: Plan) -> int:
    """Each process has one of the requests in flight, and of the number of requests, at least."""
    return min(one for one in (_MOST_PROCESSES, level.concurrency, plan.requests) if one)


def divide(load: Load, level: Level, plan: Plan, processes: int) -> list[Job]:
    """Divides a load among processes."""
    jobs = []
    for number in range(processes):
        chains = [list(chain) for chain in load.chains]
        if len(chains) > 1:  # one for each sender
            chains = chains[number::processes]
        jobs.append(
            Job(
                load.target,
                chains,
                list(load.ends[number::processes]),
                concurrency=_part(level.concurrency, number, processes),
                rate=level.rate / processes,
                offset=number / level.rate if level.rate and not level.poisson else 0.0,
                poisson=level.poisson,
                seed=plan.seed + number,
                requests=_part(plan.requests, number, processes),
                timeout=plan.timeout,
            )
        )
    return jobs


def _part(whole: int, number: int, processes: int) -> int:
    """The share of a process in a number."""
    return whole // processes + (number < whole % processes)
