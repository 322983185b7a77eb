"""A server inside a program: its gRPC application, its hook for model control, its numbers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from tritonclient.grpc import service_pb2 as pb
from tritonclient.utils import InferenceServerException

import pbhost
from host.model_control.control import LoadParameters
from tests.clients import infer_error, tensor
from tests.conftest import DEADLINE, RepositoryBuilder
from tests.embedding_page import class_of_page
from tests.integration.test_inprocess import options
from tests.waiting import eventually

EXPLICIT = {"allow_grpc": False, "allow_metrics": False, "model_control_mode": "explicit"}


def handlers(application: pbhost.GrpcApplication) -> list[grpc.GenericRpcHandler[Any, Any]]:
    """The application as grpcio takes it."""

    def status(error: pbhost.HostError, rpc: Any) -> None:
        found = application.status(error)
        rpc.set_code(next(code for code in grpc.StatusCode if code.value[0] == found.code))
        rpc.set_details(found.message)

    def unary(path: str) -> Callable[[bytes, Any], Awaitable[bytes]]:
        async def answer(message: bytes, rpc: Any) -> bytes:
            try:
                return await application.call(path, message, rpc.invocation_metadata())
            except pbhost.HostError as error:
                status(error, rpc)
                return b""

        return answer

    def stream(path: str) -> Callable[[AsyncIterator[bytes], Any], AsyncIterator[bytes]]:
        async def answer(messages: AsyncIterator[bytes], rpc: Any) -> AsyncIterator[bytes]:
            try:
                async for message in application.stream(path, messages, rpc.invocation_metadata()):
                    yield message
            except pbhost.HostError as error:
                status(error, rpc)

        return answer

    services: dict[str, dict[str, grpc.RpcMethodHandler[Any, Any]]] = {}
    for method in application.methods:
        path = f"/{method.service}/{method.name}"
        services.setdefault(method.service, {})[method.name] = (
            grpc.stream_stream_rpc_method_handler(stream(path))
            if method.streams
            else grpc.unary_unary_rpc_method_handler(unary(path))
        )
    return [grpc.method_handlers_generic_handler(*service) for service in services.items()]


@asynccontextmanager
async def behind_grpcio(server: pbhost.Server) -> AsyncIterator[str]:
    """The url of a server of grpcio that serves the application."""
    other = grpc.aio.server()
    other.add_generic_rpc_handlers(tuple(handlers(server.grpc_application)))
    port = other.add_insecure_port("127.0.0.1:0")
    await other.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await other.stop(None)


def use_all_kinds_of_methods(url: str) -> None:
    with grpcclient.InferenceServerClient(url) as client:
        assert client.is_server_ready()
        array = np.arange(1 << 18, dtype=np.float32)
        result = client.infer("identity", [tensor("INPUT0", array)])
        np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), array)
        assert infer_error(client.infer, "missing", [tensor("INPUT0", array)]) == (
            "StatusCode.NOT_FOUND",
            "Request for unknown model: 'missing' is not found",
        )
        answers: list[tuple[Any, InferenceServerException | None]] = []
        client.start_stream(lambda result, error: answers.append((result, error)))
        for command in ("many=1000 last", "many=3 last"):
            text = np.array([command.encode()], dtype=np.object_)
            client.async_stream_infer("stream", [tensor("COMMAND", text)])
        client.stop_stream()
    numbers = [result.as_numpy("NUMBER")[0] for result, error in answers if error is None]
    assert numbers == [*range(1001), *range(4)]


def test_another_grpc_server_serves_the_methods(repository: RepositoryBuilder) -> None:
    repository.copy("identity", "stream")

    async def main() -> None:
        async with (
            pbhost.Server(options(repository, allow_grpc=False, allow_metrics=False)) as server,
            behind_grpcio(server) as url,
        ):
            await asyncio.to_thread(use_all_kinds_of_methods, url)
            with pytest.raises(KeyError):
                await server.grpc_application.call("/inference.GRPCInferenceService/No", b"")
            families = {family.name: family for family in await server.collect_metrics()}
            samples = families["nv_inference_request_success"].samples
            assert {dict(s.labels)["model"]: s.value for s in samples}["identity"] == 1
            await server.stop()
            with pytest.raises(pbhost.HostError, match="Server not ready"):
                _ = server.grpc_application

    asyncio.run(main())


def test_a_callback_gets_the_response_to_a_model_infer(repository: RepositoryBuilder) -> None:
    repository.copy("identity")
    array = np.arange(16, dtype=np.float32)
    request = pb.ModelInferRequest(model_name="identity", id="7")
    request.inputs.add(name="INPUT0", datatype="FP32", shape=[16])
    request.raw_input_contents.append(array.tobytes())
    message = request.SerializeToString()
    request.inputs[0].datatype = "INT32"
    wrong = request.SerializeToString()
    request.model_name = "missing"
    missing = request.SerializeToString()

    async def main() -> None:
        server_options = options(repository, allow_grpc=False, allow_metrics=False)
        async with pbhost.Server(server_options) as server:
            application = server.grpc_application
            answer: asyncio.Future[bytes | pbhost.HostError] = asyncio.Future()
            application.start_infer(message, (), answer.set_result)
            assert application.open_requests == 1
            data = await asyncio.wait_for(answer, DEADLINE)
            assert isinstance(data, bytes)
            response = pb.ModelInferResponse.FromString(data)
            assert (response.id, response.raw_output_contents) == ("7", [array.tobytes()])
            for invalid in (wrong, missing):
                with pytest.raises(pbhost.HostError, match=r"data-type|is not found"):
                    application.start_infer(invalid, (), answer.set_result)
            assert application.open_requests == 0

    asyncio.run(main())


WAITS = """
import threading

import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        pause = threading.Event()
        for request in requests:
            while not request.is_cancelled():
                pause.wait(0.01)
        return [None for request in requests]
"""


def test_queues_say_how_long_requests_wait(repository: RepositoryBuilder) -> None:
    repository.copy("identity")
    repository.add("waits", WAITS, "instance_group [{count: 1, kind: KIND_CPU}]")

    async def main() -> None:
        async with pbhost.Server(
            options(repository, allow_grpc=False, allow_metrics=False)
        ) as server:
            assert server.queue_state() == pbhost.QueueState()
            waiting = [asyncio.ensure_future(server.infer("waits", {})) for _ in range(3)]
            await eventually(lambda: server.queue_state("waits").queued == 2, "two to be queued")
            state = server.queue_state("waits")
            assert state.in_flight == 3 and state.oldest_s > 0
            await eventually(
                lambda: server.queue_state().oldest_s > state.oldest_s, "the wait to grow"
            )
            assert server.queue_state("identity") == pbhost.QueueState()
            await server.infer("identity", {"INPUT0": np.zeros(1, np.float32)})
            after = server.queue_state("identity")
            assert (after.executed, after.queued) == (1, 0) and after.waited_s > 0
            for one in waiting:
                one.cancel()
            await asyncio.wait(waiting)

    asyncio.run(main())


class Hook:
    """Notes what it is asked, refuses some, and does the rest."""

    def __init__(self) -> None:
        self.asked: list[tuple[object, ...]] = []

    async def load(
        self, name: str, parameters: LoadParameters, load_here: Callable[[], Awaitable[None]]
    ) -> None:
        self.asked.append(("load", name, dict(parameters)))
        if name == "refused":
            raise pbhost.HostError(pbhost.ErrorCode.PERMISSION_DENIED, "not on this server")
        await load_here()

    async def unload(
        self, name: str, unload_dependents: bool, unload_here: Callable[[], Awaitable[None]]
    ) -> None:
        self.asked.append(("unload", name, unload_dependents))
        await unload_here()


LOADS = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        pb_utils.unload_model("identity")
        pb_utils.load_model("identity")
        return [pb_utils.InferenceResponse([]) for request in requests]
"""


def test_a_hook_takes_part_in_loads_and_unloads(repository: RepositoryBuilder) -> None:
    repository.copy("identity")
    repository.add("loads", LOADS, "")
    hook = Hook()
    override = '{"max_batch_size": 0, "input": [{"name": "INPUT0", "dims": [-1]}]}'

    def control(url: str) -> None:
        with grpcclient.InferenceServerClient(url) as client:
            client.load_model("loads")
            client.load_model("identity")
            assert client.is_model_ready("identity")
            client.unload_model("identity")
            with pytest.raises(InferenceServerException, match="not on this server") as caught:
                client.load_model("refused", config=override)
            assert caught.value.status() == "StatusCode.PERMISSION_DENIED"

    async def main() -> None:
        async with pbhost.Server(options(repository, **EXPLICIT), control_hook=hook) as server:
            async with behind_grpcio(server) as url:
                await asyncio.to_thread(control, url)
            assert hook.asked == [
                ("load", "loads", {}),
                ("load", "identity", {}),
                ("unload", "identity", False),
                ("load", "refused", {"config": override}),
            ]
            hook.asked.clear()
            await server.load_model("identity")
            assert hook.asked == []
            await server.infer("loads", {})
            assert hook.asked == [("unload", "identity", False), ("load", "identity", {})]
            await server.unload_model("identity")
            assert len(hook.asked) == 2
            with pytest.raises(pbhost.HostError, match="no available versions"):
                await server.infer("identity", {"INPUT0": np.zeros(1, np.float32)})

    asyncio.run(main())


class FailingHook(Hook):
    """Has a defect."""

    async def load(
        self, name: str, parameters: LoadParameters, load_here: Callable[[], Awaitable[None]]
    ) -> None:
        raise KeyError(name)


def test_a_model_gets_an_error_if_a_hook_fails_unexpectedly(repository: RepositoryBuilder) -> None:
    repository.copy("identity")
    repository.add("loads", LOADS, "")

    async def main() -> None:
        several = options(repository, **EXPLICIT, load_model=["loads"])
        async with pbhost.Server(several, control_hook=FailingHook()) as server:
            with pytest.raises(pbhost.HostError, match="unexpected failure: KeyError"):
                await asyncio.wait_for(server.infer("loads", {}), DEADLINE)

    asyncio.run(main())


class CancelledHook(Hook):
    """Waits for a task that is cancelled."""

    async def load(
        self, name: str, parameters: LoadParameters, load_here: Callable[[], Awaitable[None]]
    ) -> None:
        task = asyncio.create_task(asyncio.Event().wait())
        asyncio.get_running_loop().call_soon(task.cancel)
        await task


def test_a_model_gets_an_error_if_a_hook_is_cancelled(repository: RepositoryBuilder) -> None:
    repository.copy("identity")
    repository.add("loads", LOADS, "")

    async def main() -> None:
        several = options(repository, **EXPLICIT, load_model=["loads"])
        async with pbhost.Server(several, control_hook=CancelledHook()) as server:
            with pytest.raises(pbhost.HostError, match="the call was cancelled"):
                await asyncio.wait_for(server.infer("loads", {}), DEADLINE)

    asyncio.run(main())


LOADS_AT_ITS_START = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        pb_utils.load_model("identity")

    def execute(self, requests):
        return [pb_utils.InferenceResponse([]) for request in requests]
"""


def test_the_hook_of_the_guide_loads_and_unloads_in_all_servers(
    repository: RepositoryBuilder,
) -> None:
    repository.copy("identity")
    cpu = "instance_group [{count: 1, kind: KIND_CPU}]"
    repository.add("outer", LOADS_AT_ITS_START, cpu)
    hook_class = class_of_page("shared_control.py", "SharedControl")
    one_at_a_time = options(repository, **EXPLICIT, model_load_thread_count=1)
    hooks = [hook_class(), hook_class()]

    async def main() -> None:
        async with (
            pbhost.Server(one_at_a_time, control_hook=hooks[0]) as first,
            pbhost.Server(one_at_a_time, control_hook=hooks[1]) as second,
        ):
            hooks[0].others, hooks[1].others = [second], [first]
            # The place of a load in progress is that of 'outer', which waits for 'identity'.
            await asyncio.wait_for(first.core.control.load_model("outer", {}), DEADLINE)
            await second.core.control.unload_model("outer", False)
            for server in (first, second):
                array = np.ones(1, np.float32)
                assert (await server.infer("identity", {"INPUT0": array}))["OUTPUT0"] == [1]
                with pytest.raises(pbhost.HostError, match="no available versions"):
                    await server.infer("outer", {})

    asyncio.run(main())


def test_a_server_adapts_the_configurations_that_it_reads(repository: RepositoryBuilder) -> None:
    repository.copy("identity")
    repository.add("refused", "", "")

    def adapt(config: Any) -> None:
        if not config.input:
            raise pbhost.HostError(pbhost.ErrorCode.UNAVAILABLE, "it is not for this server")
        config.ClearField("instance_group")
        config.instance_group.add(count=3)  # defaults are filled in afterwards

    async def main() -> None:
        settings = options(repository, **EXPLICIT, exit_on_error=False, load_model=["*"])
        async with pbhost.Server(settings, adapt_config=adapt) as server:
            states = {
                entry.name: entry.state for entry in await server.core.repository_index(False)
            }
            assert states == {"identity": "READY", "refused": ""}
            (group,) = server.core.model_config("identity", "").instance_group
            assert (group.name, group.count) == ("identity_0", 3)
            array = np.ones(1, np.float32)
            assert (await server.infer("identity", {"INPUT0": array}))["OUTPUT0"] == [1]
            other = '{"input": [{"name": "INPUT0", "data_type": "TYPE_FP32", "dims": [2]}]}'
            await server.core.control.load_model("identity", {"config": other})
            (group,) = server.core.model_config("identity", "").instance_group
            assert group.count == 3

    asyncio.run(main())


def test_hooks_are_not_asked_for_what_the_server_refuses(repository: RepositoryBuilder) -> None:
    repository.copy("identity")
    hook = Hook()

    async def main() -> None:
        fixed = options(repository, allow_grpc=False, allow_metrics=False)
        async with pbhost.Server(fixed, control_hook=hook) as server:
            for ask in (
                server.core.control.load_model("identity", {}),
                server.load_model("identity"),
            ):
                with pytest.raises(pbhost.HostError, match="not allowed if polling is enabled"):
                    await ask
        assert hook.asked == []
        with pytest.raises(pbhost.HostError, match="Server not ready"):
            await server.load_model("identity")

    asyncio.run(main())
