"""The shared memory that is left for a model's tensors, as the model sees it."""

from __future__ import annotations

from contextlib import closing

import numpy as np
import tritonclient.grpc as grpcclient

from tests.clients import tensor
from tests.conftest import RepositoryBuilder, Serve
from tests.integration.test_client_memory import Memory

MEGABYTE = 1 << 20
LIMIT = 64 * MEGABYTE

LEAK_CHECK = """
import gc

import numpy as np
import triton_python_backend_utils as pb_utils
from c_python_backend_utils import shared_memory

class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            array = request.inputs()[0].as_numpy()
            free = [shared_memory.free_memory()]
            for _ in range(20):
                answer = pb_utils.InferenceRequest(
                    model_name="identity",
                    requested_output_names=["OUTPUT0"],
                    inputs=[pb_utils.Tensor("INPUT0", array + 1)],
                ).exec()
                assert not answer.has_error(), answer.error().message()
                del answer
                gc.collect()
                free.append(shared_memory.free_memory())
            responses.append(pb_utils.InferenceResponse([
                pb_utils.Tensor("FREE", np.array(free, np.int64)),
                pb_utils.Tensor("OUT", array + 1),
            ]))
        return responses
"""
CONFIG = """
input { name: "IN" data_type: TYPE_FP32 dims: -1 }
output { name: "FREE" data_type: TYPE_INT64 dims: -1 }
output { name: "OUT" data_type: TYPE_FP32 dims: -1 }
"""


def test_a_model_that_keeps_nothing_has_as_much_shared_memory_left_as_before(
    repository: RepositoryBuilder, serve: Serve
) -> None:
    repository.copy("identity")
    repository.add("leak_check", LEAK_CHECK, CONFIG)
    host = serve(repository, f"--arena-byte-size={LIMIT}").wait_started()
    array = np.zeros(MEGABYTE // 4, np.float32)
    with host.client() as client:
        for before in [LIMIT, LIMIT - MEGABYTE, LIMIT - MEGABYTE]:  # inputs count from then on
            free = client.infer("leak_check", [tensor("IN", array)]).as_numpy("FREE")
            assert free is not None and free.tolist() == [before] * 21


def test_tensors_in_client_memory_take_no_memory_of_the_host(
    repository: RepositoryBuilder, serve: Serve
) -> None:
    repository.copy("identity")
    repository.add("leak_check", LEAK_CHECK, CONFIG)
    flags = (f"--arena-byte-size={LIMIT}", "--allow-client-shm=true")
    host = serve(repository, *flags).wait_started()
    given = grpcclient.InferInput("IN", [MEGABYTE // 4], "FP32")
    with host.client() as client, closing(Memory(client, MEGABYTE)) as memory:
        given.set_shared_memory(memory.name, MEGABYTE)
        for _ in range(2):
            free = client.infer("leak_check", [given]).as_numpy("FREE")
            assert free is not None and free.tolist() == [LIMIT] * 21
        client.unregister_system_shared_memory()


def test_a_model_that_keeps_answers_sees_them(repository: RepositoryBuilder, serve: Serve) -> None:
    repository.copy("identity")
    repository.add(
        "leak_check",
        LEAK_CHECK.replace("del answer", "self.kept = [*getattr(self, 'kept', ()), answer]"),
        CONFIG,
    )
    host = serve(repository, f"--arena-byte-size={LIMIT}").wait_started()
    array = np.zeros(MEGABYTE // 4, np.float32)
    with host.client() as client:
        free = client.infer("leak_check", [tensor("IN", array)]).as_numpy("FREE")
        assert free is not None and free.tolist() == [LIMIT - i * MEGABYTE for i in range(21)]
