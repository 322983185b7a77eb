"""A server inside this process, called with numpy arrays."""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import psutil
import pytest

import pbhost
from host.inference.metadata import ModelStatistics
from tests.conftest import DEADLINE, RepositoryBuilder
from tests.waiting import eventually


def options(repository: RepositoryBuilder, **more: object) -> pbhost.Options:
    settings = {
        **{"grpc_port": 0, "grpc_address": "127.0.0.1"},
        **{"metrics_port": 0, "metrics_address": "127.0.0.1", "allow_http": False},
        **{"log_info": False, **more},
    }
    return pbhost.Options(model_repository=[str(repository.path)], **settings)  # type: ignore[arg-type]  # each key has its own type


def test_an_async_server_answers_and_leaves_the_process_as_it_was(
    repository: RepositoryBuilder,
) -> None:
    repository.copy("identity", "ask")
    handlers = list(logging.getLogger().handlers)

    async def main() -> None:
        async with pbhost.Server(options(repository)) as server:
            array = np.arange(5, dtype=np.float32)
            result = await server.infer("identity", {"INPUT0": array}, request_id="7")
            np.testing.assert_array_equal(result["OUTPUT0"], array)
            assert (result.model_name, result.model_version, result.id) == ("identity", 1, "7")
            target = np.array(["identity"], dtype=np.object_)
            big = np.arange(1_000_000, dtype=np.float32)
            answers = await asyncio.gather(
                *(server.infer("ask", {"MODEL": target, "INPUT0": big}) for _ in range(5))
            )
            for answer in answers:
                np.testing.assert_array_equal(answer["OUTPUT0"], big)
            with pytest.raises(pbhost.HostError) as caught:
                await server.infer("identity", {"INPUT0": array.astype(np.int8)})
            assert caught.value.code is pbhost.ErrorCode.INVALID_ARG

    asyncio.run(main())
    assert logging.getLogger().handlers == handlers


def test_a_blocking_server_serves_many_threads(repository: RepositoryBuilder) -> None:
    repository.copy("identity")
    with pbhost.BlockingServer(options(repository, allow_grpc=False)) as server:
        arrays = [np.full(20_000, number, dtype=np.float32) for number in range(50)]
        with ThreadPoolExecutor(8) as pool:
            results = pool.map(lambda array: server.infer("identity", {"INPUT0": array}), arrays)
            for array, result in zip(arrays, results, strict=True):
                np.testing.assert_array_equal(result["OUTPUT0"], array)


def test_a_failed_start_gives_everything_back(repository: RepositoryBuilder) -> None:
    repository.add("broken", "import no_such_library\n")
    with (
        pytest.raises(pbhost.HostError, match="failed to load all models"),
        pbhost.BlockingServer(options(repository, log_error=False)),
    ):
        pass


def children() -> set[str]:
    """The processes that this one has started and that have not ended."""
    tasks = Path("/proc/self/task").glob("*/children")
    return {number for task in tasks for number in task.read_text().split()}


def test_a_stop_ends_a_start_that_has_begun(repository: RepositoryBuilder) -> None:
    repository.copy("identity")
    before = children()

    async def main() -> None:
        server = pbhost.Server(options(repository))
        started, in_time = await asyncio.gather(
            server.start(), server.stop(), return_exceptions=True
        )
        assert isinstance(started, pbhost.HostError)
        assert (started.code, in_time) == (pbhost.ErrorCode.UNAVAILABLE, True)
        assert (server._endpoints._clients, server._components) == (None, None)
        await eventually(lambda: children() == before, "the end of its processes")

    asyncio.run(main())


def test_a_stop_that_is_cancelled_again_and_again_leaves_no_process(
    repository: RepositoryBuilder,
) -> None:
    repository.copy("identity")

    async def main() -> None:
        before = set(psutil.Process().children(recursive=True))
        server = await pbhost.Server(options(repository)).start()
        started = set(psutil.Process().children(recursive=True)) - before
        assert started
        stop = asyncio.create_task(server.stop())
        for _ in range(100):
            await asyncio.sleep(0)  # it begins, or waits for the next part
            stop.cancel()
        with pytest.raises(asyncio.CancelledError):
            await stop
        _, alive = psutil.wait_procs(started, timeout=DEADLINE)
        assert alive == []

    asyncio.run(main())


def test_two_stops_at_once_both_wait_for_the_work(repository: RepositoryBuilder) -> None:
    repository.copy("identity")

    async def main() -> None:
        server = await pbhost.Server(options(repository)).start()
        array = np.zeros(5, dtype=np.float32)
        answer = asyncio.ensure_future(server.infer("identity", {"INPUT0": array}))
        assert tuple(await asyncio.gather(server.stop(), server.stop())) == (True, True)
        np.testing.assert_array_equal((await answer)["OUTPUT0"], array)

    asyncio.run(main())


def test_tensor_memory_is_given_back_after_a_burst(repository: RepositoryBuilder) -> None:
    repository.copy("identity")

    async def main() -> None:
        async with pbhost.Server(options(repository, allow_grpc=False)) as server:
            array = np.zeros(2_000_000, dtype=np.float32)
            for _ in range(3):
                await asyncio.gather(
                    *(server.infer("identity", {"INPUT0": array}) for _ in range(10))
                )
            own = server._open_components.pool.arenas.host
            await eventually(lambda: not (own.used or own.warm), "memory to be given back")

    asyncio.run(main())


def test_an_array_that_finds_no_room_fails_alone(repository: RepositoryBuilder) -> None:
    repository.copy("identity")

    async def main() -> None:
        small = options(repository, allow_grpc=False, arena_byte_size=4 << 20)
        async with pbhost.Server(small) as server:
            with pytest.raises(pbhost.HostError) as caught:
                await server.infer("identity", {"INPUT0": np.zeros(2_000_000, dtype=np.float32)})
            text = caught.value.message
            assert text.startswith(
                "Failed to increase the shared memory pool size for key 'pbhost-host' to "
            )
            assert "8000000 bytes were requested" in text
            assert "of 4194304 bytes" in text
            array = np.ones(20_000, dtype=np.float32)
            result = await server.infer("identity", {"INPUT0": array})
            np.testing.assert_array_equal(result["OUTPUT0"], array)

    asyncio.run(main())


def test_statistics_of_several_servers_come_from_the_callers_function(
    repository: RepositoryBuilder,
) -> None:
    asked: list[tuple[str, str]] = []

    async def collect(name: str, version: str) -> list[ModelStatistics]:
        asked.append((name, version))
        return []

    async def main() -> None:
        given = options(repository, allow_grpc=False, allow_metrics=False)
        async with pbhost.Server(given, collect_statistics=collect) as server:
            assert await server.core.collect_statistics("elsewhere", "1") == []

    asyncio.run(main())
    assert asked == [("elsewhere", "1")]
