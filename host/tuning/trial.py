"""Trials: a model is loaded with other settings, and measured until a goal is reached or not."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from host.errors import HostError
from host.load_generator.measurement import (
    Level,
    Load,
    Measurement,
    Measuring,
    Plan,
    ServerCounts,
)
from host.load_generator.workers import Workers
from host.tuning.private_server import PrivateServer
from host.tuning.search import highest_load
from host.tuning.settings import Settings

PLAN = Plan(window=0.4, windows=5, stability=0.05, warmup=0.3, timeout=30.0)
_BUSY = 0.85
_LEAST_CONCURRENCY, _MOST_CONCURRENCY = 4, 512
_MOST_NOISE = 0.15
_REPEATS = 2  # of a trial that was not stable: what disturbs it only makes it slower


@dataclass(frozen=True)
class Goal:
    """What to reach: most requests per second, with a quantile of the latency at most `seconds`.

    `quantile`: 0 for the rate alone.
    """

    quantile: float = 0.0
    seconds: float = 0.0

    def is_met(self, found: Measurement) -> bool:
        """Whether the latency is short enough."""
        return not self.quantile or found.latency(self.quantile) <= self.seconds


@dataclass(frozen=True)
class Trial:
    """What was measured with some settings. `busy`: shares of the time in which instances worked,
    and in which the server process had a CPU. `met`: whether the goal's latency was reached.
    """

    settings: Settings
    measured: Measurement
    met: bool
    goal: Goal
    noise: float
    busy_instances: float
    busy_host: float

    @property
    def score(self) -> float:
        """The rate; a negative number, if the latency is too long."""
        if self.met:
            return self.rate
        return -self.measured.latency(self.goal.quantile)

    @property
    def rate(self) -> float:
        """Requests per second."""
        return self.measured.rate

    @property
    def bottleneck(self) -> str:
        """What limits the rate: client, host, model, queue, or nothing that is known."""
        if self.measured.client_limit:
            return "client"
        if self.busy_host >= _BUSY:
            return "host"
        if self.busy_instances >= _BUSY:
            return "model"
        server = self.measured.server
        if server is not None and server.mean("queue") > server.mean("compute_infer"):
            return "queue"
        return "host" if self.busy_host > self.busy_instances else "model"


class Trials:
    """Makes trials on one server, and tells `report` about each.

    `has_time` says whether another trial may begin.
    """

    def __init__(
        self,
        server: PrivateServer,
        workers: Workers,
        load: Load,
        config: Mapping[str, Any],
        goal: Goal,
        report: Callable[[Settings, Trial | str], None],
        has_time: Callable[[], bool],
    ) -> None:
        self._server = server
        self._load = load
        self._config = config
        self._goal = goal
        self._report = report
        self._has_time = has_time
        self._model = str(config["name"])
        self._measuring = Measuring(
            workers, PLAN, read_counts=self._read_counts, is_interrupted=lambda: not has_time()
        )
        self._concurrency = 0

    def _read_counts(self) -> ServerCounts:
        counts = ServerCounts.of(self._server.client.read_statistics(self._model, ""))
        return replace(counts, cpu=self._server.read_cpu_time())

    def measure(self, settings: Settings) -> Trial | None:
        """Makes a trial; None if the settings do not work, or the time is over."""
        if not self._has_time():
            return None
        try:
            self._server.load(settings.apply(self._config))
            trial = self._measure_loaded(settings)
            for _ in range(_REPEATS):
                if trial.measured.stable or not self._has_time():
                    break
                trial = max(trial, self._measure_loaded(settings), key=lambda one: one.score)
        except HostError as error:
            self._report(settings, error.message)
            return None
        if trial.measured.failed or not trial.measured.sample.latencies:
            messages = [*trial.measured.sample.messages.values(), "no request was successful"]
            self._report(settings, messages[0])
            return None
        if trial.measured.interrupted:
            return None
        self._report(settings, trial)
        return trial

    def _measure_loaded(self, settings: Settings) -> Trial:
        return self._find_rate(settings) if self._goal.quantile else self._saturate(settings)

    def _saturate(self, settings: Settings) -> Trial:
        """Keeps all instances busy, each with its next batch waiting."""
        wanted = 2 * settings.instances * settings.batch
        return self._try(settings, min(max(wanted, _LEAST_CONCURRENCY), _MOST_CONCURRENCY))

    def _find_rate(self, settings: Settings) -> Trial:
        """Finds the concurrency with the highest rate that meets the goal."""
        start = self._concurrency or settings.instances
        best = highest_load(
            lambda concurrency: self._try(settings, concurrency),
            start, _MOST_CONCURRENCY, self._has_time,
        )  # fmt: skip
        if best.met:
            self._concurrency = best.measured.level.concurrency
        return best

    def _try(self, settings: Settings, concurrency: int) -> Trial:
        measured = self._measuring.measure(self._load, Level(concurrency))
        server = measured.server or ServerCounts()
        passed = server.at or 1
        return Trial(
            settings,
            measured,
            self._goal.is_met(measured),
            self._goal,
            _noise_of(measured),
            min(1.0, server.executing / settings.instances / passed),
            min(1.0, server.cpu / passed),
        )


def _noise_of(measured: Measurement) -> float:
    """The share by which the rate may be wrong."""
    count = len(measured.sample.latencies)
    statistical = 1 / math.sqrt(count) if count else 1.0
    return min(_MOST_NOISE, max(statistical, 0.0 if measured.stable else PLAN.stability))


def default_most_instances() -> int:
    """The instances that are tried at most by default."""
    return max(16, 4 * len(os.sched_getaffinity(0)))
