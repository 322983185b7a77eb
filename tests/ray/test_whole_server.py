"""Replicas that hold a whole server, as clients of both protocols see them."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc
from tritonclient.utils import InferenceServerException

from tests.clients import check_binary_outputs
from tests.conftest import DEADLINE, MODELS, ROOT, wait_until
from tests.ray.conftest import GRPC, HAPROXY, HTTP, RayCluster, Replicas

pytest.importorskip("ray", reason="ray is not installed: make test-ray")

OWN_PORT = 9501
FIRST = ["identity", "misbehave", "stream", "script", "stateful_accumulator"]


@pytest.fixture(scope="module")
def served(cluster: RayCluster) -> Iterator[Replicas]:
    """Two replicas."""
    from host.ray import app

    repositories = [str(MODELS), str(ROOT / "model_repository")]
    arguments: dict[str, Any] = {
        "model_repository": repositories,
        "model_control_mode": "explicit",
        "allow_grpc": True,
        "grpc_address": "127.0.0.1",
        "grpc_port": OWN_PORT,
        "reuse_grpc_port": True,
        "response_send_timeout_secs": 5,
    }
    with cluster.deploy(
        app(
            {
                **arguments,
                "deployment": {
                    "num_replicas": 2,
                    "ray_actor_options": {"num_cpus": 1},
                    "user_config": {"load_model": FIRST},
                },
            }
        )
    ) as replicas:
        yield replicas


@pytest.fixture
def client(served: Replicas) -> Iterator[grpcclient.InferenceServerClient]:
    with grpcclient.InferenceServerClient(GRPC) as opened:
        yield opened


@pytest.fixture
def http(served: Replicas) -> Iterator[httpclient.InferenceServerClient]:
    with httpclient.InferenceServerClient(HTTP, network_timeout=DEADLINE) as opened:
        yield opened


def floats(module: Any, count: int) -> tuple[Any, np.ndarray[Any, Any]]:
    sent = np.arange(count, dtype=np.float32)
    return module.InferInput("INPUT0", sent.shape, "FP32").set_data_from_numpy(sent), sent


def command(text: str, module: Any = grpcclient) -> list[Any]:
    given = module.InferInput("COMMAND", [1], "BYTES")
    given.set_data_from_numpy(np.array([text.encode()], dtype=np.object_))
    return [given]


@pytest.mark.parametrize("megabytes", [1, 16, 64])
@pytest.mark.parametrize(("module", "url"), [(grpcclient, GRPC), (httpclient, HTTP)])
def test_large_tensors_come_back_whole(
    served: Replicas, module: Any, url: str, megabytes: int
) -> None:
    with module.InferenceServerClient(url) as client:
        given, sent = floats(module, megabytes << 18)
        assert (client.infer("identity", [given]).as_numpy("OUTPUT0") == sent).all()


def test_outputs_are_binary_as_from_one_server(served: Replicas) -> None:
    check_binary_outputs(f"http://{HTTP}")


def test_metadata_and_health_are_those_of_one_server(
    client: grpcclient.InferenceServerClient, http: httpclient.InferenceServerClient
) -> None:
    for one in (client, http):
        assert one.is_server_live() and one.is_server_ready() and one.is_model_ready("identity")
    metadata = http.get_model_metadata("identity")
    assert client.get_model_metadata("identity", as_json=True)["name"] == metadata["name"]
    assert client.get_model_config("stream").config.model_transaction_policy.decoupled


def test_an_error_has_its_own_status_and_text(
    client: grpcclient.InferenceServerClient, http: httpclient.InferenceServerClient
) -> None:
    wrong, _ = floats(grpcclient, 4)
    wrong._input.name = "OTHER"
    with pytest.raises(InferenceServerException, match="unexpected inference input 'OTHER'") as e:
        client.infer("identity", [wrong])
    assert e.value.status() == "StatusCode.INVALID_ARGUMENT"
    with pytest.raises(InferenceServerException, match="unknown model: 'nothing'") as e:
        client.infer("nothing", [floats(grpcclient, 4)[0]])
    assert e.value.status() == "StatusCode.NOT_FOUND"
    with pytest.raises(InferenceServerException, match="unknown model: 'nothing'") as e:
        http.infer("nothing", [floats(httpclient, 4)[0]])
    assert e.value.status() == "404"


class Stream:
    """One stream of a client."""

    def __init__(self, client: grpcclient.InferenceServerClient) -> None:
        self.answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
        self.client = client
        client.start_stream(lambda result, error: self.answers.put((result, error)))

    def send(self, text: str, **options: Any) -> None:
        self.client.async_stream_infer("stream", command(text), **options)

    def take(self) -> tuple[Any, Any]:
        return self.answers.get(timeout=DEADLINE)


def test_a_thousand_decoupled_responses_arrive_in_order(
    client: grpcclient.InferenceServerClient,
) -> None:
    stream = Stream(client)
    stream.send("many=1000 final", enable_empty_final_response=True)
    for number in range(1000):
        result, error = stream.take()
        assert error is None and result.as_numpy("NUMBER")[0] == number
    assert stream.take()[0].get_response().parameters["triton_final_response"].bool_param
    client.stop_stream()


def test_a_stream_answers_while_the_client_still_sends(
    client: grpcclient.InferenceServerClient,
) -> None:
    stream = Stream(client)
    for _ in range(3):
        stream.send("last")
        result, error = stream.take()
        assert error is None and result.as_numpy("NUMBER")[0] == 0
    stream.send("last_error=enough")
    _, error = stream.take()
    assert "enough" in str(error)
    client.stop_stream()


def test_a_model_waits_for_a_client_that_does_not_read(served: Replicas) -> None:
    message = pb.ModelInferRequest(model_name="stream")
    message.inputs.add(name="COMMAND", datatype="BYTES", shape=[1])
    text = ("thread:" + "respond=1000000 " * 300).encode()
    message.raw_input_contents.append(len(text).to_bytes(4, "little") + text)
    with grpc.insecure_channel(GRPC) as channel:
        infer = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelStreamInfer
        requests: queue.Queue[Any] = queue.Queue()
        requests.put(message)
        call = infer(iter(requests.get, None))
        wait_until(
            lambda: served.logged("Unable to send response. For 5 seconds"),
            "the sender to give up",
            seconds=60,
        )
        call.cancel()
        requests.put(None)


def test_a_cancelled_stream_cancels_its_request(
    served: Replicas, client: grpcclient.InferenceServerClient
) -> None:
    stream = Stream(client)
    stream.send("thread:respond cancelled final")
    assert stream.take()[1] is None
    client.stop_stream(cancel_requests=True)
    wait_until(lambda: served.logged("was cancelled"), "the model to see the cancellation")


def test_a_unary_request_that_is_cancelled_cancels_its_model(
    served: Replicas, client: grpcclient.InferenceServerClient
) -> None:
    text = """
    pb_utils.Logger.log_info('unary waits')
    until(request.is_cancelled, 'the request to be cancelled')
    pb_utils.Logger.log_info('unary cancelled')
    return 1
    """
    answers: queue.Queue[Any] = queue.Queue()
    sent = client.async_infer("script", command(text), lambda result, error: answers.put(error))
    wait_until(lambda: served.logged("unary waits"), "the request to run")
    sent.cancel()
    assert "cancel" in str(answers.get(timeout=DEADLINE)).lower()
    wait_until(lambda: served.logged("unary cancelled"), "the model to see the cancellation")


def test_statistics_are_the_sum_of_all_replicas(
    client: grpcclient.InferenceServerClient, http: httpclient.InferenceServerClient
) -> None:
    def counted() -> list[int]:
        one = client.get_inference_statistics("identity").model_stats[0]
        other = http.get_inference_statistics("identity")["model_stats"][0]
        return [
            one.inference_count,
            one.inference_stats.success.count,
            other["inference_count"],
            other["inference_stats"]["success"]["count"],
        ]

    before = counted()
    assert len(set(before)) == 1
    given, _ = floats(grpcclient, 4)
    for _ in range(40):
        client.infer("identity", [given])
    assert counted() == [before[0] + 40] * 4


def test_replicas_of_a_node_share_their_own_port(client: grpcclient.InferenceServerClient) -> None:
    def counted() -> int:
        statistics = client.get_inference_statistics("identity").model_stats[0]
        return int(statistics.inference_count)

    before = counted()
    given, sent = floats(grpcclient, 4)
    for number in range(8):
        own = [("grpc.use_local_subchannel_pool", number)]  # a connection of its own
        with grpcclient.InferenceServerClient(f"127.0.0.1:{OWN_PORT}", channel_args=own) as direct:
            assert (direct.infer("identity", [given]).as_numpy("OUTPUT0") == sent).all()
    assert counted() == before + 8


def test_a_load_and_an_unload_reach_every_replica(
    served: Replicas,
    client: grpcclient.InferenceServerClient,
    http: httpclient.InferenceServerClient,
) -> None:
    client.load_model("add_sub")
    assert all(client.is_model_ready("add_sub") for _ in range(20))
    http.unload_model("add_sub")
    wait_until(
        lambda: not any(client.is_model_ready("add_sub") for _ in range(20)),
        "the unload in all replicas",
    )
    with pytest.raises(InferenceServerException, match="'missing'"):
        client.load_model("missing")


def value(number: int, module: Any = grpcclient) -> Any:
    given = module.InferInput("VALUE", [1, 1], "INT32")
    return given.set_data_from_numpy(np.array([[number]], np.int32))


def steps() -> Iterator[tuple[int, dict[str, Any], int]]:
    """Twelve sequences of five requests by turns: the value, the options, and the sum expected."""
    for step in range(5):
        for sequence in range(12):
            options = {
                "sequence_id": f"sequence-{sequence}",
                "sequence_start": step == 0,
                "sequence_end": step == 4,
            }
            yield sequence + 1, options, (sequence + 1) * (step + 1)


def test_unary_sequences_stay_on_their_replica_or_are_refused(
    client: grpcclient.InferenceServerClient,
) -> None:
    model = "stateful_accumulator"
    if HAPROXY:
        with pytest.raises(InferenceServerException, match="send a sequence in one stream") as e:
            client.infer(model, [value(1)], sequence_id=7, sequence_start=True)
        assert e.value.status() == "StatusCode.UNIMPLEMENTED"
        return
    answers = [
        (client.infer(model, [value(number)], **options).as_numpy("SUM")[0][0], expected)
        for number, options, expected in steps()
    ]
    assert [one for one in answers if one[0] != one[1]] == []


def test_sequences_of_one_stream_stay_together(client: grpcclient.InferenceServerClient) -> None:
    answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
    client.start_stream(lambda result, error: answers.put((result, error)))
    wrong = 0
    for number, options, expected in steps():
        client.async_stream_infer("stateful_accumulator", [value(number)], **options)
        result, error = answers.get(timeout=DEADLINE)
        wrong += int(error is not None or result.as_numpy("SUM")[0][0] != expected)
    client.stop_stream()
    assert wrong == 0


def test_http_sequences_need_the_header_of_the_proxy(
    http: httpclient.InferenceServerClient,
) -> None:
    model = "stateful_accumulator"
    with pytest.raises(InferenceServerException, match="send the header x-session-id"):
        http.infer(model, [value(1, httpclient)], sequence_id=1, sequence_start=True)
    if HAPROXY:
        return
    for number, options, expected in steps():
        headers = {"x-session-id": options["sequence_id"]}
        answer = http.infer(model, [value(number, httpclient)], headers=headers, **options)
        assert answer.as_numpy("SUM")[0][0] == expected
