"""A request does not wait behind a slow one while another instance is idle.

A fast instance that is busy gets the next request, in place of an idle one that has to wake up.
Here the fast one becomes slow all at once, and ends only when the test lets it. While all instances
are busy, each of them has its next request already.
"""

from __future__ import annotations

import os
import re
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.request import urlopen

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from tests.clients import run_command, tensor
from tests.conftest import DEADLINE, RepositoryBuilder, RunningHost, Serve, wait_until

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

HOLD = """
import os
with open({begun!r}, "w") as file:
    file.write(str(os.getpid()))
until(lambda: os.path.exists({end!r}), "the word to end")
return os.getpid()
"""


def pending(host: RunningHost) -> int:
    with urlopen(f"http://{host.metrics_url}/metrics", timeout=DEADLINE) as answer:
        text = answer.read().decode()
    found = re.search(r'pending_request_count{model="script".*} (\d+)', text)
    return int(found[1]) if found else 0


def infer(host: RunningHost, number: int) -> int:
    with host.client() as client:
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
    host = serve(repository).wait_started()
    with host.client() as client, ThreadPoolExecutor(9) as pool:
        given = tensor("IN", np.array([1], np.int32))
        for _ in range(40):  # now the host knows that the model is fast
            client.infer("fast", [given])
        slow = pool.submit(infer, host, -1)
        others = [pool.submit(infer, host, number) for number in range(8)]
        try:
            assert [other.result(DEADLINE) for other in others] == list(range(8))
            assert not slow.done()
        finally:
            with pipe.open():  # lets the slow one go on
                assert slow.result(DEADLINE) == -1
        statistics = client.get_inference_statistics("fast").model_stats[0]
    assert statistics.inference_count == statistics.execution_count == 49


@pytest.mark.parametrize("dies", [False, True])
def test_next_request_of_a_slow_or_dead_instance_runs_on_the_other(
    repository: RepositoryBuilder, serve: Serve, tmp_path: Path, dies: bool
) -> None:
    repository.copy("script")
    config = repository.path / "script" / "config.pbtxt"
    config.write_text(config.read_text() + "instance_group [ { count: 2, kind: KIND_CPU } ]\n")
    host = serve(repository).wait_started()

    def send(script: str) -> int:
        with host.client() as client:
            return int(run_command(client, script, "script", client_timeout=DEADLINE))

    def pid_in(begun: Path) -> int:
        wait_until(lambda: begun.exists() and begun.stat().st_size > 0, "the request to begin")
        return int(begun.read_text())

    with ThreadPoolExecutor(6) as pool:
        pids, held, ends = [], [], [tmp_path / "end0", tmp_path / "end1"]
        for end in ends:
            begun = end.with_suffix(".begun")
            held.append(pool.submit(send, HOLD.format(begun=str(begun), end=str(end))))
            pids.append(pid_in(begun))
        others = [pool.submit(send, f"return {number}") for number in range(2)]
        try:
            wait_until(lambda: pending(host) == 2, "two requests that wait")
            if dies:
                os.kill(pids[0], signal.SIGKILL)
            ends[1].touch()
            assert held[1].result(DEADLINE) == pids[1]
            assert [other.result(DEADLINE) for other in others] == [0, 1]
            assert dies or not held[0].done()
        finally:
            for end in ends:
                end.touch()
        if dies:
            with pytest.raises(InferenceServerException, match="while it ran this request"):
                held[0].result(DEADLINE)
        else:
            assert held[0].result(DEADLINE) == pids[0]
