"""The times at which requests are due in open loop."""

from __future__ import annotations

import select
from itertools import islice, pairwise
from time import perf_counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from host.load_generator.schedule import Timer, arrival_times

START = st.floats(0, 1e6)
RATE = st.floats(0.1, 1e5)


@given(START, RATE)
def test_constant_times_do_not_drift(start: float, rate: float) -> None:
    times = list(islice(arrival_times(start, rate, False, 0), 1000))
    assert times[0] == start
    assert times[-1] == pytest.approx(start + 999 / rate)


@given(START, RATE, st.integers(0, 100))
def test_times_of_a_poisson_process_rise_and_are_the_same_for_a_seed(
    start: float, rate: float, seed: int
) -> None:
    times = list(islice(arrival_times(start, rate, True, seed), 50))
    assert times == list(islice(arrival_times(start, rate, True, seed), 50))
    assert all(before <= after for before, after in pairwise([start, *times]))


def test_a_poisson_process_has_its_rate_and_pauses_of_all_lengths() -> None:
    times = list(islice(arrival_times(0.0, 100.0, True, 1), 20_000))
    assert times[-1] == pytest.approx(200, rel=0.05)
    pauses = [after - before for before, after in pairwise(times)]
    longer = sum(pause > 0.02 for pause in pauses) / len(pauses)
    assert longer == pytest.approx(0.1353, abs=0.01)  # exp(-2)


def test_the_timer_is_readable_when_its_time_has_come() -> None:
    timer = Timer()
    try:
        assert not select.select([timer.descriptor], [], [], 0)[0]
        due = perf_counter() + 0.0005
        timer.set(due)
        assert select.select([timer.descriptor], [], [], 60)[0]
        assert perf_counter() >= due
        timer.acknowledge()
        assert not select.select([timer.descriptor], [], [], 0)[0]
        timer.set(0.0)  # it has passed
        assert select.select([timer.descriptor], [], [], 60)[0]
    finally:
        timer.close()
