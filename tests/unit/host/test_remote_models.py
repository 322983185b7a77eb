"""Models that other processes serve: how they are reached, and how they are among the others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import aclosing
from typing import Any

import pytest

from host.config.schema import new_config
from host.errors import HostError
from host.inference.call import Call
from host.inference.metadata import IndexEntry, ModelStatistics
from host.inference.request import InferRequest, InferResponse, Tensor
from host.models.registry import Registry
from host.remote_models import RemoteModels, RemoteVersion, ResponseStream, ReturningCalls
from tests.waiting import FakeClockLoop


def call_for(*ancestors: str, age_s: float = 5.0) -> Call:
    """A call of another server that arrived so long ago."""
    call = Call(InferRequest("model", [], ancestors=ancestors))
    call.received_ns -= int(age_s * 1e9)
    return call


def test_a_call_waits_for_those_that_were_made_for_it() -> None:
    returning = ReturningCalls()
    first, second = returning.add_outgoing(), returning.add_outgoing()
    call = call_for("another server's", first, second)
    with returning.incoming(call), returning.incoming(call_for("another server's")):
        assert returning.made_for(first) == returning.made_for(second) == [call]
        returning.remove_outgoing(first)
        assert returning.made_for(first) == []
    assert returning.made_for(second) == []


def test_a_call_that_came_just_now_may_not_be_waited_for() -> None:
    returning = ReturningCalls()
    outgoing = returning.add_outgoing()
    with returning.incoming(call_for(outgoing, age_s=0)):
        assert returning.made_for(outgoing) == []


def test_ids_of_several_servers_differ() -> None:
    assert ReturningCalls().add_outgoing() != ReturningCalls().add_outgoing()


class Provider:
    """Answers with what holds when it is asked, once `answers` is set."""

    def __init__(self) -> None:
        self.versions: list[int] = []
        self.asked = 0
        self.answers = asyncio.Event()
        self.closes = asyncio.Event()

    def serves(self, name: str) -> bool:
        return True

    async def describe(self, name: str) -> Sequence[RemoteVersion]:
        self.asked += 1
        config = new_config()
        config.name = name
        described = [RemoteVersion(one, config) for one in self.versions]
        await self.answers.wait()
        return described

    async def infer(self, request: InferRequest, headers: object) -> ResponseStream:
        try:
            await asyncio.Event().wait()
            yield None, True
        finally:
            await self.closes.wait()

    async def statistics(self, name: str, version: str) -> Sequence[ModelStatistics]:
        await self.answers.wait()
        return []

    async def index(self, ready: bool) -> Sequence[IndexEntry]:
        await self.answers.wait()
        return []

    async def ready(self) -> bool:
        await self.answers.wait()
        return True


@pytest.fixture
def loop() -> Iterator[FakeClockLoop]:
    loop = FakeClockLoop()
    yield loop
    loop.close()


async def turns() -> None:
    """Lets everything run that can."""
    for _ in range(20):
        await asyncio.sleep(0)


async def ended(task: asyncio.Task[Any]) -> bool:
    """Whether it has ended by now; one that has not is cancelled, so that a test can fail."""
    await turns()
    done = task.done()
    task.cancel()
    return done


def test_a_refresh_does_not_take_an_answer_that_may_be_older(loop: FakeClockLoop) -> None:
    async def main() -> None:
        provider, registry = Provider(), Registry()
        models = RemoteModels(provider, registry, 60)
        first = asyncio.ensure_future(models.learn("remote"))
        await turns()
        provider.versions = [3]
        refreshes = [asyncio.ensure_future(models.refresh("remote")) for _ in range(3)]
        await turns()
        provider.answers.set()
        await asyncio.gather(first, *refreshes)
        assert list(registry.versions("remote")) == [3]
        assert provider.asked == 2  # those who wait together share the new answer

    loop.run_until_complete(main())


def test_a_description_that_does_not_come_is_asked_for_anew(loop: FakeClockLoop) -> None:
    async def main() -> None:
        provider, registry = Provider(), Registry()
        models = RemoteModels(provider, registry, 60)
        for asked in (1, 2):
            waits = asyncio.ensure_future(models.learn("remote"))
            await turns()
            await loop.advance(61)
            assert await ended(waits) and provider.asked == asked
            with pytest.raises(HostError, match="'remote' did not describe it within 60 s"):
                await waits
        provider.answers.set()
        provider.versions = [1]
        assert await models.learn("remote")

    loop.run_until_complete(main())


@pytest.mark.parametrize("question", ["statistics", "index", "ready"])
def test_every_question_has_a_deadline(loop: FakeClockLoop, question: str) -> None:
    async def main() -> None:
        models = RemoteModels(Provider(), Registry(), 60)
        asks: Callable[[], Coroutine[Any, Any, object]] = {
            "statistics": lambda: models.statistics("remote", ""),
            "index": lambda: models.index(True),
            "ready": models.ready,
        }[question]
        waits = asyncio.ensure_future(asks())
        await turns()
        await loop.advance(16)
        assert await ended(waits)
        if question == "ready":
            assert waits.result() is False
        else:
            with pytest.raises(HostError, match="did not receive the .* within 15 s"):
                waits.result()

    loop.run_until_complete(main())


def test_a_provider_that_does_not_close_a_request_does_not_stop_the_exit(
    loop: FakeClockLoop, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        provider, registry = Provider(), Registry()
        provider.answers.set()
        provider.versions = [1]
        models = RemoteModels(provider, registry, 60)
        await models.learn("remote")
        call = registry.find("remote").infer(InferRequest("remote", []))
        await turns()
        closes = asyncio.ensure_future(models.close())
        await turns()
        assert not closes.done()
        await loop.advance(6)
        assert await ended(closes)
        with pytest.raises(HostError, match="the server stops"):
            await call
        assert "1 requests to remote model 'remote' did not end within 5 s" in caplog.text

    loop.run_until_complete(main())


def test_an_answer_without_news_does_not_change_the_table_of_models(loop: FakeClockLoop) -> None:
    async def main() -> None:
        provider, registry = Provider(), Registry()
        provider.answers.set()
        models = RemoteModels(provider, registry, 60)
        changes: list[int] = []
        registry.watchers.append(lambda: changes.append(provider.asked))
        for versions in ([], [1], [1, 2]):
            provider.versions = versions
            await models.refresh("remote")
            await models.refresh("remote")
        assert changes == [1, 3, 5]

    loop.run_until_complete(main())


class Sender(Provider):
    """Sends responses with a tensor of `size` bytes, as fast as it may."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.tensor = Tensor("DATA", "UINT8", [size], bytes(size))
        self.sent = 0

    async def infer(self, request: InferRequest, headers: object) -> ResponseStream:
        while True:
            self.sent += 1
            yield InferResponse("remote", 1, "", [self.tensor]), False
            await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("size", "most"), [(1, 32), (1 << 20, 4), (3 << 20, 2), (5 << 20, 1)], ids=str
)
def test_responses_wait_for_a_slow_caller_by_number_and_bytes(
    loop: FakeClockLoop, size: int, most: int
) -> None:
    async def main() -> None:
        provider, registry = Sender(size), Registry()
        provider.answers.set()
        provider.versions = [1]
        models = RemoteModels(provider, registry, 60)
        await models.learn("remote")
        call = registry.find("remote").infer(InferRequest("remote", []))
        async with aclosing(call.iterate_with_final()) as responses:
            for taken in range(10):
                for _ in range(10):
                    await turns()
                assert provider.sent == taken + most
                await anext(responses)
        await models.close()

    loop.run_until_complete(main())
