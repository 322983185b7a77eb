"""Starts of a step that wait for their turn."""

from __future__ import annotations

import logging
from functools import partial

import pytest

from host.ensembles.inflight_limiter import InflightLimiter, Permit
from tests.unit.host.scheduling.fake_instances import TICK, Clock

PATIENCE = 300 * 10**9 // TICK


class Starts:
    """The steps that have started, in order."""

    def __init__(self, most: int) -> None:
        self.clock = Clock()
        self.limiter = InflightLimiter("e", most, self.clock)
        self.made: list[int] = []

    def enter(self, number: int, step: int = 0) -> Permit:
        permit = Permit(step, partial(self.made.append, number))
        self.limiter.request_permit(permit)
        return permit


def test_no_more_steps_than_allowed_run_and_the_oldest_is_next() -> None:
    starts = Starts(2)
    permits = [starts.enter(number) for number in range(5)]
    assert starts.made == [0, 1]
    starts.limiter.release_permit(permits[1])
    assert starts.made == [0, 1, 2]
    starts.limiter.release_permit(permits[0])
    starts.limiter.release_permit(permits[2])
    assert starts.made == [0, 1, 2, 3, 4]
    for permit in permits[3:]:
        starts.limiter.release_permit(permit)
    starts.enter(5)
    assert starts.made[-1] == 5
    assert starts.clock.armed == 0


def test_each_step_has_its_own_limit() -> None:
    starts = Starts(1)
    starts.enter(0, step=0)
    starts.enter(1, step=1)
    starts.enter(2, step=0)
    assert starts.made == [0, 1]


def test_one_that_is_given_up_while_it_waits_is_never_started() -> None:
    starts = Starts(1)
    first, second, third = (starts.enter(number) for number in range(3))
    starts.limiter.release_permit(second)
    starts.limiter.release_permit(first)
    assert starts.made == [0, 2]
    starts.limiter.release_permit(third)
    assert starts.clock.armed == 0


def test_thousands_that_fail_at_once_do_not_pile_up() -> None:
    starts = Starts(1)
    first = starts.enter(-1)
    permits: list[Permit] = []

    def fail(number: int) -> None:
        starts.made.append(number)
        starts.limiter.release_permit(permits[number])

    for number in range(5000):
        permits.append(Permit(0, partial(fail, number)))
        starts.limiter.request_permit(permits[-1])
    starts.limiter.release_permit(first)
    assert starts.made == [-1, *range(5000)]


def test_after_five_minutes_one_goes_ahead_and_the_log_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    starts = Starts(1)
    starts.enter(0)
    starts.clock.advance(5)
    waiting = starts.enter(1)
    with caplog.at_level(logging.ERROR, "pbhost"):
        starts.clock.ticks += PATIENCE - 1
        starts.clock.run_due()
        assert starts.made == [0]
        starts.clock.ticks += 1
        starts.clock.run_due()
    assert starts.made == [0, 1]
    assert "a request of step 0 waited 300 s for one of 1 running requests" in caplog.text
    starts.enter(2)
    starts.limiter.release_permit(waiting)
    assert starts.made == [0, 1]  # the step that does not end still runs
