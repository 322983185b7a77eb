"""Watches memory and file descriptors of a host under a mixed load.

    python -m benchmarks.memory [--minutes 10]

Prints a sample every ten seconds, and the growth over the last two thirds of the time.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path

import numpy as np
import psutil

from benchmarks.mixture import MIXTURE, SECONDS
from benchmarks.page import table_row
from benchmarks.servers import RunningServer, ours

REPOSITORY = Path(__file__).resolve().with_name("repository")
EVERY = 10.0  # seconds between samples


@dataclass(frozen=True)
class Sample:
    """Minutes since the start, megabytes, and numbers of file descriptors.

    PSS (proportional set size) is a process's share of all memory that it has mapped, RSS all of
    it.
    """

    minutes: float
    host_pss: float
    host_rss: float
    stubs_pss: float
    stubs_rss: float
    host_descriptors: float
    stubs_descriptors: float

    @classmethod
    def of(cls, server: RunningServer, minutes: float) -> Sample:
        host = psutil.Process(server.pid)
        stubs = host.children(recursive=True)
        mine, *others = (each.memory_full_info() for each in (host, *stubs))
        return cls(
            minutes,
            mine.pss / 1e6,
            mine.rss / 1e6,
            sum(each.pss for each in others) / 1e6,
            sum(each.rss for each in others) / 1e6,
            host.num_fds(),
            sum(stub.num_fds() for stub in stubs),
        )


HEADINGS = (
    *("minutes", "host MB PSS", "host MB RSS", "stubs MB PSS", "stubs MB RSS"),
    *("host descriptors", "stubs' descriptors"),
)


def slope(minutes: Sequence[float], values: Sequence[float]) -> float:
    """Growth per minute over the last two thirds of the time, by least squares."""
    late = sum(minute >= minutes[-1] / 3 for minute in minutes)
    return float(np.polyfit(minutes[-late:], values[-late:], 1)[0])


def summary(samples: Sequence[Sample]) -> list[list[str]]:
    """Rows: name, value after a third of the time, last value, maximum, growth per minute."""
    minutes = [sample.minutes for sample in samples]
    third = next(index for index, minute in enumerate(minutes) if minute >= minutes[-1] / 3)
    rows = []
    for name, field in zip(HEADINGS[1:], fields(Sample)[1:], strict=True):
        values = [getattr(sample, field.name) for sample in samples]
        shown = (values[third], values[-1], max(values))
        rows.append([name, *(f"{value:.1f}" for value in shown), f"{slope(minutes, values):+.3f}"])
    return rows


class Clients:
    """Runs each load in a thread until `end`. Failures are counted, and the load continues."""

    def __init__(self, server: RunningServer) -> None:
        self.done: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._send_request, args=(name, server), daemon=True)
            for name in MIXTURE
        ]
        for thread in self._threads:
            thread.start()

    def _send_request(self, name: str, server: RunningServer) -> None:
        while not self._stop.is_set():
            steps = MIXTURE[name](server)
            try:
                for _ in steps:
                    self.done[name] += 1
                    if self._stop.is_set():
                        break
            except Exception as error:  # every failure is reported at the end of the run
                self.failures[f"{name}: {error or repr(error)}"] += 1
                self._stop.wait(1)  # a server that has ended fails at once
            finally:
                steps.close()

    def end(self) -> None:
        """Stops each thread after its current step."""
        self._stop.set()
        for thread in self._threads:
            thread.join(2 * SECONDS)


def watch(minutes: float) -> tuple[list[Sample], Clients]:
    """Takes and prints samples; returns them and the clients, which have ended."""
    print(f"{table_row(HEADINGS)}\n|{'---|' * len(HEADINGS)}")
    samples: list[Sample] = []
    with ours(REPOSITORY) as server:
        clients = Clients(server)
        begun, pause = time.monotonic(), threading.Event()
        while not samples or samples[-1].minutes < minutes:
            due = begun + min(minutes * 60, (len(samples) + 1) * EVERY)
            pause.wait(max(0.0, due - time.monotonic()))
            samples.append(Sample.of(server, (time.monotonic() - begun) / 60))
            print(table_row([f"{value:.1f}" for value in astuple(samples[-1])]), flush=True)
        clients.end()
    return samples, clients


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10)
    samples, clients = watch(parser.parse_args().minutes)
    print("\n| what | after a third | at the end | most | per minute |\n|---|---|---|---|---|")
    for row in summary(samples):
        print(table_row(row))
    print()
    for name in MIXTURE:
        print(f"{clients.done[name]:9,} x {name}")
    if clients.failures:
        raise SystemExit("\n".join(f"{n} x {what}" for what, n in clients.failures.items()))


if __name__ == "__main__":
    main()
