"""Headers that become request parameters: which ones, and what models see of them."""

from __future__ import annotations

import http.client as http_client
import json
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from tests.conftest import DEADLINE, RepositoryBuilder, RunningHost, Serve

MODEL = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        config.add_output({"name": "SEEN", "data_type": "TYPE_STRING", "dims": [1]})
        return config

    def execute(self, requests):
        return [
            pb_utils.InferenceResponse([
                pb_utils.Tensor("SEEN", np.array([r.parameters().encode()], dtype=np.object_))
            ])
            for r in requests
        ]
"""
FLAG = "--grpc-header-forward-pattern"
HTTP_FLAG = "--http-header-forward-pattern"
RESERVED = "Header '{}' is reserved for Triton usage and cannot be forwarded."
Metadata = tuple[str, str | bytes]


class Endpoint:
    """Calls the two inference RPCs without tritonclient, which cannot send a key twice."""

    def __init__(self, host: RunningHost) -> None:
        self.channel = grpc.insecure_channel(host.url)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self.channel)

    def send_request(self, *metadata: Metadata, **parameters: str) -> Any:
        """The parameters that the model saw, without those of the transport."""
        answer = self._stub.ModelInfer(_request(parameters), metadata=metadata, timeout=DEADLINE)
        return _seen(answer)

    def refusal(self, *metadata: Metadata) -> str:
        """The text with which the request is refused."""
        with pytest.raises(grpc.RpcError) as caught:
            self.send_request(*metadata)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        return str(caught.value.details())

    def stream(self, count: int, *metadata: Metadata) -> list[Any]:
        """The parameters that the model saw, or the error text, for each request of one stream."""
        requests = iter([_request({})] * count)
        answers = self._stub.ModelStreamInfer(requests, metadata=metadata, timeout=DEADLINE)
        return [answer.error_message or _seen(answer.infer_response) for answer in answers]


def _request(parameters: dict[str, str]) -> Any:
    request = pb.ModelInferRequest(model_name="sees")
    for key, value in parameters.items():
        request.parameters[key].string_param = value
    return request


def _seen(answer: Any) -> Any:
    return json.loads(answer.raw_output_contents[0][4:])


@pytest.fixture(scope="module")
def sees(module_repository: RepositoryBuilder) -> RepositoryBuilder:
    module_repository.add("sees", MODEL, 'backend: "python"')
    return module_repository


@pytest.fixture(scope="module")
def endpoint(sees: RepositoryBuilder, module_serve: Serve) -> Iterator[Endpoint]:
    host = module_serve(sees, f"{FLAG}=^X-|tenant|timeout|triton_|user-agent").wait_started()
    endpoint = Endpoint(host)
    with endpoint.channel:
        yield endpoint


def test_keys_in_which_the_pattern_is_found_become_parameters(endpoint: Endpoint) -> None:
    seen = endpoint.send_request(("x-trace", "7"), ("the-tenant-id", "me"), ("other", "no"))
    agent = seen.pop("user-agent")
    assert agent.startswith("grpc-python/")
    assert seen == {"x-trace": "7", "the-tenant-id": "me"}


def test_a_forwarded_key_comes_before_a_parameter_of_that_name(endpoint: Endpoint) -> None:
    seen = endpoint.send_request(("x-a", "key"), **{"x-a": "parameter", "b": "stays"})
    assert (seen["x-a"], seen["b"]) == ("key", "stays")


def test_the_last_of_duplicate_keys_counts(endpoint: Endpoint) -> None:
    assert endpoint.send_request(("x-a", "1"), ("x-a", "2"))["x-a"] == "2"


def test_binary_keys_are_read_as_text(endpoint: Endpoint) -> None:
    assert endpoint.send_request(("x-a-bin", "é".encode()))["x-a-bin"] == "é"
    assert endpoint.send_request(("x-a-bin", b"\xff!"))["x-a-bin"] == "\N{REPLACEMENT CHARACTER}!"


@pytest.mark.parametrize("key", ["timeout", "triton_x", "triton_"])
def test_reserved_keys_cannot_be_forwarded(endpoint: Endpoint, key: str) -> None:
    assert endpoint.refusal((key, "1")) == RESERVED.format(key)
    assert endpoint.stream(2, (key, "1")) == [RESERVED.format(key)] * 2


def test_names_that_only_contain_a_reserved_one_are_forwarded(endpoint: Endpoint) -> None:
    assert endpoint.send_request(("x-timeout", "1"), ("timeouts", "2"))["x-timeout"] == "1"


def test_keys_of_a_stream_go_with_each_of_its_requests(endpoint: Endpoint) -> None:
    assert [seen["x-a"] for seen in endpoint.stream(3, ("x-a", "1"))] == ["1", "1", "1"]


@pytest.mark.parametrize(
    "key",
    [
        *("sequence_id", "sequence_start", "sequence_end", "priority", "timeout", "headers"),
        *("binary_data_output", "triton_grpc_error"),
    ],
)
def test_every_reserved_key_is_refused_if_the_pattern_finds_it(
    everything: Endpoint, key: str
) -> None:
    assert everything.refusal((key, "1")) == RESERVED.format(key)


@pytest.fixture(scope="module")
def everything(sees: RepositoryBuilder, module_serve: Serve) -> Iterator[Endpoint]:
    endpoint = Endpoint(module_serve(sees, f"{FLAG}=.*").wait_started())
    with endpoint.channel:
        yield endpoint


def test_case_matters_if_the_pattern_says_so(sees: RepositoryBuilder, serve: Serve) -> None:
    """Keys of gRPC are in lowercase, so this pattern finds none."""
    endpoint = Endpoint(serve(sees, f"{FLAG}=(?-i)X-").wait_started())
    with endpoint.channel:
        assert endpoint.send_request(("x-a", "1")) == {}


def test_without_a_pattern_nothing_is_forwarded(sees: RepositoryBuilder, serve: Serve) -> None:
    endpoint = Endpoint(serve(sees).wait_started())
    with endpoint.channel:
        assert endpoint.send_request(("x-a", "1"), ("timeout", "2")) == {}


def test_no_key_takes_long_to_match(sees: RepositoryBuilder, serve: Serve) -> None:
    """A matcher that backtracks would try 2^4000 ways; RE2 needs one walk over the key."""
    endpoint = Endpoint(serve(sees, f"{FLAG}=^(a+)+$").wait_started())
    with endpoint.channel:
        assert endpoint.send_request(("a" * 4000, "yes"))["a" * 4000] == "yes"
        assert endpoint.send_request(("a" * 4000 + "b", "no")) == {}


# HTTP


class HttpEndpoint:
    """The infer and generate endpoints, with headers as they are written here."""

    def __init__(self, host: RunningHost) -> None:
        self._address = host.http_url

    def send_request(
        self, *headers: tuple[str, bytes | str], endpoint: str = "infer", **body: Any
    ) -> Any:
        """The parameters that the model saw; the error text if the status is 400."""
        data = json.dumps({"inputs": [], **body} if endpoint == "infer" else body).encode()
        connection = http_client.HTTPConnection(self._address, timeout=DEADLINE)
        with closing(connection):
            connection.putrequest("POST", f"/v2/models/sees/{endpoint}", skip_accept_encoding=True)
            for name, value in headers:
                connection.putheader(name, value)
            connection.putheader("Content-Length", str(len(data)))
            connection.endheaders(data)
            answer = connection.getresponse()
            document = json.loads(answer.read())
        if answer.status != 200:
            assert answer.status == 400
            return document["error"]
        seen = document["outputs"][0]["data"][0] if endpoint == "infer" else document["SEEN"]
        return json.loads(seen)


@pytest.fixture(scope="module")
def http(sees: RepositoryBuilder, module_serve: Serve) -> HttpEndpoint:
    return HttpEndpoint(
        module_serve(
            sees, f"{HTTP_FLAG}=^x-|tenant|timeout|triton_|binary_data_output"
        ).wait_started()
    )


def test_headers_are_forwarded_under_the_names_that_the_client_wrote(http: HttpEndpoint) -> None:
    seen = http.send_request(
        ("X-Trace", "7"), ("The-TENANT", "me"), ("x-low", "l"), ("Other", "no")
    )
    assert seen == {"X-Trace": "7", "The-TENANT": "me", "x-low": "l"}


def test_a_forwarded_header_comes_before_a_parameter_of_that_name(http: HttpEndpoint) -> None:
    seen = http.send_request(("x-a", "header"), parameters={"x-a": "parameter", "b": 1})
    assert seen == {"x-a": "header", "b": 1}


def test_the_last_of_duplicate_headers_counts(http: HttpEndpoint) -> None:
    assert http.send_request(("X-A", "1"), ("X-A", "2")) == {"X-A": "2"}


def test_values_of_headers_are_read_as_utf_8(http: HttpEndpoint) -> None:
    assert http.send_request(("x-a", "é".encode())) == {"x-a": "é"}


@pytest.mark.parametrize("name", ["timeout", "triton_x", "binary_data_output"])
def test_reserved_headers_cannot_be_forwarded(http: HttpEndpoint, name: str) -> None:
    assert http.send_request((name, "1")) == RESERVED.format(name)


def test_reserved_names_in_another_case_are_forwarded(http: HttpEndpoint) -> None:
    assert http.send_request(("Timeout", "1")) == {"Timeout": "1"}


def test_generate_forwards_nothing(http: HttpEndpoint) -> None:
    assert http.send_request(("x-a", "1"), ("timeout", "2"), endpoint="generate") == {}


def test_case_of_http_headers_matters_if_the_pattern_says_so(
    sees: RepositoryBuilder, serve: Serve
) -> None:
    http = HttpEndpoint(serve(sees, f"{HTTP_FLAG}=(?-i)^X-").wait_started())
    assert http.send_request(("X-A", "1"), ("x-b", "2")) == {"X-A": "1"}


def test_http_and_grpc_have_their_own_patterns(sees: RepositoryBuilder, serve: Serve) -> None:
    host = serve(sees, f"{FLAG}=g", f"{HTTP_FLAG}=h").wait_started()
    assert HttpEndpoint(host).send_request(("g", "1"), ("h", "2"))["h"] == "2"
    endpoint = Endpoint(host)
    with endpoint.channel:
        seen = endpoint.send_request(("g", "1"), ("h", "2"))
    assert seen["g"] == "1"
    assert "h" not in seen
