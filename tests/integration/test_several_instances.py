"""A request does not wait behind a slow one while another instance is idle.

A fast instance that is busy gets the next request, instead of an idle one that has to wake up.
Here the fast one becomes slow all at once, and ends only when the test lets it. While all instances
are busy, each of them has its next request already.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import pbhost
from host.inference.request import InferRequest, Tensor
from tests.clients import tensor
from tests.conftest import DEADLINE, RepositoryBuilder, RunningHost, Serve, wait_until
from tests.integration.test_inprocess import options
from tests.waiting import eventually

CONFIG = """
    backend: "python"
    input [ { name: "IN" data_type: TYPE_INT32 dims: [ 1 ] } ]
    output [ { name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] } ]
    instance_group [ { count: %d, kind: KIND_CPU } ]
"""
MODEL = """
    import ctypes, os
    import triton_python_backend_utils as pb_utils

    def hold_the_interpreter():
        # Opens a pipe without releasing the interpreter lock: no other thread of this process runs.
        ctypes.PyDLL(None).open({pipe!r}.encode(), os.O_WRONLY)

    def wait_for_another_model(tensor):
        given = pb_utils.Tensor("IN", tensor.as_numpy())
        answer = pb_utils.InferenceRequest(
            inputs=[given], model_name="holds", requested_output_names=["OUT"]
        ).exec()
        assert not answer.has_error(), answer.error().message()

    class TritonPythonModel:
        def execute(self, requests):
            (request,) = requests
            tensor = pb_utils.get_input_tensor_by_name(request, "IN")
            if tensor.as_numpy()[0] < 0:
                {wait}
            out = pb_utils.Tensor("OUT", tensor.as_numpy())
            return [pb_utils.InferenceResponse([out])]
"""

BEGIN = """
import os
with open({begun!r}, "w") as file:
    file.write(str(os.getpid()))
"""
HOLD = """
until(lambda: os.path.exists({end!r}), "the word to end")
return os.getpid()
"""


def infer(server: RunningHost, number: int) -> int:
    with server.client() as client:
        given = tensor("IN", np.array([number], np.int32))
        return int(client.infer("fast", [given], client_timeout=DEADLINE).as_numpy("OUT")[0])


@pytest.mark.parametrize("wait", ["hold_the_interpreter()", "wait_for_another_model(tensor)"])
def test_requests_run_while_one_of_two_fast_instances_is_slow(
    repository: RepositoryBuilder, serve: Serve, tmp_path: Path, wait: str
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    repository.add("fast", MODEL.format(pipe=str(pipe), wait=wait), CONFIG % 2)
    holds = MODEL.format(pipe=str(pipe), wait="hold_the_interpreter()")
    repository.add("holds", holds, CONFIG % 1)
    server = serve(repository).wait_started()
    with server.client() as client, ThreadPoolExecutor(9) as pool:
        given = tensor("IN", np.array([1], np.int32))
        for _ in range(40):  # now the host knows that the model is fast
            client.infer("fast", [given])
        slow = pool.submit(infer, server, -1)
        others = [pool.submit(infer, server, number) for number in range(8)]
        try:
            assert [other.result(DEADLINE) for other in others] == list(range(8))
            assert not slow.done()
        finally:
            with pipe.open():  # lets the slow one continue
                assert slow.result(DEADLINE) == -1
        statistics = client.get_inference_statistics("fast").model_stats[0]
    assert statistics.inference_count == statistics.execution_count == 49


@pytest.mark.parametrize("dies", [False, True])
def test_next_request_of_a_slow_or_dead_instance_runs_on_the_other(
    repository: RepositoryBuilder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dies: bool
) -> None:
    # Only what becomes idle or dies makes a next request go back, however long the test takes.
    monkeypatch.setattr("host.scheduling.direct._OVERDUE_NS", 10**18)
    repository.copy("script")
    config = repository.path / "script" / "config.pbtxt"
    config.write_text(config.read_text() + "instance_group [ { count: 2, kind: KIND_CPU } ]\n")
    begun = [tmp_path / f"begun{number}" for number in range(4)]
    ends = [tmp_path / f"end{number}" for number in range(2)]

    def pid_in(file: Path) -> int:
        return int(file.read_text() or 0) if file.exists() else 0

    async def pid_of(file: Path) -> int:
        await eventually(lambda: pid_in(file) > 0, "the request to begin")
        return pid_in(file)

    no_ports = options(repository, allow_grpc=False, allow_metrics=False)

    async def main() -> None:
        async with pbhost.Server(no_ports) as server:

            async def send(script: str) -> int:
                text = script.encode()
                data = len(text).to_bytes(4, "little") + text
                # Without an owner: what the server copies can be taken back from a stub.
                command = Tensor("COMMAND", "BYTES", [1], data)
                response = await server.infer_request(InferRequest("script", [command]))
                return int(json.loads(bytes(response.outputs[0].data)[4:]))

            pids, held = [], []
            for number, end in enumerate(ends):
                script = BEGIN.format(begun=str(begun[number])) + HOLD.format(end=str(end))
                held.append(asyncio.create_task(send(script)))
                pids.append(await pid_of(begun[number]))
            others = [
                asyncio.create_task(send(BEGIN.format(begun=str(file)) + "return os.getpid()"))
                for file in begun[2:]
            ]
            try:
                await eventually(lambda: server.queue_state("script").queued == 2, "two that wait")
                ends[1].touch()
                # The server is blocked now: it gives the instance nothing.
                wait_until(lambda: pid_in(begun[3]) == pids[1], "the next request of the second")
                assert not begun[2].exists()  # so the first instance has it
                if dies:
                    os.kill(pids[0], signal.SIGKILL)
                assert await held[1] == await others[1] == pids[1]
                assert await others[0] != pids[0]
                assert dies or not held[0].done()
            finally:
                for end in ends:
                    end.touch()
            if dies:
                with pytest.raises(pbhost.HostError, match="while it ran this request"):
                    await held[0]
            else:
                assert await held[0] == pids[0]

    asyncio.run(asyncio.wait_for(main(), DEADLINE))
