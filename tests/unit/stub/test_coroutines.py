"""The event loop of a model whose `execute` is a coroutine function."""

from __future__ import annotations

import gc
import threading

import pytest

from stub.coroutines import CoroutineRunner
from tests.conftest import DEADLINE


def test_a_loop_that_is_closed_may_be_stopped_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pb_utils._event_loop._STOP_SECONDS", 0.01)
    closed, free = threading.Event(), threading.Event()

    def stopped() -> None:  # the thread has closed the loop, and still runs
        closed.set()
        free.wait(2 * DEADLINE)  # longer than the test waits

    runner = CoroutineRunner(lambda thread: None, stopped)
    runner.get_loop()
    try:
        runner.stop()
        assert closed.wait(DEADLINE)
        runner.stop()
    finally:
        free.set()
    gc.collect()  # reports coroutines that nothing has awaited
