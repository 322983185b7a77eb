"""The messages at the end of a batch, their order, and the remains of a dead stub.

The models here change their stub, so that a rare event happens in every run.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import weakref

import numpy as np

import pbhost
from host.instances.supervisor import Supervisor
from host.models.python_model import PythonModel
from tests.clients import infer_error, tensor
from tests.conftest import DEADLINE, RepositoryBuilder, Serve
from tests.integration.test_inprocess import options
from tests.waiting import eventually

PASSES_ON = """
import threading
import triton_python_backend_utils as pb_utils
from pb_utils import _runtime

SECONDS = 120


class TritonPythonModel:
    def initialize(self, args):
        runtime = _runtime.current()
        channel, memory = runtime._channel, runtime._memory
        take_releases, send, receive = memory.take_releases, channel.send, channel.receive_service
        waits = threading.Event()
        main = threading.get_ident()

        def receive_service(descriptors, wait):
            waits.set()
            return receive(descriptors, wait)

        def let_the_service_thread_speak():
            for _ in range(2):  # if it is on its way round already, that round does not count
                waits.clear()
                memory._wake()
                assert waits.wait(SECONDS)

        def take_releases_late():
            if threading.get_ident() == main:
                let_the_service_thread_speak()
            return take_releases()

        def send_late(messages):
            if threading.get_ident() == main:
                let_the_service_thread_speak()
            send(messages)

        memory.take_releases = take_releases_late
        channel.send, channel.receive_service = send_late, receive_service

    def execute(self, requests):
        responses = []
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "X")
            responses.append(pb_utils.InferenceResponse([x]))
        return responses
"""
CONFIG = """
input { name: "X" data_type: TYPE_UINT8 dims: [ -1 ] }
output { name: "X" data_type: TYPE_UINT8 dims: [ -1 ] }
"""


def test_an_input_that_is_an_output_is_not_given_back_before_the_answer_is_told(
    repository: RepositoryBuilder, serve: Serve
) -> None:
    repository.add("m", PASSES_ON, CONFIG)
    running = serve(repository).wait_started()
    data = np.arange(100_000, dtype=np.uint8)
    with running.client() as client:
        for _ in range(3):
            answer = client.infer("m", [tensor("X", data)], client_timeout=DEADLINE).as_numpy("X")
            np.testing.assert_array_equal(answer, data)
    assert "broke the protocol" not in running.output


FORGETS = """
import triton_python_backend_utils as pb_utils
from pb_utils import _runtime

class TritonPythonModel:
    def initialize(self, args):
        channel = _runtime.current()._channel
        send = channel.send

        def send_less(messages):
            kinds = [type(message).__name__ for message in messages]
            if "BatchDone" in kinds and self.forgets:
                messages = [m for m, kind in zip(messages, kinds) if kind != "Response"]
            send(messages)

        channel.send = send_less

    def execute(self, requests):
        x = [pb_utils.get_input_tensor_by_name(request, "X") for request in requests]
        self.forgets = any(tensor.as_numpy()[0] for tensor in x)
        return [pb_utils.InferenceResponse([tensor]) for tensor in x]
"""


def test_a_call_whose_batch_ends_without_an_answer_to_it_fails(
    repository: RepositoryBuilder, serve: Serve
) -> None:
    repository.add("m", FORGETS, CONFIG)
    running = serve(repository).wait_started()
    forgotten = tensor("X", np.ones(1, dtype=np.uint8))
    answered = tensor("X", np.zeros(1, dtype=np.uint8))
    with running.client() as client:
        for _ in range(2):
            assert infer_error(client.infer, "m", [forgotten], client_timeout=DEADLINE) == (
                "StatusCode.INTERNAL",
                "instance 'm_0' ended a batch without answering it",
            )
            client.infer("m", [answered], client_timeout=DEADLINE)
    assert len(running.stubs("m_0")) == 1
    assert "broke the protocol" not in running.output


def pid_of(instance: Supervisor) -> int | None:
    process = instance.instance._process
    return None if process is None else process.pid


def test_an_instance_releases_a_dead_stub_and_its_memory(repository: RepositoryBuilder) -> None:
    repository.copy("identity")
    array = np.zeros(100_000, dtype=np.float32)

    async def main() -> None:
        async with pbhost.Server(options(repository, allow_grpc=False)) as server:
            await server.infer("identity", {"INPUT0": array})
            (version,) = server._composition.registry.versions("identity").values()
            assert isinstance(version.model, PythonModel)
            (instance,) = version.model.supervisors
            stub, arena = (
                weakref.ref(instance.instance),
                weakref.ref(instance.instance.session.transfer.arena),
            )
            pid = pid_of(instance)
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            await eventually(lambda: pid_of(instance) not in (None, pid), "another stub")
            await server.infer("identity", {"INPUT0": array})

            def let_go() -> bool:
                gc.collect()
                return (stub(), arena()) == (None, None)

            await eventually(let_go, "the dead stub to be let go of")

    asyncio.run(main())
