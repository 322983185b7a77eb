"""A request does not wait behind a slow one while another instance is idle.

A fast instance that is busy gets the next request, in place of an idle one that has to wake up.
Here the fast one becomes slow all at once, and ends only when the test lets it.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from tests.clients import tensor
from tests.conftest import DEADLINE, RepositoryBuilder, RunningHost, Serve

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
