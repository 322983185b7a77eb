"""Canary and shadow versions on a real host: who answers, what is compared, what is counted."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from google.protobuf import json_format

from tests.clients import infer_error, infer_through, tensor
from tests.conftest import DEADLINE, RepositoryBuilder, RunningHost, Serve, wait_until
from tests.openai_models import Reply, send

MODEL = """
import os
import threading

import numpy as np
import triton_python_backend_utils as pb_utils

GATE = GATE_PATH


class TritonPythonModel:
    def initialize(self, args):
        self.version = int(args["model_version"])

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        x = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()
        if self.version == 2:
            if x[0] == 1:
                x = x + np.float32(1)
            elif x[0] == 2:
                raise ValueError("version 2 does not like 2")
            elif x[0] == 3:
                while not os.path.exists(GATE):
                    threading.Event().wait(0.01)
            elif x[0] == 4:
                x = x + np.float32(1e-6)
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", x)])
"""
CONFIG = """
backend: "python"
version_policy { all {} }
input [ { name: "INPUT0", data_type: TYPE_FP32, dims: [ -1 ] } ]
output [ { name: "OUTPUT0", data_type: TYPE_FP32, dims: [ -1 ] } ]
"""
STATEFUL = """
max_batch_size: 16
sequence_batching {
  oldest { max_candidate_sequences: 16 } max_sequence_idle_microseconds: 600000000
}
parameters { key: "CANARY" value { string_value: "2:50" } }
"""
ENSEMBLE = """
platform: "ensemble"
input [ { name: "INPUT0", data_type: TYPE_FP32, dims: [ -1 ] } ]
output [ { name: "OUTPUT0", data_type: TYPE_FP32, dims: [ -1 ] } ]
ensemble_scheduling { step [ { model_name: "NAME" model_version: -1
  input_map { key: "INPUT0" value: "INPUT0" } output_map { key: "OUTPUT0" value: "OUTPUT0" } } ] }
"""


@pytest.fixture(scope="module")
def gate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gate") / "open"


@pytest.fixture(scope="module")
def host(module_repository: RepositoryBuilder, module_serve: Serve, gate: Path) -> RunningHost:
    source = MODEL.replace("GATE_PATH", repr(str(gate)))
    for name, more in (
        ("canary", 'parameters { key: "CANARY" value { string_value: "2:25" } }\n'),
        ("shadow", 'parameters { key: "SHADOW" value { string_value: "2:100" } }\n'),
        ("plain", ""),
        ("stateful", STATEFUL),
    ):
        module_repository.add(name, source, CONFIG + more, files={"2/model.py": source})
    module_repository.add(
        "through", None, ENSEMBLE.replace("NAME", "canary"), files={"1/.keep": ""}
    )
    module_repository.copy("ask")
    flags = ("--model-control-mode=explicit", "--load-model=*")
    return module_serve(module_repository, *flags).wait_started()


def ask(host: RunningHost, model: str, *numbers: float, **options: Any) -> list[str]:
    """The versions that answer these numbers, each in a request of its own."""
    with host.client() as client:
        return [
            client.infer(
                model, [tensor("INPUT0", np.array([number], np.float32))], **options
            ).get_response().model_version
            for number in numbers
        ]  # fmt: skip


def traffic(host: RunningHost, model: str, change: object = None) -> Reply:
    method = "GET" if change is None else "POST"
    return send(host, method, f"/v2/models/{model}/traffic", change)


def requests(host: RunningHost, model: str) -> dict[tuple[int, str], int]:
    counts = traffic(host, model).json["requests"]
    return {(entry["version"], entry["role"]): entry["count"] for entry in counts}


def comparisons(host: RunningHost, model: str) -> dict[str, int]:
    return {entry["result"]: entry["count"] for entry in traffic(host, model).json["comparisons"]}


def test_a_share_of_the_requests_goes_to_the_canary(host: RunningHost) -> None:
    before = Counter(requests(host, "canary"))
    assert Counter(ask(host, "canary", *[0] * 20)) == {"1": 15, "2": 5}
    body = {"inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [1], "data": [0]}]}
    replies = [send(host, "POST", "/v2/models/canary/infer", body).json for _ in range(8)]
    assert Counter(reply["model_version"] for reply in replies) == {"1": 6, "2": 2}
    counted = Counter(requests(host, "canary")) - before
    assert counted == {(1, "stable"): 21, (2, "canary"): 7}
    with urlopen(f"http://{host.metrics_url}/metrics", timeout=DEADLINE) as page:
        text = page.read().decode()
    assert 'pbhost_split_requests_total{model="canary",role="canary",version="2"}' in text


def test_requests_that_name_a_version_and_ensembles_are_not_split(host: RunningHost) -> None:
    before = requests(host, "canary")
    assert set(ask(host, "canary", *[0] * 4, model_version="2")) == {"2"}
    assert set(ask(host, "canary", *[0] * 4, model_version="1")) == {"1"}
    with host.client() as client:
        array = np.array([1], np.float32)  # version 2 would add to it
        for _ in range(4):
            result = client.infer("through", [tensor("INPUT0", array)])
            assert result.as_numpy("OUTPUT0").tolist() == [1]
    assert requests(host, "canary") == before


def test_requests_of_models_are_split(host: RunningHost) -> None:
    before = Counter(requests(host, "canary"))
    with host.client() as client:
        for _ in range(4):
            infer_through(client, "canary", np.array([0], np.float32))
    assert Counter(requests(host, "canary")) - before == {(1, "stable"): 3, (2, "canary"): 1}


def test_the_shares_change_while_the_server_runs(host: RunningHost) -> None:
    none: dict[str, Any] = {
        "stable": 2,
        "canary": None,
        "shadow": None,
        "requests": [],
        "comparisons": [],
    }
    assert traffic(host, "plain").json == none
    assert set(ask(host, "plain", *[0] * 4)) == {"2"}
    reply = traffic(host, "plain", {"canary": {"version": 2, "percent": 50}})
    assert (reply.status, reply.json["stable"]) == (200, 1)
    assert reply.json["canary"] == {"version": 2, "percent": 50.0}
    assert Counter(ask(host, "plain", *[0] * 4)) == {"1": 2, "2": 2}
    traffic(host, "plain", {"canary": {"version": 1, "percent": 100}})
    assert set(ask(host, "plain", *[0] * 4)) == {"1"}
    assert traffic(host, "plain", {"shadow": {"version": 1, "percent": 1}}).json["canary"]
    assert traffic(host, "plain", {"canary": None, "shadow": None}).json["stable"] == 2
    assert set(ask(host, "plain", *[0] * 4)) == {"2"}


def test_a_load_with_a_configuration_sets_the_shares_and_keeps_the_processes(
    host: RunningHost,
) -> None:
    def load(canary: str = "") -> None:
        config = json_format.MessageToDict(
            client.get_model_config("plain").config, preserving_proto_field_name=True
        )
        config["parameters"] = {"CANARY": {"string_value": canary}} if canary else {}
        client.load_model("plain", config=json.dumps(config))

    stubs = {stub.pid for stub in host.stubs()}
    with host.client() as client:
        load("2:50")
        assert Counter(ask(host, "plain", *[0] * 4)) == {"1": 2, "2": 2}
        traffic(host, "plain", {"canary": {"version": 2, "percent": 100}})
        client.load_model("plain")  # without a configuration: what was set stays
        assert set(ask(host, "plain", *[0] * 4)) == {"2"}
        load("1:25")
        state = traffic(host, "plain").json
        assert (state["stable"], state["canary"]) == (2, {"version": 1, "percent": 25.0})
        load()
        assert set(ask(host, "plain", *[0] * 4)) == {"2"}
    assert traffic(host, "plain").json["canary"] is None
    assert {stub.pid for stub in host.stubs()} == stubs


def test_shares_are_changed_only_where_models_can_be_loaded(
    serve: Serve, repository: RepositoryBuilder
) -> None:
    repository.copy("identity")
    host = serve(repository).wait_started()
    reply = traffic(host, "identity", {"canary": None})
    assert (reply.status, reply.json) == (
        503,
        {
            "error": "the shares of model 'identity' can be changed only with"
            " --model-control-mode=explicit or on-demand"
        },
    )
    assert traffic(host, "identity").json["stable"] == 1


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"canary": {"version": 3, "percent": 1}}, "no ready version 3; ready are 1, 2"),
        ({"canary": {"version": 2, "percent": 0}}, "the percentage must be above 0 and up to 100"),
        ({"shadow": {"version": 2, "percent": 101}}, "the percentage must be above 0"),
        ({"canary": {"version": "2", "percent": 1}}, 'expected {"canary": {"version": N'),
        ({"canery": None}, "unknown field `canery`"),
        (b"{", 'expected {"canary": {"version": N'),
    ],
)
def test_an_invalid_change_is_refused(host: RunningHost, change: object, complaint: str) -> None:
    before = traffic(host, "canary").json
    reply = traffic(host, "canary", change)
    assert reply.status == 400 and complaint in reply.json["error"]
    assert traffic(host, "canary").json == before
    assert traffic(host, "absent").status == 404


def test_answers_of_the_shadow_are_compared_and_not_returned(host: RunningHost, gate: Path) -> None:
    before = Counter(comparisons(host, "shadow"))
    with host.client() as client:
        for number in (0, 1, 2, 3, 4):  # the shadow of 3 waits
            array = np.full(2, number, np.float32)
            result = client.infer("shadow", [tensor("INPUT0", array)])
            assert result.as_numpy("OUTPUT0").tolist() == array.tolist()
            assert result.get_response().model_version == "1"
        failed = infer_error(client.infer, "shadow", [tensor("INPUT0", np.zeros(1, np.int32))])
        assert failed[0] == "StatusCode.INVALID_ARGUMENT"
    gate.touch()
    expected = {"equal": 3, "different": 1, "failed": 1}
    wait_until(
        lambda: Counter(comparisons(host, "shadow")) - before == expected,
        "all comparisons",
        state=lambda: comparisons(host, "shadow"),
    )
    assert requests(host, "shadow")[(2, "shadow")] == 5


def test_large_outputs_are_compared(host: RunningHost) -> None:
    before = Counter(comparisons(host, "shadow"))
    with host.client() as client:
        for number in (0, 1):
            array = np.full(100_000, number, np.float32)
            client.infer("shadow", [tensor("INPUT0", array)])
    expected = {"equal": 1, "different": 1}
    wait_until(lambda: Counter(comparisons(host, "shadow")) - before == expected, "comparisons")


def test_a_sequence_keeps_its_version(host: RunningHost) -> None:
    def one(key: int, start: bool = False, end: bool = False) -> str:
        options = {"sequence_id": key, "sequence_start": start, "sequence_end": end}
        given = tensor("INPUT0", np.zeros((1, 1), np.float32))
        with host.client() as client:
            version: str = client.infer("stateful", [given], **options).get_response().model_version
        return version

    chosen = {key: one(key, start=True) for key in range(1, 13)}
    assert set(chosen.values()) == {"1", "2"}
    traffic(host, "stateful", {"canary": {"version": 2, "percent": 100}})
    assert {key: one(key) for key in chosen} == chosen
    assert {key: one(key, end=True) for key in chosen} == chosen
    assert {key: one(key, start=True, end=True) for key in chosen} == dict.fromkeys(chosen, "2")


def test_a_split_ensemble_has_the_labels_that_its_step_model_has_now(
    serve: Serve, repository: RepositoryBuilder
) -> None:
    before, name, after = CONFIG.partition('name: "OUTPUT0"')
    labelled = f'{before}{name}, label_filename: "labels.txt"{after}'
    source = MODEL.replace("GATE_PATH", "''")
    repository.add("member", source, labelled, files={"labels.txt": "cat\ndog\n"})
    share = 'version_policy { all {} }\nparameters { key: "CANARY" value { string_value: "2:50" } }'
    config = ENSEMBLE.replace("NAME", "member") + share
    repository.add("split", None, config, files={"1/.keep": "", "2/.keep": ""})
    host = serve(repository, "--model-control-mode=explicit", "--load-model=*").wait_started()
    with host.client() as client:

        def classes(version: str) -> list[bytes]:
            given = tensor("INPUT0", np.array([5, 6], np.float32))
            wanted = grpcclient.InferRequestedOutput("OUTPUT0", class_count=1)
            result = client.infer("split", [given], version, outputs=[wanted])
            return list(result.as_numpy("OUTPUT0"))

        assert classes("") == classes("1") == [b"6.000000:1:dog"]
        repository.write(repository.path / "member" / "labels.txt", "CAT\nDOG\n")
        client.load_model("member")
        assert classes("") == classes("1") == [b"6.000000:1:DOG"]


def test_an_invalid_parameter_fails_the_load(serve: Serve, repository: RepositoryBuilder) -> None:
    share = 'parameters { key: "CANARY" value { string_value: "2:200" } }'
    repository.add("wrong", MODEL.replace("GATE_PATH", "''"), CONFIG + share)
    host = serve(repository)
    host.wait_for(
        "parameter 'CANARY' of model 'wrong' must be <version>:<percent>, with a percentage above 0"
        " and up to 100, got '2:200'"
    )
    assert host.process.wait(DEADLINE) == 1
