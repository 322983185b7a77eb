"""Models that need the same resources, on real hosts."""

from __future__ import annotations

import queue
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from urllib.request import urlopen

import numpy as np
import pytest

from tests.clients import Client, infer_error, run_script, tensor
from tests.conftest import DEADLINE, RepositoryBuilder, RunningHost, Serve, wait_until
from tests.integration.test_scheduling import Pipe

WAITS = """
import os

import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    \"\"\"Opens the pipe that it is given, if it is given one.\"\"\"

    count = 0

    def initialize(self, args):
        self.name = args["model_instance_name"]

    def execute(self, requests):
        responses = []
        for request in requests:
            pipe = pb_utils.get_input_tensor_by_name(request, "PIPE").as_numpy()[0].decode()
            if pipe == "die":
                os._exit(3)
            if pipe:
                open(pipe).read()
            self.count += 1
            text = f"{self.name} {self.count}".encode()
            answer = pb_utils.Tensor("WHO", np.array([text], dtype=object))
            responses.append(pb_utils.InferenceResponse([answer]))
        return responses
"""
ASKS = WAITS.replace(
    "        responses = []",
    """\
        responses = []
        for target in ("none", "spare"):
            nothing = pb_utils.Tensor("PIPE", np.array([b""], dtype=np.object_))
            reply = pb_utils.InferenceRequest(
                model_name=target, inputs=[nothing], requested_output_names=["WHO"]
            ).exec()
            if reply.has_error():
                raise pb_utils.TritonModelException(reply.error().message())""",
)
CONFIG = """
backend: "python"
input [ {{ name: "PIPE" data_type: TYPE_STRING dims: [ 1 ] }} ]
output [ {{ name: "WHO" data_type: TYPE_STRING dims: [ 1 ] }} ]
instance_group [ {groups} ]
{more}
"""


def group(resources: str, priority: int = 0, count: int = 1) -> str:
    return (
        f"{{ count: {count} kind: KIND_CPU"
        f" rate_limiter {{ priority: {priority} resources [ {resources} ] }} }}"
    )


def add(repository: RepositoryBuilder, name: str, *groups: str, more: str = "") -> None:
    repository.add(name, WAITS, CONFIG.format(groups=", ".join(groups), more=more))


R = '{ name: "R" count: 1 }'


@pytest.fixture(scope="module")
def host(module_repository: RepositoryBuilder, module_serve: Serve) -> RunningHost:
    for name in ("one", "other"):
        add(module_repository, name, group(R))
    add(module_repository, "batched", group(R), more="dynamic_batching { }")
    for name, resources in (("none", ""), ("spare", R.replace("R", "S"))):
        add(module_repository, name, group(resources))
    module_repository.add("asks", ASKS, CONFIG.format(groups=group(R), more=""))
    add(module_repository, "chosen", group("", 1), group("", 2))
    warm = """model_warmup [ { name: "w" batch_size: 1 inputs { key: "PIPE"
        value { data_type: TYPE_STRING dims: [ 1 ] zero_data: true } } } ]"""
    add(module_repository, "warm", group(R, count=2), more=warm)
    return module_serve(module_repository, "--rate-limit=execution_count").wait_started()


@pytest.fixture
def client(host: RunningHost) -> Iterator[Client]:
    with host.client() as client:
        yield client


@pytest.fixture
def pipe(tmp_path: Path, pool: ThreadPoolExecutor) -> Iterator[Pipe]:
    """It ends before the pool does, whose threads wait for models."""
    with Pipe(tmp_path / "pipe") as pipe:
        yield pipe


def who(client: Client, model: str, pipe: str = "") -> str:
    """The instance that has answered, and how often it has been run."""
    text = np.array([pipe.encode()], dtype=np.object_)
    answer: bytes = client.infer(model, [tensor("PIPE", text)], client_timeout=DEADLINE).as_numpy(
        "WHO"
    )[0]
    return answer.decode()


def pending(host: RunningHost, model: str) -> float:
    with urlopen(f"http://{host.metrics_url}/metrics", timeout=DEADLINE) as answer:
        text = answer.read().decode()
    start = f'nv_inference_pending_request_count{{model="{model}",version="1"}} '
    (line,) = [line for line in text.splitlines() if line.startswith(start)]
    return float(line.removeprefix(start))


def waiting(host: RunningHost, model: str, count: int) -> bool:
    return pending(host, model) == count


class Held:
    """A request to `one` that holds the resource until it is let go."""

    def __init__(self, host: RunningHost, pipe: Pipe, pool: ThreadPoolExecutor) -> None:
        self._pipe = pipe
        self.host = host
        self.answer: Future[str] = pool.submit(self._send_request)
        wait_until(pipe.reached, "the model to wait")

    def _send_request(self) -> str:
        with self.host.client() as client:
            return who(client, "one", str(self._pipe.path))

    def let_go(self) -> None:
        self._pipe.let_go()
        self.answer.result(DEADLINE)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def send_aside(host: RunningHost, pool: ThreadPoolExecutor, model: str) -> Future[str]:
    def send_request() -> str:
        with host.client() as client:
            return who(client, model)

    return pool.submit(send_request)


@pytest.mark.parametrize("model", ["other", "batched"])
def test_an_execution_waits_for_the_resource_that_another_models_has(
    host: RunningHost, pipe: Pipe, pool: ThreadPoolExecutor, model: str
) -> None:
    held = Held(host, pipe, pool)
    try:
        waiting = send_aside(host, pool, model)
        wait_until(lambda: pending(host, model) == 1, "the request to wait")
        assert not waiting.done()
    finally:
        held.let_go()
    assert waiting.result(DEADLINE).startswith(f"{model}_0_0 ")


def test_a_model_whose_resources_are_free_does_not_wait_for_its_callers(
    host: RunningHost, pipe: Pipe, pool: ThreadPoolExecutor
) -> None:
    """`other` waits first for the resource that `asks` has while it calls two models."""
    held = Held(host, pipe, pool)
    try:
        asks = send_aside(host, pool, "asks")
        wait_until(partial(waiting, host, "asks", 1), "the request to wait")
        answers = [asks, *(send_aside(host, pool, "other") for _ in range(2))]
        wait_until(partial(waiting, host, "other", 2), "the requests to wait")
    finally:
        held.let_go()
    assert [answer.result(DEADLINE).split("_")[0] for answer in answers] == [
        "asks", "other", "other",
    ]  # fmt: skip


def test_death_of_an_instance_frees_its_resources(
    host: RunningHost, client: Client, pipe: Pipe, pool: ThreadPoolExecutor
) -> None:
    held = Held(host, pipe, pool)
    waiting = send_aside(host, pool, "other")
    wait_until(lambda: pending(host, "other") == 1, "the request to wait")
    (stub,) = host.stubs("one_0_0")
    stub.send_signal(signal.SIGKILL)
    assert waiting.result(DEADLINE)
    assert held.answer.exception(DEADLINE) is not None
    pipe.let_go()
    wait_until(lambda: client.is_model_ready("one"), "the new process")
    assert who(client, "one") == "one_0_0 1"


def test_an_instance_of_priority_two_is_run_half_as_often(client: Client) -> None:
    last = [who(client, "chosen") for _ in range(9)]
    assert sum(name.startswith("chosen_0_0") for name in last) == 6
    assert sum(name.startswith("chosen_1_0") for name in last) == 3


def test_model_of_priority_one_runs_twice_as_often_as_one_of_priority_two(
    repository: RepositoryBuilder, serve: Serve, tmp_path: Path, pool: ThreadPoolExecutor
) -> None:
    log = tmp_path / "executions"
    writes = WAITS.replace(
        "        responses = []",
        f"""\
        with open({str(log)!r}, "a") as log:
            log.write(self.name[0])
        responses = []""",
    )
    for name, priority in (("one", 0), ("a", 1), ("b", 2)):
        repository.add(name, writes, CONFIG.format(groups=group(R, priority), more=""))
    host = serve(repository, "--rate-limit=execution_count").wait_started()
    empty = tensor("PIPE", np.array([b""], dtype=np.object_))
    with host.client() as client:
        held = Held(host, Pipe(tmp_path / "pipe"), pool)
        answers: queue.Queue[object] = queue.Queue()
        for _ in range(30):
            for model in ("a", "b"):
                client.async_infer(model, [empty], lambda result, error: answers.put(error))
        try:
            for model in ("a", "b"):
                wait_until(partial(waiting, host, model, 30), "the requests to wait")
        finally:
            held.let_go()
        assert [answers.get(timeout=DEADLINE) for _ in range(60)] == [None] * 60
    assert log.read_text()[1:46] == "aab" * 15, "initialisation and warm-up are executions, too"


def test_instances_load_and_warm_up_one_after_the_other(client: Client) -> None:
    (found,) = client.get_inference_statistics("warm").model_stats
    assert found.execution_count == 2
    assert who(client, "warm").endswith(" 2")


LIMITED = (
    'Resource count for "R" is limited to {} which will prevent scheduling of one or more model'
    " instances, the minimum required count is {}"
)
BOTH = (
    'Resource "R" is present as both global and device-specific resource in the model'
    " configuration."
)


@pytest.fixture(scope="module")
def refusing(tmp_path_factory: pytest.TempPathFactory, module_serve: Serve) -> RunningHost:
    repository = RepositoryBuilder(tmp_path_factory.mktemp("refusing"))
    add(repository, "greedy", group('{ name: "R" count: 5 }'))
    add(repository, "unlisted", group('{ name: "S" count: 1 }'))
    add(repository, "both", group(R), group('{ name: "R" global: true count: 1 }'))
    add(repository, "fits", group('{ name: "R" count: 4 }', count=2))
    return module_serve(
        repository,
        "--rate-limit=execution_count",
        "--rate-limit-resource=R:4",
        "--rate-limit-resource=R:7",
        "--model-control-mode=explicit",
    ).wait_started()


@pytest.mark.parametrize(
    ("model", "text"),
    [
        ("greedy", LIMITED.format(4, 5)),
        ("unlisted", LIMITED.format(0, 1).replace('"R"', '"S"')),
        ("both", BOTH),
    ],
)
def test_a_model_that_could_never_run_does_not_load(
    refusing: RunningHost, model: str, text: str
) -> None:
    with refusing.client() as client:
        for _ in range(2):
            assert infer_error(client.load_model, model)[1] == (
                f"load failed for model '{model}': version 1 is at UNAVAILABLE state:"
                f" Invalid argument: {text};\n"
            )
        client.load_model("fits")
        assert who(client, "fits")
        client.unload_model("fits")


def test_without_the_flag_settings_have_no_effect(
    repository: RepositoryBuilder, serve: Serve, tmp_path: Path, pool: ThreadPoolExecutor
) -> None:
    add(repository, "one", group(R))
    add(repository, "other", group(R.replace("1", "9")))
    host = serve(repository, "--rate-limit=off", "--rate-limit-resource=R:1").wait_started()
    held = Held(host, Pipe(tmp_path / "pipe"), pool)
    try:
        with host.client() as client:
            assert who(client, "other") == "other_0_0 1"
    finally:
        held.let_go()


def test_a_cached_response_needs_no_resources(
    repository: RepositoryBuilder, serve: Serve, tmp_path: Path, pool: ThreadPoolExecutor
) -> None:
    add(repository, "one", group(R))
    add(repository, "cached", group(R), more="response_cache { enable: true }")
    flags = ("--rate-limit=execution_count", "--cache-config=local,size=1048576")
    host = serve(repository, *flags).wait_started()
    with host.client() as client:
        assert who(client, "cached") == "cached_0_0 1"
        held = Held(host, Pipe(tmp_path / "pipe"), pool)
        try:
            assert who(client, "cached") == "cached_0_0 1"
        finally:
            held.let_go()


def test_every_waiting_instance_gets_its_turn(
    host: RunningHost, pipe: Pipe, pool: ThreadPoolExecutor
) -> None:
    held = Held(host, pipe, pool)
    waiting = [send_aside(host, pool, "other") for _ in range(3)]
    wait_until(lambda: pending(host, "other") == 3, "the requests to wait")
    held.let_go()
    assert len({answer.result(DEADLINE) for answer in waiting}) == 3


def test_a_model_that_waits_for_its_own_resource_gets_an_error(
    repository: RepositoryBuilder, serve: Serve
) -> None:
    repository.copy("script")
    configuration = repository.path / "script" / "config.pbtxt"
    configuration.write_text(f"{configuration.read_text()}\ninstance_group [ {group(R)} ]")
    for name, resource in (("same", R), ("other", R.replace("R", "S"))):
        add(repository, name, group(resource, count=2))
    host = serve(repository, "--rate-limit=execution_count").wait_started()
    source = """
        def asked(model):
            given = pb_utils.Tensor("PIPE", np.array([b""], dtype=np.object_))
            answer = ask(model, given, outputs=["WHO"]).exec()
            return answer.error().message() if answer.has_error() else "answered"
        return [asked("same"), asked("other"), asked("same")]
        """
    with host.client() as client:
        same, other, again = run_script(client, source)
        assert other == "answered"
        assert same == again
        assert same == (
            "Model same - Error when running inference: the request waits for itself: resources"
            " that model 'same' needs are held by a request that waits for this one. Let the two"
            " models need different resources, or raise --rate-limit-resource"
        )
        assert who(client, "same"), "missing holds anything any more"
