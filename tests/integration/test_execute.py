"""Right and wrong behaviour of a model in `execute`, and the response of its client."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np
import pytest
import tritonclient.grpc as grpcclient

from tests.clients import Client, infer_error, run_command, tensor
from tests.conftest import MODELS, RepositoryBuilder, RunningHost, Serve


@pytest.fixture(scope="module")
def host(module_repository: RepositoryBuilder, module_serve: Serve) -> RunningHost:
    module_repository.copy("misbehave", "identity")
    return module_serve(module_repository).wait_started()


@pytest.fixture
def client(host: RunningHost) -> Iterator[Client]:
    with host.client() as client:
        yield client
        assert client.is_server_ready(), "a wrong request has made the server unready"
        assert run_command(client, "echo still here") == "still here"


def test_an_exception_becomes_the_callers_error_with_its_place(
    client: Client, host: RunningHost
) -> None:
    status, text = infer_error(run_command, client, "raises no such luck")
    assert status == "StatusCode.INTERNAL"
    assert text.startswith(
        "Failed to process the request(s) for model 'misbehave_0', message:"
        " ValueError: no such luck\n\nAt:\n  "
    )
    places = text.split("At:\n")[1].splitlines()
    source = (MODELS / "misbehave" / "1" / "model.py").read_text().splitlines()
    expected = {"raises": "raise ValueError(text)", "execute": "return getattr(self, name)"}
    for place, (function, line) in zip(places, expected.items(), strict=True):
        found = re.fullmatch(rf"  \S+/misbehave/1/model\.py\((\d+)\): {function}", place)
        assert found, place
        assert source[int(found[1]) - 1].strip().startswith(line)
    host.wait_for("ValueError: no such luck")


def test_sys_exit_is_an_error_of_its_request_only(client: Client) -> None:
    before = run_command(client, "pid")
    status, text = infer_error(run_command, client, "exits")
    assert status == "StatusCode.INTERNAL"
    assert "SystemExit: the model has had enough" in text
    assert run_command(client, "pid") == before


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        (
            "returns_tuple",
            "Expected a list in the execute return, found type '<class 'tuple'>'.",
        ),
        (
            "returns_too_many",
            (
                "Number of InferenceResponse objects do not match the number of InferenceRequest"
                " objects. InferenceRequest(s) size is:1, and InferenceResponse(s) size is:2\n"
            ),
        ),
        (
            "returns_number",
            (
                "Expected an 'InferenceResponse' object in the execute function return list, found"
                " type '<class 'int'>'."
            ),
        ),
    ],
)
def test_a_wrong_return_value_is_named(client: Client, what: str, expected: str) -> None:
    status, text = infer_error(run_command, client, what)
    assert status == "StatusCode.INTERNAL"
    assert text == (
        f"Failed to process the request(s) for model 'misbehave_0', message: {expected}"
    )


def test_a_request_left_without_an_answer_gets_an_error(client: Client) -> None:
    status, text = infer_error(run_command, client, "returns_none")
    assert status == "StatusCode.INTERNAL"
    assert "'misbehave_0' returned no response for this request" in text


def test_an_output_outside_the_configuration_is_dropped_and_logged_once(
    client: Client, host: RunningHost
) -> None:
    array = np.array([b"returns_unknown_output "], dtype=np.object_)
    for _ in range(2):
        result = client.infer("misbehave", [tensor("COMMAND", array)])
        assert len(result.get_response().outputs) == 0
    assert run_command(client, "echo after it") == "after it"
    warning = (
        "[misbehave:1] model 'misbehave' returned an output 'OTHER', which its configuration does"
        " not have; the configuration has: 'ANSWER'; the output is not sent"
    )
    host.wait_for(re.escape(warning))
    assert host.output.count(warning) == 1


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("UNKNOWN", "UNKNOWN"),
        ("INTERNAL", "INTERNAL"),
        ("NOT_FOUND", "NOT_FOUND"),
        ("INVALID_ARG", "INVALID_ARGUMENT"),
        ("UNAVAILABLE", "UNAVAILABLE"),
        ("UNSUPPORTED", "UNIMPLEMENTED"),
        ("ALREADY_EXISTS", "ALREADY_EXISTS"),
        ("CANCELLED", "CANCELLED"),
    ],
)
def test_an_error_response_keeps_its_code(client: Client, code: str, status: str) -> None:
    assert infer_error(run_command, client, f"returns_error {code}") == (
        f"StatusCode.{status}",
        "on purpose",
    )


def test_prints_and_log_lines_reach_the_host_at_once_with_their_instance(
    client: Client, host: RunningHost
) -> None:
    run_command(client, "prints from the model")
    host.wait_for(r"\[misbehave:1/misbehave_0\] from the model\n")
    host.wait_for(r"\[misbehave:1/misbehave_0\] from the model on stderr")
    host.wait_for(r"model.py:\d+\] \[misbehave:1/misbehave_0\] from the model by logger")


def test_only_requested_outputs_are_returned(client: Client) -> None:
    array = np.array([b"echo x"], dtype=np.object_)
    outputs = [grpcclient.InferRequestedOutput("ANSWER")]
    result = client.infer("misbehave", [tensor("COMMAND", array)], outputs=outputs)
    assert [output.name for output in result.get_response().outputs] == ["ANSWER"]


def test_wrong_requests_are_refused_with_what_was_expected(client: Client) -> None:
    good = np.zeros(3, dtype=np.float32)

    def refused(*inputs: grpcclient.InferInput, model: str = "identity", version: str = "") -> str:
        status, text = infer_error(client.infer, model, list(inputs), model_version=version)
        return f"{status.removeprefix('StatusCode.')}: {text}"

    unknown = "[request id: <id_unknown>] "
    assert refused(tensor("INPUT0", good.astype(np.int32))) == (
        f"INVALID_ARGUMENT: {unknown}inference input 'INPUT0' data-type is 'INT32', but model"
        " 'identity' expects 'FP32'"
    )
    assert refused(tensor("INPUT0", good.reshape(1, 3))).startswith(
        f"INVALID_ARGUMENT: {unknown}unexpected shape for input 'INPUT0' for model 'identity'."
        " Expected [-1], got [1,3]. "
    )
    assert refused(tensor("OTHER", good)) == (
        "INVALID_ARGUMENT: unexpected inference input 'OTHER' for model 'identity'"
    )
    assert refused(tensor("INPUT0", good), model="missing") == (
        "NOT_FOUND: Request for unknown model: 'missing' is not found"
    )
    assert refused(tensor("INPUT0", good), version="7") == (
        "NOT_FOUND: Request for unknown model: 'identity' version 7 is not found"
    )
    assert refused(tensor("INPUT0", good), version="x").startswith(
        "INVALID_ARGUMENT: failed to get model version from specified version string 'x'"
    )


def test_a_wrong_number_of_bytes_is_refused(client: Client) -> None:
    short = grpcclient.InferInput("INPUT0", [3], "FP32")
    short._raw_content = b"\0" * 8
    status, text = infer_error(client.infer, "identity", [short])
    assert (status, text) == (
        "StatusCode.INVALID_ARGUMENT",
        (
            "[request id: <id_unknown>] input byte size mismatch for input 'INPUT0' for model"
            " 'identity'. Expected 12, got 8"
        ),
    )


@pytest.mark.parametrize(
    "content",
    [b"\x05\0\0", b"\x05\0\0\0abc", b"", b"\x01\0\0\0a\x01\0\0\0b", b"\xff\xff\xff\xff"],
)
def test_malformed_strings_are_refused(client: Client, content: bytes) -> None:
    broken = grpcclient.InferInput("COMMAND", [1], "BYTES")
    broken._raw_content = content
    status, _ = infer_error(client.infer, "misbehave", [broken])
    assert status == "StatusCode.INVALID_ARGUMENT"


def test_a_huge_shape_takes_no_memory(client: Client) -> None:
    huge = grpcclient.InferInput("INPUT0", [2**62], "FP32")
    huge._raw_content = b"\0" * 8
    status, text = infer_error(client.infer, "identity", [huge])
    assert status == "StatusCode.INVALID_ARGUMENT"
    assert "INPUT0" in text


@pytest.mark.parametrize("count", [0, 1, 512, 513, 100_000, 4_000_000])
def test_arrays_of_any_size_come_back_as_they_went(client: Client, count: int) -> None:
    array = np.arange(count, dtype=np.float32)
    result = client.infer("identity", [tensor("INPUT0", array)]).as_numpy("OUTPUT0")
    np.testing.assert_array_equal(result, array)
