"""The timer thread."""

from __future__ import annotations

import multiprocessing
import threading
from functools import partial
from typing import Any

from pb_utils import _timer
from pb_utils._timer import Timer
from tests.conftest import DEADLINE

NEVER = 10 * DEADLINE


def test_callbacks_run_in_the_order_of_their_times() -> None:
    timer, over = Timer(), threading.Event()
    made: list[object] = []
    calls = [("third", -NEVER), ("first", -3 * NEVER), ("second", -2 * NEVER)]
    with timer._changed:  # holds the lock until all callbacks are scheduled
        for name, seconds in calls:
            timer.call_later(seconds, partial(made.append, name))
        timer.call_later(0.0, over.set)
    assert over.wait(DEADLINE)
    assert made == ["first", "second", "third"]


def test_cancelled_callback_does_not_run() -> None:
    timer, over = Timer(), threading.Event()
    made: list[object] = []
    with timer._changed:
        stopped = timer.call_later(0.0, lambda: made.append("stopped"))
        timer.call_later(0.001, over.set)
        stopped.cancel()
    assert over.wait(DEADLINE)
    assert made == []
    assert stopped.is_done()


def test_earlier_callback_interrupts_the_wait_for_a_later_one() -> None:
    timer, over = Timer(), threading.Event()
    timer.call_later(NEVER, over.clear)
    timer.call_later(0.0, over.set)
    assert over.wait(DEADLINE)


def test_one_thread_runs_all_callbacks_of_the_module() -> None:
    threads: set[threading.Thread] = set()
    over = threading.Event()
    for _ in range(100):
        _timer.call_later(0.0, lambda: threads.add(threading.current_thread()))
    _timer.call_later(0.001, over.set)
    assert over.wait(DEADLINE)
    (thread,) = threads
    assert (thread.name, thread.daemon) == ("pbhost-timer", True)


def test_cancelled_callbacks_are_removed_before_their_time() -> None:
    timer = Timer()
    for _ in range(10_000):
        timer.call_later(NEVER, lambda: None).cancel()
    assert len(timer) < 200


def test_removal_keeps_callbacks_that_are_not_cancelled() -> None:
    timer, over = Timer(), threading.Event()
    made: list[object] = []
    with timer._changed:
        for number in range(300):
            alarm = timer.call_later(0.0, partial(made.append, number))
            if number % 2:
                alarm.cancel()
        timer.call_later(0.001, over.set)
    assert over.wait(DEADLINE)
    assert made == list(range(0, 300, 2))


def test_callback_that_raises_does_not_end_the_timer() -> None:
    timer, over = Timer(), threading.Event()
    seen: list[object] = []
    before = threading.excepthook

    def note(arguments: threading.ExceptHookArgs) -> None:
        seen.append(arguments.exc_type)

    threading.excepthook = note
    try:
        timer.call_later(0.0, lambda: [][0])
        thread = timer._thread
        assert thread is not None
        thread.join(DEADLINE)
    finally:
        threading.excepthook = before
    timer.call_later(0.0, over.set)
    assert over.wait(DEADLINE)
    assert seen == [IndexError]


def _rings_in_child(result: Any) -> None:
    over = threading.Event()
    _timer.call_later(0.0, over.set)
    result.put(over.wait(DEADLINE))


def test_a_forked_child_has_a_timer_of_its_own() -> None:
    first = threading.Event()
    _timer.call_later(0.0, first.set)
    assert first.wait(DEADLINE)
    context = multiprocessing.get_context("fork")
    result = context.SimpleQueue()
    child = context.Process(target=_rings_in_child, args=(result,))
    child.start()
    child.join(2 * DEADLINE)
    assert child.exitcode == 0
    assert result.get() is True
