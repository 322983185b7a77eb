"""Warm-up on real hosts: what instances run before they are ready, and what stops the load."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from tests.clients import Client, infer_error, tensor
from tests.conftest import DEADLINE, RepositoryBuilder, RunningHost, Serve, wait_until

RECORDER = """
import json
import os

import numpy as np
import triton_python_backend_utils as pb_utils

def described(tensor):
    array = tensor.as_numpy()
    values = [v.decode() if isinstance(v, bytes) else v for v in array.reshape(-1).tolist()]
    return [tensor.name(), list(array.shape), values]

class TritonPythonModel:
    def initialize(self, args):
        self.name = args["model_instance_name"]
        self.batches = []

    def execute(self, requests):
        self.batches.append([[described(t) for t in r.inputs()] for r in requests])
        text = json.dumps([self.name, os.getpid(), self.batches]).encode()
        answer = pb_utils.Tensor("SEEN", np.array([[text]], dtype=object))
        return [pb_utils.InferenceResponse([answer]) for _ in requests]
"""
CONFIG = """
backend: "python"
max_batch_size: 8
input [ {{ name: "X" data_type: {kind} dims: {dims} }} ]
output [ {{ name: "SEEN" data_type: TYPE_STRING dims: [ 1 ] }} ]
{more}
"""


def sample(data: str, name: str = "s", kind: str = "TYPE_INT32", dims: str = "[ 2 ]",
           batch: int = 1, count: int = 0, key: str = "X") -> str:  # fmt: skip
    given = f'{{ key: "{key}" value {{ data_type: {kind} dims: {dims} {data} }} }}'
    return (
        f'model_warmup [ {{ name: "{name}" batch_size: {batch} count: {count} inputs {given} }} ]'
    )


def add(
    repository: RepositoryBuilder,
    name: str,
    more: str,
    kind: str = "TYPE_INT32",
    dims: str = "[ -1 ]",
    model: str = RECORDER,
) -> None:
    repository.add(name, model, CONFIG.format(kind=kind, dims=dims, more=more))


STREAMER = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    done = 0

    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            for number in range(300):
                seen = pb_utils.Tensor("SEEN", np.array([[b"x"]], object))
                sender.send(pb_utils.InferenceResponse([seen]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        print("streamed", len(requests))
"""


@pytest.fixture(scope="module")
def host(module_repository: RepositoryBuilder, module_serve: Serve) -> RunningHost:
    repository = module_repository
    add(
        repository,
        "several",
        sample("zero_data: true", "three", batch=3, count=2)
        + sample("zero_data: true", "none", batch=0)
        + sample("zero_data: false", "one", dims="[ 1 ]", count=1),
    )
    add(repository, "random", sample("random_data: true", dims="[ 1000 ]"))
    add(repository, "random_bools", sample("random_data: true", kind="TYPE_BOOL", dims="[ 1000 ]"),
        "TYPE_BOOL")  # fmt: skip
    add(repository, "random_texts", sample("random_data: true", kind="TYPE_STRING"), "TYPE_STRING")
    add(repository, "from_file", sample('input_data_file: "numbers"', batch=2))
    data = repository.path / "from_file" / "warmup"
    data.mkdir()
    (data / "numbers").write_bytes(np.array([7, -8, 9], dtype="<i4").tobytes())  # one more
    add(repository, "texts", sample('input_data_file: "texts"', kind="TYPE_STRING"), "TYPE_STRING")
    data = repository.path / "texts" / "warmup"
    data.mkdir()
    (data / "texts").write_bytes(b"\3\0\0\0abc\0\0\0\0")
    add(repository, "two", sample("zero_data: true") + "instance_group [ { count: 2 } ]")
    add(
        repository,
        "beside",
        """
        model_warmup [ { name: "s" batch_size: 1
          inputs { key: "X" value { data_type: TYPE_INT32 dims: [ 1 ] zero_data: true } }
          inputs { key: "START" value { data_type: TYPE_FP32 dims: [ 1 ] zero_data: true } } } ]
        """,
    )
    add(
        repository,
        "reshaped",
        sample("zero_data: true", dims="[ 4 ]"),
        dims="[ 4 ] reshape { shape: [ 2, 2 ] }",
    )
    add(
        repository,
        "streamed",
        sample("zero_data: true", batch=2) + "model_transaction_policy { decoupled: true }",
        model=STREAMER,
    )
    add(repository, "passive", sample("zero_data: true") + "instance_group [ { count: 1 },"
        "{ count: 1 passive: true } ]")  # fmt: skip
    return module_serve(repository, "--log-verbose=1").wait_started()


@pytest.fixture
def client(host: RunningHost) -> Iterator[Client]:
    with host.client() as client:
        yield client


def seen(client: Client, model: str, array: Any = None) -> tuple[str, int, list[Any]]:
    """The record of an instance: its name, its process, and the batches before this one."""
    array = np.array([[5]], dtype=np.int32) if array is None else array
    text = client.infer(model, [tensor("X", array)]).as_numpy("SEEN").flat[0]
    name, process, batches = json.loads(text)
    return name, process, batches[:-1]


ZEROS = [["X", [1, 2], [0, 0]]]


def test_samples_run_in_their_order_in_batches_and_as_often_as_they_say(
    host: RunningHost, client: Client
) -> None:
    _, _, batches = seen(client, "several")
    assert batches[:3] == [[ZEROS] * 3, [ZEROS] * 3, [[["X", [1, 1], [0]]]]]
    lines = [line for line in host.lines if "running warmup sample" in line and "several" in line]
    assert [line.split("model 'several' ")[1] for line in lines] == [
        "instance several_0 is running warmup sample 'three' for iteration 1",
        "instance several_0 is running warmup sample 'three' for iteration 2",
        "instance several_0 is running warmup sample 'one' for iteration 1",
    ]


def test_warm_up_is_counted_as_executions(client: Client) -> None:
    (found,) = client.get_inference_statistics("streamed").model_stats
    assert (found.inference_count, found.execution_count) == (2, 1)
    assert [(b.batch_size, b.compute_infer.count) for b in found.batch_stats] == [(2, 1)]
    assert found.inference_stats.success.count == 2
    assert found.inference_stats.fail.count == 0


def test_random_data_is_random(client: Client) -> None:
    _, _, [[[[_, shape, values]]]] = seen(client, "random")
    assert shape == [1, 1000]
    assert len(set(values)) > 900
    _, _, [[[[_, shape, values]]]] = seen(client, "random_bools", np.array([[True]]))
    assert set(values) == {False, True}


def test_random_texts_are_empty(client: Client) -> None:
    text = np.array([[b"x"]], dtype=np.object_)
    assert seen(client, "random_texts", text)[2] == [[[["X", [1, 2], ["", ""]]]]]


def test_a_file_holds_one_item_of_the_batch(client: Client) -> None:
    assert seen(client, "from_file")[2] == [[[["X", [1, 2], [7, -8]]]] * 2]
    text = np.array([[b"x"]], dtype=np.object_)
    assert seen(client, "texts", text)[2] == [[[["X", [1, 2], ["abc", ""]]]]]


def test_each_instance_is_warmed_up(host: RunningHost, client: Client) -> None:
    lines = [line for line in host.lines if "model 'two' instance" in line]
    assert sorted(line.split("instance ")[1].split()[0] for line in lines) == ["two_0_0", "two_0_1"]
    assert seen(client, "two")[2] == [[ZEROS]]


def test_inputs_that_clients_do_not_send_come_beside_those_that_they_do(client: Client) -> None:
    assert seen(client, "beside")[2] == [[[["X", [1, 1], [0]], ["START", [1, 1], [0.0]]]]]


def test_the_model_sees_its_own_shape(client: Client) -> None:
    array = np.zeros((1, 4), dtype=np.int32)
    assert seen(client, "reshaped", array)[2] == [[[["X", [1, 2, 2], [0] * 4]]]]


def test_responses_of_a_decoupled_model_are_dropped_during_warmup(host: RunningHost) -> None:
    host.wait_for("streamed 2")


def test_an_instance_that_replaces_a_dead_one_is_warmed_up_too(
    host: RunningHost, client: Client
) -> None:
    _, process, before = seen(client, "beside")
    (stub,) = host.stubs("beside_0")
    stub.kill()
    wait_until(
        lambda: (
            any(stub.pid != process for stub in host.stubs("beside_0"))
            and client.is_model_ready("beside")
        ),
        "the new process",
    )
    _, restarted, after = seen(client, "beside")
    assert restarted != process
    assert after == before[:1]


def test_a_passive_instance_is_there_and_takes_nothing(host: RunningHost, client: Client) -> None:
    assert len(host.stubs("passive_0_0")) == len(host.stubs("passive_1_0")) == 1
    assert {seen(client, "passive")[0] for _ in range(4)} == {"passive_0_0"}
    assert not any("instance passive_1_0 is running" in line for line in host.lines)


FAILS = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        errors = [pb_utils.TritonError(f"no {i}") for i, _ in enumerate(requests)]
        return [pb_utils.InferenceResponse(error=error) for error in errors]
"""
DIES = """
import os

class TritonPythonModel:
    def execute(self, requests):
        os._exit(7)
"""
NO_ID = "[request id: <id_unknown>] "
TOO_MANY = "batch size 9 for 'too_many_0', max allowed is 8; "
REFUSALS = {
    "variable": (
        sample("zero_data: true", dims="[ -1 ]"),
        "warmup setting expects all variable-size dimensions are specified for input 'X'",
    ),
    "no_data": (
        sample(""),
        f"{NO_ID}warmup setting expects input 'X' to have input_data_type set",
    ),
    "short": (
        sample('input_data_file: "short"'),
        f"{NO_ID}warmup setting expects 8 bytes, but the data provided from shortonly has 5 bytes",
    ),
    "absent": (
        sample('input_data_file: "absent"'),
        (
            "failed to open text file for read {repository}/absent/warmup/absent: No such file or"
            " directory"
        ),
    ),
    "folder": (
        sample('input_data_file: "data"'),
        "failed to open text file for read {repository}/folder/warmup/data: Is a directory",
    ),
    "outside": (
        sample('input_data_file: "../../short/warmup/short"'),
        (
            "warmup data file '{repository}/outside/warmup/../../short/warmup/short' of model"
            " 'outside' is outside of its folder 'warmup'"
        ),
    ),
    "data_type": (
        sample("zero_data: true", kind="TYPE_FP32"),
        f"{NO_ID}inference input 'X' data-type is 'FP32', but model 'data_type' expects 'INT32'",
    ),
    "no_type": (
        sample("zero_data: true", kind="TYPE_INVALID"),
        "warmup setting expects input 'X' of model 'no_type' to have a data_type",
    ),
    "missing": (
        sample("zero_data: true", key="Y"),
        (
            f"{NO_ID}expected 1 inputs but got 0 inputs for model 'missing'. Got input(s) [], but"
            " missing required input(s) ['X']. Please provide all required input(s)."
        ),
    ),
    "failing": (
        sample("zero_data: true", "bad", batch=2),
        "failed to run warmup sample 'bad': no 0; no 1; ",
    ),
    "too_many": (
        sample("zero_data: true", "bad", batch=9),
        f"failed to run warmup sample 'bad': {TOO_MANY * 9}",
    ),
    "dying": (
        sample("zero_data: true", "bad"),
        (
            "failed to run warmup sample 'bad': Stub process 'dying_0' is not healthy. It exited"
            " with status 7 while it ran this request.; "
        ),
    ),
}


@pytest.fixture(scope="module")
def refusing(
    tmp_path_factory: pytest.TempPathFactory, module_serve: Serve
) -> tuple[RunningHost, RepositoryBuilder]:
    repository = RepositoryBuilder(tmp_path_factory.mktemp("refusing"))
    for name, (more, _) in REFUSALS.items():
        add(repository, name, more, model={"failing": FAILS, "dying": DIES}.get(name, RECORDER))
    (repository.path / "folder" / "warmup" / "data").mkdir(parents=True)
    data = repository.path / "short" / "warmup"
    data.mkdir()
    (data / "short").write_bytes(b"12345")
    return module_serve(repository, "--model-control-mode=explicit").wait_started(), repository


@pytest.mark.parametrize("name", REFUSALS)
def test_a_warm_up_that_does_not_work_fails_the_load(
    refusing: tuple[RunningHost, RepositoryBuilder], name: str
) -> None:
    host, repository = refusing
    with host.client() as client:
        _, text = infer_error(client.load_model, name)
        expected = REFUSALS[name][1].replace("{repository}", str(repository.path))
        code = "Internal" if name in ("absent", "folder") else "Invalid argument"
        assert text == (
            f"load failed for model '{name}': version 1 is at UNAVAILABLE state:"
            f" {code}: {expected};\n"
        )
        assert not client.is_model_ready(name)
    wait_until(lambda: not host.stubs(f"{name}_0"), "its stub to end")


def test_no_request_is_served_before_the_warmup_has_ended(
    repository: RepositoryBuilder, serve: Serve, tmp_path: Any
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    waits = f"""
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        print("warm-up has begun", flush=True)
        open({str(pipe)!r}).read()
        return [pb_utils.InferenceResponse([]) for _ in requests]
"""
    add(repository, "slow", sample("zero_data: true"), model=waits)
    host = serve(repository, "--model-control-mode=explicit").wait_started()
    with host.client() as client, host.client() as other:
        with ThreadPoolExecutor(1) as pool:
            loading = pool.submit(client.load_model, "slow")
            try:
                host.wait_for("warm-up has begun")
                assert not other.is_model_ready("slow")
                assert (
                    "not at ready state"
                    in infer_error(
                        other.infer,
                        "slow",
                        [tensor("X", np.array([[1]], np.int32))],
                        model_version="1",
                    )[1]
                )
            finally:
                pipe.open("w").close()
            loading.result(DEADLINE)
        assert other.is_model_ready("slow")
