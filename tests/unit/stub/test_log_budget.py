"""The log lines that a stub may send."""

from __future__ import annotations

import pytest

from stub.wire.log_budget import (
    BURST_SECONDS,
    CHARACTERS_PER_SECOND,
    LINES_PER_SECOND,
    LogBudget,
)


class Clock:
    """A clock that stands still until it is moved."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def budget(clock: Clock) -> LogBudget:
    return LogBudget(clock)


def test_a_burst_is_admitted_and_no_more(budget: LogBudget) -> None:
    burst = LINES_PER_SECOND * BURST_SECONDS
    assert [budget.admit(10) for _ in range(burst + 3)] == [True] * burst + [False] * 3


def test_the_budget_refills_with_time(budget: LogBudget, clock: Clock) -> None:
    while budget.admit(1):
        pass
    clock.now += 0.5
    assert sum(budget.admit(1) for _ in range(LINES_PER_SECOND)) == LINES_PER_SECOND // 2


def test_silence_saves_up_a_burst_and_no_more(budget: LogBudget, clock: Clock) -> None:
    clock.now += 3600
    burst = LINES_PER_SECOND * BURST_SECONDS
    assert sum(budget.admit(1) for _ in range(2 * burst)) == burst


def test_long_lines_use_up_the_characters(budget: LogBudget, clock: Clock) -> None:
    long = CHARACTERS_PER_SECOND
    assert [budget.admit(long) for _ in range(7)] == [True] * BURST_SECONDS + [False] * 2
    assert not budget.admit(1)
    clock.now += 1
    assert budget.admit(long)


def test_dropped_lines_are_reported_once_per_second(budget: LogBudget, clock: Clock) -> None:
    assert budget.report() == ""
    while budget.admit(1):
        pass
    assert budget.report() == (
        "dropped 1 log lines: an instance may log 2000 lines and 1 MiB of text per second"
    )
    for _ in range(10):
        budget.admit(CHARACTERS_PER_SECOND * 6)
        assert budget.report() == ""
    clock.now += 1
    assert budget.report().startswith("dropped 10 log lines:")
    assert budget.report(at_once=True) == ""


def test_the_last_dropped_lines_can_be_reported_at_once(budget: LogBudget) -> None:
    while budget.admit(1):
        pass
    budget.report()
    budget.admit(1)
    assert budget.report() == ""
    assert budget.report(at_once=True).startswith("dropped 1 log lines:")


def test_the_host_allows_twice_as_much(clock: Clock) -> None:
    budget = LogBudget(clock, factor=2)
    most = 2 * LINES_PER_SECOND * BURST_SECONDS
    assert [budget.admit(1) for _ in range(most + 1)].count(True) == most
    clock.now += 1
    assert [budget.admit(1) for _ in range(most)].count(True) == 2 * LINES_PER_SECOND
    clock.now += BURST_SECONDS
    assert budget.admit(2 * CHARACTERS_PER_SECOND * BURST_SECONDS)
    assert not budget.admit(1)
    assert "an instance may log 4000 lines and 2 MiB of text per second" in budget.report()
