"""BLS requests of a stub: joined in bursts, with one thread that reads their responses."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator

import pytest

from stub.bls_exchange import BlsReader, BlsWaiter


@pytest.fixture
def reader() -> Iterator[BlsReader]:
    event = os.eventfd(0)
    made = BlsReader(event, lambda: None, lambda: None)
    yield made
    for descriptor in (event, *made.descriptors):
        os.close(descriptor)


def test_the_service_thread_reads_until_waiters_without_a_reader_have_their_responses(
    reader: BlsReader,
) -> None:
    async def wait_while_another_request_ends() -> None:
        reader.set_loop_thread(threading.get_ident())
        assert reader.attach_running_loop()
        reader.add_unattended()  # for which the service thread reads
        waiter = BlsWaiter()
        assert reader._begin_wait(waiter)  # this thread sleeps, and the event loop with it
        reader.remove_unattended()
        assert reader.choose_thread()
        reader.notify(waiter)
        reader._end_wait(waiter)
        assert not reader.choose_thread()
        reader.detach_loop()

    asyncio.run(wait_while_another_request_ends())


def test_a_waiter_reads_if_no_other_thread_does(reader: BlsReader) -> None:
    waiter = BlsWaiter()
    assert not reader._begin_wait(waiter)
    assert not reader.choose_thread()
    reader._end_wait(waiter)
