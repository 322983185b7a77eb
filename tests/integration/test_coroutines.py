"""Models whose `execute` is a coroutine function."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from tests.clients import Client, InferStream, infer_error, run_command, send_command
from tests.conftest import DEADLINE, RepositoryBuilder, RunningHost, Serve
from tests.waiting import UNTIL_SOURCE

CONFIG = """
backend: "python"
max_batch_size: 0
input [ { name: "COMMAND" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "ANSWER" data_type: TYPE_STRING dims: [ 1 ] } ]
"""
DECOUPLED = "model_transaction_policy { decoupled: true }"
SERIAL = 'parameters { key: "ASYNC_EXECUTE_CONCURRENCY" value: { string_value: "1" } }'
THREE = SERIAL.replace('"1"', '"3"')

MEETING = f"""
import asyncio
import numpy as np
import triton_python_backend_utils as pb_utils
{UNTIL_SOURCE}
def answer(text):
    array = np.array([text.encode()], dtype=np.object_)
    return pb_utils.InferenceResponse([pb_utils.Tensor("ANSWER", array)])

class TritonPythonModel:
    '''`meet N` waits until N requests are in here at once.'''

    def initialize(self, args):
        self.inside = self.most = 0
        self.changed = None

    async def execute(self, requests):
        self.changed = self.changed or asyncio.Condition()
        return [answer(await self.act(request)) for request in requests]

    async def act(self, request):
        text = pb_utils.get_input_tensor_by_name(request, "COMMAND").as_numpy()[0].decode()
        name, _, argument = text.partition(" ")
        return await getattr(self, name)(argument, request)

    async def meet(self, count, request):
        async with self.changed:
            self.inside += 1
            self.most = max(self.most, self.inside)
            self.changed.notify_all()
            await self.changed.wait_for(lambda: self.most >= int(count))
            self.inside -= 1
        return str(self.most)

    async def leave(self, _, request):
        for turn in range(20):
            self.inside += turn == 0
            self.most = max(self.most, self.inside)
            await asyncio.sleep(0)
        self.inside -= 1
        return str(self.most)

    async def raises(self, text, request):
        await asyncio.sleep(0)
        raise ValueError(text)

    async def exits(self, code, request):
        await asyncio.sleep(0)
        raise SystemExit(int(code))

    async def exits_aside(self, code, request):
        asyncio.get_running_loop().create_task(self.exits(code, request))
        for _ in range(5):
            await asyncio.sleep(0)
        return "still here"

    async def cancelled(self, _, request):
        pb_utils.Logger.log_info("waits to be cancelled")
        await asyncio.to_thread(until, request.is_cancelled, "the request to be cancelled")
        pb_utils.Logger.log_info("was cancelled")
        return "cancelled"
"""

STREAMING = """
import asyncio
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    '''Each request ends after as many others as it says; fewer than none are wrong.'''

    def initialize(self, args):
        self.ended = 0
        self.changed = None

    async def execute(self, requests):
        await asyncio.gather(*map(self.answer, requests))
        return "what is returned does not matter"

    async def answer(self, request):
        sender = request.get_response_sender()
        text = pb_utils.get_input_tensor_by_name(request, "COMMAND").as_numpy()[0].decode()
        others = int(text)
        if others < 0:
            raise ValueError("others cannot be negative" if others == -1 else "file \\udcff")
        self.changed = self.changed or asyncio.Condition()
        before = self.ended
        async with self.changed:
            await self.changed.wait_for(lambda: self.ended - before >= others)
            self.ended += 1
            self.changed.notify_all()
        array = np.array([text.encode()], dtype=np.object_)
        sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("ANSWER", array)]))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""


@pytest.fixture(scope="module")
def host(module_repository: RepositoryBuilder, module_serve: Serve) -> RunningHost:
    module_repository.add("meeting", MEETING, CONFIG)
    module_repository.add("counted", MEETING, CONFIG)
    module_repository.add("serial", MEETING, CONFIG + SERIAL)
    module_repository.add("three", MEETING, CONFIG + THREE)
    module_repository.add("streaming", STREAMING, CONFIG + DECOUPLED)
    return module_serve(module_repository).wait_started()


@pytest.fixture
def client(host: RunningHost) -> Iterator[Client]:
    with host.client() as client:
        yield client


def together(client: Client, model: str, text: str, count: int) -> list[int]:
    with ThreadPoolExecutor(count) as pool:
        return [int(n) for n in pool.map(lambda _: run_command(client, text, model), range(count))]


def test_requests_overlap_in_one_instance(client: Client) -> None:
    """Each waits for seven others: they would never end one after the other."""
    assert max(together(client, "meeting", "meet 8", 8)) == 8


def test_no_more_overlap_than_the_parameter_allows(client: Client) -> None:
    assert max(together(client, "three", "meet 3", 3)) == 3
    assert max(together(client, "three", "leave", 12)) == 3


def test_one_at_a_time_if_the_parameter_says_so(client: Client) -> None:
    assert max(together(client, "serial", "leave", 8)) == 1


@pytest.mark.parametrize("model", ["meeting", "serial"])
def test_an_exception_is_answered(client: Client, model: str) -> None:
    status, text = infer_error(run_command, client, "raises on purpose", model)
    assert status == "StatusCode.INTERNAL"
    assert text.startswith(f"Failed to process the request(s) for model '{model}_0', message: ")
    assert "ValueError: on purpose" in text
    assert "model.py" in text
    assert "futures" not in text
    assert run_command(client, "leave", model)


@pytest.mark.parametrize("model", ["meeting", "serial"])
def test_a_coroutine_that_exits_is_answered_and_the_loop_goes_on(
    host: RunningHost, client: Client, model: str
) -> None:
    text = infer_error(run_command, client, "exits 3", model)[1]
    assert "SystemExit: 3" in text
    assert "base_events.py" not in text
    said = [line for line in host.lines if "SystemExit: 3" in line]
    assert all("Failed to process the request(s) for model" in line for line in said), said
    assert run_command(client, "exits_aside 4", model) == "still here"
    host.wait_for("SystemExit: 4")
    assert run_command(client, "leave", model)


def test_a_coroutine_notices_that_its_client_has_gone(host: RunningHost, client: Client) -> None:
    call = send_command(client, "cancelled", "meeting")
    host.wait_for("waits to be cancelled")
    call.cancel()
    host.wait_for("was cancelled")


def test_statistics_count_the_whole_time_of_a_coroutine(client: Client) -> None:
    before = client.get_inference_statistics("counted").model_stats[0]
    together(client, "counted", "meet 2", 2)
    after = client.get_inference_statistics("counted").model_stats[0]
    assert after.execution_count - before.execution_count == 2
    assert after.inference_stats.success.count - before.inference_stats.success.count == 2
    infer = after.inference_stats.compute_infer.ns - before.inference_stats.compute_infer.ns
    total = after.inference_stats.success.ns - before.inference_stats.success.ns
    assert 0 < infer <= total


def test_requests_of_a_decoupled_model_overlap_and_short_ones_end_first(
    host: RunningHost,
) -> None:
    with InferStream(host) as stream:
        for others in (2, 1, 0):
            stream.send(str(others), model="streaming")
        answers = [stream.next().as_numpy("ANSWER")[0] for _ in range(3)]
    assert answers == [b"0", b"1", b"2"]


def test_an_exception_of_a_decoupled_coroutine_is_logged_and_answered(host: RunningHost) -> None:
    """Triton only logs it, and its client waits forever."""
    with InferStream(host) as stream:
        stream.send("-1", model="streaming")
        with pytest.raises(InferenceServerException, match="others cannot be negative"):
            stream.next()
        stream.send("0", model="streaming")
        assert stream.next().as_numpy("ANSWER") == np.array([b"0"], dtype=np.object_)
    host.wait_for("Traceback")
    host.wait_for("ValueError: others cannot be negative")


def test_an_exception_that_is_no_valid_text_is_answered(host: RunningHost) -> None:
    with InferStream(host) as stream:
        stream.send("-2", model="streaming")
        with pytest.raises(InferenceServerException, match="file .*udcff"):
            stream.next()


@pytest.mark.parametrize("text", ["0", "-3", "many", "99999", ""])
def test_a_concurrency_that_makes_no_sense_is_refused(
    repository: RepositoryBuilder, serve: Serve, text: str
) -> None:
    repository.add("model", MEETING, CONFIG + SERIAL.replace('"1"', f'"{text}"'))
    host = serve(repository)
    host.wait_for(
        "parameter 'ASYNC_EXECUTE_CONCURRENCY' of model 'model' must be a whole number from 1 to"
        f" 4096, got '{text}'"
    )
    assert host.process.wait(DEADLINE) == 1
