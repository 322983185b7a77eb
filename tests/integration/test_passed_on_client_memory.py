"""Inputs in a client's memory pass through models by reference, and nobody notices a difference."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from tests.clients import tensor
from tests.conftest import DEADLINE, RepositoryBuilder, RunningHost, Serve, wait_until
from tests.integration.test_copy_on_write_views import (
    CONFIG,
    COUNT,
    HEAD,
    SAMPLES,
    SIZE,
    Memory,
    filled,
    numbers,
)
from tests.unit.stub.test_copy_on_write_views import is_possible

CODE = """

def is_in_client_memory(array):
    address = array.__array_interface__["data"][0]
    with open("/proc/self/maps") as maps:
        for line in maps:
            first, end = (int(side, 16) for side in line.split()[0].split("-"))
            if first <= address < end:
                return np.array([float("/dev/shm/" in line)], np.float32)


def ask(model, tensor, **options):
    asked = pb_utils.InferenceRequest(
        model_name=model, requested_output_names=["Y"], inputs=[tensor], **options
    )
    answer = asked.exec()
    if answer.has_error():
        raise pb_utils.TritonModelException(answer.error().message())
    return answer.output_tensors()[0]


def total(array):
    return array[::4096].sum()


def wait_for(path):
    for _ in range(6000):  # a minute
        if os.path.exists(path):
            return
        threading.Event().wait(0.01)


class TritonPythonModel:
    kept = []

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def given(self, request):
        return request.inputs()[0]

    def x(self, request):
        return self.given(request).as_numpy()
"""
MODELS = {
    "returns": """
    def answer(self, request):
        return reply(self.x(request))
""",
    "where": """
    def answer(self, request):
        return reply(is_in_client_memory(self.x(request)))
""",
    "calls": """
    def answer(self, request):  # of the model that is named, or of `returns`
        model = request.request_id() or "returns"
        return pb_utils.InferenceResponse([ask(model, self.given(request))])
""",
    "calls_where": """
    def answer(self, request):
        return reply(is_in_client_memory(ask("returns", self.given(request)).as_numpy()))
""",
    "wraps_where": """
    def answer(self, request):  # the other model gets the same memory in a new tensor
        return pb_utils.InferenceResponse([ask("where", pb_utils.Tensor("X", self.x(request)))])
""",
    "keeps_answer": """
    def answer(self, request):
        self.kept.append(ask("returns", self.given(request)))
        return reply(np.array([total(each.as_numpy()) for each in self.kept], np.float32))
""",
    "keeps_unread_answer": """
    def answer(self, request):
        if request.request_id() == "what were they":
            return reply(np.array([total(each.as_numpy()) for each in self.kept], np.float32))
        self.kept.append(ask("returns", self.given(request)))
        return reply(2 * self.x(request))
""",
    "keeps_view_of_answer": """
    def answer(self, request):
        self.kept.append(ask("returns", self.given(request)).as_numpy(copy=False))
        return reply(np.array([total(each) for each in self.kept], np.float32))
""",
    "repeats": """
    def answer(self, request):  # the output that it made for its first request
        if not self.kept:
            self.kept.append(pb_utils.Tensor("Y", self.x(request)))
        return pb_utils.InferenceResponse(self.kept)
""",
    "writes_before": """
    def answer(self, request):
        array = self.x(request)
        response = reply(array)
        array *= 2
        return response
""",
    "writes_after": """
    def answer(self, request):
        array = self.x(request)
        response = ask("returns", pb_utils.Tensor("X", array))
        array *= 2
        return reply(array + response.as_numpy())
""",
    "early": """
    def answer(self, request):
        if request.request_id() == "what was it":
            return reply(np.array(self.seen, np.float32))
        kept = ask("returns", self.given(request))
        final = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
        request.get_response_sender().send(reply(np.zeros(1, np.float32)), final)
        wait_for(request.request_id())
        later = ask("takes_y", kept)
        self.seen = [total(kept.as_numpy()), total(later.as_numpy())]
        return None
""",
    "in_background": """
    def answer(self, request):
        if request.request_id() == "what was it":
            self.thread.join()
            return reply(np.array([self.seen], np.float32))
        kept = ask("returns", self.given(request))

        def later():
            wait_for(request.request_id())
            self.seen = total(ask("takes_y", kept).as_numpy())

        self.thread = threading.Thread(target=later)
        self.thread.start()
        return reply(np.zeros(1, np.float32))
""",
    "dies": """
    def answer(self, request):
        os.kill(os.getpid(), 9)
""",
    "dies_later": """
    def answer(self, request):
        kept = ask("returns", self.given(request))
        os.kill(os.getpid(), 9)
""",
}
DECOUPLED = {
    "twice": """
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            answer = ask("returns", self.given(request))
            sender.send(pb_utils.InferenceResponse([answer]))
            sender.send(reply(self.x(request)))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
""",
}
STEP = """{ model_name: "%s" model_version: -1
    input_map { key: "X" value: "%s" } output_map { key: "Y" value: "%s" } }"""


def ensemble(*models: str) -> str:
    """One step after the other."""
    names = ["X", *(f"t{index}" for index in range(1, len(models))), "Y"]
    steps = [STEP % step for step in zip(models, names, names[1:], strict=False)]
    return (
        CONFIG.replace('backend: "python"', 'platform: "ensemble"')
        + f"ensemble_scheduling {{ step [ {', '.join(steps)} ] }}"
    )


def add_models(repository: RepositoryBuilder) -> None:
    head = HEAD[: HEAD.index("class TritonPythonModel")] + CODE
    for name, code in MODELS.items():
        repository.add(name, head + code, CONFIG)
    repository.add(
        "takes_y",
        head + MODELS["returns"],
        CONFIG.replace('input [ { name: "X"', 'input [ { name: "Y"'),
    )
    decoupled = "model_transaction_policy { decoupled: true }"
    for name, code in DECOUPLED.items():
        repository.add(name, head + code, CONFIG + decoupled)
    repository.add("ensemble_where", None, ensemble("returns", "where"))
    repository.add("pair", None, ensemble("returns", "returns"))
    repository.add("ensemble", None, ensemble("returns", "calls", "returns"))
    repository.add("ensemble_repeats", None, ensemble("repeats", "returns"))
    repository.add("ensemble_writes", None, ensemble("writes_before", "writes_after", "returns"))
    repository.add("ensemble_dies", None, ensemble("returns", "dies", "returns"))
    repository.add("ensemble_twice", None, ensemble("twice", "returns") + decoupled)


@pytest.fixture(scope="module")
def host(module_repository: RepositoryBuilder, module_serve: Serve) -> RunningHost:
    add_models(module_repository)
    return module_serve(module_repository, "--allow-client-shm=true").wait_started()


@pytest.fixture
def memory(host: RunningHost) -> Iterator[Memory]:
    """Shared memory of a client. At the end of a test, nothing refers to it any more."""
    with host.client() as client:
        memory = Memory(client)
        yield memory
        memory.close()


needs_views = pytest.mark.skipif(
    not is_possible(), reason="needs Linux 5.14 or later, overcommit, and no limit of addresses"
)


@needs_views
@pytest.mark.parametrize("model", ["calls_where", "wraps_where", "ensemble_where"])
def test_an_output_that_is_an_input_in_client_memory_is_not_copied(
    memory: Memory, model: str
) -> None:
    memory.write(numbers(1))
    assert memory.infer(model).item() == 1


@pytest.mark.parametrize("into", [None, 0, 64, SIZE // 2, SIZE])
@pytest.mark.parametrize("model", ["calls", "ensemble"])
def test_the_client_gets_the_right_values(memory: Memory, model: str, into: int | None) -> None:
    for seed in range(3):
        array = numbers(seed)
        memory.write(array)
        np.testing.assert_array_equal(memory.infer(model, into), array)


def test_a_tensor_passes_through_an_ensemble_that_another_model_calls(memory: Memory) -> None:
    array = numbers(4)
    memory.write(array)
    np.testing.assert_array_equal(memory.infer("calls", SIZE, "pair"), array)
    np.testing.assert_array_equal(memory.infer("calls", id="pair"), array)


@pytest.mark.parametrize("model", ["keeps_answer", "keeps_view_of_answer"])
def test_an_answer_that_a_model_keeps_does_not_change(memory: Memory, model: str) -> None:
    sums: list[int] = []
    for value in (1, 2, 3, 9):
        memory.write(filled(value))
        sums.append(value * SAMPLES)
        assert memory.infer(model).tolist() == sums


@pytest.mark.parametrize("into", [0, SIZE // 2, SIZE])
def test_an_answer_that_a_model_keeps_is_not_overwritten_by_an_output(
    memory: Memory, into: int
) -> None:
    before = memory.infer("keeps_unread_answer", id="what were they").tolist()
    for value in (3, 4):
        memory.write(filled(value))
        np.testing.assert_array_equal(memory.infer("keeps_unread_answer", into), filled(2 * value))
        memory.write(filled(9))
    found = memory.infer("keeps_unread_answer", id="what were they").tolist()
    assert found[len(before) :] == [3 * SAMPLES, 4 * SAMPLES]


@pytest.mark.parametrize("model", ["calls", "ensemble_repeats"])
def test_an_output_that_a_model_keeps_does_not_change(
    repository: RepositoryBuilder, serve: Serve, model: str
) -> None:
    add_models(repository)
    host = serve(repository, "--allow-client-shm=true").wait_started()
    with host.client() as client:
        memory = Memory(client)
        for value in (5, 6, 7):
            memory.write(filled(value))
            found = memory.infer(model, id="repeats" if model == "calls" else "")
            np.testing.assert_array_equal(found, filled(5))
        memory.close()


def test_writes_count_until_the_output_is_sent(memory: Memory) -> None:
    for seed in range(3):
        array = numbers(seed)
        memory.write(array)
        np.testing.assert_array_equal(memory.infer("calls", id="writes_before"), 2 * array)
        np.testing.assert_array_equal(memory.infer("calls", id="writes_after"), 3 * array)
        np.testing.assert_array_equal(memory.infer("ensemble_writes", SIZE), 6 * array)
        np.testing.assert_array_equal(memory.content(), array)


@pytest.mark.parametrize("model", ["early", "in_background"])
def test_the_client_may_write_once_it_is_answered_also_if_the_model_goes_on(
    memory: Memory, tmp_path: Path, model: str
) -> None:
    flag = tmp_path / "go"
    memory.write(filled(3))
    memory.infer(model, id=str(flag))
    memory.write(filled(9))
    flag.touch()
    found = memory.infer(model, id="what was it")
    assert (found == 3 * SAMPLES).all()


@pytest.mark.parametrize("model", ["twice", "ensemble_twice"])
def test_each_response_of_a_decoupled_model_has_the_right_values(
    memory: Memory, model: str
) -> None:
    array = numbers(6)
    memory.write(array)
    answers: queue.Queue[tuple[grpcclient.InferResult | None, object]] = queue.Queue()
    given = grpcclient.InferInput("X", [COUNT], "FP32")
    given.set_shared_memory(memory.name, SIZE)
    memory.client.start_stream(lambda result, error: answers.put((result, error)))
    memory.client.async_stream_infer(model, [given])
    for _ in range(2):
        result, error = answers.get(timeout=DEADLINE)
        assert result is not None, error
        np.testing.assert_array_equal(result.as_numpy("Y"), array)
    memory.client.stop_stream()


@pytest.mark.parametrize(
    ("model", "id", "victim"),
    [("calls", "dies", "dies"), ("dies_later", "", "dies_later"), ("ensemble_dies", "", "dies")],
)
def test_a_process_that_is_killed_leaves_no_reference(
    memory: Memory, host: RunningHost, model: str, id: str, victim: str
) -> None:
    """The region is closed at the end of the test, which waits for that."""
    memory.write(numbers(7))
    with pytest.raises(InferenceServerException, match="SIGKILL|signal 9"):
        memory.infer(model, id=id)
    wait_until(lambda: memory.client.is_model_ready(victim), "the model to be back")
    np.testing.assert_array_equal(memory.infer("ensemble", SIZE), numbers(7))


def test_a_model_may_be_killed_between_two_requests(memory: Memory, host: RunningHost) -> None:
    array = numbers(8)
    memory.write(array)
    np.testing.assert_array_equal(memory.infer("calls"), array)
    (stub,) = host.stubs("returns_0")
    stub.kill()
    wait_until(
        lambda: (
            [other.pid for other in host.stubs("returns_0")] not in ([], [stub.pid])
            and memory.client.is_model_ready("returns")
        ),
        "the model to be back",
    )
    np.testing.assert_array_equal(memory.infer("calls", SIZE), array)


def test_frontend_processes_get_the_right_values(
    repository: RepositoryBuilder, serve: Serve
) -> None:
    add_models(repository)
    host = serve(repository, "--allow-client-shm=true", "--frontend-processes=2").wait_started()
    with host.client() as client:
        memory = Memory(client)
        for seed, model in enumerate(("calls", "ensemble", "calls", "ensemble")):
            array = numbers(seed)
            memory.write(array)
            np.testing.assert_array_equal(memory.infer(model), array)
            np.testing.assert_array_equal(memory.infer(model, SIZE), array)
        result = client.infer("ensemble", [tensor("X", array)])
        np.testing.assert_array_equal(result.as_numpy("Y"), array)
        memory.close()
