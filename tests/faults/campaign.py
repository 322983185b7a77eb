"""Runs faults beside a witness and checks what holds for every one of them."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tests.conftest import DEADLINE, RunningHost, wait_until
from tests.faults.usage import Usage
from tests.faults.witness import Testimony, Witness

SCALE = int(os.environ.get("PBHOST_FAULTS_SCALE", "0"))
"""Repetitions of faults in `make faults`; 0: once, without a limit on the witness's time."""
REPEATS = max(1, SCALE)
LONGEST_P99 = 0.05
"""Seconds that the witness may wait in `make faults`, at the 99th percentile."""
GIVE_BACK_SECONDS = 5.0 if SCALE else DEADLINE
"""Seconds after a fault in which the host gives everything back."""


@dataclass(frozen=True)
class Row:
    """What is reported of one fault. `growth` is the host's memory after it, in bytes."""

    name: str
    seconds: float
    requests: int
    p99: float
    longest: float
    growth: int


rows: list[Row] = []
"""The report of this session, in the order in which the faults happened."""


@contextmanager
def fault(name: str, host: RunningHost) -> Iterator[None]:
    """Checks what holds for every fault, which happens in the body of the statement.

    The host serves the witness all the time, and holds afterwards what it held before. A body that
    replaces a process of the host returns when the new one serves.
    """
    before = Usage.of(host)
    with Witness(host) as witness:
        started = time.monotonic()
        yield
        seconds = time.monotonic() - started
        testimony = witness.testify()
    _report(name, seconds, testimony, before, host)
    assert not testimony.errors, f"{len(testimony.errors)}, the first: {testimony.errors[0]}"
    assert testimony.waits and testimony.live_waits
    left: list[str] = []

    def given_back() -> bool:
        nonlocal left
        left = Usage.of(host).beyond(before)
        return not left

    wait_until(given_back, f"the host to give back after {name!r}", GIVE_BACK_SECONDS, lambda: left)
    for line in host.output.splitlines():
        if not line.startswith("["):  # lines of stubs: a process that its model breaks may complain
            assert "unexpected failure" not in line and "Traceback" not in line, host.output
    if SCALE:
        assert testimony.p99 <= LONGEST_P99, f"p99 {testimony.p99:.3f} s"


def _report(
    name: str, seconds: float, testimony: Testimony, before: Usage, host: RunningHost
) -> None:
    growth = Usage.of(host).memory - before.memory
    rows.append(Row(name, seconds, len(testimony.waits), testimony.p99, testimony.longest, growth))


def format_table() -> Iterator[str]:
    """The lines of the report."""
    yield f"{'fault':60} {'seconds':>8} {'requests':>8} {'p99 ms':>8} {'max ms':>8} {'MiB':>6}"
    for row in rows:
        yield (
            f"{row.name:60} {row.seconds:8.1f} {row.requests:8} {row.p99 * 1e3:8.1f}"
            f" {row.longest * 1e3:8.1f} {row.growth >> 20:6}"
        )
