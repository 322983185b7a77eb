"""Models that fork, start processes, fill memory, or die at a bad moment."""

from __future__ import annotations

import asyncio
from pathlib import Path
from textwrap import dedent

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

import pbhost
from tests.clients import infer_error, tensor
from tests.conftest import DEADLINE, RepositoryBuilder, Serve, wait_until
from tests.integration.test_inprocess import options
from tests.waiting import UNTIL_SOURCE

TWO_INPUTS = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        for name in ("A", "B"):
            config.add_input({"name": name, "data_type": "TYPE_FP32", "dims": [-1]})
            config.add_output({"name": f"{name}_OUT", "data_type": "TYPE_FP32", "dims": [-1]})
        return config

    def execute(self, requests):
        return [
            pb_utils.InferenceResponse(
                [pb_utils.Tensor(f"{t.name()}_OUT", t.as_numpy()) for t in request.inputs()]
            )
            for request in requests
        ]
"""


def test_a_request_without_room_holds_no_memory_afterwards(repository: RepositoryBuilder) -> None:
    repository.add("m", TWO_INPUTS)
    half, too_much = np.zeros(500_000, np.float32), np.zeros(700_000, np.float32)
    options = pbhost.Options(
        model_repository=[str(repository.path)],
        allow_grpc=False,
        allow_http=False,
        allow_metrics=False,
        log_info=False,
        arena_byte_size=4 << 20,
    )

    async def main() -> None:
        async with pbhost.Server(options) as server:
            for _ in range(4):
                with pytest.raises(pbhost.HostError, match="Failed to increase the shared memory"):
                    await server.infer("m", {"A": half, "B": too_much})
            small = np.ones(1000, np.float32)
            result = await server.infer("m", {"A": half, "B": small})
            np.testing.assert_array_equal(result["B_OUT"], small)

    asyncio.run(main())


def test_values_that_no_message_can_carry_are_refused_without_a_hang(
    repository: RepositoryBuilder,
) -> None:
    repository.copy("identity")
    no_ports = options(repository, allow_grpc=False, allow_metrics=False)

    async def main() -> None:
        inputs = {"INPUT0": np.ones(3, np.float32)}
        async with pbhost.Server(no_ports) as server:
            for bad in ({"x": 1 << 70}, {"x": "\udcff"}, {"x": [1]}, {"x": np.float32(1)}):
                with pytest.raises(pbhost.HostError) as caught:
                    await server.infer("identity", inputs, parameters=bad)  # type: ignore[arg-type]  # wrong on purpose
                assert caught.value.code is pbhost.ErrorCode.INVALID_ARG
            with pytest.raises(pbhost.HostError):
                await server.infer("identity", inputs, request_id="\udcff")
            await server.infer("identity", inputs)

    asyncio.run(main())


def test_a_parameter_that_is_no_text_fails_its_own_response(
    repository: RepositoryBuilder, serve: Serve
) -> None:
    source = """
    import os
    import triton_python_backend_utils as pb_utils

    class TritonPythonModel:
        def execute(self, requests):
            return [pb_utils.InferenceResponse([], parameters={"f": "a\\udcff"}) for _ in requests]
    """
    repository.add("odd", source)
    host_process = serve(repository).wait_started()
    with host_process.client() as client:
        for _ in range(2):
            status, text = infer_error(client.infer, "odd", [])
            assert status == "StatusCode.INTERNAL"
            assert "'f' is not valid text" in text
    assert "restarted" not in host_process.output


def test_a_model_may_fork_log_in_the_child_and_end_what_it_started(
    repository: RepositoryBuilder, serve: Serve
) -> None:
    source = """
    import multiprocessing
    import subprocess
    import sys

    import triton_python_backend_utils as pb_utils

    def work(number):
        pb_utils.Logger.log_info(f"child {number}")

    class TritonPythonModel:
        def execute(self, requests):
            context = multiprocessing.get_context("fork")
            child = context.Process(target=work, args=(7,))
            child.start()
            child.join()
            assert child.exitcode == 0, child.exitcode
            sleeper = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
            sleeper.terminate()
            assert sleeper.wait(30) == -15
            return [pb_utils.InferenceResponse([]) for _ in requests]
    """
    repository.add("forks", source)
    running = serve(repository).wait_started()
    with running.client() as client:
        for _ in range(3):
            client.infer("forks", [])
    running.wait_for("child 7")
    assert "broke the protocol" not in running.output


def test_a_child_that_prints_without_end_does_not_hold_up_the_host(
    repository: RepositoryBuilder, serve: Serve
) -> None:
    source = """
    import os
    import subprocess
    import triton_python_backend_utils as pb_utils

    class TritonPythonModel:
        def execute(self, requests):
            subprocess.Popen(["yes", "a long line to fill the pipe with" * 20])
            os.abort()
    """
    repository.add("chatty", source)
    repository.copy("identity")
    running = serve(repository).wait_started()
    with running.client() as client:
        status, _ = infer_error(client.infer, "chatty", [], client_timeout=DEADLINE)
        assert status == "StatusCode.UNAVAILABLE"
        array = np.ones(2, np.float32)
        client.infer("identity", [tensor("INPUT0", array)], client_timeout=DEADLINE)


def test_an_instance_that_dies_while_another_one_loads_is_replaced(
    repository: RepositoryBuilder, serve: Serve
) -> None:
    source = """
    import os, signal
    import triton_python_backend_utils as pb_utils

    FIRST, SECOND = __file__ + ".first", __file__ + ".second"

    def die():
        until(lambda: os.path.exists(SECOND), "the second instance to load")
        os.kill(os.getpid(), signal.SIGKILL)

    class TritonPythonModel:
        def initialize(self, args):
            if args["model_instance_name"].endswith("_1"):
                with open(FIRST) as file:
                    first = file.read()
                open(SECOND, "w").close()
                until(lambda: not os.path.exists("/proc/" + first), "the first instance's end")
            elif not os.path.exists(FIRST):
                with open(FIRST, "w") as file:
                    file.write(str(os.getpid()))
                threading.Thread(target=die).start()

        def execute(self, requests):
            return [pb_utils.InferenceResponse([]) for _ in requests]
    """
    config = "backend: 'python' instance_group [ { count: 2 } ]"
    repository.add("pair", UNTIL_SOURCE + dedent(source), config)
    running = serve(repository, env={"TRITON_PARALLEL_INSTANCE_LOADING": "0"}).wait_started()
    running.wait_for("restarted")
    with running.client() as client:
        for _ in range(6):
            client.infer("pair", [])
    wait_until(lambda: len(running.stubs()) == 2, "no more than its two stubs")
    assert running.stop() == 0


def test_a_client_that_gives_up_a_load_does_not_stop_it(
    repository: RepositoryBuilder, serve: Serve, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    source = f"""
    import os
    import triton_python_backend_utils as pb_utils

    class TritonPythonModel:
        def initialize(self, args):
            print("initializing", flush=True)
            until(lambda: os.path.exists({str(go)!r}), "the word to continue")

        def execute(self, requests):
            return [pb_utils.InferenceResponse([]) for _ in requests]
    """
    repository.add("slow", UNTIL_SOURCE + dedent(source))
    running = serve(repository, "--model-control-mode=explicit").wait_started()
    with running.client() as client, grpc.insecure_channel(running.url) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        load = stub.RepositoryModelLoad.future(pb.RepositoryModelLoadRequest(model_name="slow"))
        running.wait_for("initializing")
        assert load.cancel()
        stub.ServerLive(pb.ServerLiveRequest())  # behind which the host has read of it
        go.touch()
        wait_until(client.is_server_ready, "the load to end")
        client.infer("slow", [])


def test_a_version_that_failed_once_is_forgotten_when_another_one_serves(
    repository: RepositoryBuilder, serve: Serve
) -> None:
    path = repository.add("fixed", "import no_such_library\n", "backend: 'python'")
    running = serve(repository, "--model-control-mode=explicit").wait_started()
    with running.client() as client:
        infer_error(client.load_model, "fixed")
        assert not client.is_server_ready()
        (path / "1" / "model.py").unlink()
        repository.add("fixed", TWO_INPUTS, version=2)
        client.load_model("fixed")
        assert client.is_server_ready()


def test_numpy_numbers_complete_a_configuration(
    repository: RepositoryBuilder, serve: Serve
) -> None:
    source = TWO_INPUTS.replace('"dims": [-1]', '"dims": [np.int64(-1)]').replace(
        "import triton", "import numpy as np\nimport triton"
    )
    repository.add("numbers", source)
    running = serve(repository).wait_started()
    with running.client() as client:
        assert list(client.get_model_metadata("numbers").inputs[0].shape) == [-1]


@pytest.mark.parametrize(
    "methods",
    [
        """
    def initialize(self, args):
        args.clear()
""",
        """
    def __getattr__(self, name):
        raise KeyError(name)
""",
    ],
    ids=["arguments are changed", "__getattr__ raises another error"],
)
def test_a_model_with_unusual_habits_is_served_and_finalized(
    repository: RepositoryBuilder, serve: Serve, methods: str
) -> None:
    repository.add("odd", TWO_INPUTS + methods)
    running = serve(repository, "--model-control-mode=explicit", "--load-model=odd").wait_started()
    with running.client() as client:
        assert client.is_model_ready("odd")
        values = np.array([1], dtype=np.float32)
        result = client.infer("odd", [tensor("A", values), tensor("B", values)])
        np.testing.assert_array_equal(result.as_numpy("B_OUT"), values)
        client.unload_model("odd")
        running.wait_for("successfully unloaded 'odd' version 1")
    assert "not healthy" not in running.output


def test_the_error_of_a_property_that_gives_execute_reaches_the_client(
    repository: RepositoryBuilder, serve: Serve
) -> None:
    repository.add(
        "lazy",
        TWO_INPUTS.replace(
            "    def execute(self, requests):",
            "    @property\n"
            "    def execute(self):\n"
            "        raise ImportError('libcudnn is missing')\n\n"
            "    def run(self, requests):",
        ),
    )
    running = serve(repository).wait_started()
    values = np.array([1], dtype=np.float32)
    with running.client() as client:
        inputs = [tensor("A", values), tensor("B", values)]
        _, text = infer_error(client.infer, "lazy", inputs)
    assert "ImportError: libcudnn is missing" in text


def test_a_folder_for_sockets_that_is_too_deep_is_named(
    repository: RepositoryBuilder, serve: Serve
) -> None:
    repository.copy("identity")
    deep = repository.path.parent / ("d" * 100)
    deep.mkdir()
    running = serve(repository, env={"TMPDIR": str(deep)})
    assert running.process.wait(DEADLINE) == 1
    assert "set TMPDIR to a short path" in running.output
    assert not list(deep.iterdir())
