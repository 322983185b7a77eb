"""One deployment for each model, as clients of both protocols see them."""

from __future__ import annotations

import json
import queue
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException

from host.ray.deployment_options import POLICY, read_options
from host.ray.serve_config import Proxies, make_model_config
from tests.clients import infer_error, tensor
from tests.conftest import DEADLINE, RepositoryBuilder, wait_until
from tests.integration.ensemble_models import CHAIN
from tests.ray.conftest import GRPC, HTTP, RayCluster, kill
from tests.ray.test_replicas import CLIENTS, Load

pytest.importorskip("ray", reason="ray is not installed: make test-ray")

SUM = """
import numpy as np
import os
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.sums = {}

    def execute(self, requests):
        responses = []
        for request in requests:
            number = request.correlation_id()
            if request.flags() & pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START:
                self.sums[number] = 0
            value = pb_utils.get_input_tensor_by_name(request, "VALUE").as_numpy()
            self.sums[number] += int(value[0][0])
            tensor = pb_utils.Tensor("SUM", np.array([[self.sums[number]]], np.int32))
            process = pb_utils.Tensor("PROCESS", np.array([[os.getpid()]], np.int32))
            responses.append(pb_utils.InferenceResponse([tensor, process]))
        return responses
"""
SUM_CONFIG = """
input [{name: "VALUE", data_type: TYPE_INT32, dims: [1]}]
output [
  {name: "SUM", data_type: TYPE_INT32, dims: [1]},
  {name: "PROCESS", data_type: TYPE_INT32, dims: [1]}
]
max_batch_size: 16
sequence_batching {
  max_sequence_idle_microseconds: 60000000
  oldest {max_candidate_sequences: 16}
}
instance_group [{count: 1, kind: KIND_CPU}]
"""
COUNTDOWN = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    '''Calls the other one of the pair until the number is zero.'''

    def initialize(self, args):
        self.other = {"ping": "pong", "pong": "ping"}[args["model_name"]]

    async def execute(self, requests):
        return [await self.answer(request) for request in requests]

    async def answer(self, request):
        left = int(pb_utils.get_input_tensor_by_name(request, "LEFT").as_numpy()[0])
        name = self.other
        if not left:
            path = np.array([self.other], dtype=np.object_)
            return pb_utils.InferenceResponse([pb_utils.Tensor("PATH", path)])
        below = pb_utils.Tensor("LEFT", np.array([left - 1], np.int32))
        response = await pb_utils.InferenceRequest(
            model_name=name, inputs=[below], requested_output_names=["PATH"]
        ).async_exec()
        if response.has_error():
            return response
        path = pb_utils.get_output_tensor_by_name(response, "PATH").as_numpy()[0].decode()
        path = np.array([f"{name} {path}"], dtype=np.object_)
        return pb_utils.InferenceResponse([pb_utils.Tensor("PATH", path)])
"""
COUNTDOWN_CONFIG = """
input [{name: "LEFT", data_type: TYPE_INT32, dims: [1]}]
output [{name: "PATH", data_type: TYPE_STRING, dims: [1]}]
instance_group [{count: 2, kind: KIND_CPU}]
"""
MENDED = """
import os
import threading

import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        started = os.path.join(args["model_repository"], "started")
        if os.path.exists(started):
            threading.Event().wait(5)  # Ray checks the health of the replica meanwhile
        open(started, "w").close()

    def execute(self, requests):
        tensor = pb_utils.Tensor("PROCESS", np.array([os.getpid()], np.int32))
        return [pb_utils.InferenceResponse([tensor]) for _ in requests]
"""
MENDED_CONFIG = """
output [{name: "PROCESS", data_type: TYPE_INT32, dims: [1]}]
instance_group [{count: 1, kind: KIND_CPU}]
"""


DEPLOYMENTS: dict[str, dict[str, Any]] = {
    "identity": {"num_replicas": 2, "max_replicas_per_node": 1},
    "sum": {"num_replicas": 2},
    "mended": {"health_check_period_s": 1},
    "pbhost": {"ray_actor_options": {"num_cpus": 1, "resources": {"head": 1}}},
    "script": {"max_ongoing_requests": 1},
    "ping": {"ray_actor_options": {"num_cpus": 0.1, "resources": {"head": 1}}},
    "pong": {"ray_actor_options": {"num_cpus": 0.1, "resources": {"second": 1}}},
}


@pytest.fixture(scope="module")
def served(cluster: RayCluster, module_repository: RepositoryBuilder) -> Iterator[RayCluster]:
    """The models, two of them with two replicas; `pong` and `identity` on both nodes."""
    module_repository.copy("identity", "ask", "stream", "script")
    module_repository.add("chain", "", CHAIN)
    module_repository.add("sum", SUM, SUM_CONFIG)
    module_repository.add("mended", MENDED, MENDED_CONFIG)
    module_repository.add("ping", COUNTDOWN, COUNTDOWN_CONFIG)
    module_repository.add("pong", COUNTDOWN, COUNTDOWN_CONFIG)
    from ray import serve

    deploy(module_repository, DEPLOYMENTS)
    yield cluster
    serve.delete("pbhost")


def deploy(repository: RepositoryBuilder, changes: dict[str, dict[str, Any]]) -> None:
    """Deploys the configuration file of `pbhost ray config --per-model`, changed for some models.

    Returns when all deployments run.
    """
    from ray import serve
    from ray.serve.context import _get_global_client
    from ray.serve.schema import ServeDeploySchema

    arguments = {
        "model_repository": [str(repository.path)],
        "log_info": False,
        "allow_recording": True,
    }
    config = make_model_config(arguments, {}, Proxies("127.0.0.1", 8000, 9000))
    for settings in config["applications"][0]["deployments"]:
        settings.update(changes.get(settings["name"].removeprefix("model-"), {}))
    _get_global_client().deploy_apps(ServeDeploySchema(**config))

    def status() -> Any:
        application = serve.status().applications.get("pbhost")
        return application and (application.status, application.deployments)

    def runs() -> bool:
        known = status()
        return bool(known) and known[0] == "RUNNING"

    wait_until(runs, "all deployments to run", seconds=110, state=status)


@pytest.fixture
def client(served: RayCluster) -> Iterator[grpcclient.InferenceServerClient]:
    with grpcclient.InferenceServerClient(GRPC) as client:
        yield client


def floats(count: int) -> Any:
    return np.arange(count, dtype=np.float32)


@pytest.mark.parametrize("megabytes", [1, 16, 64])
@pytest.mark.parametrize("protocol", ["gRPC", "HTTP"])
def test_large_tensors_go_both_ways(served: RayCluster, protocol: str, megabytes: int) -> None:
    sent = floats(megabytes << 18)
    library: Any = grpcclient if protocol == "gRPC" else httpclient
    url = GRPC if protocol == "gRPC" else HTTP
    options = {} if protocol == "gRPC" else {"network_timeout": DEADLINE}
    with library.InferenceServerClient(url, **options) as client:
        given = library.InferInput("INPUT0", sent.shape, "FP32").set_data_from_numpy(sent)
        result = client.infer("identity", [given])
        np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), sent)


@pytest.mark.parametrize("model", ["ask", "chain"])
def test_models_and_ensembles_reach_models_of_other_deployments(
    client: grpcclient.InferenceServerClient, model: str
) -> None:
    for count in (4, 1 << 20):
        inputs = [tensor("INPUT0", floats(count))]
        if model == "ask":
            inputs.append(tensor("MODEL", np.array([b"chain"], dtype=np.object_)))
        result = client.infer(model, inputs)
        np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), floats(count))


def test_models_on_two_nodes_call_each_other(client: grpcclient.InferenceServerClient) -> None:
    result = client.infer("ping", [tensor("LEFT", np.array([4], np.int32))])
    assert result.as_numpy("PATH")[0] == b"pong ping pong ping pong"


def test_decoupled_responses_come_in_order(client: grpcclient.InferenceServerClient) -> None:
    answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
    client.start_stream(lambda result, error: answers.put((result, error)))
    for command in ("thread:many=999 last", "respond last"):
        text = np.array([command.encode()], dtype=np.object_)
        client.async_stream_infer("stream", [tensor("COMMAND", text)], request_id=command)
    numbers: dict[str, list[int]] = {}
    for _ in range(1002):
        result, error = answers.get(timeout=DEADLINE)
        assert error is None
        numbers.setdefault(result.get_response().id, []).append(int(result.as_numpy("NUMBER")[0]))
    client.stop_stream()
    assert sorted(numbers.values(), key=len) == [[0, 1], list(range(1000))]


@pytest.mark.parametrize("streams", [False, True], ids=["unary", "stream"])
def test_a_cancelled_request_is_cancelled_in_its_model(
    client: grpcclient.InferenceServerClient, tmp_path: Path, streams: bool
) -> None:
    began, cancelled = tmp_path / "began", tmp_path / "cancelled"
    text = (
        f"open({str(began)!r}, 'w').close()\nuntil(request.is_cancelled, 'the cancellation')\n"
        f"open({str(cancelled)!r}, 'w').close()\nreturn 1"
    )
    given = [tensor("COMMAND", np.array([text.encode()], dtype=np.object_))]
    answers: queue.Queue[Any] = queue.Queue()
    if streams:
        client.start_stream(lambda result, error: answers.put(error))
        client.async_stream_infer("script", given)
    else:
        sent = client.async_infer("script", given, lambda result, error: answers.put(error))
    wait_until(began.exists, "the request to run")
    if streams:
        client.stop_stream(cancel_requests=True)
    else:
        sent.cancel()
        assert "cancel" in str(answers.get(timeout=DEADLINE)).lower()
    wait_until(cancelled.exists, "the model to see the cancellation")


def test_errors_are_those_of_one_server(client: grpcclient.InferenceServerClient) -> None:
    given = [tensor("INPUT0", floats(2))]
    assert infer_error(client.infer, "missing", given) == (
        "StatusCode.NOT_FOUND",
        "Request for unknown model: 'missing' is not found",
    )
    assert infer_error(client.infer, "identity", given, "3") == (
        "StatusCode.NOT_FOUND",
        "Request for unknown model: 'identity' version 3 is not found",
    )
    wrong = [tensor("INPUT0", np.zeros(2, np.int8))]
    assert infer_error(client.infer, "identity", wrong) == (
        "StatusCode.INVALID_ARGUMENT",
        (
            "[request id: <id_unknown>] inference input 'INPUT0' data-type is 'INT8', but model"
            " 'identity' expects 'FP32'"
        ),
    )
    target = tensor("MODEL", np.array([b"missing"], dtype=np.object_))
    assert (
        "unknown model: 'missing' is not found"
        in infer_error(client.infer, "ask", [*given, target])[1]
    )


def test_metadata_index_and_health_are_of_all_models(
    client: grpcclient.InferenceServerClient,
) -> None:
    assert client.is_server_live() and client.is_server_ready()
    assert client.is_model_ready("identity") and client.is_model_ready("chain")
    assert not client.is_model_ready("missing")
    assert client.get_model_metadata("chain", as_json=True)["platform"] == "ensemble"
    assert client.get_model_config("stream").config.model_transaction_policy.decoupled
    names = ["ask", "chain", "identity", "mended", "ping", "pong", "script", "stream", "sum"]
    index = client.get_model_repository_index().models
    assert [(entry.name, entry.state) for entry in index] == [(name, "READY") for name in names]
    with httpclient.InferenceServerClient(HTTP) as http:
        assert http.get_model_metadata("identity")["versions"] == ["1"]
        assert [entry["name"] for entry in http.get_model_repository_index()] == names


def test_a_busy_deployment_counts_as_ready(
    client: grpcclient.InferenceServerClient, tmp_path: Path
) -> None:
    before = client.get_model_repository_index().models
    started, go_on = tmp_path / "started", tmp_path / "go_on"
    text = f"open({str(started)!r}, 'w').close()\nuntil(lambda: os.path.exists({str(go_on)!r}), '')"
    given = tensor("COMMAND", np.array([f"import os\n{text}\nreturn 1".encode()], dtype=np.object_))
    answers: queue.Queue[Any] = queue.Queue()
    client.async_infer("script", [given], lambda result, error: answers.put(error))
    wait_until(started.exists, "the request to take the only place")
    with ThreadPoolExecutor() as threads:  # each question ends after the deadline of its own
        index = threads.submit(client.get_model_repository_index)
        assert client.is_server_ready()
        assert list(index.result().models) == list(before)
    assert answers.empty()
    go_on.touch()
    assert answers.get(timeout=DEADLINE) is None


def count_of(statistics: Any) -> int:
    (one,) = statistics["model_stats"]
    return int(one["inference_stats"]["success"]["count"])


def test_statistics_are_the_sum_over_replicas(client: grpcclient.InferenceServerClient) -> None:
    with httpclient.InferenceServerClient(HTTP) as http:
        before = count_of(http.get_inference_statistics("identity"))
        for _ in range(40):
            client.infer("identity", [tensor("INPUT0", floats(2))])
        assert count_of(http.get_inference_statistics("identity")) == before + 40
    grpc = client.get_inference_statistics("identity", as_json=True)
    assert count_of(grpc) == before + 40
    everything = client.get_inference_statistics().model_stats
    assert {one.name for one in everything} >= {"identity", "chain", "sum"}


def test_a_recording_at_the_ingress_has_the_requests_of_clients(
    client: grpcclient.InferenceServerClient,
) -> None:
    settings = json.dumps({"max_requests": 2, "seconds": 20}).encode()
    url = f"http://{HTTP}/v2/models/identity/record"
    with urllib.request.urlopen(url, settings, timeout=DEADLINE) as recording:  # it has begun
        for _ in range(2):
            client.infer("identity", [tensor("INPUT0", floats(2))])
        assert b"the limit of requests was reached" in recording.read()


def test_sequences_stay_on_their_replica(client: grpcclient.InferenceServerClient) -> None:
    processes = set()
    for step in range(5):
        for number in range(1, 13):
            value = tensor("VALUE", np.array([[number]], np.int32))
            result = client.infer(
                "sum",
                [value],
                sequence_id=number,
                sequence_start=step == 0,
                sequence_end=step == 4,
            )
            assert result.as_numpy("SUM")[0][0] == number * (step + 1)
            processes.add(int(result.as_numpy("PROCESS")[0][0]))
    assert len(processes) == 2, "both replicas have sequences"


def test_a_load_reaches_all_replicas_and_ensembles(
    client: grpcclient.InferenceServerClient,
) -> None:
    given = [tensor("INPUT0", floats(2))]
    client.unload_model("identity")
    wait_until(lambda: not client.is_model_ready("identity"), "the model to be unloaded")
    missing = "Request for unknown model: 'identity' has no available versions"
    wait_until(
        lambda: {infer_error(client.infer, "identity", given)[1] for _ in range(6)} == {missing},
        "all replicas to have unloaded it",
    )
    chain = "Request for unknown model: 'chain' has no available versions"
    assert infer_error(client.infer, "chain", given)[1] == chain
    states = {entry.name: entry.state for entry in client.get_model_repository_index().models}
    assert states["identity"] == states["chain"] == "UNAVAILABLE" and states["ask"] == "READY"
    assert client.is_server_ready()
    kill_replica("chain")  # the new one starts without its step
    # Ray tells the ingress of the new replica a little later than the status.
    wait_until(client.is_server_ready, "the ingress to reach the new replica")
    assert not client.is_model_ready("chain")
    client.load_model("identity")
    wait_until(lambda: client.is_model_ready("chain"), "the ensemble to be loaded")
    for model in ("identity", "chain") * 4:
        assert client.infer(model, given).as_numpy("OUTPUT0").tolist() == [0, 1]
    with pytest.raises(InferenceServerException, match="failed to poll from model repository"):
        client.load_model("missing")


def test_a_change_of_user_config_needs_no_new_replica(
    client: grpcclient.InferenceServerClient,
    served: RayCluster,
    module_repository: RepositoryBuilder,
) -> None:
    def configure(*models: str) -> None:
        changed = {**DEPLOYMENTS["identity"], "user_config": {"load_model": list(models)}}
        deploy(module_repository, {**DEPLOYMENTS, "identity": changed})

    before = running("identity")
    assert len(before) == 2 and client.is_model_ready("identity")
    configure()
    wait_until(lambda: not client.is_model_ready("identity"), "the model to be unloaded")
    assert running("identity") == before
    kill_replica("identity")
    given, before = [tensor("INPUT0", floats(2))], running("identity")
    assert {infer_error(client.infer, "identity", given)[0] for _ in range(12)} == {
        "StatusCode.NOT_FOUND"
    }
    configure("identity")
    wait_until(lambda: client.is_model_ready("identity"), "the model to be loaded")
    assert running("identity") == before


def test_a_killed_replica_fails_no_new_request(served: RayCluster) -> None:
    with Load() as load:
        load.goes_on()
        killed = kill_replica("identity")
        load.goes_on()
    assert [text for started, text in load.failures if started > killed] == []
    # What was in flight may be lost, with a status that clients repeat.
    assert {text.split(" ", 1)[0] for _, text in load.failures} <= {"StatusCode.UNAVAILABLE"}


def test_an_ensemble_waits_for_its_steps_longer_than_a_request_for_a_load(
    repository: RepositoryBuilder,
) -> None:
    from host.ray import model_apps

    repository.copy("identity")
    repository.add("chain", "", CHAIN)
    arguments = {"model_repository": str(repository.path), "on_demand_timeout_secs": 0.5}
    bound: Any = model_apps(arguments)
    seconds = {}
    for one in bound._bound_deployment.init_args[2:]:
        own, model, _ = one._bound_deployment.init_args
        seconds[model] = read_options(own).on_demand_timeout_secs
    assert seconds == {"chain": 600.0, "identity": 0.5}


def test_a_server_mends_a_stub_before_ray_replaces_the_replica(
    client: grpcclient.InferenceServerClient,
) -> None:
    def stub() -> int:
        try:
            return int(client.infer("mended", []).as_numpy("PROCESS")[0])
        except InferenceServerException:
            return 0  # it starts

    before, first = running("mended"), stub()
    assert first
    kill(first)
    wait_until(lambda: stub() not in (0, first), "a new stub", seconds=60)
    assert running("mended") == before


def test_autoscaling_counts_requests_that_ray_does_not_see(
    client: grpcclient.InferenceServerClient, module_repository: RepositoryBuilder, tmp_path: Path
) -> None:
    from ray import serve

    scaling = {
        "policy": POLICY,
        "min_replicas": 1,
        "max_replicas": 2,
        "target_ongoing_requests": 2,
        "upscale_delay_s": 0,
        "downscale_delay_s": 1,
        "metrics_interval_s": 0.5,
        "look_back_period_s": 2,
    }
    changed = {"max_ongoing_requests": 32, "autoscaling_config": scaling}
    deploy(module_repository, {**DEPLOYMENTS, "script": changed})
    go_on = tmp_path / "go_on"
    text = f"import os\nuntil(lambda: os.path.exists({str(go_on)!r}), '')\nreturn 1"
    given = tensor("COMMAND", np.array([text.encode()], dtype=np.object_))
    answers: queue.Queue[Any] = queue.Queue()
    # One by Ray, which makes the ingress connect; the others by its connection.
    go_on.touch()
    for _ in range(20):
        client.infer("script", [given])
    go_on.unlink()
    for _ in range(6):
        client.async_infer("script", [given], lambda result, error: answers.put(error))
    handle = serve.get_deployment_handle("model-script", "pbhost")

    def uncounted() -> float:
        return float(sum(handle.broadcast("uncounted_requests").results(timeout_s=DEADLINE)))

    wait_until(lambda: uncounted() > 0, "requests by the connection")
    assert uncounted() <= 6
    wait_until(lambda: len(running("script")) == 2, "a second replica under load", seconds=60)
    go_on.touch()
    assert [answers.get(timeout=DEADLINE) for _ in range(6)] == [None] * 6
    wait_until(lambda: len(running("script")) == 1, "one replica without load", seconds=60)


def test_a_lost_node_costs_what_was_in_flight(
    served: RayCluster, client: grpcclient.InferenceServerClient
) -> None:
    with Load() as load:
        load.goes_on()
        served.remove_second_node()
        lost = time.monotonic()
        load.goes_on()
        served.add_second_node()
        wait_until(lambda: len(running("identity")) == 2, "a replica on the new node", seconds=60)
        load.goes_on()
    assert {text.split(" ", 1)[0] for _, text in load.failures} <= {"StatusCode.UNAVAILABLE"}
    late = [started for started, _ in load.failures if started > lost]
    assert len(late) <= CLIENTS, load.failures
    wait_until(lambda: client.is_model_ready("pong"), "the model of the lost node", seconds=60)
    result = client.infer("ping", [tensor("LEFT", np.array([4], np.int32))])
    assert result.as_numpy("PATH")[0] == b"pong ping pong ping pong"


def running(model: str) -> set[int]:
    """The processes of a model's replicas that run."""
    from ray.serve._private.api import _get_global_client

    details = _get_global_client().get_serve_details()["applications"]["pbhost"]["deployments"]
    replicas = details[f"model-{model}"]["replicas"]
    return {replica["pid"] for replica in replicas if replica["state"] == "RUNNING"}


def kill_replica(model: str) -> float:
    """Kills a replica and waits for another one; returns when it was killed (clock of Load)."""
    before = running(model)
    victim = before.pop()
    killed = kill(victim)
    wait_until(
        lambda: len(now := running(model)) == len(before) + 1 and victim not in now,
        "a new replica",
        seconds=60,
        state=lambda: running(model),
    )
    return killed
