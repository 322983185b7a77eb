"""BLS requests to decoupled models, from coroutines and threads, with timeouts and cancellation."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import requests

from tests.clients import Client, run_script, send_command
from tests.conftest import DEADLINE, RepositoryBuilder, RunningHost, Serve, wait_until


@pytest.fixture(scope="module")
def host(module_repository: RepositoryBuilder, module_serve: Serve) -> RunningHost:
    module_repository.copy("script", "stream", "identity", "misbehave")
    model = (module_repository.path / "script" / "1" / "model.py").read_text()
    config = (module_repository.path / "script" / "config.pbtxt").read_text()
    module_repository.add("other", model, config)
    return module_serve(module_repository, "--log-verbose=1").wait_started()


@pytest.fixture
def client(host: RunningHost) -> Iterator[Client]:
    with host.client() as client:
        yield client


# Streams


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ("respond respond last", [0, 1, 2]),
        ("respond respond final", [0, 1, None]),
        ("final", [None]),
        ("thread:many=300 last", list(range(301))),
        ("respond last_error=gone", [0, "gone"]),
        ("respond error=broken respond final", [0, "broken", 1, None]),
    ],
)
def test_model_reads_responses_of_a_decoupled_model(
    client: Client, steps: str, expected: list[object]
) -> None:
    source = f"return numbers(ask('stream', command('{steps}')).exec(decoupled=True))"
    assert run_script(client, source) == expected


def test_final_flag_alone_is_an_empty_response(client: Client) -> None:
    assert run_script(
        client,
        """
        (last,) = ask('stream', command('final')).exec(decoupled=True)
        return [len(last.output_tensors()), last.has_error(), last.parameters()]
        """,
    ) == [0, False, ""]


def test_ordinary_model_gives_a_stream_of_one_response(client: Client) -> None:
    assert run_script(
        client,
        """
        iterator = ask('identity', tensor('INPUT0', np.arange(4, dtype=np.float32))).exec(
            decoupled=True
        )
        return [len(list(iterator)), len(list(iterator))]
        """,
    ) == [1, 1]


def test_unary_bls_request_to_decoupled_model_is_rejected(client: Client) -> None:
    assert run_script(client, "return ask('stream', command('last')).exec().error().message()") == (
        "Model stream - Error when running inference: Model stream is using the decoupled. The"
        " current BLS request call doesn't support models using the decoupled transaction policy."
        " Please use 'decoupled=True' argument to the 'exec' or 'async_exec' calls for decoupled"
        " models.'"
    )


def test_rejected_stream_yields_only_the_error(client: Client) -> None:
    assert run_script(client, "return numbers(ask('missing').exec(decoupled=True))") == [
        (
            "Model missing - Error when running inference: Request for unknown model: 'missing' is"
            " not found"
        )
    ]


def test_finished_stream_restarts_from_the_first_response(
    client: Client,
) -> None:
    assert run_script(
        client,
        """
        iterator = ask('stream', command('many=4 last')).exec(decoupled=True)
        counts = [sum(1 for _ in iterator) for _ in range(3)]
        for number, _ in enumerate(iterator):
            if number == 1:
                break
        return [*counts, sum(1 for _ in iterator)]
        """,
    ) == [5, 5, 5, 3]


def test_model_opens_hundreds_of_streams_at_once(client: Client) -> None:
    assert (
        run_script(
            client,
            """
        iterators = [
            ask('stream', command(f'thread:many={n % 7} last')).exec(decoupled=True)
            for n in range(300)
        ]
        return [numbers(iterator) == list(range(n % 7 + 1)) for n, iterator in enumerate(iterators)]
        """,
        )
        == [True] * 300
    )


def test_large_tensors_of_a_stream_stay_valid(client: Client) -> None:
    assert run_script(
        client,
        """
        responses = list(ask('stream', command('respond=500000 respond=70000 last')).exec(True))
        return [len(r.output_tensors()) > 1 and r.output_tensors()[1].as_numpy().size
                for r in responses]
        """,
    ) == [500000, 70000, False]


def test_dropping_an_iterator_cancels_its_request(host: RunningHost, client: Client) -> None:
    assert run_script(
        client,
        """
        iterator = iter(ask('stream', command('thread:respond cancelled last')).exec(True))
        next(iterator)
        del iterator
        return 'dropped'
        """,
    )
    host.wait_for("was cancelled")


def test_responses_sent_after_cancellation_arrive(client: Client) -> None:
    assert run_script(
        client,
        """
        iterator = ask('stream', command('thread:respond cancelled many=3 last')).exec(True)
        first = next(iterator)
        iterator.cancel()
        iterator.cancel()
        rest = numbers(iterator)
        iterator.cancel()
        return rest
        """,
    ) == [1, 2, 3, 4]


def test_model_can_send_a_cancelled_error(client: Client) -> None:
    assert run_script(
        client,
        """
        iterator = ask('stream', command('thread:respond cancelled last_error=enough')).exec(True)
        next(iterator)
        iterator.cancel()
        return numbers(iterator)
        """,
    ) == ["enough"]


# Coroutines


def test_requests_of_a_coroutine_overlap(client: Client) -> None:
    assert run_script(
        client,
        """
        import asyncio
        requests = [
            ask('identity', tensor('INPUT0', np.full(30_000, n, dtype=np.float32)))
            for n in range(100)
        ]
        responses = await asyncio.gather(*(request.async_exec() for request in requests))
        return [float(r.output_tensors()[0].as_numpy().mean()) for r in responses]
        """,
    ) == list(map(float, range(100)))


def test_coroutine_reads_streams_without_blocking_others(client: Client) -> None:
    assert (
        run_script(
            client,
            """
        import asyncio

        async def read(count):
            request = ask('stream', command(f'thread:many={count} last'))
            found = []
            async for response in await request.async_exec(decoupled=True):
                found += numbers([response])
            return found == list(range(count + 1))

        return await asyncio.gather(*(read(n) for n in range(40)))
        """,
        )
        == [True] * 40
    )


def test_cancelling_a_future_cancels_its_request(host: RunningHost, client: Client) -> None:
    found = run_script(
        client,
        """
        import asyncio, pathlib
        begun = pathlib.Path(__file__).with_name('begun')
        slow = f'''
        open({str(begun)!r}, 'w').close()
        until(request.is_cancelled, 'the request to be cancelled')
        pb_utils.Logger.log_info('other was cancelled')
        '''
        answer = asyncio.ensure_future(ask('other', command(slow)).async_exec())
        await asyncio.to_thread(until, begun.exists, 'the other model to begin')
        try:
            await asyncio.wait_for(answer, 0.01)
        except asyncio.TimeoutError:
            return 'too late'
        """,
    )
    assert found == "too late"
    host.wait_for("other was cancelled")


def failures(client: Client, model: str) -> int:
    (statistics,) = client.get_inference_statistics(model).model_stats
    count: int = statistics.inference_stats.fail.count
    return count


def test_request_cancelled_in_the_queue_does_not_run(client: Client) -> None:
    before = failures(client, "other")
    found = run_script(
        client,
        """
        import asyncio, pathlib
        begun, ran = (pathlib.Path(__file__).with_name(n) for n in ('first', 'ran'))
        busy = f"open({str(begun)!r}, 'w').close(); until(request.is_cancelled, 'its own end')"
        first = asyncio.ensure_future(ask('other', command(busy)).async_exec())
        await asyncio.to_thread(until, begun.exists, 'the other model to begin')
        second = ask('other', command(f"open({str(ran)!r}, 'w')")).async_exec()
        second.cancel()
        first.cancel()  # it continues until its stub hears of this, and has heard of the other
        third = await ask('other', command("return 3")).async_exec()
        return [third.has_error(), ran.exists()]
        """,
    )
    assert found == [False, False]
    wait_until(lambda: failures(client, "other") == before + 1, "the failure to be counted")


def test_request_cancelled_after_a_time_in_the_queue_is_a_failure(
    host: RunningHost, client: Client, module_repository: RepositoryBuilder
) -> None:
    folder = module_repository.path / "script" / "1"
    waits = re.compile(r'^nv_inference_pending_request_count{model="other",.* 1$', re.MULTILINE)
    before = failures(client, "other")
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(
            run_script,
            client,
            """
            import asyncio, pathlib
            begun, cancel, end = (pathlib.Path(__file__).with_name(n) for n in ('b', 'cancel', 'e'))
            busy = f'''
            import pathlib
            pathlib.Path({str(begun)!r}).touch()
            until(pathlib.Path({str(end)!r}).exists, 'its end')
            '''
            first = asyncio.ensure_future(ask('other', command(busy)).async_exec())
            await asyncio.to_thread(until, begun.exists, 'the other model to begin')
            second = ask('other', command("return 2")).async_exec()
            await asyncio.to_thread(until, cancel.exists, 'the test to see it wait')
            second.cancel()  # the host hears of this before it can answer the next request
            await ask('identity', tensor('INPUT0', np.arange(4, dtype=np.float32))).async_exec()
            begun.with_name('cancelled').touch()
            return (await first).has_error()
            """,
        )
        wait_until(lambda: bool(waits.search(host.read_metrics())), "the request to wait")
        (folder / "cancel").touch()
        wait_until((folder / "cancelled").exists, "its cancellation")
        # The stub, which may have prefetched it, replies once it has handled the cancellation.
        requests.get(f"http://{host.http_url}/v2/models/other/stacks", timeout=DEADLINE)
        (folder / "e").touch()
        assert running.result() is False
    wait_until(lambda: failures(client, "other") == before + 1, "the failure to be counted")


@pytest.mark.parametrize(
    "form", ["exec(execution_timeout=0.3)", "exec(True, execution_timeout=0.3)"]
)
def test_execution_timeout_ends_a_request(client: Client, form: str) -> None:
    model = "stream" if "True" in form else "other"
    text = "thread:cancelled" if "True" in form else "until(request.is_cancelled, 'that')"
    found = run_script(
        client,
        f"""
        response = ask('{model}', command('''{text}''')).{form}
        last = response if hasattr(response, 'error') else list(response)[-1]
        return [last.error().code().name, last.error().message()]
        """,
    )
    assert found[0] == "UNAVAILABLE"
    assert model in found[1]
    assert "0.3 seconds" in found[1]


# Cancellation


@pytest.mark.parametrize("awaits", ["exec()", "async_exec()"])
def test_cancelling_a_request_cancels_its_bls_requests(
    host: RunningHost, client: Client, awaits: str
) -> None:
    source = f"""
        slow = '''
        pb_utils.Logger.log_info('child of {awaits} waits')
        until(request.is_cancelled, 'the child to be cancelled')
        pb_utils.Logger.log_info('child of {awaits} was cancelled')
        '''
        response = {"await " if "async" in awaits else ""}ask('other', command(slow)).{awaits}
        pb_utils.Logger.log_info('parent got ' + response.error().code().name)
        """
    name = re.escape(awaits)
    call = send_command(client, source)
    host.wait_for(f"child of {name} waits")
    call.cancel()
    host.wait_for(f"child of {name} was cancelled")
    host.wait_for("parent got CANCELLED")


# Parameters, ids and flags


def test_parameters_ids_and_flags_reach_the_called_model(client: Client) -> None:
    assert (
        run_script(
            client,
            """
        source = '''
        import json
        return [request.request_id(), request.correlation_id(), request.flags(),
                request.timeout(), json.loads(request.parameters()),
                sorted(request.requested_output_names())]
        '''
        request = ask(
            'other', command(source), outputs=['ANSWER'], request_id='mine', correlation_id='a-b',
            flags=3, timeout=2**63, parameters={'text': 'x', 'number': -5, 'truth': True},
            preferred_memory=pb_utils.PreferredMemory(pb_utils.TRITONSERVER_MEMORY_CPU),
            trace=request.trace(),
        )
        import json
        return [json.loads(request.exec().output_tensors()[0].as_numpy()[0]) for _ in range(2)]
        """,
        )
        == [
            ["mine", "a-b", 3, 2**63, {"text": "x", "number": -5, "truth": True}, ["ANSWER"]],
        ]
        * 2
    )


@pytest.mark.parametrize(
    ("along", "text"),
    [
        ("correlation_id='n' * 129", "string correlation ID cannot be longer than 128 characters"),
        ("parameters={'a': 2**63}", "Unsupported value type on parameters"),
    ],
    ids=["correlation id", "parameter"],
)
def test_errors_of_bls_tensors_name_the_called_model(client: Client, along: str, text: str) -> None:
    source = f"return ask('other', command('return 1'), {along}).exec().error().message()"
    message = run_script(client, source)
    assert message.startswith(f"Model other - Error when running inference: {text}")


# Threads and forked children


def test_threads_of_a_model_call_bls_concurrently(client: Client) -> None:
    assert run_script(
        client,
        """
        from concurrent.futures import ThreadPoolExecutor

        def one(n):
            request = ask('identity', tensor('INPUT0', np.full(20_000, n, dtype=np.float32)))
            return float(request.exec().output_tensors()[0].as_numpy().mean())

        with ThreadPoolExecutor(16) as pool:
            return list(pool.map(one, range(200)))
        """,
    ) == list(map(float, range(200)))


FORKS = """
        import multiprocessing

        def one(n):
            size = 10 if n % 2 else 100_000
            request = ask('identity', tensor('INPUT0', np.full(size, n, dtype=np.float32)))
            array = request.exec().output_tensors()[0].as_numpy()
            return [float(array.mean()), array.size]

        globals()['one'] = one
        one.__module__, one.__qualname__ = '__main__', 'one'
        import __main__
        __main__.one = one
        with multiprocessing.get_context('fork').Pool(10) as pool:
            return pool.map(one, range(40))
"""


def test_forked_children_of_a_model_call_bls(client: Client) -> None:
    expected = [[float(n), 10 if n % 2 else 100_000] for n in range(40)]
    assert run_script(client, FORKS) == expected
    assert run_script(client, FORKS) == expected


def test_forked_child_gets_errors_for_unsupported_bls(client: Client) -> None:
    found = run_script(
        client,
        """
        import os
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            texts = [ask('missing').exec().error().message()]
            for refused in (
                lambda: ask('stream', command('last')).exec(decoupled=True),
                lambda: pb_utils.load_model('identity'),
                lambda: pb_utils.MetricFamily('name', 'text', pb_utils.MetricFamily.COUNTER),
            ):
                try:
                    refused()
                except pb_utils.TritonModelException as error:
                    texts.append(str(error))
            os.write(write, json.dumps(texts).encode())
            os._exit(0)
        os.close(write)
        with open(read) as pipe:
            texts = json.loads(pipe.read())
        os.waitpid(pid, 0)
        return texts
        """,
    )
    assert found[0].endswith("Request for unknown model: 'missing' is not found")
    assert len(found) == 4
    assert all("in a forked child of a model" in text for text in found[1:])


def test_request_of_a_forked_child_fails_if_its_stub_has_too_few_descriptors(
    client: Client,
) -> None:
    """The stub keeps none of those that it could receive."""
    text, kept = run_script(
        client,
        """
        import os, resource
        begin, write_begin = os.pipe()
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.read(begin, 1)
            try:
                text = str(ask('identity', tensor('INPUT0', np.ones(1, np.float32))).exec())
            except pb_utils.TritonModelException as error:
                text = str(error)
            os.write(write, text.encode())
            os._exit(0)
        free = os.dup(0)
        os.close(free)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free + 1, hard))
        try:
            os.write(write_begin, b'1')
            text = os.read(read, 1000).decode()
            pb_utils.is_model_ready('identity')  # its reply comes after the stub gave up
            kept = os.path.exists(f'/proc/self/fd/{free}')
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        os.waitpid(pid, 0)
        for descriptor in (begin, write_begin, read, write):
            os.close(descriptor)
        return [text, kept]
        """,
    )
    assert text == "the stub process of this child has ended, or has no descriptors left"
    assert not kept


# Cycles


def test_coroutine_that_waits_for_itself_gets_an_error(
    repository: RepositoryBuilder, serve: Serve
) -> None:
    """With one batch at a time, the instance could never run its own request."""
    repository.copy("script")
    config = repository.path / "script" / "config.pbtxt"
    config.write_text(
        config.read_text()
        + 'parameters { key: "ASYNC_EXECUTE_CONCURRENCY" value: { string_value: "1" } }'
    )
    host = serve(repository).wait_started()
    with host.client() as client:
        text = run_script(
            client,
            "return (await ask('script', command('return 1')).async_exec()).error().message()",
        )
        assert "waits for itself" in text
        assert run_script(client, "return 1") == 1
